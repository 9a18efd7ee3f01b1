"""Calls that outlive their connection: what either end keeps, so that the next attempt goes on.

A caller makes one `Transfer` a call and gives it to every attempt. The peer keeps, under its name,
what of the payload has arrived and been verified, and later the reply; so an attempt begins at the
first byte that the peer lacks, the handler's answer is sent on from the first byte that the caller
lacks, and a handler that has answered is not asked again.

`TransferTable` is pure: `now` is given. What it keeps of broken calls is bounded in bytes, number
and time; whoever keeps most loses its oldest first.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transport.contracts import Reply

NAME_BYTES = 16
#: Name of a call that cannot be resumed.
NO_NAME = bytes(NAME_BYTES)


@dataclass(slots=True)
class Partial:
    """A payload that arrives from front to back; what has arrived has been verified."""

    payload: bytearray
    filled: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether every byte has arrived."""
        return self.filled == len(self.payload)


@dataclass(slots=True)
class Transfer:
    """A caller's memory of one call.

    Attributes:
        is_bulk: Whether its payloads let those of other calls go first: whole models.
        name: Random; what the peer knows it by.
        is_begun: Whether bytes of the payload may have reached the peer: the next attempt asks.
        acknowledged_bytes: Of the payload, what the peer said it has.
        reply: What has arrived of the reply's payload.
        reply_name: The peer's name for that reply.
        sent_bytes: Of the payload, all attempts together.
        received_bytes: Of the reply's payload, all attempts together.
    """

    is_bulk: bool = False
    name: bytes = field(default_factory=lambda: secrets.token_bytes(NAME_BYTES))
    is_begun: bool = False
    acknowledged_bytes: int = 0
    reply: Partial | None = None
    reply_name: bytes = NO_NAME
    sent_bytes: int = 0
    received_bytes: int = 0

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
        idle_since: When the last attempt broke.
    """

    caller: str
    name: bytes
    partial: Partial | None = None
    reply: Reply | None = None
    reply_name: bytes = NO_NAME
    stream: object = None
    idle_since: float = 0.0

    @property
    def num_bytes(self) -> int:
        """What it holds on to; of a payload that stopped half-way, the half."""
        replied = (
            len(self.reply.header) + memoryview(self.reply.payload).nbytes if self.reply else 0
        )
        return replied + (self.partial.filled if self.partial else 0)

    def answered(self, reply: Reply) -> None:
        """Keep the answer in place of what was asked."""
        self.reply, self.reply_name = reply, secrets.token_bytes(NAME_BYTES)
        self.partial = None


class TransferTable:
    """What one server keeps of calls that broke."""

    def __init__(self, *, kept_bytes: int, kept_s: float, most: int = 4096) -> None:
        """Keep at most `kept_bytes` of at most `most` calls, each at most `kept_s` seconds."""
        self._kept_bytes = kept_bytes
        self._kept_s = kept_s
        self._most = most
        self._all: dict[tuple[str, bytes], Kept] = {}
        self._idle: dict[tuple[str, bytes], Kept] = {}  # in the order in which they broke
        self._idle_bytes = 0

    @property
    def num_idle_bytes(self) -> int:
        """Bytes of the calls that nobody goes on with now; bounded."""
        return self._idle_bytes

    @property
    def num_idle(self) -> int:
        """Calls that nobody goes on with now; bounded."""
        return len(self._idle)

    def enter(self, caller: str, name: bytes, stream: object, now: float) -> Kept:
        """Go on with a call, or begin it; an earlier attempt that still reads is superseded."""
        self._expire(now)
        key = caller, name
        kept = self._all.setdefault(key, Kept(caller, name))
        self._wake(key)
        kept.stream = stream
        return kept

    def leave(self, kept: Kept, stream: object, now: float) -> None:
        """Keep a call for its next attempt; harmless for one that was superseded or dropped."""
        key = kept.caller, kept.name
        if kept.stream is not stream or self._all.get(key) is not kept:
            return
        kept.stream, kept.idle_since = None, now
        self._idle[key] = kept
        self._idle_bytes += kept.num_bytes
        self._expire(now)
        while self.num_idle > self._most or self.num_idle_bytes > self._kept_bytes:
            self._drop_oldest()

    def fail(self, kept: Kept, stream: object) -> None:
        """Forget a call that its handler has refused; harmless for one that was superseded."""
        if kept.stream is stream:
            self._drop(kept)

    def _drop(self, kept: Kept) -> None:
        key = kept.caller, kept.name
        if self._all.get(key) is kept:
            del self._all[key]
            self._wake(key)

    def _wake(self, key: tuple[str, bytes]) -> None:
        """Count a call out of the idle ones, whose bytes do not change."""
        if (kept := self._idle.pop(key, None)) is not None:
            self._idle_bytes -= kept.num_bytes

    def _expire(self, now: float) -> None:
        while self._idle:
            oldest = next(iter(self._idle.values()))
            if now - oldest.idle_since < self._kept_s:
                return
            self._drop(oldest)

    def _drop_oldest(self) -> None:
        """Drop the oldest call of whoever keeps most, in bytes, then in number."""
        held: Counter[str] = Counter()
        for kept in self._idle.values():
            held[kept.caller] += kept.num_bytes + 1
        (greediest, _), *_ = held.most_common(1)
        self._drop(next(kept for kept in self._idle.values() if kept.caller == greediest))
