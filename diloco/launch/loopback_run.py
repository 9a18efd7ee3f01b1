"""Islands of one process: real syncer, exchanges and outer loops over a loopback network.

The clock is virtual: an inner step of an island takes the virtual seconds that it is given,
whatever it takes to compute. Islands take turns in one thread; what they exchange are the bytes
that a wire would carry, through the same code. What the network does to them, and who fails when,
is the caller's `World`; by default nothing is shaped and nobody fails.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import random
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from torch import Tensor

from diloco.config.schema import Config
from diloco.errors import AggregationError
from diloco.forecast.build import build_syncer_rules
from diloco.island.agreement import Agreement
from diloco.island.exchange.calls import ExchangeRules
from diloco.island.exchange.contributions import Send
from diloco.island.exchange.exchange import Exchange, SyncerConnection
from diloco.island.lanes.parameters import tensor_specs
from diloco.island.lanes.shards import LaneShards
from diloco.island.layout import build_plan, build_schedule
from diloco.island.outer_loop import OuterLoop
from diloco.island.outer_state import LoopParts
from diloco.outer.fragments import Fragment, Plan
from diloco.protocol.island.soundness import Mend
from diloco.protocol.rounds.orders import Orders
from diloco.protocol.rounds.terms import Roster
from diloco.protos.control_pb2 import ROLE_ISLAND, Grant
from diloco.syncer.syncer import Syncer
from diloco.syncer.worker import Workers
from diloco.telemetry.events import Event
from diloco.trainer.launched_step import InnerMetrics
from diloco.transport.calls.loopback import LoopbackNetwork, run_virtual
from diloco.transport.contracts import Server, Transport
from diloco.transport.retry import RetryPolicy
from diloco.versions.store import FragmentStore

_T = TypeVar("_T")
Lanes: TypeAlias = Mapping[int, Tensor]  # by lane id
BeforeSend: TypeAlias = Callable[[str, Fragment, Lanes, Lanes], None]

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

    def inner_step(self, inner_step: int, schedule_step: float) -> InnerMetrics:
        """Make the inner step that follows `inner_step` completed ones.

        `schedule_step` is where the run stands, for the learning rate.
        """

    def mend(self, *, is_new: bool) -> int:
        """Repair the inner optimizer, as the last step of the outer loop asks."""

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
        num_syncer_starts: Of the syncer, the first one counted.
        digests: Of the published parameters, one a fragment.
    """

    figure: float
    virtual_s: float
    steps: Mapping[str, int]
    busy: Mapping[str, float]
    dropped_tokens: Mapping[str, float]
    num_rounds: int
    num_solo: int
    num_syncer_starts: int
    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class World:
    """What befalls the islands of a run and their syncer.

    Args:
        step_s: Virtual seconds of an island's inner step, after so many completed ones.
        way: Gives an island's way to the syncer, around the one that takes no time.
        lives: Of an island: virtual seconds until it fails and from then until its next start,
            again and again; when they end it lives on.
        syncer_lives: The same of the syncer, which goes on from what it has written.
        on_failure: Called with the name of an island that has failed, and its last outer loop.
        on_step: Called after every inner step: island, its outer loop, tokens.
        on_event: Called with every event of an island.
        on_syncer_event: Called with every event of the syncer.
        before_send: May change what an island sends of a fragment: given the published lanes that
            it last merged, and its own, which it may write to.
        on_end: Called when an island's own check has ended it, with name and reason: others go on
            without it, as after `diloco kick`. None: that ends the run.
    """

    step_s: Callable[[str, int], float] = lambda island, inner_step: _STEP_S
    way: Callable[[str, Transport], Transport] = lambda island, plain: plain
    lives: Callable[[str], Iterable[tuple[float, float]]] = lambda island: ()
    syncer_lives: Iterable[tuple[float, float]] = ()
    on_failure: Callable[[str, OuterLoop], None] = lambda island, outer: None
    on_step: Callable[[str, OuterLoop, int], None] = lambda island, outer, num_tokens: None
    on_event: Callable[[str, Event], None] = lambda island, event: None
    on_syncer_event: Callable[[Event], None] = lambda event: None
    before_send: BeforeSend = lambda island, fragment, anchor, local: None
    on_end: Callable[[str, AggregationError], None] | None = None


def run_islands(
    config: Config,
    trainings: Mapping[str, Training],
    *,
    directory: Path,
    start_step: int,
    world: World | None = None,
) -> LoopbackResult:
    """Train all islands of a run to its end, flush, and evaluate what is published.

    Args:
        config: The run; transport and coordinator play no part.
        trainings: One for each of `config.islands`, by name.
        directory: Empty; where the syncer keeps its records.
        start_step: Inner steps completed before: the schedule goes on from there.
        world: What befalls them; None: nothing does, and an inner step takes a second.

    Raises:
        DilocoError: If the run cannot go on, as when its rounds expire again and again.
    """
    return run_virtual(_run(config, trainings, directory, start_step, world or World()))


async def _run(
    config: Config,
    trainings: Mapping[str, Training],
    directory: Path,
    start_step: int,
    world: World,
) -> LoopbackResult:
    network = LoopbackNetwork()
    names = tuple(sorted(config.islands))
    plan = build_plan(config.outer, tensor_specs(trainings[names[0]].parameters))
    records: list[Mapping[str, Any]] = []
    host = _SyncerHost(config, plan, directory, network, records.append, world.on_syncer_event)
    await host.start()
    keeping = asyncio.create_task(host.live(world.syncer_lives))
    islands = [
        _Island(config, name, plan, trainings[name], network, start_step, world) for name in names
    ]
    clock = asyncio.get_running_loop().time
    began = clock()
    left = await asyncio.gather(*(_run_island(island, host, world) for island in islands))
    islands = [island for island, has_left in zip(islands, left, strict=True) if not has_left]
    virtual_s = clock() - began
    digests = {island.outer.digests for island in islands}
    assert len(digests) == 1, f"islands ended with different parameters: {digests}"
    with islands[0].outer.global_parameters():
        figure = trainings[islands[0].name].evaluate()
    for island in islands:
        await island.exchange.stop()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await host.stop()
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
        {island.name: island.outer.merging.dropped_tokens for island in islands},
        len(versions),
        sum(count == 1 for count in versions.values()),
        host.num_starts,
        islands[0].outer.digests,
    )


async def _run_island(island: _Island, host: _SyncerHost, world: World) -> bool:
    """Run an island to its end; returns whether it left the others before that."""
    try:
        await island.run()
    except AggregationError as error:
        if world.on_end is None or island.exchange.failure is not None:  # else it ends all
            raise
        await island.exchange.stop()
        host.take_out(island.name)
        world.on_end(island.name, error)
        return True
    return False


class _SyncerHost:
    """The syncer, started again and again on what it has written."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        directory: Path,
        network: LoopbackNetwork,
        on_record: Callable[[Mapping[str, Any]], None],
        on_event: Callable[[Event], None],
    ) -> None:
        self._config, self._plan, self._directory = config, plan, directory
        self._network, self._on_record, self._on_event = network, on_record, on_event
        self._members = tuple(sorted(config.islands))
        self._incarnations = _Incarnations()
        self.num_starts = 0
        self._running: tuple[Syncer, Server] | None = None

    async def start(self) -> None:
        config, plan = self._config, self._plan
        self.num_starts += 1
        syncer = Syncer(
            plan,
            build_syncer_rules(config, timeline=0),
            [
                FragmentStore(self._directory, part, config.outer.retained_versions)
                for part in plan.fragments
            ],
            syncer_epoch=self.num_starts,
            incarnations=self._incarnations,
            is_granted=lambda _: True,
            workers=Workers.all_by(_InlineWorker()),
            on_record=self._on_record,
            on_change=lambda: None,
            on_event=self._on_event,
            unix_clock=asyncio.get_running_loop().time,
        )
        await syncer.start()
        if len(self._members) < len(config.islands):
            syncer.set_orders(Orders(Roster(self._members)))
        server = self._network.server(_SYNCER, syncer.handlers)
        await server.start()
        self._running = syncer, server

    def take_out(self, island: str) -> None:
        """Have the next rounds wait for an island no more."""
        self._members = tuple(name for name in self._members if name != island)
        if self._running is not None:
            self._running[0].set_orders(Orders(Roster(self._members)))

    async def stop(self) -> None:
        """Drop it, with all that was not durable."""
        if self._running is not None:
            (syncer, server), self._running = self._running, None
            await server.stop(0)
            await syncer.stop()

    async def live(self, lives: Iterable[tuple[float, float]]) -> None:
        for lives_s, away_s in lives:
            await asyncio.sleep(lives_s)
            await self.stop()
            await asyncio.sleep(away_s)
            await self.start()


class _Island:
    """One island, of one rank, through all its starts."""

    def __init__(
        self,
        config: Config,
        name: str,
        plan: Plan,
        training: Training,
        network: LoopbackNetwork,
        start_step: int,
        world: World,
    ) -> None:
        self.name = name
        self.busy_s = self.trained_s = 0.0
        self._config, self._plan = config, plan
        self._training = training
        self._network = network
        self._start_step = start_step
        self._world = world
        self._runner = _LoopRunner()
        self._num_starts = 0
        self._began_s: float | None = None

    async def run(self) -> None:
        """Live, fail and come back to the end of the run."""
        last_inner_step = self._start_step
        for lives_s, away_s in itertools.chain(self._world.lives(self.name), [(math.inf, 0.0)]):
            self._start()
            life = asyncio.create_task(self._live(last_inner_step))
            try:
                await asyncio.wait({life}, timeout=None if lives_s == math.inf else lives_s)
            finally:
                is_over = life.done()
                life.cancel()
            if is_over:
                life.result()
                break
            await asyncio.wait({life})
            last_inner_step = self.outer.inner_step
            self._world.on_failure(self.name, self.outer)
            await self.exchange.stop()
            await asyncio.sleep(away_s)

    def _start(self) -> None:
        """Build what a start of an island has: its way to the syncer, and its outer loop."""
        config, plan = self._config, self._plan
        self._num_starts += 1
        shards = LaneShards(plan, self._training.parameters, group=None)
        on_event = functools.partial(self._world.on_event, self.name)
        self.exchange = _Exchange(
            plan,
            {f.fragment_id: shards.lanes_of(f.fragment_id) for f in plan.fragments},
            connections=[
                SyncerConnection(
                    [fragment.fragment_id for fragment in plan.fragments],
                    control=self._world.way(self.name, self._network.connect(_SYNCER)),
                    data=self._world.way(self.name, self._network.connect(_SYNCER)),
                )
            ],
            grant=Grant(
                run=config.run.name,
                island=self.name,
                incarnation=self._num_starts,
                roles=[ROLE_ISLAND],
            ),
            rules=ExchangeRules(
                uplink_codec=config.outer.uplink,
                error_feedback=config.outer.error_feedback,
                error_feedback_decay=config.outer.error_feedback_decay,
                since_send=config.outer.local_mix == "since_send",
                rpc_deadline_s=_DEADLINE_S,
                policy=RetryPolicy(max_wait_s=1.0, budget_s=_DEADLINE_S),
                seed=config.run.seed,
                on_arrival=config.outer.is_on_arrival,
            ),
            rng=random.Random(self.name),
            on_event=on_event,
        )
        self.exchange.before_send = functools.partial(self._world.before_send, self.name)
        self.outer = OuterLoop(
            LoopParts(
                plan,
                build_schedule(config.outer, config.run.inner_steps),
                shards,
                self.exchange,
                self._runner,
                Agreement(None),
                timeline=0,
                local_mix=config.outer.local_mix,
                clock=asyncio.get_running_loop().time,
                on_event=on_event,
                start_step=self._start_step,
            ),
            total_tokens=config.total_tokens if config.outer.is_on_arrival else None,
        )

        self.outer.loss_of = self._training.evaluate

    async def _live(self, last_inner_step: int) -> None:
        await self._runner.drive(
            self.outer.starting(overwrite_initial=False, last_inner_step=last_inner_step)
        )
        outer, clock, world = self.outer, asyncio.get_running_loop().time, self._world
        if self._began_s is None:
            self._began_s = clock()
        while not outer.is_over:
            takes_s = world.step_s(self.name, outer.inner_step)
            await asyncio.sleep(takes_s)
            self.busy_s += takes_s
            made = self._training.inner_step(outer.inner_step, outer.schedule_step)
            await self._runner.drive(
                outer.stepping(made.num_tokens, loss=made.loss, bound=made.bound)
            )
            if outer.check.mend is not Mend.NOTHING:
                self._training.mend(is_new=outer.check.mend is Mend.ALL)
            world.on_step(self.name, outer, made.num_tokens)
        self.trained_s = clock() - self._began_s
        await self._runner.drive(self.outer.finishing())


class _Exchange(Exchange):
    """An exchange whose contributions the world may change."""

    before_send: Callable[[Fragment, Lanes, Lanes], None]

    def send(self, send: Send) -> None:
        p = send.sent.key.fragment_id
        self.before_send(self._plan.fragments[p], self.anchor(p), send.local)
        super().send(send)


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


class _Incarnations:
    """What outlives the syncer's process besides its records."""

    def __init__(self) -> None:
        self._saved: dict[str, int] = {}

    def load(self) -> dict[str, int]:
        return dict(self._saved)

    def store(self, incarnations: dict[str, int]) -> None:
        self._saved = dict(incarnations)
