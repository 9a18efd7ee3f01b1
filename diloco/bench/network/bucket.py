"""What a round costs the syncer's line, by the number of islands: payloads direct, or by bucket.

Real runs (`diloco local`) on an emulated star whose core has the coordinator and an S3 server
(moto); the syncer is at a site of its own, and its line has counters. A run of more rounds less one
of fewer, by rounds, leaves the founding, the joins and the end out. Besides payloads the line
carries what is durable: each version's frame goes to the bucket, with what it was made of where
that did not come from there.

    ideal    of payloads by bucket: the version to islands, and once more in its frame
    acks     TCP packets that only say what has come, counted by the relay of the emulated line.
             What comes grows with the islands on any way, so these do; they are in what is judged

Payloads are of a size next to which words are small: 3 MB a lane.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.bench.network.emulating import measure_inside, network_toml
from diloco.bench.network.s3_server import BUCKET, s3_server
from diloco.config.load import load_config
from diloco.errors import IslandFailed
from diloco.extras import require
from diloco.forecast.forecast import forecast
from diloco.launch.process.emulated import Emulated
from diloco.report.rows import Column, Report, Requirement, Watch

_HUB = "hub"
#: Netem does not see what a packet is.
_COUNTED = 'delay_by = "relay"\n'
_ROUND = 4
_RUN = """
[run]
name = "bucket"
seed = 1
inner_steps = {steps}
state = "s3://{bucket}/run"
[model]
preset = "tiny"
dim = {dim}
ffn_dim = {ffn_dim}
[data]
sequence_length = 32
[inner.optimizer]
name = "adamw"
lr = 1e-3
warmup_steps = 2
[outer]
preset = "streaming"
inner_steps_per_round = {round}
num_fragments = 2
num_lanes = 1
uplink_codec = "int4"
downlink_codec = "int4"
snapshot_rounds = 64
round_deadline = "300s"
[coordinator]
state_dir = "{place}/state"
[transport]
payloads = "{payloads}"
[evaluation]
num_sequences = 1
[syncers.{hub}]
"""
_COLUMNS = (
    Column("payloads", "payloads"),
    Column("islands", "islands", ",d"),
    Column("ideal_mb", "ideal a round, MB", ".3f"),
    Column("out_mb", "syncer sends, MB", ".3f"),
    Column("ack_mb", "of it acks, MB", ".3f"),
    Column("in_mb", "receives, MB", ".3f"),
)


@dataclass(frozen=True, slots=True)
class BucketSetting:
    """What is measured.

    Attributes:
        islands: Numbers of islands, few and many.
        dim: Of the model, which has two fragments of a lane each.
        rounds: Of the shorter run, and of the longer one.
        bandwidth: Of each line.
        delay_ms: Of each line, one way.
        most: Bar of what the syncer sends with many islands over that with few.
    """

    islands: tuple[int, int] = (2, 16)
    dim: int = 640
    rounds: tuple[int, int] = (1, 4)
    bandwidth: str = "200Mbit/s"
    delay_ms: float = 10.0
    most: float = 1.1


def run(watch: Watch, *, setting: BucketSetting | None = None) -> Report:
    """Measure with few islands and with many, payloads direct and by bucket.

    Raises:
        ConfigError: If networks cannot be emulated here, or moto is not installed.
        IslandFailed: If a run failed.
    """
    require("an S3 server of this machine", "moto")
    setting = setting or BucketSetting()
    results: list[dict[str, Any]] = []
    digests: dict[int, set[str]] = {}
    kinds = [(payloads, num) for payloads in ("direct", "bucket") for num in setting.islands]
    for number, (payloads, islands) in enumerate(kinds):
        what = f"{islands} islands, {payloads}"
        look = functools.partial(watch, what, number, len(kinds))
        few, many = (_measured(setting, islands, payloads, n, look) for n in setting.rounds)
        digests.setdefault(islands, set()).add(json.dumps(many["published"]))
        rounds = setting.rounds[1] - setting.rounds[0]
        out, acks, into = (
            (many["carried"][way][what] - few["carried"][way][what]) / rounds / 1e6
            for way, what in (("up", "bytes"), ("up", "ack_bytes"), ("down", "bytes"))
        )
        ideal = 2 * few["down"] / 1e6
        results.append(
            {
                "payloads": payloads,
                "islands": islands,
                "ideal_mb": ideal,
                "out_mb": out,
                "in_mb": into,
                "ack_mb": acks,
            }
        )
    by_bucket = [row["out_mb"] for row in results if row["payloads"] == "bucket"]
    ratio = by_bucket[1] / by_bucket[0]
    few_islands, many_islands = setting.islands
    what = f"by bucket: sent with {many_islands} islands over {few_islands}"
    differing = sum(len(found) > 1 for found in digests.values())
    requirements = [
        Requirement(what, ratio, setting.most, "x"),
        Requirement("numbers of islands whose digests differ", differing, 0, ""),
    ]
    described = {"rounds": list(setting.rounds), "line": setting.bandwidth}
    return Report("bucket", described, _COLUMNS, results, requirements)


def _measured(
    setting: BucketSetting,
    islands: int,
    payloads: str,
    rounds: int,
    on_look: Callable[[], None],
) -> Mapping[str, Any]:
    """Run once; gives what the syncer's line carried, coded bytes down, and what is published."""
    names = [f"site-{number}" for number in range(islands)]
    with tempfile.TemporaryDirectory(prefix="diloco-bench-bucket-") as directory:
        place = Path(directory)
        text = _RUN.format(
            steps=rounds * _ROUND,
            round=_ROUND,
            bucket=BUCKET,
            dim=setting.dim,
            ffn_dim=4 * setting.dim,
            place=place,
            payloads=payloads,
            hub=_HUB,
        )
        text += "".join(
            f"[islands.{name}]\nranks = 1\ntokens_per_inner_step = 32\n" for name in names
        )
        run_file = place / "run.toml"
        run_file.write_text(text)
        network = _COUNTED + network_toml(setting.bandwidth, setting.delay_ms, [_HUB, *names])
        found, record = measure_inside(
            f"{islands} islands", network, __name__, str(run_file), place, on_look
        )
        carried = {e["way"]: e for e in record["carried"] if e["link"] == _HUB}
        planned = forecast(load_config(run_file))
        down = sum(each.bytes_down for each in planned.fragments)
        return {"carried": carried, "down": down, "published": found["published"]}


def inside(run_file: str, emulated: Emulated, place: Path) -> Any:
    """Run it, with a bucket at the core; called in its namespace."""
    host = emulated.description["coordinator"]
    with s3_server(place / "s3.log", host) as server, (place / "run.log").open("wb") as log:
        told = (f"{key}={value}" for key, value in server.environment.items())
        command = ["env", *told, sys.executable, "-m", "diloco", "local", run_file]
        ended = subprocess.run(command, stdout=log, stderr=log)
    if ended.returncode:
        raise IslandFailed((place / "run.log").read_text(errors="replace")[-2000:])
    summary = json.loads((place / "state" / "summary.json").read_text())
    return {"published": [each["digests"] for each in summary["islands"]]}
