"""Real runs that simulations are held against: `diloco local` on a link, and what it measured.

An inner step trains a model of 10M parameters on a few bytes and then sleeps until it has taken the
time that it is given, so that links are measured, not how islands share the cores of this machine.
A point that was made is one file, written durably: another start goes on behind it.

Source: PROTOCOL.md, "Words for figures".
"""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco.bench.network.emulating import ISLANDS, run_watched
from diloco.bench.run_values import MODEL_10M, run_values
from diloco.config.load import resolved_toml
from diloco.config.schema import Config
from diloco.durable import read_json, write_json
from diloco.errors import IslandFailed
from diloco.faults.process import STEP_VARIABLE
from diloco.launch.process.emulated import Emulated
from diloco.report.summary import event_lines

_SEQUENCE_LENGTH = 16
_PROFILE = "validated"

#: Phases that are one of several, as their lanes overlap.
_JOINED = {"encode": "up", "send": "up", "fetch": "down", "decode": "down"}

#: Kinds of events that the time of training ends with.
_OF_TRAINING = ("inner_step", "fragment_merged", "round_expired")
#: What `figures` takes.
FIGURES = {"blocked_s", "round_s", "rounds", "wall_s", "step_s", "phases"}

Message = dict[str, Any]  # JSON values


@dataclass(frozen=True, slots=True)
class ValidationPoint:
    """One real run.

    Attributes:
        bandwidth: Of every island's link, each way, such as "100Mbit/s"; empty: not shaped, which
            costs of hosts are taken from.
        rtt_ms: Round trip.
        codec: Up and down.
        inner_steps_per_round: H.
        num_fragments: P.
        overlap_steps: tau.
    """

    bandwidth: str
    rtt_ms: float
    codec: str
    inner_steps_per_round: int
    num_fragments: int
    overlap_steps: int = 0

    @property
    def name(self) -> str:
        """What rows, files and --rows call it."""
        link = f"{self.bandwidth.removesuffix('bit/s')}-{self.rtt_ms:g}ms"
        schedule = f"H{self.inner_steps_per_round}P{self.num_fragments}"
        schedule += f"tau{self.overlap_steps}" if self.overlap_steps else ""
        return f"{link if self.bandwidth else 'unshaped'}-{self.codec}-{schedule}"

    @property
    def profile_toml(self) -> str:
        """Write the profile of its link."""
        way = f'bandwidth = "{self.bandwidth}"\ndelay = "{self.rtt_ms / 2:g}ms"\n'
        return f'source = "diloco sim validate"\n[up]\n{way}[down]\n{way}'


@dataclass(frozen=True, slots=True)
class ValidationSetting:
    """What all points share.

    Attributes:
        step_s: Seconds of an inner step.
        rounds: Measured ones; one more warms up.
        is_emulated: Whether links are made of network namespaces.
    """

    step_s: float = 0.1
    rounds: int = 5
    is_emulated: bool = False


def run_config(setting: ValidationSetting, point: ValidationPoint, state_dir: Path) -> Config:
    """Give the run of a point."""
    outer = {
        "preset": "streaming" if point.num_fragments > 1 else "classic",
        "inner_steps_per_round": point.inner_steps_per_round,
        "num_fragments": point.num_fragments,
        "overlap_steps": point.overlap_steps,
        "uplink_codec": point.codec,
        "downlink_codec": point.codec,
        "round_deadline": "600s",
        "flush": False,
    }
    link = _PROFILE if point.bandwidth and not setting.is_emulated else ""
    values = run_values(
        "validate",
        MODEL_10M,
        outer,
        # Long enough that all that is sent in whole rounds is merged.
        inner_steps=(setting.rounds + 1) * point.inner_steps_per_round + point.overlap_steps,
        sequence_length=_SEQUENCE_LENGTH,
        tokens=_SEQUENCE_LENGTH,
        islands=ISLANDS,
        state_dir=state_dir,
        inner={"optimizer": {"lr": 1e-4, "schedule": "constant"}},
        transport={"link": link, "rpc_timeout": "600s"},
    )
    return Config.model_validate(values)


def run_path(directory: Path, setting: ValidationSetting, point: ValidationPoint) -> Path:
    """Directory of a point's run."""
    return directory / (point.name + ("-emulated" if setting.is_emulated else ""))


def measured_path(directory: Path, setting: ValidationSetting, point: ValidationPoint) -> Path:
    """File of a point that was made."""
    run = run_path(directory, setting, point)
    return run.with_name(f"{run.name}.json")


def read_measured(
    directory: Path, setting: ValidationSetting, point: ValidationPoint
) -> Message | None:
    """Give what a point measured earlier, in the same setting; None: nothing, or not all."""
    found: Message | None = read_json(measured_path(directory, setting, point))
    if found is None or found["setting"] != asdict(setting) or not found.keys() >= FIGURES:
        return None
    return found


def measure_point(
    directory: Path, setting: ValidationSetting, point: ValidationPoint, on_look: Callable[[], None]
) -> Message:
    """Make the run of a point, and write down durably what it measured.

    The run's events stay in `directory`/NAME, for `diloco sim trace`.

    Raises:
        IslandFailed: If the run failed; says what it printed last.
    """
    place = run_path(directory, setting, point)
    shutil.rmtree(place, ignore_errors=True)
    profile = place / "configs" / "links" / f"{_PROFILE}.toml"
    profile.parent.mkdir(parents=True)
    if point.bandwidth:
        profile.write_text(point.profile_toml)
    run_file, state_dir = place / "run.toml", place / "run"
    config = run_config(setting, point, state_dir)
    run_file.write_text(resolved_toml(config))
    command = ["env", f"{STEP_VARIABLE}={setting.step_s}"]
    command += [sys.executable, "-m", "diloco", "local", str(run_file)]
    # In that directory, whose configs/links come first.
    code, words = run_watched(command, place / "words.log", on_look, directory=place)
    if code:
        raise IslandFailed(
            f"{point.name}: {' '.join(command)} failed, exit code {code}; all it said is in "
            f"{place / 'words.log'}, the end of it: {words}"
        )
    found = {
        "point": asdict(point),
        "setting": asdict(setting),
        **figures(config.telemetry_dir, point),
    }
    for heavy in ("syncer", "checkpoints"):
        shutil.rmtree(state_dir / heavy, ignore_errors=True)
    write_json(measured_path(directory, setting, point), found)
    return found


# -- what a run measured ---------------------------------------------------------------------------


def figures(telemetry_dir: Path, point: ValidationPoint) -> Message:
    """Take the figures of a run out of its events; times in seconds.

    Returns:
        Of the rounds after the first: `blocked_s`, of every fragment the median over rounds and
        islands, added up, so that what disturbs one wait disturbs no other; `round_s`, the median
        over rounds and islands; `rounds`, blocked and wall seconds of all of them, by island.
        Of the whole run: `wall_s`, from the first inner step to the last merge;
        `step_s` by island, undisturbed; `phases`: by phase its median duration a fragment, lanes
        together.
    """
    events = {name: list(event_lines(telemetry_dir / f"events-{name}-0.jsonl")) for name in ISLANDS}
    rounds = {name: _rounds(its, point.inner_steps_per_round) for name, its in events.items()}
    merging = event_lines(telemetry_dir / "events-syncer.jsonl")
    return {
        "blocked_s": _blocked_s(events.values(), point.inner_steps_per_round),
        "round_s": statistics.median(wall_s for its in rounds.values() for _, wall_s in its),
        "rounds": rounds,
        "wall_s": _wall_s([event for its in events.values() for event in its]),
        "step_s": {
            name: next(e["undisturbed_step_s"] for e in its if e["kind"] == "island_ended")
            for name, its in events.items()
        },
        "phases": _phases(events.values(), merging),
    }


def _blocked_s(islands: Iterable[Sequence[Mapping[str, Any]]], period: int) -> float:
    """Add up the median waits of every fragment, the first H inner steps left out."""
    waits: dict[int, list[float]] = {}
    for event in (event for events in islands for event in events):
        if event["kind"] == "fragment_merged" and event["inner_step"] > period:
            waits.setdefault(event["fragment_id"], []).append(event["blocked_s"])
    return sum(statistics.median(each) for each in waits.values())


def _wall_s(events: Iterable[Mapping[str, Any]]) -> float:
    """Give the seconds from the begin of the first inner step until the last merge, or step."""
    told = [event for event in events if event["kind"] in _OF_TRAINING]
    began = (e["unix_s"] - e["duration_s"] for e in told if e["kind"] == "inner_step")
    return float(max(event["unix_s"] for event in told) - min(began))


def _rounds(events: Sequence[Mapping[str, Any]], period: int) -> list[tuple[float, float]]:
    """Give the blocked and the wall seconds of every H inner steps after the first of them."""
    blocked: dict[int, float] = {}
    ended: dict[int, float] = {}
    for event in events:
        if event["kind"] in _OF_TRAINING:
            number = -(-event["inner_step"] // period)
            ended[number] = max(ended.get(number, 0.0), event["unix_s"])
            blocked[number] = blocked.get(number, 0.0) + event.get("blocked_s", 0.0)
    steps = max(event["inner_step"] for event in events if event["kind"] == "inner_step")
    return [
        (blocked[number], ended[number] - ended[number - 1])
        for number in range(2, steps // period + 1)
    ]


def _phases(
    islands: Iterable[Sequence[Mapping[str, Any]]], syncer: Iterable[Mapping[str, Any]]
) -> dict[str, float]:
    """Give the median duration of every phase of a round, the first round left out.

    Of a phase that lanes are in that is from the first begin to the last end. They overlap: "up" is
    from the first encoding to the answer to the last call, "down" from the first fetch to the last
    decoding.
    """
    extents: dict[tuple[int, str, int, int], tuple[float, float]] = {}
    for number, events in enumerate(islands):
        for event in events:
            if event["kind"] == "phase" and event["version"] > 0:
                end = event["unix_s"]
                for phase in {event["phase"], _JOINED.get(event["phase"], event["phase"])}:
                    key = (number, phase, event["fragment_id"], event["version"])
                    first, last = extents.get(key, (end, end))
                    extents[key] = min(first, end - event["duration_s"]), max(last, end)
    durations: dict[str, list[float]] = {}
    for (_, phase, _, _), (begin, end) in extents.items():
        durations.setdefault(phase, []).append(end - begin)
    durations["commit"] = [
        event["commit_s"]
        for event in syncer
        if event["kind"] == "round_closed" and event["version"] > 0
    ]
    return {phase: statistics.median(each) for phase, each in durations.items() if each}


def inside(orders: Mapping[str, Any], _: Emulated, place: Path) -> dict[str, Any]:
    """Make all points of the orders in this process's network; says how many."""
    setting, directory = ValidationSetting(**orders["setting"]), Path(orders["directory"])
    for point in orders["points"]:
        measure_point(directory, setting, ValidationPoint(**point), lambda: None)
    return {"points": len(orders["points"])}
