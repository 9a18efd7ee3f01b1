"""Islands of one process: real syncer, exchanges and outer loops over a loopback network.

Nothing is shaped and the clock is virtual, so a run takes exactly the time that its inner steps
take to compute. Islands take turns in one thread; what they exchange are the bytes that a wire
would carry, through the same code.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Generator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from diloco.config.schema import Config
from diloco.launch.build import build_syncer_rules
from diloco.outer.fragments import Plan
from diloco.rounds.store import FragmentStore
from diloco.rounds.syncer import Syncer
from diloco.sync.agreement import Agreement
from diloco.sync.exchange import Exchange, ExchangeRules
from diloco.sync.layout import build_plan, build_schedule
from diloco.sync.outer_loop import OuterLoop
from diloco.sync.shards import LaneShards
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

    def inner_step(self, inner_step: int) -> int:
        """Make the inner step that follows `inner_step` completed ones; return its tokens."""

    def evaluate(self) -> float:
        """Measure the parameters as they are."""


def run_islands(
    config: Config, trainings: Mapping[str, Training], *, directory: Path, start_step: int
) -> float:
    """Train all islands of a run to its end, flush, and evaluate what is published.

    Args:
        config: The run; transport and coordinator play no part.
        trainings: One for each of `config.islands`, by name.
        directory: Empty; where the syncer keeps its records.
        start_step: Inner steps completed before: the schedule goes on from there.

    Returns:
        What `Training.evaluate` says of the published parameters, which all islands hold alike.
    """
    return run_virtual(_run(config, trainings, directory, start_step))


async def _run(
    config: Config, trainings: Mapping[str, Training], directory: Path, start_step: int
) -> float:
    network = LoopbackNetwork()
    names = tuple(sorted(config.islands))
    plan = build_plan(config.outer, trainings[names[0]].parameters)
    syncer = _build_syncer(config, plan, directory)
    await syncer.start()
    server = network.server(_SYNCER, syncer.handlers)
    await server.start()
    islands = [_Island(config, name, plan, trainings[name], network, start_step) for name in names]
    await asyncio.gather(*(island.run() for island in islands))
    digests = {island.outer.digests for island in islands}
    assert len(digests) == 1, f"islands ended with different parameters: {digests}"
    with islands[0].outer.global_parameters():
        figure = trainings[names[0]].evaluate()
    for island in islands:
        await island.exchange.stop()
    await server.stop(0)
    await syncer.stop()
    return figure


def _build_syncer(config: Config, plan: Plan, directory: Path) -> Syncer:
    return Syncer(
        plan,
        build_syncer_rules(config, timeline=0),
        [FragmentStore(directory, part, config.outer.retained_versions) for part in plan.fragments],
        syncer_epoch=1,
        incarnations=_NoIncarnations(),
        is_granted=lambda _: True,
        worker=_InlineWorker(),
        on_record=lambda _: None,
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
        self._training = training
        self._inner_steps = config.run.inner_steps
        self._start_step = start_step
        self._runner = _LoopRunner()
        shards = LaneShards(plan, training.parameters, group=None)
        self.exchange = Exchange(
            plan,
            {f.fragment_id: shards.lanes_of(f.fragment_id) for f in plan.fragments},
            control=network.connect(_SYNCER),
            data=network.connect(_SYNCER),
            grant=Grant(run=config.run.name, island=name, incarnation=1, roles=[ROLE_ISLAND]),
            rules=ExchangeRules(
                uplink_codec=config.outer.uplink,
                error_feedback=config.outer.error_feedback,
                rpc_deadline_s=_DEADLINE_S,
                unreachable_s=_DEADLINE_S,
                seed=config.run.seed,
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
        )

    async def run(self) -> None:
        await self._runner.drive(
            self.outer.starting(overwrite_initial=False, last_inner_step=self._start_step)
        )
        for inner_step in range(self._start_step, self._inner_steps):
            await asyncio.sleep(_STEP_S)
            num_tokens = self._training.inner_step(inner_step)
            await self._runner.drive(self.outer.stepping(num_tokens))
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
