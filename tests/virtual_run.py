"""A whole run in one process: real syncer, exchanges and sessions over a loopback network.

Islands have one rank, parameters are small vectors, and an inner step is whatever function a test
gives, so that histories can be computed by hand. The clock is virtual.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from diloco.errors import ConfigError
from diloco.io_thread import Waits
from diloco.island.agreement import Agreement
from diloco.island.exchange.calls import ExchangeRules
from diloco.island.exchange.exchange import Exchange, SyncerConnection
from diloco.island.lanes.place import LanePlace
from diloco.island.lanes.shards import LaneShards
from diloco.island.outer_loop import OuterLoop
from diloco.island.outer_state import LoopParts
from diloco.outer.combination import MergeRule
from diloco.outer.fragments import Plan, TensorSpec, make_plan
from diloco.outer.optimizer import OuterOptimizer
from diloco.outer.schedule import Schedule
from diloco.protocol.island.ledger import LocalMix
from diloco.protocol.rounds.orders import Orders
from diloco.protocol.rounds.terms import Weights
from diloco.protocol.rounds.timing import TimingRules
from diloco.protos.control_pb2 import ROLE_ISLAND, Grant, StateTransfer
from diloco.syncer.rules import SyncerRules
from diloco.syncer.syncer import Syncer
from diloco.syncer.worker import Worker, Workers
from diloco.telemetry.events import Event
from diloco.transport.calls.loopback import LoopbackNetwork
from diloco.transport.contracts import Handlers, Transport
from diloco.transport.retry import RetryPolicy
from diloco.versions.pins import restore
from diloco.versions.publication import PublicationRules
from diloco.versions.store import FragmentStore

RUN = "virtual"
_T = TypeVar("_T")
InnerStep = Callable[[str, int, dict[str, Tensor]], None]
#: What each island takes from its values at an inner step.
DESCENT = {"a": 1.0, "b": 3.0, "c": 2.0, "d": 1.5, "east": 1.0, "west": 3.0}
#: Tokens of an inner step of each of `four_islands`.
TOKENS = {"a": 3, "b": 5, "c": 7, "d": 11}


def descend(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    """Take the same from all values."""
    for parameter in parameters.values():
        parameter.sub_(DESCENT[island])


def descend_unevenly(island: str, inner_step: int, parameters: dict[str, Tensor]) -> None:
    """Take least from the first value and most from the last, so that int4 loses something."""
    for parameter in parameters.values():
        parameter.sub_(torch.linspace(0.1, DESCENT[island], parameter.numel()))


class InlineWorker:
    """Runs the syncer's work where it stands: it takes no virtual time."""

    async def run(self, work: Callable[[], Any]) -> Any:
        return work()


class MemoryIncarnations:
    """Incarnations that outlive a syncer of the same test."""

    def __init__(self) -> None:
        self.saved: dict[str, int] = {}

    def load(self) -> dict[str, int]:
        return dict(self.saved)

    def store(self, incarnations: dict[str, int]) -> None:
        self.saved = dict(incarnations)


class LoopRunner:
    """The exchange lives in the loop of the caller, who is ahead of it as a training thread is."""

    def post(self, action: Callable[..., object], *arguments: object) -> None:
        asyncio.get_running_loop().call_soon(action, *arguments)

    async def drive(self, waits: Waits[_T]) -> _T:
        while True:
            try:
                wait = next(waits)
            except StopIteration as end:
                value: _T = end.value
                return value
            await asyncio.create_task(wait)  # after what was posted


def grant(island: str, incarnation: int = 1, timeline: int = 0) -> Grant:
    return Grant(
        run=RUN, timeline=timeline, island=island, incarnation=incarnation, roles=[ROLE_ISLAND]
    )


@dataclass
class Setting:
    """What a virtual run trains and how; the defaults are textbook DiLoCo."""

    initial: Mapping[str, Sequence[float]]
    inner_step: InnerStep
    directory: Path
    inner_steps: int
    start_step: int = 0
    islands: tuple[str, ...] = ("a", "b")
    tokens: Mapping[str, int] = field(default_factory=dict)
    inner_steps_per_round: int = 4
    first_inner_steps_per_round: int = 0
    num_fragments: int = 1
    overlap_steps: int = 0
    local_mix: LocalMix = 0.0
    phases: tuple[int, ...] = ()
    flush: bool = False
    optimizer: OuterOptimizer = field(default_factory=lambda: OuterOptimizer("sgd", 1.0, 0.0, 0))
    uplink_codec: str = "float32"
    downlink_codec: str = "float32"
    error_feedback: bool = False
    error_feedback_decay: float = 1.0
    round_deadline_s: float = 60.0
    unreachable_s: float = 600.0
    num_unsure_pins: int = 4
    spool_bytes: int = 1 << 30
    step_s: float = 1.0
    snapshot_rounds: int = 1
    merge: MergeRule = field(default_factory=MergeRule)
    on_member_lost: Literal["stop", "wait", "shrink"] = "stop"
    #: Given: islands come and go, and send and merge on arrival; then `timing` is due, too.
    min_members: int | None = None
    quorum: int | None = None
    timing: TimingRules | None = None
    lease_s: float = 10.0
    total_tokens: int = 0
    merges_at_once: int = 1
    weights: Weights = field(default_factory=Weights)
    has_others: bool = False
    #: Names of those that are no parameters but buffers.
    buffers: tuple[str, ...] = ()
    #: Seconds of an inner step of islands that differ from `step_s`.
    steps_s: Mapping[str, float] = field(default_factory=dict)
    #: Puts a parameter where it is trained.
    place: Callable[[Tensor], Tensor] = torch.clone
    #: Whether lanes are where the parameters are.
    has_room: bool = False
    #: Whether they are kept in host memory all the same.
    is_apart: bool = False

    def plan(self) -> Plan:
        specs = [
            TensorSpec(name, (len(values),), name in self.buffers)
            for name, values in self.initial.items()
        ]
        return make_plan(specs, num_fragments=self.num_fragments)

    def schedule(self) -> Schedule:
        return Schedule.make(
            inner_steps_per_round=self.inner_steps_per_round,
            num_fragments=self.num_fragments,
            overlap_steps=self.overlap_steps,
            inner_steps=self.inner_steps,
            flush=self.flush,
            phases=self.phases,
            first_round=self.first_inner_steps_per_round,
        )

    def publication(self) -> PublicationRules:
        return PublicationRules(
            self.uplink_codec, self.downlink_codec, self.optimizer, seed=0, merge=self.merge
        )

    def measured(self, *, grace_s: float | None = None) -> TimingRules:
        """Give bounds of times such as a configuration has by default."""
        return TimingRules(
            inner_steps_per_round=self.inner_steps_per_round,
            overlap_steps=self.overlap_steps,
            grace_share=0.5,
            grace_cap_s=10.0,
            deadline_floor_s=5.0,
            deadline_cap_s=self.round_deadline_s,
            grace_s=grace_s,
            first_round=self.first_inner_steps_per_round,
        )

    def on_arrival(self, total_tokens: int) -> Setting:
        """Give the same run where nobody waits: one island is a quorum, and grace is measured."""
        return replace(
            self, min_members=1, quorum=1, total_tokens=total_tokens, timing=self.measured()
        )

    def rules(self, timeline: int = 0) -> SyncerRules:
        return SyncerRules(
            timeline,
            tuple(sorted(self.islands)),
            self.publication(),
            self.round_deadline_s,
            self.num_unsure_pins,
            on_member_lost=self.on_member_lost,
            min_members=self.min_members,
            quorum=self.quorum,
            timing=self.timing,
            lease_s=self.lease_s,
            total_tokens=self.total_tokens,
            has_flush=self.flush,
            spool_bytes=self.spool_bytes,
            merges_at_once=self.merges_at_once,
            weights=self.weights,
            has_others=self.has_others,
        )


def four_islands(directory: Path, inner_steps: int, steps_s: Mapping[str, float]) -> Setting:
    """Give a run of four islands and four fragments in which nobody waits."""
    return Setting(
        {name: [16.0] * 2 for name in "uvwx"},
        descend,
        directory,
        inner_steps,
        islands=tuple(TOKENS),
        tokens=TOKENS,
        num_fragments=4,
        inner_steps_per_round=8,
        overlap_steps=2,
        flush=True,
        steps_s=steps_s,
    ).on_arrival(inner_steps * sum(TOKENS.values()))


@dataclass(frozen=True)
class Checkpoint:
    """What an island keeps of one inner step: its parameters and its outer state."""

    inner_step: int
    parameters: dict[str, Tensor]
    outer: dict[str, Tensor]


class VirtualIsland:
    """One start of an island: parameters, session, and the history of what it held.

    `local` and `published` have the values after every inner step of this start.
    """

    def __init__(
        self,
        name: str,
        setting: Setting,
        control: Transport,
        data: Transport,
        incarnation: int = 1,
        timeline: int = 0,
        connections: Sequence[SyncerConnection] = (),
        held: Grant | None = None,
        place: LanePlace | None = None,
    ) -> None:
        """With `ways` to several syncers, `control` and `data` are not used; `held`: its grant."""
        self.name = name
        self.setting = setting
        self.events: list[Event] = []
        self.local: list[dict[str, list[float]]] = []
        self.published: list[dict[str, list[float]]] = []
        self.parameters = {
            key: setting.place(torch.tensor(values, dtype=torch.float32)).requires_grad_(
                key not in setting.buffers
            )
            for key, values in setting.initial.items()
        }
        self.runner = LoopRunner()
        plan = setting.plan()
        shards = LaneShards(plan, self.parameters, group=None)
        if place is not None:
            shards.place = place
        elif setting.has_room:
            shards.place = LanePlace(
                next(iter(self.parameters.values())).device, is_apart=setting.is_apart
            )
        self.exchange = Exchange(
            plan,
            {f.fragment_id: shards.lanes_of(f.fragment_id) for f in plan.fragments},
            connections=connections
            or [SyncerConnection(range(len(plan.fragments)), control, data)],
            grant=held or grant(name, incarnation, timeline),
            rules=ExchangeRules(
                setting.uplink_codec,
                setting.error_feedback,
                60.0,
                RetryPolicy(max_wait_s=1.0, budget_s=setting.unreachable_s),
                seed=0,
                on_arrival=setting.min_members is not None,
                error_feedback_decay=setting.error_feedback_decay,
                since_send=setting.local_mix == "since_send",
            ),
            rng=random.Random(0),
            on_event=self.events.append,
            place=shards.place,
        )
        self.session = OuterLoop(
            LoopParts(
                plan,
                setting.schedule(),
                shards,
                self.exchange,
                self.runner,
                Agreement(None),
                timeline=timeline,
                local_mix=setting.local_mix,
                clock=asyncio.get_running_loop().time,
                on_event=self.events.append,
                start_step=setting.start_step,
            ),
            total_tokens=None if setting.min_members is None else setting.total_tokens,
        )

    def values(self) -> dict[str, list[float]]:
        return {name: parameter.cpu().tolist() for name, parameter in self.parameters.items()}

    async def start(self, *, last_inner_step: int = 0, overwrite_initial: bool = False) -> None:
        await self.runner.drive(
            self.session.starting(
                overwrite_initial=overwrite_initial, last_inner_step=last_inner_step
            )
        )

    async def checkpoint(self) -> Checkpoint:
        """Pin the present versions and keep a copy of everything."""
        await self.runner.drive(self.session.pinning())
        outer = await self.runner.drive(self.session.capturing())
        return Checkpoint(
            self.session.inner_step,
            {name: parameter.detach().clone() for name, parameter in self.parameters.items()},
            {name: values.clone() for name, values in outer.items()},
        )

    async def take_cut(self) -> Checkpoint:
        """Keep a copy of everything for the cut that is due; the syncer pins later."""
        number = self.session.cut.number
        outer = await self.runner.drive(self.session.capturing())
        self.session.cut_over()
        return Checkpoint(
            number,
            {name: parameter.detach().clone() for name, parameter in self.parameters.items()},
            {name: values.clone() for name, values in outer.items()},
        )

    async def resume(self, checkpoint: Checkpoint) -> None:
        with torch.no_grad():
            for name, values in checkpoint.parameters.items():
                self.parameters[name].copy_(values)
        await self.runner.drive(self.session.resuming(checkpoint.outer))

    async def drop(self) -> None:
        """End without a word; anyone who trains it is cancelled by the caller."""
        await self.exchange.stop()

    async def train(self, inner_steps: int) -> None:
        num_tokens = self.setting.tokens.get(self.name, 1)
        step_s = self.setting.steps_s.get(self.name, self.setting.step_s)
        for _ in range(inner_steps):
            if self.session.is_over:
                return
            await asyncio.sleep(step_s)
            with torch.no_grad():
                self.setting.inner_step(self.name, self.session.inner_step + 1, self.parameters)
            await self.runner.drive(self.session.stepping(num_tokens))
            self.local.append(self.values())
            with self.session.global_parameters():
                self.published.append(self.values())

    async def finish(self) -> None:
        await self.runner.drive(self.session.finishing())

    async def go_on(self) -> None:
        """Train from where it stands to the end of the run."""
        while not self.session.is_over:
            await self.train(1)
        await self.finish()

    async def run(self) -> None:
        await self.start()
        await self.go_on()

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [event.as_dict() for event in self.events if event.kind == kind]


class MemoryOrders:
    """Orders that outlive a syncer of the same test; a policy is JSON of fields of its `Setting`.

    `before_store` is called before anything is durable.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.saved = Orders()
        self.before_store: Callable[[], None] = lambda: None

    def load(self) -> Orders:
        return self.saved

    def store(self, orders: Orders) -> None:
        self.before_store()
        self.saved = Orders.from_json(json.loads(json.dumps(orders.to_json())))

    def rules(self, orders: Orders) -> SyncerRules:
        try:
            changed = replace(self._setting, **json.loads(orders.policy_json))
        except TypeError as error:
            raise ConfigError(str(error)) from error
        return replace(changed.rules(), policy_revision=orders.policy_revision)


class VirtualRun:
    """The network, the syncer and its durable state; `syncer` can be killed and started again.

    `own` are the fragments of one of several syncers, which share a network.
    """

    def __init__(
        self,
        setting: Setting,
        *,
        name: str = "syncer",
        own: Sequence[int] | None = None,
        network: LoopbackNetwork | None = None,
    ) -> None:
        self.setting = setting
        self.name = name
        self.own = range(len(setting.plan().fragments)) if own is None else own
        self.network = network or LoopbackNetwork()
        self.incarnations = MemoryIncarnations()
        self.orders = MemoryOrders(setting)
        self.events: list[Event] = []
        self.records: list[Mapping[str, Any]] = []
        self.worker: Worker = InlineWorker()
        self.workers: Workers | None = None  # all of them the one above
        self.epoch = 0
        self.timeline = 0
        self.retained_versions = 4
        self.keeps_all = False
        #: That the coordinator has named when the syncer starts.
        self.named_transfers: list[StateTransfer] = []
        self.intercept: Callable[[Handlers], Handlers] = lambda handlers: handlers

    async def start_syncer(self) -> Syncer:
        self.epoch += 1
        setting = self.setting
        plan = setting.plan()
        self.syncer = Syncer(
            plan,
            setting.rules(self.timeline),
            [
                FragmentStore(
                    setting.directory,
                    fragment,
                    self.retained_versions,
                    snapshot_rounds=setting.snapshot_rounds,
                    keeps_all=self.keeps_all,
                )
                for fragment in (plan.fragments[p] for p in self.own)
            ],
            syncer_epoch=self.epoch,
            incarnations=self.incarnations,
            is_granted=lambda held: held.run == RUN,
            workers=self.workers or Workers.all_by(self.worker),
            on_record=self.records.append,
            on_change=lambda: None,
            orders=self.orders,
            on_event=self.events.append,
            unix_clock=asyncio.get_running_loop().time,
        )
        await self.syncer.start()
        self.syncer.set_transfers(self.named_transfers)
        self.server = self.network.server(self.name, self.intercept(self.syncer.handlers))
        await self.server.start()
        return self.syncer

    async def kill_syncer(self) -> None:
        """Drop the syncer with all that was not durable."""
        await self.server.stop(0)
        await self.syncer.stop()

    async def resume(self, step: int) -> None:
        """Take the store back to a run checkpoint and serve it in a new timeline."""
        await self.kill_syncer()
        plan = self.setting.plan()
        restore(
            self.setting.directory,
            replace(plan, fragments=tuple(plan.fragments[p] for p in self.own)),
            step=step,
            abandoned_timeline=self.timeline,
        )
        self.timeline += 1
        self.incarnations.saved = {}
        await self.start_syncer()

    def island(
        self,
        name: str,
        incarnation: int = 1,
        held: Grant | None = None,
        place: LanePlace | None = None,
    ) -> VirtualIsland:
        return VirtualIsland(
            name,
            self.setting,
            self.network.connect("syncer"),
            self.network.connect("syncer"),
            incarnation,
            self.timeline,
            held=held,
            place=place,
        )

    async def run(self) -> dict[str, VirtualIsland]:
        """Run every island to its end; returns them by name."""
        await self.start_syncer()
        islands = {name: self.island(name) for name in self.setting.islands}
        await asyncio.gather(*(island.run() for island in islands.values()))
        for island in islands.values():
            await island.exchange.stop()
        await self.kill_syncer()
        return islands
