"""Islands of one process: real syncer, exchanges and outer loops over a loopback network.

Nothing is shaped and the clock is virtual: an inner step of an island takes the virtual seconds
that it is given, whatever it takes to compute. Islands take turns in one thread; what they exchange
are the bytes that a wire would carry, through the same code.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from diloco.config.schema import Config
from diloco.launch.build import build_syncer_rules
from diloco.outer.fragments import Plan
from diloco.rounds.store import FragmentStore
from diloco.rounds.syncer import Syncer
from diloco.sync.agreement import Agreement
from diloco.sync.exchange import Exchange, ExchangeRules, SyncerWay
from diloco.sync.layout import build_plan, build_schedule
from diloco.sync.outer_loop import Arrival, OuterLoop
from diloco.sync.shards import LaneShards, tensor_specs
from protos.control_pb2 import ROLE_ISLAND, Grant
from transport.loopback import LoopbackNetwork, run_virtual

_T = TypeVar("_T")

_SYNCER = "syncer"
#: Virtual seconds of one inner step; islands take turns at each.
_STEP_S = 1.0
_DEADLINE_S = 600.0


class Training(Protocol):
    """The training of one island.

    Attributes:
        parameters: Canonical name -> float32 parameter; equal on all islands at the start.
    """

    parameters: Mapping[str, Tensor]

    def inner_step(self, inner_step: int, schedule_step: float) -> int:
        """Make the inner step that follows `inner_step` completed ones; return its tokens.

        `schedule_step` is where the run stands, for the learning rate.
        """

    def evaluate(self) -> float:
        """Measure the parameters as they are."""


@dataclass(frozen=True, slots=True)
class LoopbackResult:
    """A finished run.

    Args:
        figure: What `Training.evaluate` says of the published parameters, which all hold alike.
        virtual_s: Virtual seconds until the last island was done.
        steps: Inner steps of each island.
        busy: Share of the virtual time until its last inner step that each spent in inner steps.
        dropped_tokens: Of each, by share of the parameters.
        num_rounds: Published versions of all fragments, flushes left out.
        num_solo: Those of them that one island alone made.
    """

    figure: float
    virtual_s: float
    steps: Mapping[str, int]
    busy: Mapping[str, float]
    dropped_tokens: Mapping[str, float]
    num_rounds: int
    num_solo: int


def run_islands(
    config: Config,
    trainings: Mapping[str, Training],
    *,
    directory: Path,
    start_step: int,
    step_s: Callable[[str, int], float] = lambda island, inner_step: _STEP_S,
) -> LoopbackResult:
    """Train all islands of a run to its end, flush, and evaluate what is published.

    Args:
        config: The run; transport and coordinator play no part.
        trainings: One for each of `config.islands`, by name.
        directory: Empty; where the syncer keeps its records.
        start_step: Inner steps completed before: the schedule goes on from there.
        step_s: Virtual seconds of an island's inner step, after so many completed ones.
    """
    return run_virtual(_run(config, trainings, directory, start_step, step_s))


async def _run(
    config: Config,
    trainings: Mapping[str, Training],
    directory: Path,
    start_step: int,
    step_s: Callable[[str, int], float],
) -> LoopbackResult:
    network = LoopbackNetwork()
    names = tuple(sorted(config.islands))
    plan = build_plan(config.outer, tensor_specs(trainings[names[0]].parameters))
    records: list[Mapping[str, Any]] = []
    syncer = _build_syncer(config, plan, directory, records.append)
    await syncer.start()
    server = network.server(_SYNCER, syncer.handlers)
    await server.start()
    islands = [_Island(config, name, plan, trainings[name], network, start_step) for name in names]
    clock = asyncio.get_running_loop().time
    began = clock()
    await asyncio.gather(*(island.run(step_s) for island in islands))
    virtual_s = clock() - began
    digests = {island.outer.digests for island in islands}
    assert len(digests) == 1, f"islands ended with different parameters: {digests}"
    with islands[0].outer.global_parameters():
        figure = trainings[names[0]].evaluate()
    for island in islands:
        await island.exchange.stop()
    await server.stop(0)
    await syncer.stop()
    versions = {
        (r["fragment_id"], r["version"]): len(r["contributors"])
        for r in records
        if r["version"] and not r["is_flush"]
    }
    return LoopbackResult(
        figure,
        virtual_s,
        {island.name: island.outer.inner_step - start_step for island in islands},
        {island.name: island.busy_s / island.trained_s for island in islands},
        {island.name: island.outer.dropped_tokens for island in islands},
        len(versions),
        sum(count == 1 for count in versions.values()),
    )


def _build_syncer(
    config: Config, plan: Plan, directory: Path, on_record: Callable[[Mapping[str, Any]], None]
) -> Syncer:
    return Syncer(
        plan,
        build_syncer_rules(config, timeline=0),
        [FragmentStore(directory, part, config.outer.retained_versions) for part in plan.fragments],
        syncer_epoch=1,
        incarnations=_NoIncarnations(),
        is_granted=lambda _: True,
        worker=_InlineWorker(),
        on_record=on_record,
        on_change=lambda: None,
    )


class _Island:
    """One island, of one rank."""

    def __init__(
        self,
        config: Config,
        name: str,
        plan: Plan,
        training: Training,
        network: LoopbackNetwork,
        start_step: int,
    ) -> None:
        self.name = name
        self.busy_s = self.trained_s = 0.0
        self._training = training
        self._start_step = start_step
        self._runner = _LoopRunner()
        shards = LaneShards(plan, training.parameters, group=None)
        self.exchange = Exchange(
            plan,
            {f.fragment_id: shards.lanes_of(f.fragment_id) for f in plan.fragments},
            ways=[
                SyncerWay(
                    [fragment.fragment_id for fragment in plan.fragments],
                    control=network.connect(_SYNCER),
                    data=network.connect(_SYNCER),
                )
            ],
            grant=Grant(run=config.run.name, island=name, incarnation=1, roles=[ROLE_ISLAND]),
            rules=ExchangeRules(
                uplink_codec=config.outer.uplink,
                error_feedback=config.outer.error_feedback,
                rpc_deadline_s=_DEADLINE_S,
                unreachable_s=_DEADLINE_S,
                seed=config.run.seed,
                on_arrival=config.outer.is_on_arrival,
                is_carried=config.outer.late == "carry",
            ),
            rng=random.Random(name),
            on_event=lambda _: None,
        )
        self.outer = OuterLoop(
            plan,
            build_schedule(config.outer, config.run.inner_steps),
            shards,
            self.exchange,
            self._runner,
            Agreement(None),
            timeline=0,
            local_mix=config.outer.local_mix,
            clock=asyncio.get_running_loop().time,
            on_event=lambda _: None,
            start_step=start_step,
            arrival=Arrival(config.total_tokens, is_carried=config.outer.late == "carry")
            if config.outer.is_on_arrival
            else None,
        )

    async def run(self, step_s: Callable[[str, int], float]) -> None:
        await self._runner.drive(
            self.outer.starting(overwrite_initial=False, last_inner_step=self._start_step)
        )
        outer, clock = self.outer, asyncio.get_running_loop().time
        began = clock()
        while not outer.is_over:
            takes_s = step_s(self.name, outer.inner_step)
            await asyncio.sleep(takes_s)
            self.busy_s += takes_s
            num_tokens = self._training.inner_step(outer.inner_step, outer.schedule_step)
            await self._runner.drive(outer.stepping(num_tokens))
        self.trained_s = clock() - began
        await self._runner.drive(self.outer.finishing())


class _LoopRunner:
    """Puts the exchange into the loop in which the islands take turns."""

    def post(self, action: Callable[..., object], *arguments: object) -> None:
        asyncio.get_running_loop().call_soon(action, *arguments)

    async def drive(self, waits: Generator[Coroutine[Any, Any, None], None, _T]) -> None:
        for wait in waits:
            await asyncio.create_task(wait)  # after what was posted


class _InlineWorker:
    """Runs the syncer's work where it stands: it takes no virtual time."""

    async def run(self, work: Callable[[], _T]) -> _T:
        return work()


class _NoIncarnations:
    """Nothing outlives this syncer."""

    def load(self) -> dict[str, int]:
        return {}

    def store(self, incarnations: dict[str, int]) -> None:
        pass
