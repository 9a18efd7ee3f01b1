"""Answers the polls of carriers; each is held back until there is news for it.

A poll is about the fragments that it says it knows, all of them where it says of none: an island of
a thousand ranks, of which each carries a few lanes, is not told of everything a thousand times.

Source: PROTOCOL.md, "One fragment, one round" and "Outcomes".
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from diloco.loop_clock import loop_now
from diloco.protocol.rounds.messages import MOST_UPLOADS, keys_of, outcome_message
from diloco.protocol.rounds.terms import RoundKey
from diloco.protocol.rounds.timing import StepTimes
from diloco.protos import fragment_pb2 as wire
from diloco.protos.control_pb2 import Grant
from diloco.syncer.admission import NOT_CURRENT, CallAdmission
from diloco.syncer.service import FragmentService
from diloco.syncer.spool import Spool
from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.errors import FrameError
from diloco.transport.framing import MAX_HEADER_BYTES

_MAX_POLL_S = 60.0
#: Bytes up to which an answer has contributors' names; lengths of what is around them may grow.
_MOST_REPLY_BYTES = MAX_HEADER_BYTES - (1 << 14)
#: Bytes of a name in a message, its characters not counted.
_NAME_OVERHEAD = 2
#: An island that cannot say yet how long its steps take is answered soon, so that it can: where
#: times are measured nothing opens before.
UNTIMED_POLL_S = 1.0
#: Polls that look at once: of ten thousand that wait no other call is to wait for all.
_LOOK_AT_ONCE = 64


class _Waiting:
    """A poll that waits: the fragments that it is about, and those that have changed since."""

    def __init__(self, island: str, about: Collection[int]) -> None:
        self.island = island
        self.about = about
        self.changed: set[int] = set()
        self.is_due = asyncio.Event()

    def take(self) -> Collection[int]:
        """Return the fragments to look at, in their order, and wait for others."""
        self.is_due.clear()
        changed, self.changed = self.changed, set()
        return [p for p in self.about if p in changed]


class Polls:
    """Answers the polls of all islands; `wake` has those that wait look for news."""

    def __init__(
        self,
        services: Mapping[int, FragmentService],
        admission: CallAdmission,
        steps: StepTimes,
        spool: Spool,
        *,
        num_fragments: int,
        syncer_epoch: int,
        founded_by: Callable[[str], Collection[int]],
        fatal: Callable[[], wire.Fatal | None],
    ) -> None:
        """Assign only.

        Args:
            services: Of the syncer's fragments, by fragment id.
            admission: Has the rules of now, and knows which starts count.
            steps: Is told how long inner steps take.
            spool: Says whether what is due has room.
            num_fragments: Of the run's plan.
            syncer_epoch: Of the syncer's start.
            founded_by: Fragments whose first parameters an island, by name, is to give.
            fatal: Gives why the run cannot go on; None: it can.
        """
        self._services = services
        self._admission = admission
        self._steps = steps
        self._spool = spool
        self._num_fragments = num_fragments
        self._epoch = syncer_epoch
        self._founded_by = founded_by
        self._fatal = fatal
        self._waiting: dict[_Waiting, None] = {}
        self._due: dict[_Waiting, None] = {}  # that have not been told to look yet, in turn

    def wake(self, fragment_id: int | None = None) -> None:
        """Have the polls look that are about a fragment; None: all, at all of theirs.

        A few at once, and each once, however often there is news before its turn.
        """
        if fragment_id is None:
            self._wake(self._waiting)
        else:
            self._wake((w for w in self._waiting if fragment_id in w.about), {fragment_id})

    def wake_islands(self, islands: Collection[str]) -> None:
        """Have the polls of some islands look, at all of theirs."""
        self._wake(waiting for waiting in self._waiting if waiting.island in islands)

    def _wake(self, concerned: Iterable[_Waiting], changed: Collection[int] = ()) -> None:
        had_due = bool(self._due)
        for waiting in concerned:
            waiting.changed.update(changed or waiting.about)
            if not waiting.is_due.is_set():
                self._due[waiting] = None
        if self._due and not had_due:
            asyncio.get_running_loop().call_soon(self._wake_some)

    def _wake_some(self) -> None:
        for waiting in list(itertools.islice(self._due, _LOOK_AT_ONCE)):
            del self._due[waiting]
            waiting.is_due.set()
        if self._due:
            asyncio.get_running_loop().call_soon(self._wake_some)

    async def poll(self, call: IncomingCall) -> Reply:
        """Answer once there is something that the caller does not know, or its time is over."""
        request = wire.PollRequest.FromString(call.header)
        if not await self._admission.accept(request.grant, request.protocol_version):
            return Reply.of(self._fenced(NOT_CURRENT))
        keys = keys_of(request.outstanding, self._num_fragments)
        if len(request.known) > self._num_fragments:
            raise FrameError(
                f"{len(request.known)} fragments are known to the caller; there are "
                f"{self._num_fragments}"
            )
        for known in request.known:
            if (service := self._services.get(known.fragment_id)) is not None:
                service.runner.island_knows(request.grant.island, known)
        self._note_step(request)
        most_s, rules = _MAX_POLL_S, self._admission.rules
        if rules.timing is not None:
            # A poll is also a sign of life: one that is not answered for a lease would be none.
            most_s = min(most_s, rules.lease_s / 2)
            most_s = most_s if request.step_s > 0 else min(most_s, UNTIMED_POLL_S)
        about = fragments_of(request, self._services)
        if len(about) < len(request.known):
            most_s = 0.0  # the others are here no more: the caller is to ask where they are
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(request.wait_s, most_s))):
                await self._wait_for_news(request, keys, about)
        reply = self._complete(self._answer(request, keys, about), request)
        reply.asks_first = self._spool.is_full or not self._spool.lets_in(self._due_bytes())
        return Reply.of(reply)

    async def _wait_for_news(
        self, request: wire.PollRequest, keys: Sequence[RoundKey], about: Collection[int]
    ) -> None:
        """Look at all that a poll is about, then at what changes of it."""
        waiting, look_at = _Waiting(request.grant.island, about), about
        self._waiting[waiting] = None
        try:
            while not is_news(
                request,
                self._answer(request, keys, look_at),
                self._contributed(request.grant, look_at),
            ):
                await waiting.is_due.wait()
                look_at = waiting.take()
        finally:
            del self._waiting[waiting]
            self._due.pop(waiting, None)

    def _due_bytes(self) -> int:
        """What may be sent at once: contributions to open rounds, and lanes of a first model.

        Of those a rank sends some at once; where the founder has more ranks than one, they may
        have to be told `NotYet` first.
        """
        services = self._services.values()
        initial = [size for service in services for size in service.initial_bytes]
        return sum(s.due_bytes for s in services) + sum(heapq.nlargest(MOST_UPLOADS, initial))

    def _note_step(self, request: wire.PollRequest) -> None:
        if self._admission.rules.timing is not None and request.step_s > 0:
            self._steps.stepped(request.grant.island, request.step_s)
            for service in self._services.values():
                service.runner.stepped()

    def _complete(self, reply: wire.PollReply, request: wire.PollRequest) -> wire.PollReply:
        """Add the lists of an answer: of a thousand islands they are most of it.

        Names are given while there is room; plans are bounded so that the rest has some.
        """
        known = {state.fragment_id: state for state in request.known}
        names = {
            state.fragment_id: self._services[state.fragment_id].complete(
                state, request.grant.island, known.get(state.fragment_id)
            )
            for state in reply.fragments
        }
        left = _MOST_REPLY_BYTES - reply.ByteSize()
        for state in reply.fragments:
            left -= sum(_NAME_OVERHEAD + len(name) for name in names[state.fragment_id])
            if left < 0:
                break
            state.contributors.extend(names[state.fragment_id])
        return reply

    def _answer(
        self, request: wire.PollRequest, keys: Sequence[RoundKey], about: Collection[int]
    ) -> wire.PollReply:
        grant, timeline = request.grant, self._admission.rules.timeline
        if not self._admission.is_current(grant):
            return self._fenced(f"a newer start of island {grant.island!r} has joined")
        wanted = self._founded_by(grant.island)
        reply = wire.PollReply(
            syncer_epoch=self._epoch,
            fragments=[self._services[p].state(wants_initial=p in wanted) for p in about],
            fatal=self._fatal(),
        )
        if request.sent_by:
            self._add_counted(reply, grant.island, request.sent_by)
        for key in keys:
            service = self._services.get(key.fragment_id)
            sender = grant.incarnation if key.timeline == timeline else request.sent_by
            outcome = service and service.runner.rounds.outcome(key, grant.island, sender)
            if outcome:
                reply.outcomes.append(outcome_message(outcome))
        for state in reply.fragments:
            damage = self._services[state.fragment_id].runner.damage
            state.asked, state.wanted_version = damage.wanted_of(grant.island, loop_now())
        return reply

    def _contributed(self, grant: Grant, about: Collection[int]) -> list[int]:
        """Name the fragments whose attempts have all of the contribution of a start."""
        return [
            p
            for p in about
            if self._services[p].runner.rounds.current.has_whole(grant.island, grant.incarnation)
        ]

    def _add_counted(self, reply: wire.PollReply, island: str, incarnation: int) -> None:
        """Tell a start that resumes what of the start before it counts."""
        for state in reply.fragments:
            rounds = self._services[state.fragment_id].runner.rounds
            if (counted := rounds.past.newest_counted(island, incarnation)) is not None:
                state.counted_version = counted.version + 1
                state.counted_attempt = counted.attempt

    def _fenced(self, message: str) -> wire.PollReply:
        return wire.PollReply(syncer_epoch=self._epoch, is_fenced=True, message=message)


def fragments_of(request: wire.PollRequest, fragment_ids: Collection[int]) -> Collection[int]:
    """Choose the fragments that a poll is about, in the order of all that there are."""
    known = {state.fragment_id for state in request.known}
    return [p for p in fragment_ids if p in known] if known else fragment_ids


def is_news(
    request: wire.PollRequest, reply: wire.PollReply, contributed: Collection[int] = ()
) -> bool:
    """Whether a reply tells a carrier something that it does not know.

    That the round of its own contribution has closed does not: it waits for the version. An answer
    then would have its next poll under way when that is published, a round trip later. A poll is
    mostly older than the contribution, so it is not the request that says what there is of one.

    Args:
        request: What the carrier knows.
        reply: What there is now.
        contributed: Ids of the fragments whose attempts have all of the caller's contribution.
    """
    if request.known_epoch != reply.syncer_epoch or reply.is_fenced or reply.outcomes:
        return True
    if reply.HasField("fatal"):
        return True
    known = {state.fragment_id: state for state in request.known}
    for state in reply.fragments:
        before = known.get(state.fragment_id)
        if before is None:
            return True
        is_open = state.is_open or (state.fragment_id in contributed and before.is_open)
        if _what_changes(state, is_open) != _what_changes(before, before.is_open):
            return True
    return False


def _what_changes(state: wire.FragmentState, is_open: bool) -> tuple[bool | int, ...]:
    if state.is_damaged:
        return True, state.asked
    return state.is_founded, state.version, state.attempt, is_open, state.wants_initial
