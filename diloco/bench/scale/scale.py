"""Coordinator and syncer at the size of the largest runs: refusals, handlers' time, CPU, memory.

    64x512              64 islands of 512 ranks, each of which carries a lane: all 32,768 poll
    1000-scheduled      1,000 islands of one rank
    1000-on-arrival     the same, with rounds that open and close by measured times
    grpc                256 islands over real gRPC, with the product's own processes

In all but the last, coordinator and syncer are a process each with the product's handlers, access
rules, limits, journal and store; calls come over Unix sockets, so that their CPU time is that of
the handlers, machines and files. All islands are in the bench's process. Lanes are as small as a
plan makes them. Rounds follow each other as fast as they can; on arrival as a step time asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from diloco.bench.processes import count_one, run_jobs
from diloco.bench.run_values import run_values
from diloco.bench.scale.local_socket import SocketTransport, ask_figures
from diloco.bench.scale.serving import socket_of
from diloco.bench.scale.simulated_island import Counts, Simulation, simulate
from diloco.bench.syncer.control_plane import SyncerProcess, control_plane
from diloco.config.load import load_config, resolved_toml
from diloco.config.schema import Config
from diloco.coordinator.grants import load_or_create_secret
from diloco.coordinator.journal import Journal
from diloco.errors import CoordinatorUnavailable, DilocoError
from diloco.launch.process.children import how_ended, last_words, spawn
from diloco.outer.fragments import MIN_LANE_BYTES, Plan, TensorSpec, make_plan
from diloco.protos import fragment_pb2 as wire
from diloco.report.rows import Column, Report, Requirement, Watch, matching
from diloco.security.security import Security
from diloco.state_dir import StateDir, read_endpoint
from diloco.system import require_linux
from diloco.transport.identity import Role

_RUN = "bench-scale"
_MIB = 1 << 20
_LOOK_S, _START_S, _INDEXED_S = 0.2, 60.0, 60.0
#: Calls of a method of which 99 % say something; of fewer "longest" shows the longest.
_LEAST_CALLS = 100
_TOKENS = 32
_COLUMNS = (
    Column("row", "row"),
    Column("party", "process"),
    Column("calls", "calls", ",d"),
    Column("refused", "refused", ",d"),
    Column("p99_ms", "handler p99, ms", ".1f"),
    Column("slowest", "of"),
    Column("longest_ms", "longest", ".0f"),
    Column("stall_ms", "loop stands still, ms", ".0f"),
    Column("waiting", "calls at once", ",d"),
    Column("join_cpu_s", "CPU of joins, s", ".1f"),
    Column("round_cpu_s", "CPU a round, s", ".2f"),
    Column("peak_mib", "peak MiB", ".0f"),
    Column("rounds", "rounds"),
    Column("counted", "counted", ".1%"),
    Column("wall_s", "wall, s", ".0f"),
)


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """One run.

    Attributes:
        num_islands: Of the run.
        num_ranks: Of each island.
        num_fragments: Of the plan.
        num_lanes: Of a fragment.
        num_rounds: Of each fragment.
        step_s: Of an inner step, as islands say; 0: the run is scheduled.
        is_real: Whether its processes are the product's own, over gRPC.
    """

    num_islands: int
    num_ranks: int
    num_fragments: int
    num_lanes: int
    num_rounds: int
    step_s: float = 0.0
    is_real: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of the islands, sorted."""
        return tuple(f"island-{number:05d}" for number in range(self.num_islands))

    @property
    def plan(self) -> Plan:
        """Lanes as small as they can be."""
        numel = self.num_lanes * MIN_LANE_BYTES // 4
        specs = [TensorSpec(f"layers.{p}.weight", (numel,)) for p in range(self.num_fragments)]
        return make_plan(specs, num_fragments=self.num_fragments, num_lanes=self.num_lanes)

    def config(self, state_dir: Path) -> Config:
        """The run's."""
        outer: dict[str, Any] = {
            "preset": "decoupled" if self.step_s else "streaming",
            "inner_steps_per_round": 8,
            "num_fragments": self.num_fragments,
            "num_lanes": self.num_lanes,
            "round_deadline": "600s",
        }
        island = {"ranks": self.num_ranks, "tokens_per_inner_step": _TOKENS * self.num_ranks}
        values = run_values(
            _RUN,
            {"preset": "debug"},
            outer,
            inner_steps=1_000_000,
            islands=self.names,
            island={**island, "mesh": {"dp_replicate": self.num_ranks}},
            coordinator={"state_dir": str(state_dir), "spool_memory": "2GiB"},
        )
        return Config.model_validate(values)


@dataclass(frozen=True, slots=True)
class ScaleSetting:
    """What is measured.

    Attributes:
        runs: By the name of the row.
        handler_ms: Bar of 99 of 100 calls of any method that is called often.
        num_processes: Of the islands that call over gRPC.
    """

    runs: Mapping[str, ScaleRow] = field(
        default_factory=lambda: {
            "64x512": ScaleRow(64, 512, 8, 64, 2),
            "1000-scheduled": ScaleRow(1000, 1, 8, 2, 3),
            "1000-on-arrival": ScaleRow(1000, 1, 8, 2, 3, step_s=2.0),
            "grpc": ScaleRow(256, 1, 4, 2, 10, is_real=True),
        }
    )
    handler_ms: float = 50.0
    num_processes: int = 2


def run(watch: Watch, rows: Sequence[str] = (), *, setting: ScaleSetting | None = None) -> Report:
    """Measure all rows whose names match.

    Raises:
        ConfigError: If this is not Linux, or a pattern matches no row.
        DilocoError: If a run cannot go on.
    """
    require_linux("diloco bench scale, which reads /proc of processes,", "measure there")
    setting = setting or ScaleSetting()
    results: list[dict[str, Any]] = []
    requirements: list[Requirement] = []
    for name in matching(list(setting.runs), rows):
        row = setting.runs[name]
        with tempfile.TemporaryDirectory(prefix="diloco-scale-") as directory:
            began = time.monotonic()
            measured = _measure_real if row.is_real else _measure
            counts, shown = measured(setting, row, Path(directory) / "run", partial(watch, name))
            wall_s = time.monotonic() - began
            rounds = _rounds(Path(directory) / "run", row)
        num_included = sum(k == wire.OUTCOME_KIND_INCLUDED for k in counts.outcomes.values())
        counted = num_included / max(1, len(counts.outcomes))
        results += [
            {"row": name, **each, "rounds": len(rounds), "counted": counted, "wall_s": wall_s}
            for each in shown
        ]
        requirements += _judged(setting, name, row, counts, shown, rounds)
    return Report("scale", asdict(setting), _COLUMNS, results, requirements)


def _judged(
    setting: ScaleSetting,
    name: str,
    row: ScaleRow,
    counts: Counts,
    shown: Sequence[Mapping[str, Any]],
    rounds: Mapping[tuple[int, int], Counter[str]],
) -> Iterator[Requirement]:
    num_refused = max(counts.overloaded, sum(each.get("refused", 0) for each in shown))
    yield Requirement(f"{name}: calls refused or put off", num_refused, 0, "calls")
    asked = row.num_rounds * row.num_fragments
    yield Requirement(f"{name}: rounds published", len(rounds), asked, "rounds", is_at_least=True)
    told = {
        (island, p, version + 1)
        for (island, p, version), kind in counts.outcomes.items()
        if kind == wire.OUTCOME_KIND_INCLUDED
    }
    counted = {(i, *key) for key, names in rounds.items() for i in names}
    twice = sum(n - 1 for names in rounds.values() for n in names.values())
    wrong = twice + len(told ^ counted)
    if not row.step_s:
        wrong += asked * row.num_islands - len(counted)
    yield Requirement(f"{name}: contributions not counted exactly once", wrong, 0, "contributions")
    for each in shown:
        if each.get("p99_ms") is not None:
            what = f"{name}: {each['party']}, 99 of 100 calls of {each['slowest']}"
            yield Requirement(what, each["p99_ms"], setting.handler_ms, "ms on the loop")


def _rounds(root: Path, row: ScaleRow) -> dict[tuple[int, int], Counter[str]]:
    """Give who contributed to each version, by fragment and version, as the journal has it."""
    journal = Journal(StateDir(root).journal)
    journal.open()
    with contextlib.closing(journal):
        headers = [json.loads(header) for header in journal.headers()]
    return {
        (header["fragment_id"], header["version"]): Counter(
            each["island"] for each in header["contributors"]
        )
        for header in headers
        if 0 < header["version"] <= row.num_rounds
    }


# -- handlers alone --------------------------------------------------------------------------------


def _measure(
    setting: ScaleSetting, row: ScaleRow, root: Path, watch: Callable[[int, int], None]
) -> tuple[Counts, list[dict[str, Any]]]:
    state, config = StateDir(root), row.config(root)
    state.create()
    state.resolved.write_text(resolved_toml(config), encoding="utf-8")
    load_or_create_secret(state.secret)
    with contextlib.ExitStack() as stack:
        for role in ("coordinator", "syncer"):
            stack.enter_context(_serving(role, state))
        return asyncio.run(_simulated(row, config, root, watch))


@contextlib.contextmanager
def _serving(role: str, state: StateDir) -> Iterator[None]:
    log = state.root / f"{role}.log"
    process = spawn(
        [sys.executable, "-m", "diloco.bench.scale.serving", role, str(state.root)],
        log,
        stdin=subprocess.PIPE,  # it ends with us
    )
    try:
        until = time.monotonic() + _START_S
        # The syncer serves once an island has joined.
        while role == "coordinator" and not socket_of(state.root, role).exists():
            if process.poll() is not None or time.monotonic() > until:
                raise CoordinatorUnavailable(
                    f"the bench's {role} {how_ended(process)}; {last_words(log)}"
                )
            time.sleep(_LOOK_S)
        yield
    except Exception as error:
        raise DilocoError(f"{error!r}; the {role}: {last_words(log)}") from error
    finally:
        process.kill()
        process.communicate()  # closes its input, too


async def _simulated(
    row: ScaleRow, config: Config, root: Path, watch: Callable[[int, int], None]
) -> tuple[Counts, list[dict[str, Any]]]:
    counts, joined = Counts(), asyncio.Event()
    num_joined = num_done = 0

    def on_joined() -> None:
        nonlocal num_joined
        num_joined += 1
        if num_joined == row.num_islands:
            joined.set()

    def on_done() -> None:
        nonlocal num_done
        num_done += 1

    paths = {role: socket_of(root, role) for role in ("coordinator", "syncer")}
    simulation = Simulation(
        config, row.plan, row.num_rounds, row.step_s, counts, on_joined, on_done
    )

    async def ask() -> dict[str, dict[str, Any]]:
        return {role: await ask_figures(path) for role, path in paths.items()}

    async def first_figures() -> dict[str, dict[str, Any]]:
        await joined.wait()
        return await ask()

    simulating = asyncio.create_task(
        simulate(
            row.names,
            simulation,
            lambda address: SocketTransport(Path(address)),
            str(paths["coordinator"]),
        )
    )
    begun, first = time.monotonic(), asyncio.create_task(first_figures())
    while not simulating.done():
        try:
            watch(num_joined + num_done, 2 * row.num_islands)
        except BaseException:
            simulating.cancel()
            raise
        await asyncio.wait({simulating}, timeout=_LOOK_S)
    simulating.result()
    until = time.monotonic() + _INDEXED_S
    while len(_rounds(root, row)) < row.num_rounds * row.num_fragments:
        if time.monotonic() > until:
            break  # which is judged
        await asyncio.sleep(_LOOK_S)
    before, after = await first, await ask()
    return counts, [
        _figures(role, row, before[role], after[role], time.monotonic() - begun) for role in paths
    ]


def _figures(
    party: str, row: ScaleRow, before: Mapping[str, Any], after: Mapping[str, Any], wall_s: float
) -> dict[str, Any]:
    held = {method: sorted(each) for method, each in after["held_s"].items()}
    p99 = {m: e[int(0.99 * len(e))] for m, e in held.items() if len(e) >= _LEAST_CALLS}
    slowest = max(p99, key=lambda method: p99[method], default="")
    return {
        "party": party,
        "calls": sum(map(len, held.values())),
        "refused": sum(after["refusals"].values()),
        "refusals": after["refusals"],
        "p99_ms": 1e3 * p99[slowest] if p99 else None,
        "slowest": slowest,
        "longest_ms": 1e3 * max((e[-1] for e in held.values()), default=0.0),
        "by_method_ms": {m: [len(e), 1e3 * sum(e) / len(e), 1e3 * e[-1]] for m, e in held.items()},
        "stall_ms": 1e3 * after["stall_s"],
        "waiting": after["most_waiting"],
        "join_cpu_s": before["cpu_s"],
        "round_cpu_s": (after["cpu_s"] - before["cpu_s"]) / (row.num_rounds * row.num_fragments),
        "peak_mib": after["peak_bytes"] / _MIB,
        "rounds_wall_s": wall_s,
    }


# -- the product's processes -----------------------------------------------------------------------


def _measure_real(
    setting: ScaleSetting, row: ScaleRow, root: Path, watch: Callable[[int, int], None]
) -> tuple[Counts, list[dict[str, Any]]]:
    config, state = row.config(root), StateDir(root)
    with control_plane(config) as run_file:
        coordinator = read_endpoint(state.coordinator)
        assert coordinator is not None
        shares = [row.names[n :: setting.num_processes] for n in range(setting.num_processes)]
        jobs = {
            number: partial(_call_over_grpc, run_file, row, names, coordinator.address)
            for number, names in enumerate(shares)
            if names
        }
        counts = Counts()
        shown: list[dict[str, Any]] = []

        def on_look(done: int) -> None:
            watch(done, 2 * row.num_islands)
            there = {"coordinator": coordinator, "syncer": read_endpoint(state.syncer)}
            with contextlib.suppress(FileNotFoundError, StopIteration):  # it has ended by itself
                shown[:] = [
                    _process_figures(party, endpoint.pid, row)
                    for party, endpoint in there.items()
                    if endpoint is not None
                ]

        for each in run_jobs(jobs, on_look, len(jobs)).values():
            counts.overloaded += each.overloaded
            counts.outcomes |= each.outcomes
            counts.calls += each.calls
        return counts, shown


def _process_figures(party: str, pid: int, row: ScaleRow) -> dict[str, Any]:
    process = SyncerProcess(pid)
    return {
        "party": f"{party}, gRPC",
        "round_cpu_s": process.spent().cpu_s / (row.num_rounds * row.num_fragments),
        "peak_mib": process.peak_bytes() / _MIB,
    }


def _call_over_grpc(run_file: Path, row: ScaleRow, names: Sequence[str], address: str) -> Counts:
    counts, security = Counts(), Security()
    config = load_config(run_file)
    simulation = Simulation(
        config, row.plan, row.num_rounds, row.step_s, counts, count_one, count_one
    )

    asyncio.run(
        simulate(names, simulation, lambda to: security.transport(to, Role.SYNCER), address)
    )
    return counts
