"""An island of a run under the virtual clock: the project's own bookkeeping, in simulated time.

What it owes and is owed is `diloco.protocol.island.ledger`, when it sends and merges
`diloco.protocol.island.pace`, what it knows of a fragment
`diloco.island.exchange.fragment_state`; the order of things at a step boundary is that of
`diloco.island.outer_loop`. Training, and what training waits for, is one process; polls, encoding,
transfers and staging go on besides it, one thing at a time where one thread does them.

It is not the driver itself (`diloco.launch.loopback_run` runs that in virtual time), because that
moves real bytes through real codecs: 100 inner steps of the demo on 5 Mbit/s take 2.0 s of CPU
there and 0.03 s here and in `actors`, without any training in both.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import simpy

from diloco.island.exchange.contributions import NOT_OPEN_WAIT_S
from diloco.island.exchange.fragment_state import IslandFragment
from diloco.outer.schedule import Schedule
from diloco.protocol.island.ledger import FragmentLedger, LocalMix, Outstanding, Target, Verdict
from diloco.protocol.island.pace import ArrivalPace, Pace, ScheduledPace, aim, arrival_vote
from diloco.protocol.island.resume_point import Entered, resume_point_of
from diloco.protocol.island.votes import IslandVote
from diloco.protocol.rounds.messages import outcome_of
from diloco.protocol.rounds.terms import Admission
from diloco.protos import fragment_pb2 as wire
from diloco.simulations.engine.clock import Crew, Engine, Signal, Steps
from diloco.simulations.engine.network import Network, Path
from diloco.simulations.engine.timeline import Span, SpanKind
from diloco.simulations.runs.actors import SimulatedSyncer, left_over
from diloco.simulations.runs.costs import HostCosts
from diloco.syncer.polls import UNTIMED_POLL_S
from diloco.transport.shaping.shaped import TURN_BYTES
from diloco.versions.publication import MOST_TOGETHER

#: Before it knows how long its steps take, an island polls for so long as a real one does.
_LAST_UNTIMED_S = 60.0


@dataclass(frozen=True, slots=True)
class FragmentSize:
    """What a fragment weighs: values, lanes, and bytes of a contribution and of a version.

    Bytes are what crosses the island's line to its syncer.
    """

    numel: int
    lanes: int
    bytes_up: float
    bytes_down: float
    float32_bytes: float


class StepDraws:
    """Durations of inner steps: normal around a mean, none under a tenth of it."""

    def __init__(self, mean_s: float, noise: float, stream: random.Random) -> None:
        """Take the mean in seconds, the standard deviation over it, and what is drawn from."""
        self._mean_s, self._noise, self._stream = mean_s, noise, stream

    def __call__(self) -> float:
        """Draw the next one."""
        if not self._noise:
            return self._mean_s
        drawn_s = self._stream.gauss(self._mean_s, self._noise * self._mean_s)
        return max(0.1 * self._mean_s, drawn_s)


@dataclass(frozen=True, slots=True)
class IslandTraining:
    """How an island trains.

    Attributes:
        tokens: Of an inner step.
        ranks: Which share its part of the costs.
        step_s: Draws the duration of the next inner step, in seconds.
    """

    tokens: int
    ranks: int
    step_s: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a fragment that leaves an island by itself.

    Attributes:
        at: When it is ready, as a share of the inner step after which the fragment is sent.
        share: Of the fragment's bytes.
        inside_s: Seconds that it takes inside the island first, one piece after the other.
    """

    at: float
    share: float
    inside_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Exchanging:
    """What all islands of a run have in common.

    Of a scenario, which run files have not: `pieces` of every fragment, which leave one after the
    other while the step is under way; and whether calls take the delay of a line (`has_calls`).
    """

    schedule: Schedule
    sizes: Sequence[FragmentSize]
    local_mix: LocalMix
    on_arrival: bool
    plain_up: bool
    plain_down: bool
    pieces: Sequence[Sequence[Piece]] = ()
    has_calls: bool = True


@dataclass(slots=True)
class Sums:
    """What an island has done until a moment; durations in seconds, sizes in bytes."""

    wall_s: float = 0.0
    inner_steps: int = 0
    compute_s: float = 0.0
    blocked_s: float = 0.0
    copied_s: float = 0.0
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    merges: int = 0
    lost_steps: int = 0

    def copy(self, wall_s: float) -> Sums:
        """Give what they are at a moment."""
        return replace(self, wall_s=wall_s)


@dataclass(slots=True)
class _Connection:
    """To one syncer: paths, what is polled, and who serves."""

    syncer: SimulatedSyncer
    up: Path
    down: Path
    carried: dict[int, IslandFragment]
    has_calls: bool
    epoch: int = 0

    @property
    def ask_s(self) -> float:
        """Seconds until a call has arrived."""
        return self.up.link.delay_s if self.has_calls else 0.0

    @property
    def answer_s(self) -> float:
        """Seconds until its answer has."""
        return self.down.link.delay_s if self.has_calls else 0.0


class SimulatedIsland:
    """One start of an island; `sums` grow, and `rounds` has them after every H-th inner step."""

    def __init__(
        self,
        engine: Engine,
        network: Network,
        name: str,
        training: IslandTraining,
        common: Exchanging,
        costs: HostCosts,
        paths: Mapping[SimulatedSyncer, tuple[Path, Path]],
        *,
        record: Callable[[Span], None],
        before: SimulatedIsland | None = None,
    ) -> None:
        """Stand at version 0 of every fragment; with the sums of the start before, if any."""
        self._engine, self._network, self.name = engine, network, name
        self._training, self._common, self._costs, self._record = training, common, costs, record
        self.sums: Sums = Sums() if before is None else before.sums
        self.rounds: list[Sums] = [] if before is None else before.rounds
        self.incarnation: int = 1 if before is None else before.incarnation + 1
        self.inner_step: int = 0 if before is None else before.inner_step
        self._crew = Crew(engine)
        num_fragments = len(common.sizes)
        self._ledgers = [FragmentLedger(0, p) for p in range(num_fragments)]
        self._carried = [IslandFragment(p, (0,), anchor_version=0) for p in range(num_fragments)]
        self._connections = [
            _Connection(
                syncer,
                up,
                down,
                {p: self._carried[p] for p in syncer.fragment_ids},
                common.has_calls,
            )
            for syncer, (up, down) in paths.items()
        ]
        self._connection_to = {
            p: connection for connection in self._connections for p in connection.carried
        }
        self._inside, self._line = simpy.Resource(engine, 1), simpy.Resource(engine, 1)
        self._leaving: dict[int, simpy.Process] = {}
        schedule = common.schedule
        self._pace: Pace = ArrivalPace() if common.on_arrival else ScheduledPace(schedule)
        self._news = Signal(engine)
        self._io = simpy.Resource(engine, 1)
        self._step_s = 0.0
        self._timed_at = 0.0  # when it knows how long its steps take

    @property
    def ranks_share(self) -> float:
        """Seconds that a thread of each rank takes for one of work that they share."""
        return 1 / self._training.ranks

    def start(self) -> None:
        """Begin to poll."""
        for connection in self._connections:
            self._crew.spawn(self._polling(connection))

    def stop(self) -> None:
        """End without a word, with all that is on its way."""
        self._crew.stop()
        for connection in self._connections:
            self._network.drop(connection.up)
            self._network.drop(connection.down)

    def enter(self) -> Steps:
        """Return to a run: take what is published of every fragment, and go on as others stand."""
        entered: list[Entered] = []
        for connection in self._connections:
            connection.syncer.granted(self.name, self.incarnation)
            yield self._engine.timeout(connection.ask_s + self._costs.call_s)
            # On arrival rounds go on without it: as `diloco.island.exchange.entry`, it takes what
            # is newest.
            while not (self._common.on_arrival or connection.syncer.is_steady):
                yield connection.syncer.changed.next
            for state in connection.syncer.states(self.name):
                carried = connection.carried[state.fragment_id]
                carried.on_announcement(state)
                carried.anchor_version = state.version
            num_bytes = sum(self._common.sizes[p].float32_bytes for p in connection.carried)
            yield self._engine.timeout(connection.answer_s + connection.ask_s)
            yield self._network.cross(connection.down, num_bytes, self._common.sizes[0].lanes)
            self.sums.bytes_down += num_bytes
        for ledger, carried in zip(self._ledgers, self._carried, strict=True):
            state = carried.state
            ledger.version, ledger.is_flushed = state.version, state.is_flush
            ledger.attempt, ledger.merged_tokens = state.attempt, state.merged_tokens
            entered.append(
                Entered(
                    state.version,
                    state.attempt,
                    state.sent_at_inner_step,
                    state.is_flush,
                    merged_tokens=state.merged_tokens,
                )
            )
        if not self._common.on_arrival:
            resume_point = resume_point_of(entered, self._common.schedule, 0)
            self.sums.lost_steps += max(0, self.inner_step - resume_point.inner_step)
            self.inner_step = resume_point.inner_step
            for ledger, sent_until in zip(self._ledgers, resume_point.sent_until, strict=True):
                ledger.sent_until = sent_until

    # -- training --------------------------------------------------------------------------------

    def train(self, is_over: Callable[[], bool]) -> Steps:
        """Train to the end of the schedule, or until `is_over` where islands send on arrival."""
        schedule = self._common.schedule
        if self._common.on_arrival:
            while not is_over():
                yield from self._compute(1)
                yield from self._step_on_arrival()
                self._note_round()
            return
        while self.inner_step < schedule.inner_steps:
            yield from self._compute(self._next_boundary() - self.inner_step)
            yield from self._step_scheduled()
            self._note_round()
        yield from self._finish()

    def _next_boundary(self) -> int:
        """Give the next inner step after which something is due, or whole rounds end."""
        schedule, now = self._common.schedule, self.inner_step
        period = schedule.inner_steps_per_round
        steps = [schedule.inner_steps, (now // period + 1) * period]
        for ledger in self._ledgers:
            if (due := schedule.next_due(ledger.fragment_id, now)) is not None:
                steps.append(due)
            if (sent := ledger.outstanding) is not None:
                steps.append(max(schedule.merge_step(sent.sent_at_inner_step), now + 1))
        return min(steps)

    def _compute(self, num_steps: int) -> Steps:
        began, schedule = self._engine.now, self._common.schedule
        durations = [self._training.step_s() for _ in range(num_steps)]
        seconds = sum(durations)
        if not self._step_s:
            self._timed_at = began + seconds
        due = schedule.due(self.inner_step + num_steps) if self._common.pieces else ()
        last_s = durations[-1] if due else seconds
        if seconds > last_s:
            yield self._engine.timeout(seconds - last_s)
        for p in due:
            self._leaving[p] = self._crew.spawn(self._releasing(p, last_s))
        yield self._engine.timeout(last_s)
        self.inner_step += num_steps
        self.sums.inner_steps += num_steps
        self.sums.compute_s += seconds
        for ledger in self._ledgers:
            for _ in range(num_steps):
                ledger.count(self._training.tokens)
        self._step_s = seconds / num_steps
        self._span(None, "compute", began)

    def _note_round(self) -> None:
        if self.inner_step % self._common.schedule.inner_steps_per_round == 0:
            self.rounds.append(self.sums.copy(self._engine.now))

    def _step_scheduled(self) -> Steps:
        for ledger in self._ledgers:
            if self._pace.is_merge_due(ledger, self.inner_step):
                yield from self._settle(ledger)
        due = self._pace.due(self._ledgers, self.inner_step, None, is_over=False)
        for p in due:
            yield from self._send(self._ledgers[p], is_flush=False)
        if self._pace.waits_at_send:
            for p in due:
                yield from self._settle(self._ledgers[p])

    def _step_on_arrival(self) -> Steps:
        views = [carried.view() for carried in self._carried]
        votes = [
            arrival_vote(ledger, view) for ledger, view in zip(self._ledgers, views, strict=True)
        ]
        for ledger, vote in zip(self._ledgers, votes, strict=True):
            if aim(ledger, vote):
                assert ledger.target is not None
                self._aim(ledger.fragment_id, ledger.target.version)
            if (verdict := self._pace.arrived(ledger, vote)) is not None:
                yield from self._apply(ledger, vote.attempt, verdict, None)
        agreed = IslandVote(0, tuple(votes))
        for p in self._pace.due(self._ledgers, self.inner_step, agreed, is_over=False):
            self._ledgers[p].attempt = votes[p].attempt
            yield from self._send(self._ledgers[p], is_flush=False)

    def _finish(self) -> Steps:
        """Merge what is outstanding, then flush, as the run's end does."""
        for ledger in self._ledgers:
            if ledger.outstanding is not None:
                yield from self._settle(ledger)
        waiting = list(self._ledgers) if self._common.schedule.flush else []
        while waiting:
            for ledger in waiting:
                yield from self._send(ledger, is_flush=True)
            for ledger in waiting:
                yield from self._settle(ledger)
            waiting = [ledger for ledger in waiting if not ledger.is_flushed]

    def _settle(self, ledger: FragmentLedger) -> Steps:
        """Wait for the outcome of what is outstanding, and merge."""
        carried, began = self._carried[ledger.fragment_id], self._engine.now
        while not (view := carried.view()).has_ended or view.key is None:
            yield self._news.next
        assert view.verdict is not None
        sent = ledger.outstanding
        blocked_s = self._engine.now - began
        self.sums.blocked_s += blocked_s
        if blocked_s:
            self._span(ledger.fragment_id, "wait", began)
        yield from self._apply(ledger, view.attempt, view.verdict, sent)

    def _apply(
        self, ledger: FragmentLedger, attempt: int, verdict: Verdict, sent: Outstanding | None
    ) -> Steps:
        p = ledger.fragment_id
        carried = self._carried[p]
        if verdict is Verdict.EXPIRED:
            ledger.settle(verdict, attempt=attempt, local_mix=self._common.local_mix)
            carried.settle(is_merged=False, is_included=False)
            return
        target = ledger.target or Target(ledger.version + 1, is_flush=bool(sent and sent.is_flush))
        ledger.settle(
            verdict,
            attempt=attempt,
            local_mix=ledger.mix_of(verdict, self._common.local_mix, is_flush=target.is_flush),
            merged=target,
            most_kept=self._common.schedule.inner_steps_per_round,
        )
        self.sums.merges += 1
        yield from self._copy(p, "merge", self._costs_of(p).distribute_s)
        carried.settle(is_merged=True, is_included=verdict is Verdict.INCLUDED)
        self._look(carried)

    def _send(self, ledger: FragmentLedger, *, is_flush: bool) -> Steps:
        p, carried = ledger.fragment_id, self._carried[ledger.fragment_id]
        sent = ledger.send(self.inner_step, is_flush=is_flush)
        carried.outstanding, carried.outcome = sent, None
        if sent.weight_tokens == 0 and not is_flush:
            self._crew.spawn(self._declining(p, sent))
            return
        yield from self._copy(p, "gather", self._costs_of(p).collect_s)
        self._crew.spawn(self._submitting(p, sent))

    def _costs_of(self, p: int) -> HostCosts:
        size = self._common.sizes[p]
        return self._costs.of(size.numel, size.lanes)

    def _copy(self, p: int, kind: SpanKind, seconds: float) -> Steps:
        """Keep training busy with a fragment's values."""
        began = self._engine.now
        yield self._engine.timeout(seconds * self._common.sizes[p].numel * self.ranks_share)
        self.sums.copied_s += self._engine.now - began
        self._span(p, kind, began)

    # -- during training --------------------------------------------------------------------------

    def _submitting(self, p: int, sent: Outstanding) -> Steps:
        connection, size, costs = self._connection_to[p], self._common.sizes[p], self._costs_of(p)
        rate_s = costs.plain_s if self._common.plain_up else costs.encode_s
        yield from self._work(p, "encode", rate_s)
        while self._carried[p].outstanding is sent and self._carried[p].outcome is None:
            began = self._engine.now
            calls_s = costs.call_s + size.lanes * costs.lane_s
            yield self._engine.timeout(calls_s)
            if (leaving := self._leaving.pop(p, None)) is not None:
                yield leaving
                yield self._network.cross(connection.up, 0)
            else:
                yield self._network.cross(connection.up, size.bytes_up, size.lanes)
            self.sums.bytes_up += size.bytes_up
            spread_s = self._spread_s(began + calls_s, connection.up, size.bytes_up, size.lanes)
            left_s = left_over(costs.byte_s * size.bytes_up, spread_s, size.lanes)
            yield self._engine.timeout(left_s)
            admission = yield from connection.syncer.receive(
                self.name, self.incarnation, sent, spread_s
            )
            yield self._engine.timeout(connection.answer_s)
            self._span(p, "send", began)  # until it is answered, as a real run tells it
            if admission is not Admission.NOT_OPEN:
                return
            yield self._engine.any_of([self._news.next, self._engine.timeout(NOT_OPEN_WAIT_S)])

    def _releasing(self, p: int, step_s: float) -> Steps:
        """Have the pieces of a fragment leave as the inner step that begins now readies them."""
        began, leaving = self._engine.now, []
        for piece in self._common.pieces[p]:
            if (until := began + piece.at * step_s) > self._engine.now:
                yield self._engine.timeout(until - self._engine.now)
            leaving.append(self._engine.process(self._leave(p, piece)))
        yield self._engine.all_of(leaving)

    def _leave(self, p: int, piece: Piece) -> Steps:
        connection, size = self._connection_to[p], self._common.sizes[p]
        if piece.inside_s:
            with self._inside.request() as turn:
                yield turn
                yield self._engine.timeout(piece.inside_s)
        if size.bytes_up:
            with self._line.request() as turn:
                yield turn
                yield self._network.send(connection.up, piece.share * size.bytes_up, size.lanes)

    def _declining(self, p: int, sent: Outstanding) -> Steps:
        connection = self._connection_to[p]
        yield self._engine.timeout(connection.ask_s + self._costs.call_s)
        connection.syncer.refuse(self.name, self.incarnation, sent.key, "declined: nothing to send")

    def _polling(self, connection: _Connection) -> Steps:
        """Ask what is new, again and again; a poll waits at its syncer until something is."""
        while True:
            request = wire.PollRequest(
                known=[carried.known() for carried in connection.carried.values()],
                known_epoch=connection.epoch,
            )
            keys = [
                carried.outstanding.key
                for carried in connection.carried.values()
                if carried.outstanding is not None and carried.outcome is None
            ]
            step_s = self._step_s
            yield self._engine.timeout(connection.ask_s + self._costs.call_s)
            connection.syncer.stepped(self.name, step_s)
            overdue = None if step_s else self._engine.timeout(self._untimed_poll_s)
            while True:
                changed = connection.syncer.changed.next
                reply = connection.syncer.answer(request, self.name, self.incarnation, keys)
                if reply is not None or (overdue is not None and overdue.processed):
                    break
                yield changed if overdue is None else self._engine.any_of([changed, overdue])
            yield self._engine.timeout(connection.answer_s)
            if reply is not None:
                self._on_reply(connection, reply)

    @property
    def _untimed_poll_s(self) -> float:
        """How long a poll waits for news that does not say how long inner steps take.

        A real one asks again every second. Of first steps that take hours, those questions that
        tell nothing are left out: they would be all that a simulation does.
        """
        return max(UNTIMED_POLL_S, self._timed_at - self._engine.now - _LAST_UNTIMED_S)

    def _on_reply(self, connection: _Connection, reply: wire.PollReply) -> None:
        connection.epoch = reply.syncer_epoch
        for state in reply.fragments:
            connection.carried[state.fragment_id].on_announcement(state)
        for outcome in map(outcome_of, reply.outcomes):
            carried = connection.carried[outcome.key.fragment_id]
            sent = carried.outstanding
            if sent is None or outcome.key != sent.key or carried.outcome is not None:
                continue
            is_declined = outcome.reason.startswith("declined:")
            carried.outcome = Verdict.DECLINED if is_declined else Verdict(outcome.kind.value)
        for carried in connection.carried.values():
            self._look(carried)
        self._news.set()

    def _aim(self, p: int, version: int) -> None:
        """Stage what was agreed on; a rank alone has agreed on what it stages already."""
        carried = self._carried[p]
        carried.aimed_version = version
        self._look(carried)

    def _look(self, carried: IslandFragment) -> None:
        """Begin to stage what is to be staged next, if it is published and nothing is staged."""
        anchored = carried.anchor_version
        if carried.staging_version > anchored:
            return
        version = carried.state.version if self._common.on_arrival else anchored + 1
        if anchored < version <= carried.state.version:
            carried.staging_version = version
            self._crew.spawn(self._staging(carried, version))

    def _staging(self, carried: IslandFragment, version: int) -> Steps:
        p = carried.fragment_id
        connection, size, costs = self._connection_to[p], self._common.sizes[p], self._costs_of(p)
        began = self._engine.now
        yield self._engine.timeout(connection.ask_s + costs.call_s)
        is_plain = carried.state.is_flush
        # An island that leaps takes the payloads of all the versions between.
        num_versions = version - carried.anchor_version
        num_bytes = size.float32_bytes if is_plain else size.bytes_down * num_versions
        crossed_from = self._engine.now
        yield self._network.cross(connection.down, num_bytes, size.lanes)
        calls = math.ceil(size.numel / MOST_TOGETHER)
        # The syncer answers one after another, so that they begin and end to cross like that, too.
        spread_s = max(0.0, self._engine.now - crossed_from - connection.down.link.delay_s)
        connection.syncer.fetched(self.name, p, version)
        self.sums.bytes_down += num_bytes
        self._span(p, "fetch", began)
        is_cheap = is_plain or self._common.plain_down
        rate_s = costs.plain_s if is_cheap else costs.stage_s * num_versions
        rate_s += costs.carry_s + costs.byte_s * num_bytes / size.numel
        yield from self._work(p, "decode", rate_s, spread_s, calls)
        carried.staged_version = version
        self._news.set()

    def _spread_s(self, began: float, path: Path, num_bytes: float, num_calls: int) -> float:
        """Give the time over which calls ended that began to cross together.

        They take turns on the link, so that all end within the last turn of each.
        """
        turns = max(1, math.ceil(num_bytes / num_calls / TURN_BYTES))
        return max(0.0, self._engine.now - began - path.link.delay_s) / turns

    def _work(
        self, p: int, kind: SpanKind, rate_s: float, spread_s: float = 0.0, num_parts: int = 1
    ) -> Steps:
        """Have the threads next to training do something with a fragment; see `left_over`."""
        with self._io.request() as turn:
            yield turn
            began = self._engine.now
            seconds = rate_s * self._common.sizes[p].numel * self.ranks_share
            yield self._engine.timeout(left_over(seconds, spread_s, num_parts))
        self._span(p, kind, began)

    def _span(self, fragment: int | None, kind: SpanKind, began: float) -> None:
        self._record(Span(self.name, None, fragment, kind, began, self._engine.now))
