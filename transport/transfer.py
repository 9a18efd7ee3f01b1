"""Resumes calls whose connection broke: what either end keeps for the next attempt.

A caller makes one `Transfer` a call and gives it to every attempt. The peer keeps, under its name,
what of the payload has arrived and been verified, and later the reply; so an attempt begins at the
first byte that the peer lacks, the handler's answer is sent on from the first byte that the caller
lacks, and a handler that has answered is not asked again.

`TransferTable` is pure: `now` is given. What it keeps of broken calls is bounded in bytes, number
and time; the caller that keeps most loses first what was answered to the end, oldest first, then
the payload of which least has arrived; if it keeps one call only, all callers' calls are compared
so. The payload that is furthest therefore arrives at last, however often the lines break.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco.transport.contracts import Reply

NAME_BYTES = 16
#: Name of a call that cannot be resumed.
NO_NAME = bytes(NAME_BYTES)
#: Seconds for which a reply is kept that was sent to its end: only the caller knows whether all of
#: it arrived, and a caller on a dead path notices by its keepalive (50 s) and tries again.
SENT_S = 90.0


@dataclass(slots=True)
class Partial:
    """A payload that arrives from front to back; what has arrived has been verified.

    There is memory for all of it from its first bytes on, and none before.
    """

    payload: bytearray = field(default_factory=bytearray)
    filled: int = 0


@dataclass(slots=True)
class Transfer:
    """A caller's memory of one call.

    Attributes:
        is_bulk: Whether its payloads let those of other calls go first: whole models.
        name: Random; what the peer knows it by.
        asks_first: Whether the next attempt sends nothing of the payload before the peer has said
            where it goes on: bytes of it may have arrived, or the peer has no room for it yet.
        acknowledged_bytes: Of the payload, what the peer said it has.
        reply: What has arrived of the reply's payload.
        reply_name: The peer's name for that reply.
        sent_bytes: Of the payload, all attempts together.
        received_bytes: Of the reply's payload, all attempts together.
        num_broken: Attempts that a line broke, or damaged; from the first on, chunks are small, so
            that some arrive whole.
    """

    is_bulk: bool = False
    name: bytes = field(default_factory=lambda: secrets.token_bytes(NAME_BYTES))
    asks_first: bool = False
    acknowledged_bytes: int = 0
    reply: Partial | None = None
    reply_name: bytes = NO_NAME
    sent_bytes: int = 0
    received_bytes: int = 0
    num_broken: int = 0

    @property
    def moved_bytes(self) -> int:
        """Payload bytes of both directions that need not move again; grows with progress."""
        return self.acknowledged_bytes + (self.reply.filled if self.reply else 0)


@dataclass(slots=True, eq=False)
class Kept:
    """A peer's memory of one call.

    Attributes:
        caller: Whose it is.
        name: The caller's name for it.
        partial: What has arrived of the payload; None before it is accepted, and once answered.
        reply: The answer, once there is one.
        reply_name: Random; changes when the handler had to be asked again.
        stream: The attempt that goes on with it; None between two attempts.
        wake: Tells that attempt that another one goes on.
        idle_since: When the last attempt broke.
        is_sent: Whether that attempt sent all of the reply.
    """

    caller: str
    name: bytes
    partial: Partial | None = None
    reply: Reply | None = None
    reply_name: bytes = NO_NAME
    stream: object = None
    wake: Callable[[], None] | None = None
    idle_since: float = 0.0
    is_sent: bool = False

    @property
    def num_bytes(self) -> int:
        """What it holds on to; memory is there for a whole payload, however little has come."""
        replied = (
            len(self.reply.header) + memoryview(self.reply.payload).nbytes if self.reply else 0
        )
        return replied + (len(self.partial.payload) if self.partial else 0)

    def answered(self, reply: Reply) -> None:
        """Keep the answer in place of what was asked."""
        self.reply, self.reply_name = reply, secrets.token_bytes(NAME_BYTES)
        self.partial = None


class TransferTable:
    """What one server keeps of calls that broke."""

    def __init__(self, *, kept_bytes: int, kept_s: float, most: int = 4096) -> None:
        """Keep at most `kept_bytes` of at most `most` calls, each at most `kept_s` seconds.

        One call is kept however large it is, while it is the only one.
        """
        self._kept_bytes = kept_bytes
        self._kept_s = {False: kept_s, True: min(kept_s, SENT_S)}
        self._most = most
        self._all: dict[tuple[str, bytes], Kept] = {}
        #: By caller and `is_sent`; in the order in which the attempts ended.
        self._idle: dict[tuple[str, bool], dict[bytes, Kept]] = {}
        self._idle_bytes: Counter[str] = Counter()  # by caller, as the next
        self._idle_calls: Counter[str] = Counter()

    @property
    def num_idle_bytes(self) -> int:
        """Bytes of the calls that nobody goes on with now; bounded."""
        return self._idle_bytes.total()

    @property
    def num_idle(self) -> int:
        """Calls that nobody goes on with now; bounded."""
        return self._idle_calls.total()

    def enter(
        self,
        caller: str,
        name: bytes,
        stream: object,
        now: float,
        wake: Callable[[], None] | None = None,
    ) -> Kept:
        """Go on with a call, or begin it; an earlier attempt that still reads is superseded."""
        self._expire(now)
        kept = self._all.setdefault((caller, name), Kept(caller, name))
        self._wake(kept)
        earlier = kept.wake
        kept.stream, kept.wake = stream, wake
        if earlier is not None:
            earlier()
        return kept

    def leave(self, kept: Kept, stream: object, now: float, *, is_sent: bool = False) -> None:
        """Keep a call for its next attempt; harmless for one that was superseded or dropped.

        Args:
            kept: The call.
            stream: The attempt that ends.
            now: Seconds on any clock.
            is_sent: Whether all that there was to say was sent; a reply is kept less long then.
        """
        if kept.stream is not stream or self._all.get((kept.caller, kept.name)) is not kept:
            return
        kept.stream, kept.wake, kept.idle_since = None, None, now
        kept.is_sent = is_sent and kept.reply is not None
        self._idle.setdefault((kept.caller, kept.is_sent), {})[kept.name] = kept
        self._idle_bytes[kept.caller] += kept.num_bytes
        self._idle_calls[kept.caller] += 1
        self._expire(now)
        while self.num_idle_bytes > self._kept_bytes and self.num_idle > 1:
            self._drop_least(self._idle_bytes)
        while self.num_idle > self._most:
            self._drop_least(self._idle_calls)

    def drop(self, kept: Kept, stream: object) -> None:
        """Forget a call; harmless for one that was superseded.

        Its handler has refused it, or gives an equal reply when it is asked again.
        """
        if kept.stream is stream:
            self._drop(kept)

    def _drop(self, kept: Kept) -> None:
        key = kept.caller, kept.name
        if self._all.get(key) is kept:
            del self._all[key]
            self._wake(kept)

    def _wake(self, kept: Kept) -> None:
        """Count a call out of the idle ones, whose bytes do not change."""
        shelf = kept.caller, kept.is_sent
        if self._idle.get(shelf, {}).pop(kept.name, None) is None:
            return
        if not self._idle[shelf]:
            del self._idle[shelf]
        self._idle_bytes[kept.caller] -= kept.num_bytes
        self._idle_calls[kept.caller] -= 1
        if not self._idle_calls[kept.caller]:
            del self._idle_calls[kept.caller], self._idle_bytes[kept.caller]

    def _expire(self, now: float) -> None:
        for shelf, calls in list(self._idle.items()):
            while calls and now - (oldest := _first(calls)).idle_since >= self._kept_s[shelf[1]]:
                self._drop(oldest)

    def _drop_least(self, held: Counter[str]) -> None:
        """Drop a call of the caller that holds most; where that has one only, a call of any."""
        greediest, _ = held.most_common(1)[0]
        callers = [greediest] if self._idle_calls[greediest] > 1 else list(self._idle_calls)
        if sent := [_first(c) for name in callers if (c := self._idle.get((name, True)))]:
            self._drop(min(sent, key=lambda kept: kept.idle_since))
        else:
            broken = [kept for name in callers for kept in self._idle[name, False].values()]
            self._drop(min(broken, key=_arrived))


def _first(calls: dict[bytes, Kept]) -> Kept:
    return next(iter(calls.values()))


def _arrived(kept: Kept) -> float:
    """Bytes of the payload; infinite: it is answered."""
    if kept.reply is not None:
        return float("inf")
    return kept.partial.filled if kept.partial else 0
