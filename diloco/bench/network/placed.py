"""What crosses the line of each site: one syncer at the core, or one at each site.

Real runs (`diloco local`) on emulated stars, where each island's line has counters: all that its
site sends and receives. A run of more rounds less one of fewer, by rounds, leaves the founding, the
joins and the end out. With a syncer at each of M sites and equal shares each line has to carry,
each way, (M - 1)/M of the coded bytes of a contribution and of a version: what a reduce-scatter and
an all-gather of the same bytes move, here with the headers of TCP in packets of 1,500 bytes.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.bench.network.emulating import network_toml, run_watched
from diloco.config.load import load_config
from diloco.errors import IslandFailed
from diloco.forecast.forecast import forecast
from diloco.report.rows import Column, Report, Requirement, Watch

#: Bytes of a full packet on the line, and of those what TCP carries.
_PACKET, _PAYLOAD = 1514, 1448
_ROUND = 4
_RUN = """
[run]
name = "placed"
seed = 1
inner_steps = {steps}
{state}
[model]
preset = "tiny"
dim = {dim}
ffn_dim = {ffn_dim}
[data]
sequence_length = 32
[inner.optimizer]
lr = 1e-3
warmup_steps = 2
[outer]
preset = "streaming"
inner_steps_per_round = {round}
num_fragments = {fragments}
uplink_codec = "int4"
downlink_codec = "int4"
round_deadline = "120s"
[coordinator]
state_dir = "{place}/state"
[evaluation]
num_sequences = 1
"""
_COLUMNS = (
    Column("sites", "sites", ",d"),
    Column("place", "syncers"),
    Column("line", "line"),
    Column("ideal_mb", "ideal a round, MB", ".3f"),
    Column("out_mb", "out, MB", ".3f"),
    Column("in_mb", "in, MB", ".3f"),
    Column("ratio", "most / ideal", ".3f"),
)


@dataclass(frozen=True, slots=True)
class PlacedSetting:
    """What is measured.

    Attributes:
        sites: Numbers of sites, each with an island.
        dim: Of the model, which has a fragment a site.
        rounds: Of the shorter run, and of the longer one.
        bandwidth: Of each line.
        delay_ms: Of each line, one way.
        most: Bar of the bytes of a line over the ideal.
    """

    sites: tuple[int, ...] = (2, 4)
    dim: int = 256
    rounds: tuple[int, int] = (3, 11)
    bandwidth: str = "200Mbit/s"
    delay_ms: float = 10.0
    most: float = 1.05


def run(watch: Watch, *, setting: PlacedSetting | None = None) -> Report:
    """Measure every number of sites, with one syncer and with one a site.

    Raises:
        ConfigError: If networks cannot be emulated here.
        IslandFailed: If a run failed.
    """
    setting = setting or PlacedSetting()
    results: list[dict[str, Any]] = []
    requirements: list[Requirement] = []
    digests: dict[int, list[Any]] = {}
    kinds = [(sites, is_placed) for sites in setting.sites for is_placed in (False, True)]
    for number, (sites, is_placed) in enumerate(kinds):
        what = f"{sites} sites, {'a syncer each' if is_placed else 'one syncer'}"
        look = functools.partial(watch, what, number, len(kinds))
        few, many = (
            _measured(setting, sites, is_placed, rounds, look) for rounds in setting.rounds
        )
        digests.setdefault(sites, []).append(many["published"])
        rounds = setting.rounds[1] - setting.rounds[0]
        for line in sorted(few["carried"]):
            ways = {
                way: (many["carried"][line][way] - few["carried"][line][way]) / rounds
                for way in ("up", "down")
            }
            ideal = few["coded"] * (sites - 1) / sites * _PACKET / _PAYLOAD
            results.append(
                {
                    "sites": sites,
                    "place": "at each site" if is_placed else "one, at the core",
                    "line": line,
                    "ideal_mb": ideal / 1e6,
                    "out_mb": ways["up"] / 1e6,
                    "in_mb": ways["down"] / 1e6,
                    "ratio": max(ways.values()) / ideal,
                }
            )
        if is_placed:
            own = [row["ratio"] for row in results if row["sites"] == sites][sites:]
            requirements.append(
                Requirement(
                    f"{sites} sites: bytes of the fullest line", max(own), setting.most, "x"
                )
            )
    differing = sum(one != other for one, other in digests.values())
    requirements.append(Requirement("numbers of sites whose digests differ", differing, 0, ""))
    described = {"rounds": list(setting.rounds), "line": setting.bandwidth}
    return Report("placed", described, _COLUMNS, results, requirements)


def _measured(
    setting: PlacedSetting, sites: int, is_placed: bool, rounds: int, on_look: Any
) -> Mapping[str, Any]:
    """Run once; gives what each line carried, coded bytes a round both ways, what is published."""
    names = [f"site-{number}" for number in range(sites)]
    with tempfile.TemporaryDirectory(prefix="diloco-bench-placed-") as directory:
        place = Path(directory)
        text = _RUN.format(
            steps=rounds * _ROUND,
            round=_ROUND,
            dim=setting.dim,
            ffn_dim=4 * setting.dim,
            fragments=sites,
            place=place,
            state=f'state = "file://{place}/objects"' if is_placed else "",
        )
        text += "".join(f"[syncers.{name}]\n" for name in names if is_placed)
        text += "".join(
            f"[islands.{name}]\nranks = 1\ntokens_per_inner_step = 32\n" for name in names
        )
        run_file, wan_file = place / "run.toml", place / "wan.toml"
        run_file.write_text(text)
        wan_file.write_text(network_toml(setting.bandwidth, setting.delay_ms, names))
        record = _carried(run_file, wan_file, on_look)
        planned = forecast(load_config(run_file))
        coded = sum(each.bytes_up + each.bytes_down for each in planned.fragments)
        return {"carried": record, "coded": coded, "published": _published(place / "state")}


def _carried(run_file: Path, wan_file: Path, on_look: Any) -> dict[str, dict[str, int]]:
    place = run_file.parent
    command = [sys.executable, "-m", "diloco", "emulate", str(wan_file)]
    command += ["--json", str(place / "record.json"), "--", "diloco", "local", str(run_file)]
    code, words = run_watched(command, place / "words.log", on_look)
    if code:
        raise IslandFailed(f"diloco local failed, exit code {code}: {words}")
    found: dict[str, dict[str, int]] = {}
    for each in json.loads((place / "record.json").read_text())["carried"]:
        found.setdefault(each["link"], {})[each["way"]] = each["bytes"]
    return found


def _published(state: Path) -> Sequence[Any]:
    """Read the digests of the last versions, as every island has them."""
    summary = json.loads((state / "summary.json").read_text())
    return [each["digests"] for each in summary["islands"]]
