"""OpenTelemetry: every try of a round is a trace, with what its syncer and its islands did.

    round            of the syncer, from the opening to the durable version, or to the expiry
      collect, grace, commit    until there is a quorum, for stragglers, from the close on
      gather, encode ...        phases of an island before its send
      exchange       of an island, from the send to the merge, or to the expiry
        upload, merge ...       its phases

Trace and first span of a round are a hash of run, timeline, fragment and version: processes that
never exchange a header write into the same trace. A process writes traces only where
OpenTelemetry's own variables say where they go.

Learned from: the specification of OpenTelemetry (tracing API and SDK, OTLP exporter).
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import blake3

from diloco.errors import ConfigError
from diloco.extras import is_installed
from diloco.telemetry.events import (
    Event,
    FragmentMerged,
    FragmentSent,
    PhaseDone,
    RoundExpiredSeen,
)
from diloco.telemetry.round_events import RoundClosed, RoundExpired, RoundOpened
from diloco.telemetry.sinks import BackgroundSink, Sink

if TYPE_CHECKING:  # of an optional package
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.trace import Span, Tracer

logger = logging.getLogger(__name__)

_WHERE = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
#: Rounds that are under way at most; of further ones the first are forgotten.
_MOST_OPEN = 4096
#: Seconds that the last spans have to arrive: a process does not stay for a server that is away.
_CLOSE_S = 3.0

#: A round: its fragment, and the version that it is made from.
_Round = tuple[int, int]


def traces_to(
    service: str, name: str, context: Mapping[str, Any], unix_clock: Callable[[], float]
) -> list[Sink]:
    """Make the sink of one process, where its environment says where traces go.

    Args:
        service: Kind of the process, `service.name` of its spans: diloco-island or diloco-syncer.
        name: Of the island or syncer, `service.instance.id` of its spans.
        context: As of other sinks: its run, and its timeline where that is known.
        unix_clock: Seconds.
    """
    where = next((variable for variable in _WHERE if os.environ.get(variable)), "")
    if not where or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return []
    if not is_installed("opentelemetry.exporter"):
        logger.warning(
            "%s is set, and traces need the package opentelemetry, which is not installed: type "
            "pip install 'diloco[otel]', or leave the variable out",
            where,
        )
        return []
    sink = TraceSink(service, name, context, unix_clock)
    return [BackgroundSink("traces", sink, close_s=_CLOSE_S)]


@dataclass(slots=True)
class _Ids:
    """Makes the numbers of a round's first span; those of others are drawn."""

    drawn: Any
    trace_id: int = 0
    span_id: int = 0

    def generate_trace_id(self) -> int:
        """See opentelemetry.sdk.trace.IdGenerator."""
        return self.trace_id or int(self.drawn.generate_trace_id())

    def generate_span_id(self) -> int:
        """See opentelemetry.sdk.trace.IdGenerator."""
        return self.span_id or int(self.drawn.generate_span_id())

    def is_trace_id_random(self) -> bool:
        """See opentelemetry.sdk.trace.IdGenerator: a hash is as even as a draw."""
        return True


class TraceSink:
    """Spans of one process, for one thread at a time."""

    def __init__(
        self,
        service: str,
        name: str,
        context: Mapping[str, Any],
        unix_clock: Callable[[], float],
    ) -> None:
        """Assign only; see `traces_to`."""
        self._service, self._name, self._unix_clock = service, name, unix_clock
        self._context = dict(context)
        self._opened: dict[_Round, float] = {}
        self._exchanges: dict[int, tuple[_Round, Span]] = {}  # one of a fragment at a time

    def open(self) -> None:
        """Begin to export, by the variables of OpenTelemetry: where to, how much, which headers.

        Raises:
            ConfigError: If one of them cannot be.
        """
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        of = {"service.name": self._service, "service.instance.id": self._name}
        self._ids = _Ids(RandomIdGenerator())
        ids = cast("IdGenerator", self._ids)
        try:
            exporter = importlib.import_module(_EXPORTER).OTLPSpanExporter()
            self._provider = TracerProvider(
                resource=Resource.create(of), id_generator=ids, shutdown_on_exit=False
            )
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        except Exception as error:  # whatever another package raises
            names = ", ".join(sorted(name for name in os.environ if name.startswith("OTEL_")))
            raise ConfigError(
                f"cannot write traces as the environment says ({names}): "
                f"{str(error).rstrip('.')}. Correct that variable, or leave it out"
            ) from error
        self._tracer: Tracer = self._provider.get_tracer("diloco")

    def add_context(self, context: Mapping[str, Any]) -> None:
        """Take the run and the timeline."""
        self._context |= context

    def write(self, event: Event) -> None:
        """Begin or end spans."""
        now = self._unix_clock()
        match event:
            case RoundOpened():
                _bounded(self._opened)[event.fragment_id, event.version] = now
            case RoundClosed():
                self._closed(event, now)
            case RoundExpired():
                self._expired(event, now)
            case FragmentSent():
                round_ = event.fragment_id, event.version
                # One that is left was made late: its round was over.
                self._end_exchange(event.fragment_id, now, "expired", 0.0)
                span = self._begin("exchange", now, round_, event)
                self._exchanges[event.fragment_id] = round_, span
            case FragmentMerged():
                self._end_exchange(event.fragment_id, now, event.outcome, event.blocked_s)
            case RoundExpiredSeen():
                self._end_exchange(event.fragment_id, now, "expired", event.blocked_s)
            case PhaseDone():
                self._phase(event, now)
            case _:
                pass

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()

    def _end_exchange(self, fragment_id: int, now: float, outcome: str, blocked_s: float) -> None:
        if fragment_id in self._exchanges:
            _, span = self._exchanges.pop(fragment_id)
            span.set_attributes({"outcome": outcome, "blocked_s": blocked_s})
            span.end(_ns(now))

    def _closed(self, event: RoundClosed, now: float) -> None:
        round_ = event.fragment_id, event.version
        self._opened.pop(round_, None)
        closed = now - event.commit_s
        began, quorum = closed - event.waited_s, closed - event.grace_s
        self._round(round_, event, began, now)
        self._between("collect", began, quorum, round_)
        if event.grace_s:
            self._between("grace", quorum, closed, round_)
        self._between("commit", closed, now, round_)

    def _expired(self, event: RoundExpired, now: float) -> None:
        from opentelemetry.trace import StatusCode

        round_ = event.fragment_id, event.version
        span = self._begin("expired attempt", self._opened.pop(round_, now), round_, event)
        span.set_status(StatusCode.ERROR, event.reason)
        span.end(_ns(now))

    def _phase(self, event: PhaseDone, now: float) -> None:
        round_ = event.fragment_id, event.version
        parent = self._of(round_)
        if (exchange := self._exchanges.get(event.fragment_id)) and exchange[0] == round_:
            parent = _context(exchange[1])
        self._between(event.phase, now - event.duration_s, now, round_, parent, lane=event.lane_id)

    def _round(self, round_: _Round, event: RoundClosed, began: float, now: float) -> None:
        """Write the first span of a trace, which others have named as theirs already."""
        from opentelemetry.context import Context

        self._ids.trace_id, self._ids.span_id = self._numbers(round_)
        try:
            span = self._begin("round", began, round_, event, Context())
        finally:
            self._ids.trace_id = self._ids.span_id = 0
        span.end(_ns(now))

    def _between(
        self,
        name: str,
        began: float,
        ended: float,
        round_: _Round,
        parent: Context | None = None,
        **of: int,
    ) -> None:
        span = self._tracer.start_span(
            name, parent or self._of(round_), start_time=_ns(began), attributes=of
        )
        span.end(_ns(ended))

    def _begin(
        self,
        name: str,
        began: float,
        round_: _Round,
        event: Event,
        parent: Context | None = None,
    ) -> Span:
        """Begin a span with what its event says, and who wrote it."""
        said = self._context | event.as_dict()
        attributes = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in said.items()
            if value is not None and value != {}
        }
        return self._tracer.start_span(
            name, parent or self._of(round_), start_time=_ns(began), attributes=attributes
        )

    def _numbers(self, round_: _Round) -> tuple[int, int]:
        """Give the numbers of a round's trace and first span."""
        run, timeline = self._context.get("run", ""), self._context.get("timeline", 0)
        digest = blake3.blake3(f"{run}\0{timeline}\0{round_[0]}\0{round_[1]}".encode()).digest(24)
        return int.from_bytes(digest[:16]), int.from_bytes(digest[16:])

    def _of(self, round_: _Round) -> Context:
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

        trace_id, span_id = self._numbers(round_)
        flags = TraceFlags(TraceFlags.SAMPLED)
        return _context(NonRecordingSpan(SpanContext(trace_id, span_id, True, flags)))


def _context(span: Span) -> Context:
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span)


def _bounded(under_way: dict[_Round, float]) -> dict[_Round, float]:
    """Forget what began first where there is too much: its end was not heard."""
    while len(under_way) >= _MOST_OPEN:
        del under_way[next(iter(under_way))]
    return under_way


def _ns(unix_s: float) -> int:
    return int(unix_s * 1e9)
