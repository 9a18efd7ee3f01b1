"""What one server bears from its callers: calls at once, calls a second, silence.

Pure: `now` is given. A caller is an identity where callers are known, else a connection. Whoever
asks too much is told `Overloaded` and may try again; nobody else is slowed.

Source: token bucket (J. Turner, "New directions in communications", 1986).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from transport.errors import Overloaded

_FORGET_AT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one server.

    Attributes:
        calls: Calls in progress, of all callers.
        calls_per_caller: Calls in progress of one caller: every rank of an island waits in one.
        calls_per_s: Calls a second of one caller, in the long run.
        burst: Calls of one caller at once, after a pause.
        concurrent: Calls in progress of single methods, of all callers.
        connections: Connections at once, beyond which new ones are closed unheard.
        silence_s: Seconds without the next message of a call in progress, or without room for it.
        call_s: Seconds of any one call, whatever deadline its caller gave.
        kept_bytes: Payload bytes kept of calls that broke, until their callers come again.
        kept_s: Seconds for which they are kept.
    """

    calls: int = 4096
    calls_per_caller: int = 1024
    calls_per_s: float = 500.0
    burst: int = 4000
    concurrent: Mapping[str, int] = field(default_factory=dict)
    connections: int = 4096
    silence_s: float = 120.0
    call_s: float = 7200.0
    kept_bytes: int = 1 << 30
    kept_s: float = 600.0


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


class Turnstile:
    """Counts the calls of one server."""

    def __init__(self, limits: Limits) -> None:
        """Assign only."""
        self._limits = limits
        self._num_calls = 0
        self._callers: Counter[str] = Counter()
        self._methods: Counter[str] = Counter()
        self._buckets: dict[str, _Bucket] = {}

    @property
    def num_callers(self) -> int:
        """Callers that are remembered; bounded."""
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
        bucket = self._buckets.get(caller)
        if bucket is None:
            self._forget(now)
            bucket = self._buckets[caller] = _Bucket(limits.burst, now)
        bucket.tokens = self._filled(bucket, now)
        bucket.at = now
        if bucket.tokens < 1:
            raise Overloaded(
                f"more than {limits.calls_per_s:g} calls a second, after {limits.burst} at once: "
                f"try later"
            )
        bucket.tokens -= 1
        self._num_calls += 1
        self._callers[caller] += 1
        self._methods[method] += 1

    def leave(self, caller: str, method: str) -> None:
        """Count a call out."""
        self._num_calls -= 1
        for counter, key in ((self._callers, caller), (self._methods, method)):
            counter[key] -= 1
            if not counter[key]:
                del counter[key]

    def _filled(self, bucket: _Bucket, now: float) -> float:
        gained = (now - bucket.at) * self._limits.calls_per_s
        return min(float(self._limits.burst), bucket.tokens + gained)

    def _forget(self, now: float) -> None:
        """Drop callers that are as good as new; a full bucket is what a stranger starts with."""
        if len(self._buckets) >= _FORGET_AT:
            burst = self._limits.burst
            kept = {k: b for k, b in self._buckets.items() if self._filled(b, now) < burst}
            # A flood of new connections empties no bucket: the oldest go, whatever they hold.
            self._buckets = dict(list(kept.items())[-_FORGET_AT // 2 :])
