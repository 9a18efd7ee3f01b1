"""Limits the callers of one server: calls at once and what they hold, calls a second, silence.

Pure: `now` is given. A caller is an identity where callers are known, else a connection. Anyone who
asks too much is told `Overloaded` and may try again; nobody else is slowed.

Source: token bucket (J. Turner, "New directions in communications", 1986).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from diloco.transport.channels import MOST_CHANNELS
from diloco.transport.errors import Overloaded, TransportError

_log = logging.getLogger(__name__)

_FORGET_AT = 4096
_PAUSE_S = 10.0
#: Calls of a method at once, at most, where each caller may make one.
_MOST_AT_ONCE = 1024
#: Of a first message: as many as a caller may have calls hold little at this size.
_SMALL_BYTES = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one server.

    Attributes:
        calls: Calls in progress, of all callers.
        calls_per_caller: Calls in progress of one caller: every carrier of an island waits in one.
        calls_per_s: Calls a second of one caller, in the long run.
        burst: Calls of one caller at once, after a pause.
        concurrent: Calls in progress of single methods, of all callers.
        rates: Calls a second of single methods, of one caller, in the long run; ten seconds' worth
            at once, after a pause.
        header_bytes_per_caller: Memory for what came in first messages of more than
            `_SMALL_BYTES`: headers, and payloads that travel with them, until their calls end.
        refused: Refused calls that are heard out at once, so that their callers learn why; the
            rest are cut off.
        refusals_logged_per_s: Lines in the log for calls that are refused, in the long run; as
            many for those that fail in their handler.
        connections: Connections at once, beyond which new ones are closed unheard. Over libp2p a
            stream, which is a call, counts as one, and half of them may be of one peer.
        strangers_per_address: Connections at once of one address over which nobody has been let
            in yet; a quarter of `connections` in all.
        silence_s: Seconds without the next message of a call in progress, or without room for it,
            in which its connection moved no other message either; `deadlines.STILL` times as long
            whatever else moved.
        call_s: Seconds of any one call, whatever deadline its caller gave.
        kept_bytes: Memory for calls that broke, until their callers come again.
        kept_s: Seconds for which they are kept; what was answered to the end less long.
    """

    calls: int = 4096
    calls_per_caller: int = 1024
    calls_per_s: float = 500.0
    burst: int = 4000
    concurrent: Mapping[str, int] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    header_bytes_per_caller: int = 128 << 20
    refused: int = 256
    refusals_logged_per_s: float = 10.0
    connections: int = 4096
    strangers_per_address: int = 256
    silence_s: float = 120.0
    call_s: float = 7200.0
    kept_bytes: int = 1 << 30
    kept_s: float = 600.0

    def for_processes(
        self, num_of_caller: int, num_callers: int = 1, num_payloads: int = 0
    ) -> Limits:
        """Return limits under which all processes of so many callers may connect and call at once.

        They connect when a server's certificate changes, those of one caller from one address: with
        one or two connections each, and once calls are let in with up to `MOST_CHANNELS`. Each has
        a poll under way, asked again every second while no inner step was timed, and moves payloads
        meanwhile: in a flush every lane of the model is on its way, a call each. All callers come
        at once, too, when a run starts: of a method that is bounded each may have a call.

        Args:
            num_of_caller: Processes of one caller, at most; 0: not known.
            num_callers: That there can be.
            num_payloads: That all processes of one caller together may have to move at once.
        """
        num, num_calls = num_of_caller * num_callers, 4 * num_of_caller + num_payloads
        return replace(
            self,
            calls=max(self.calls, num_calls * num_callers),
            calls_per_caller=max(self.calls_per_caller, num_calls),
            calls_per_s=max(self.calls_per_s, 4.0 * num_of_caller),
            burst=max(self.burst, 4 * num_calls),
            concurrent={
                method: max(most, min(num_callers, _MOST_AT_ONCE))
                for method, most in self.concurrent.items()
            },
            header_bytes_per_caller=max(self.header_bytes_per_caller, num_of_caller << 20),
            connections=max(self.connections, MOST_CHANNELS * num_of_caller, 8 * num),
            strangers_per_address=max(self.strangers_per_address, 2 * num_of_caller),
        )


@dataclass(slots=True)
class _Bucket:
    """Fills with `per_s` tokens a second, up to `most`; each call takes one."""

    per_s: float
    most: float
    at: float
    tokens: float = -1.0

    def __post_init__(self) -> None:
        self.tokens = self.most

    def fill(self, now: float) -> float:
        """Return the tokens of this moment."""
        self.tokens = min(self.most, self.tokens + (now - self.at) * self.per_s)
        self.at = now
        return self.tokens

    def take(self) -> None:
        self.tokens -= 1


class Turnstile:
    """Counts the calls of one server."""

    def __init__(self, limits: Limits) -> None:
        """Assign only."""
        self._limits = limits
        self._num_calls = 0
        self._callers: Counter[str] = Counter()
        self._held_bytes: Counter[str] = Counter()
        self._methods: Counter[str] = Counter()
        #: By caller, and the rate that it counts: a method, or "" for all calls.
        self._buckets: dict[tuple[str, str], _Bucket] = {}

    @property
    def num_callers(self) -> int:
        """Callers that are remembered, once for each rate; bounded."""
        return len(self._buckets)

    def enter(self, caller: str, method: str, now: float) -> None:
        """Count a call in; `leave` must follow.

        Raises:
            Overloaded: If a limit is reached; the call is not counted then.
        """
        limits = self._limits
        allowed = limits.concurrent.get(method, limits.calls)
        for what, count, most in (
            ("calls", self._num_calls, limits.calls),
            ("calls of this caller", self._callers[caller], limits.calls_per_caller),
            (f"calls of {method}", self._methods[method], allowed),
        ):
            if count >= most:
                raise Overloaded(f"{count} {what} are in progress, {most} are allowed: try later")
        buckets = [self._bucket(caller, "", limits.calls_per_s, limits.burst, now)]
        if (rate := limits.rates.get(method)) is not None:
            buckets.append(self._bucket(caller, method, rate, _PAUSE_S * rate, now))
        for bucket in buckets:
            if bucket.fill(now) < 1:
                raise Overloaded(
                    f"more than {bucket.per_s:g} calls a second, after {bucket.most:g} at once: "
                    f"try later"
                )
        for bucket in buckets:
            bucket.take()
        self._num_calls += 1
        self._callers[caller] += 1
        self._methods[method] += 1

    def hold(self, caller: str, num_bytes: int) -> int:
        """Count in what a call's first message has brought; returns what to tell `leave`.

        Raises:
            Overloaded: If all calls of this caller hold too much; nothing is counted then.
        """
        if num_bytes <= _SMALL_BYTES:
            return 0
        held, most = self._held_bytes[caller], self._limits.header_bytes_per_caller
        if held + num_bytes > most:
            raise Overloaded(
                f"{num_bytes} bytes more than {held} bytes of headers of this caller's calls in "
                f"progress, {most} are allowed: try later"
            )
        self._held_bytes[caller] += num_bytes
        return num_bytes

    def leave(self, caller: str, method: str, held_bytes: int = 0) -> None:
        """Count a call out, and what `hold` has counted of it."""
        self._num_calls -= 1
        if held_bytes:
            self._held_bytes[caller] -= held_bytes
        if not self._held_bytes[caller]:
            del self._held_bytes[caller]
        for counter, key in ((self._callers, caller), (self._methods, method)):
            counter[key] -= 1
            if not counter[key]:
                del counter[key]

    def _bucket(self, caller: str, method: str, per_s: float, most: float, now: float) -> _Bucket:
        bucket = self._buckets.get((caller, method))
        if bucket is None:
            self._forget(now)
            bucket = self._buckets[caller, method] = _Bucket(per_s, max(most, 1.0), now)
        return bucket

    def _forget(self, now: float) -> None:
        """Drop callers that are as good as new; a full bucket is what a stranger starts with."""
        if len(self._buckets) >= _FORGET_AT:
            kept = {k: b for k, b in self._buckets.items() if b.fill(now) < b.most}
            # A flood of new connections empties no bucket: the oldest go, whatever they hold.
            self._buckets = dict(list(kept.items())[-_FORGET_AT // 2 :])


class Lines:
    """How many lines of one kind a server writes into its log."""

    def __init__(self, per_s: float) -> None:
        """Write so many a second in the long run; ten seconds' worth at once, after a pause."""
        self._bucket = _Bucket(per_s, _PAUSE_S * per_s, 0.0)
        self._num_unsaid = 0

    def line(self, now: float) -> int | None:
        """Return how many went unsaid since the last line; None: this one does, too."""
        if self._bucket.fill(now) < 1:
            self._num_unsaid += 1
            return None
        self._bucket.take()
        unsaid, self._num_unsaid = self._num_unsaid, 0
        return unsaid


class Refusals:
    """What one server spends on callers that it refuses: calls heard out, lines in its log."""

    def __init__(self, limits: Limits) -> None:
        """Assign only."""
        self._most = limits.refused
        self._num_heard = 0
        self._lines = Lines(limits.refusals_logged_per_s)

    def log(self, method: str, peer: str, error: TransportError, now: float) -> None:
        """Log why a call is refused, unless too many were logged lately."""
        if (unsaid := self._lines.line(now)) is None:
            return
        more = f" ({unsaid} more were refused before, unsaid)" if unsaid else ""
        _log.warning("call refused method=%.100s peer=%s: %s%s", method, peer, error, more)

    def enter(self) -> bool:
        """Whether a refused call can be heard out; then `leave` must follow."""
        if self._num_heard >= self._most:
            return False
        self._num_heard += 1
        return True

    def leave(self) -> None:
        """Count a refused call out."""
        self._num_heard -= 1
