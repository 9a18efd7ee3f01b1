"""All-reduce of gradients against DiLoCo: same model, tokens and links, by time, bytes and loss.

Two islands of two ranks train a Llama of 0.9M parameters (3.6 MB of gradients in float32) on the
same text, `diloco baseline` sums gradients in every inner step, `diloco local` exchanges
pseudo-gradients every H. Links are shaped in the process, or emulated (network namespaces), where
packets get lost, too: there coordinator and syncer stand at the first island.

Ideal times are those of `diloco.baseline.time_model`.

Source: DiLoCo (arXiv 2311.08105), Algorithm 1; Streaming DiLoCo (arXiv 2501.18512), overlap.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diloco.bench.network.emulating import (
    ISLANDS,
    LinkRow,
    check_text,
    measure_inside,
    run_watched,
)
from diloco.bench.run_values import run_values
from diloco.bench.training.race_plot import write_plot
from diloco.config.load import resolved_toml
from diloco.config.schema import Config
from diloco.errors import ConfigError, IslandFailed
from diloco.launch.process.emulated import Emulated
from diloco.report.rows import Column, Report, Requirement, Watch, matching

FLAT, HIERARCHICAL = "flat", "hierarchical"
DILOCO, STREAMING = "diloco-float32", "streaming-int4"
METHODS = (FLAT, HIERARCHICAL, DILOCO, STREAMING)
_BASELINES = (FLAT, HIERARCHICAL)
_RANKS = 2

_COLUMNS = (
    Column("method", "method"),
    Column("wall_s", "wall, s", ".1f"),
    Column("faster", "faster", ".2f"),
    Column("utilisation", "utilisation", ".3f"),
    Column("megabytes_up", "up, MB", ",.2f"),
    Column("megabytes_down", "down, MB", ",.2f"),
    Column("nats_per_byte", "held-out loss", ".4f"),
    Column("loss_ratio", "loss ratio", ".4f"),
)


@dataclass(frozen=True, slots=True)
class RaceSetting:
    """What is trained, and where.

    Attributes:
        links: The same ways to train on each.
        inner_steps: Of every run.
        inner_steps_per_round: H.
        num_fragments: P of streaming.
        overlap_steps: tau of streaming.
        momentum: Of the outer step; 0.9 is of the last ten rounds, and these runs have twenty from
            their first inner step on.
        sequences: Of an island and inner step.
        sequence_length: Bytes.
        chunk: Of an all-reduce: small enough that phases overlap, and that filling the last one up
            adds little to what crosses.
        model: Section [model] of a run file.
        evaluation_sequences: Held out. `diloco local` also evaluates before the last exchange, and
            its wall time has that in it.
        lr: Peak rate of AdamW.
        at_most_loss: Loss of streaming over that of hierarchical all-reduce.
        is_loss_judged: Whether that has a bar: few inner steps say little of learning.
    """

    links: tuple[LinkRow, ...]
    inner_steps: int = 200
    inner_steps_per_round: int = 10
    num_fragments: int = 4
    overlap_steps: int = 2
    momentum: float = 0.6
    sequences: int = 8
    sequence_length: int = 64
    chunk: str = "512KiB"
    model: Mapping[str, Any] = field(default_factory=lambda: {"preset": "debug"})
    evaluation_sequences: int = 128
    lr: float = 2e-3
    at_most_loss: float = 1.05
    is_loss_judged: bool = True


_LINKS = (
    LinkRow("1G-1ms", "1Gbit/s", 1),
    LinkRow("1G-20ms", "1Gbit/s", 20),
    LinkRow("100M-60ms", "100Mbit/s", 60, is_judged=True),
)
_LOSSY = tuple(
    LinkRow(f"{link.name}-0.1%", link.bandwidth, link.rtt_ms, loss=0.001) for link in _LINKS
)
SETTING = RaceSetting(_LINKS + _LOSSY)
QUICK = RaceSetting((_LINKS[2],), inner_steps=60, is_loss_judged=False)


def chosen_links(
    setting: RaceSetting, patterns: Sequence[str], *, is_emulated: bool
) -> tuple[LinkRow, ...]:
    """Give the links that match any of `patterns`.

    Args:
        setting: Of the bench.
        patterns: Names with `*` and `?`; none: all that can be had.
        is_emulated: Whether packets can get lost.

    Raises:
        ConfigError: If a pattern matches none, or only such as need an emulated network.
    """
    offered = [link for link in setting.links if is_emulated or not link.loss]
    names = [link.name for link in offered]
    for pattern in patterns:
        lossy = fnmatch.filter([link.name for link in setting.links], pattern)
        if lossy and not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"--rows {pattern}: {lossy[0]} loses packets, and TCP's answer to that is the "
                f"kernel's: add --emulate (root), or take {lossy[0].removesuffix('-0.1%')}"
            )
    wanted = matching(names, patterns, what="link")
    return tuple(link for link in offered if link.name in wanted)


def run(
    watch: Watch,
    rows: Sequence[str] = (),
    *,
    quick: bool = False,
    emulate: bool = False,
    plot: str = "",
    setting: RaceSetting | None = None,
) -> Report:
    """Train everything on every link whose name matches, and judge.

    Args:
        watch: See `Watch`.
        rows: See `chosen_links`.
        quick: Whether one link and few steps are enough.
        emulate: Whether links are made of network namespaces, which needs root.
        plot: Where a picture goes; empty: none is drawn.
        setting: What is trained, in place of that.

    Raises:
        ConfigError: If networks cannot be emulated here.
        IslandFailed: If a run failed.
    """
    setting = setting or (QUICK if quick else SETTING)
    links = chosen_links(setting, rows, is_emulated=emulate)
    results: list[dict[str, Any]] = []
    requirements: list[Requirement] = []
    total = len(links) * len(METHODS)
    for number, link in enumerate(links):
        before = number * len(METHODS)

        def look(method: str, done: int, link: LinkRow = link, before: int = before) -> None:
            watch(f"{link.name} {method}".strip(), before + done, total)

        found, check = _measure(setting, link, emulate, look)
        of_link = _rows(link, found)
        table = f"{link.name}, check of the network: {check}" if emulate else link.name
        results += [{**row, "table": table, "check": check} for row in of_link]
        if link.is_judged:
            requirements += _requirements(setting, of_link)
    if plot:
        write_plot(results, Path(plot))
    described = {**asdict(setting), "links": [asdict(link) for link in links], "ranks": _RANKS}
    described["shaped"] = "emulated" if emulate else "in the process"
    described["tokens"] = (
        len(ISLANDS) * setting.inner_steps * setting.sequences * setting.sequence_length
    )
    return Report("race", described, _COLUMNS, results, requirements)


def _measure(
    setting: RaceSetting, link: LinkRow, is_emulated: bool, on_look: Callable[[str, int], None]
) -> tuple[dict[str, Any], str]:
    """Make all runs on one link; empty where the link is not as specified, which is the text."""
    with tempfile.TemporaryDirectory(prefix="diloco-bench-race-") as directory:
        place = Path(directory)
        order = run_order(setting, None if is_emulated else link, place)
        if not is_emulated:
            return inside(order, None, place, on_look), "-"
        look = functools.partial(on_look, "", 0)
        found, record = measure_inside(link.name, link.toml, __name__, order, place, look)
        return found, check_text(record["check"])


def run_order(setting: RaceSetting, link: LinkRow | None, place: Path) -> dict[str, Any]:
    """Write down the runs of one link for `inside`; None: nothing is shaped by us."""
    order = {}
    for method in METHODS:
        is_baseline = method in _BASELINES
        config = race_config(setting, method, place / method, link)
        options = ["--name", method, "--out", str(place / method), "--chunk", setting.chunk]
        order[method] = {
            "words": ["baseline" if is_baseline else "local"],
            "options": options if is_baseline else [],
            "toml": resolved_toml(config),
        }
    return order


def race_config(setting: RaceSetting, method: str, state_dir: Path, link: LinkRow | None) -> Config:
    """Give the run of one method; baselines read no [outer], and have that of classic DiLoCo."""
    outer: dict[str, Any] = {
        "preset": "classic",
        "inner_steps_per_round": setting.inner_steps_per_round,
        "uplink_codec": "float32",
        "downlink_codec": "float32",
        "optimizer": {"lr": 0.7, "momentum": setting.momentum, "momentum_ramp_rounds": 0},
    }
    if method == STREAMING:
        outer["optimizer"]["momentum_ramp_rounds"] = 5
        outer |= {
            "preset": "streaming",
            "num_fragments": setting.num_fragments,
            "overlap_steps": setting.overlap_steps,
            "uplink_codec": "int4",
            "downlink_codec": "int4",
        }
    values = run_values(
        f"race-{method}",
        setting.model,
        outer,
        inner_steps=setting.inner_steps,
        sequence_length=setting.sequence_length,
        tokens=setting.sequences * setting.sequence_length,
        islands=ISLANDS,
        island={"ranks": _RANKS, "mesh": {"dp_shard": _RANKS}},
        state_dir=state_dir,
        inner={
            "optimizer": {
                "name": "adamw",
                "lr": setting.lr,
                "warmup_steps": setting.inner_steps // 10,
            }
        },
        evaluation={"num_sequences": setting.evaluation_sequences},
        transport={"link": f"bench-{link.name}"} if link else {},
    )
    return Config.model_validate(values)


def _rows(link: LinkRow, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Hold all against hierarchical all-reduce; on a link that is not as specified, nothing."""
    rows = []
    for method in METHODS:
        row: dict[str, Any] = dict.fromkeys(column.key for column in _COLUMNS)
        row |= {"link": link.name, "method": method}
        if found:
            own, other = found[method], found[HIERARCHICAL]
            row |= {
                "wall_s": own["wall_s"],
                "faster": other["wall_s"] / own["wall_s"],
                "utilisation": own["utilisation"],
                "megabytes_up": own["bytes_up"] / 1e6,
                "megabytes_down": own["bytes_down"] / 1e6,
                "nats_per_byte": own["nats_per_byte"],
                "loss_ratio": own["nats_per_byte"] / other["nats_per_byte"],
            }
        rows.append(row)
    return rows


def _requirements(setting: RaceSetting, rows: Sequence[Mapping[str, Any]]) -> list[Requirement]:
    (own,) = (row for row in rows if row["method"] == STREAMING)
    faster, loss = (
        float("nan") if own[key] is None else own[key] for key in ("faster", "loss_ratio")
    )
    what = f"{own['link']}: {HIERARCHICAL} over {STREAMING}"
    return [
        Requirement(f"{what}, wall time", faster, 1.0, "x", is_at_least=True),
        Requirement(
            f"{own['link']}: {STREAMING} over {HIERARCHICAL}, held-out loss",
            loss,
            setting.at_most_loss,
            "x",
            is_stretch=not setting.is_loss_judged,
        ),
    ]


def inside(
    order: Mapping[str, Any],
    _: Emulated | None,
    directory: Path,
    on_look: Callable[[str, int], None] = lambda method, number: None,
) -> dict[str, Any]:
    """Train with every method, one after the other.

    Every run is the command that a person would type, so that what is compared is what they would
    get.

    Args:
        order: By method `words` (of the command, before the run file), `options` (after it) and
            `toml` (the run file); coordinator.state_dir there is METHOD below `directory`.
        directory: For run files, logs and what runs leave behind.
        on_look: Called often with the method, and how many have ended; what it raises ends the run.

    Returns:
        By method: `wall_s`, `utilisation`, `nats_per_byte`, and `bytes_up` and `bytes_down` of the
        island that moved most.

    Raises:
        IslandFailed: If a run failed; says what it printed last.
    """
    found: dict[str, Any] = {}
    for number, (method, run) in enumerate(order.items()):
        look = functools.partial(on_look, method, number)
        run_file = directory / f"{method}.toml"
        run_file.write_text(run["toml"])
        command = [sys.executable, "-m", "diloco", *run["words"], str(run_file), *run["options"]]
        code, words = run_watched(command, directory / f"{method}.log", look)
        if code:
            raise IslandFailed(f"{method}: {' '.join(command)} failed, exit code {code}: {words}")
        summary = json.loads((directory / method / "summary.json").read_text())
        found[method] = figures_of(summary)
    return found


def figures_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Take the figures out of the summary of a run: of the slowest and worst island.

    That of `diloco baseline` has some of all islands together.
    """
    if "baseline" in summary:
        whole, islands = [summary], list(summary["islands"].values())
    else:
        whole = islands = summary["islands"]
    loss = "nats_per_byte" if "baseline" in summary else "published_nats_per_byte"
    return {
        "wall_s": max(each["wall_s"] for each in whole),
        "utilisation": min(each["utilisation"] for each in whole),
        "nats_per_byte": max(each[loss] for each in whole),
        "bytes_up": max(island["bytes_up"] for island in islands),
        "bytes_down": max(island["bytes_down"] for island in islands),
    }
