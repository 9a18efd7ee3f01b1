"""One fragment at the peer of an island under the virtual clock: declares, reduces, reports, heals.

What is done next is `diloco.protocol.rounds.allreduce.duty`, who reduces a lane the real
assignment, what crosses the lines the real `Replica`'s sizes; the order of things is that of
`diloco.island.peer.fragment`. Here is only when they happen.

The real decider and peers, run in virtual time on a loopback network, take 0.41 s of CPU for 30
inner steps of two islands of 600 parameters, where these take 0.054 s whatever the model's size;
with four islands 0.79 s and 0.089 s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import simpy

from diloco.compression.lanes import lane_codec
from diloco.island.peer.fragment import ASK_AGAIN_S, RESULT_WAIT_S, Own
from diloco.island.peer.reduction import LANES_IN_FLIGHT
from diloco.island.peer.replica import SECTIONS, Replica
from diloco.outer.fragments import Fragment
from diloco.protocol.rounds.allreduce import (
    Announced,
    Assignment,
    Duty,
    Prepared,
    Staged,
    duty,
    gathers_mean,
)
from diloco.protocol.rounds.allreduce_messages import arrivals_of
from diloco.protocol.rounds.terms import Admission, Outcome, OutcomeKind
from diloco.protos import allreduce_pb2
from diloco.protos import fragment_pb2 as wire
from diloco.protos.control_pb2 import Grant
from diloco.simulations.engine.clock import Crew, Engine, Signal, Steps
from diloco.simulations.engine.mesh import Mesh
from diloco.simulations.engine.network import Network
from diloco.simulations.engine.timeline import Span, SpanKind
from diloco.simulations.runs.costs import HostCosts
from diloco.simulations.runs.decider import Call, SimulatedDecider
from diloco.simulations.runs.islands import Sums
from diloco.transport.shaping.shaped import TURN_BYTES
from diloco.versions.publication import PublicationRules

_T = TypeVar("_T")

#: Flushes of a disk between a close and its announcement: staging, the journal, promotion.
FLUSHES_A_ROUND = 3


def peer_name(island: str) -> str:
    """Name what the peer of an island does, in spans."""
    return f"{island}-peer"


@dataclass(frozen=True, slots=True)
class PeerSetting:
    """What all peers of a run have in common.

    Attributes:
        islands: Names of all.
        engine: The clock.
        network: What is under way.
        mesh: The lines.
        decider: Of all fragments.
        rules: Codecs.
        costs: What hosts take.
        first_wait_s: After a pull that brought nothing.
        max_wait_s: The longest such wait.
        record: Called with every span.
        peers: Every island's peers, by fragment.
    """

    islands: Sequence[str]
    engine: Engine
    network: Network
    mesh: Mesh
    decider: SimulatedDecider
    rules: PublicationRules
    costs: HostCosts
    first_wait_s: float
    max_wait_s: float
    record: Callable[[Span], None]
    peers: dict[str, dict[int, SimulatedFragmentPeer]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Version:
    """A version that is durable, and what its record says."""

    number: int = 0
    digest: bytes = b""
    contributors: tuple[str, ...] = ()
    sent_at_inner_step: int = 0
    is_flush: bool = False

    @classmethod
    def of(cls, assignment: Assignment) -> _Version:
        """Give what a round makes; its digest is that of its content, which decides the result."""
        counted = assignment.contributors
        return cls(
            assignment.key.version + 1,
            assignment.id,
            tuple(each.island for each in counted),
            max(each.sent_at_inner_step for each in counted),
            assignment.is_flush,
        )


class SimulatedFragmentPeer:
    """One fragment at the peer of an island; versions are durable, the rest ends with a start.

    `own` is the contribution that is held, `changed` tells of news.
    """

    def __init__(
        self,
        setting: PeerSetting,
        name: str,
        fragment: Fragment,
        worker: simpy.Resource,
        lines: Mapping[str, simpy.Resource],
        sums: Sums,
        *,
        on_change: Callable[[], None],
    ) -> None:
        """Hold version 0, until `begin`.

        Args:
            setting: Of all peers.
            name: Of the island.
            fragment: Of the plan.
            worker: Does the work on all fragments of this island's peer.
            lines: By holder, the last turns of all that is pulled from there, one after the other.
            sums: The island's, which count what crosses its line.
            on_change: Called when what the island's ranks see may have changed.
        """
        self._setting, self._engine, self._costs = setting, setting.engine, setting.costs
        self.name, self.fragment = name, fragment
        self._worker, self._lines = worker, lines
        self._sums, self._on_change = sums, on_change
        self._replica = Replica(Path("unused"), fragment, setting.rules, retained=0)  # for sizes
        self.changed, self._ended = Signal(self._engine), Signal(self._engine)
        self._crew = Crew(self._engine)
        self._version, self._staged = _Version(), _Version()
        self.is_here = False
        self._forget()

    def _forget(self) -> None:
        """Begin without what was in memory."""
        self._announced, self._is_open = Announced(), False
        self.own: Own | None = None
        self._reduced: set[int] = set()
        self._reduced_id = self._staged_id = self._reported_id = b""
        self._own_lanes = simpy.Resource(self._engine, LANES_IN_FLIGHT)
        self._other_lanes = simpy.Resource(self._engine, LANES_IN_FLIGHT)

    def begin(self, incarnation: int) -> None:
        """Serve, with a start of the island."""
        self._forget()
        self.is_here, self._incarnation = True, incarnation
        self._crew.spawn(self._tend())

    def stop(self) -> None:
        """End without a word; what others pull from here breaks."""
        self.is_here = False
        self._crew.stop()
        for other in set(self._setting.islands) - {self.name}:
            self._setting.mesh.drop(self.name, other, self.fragment.fragment_id)
        self._ended.set()

    # -- what is heard and seen ------------------------------------------------------------------

    def on_announced(self, announced: Announced, *, is_open: bool) -> None:
        """Take in what the decider says of this fragment."""
        if (self._announced, self._is_open) != (announced, is_open):
            self._announced, self._is_open = announced, is_open
            self._notify()

    def take_outcome(self, outcome: Outcome) -> None:
        """Record how the island's contribution ended."""
        if self.own is not None and self.own.key == outcome.key:
            self.own.outcome = outcome
            self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self._on_change()

    @property
    def version(self) -> int:
        """Newest version that is durable here, and committed."""
        return self._version.number

    def state(self) -> wire.FragmentState:
        """Give what the island's ranks see."""
        version, announced = self._version, self._announced
        is_current = (version.number, version.digest) == (
            announced.version,
            announced.state_digest,
        )
        state = wire.FragmentState(
            fragment_id=self.fragment.fragment_id,
            attempt=announced.attempt if is_current else 0,
            is_open=self._is_open and is_current,
        )
        if announced.version >= version.number:
            state.is_founded, state.version = True, version.number
            state.contributors.extend(version.contributors)
            state.sent_at_inner_step = version.sent_at_inner_step
            state.is_flush = version.is_flush
        return state

    # -- the island's contribution ---------------------------------------------------------------

    def contribute(self, own: Own) -> None:
        """Make `own` what the island contributes, or declines, and declare it."""
        self.own = own
        self._crew.spawn(self._declare(own))
        self.changed.set()

    def _declare(self, own: Own) -> Steps:
        """Have the decider know of it, until it has its end."""
        is_told = False
        while self.own is own and not self._is_over(own):
            news = self.changed.next
            if is_told:
                yield news
                continue
            if own.decline_reason:
                reason = f"declined: {own.decline_reason}"
                decider, start = self._setting.decider, (self.name, self._incarnation)
                yield from self._asked(decider.refuse(own.key, *start, reason))
                is_told = own.outcome is not None
            else:
                is_told = yield from self._is_declared(own)
            if not is_told:
                yield self._engine.any_of([news, self._engine.timeout(ASK_AGAIN_S)])

    def _is_declared(self, own: Own) -> Call[bool]:
        header, num_lanes = own.header, len(self.fragment.lanes)
        request = allreduce_pb2.DeclareRequest(
            key=header.key,
            grant=Grant(island=self.name, incarnation=self._incarnation),
            sent_at_inner_step=header.sent_at_inner_step,
            weight_tokens=header.weight_tokens,
            weight_steps=header.weight_steps,
            is_flush=header.is_flush,
            lane_digests=[b""] * num_lanes,
        )
        declaring = self._setting.decider.declare(arrivals_of(request))
        admission, outcome = yield from self._asked(declaring)
        if outcome is not None:
            self.take_outcome(outcome)
        return admission not in (Admission.NOT_OPEN, Admission.FENCED)

    def _is_over(self, own: Own) -> bool:
        if own.outcome is not None and own.outcome.kind is not OutcomeKind.REFUSED:
            return True
        return own.key.version < self._announced.version

    def _asked(self, call: Call[_T]) -> Call[_T]:
        """Have the decider called, over the island's line, and answer."""
        up_s, down_s = self._setting.mesh.control_s(self.name)
        yield self._engine.timeout(up_s + self._costs.peer_call_s)
        answer = yield from call
        yield self._engine.timeout(down_s)
        return answer

    # -- what is done ----------------------------------------------------------------------------

    def _tend(self) -> Steps:
        """Do what has to be done, as it is announced."""
        while True:
            news = self.changed.next
            if (yield from self._act()):
                self._notify()
            else:
                yield news

    def _act(self) -> Call[bool]:
        """Do one thing; false when there is nothing to do before the next news."""
        version, staged = self._version, None
        if self._staged.number > version.number:
            staged = Staged(self._staged.number, self._staged.digest, self._staged_id)
        match duty(version.number, version.digest, staged, self._announced):
            case Duty.PROMOTE:
                yield from self._work(self._costs.commit_round_s)
                self._version = self._staged
                self._reduced, self._reduced_id = set(), b""
            case Duty.HEAL:
                yield from self._heal()
            case Duty.REDUCE:
                assert self._announced.assignment is not None
                yield from self._reduce_while_wanted(self._announced.assignment)
            case Duty.REPORT if self._reported_id != self._staged_id:
                yield from self._report()
            case _:
                return False
        return True

    def _report(self) -> Steps:
        word = self._staged_id
        prepared = Prepared((word,) * len(self.fragment.lanes), self._staged.digest)
        p, start = self.fragment.fragment_id, (self.name, self._incarnation)
        yield from self._asked(self._setting.decider.prepared(p, *start, word, prepared))
        self._reported_id = word

    def _work(self, seconds: float, lane_id: int | None = None) -> Steps:
        """Have the peer's one worker do something with this fragment."""
        with self._worker.request() as turn:
            yield turn
            began = self._engine.now
            yield self._engine.timeout(seconds)
        self._span("merge", began, lane_id)

    def _span(self, kind: SpanKind, began: float, lane_id: int | None) -> None:
        p = self.fragment.fragment_id
        self._setting.record(Span(peer_name(self.name), lane_id, p, kind, began, self._engine.now))

    # -- reducing --------------------------------------------------------------------------------

    def _reduce_while_wanted(self, assignment: Assignment) -> Steps:
        """Come to the result and stage it, unless the decider announces something else first."""
        crew = Crew(self._engine)
        work = crew.spawn(self._reduce(assignment, crew))
        try:
            while work.is_alive and self._announced.assignment == assignment:
                yield self._engine.any_of([work, self.changed.next])
        finally:
            if work.is_alive:
                crew.stop()
                for other in set(self._setting.islands) - {self.name}:
                    self._setting.mesh.drop(other, self.name, self.fragment.fragment_id)

    def _reduce(self, assignment: Assignment, crew: Crew) -> Steps:
        self._reduced, self._reduced_id = set(), assignment.id
        self.changed.set()  # others may be waiting for lanes that are owned here
        lanes = self.fragment.lanes
        yield self._engine.all_of(
            [crew.spawn(self._lane(assignment, lane.lane_id, crew)) for lane in lanes]
        )
        seconds = self._costs.commit_s * self.fragment.padded_numel + self._costs.commit_round_s
        yield from self._work(seconds)
        self._staged, self._staged_id = _Version.of(assignment), self._reduced_id

    def _lane(self, assignment: Assignment, lane_id: int, crew: Crew) -> Steps:
        """Sum a lane for all, or take it from its owner."""
        owner = assignment.owner(lane_id)
        if owner == self.name:
            with self._own_lanes.request() as turn:
                yield turn
                yield from self._sum(assignment, lane_id, crew)
            self._reduced.add(lane_id)
            self.changed.set()
            return
        with self._other_lanes.request() as turn:
            yield turn
            num_bytes = self._replica.result_bytes(assignment, lane_id, self.name)
            has_result = functools.partial(_has_result, wanted=self._reduced_id, lane_id=lane_id)
            yield from self._pull(owner, lane_id, num_bytes, has_result, RESULT_WAIT_S)
            yield from self._follow(assignment, lane_id)

    def _sum(self, assignment: Assignment, lane_id: int, crew: Crew) -> Steps:
        """Pull the contributions to a lane, sum them, take the outer step, encode."""
        num_bytes = self._replica.contribution_bytes(lane_id)
        has_it = functools.partial(_has_contribution, assignment=assignment)
        islands = [each.island for each in assignment.contributors]
        pulls = [
            crew.spawn(self._pull(island, lane_id, num_bytes, has_it, 0.0))
            for island in islands
            if island != self.name
        ]
        yield self._engine.all_of(pulls)
        numel = self.fragment.lanes[lane_id].numel
        costs = self._costs.of(numel, 1)
        rate_s = costs.decode_s * len(islands) + costs.outer_s + costs.publish_s
        yield from self._work(rate_s * numel, lane_id)

    def _follow(self, assignment: Assignment, lane_id: int) -> Steps:
        """Come to the owner's result: decode what was published, and step as the owner did."""
        numel, num_contributors = self.fragment.lanes[lane_id].numel, len(assignment.contributors)
        num_bytes = self._replica.contribution_bytes(lane_id)
        num_decoded = 1 + num_contributors * (not gathers_mean(numel, num_bytes, num_contributors))
        costs = self._costs.of(numel, 1)
        rate_s = costs.decode_s * num_decoded + costs.outer_s
        yield from self._work(rate_s * numel, lane_id)

    # -- pulling ---------------------------------------------------------------------------------

    def _pull(
        self,
        holder: str,
        lane_id: int,
        num_bytes: int,
        has_it: Callable[[SimulatedFragmentPeer], bool],
        patience_s: float,
    ) -> Steps:
        """Ask another island's peer for something of a lane until it comes."""
        began, wait_s = self._engine.now, self._setting.first_wait_s
        theirs = self._setting.peers[holder][self.fragment.fragment_id]
        path = self._setting.mesh.path(holder, self.name, self.fragment.fragment_id)
        while True:
            request_s = self._setting.mesh.request_s(self.name, holder)
            yield self._engine.timeout(request_s + self._costs.peer_call_s)
            yield from theirs.wait_until(has_it, patience_s)
            if theirs.is_here and has_it(theirs):
                if (yield from self._is_crossed(theirs, num_bytes)):
                    break
            else:
                yield self._engine.timeout(path.link.delay_s)
            yield self._engine.timeout(wait_s)
            wait_s = min(2 * wait_s, self._setting.max_wait_s)
        self._span("fetch" if patience_s else "send", began, lane_id)

    def wait_until(
        self, is_so: Callable[[SimulatedFragmentPeer], bool], patience_s: float
    ) -> Steps:
        """Have something be so here, or the patience be over."""
        over = self._engine.timeout(patience_s)
        while not (is_so(self) or over.processed):
            yield self._engine.any_of([self.changed.next, over])

    def _is_crossed(self, theirs: SimulatedFragmentPeer, num_bytes: int) -> Call[bool]:
        """Bring bytes here; false if their holder ended before the last of them.

        Calls take turns, so that those which began together end one after the other, by their last
        turns: what is asked for next fills the line meanwhile.
        """
        network, ended = self._setting.network, theirs._ended.next
        path = self._setting.mesh.path(theirs.name, self.name, self.fragment.fragment_id)
        last_bytes = min(num_bytes, TURN_BYTES)
        yield self._engine.any_of([network.send(path, num_bytes - last_bytes), ended])
        line = self._lines[theirs.name]
        with line.request() as turn:
            yield turn
            sent = network.send(path, last_bytes, 1 + len(line.queue))
            yield self._engine.any_of([sent, ended])
        yield self._engine.any_of([network.cross(path, 0), ended])
        if ended.processed:
            return False
        self._sums.bytes_down += num_bytes
        theirs._sums.bytes_up += num_bytes
        return True

    # -- healing ---------------------------------------------------------------------------------

    def _heal(self) -> Steps:
        """Take the committed version from any island that has it."""
        wanted, p = self._announced, self.fragment.fragment_id
        while self._announced == wanted:
            digest = yield from self._asked(self._setting.decider.record(p))
            for island in sorted(set(self._setting.islands) - {self.name}):
                source = self._setting.peers[island][p]
                if (yield from self._is_healed_by(source, digest)):
                    return
            again = self._engine.timeout(ASK_AGAIN_S)
            yield self._engine.any_of([self.changed.next, again])

    def _is_healed_by(self, source: SimulatedFragmentPeer, digest: bytes) -> Call[bool]:
        """Take its state lane by lane, one part after the other; false if it has another one."""
        version, began = source._version, self._engine.now
        codec = self._setting.rules.payload_codec(version.is_flush)
        for lane in self.fragment.lanes:
            payload = lane_codec(codec, self.fragment, lane.lane_id)
            for section in SECTIONS:
                request_s = self._setting.mesh.request_s(self.name, source.name)
                yield self._engine.timeout(request_s + self._costs.peer_call_s)
                if not source.is_here or source._version.digest != digest:
                    return False
                is_payload = section == "payload"
                num_bytes = payload.wire_bytes(lane.numel) if is_payload else 4 * lane.numel
                if not (yield from self._is_crossed(source, num_bytes)):
                    return False
        self._span("fetch", began, None)
        seconds = self._costs.commit_s * self.fragment.padded_numel + self._costs.commit_round_s
        yield from self._work(seconds)
        self._version = version
        return True


def _has_result(peer: SimulatedFragmentPeer, *, wanted: bytes, lane_id: int) -> bool:
    """Whether the owner of a lane has its result, of the assignment that is wanted."""
    return peer._reduced_id == wanted and lane_id in peer._reduced


def _has_contribution(peer: SimulatedFragmentPeer, *, assignment: Assignment) -> bool:
    """Whether a peer still holds what an assignment counts."""
    return peer.own is not None and peer.own.key == assignment.key
