"""Metrics for Prometheus: a server of `/metrics`, and what coordinator and syncer say there.

Every server has a registry of its own; nothing is global. Names end in their unit, counters in
`_total`; a counter begins again with the process or the island's start that it belongs to, as
Prometheus expects. What the coordinator says of islands is their last report.

Beyond loopback a scrape needs the bearer token of `telemetry.metrics_token`, and where the run has
certificates it is HTTPS, with the certificate of the process (server name coordinator.diloco or
syncer.diloco).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Metric, MetricsHandler
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from diloco.errors import ConfigError
from diloco.protos.control_pb2 import (
    AlarmStatus,
    FragmentStatus,
    IslandStatus,
    ReportRequest,
    StatusReply,
)
from diloco.protos.fragment_pb2 import FragmentState
from diloco.system import require_linux
from diloco.telemetry.link_figures import LinkFigures, link_figures
from diloco.telemetry.protection import Protection
from diloco.telemetry.syncer_meter import BOUNDS_S, Durations, SyncerMeter
from diloco.transport.addresses import split_address

logger = logging.getLogger(__name__)

_COLLECT_S = 5.0
_RETRY_WAIT_S = 0.2
_SILENCE_S = 10.0
_SCRAPE_S = 30.0
_MAX_SCRAPES = 64
_OPEN = Protection()

#: Seconds after which the thread of a scrape gives way to the loop: with Python's own 5 ms each of
#: the loop's calls that let go of the interpreter waits so long, while 20,000 samples are written.
_GIVE_WAY_S = 0.001


class MetricsServer:
    """Serves what `collect` gives at every scrape, over HTTP, from threads of its own."""

    def __init__(
        self,
        listen: str,
        collect: Callable[[], Iterable[Metric]],
        *,
        setting: str,
        protection: Protection = _OPEN,
        busy_s: float = 3.0,
    ) -> None:
        """Assign only.

        Args:
            listen: HOST:PORT, port 0 for any free one; empty: serve nothing.
            collect: Called in the event loop in which `start` was awaited; what it gives is gone
                through in the thread of the scrape, and may take as long as it likes.
            setting: Dotted name of the setting that says `listen`, for the message.
            protection: What a scrape must show, and what it is shown.
            busy_s: Seconds for which a busy port is tried again: its last owner may be ending.
        """
        self._listen = listen
        self._collect = collect
        self._setting = setting
        self._busy_s = busy_s
        self._protection = protection
        self._server: tuple[_Server, threading.Thread] | None = None

    @property
    def address(self) -> str:
        """HOST:PORT really bound; empty when nothing is served."""
        if self._server is None:
            return ""
        return f"{split_address(self._listen)[0]}:{self._server[0].server_port}"

    async def start(self, *, is_restart: bool) -> None:
        """Begin to serve.

        Args:
            is_restart: Whether a run is under way already: it goes on without metrics, with a
                warning, where a new one is refused.

        Raises:
            ConfigError: If the address cannot be bound, at the start of a run, or this is not Linux
                and there is a certificate, which is kept in a file in memory.
        """
        if not self._listen:
            return
        if self._protection.certificate is not None:
            require_linux(
                f"{self._setting} = {self._listen} over TLS (its certificate, with the key, is in "
                f"memory alone)",
                "leave it out, or run this service on Linux",
            )
        sys.setswitchinterval(_GIVE_WAY_S)
        try:
            self._server = await self._serve()
        except OSError as error:
            problem = (
                f"{self._setting} = {self._listen}: cannot serve metrics there: "
                f"{error.strerror or error}. Give another port (0: any free one), or end the "
                f"process that holds it (ss -ltnp shows which)"
            )
            if not is_restart:
                raise ConfigError(problem) from error
            logger.warning("the run goes on without metrics: %s", problem)
        else:
            scheme = "https" if self._protection.certificate else "http"
            logger.info("metrics are served, address=%s://%s/metrics", scheme, self.address)

    async def _serve(self) -> tuple[_Server, threading.Thread]:
        loop = asyncio.get_running_loop()
        host, port = split_address(self._listen)
        registry = CollectorRegistry()
        registry.register(_OnLoop(loop, self._collect))
        handler = _handler(registry, self._protection.token)
        until = loop.time() + self._busy_s
        while True:
            try:
                server = _Server(host.strip("[]"), port, handler, self._protection.certificate)
                break
            except OSError:
                if loop.time() >= until:
                    raise
                await asyncio.sleep(_RETRY_WAIT_S)
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        return server, thread

    async def stop(self) -> None:
        """Serve no more; stopping twice is harmless."""
        serving, self._server = self._server, None
        if serving is not None:
            server, thread = serving
            await asyncio.to_thread(server.shutdown)  # the loop must answer who still asks
            server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    """An HTTP or HTTPS server with a bounded number of threads, each for a bounded time."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        host: str,
        port: int,
        handler: type[BaseHTTPRequestHandler],
        certificate: Callable[[], bytes] | None,
    ) -> None:
        (self.address_family, *_), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        self._room = threading.BoundedSemaphore(_MAX_SCRAPES)
        self._certificate = certificate
        self._pem = b""
        super().__init__((host, port), handler)
        if certificate is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._load(certificate())
            # The handshake is the handler's, in its thread and within its time.
            self.socket = self._context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, with the certificate of this moment."""
        if self._certificate is not None and (pem := self._certificate()) != self._pem:
            try:
                self._load(pem)
            except (OSError, ssl.SSLError) as error:
                logger.error("certificate changed, the last good one stays: %s", error)
        return super().get_request()

    def _load(self, pem: bytes) -> None:
        # ssl reads certificates from files alone: this one is in memory, for the key in it.
        with open(os.memfd_create("certificate"), "wb", buffering=0) as file:
            file.write(pem)
            self._context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        self._pem = pem

    def process_request(self, request: Any, client_address: Any) -> None:
        # Who comes when all are busy is turned away: waiting here would hold up `shutdown`, too.
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # Bytes that trickle keep any one wait short: the whole scrape has an end, too.
        end = threading.Timer(_SCRAPE_S, _cut, [request])
        end.daemon = True
        end.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("scrape failed, peer=%s", client_address, exc_info=True)


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(request, socket.SHUT_RDWR)  # of the connection beneath TLS


def _handler(registry: CollectorRegistry, token: str) -> type[BaseHTTPRequestHandler]:
    """Make what answers one scrape."""
    expected = f"Bearer {token}".encode()

    class Handler(MetricsHandler):
        timeout = _SILENCE_S

        def do_GET(self) -> None:
            given = self.headers.get("Authorization", "").encode()
            if token and not hmac.compare_digest(given, expected):
                self.send_error(401, "give the token: Authorization: Bearer ...")
                return
            super().do_GET()

    Handler.registry = registry
    return Handler


class _OnLoop(Collector):
    """Asks in the event loop, whose objects belong to no other thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, collect: Callable[[], Iterable[Metric]]
    ) -> None:
        self._loop = loop
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        async def collect() -> Iterable[Metric]:
            return self._collect()

        return asyncio.run_coroutine_threadsafe(collect(), self._loop).result(_COLLECT_S)


# -- the coordinator ---------------------------------------------------------------------------

#: Name, what it is, and how it is read of an island's last report.
_ISLAND_GAUGES: Sequence[tuple[str, str, Callable[[ReportRequest], float]]] = (
    ("inner_step", "Completed inner steps", lambda r: r.inner_step),
    ("loss_nats", "Loss of the last inner step, nats a token", lambda r: r.loss_nats),
    ("tokens_per_second", "Tokens a second of wall time, waits included", lambda r: r.tokens_per_s),
    ("in_flight_fragments", "Contributions without an outcome", lambda r: r.fragments_in_flight),
    ("utilisation_ratio", "Inner steps x undisturbed step time / wall", lambda r: r.utilisation),
)
#: The same of figures that are left out while they are 0: they are not known then.
_KNOWN_GAUGES: Sequence[tuple[str, str, Callable[[ReportRequest], float]]] = (
    ("resident_memory_bytes", "Memory of the first rank's process", lambda r: r.resident_bytes),
    ("device_memory_bytes", "That it has of its device", lambda r: r.device_bytes),
    ("mfu_ratio", "Share of the devices' peak, of all inner steps", lambda r: r.mfu),
    (
        "uplink_capacity_bytes_per_second",
        "Configured bandwidth away from the island",
        lambda r: r.link.up_capacity_bps / 8,
    ),
    (
        "downlink_capacity_bytes_per_second",
        "Configured bandwidth towards the island",
        lambda r: r.link.down_capacity_bps / 8,
    ),
)
_ISLAND_COUNTERS: Sequence[tuple[str, str, Callable[[ReportRequest], float]]] = (
    ("tokens", "Tokens trained on", lambda r: r.tokens),
    ("uplink_bytes", "Bytes sent by all ranks", lambda r: r.bytes_up),
    ("downlink_bytes", "Bytes received by all ranks", lambda r: r.bytes_down),
    ("blocked_seconds", "Time for which training waited for outcomes", lambda r: r.blocked_s),
)
_FRAGMENT_GAUGES: Sequence[tuple[str, str, Callable[[FragmentStatus], float]]] = (
    ("version", "Newest published version", lambda f: f.version),
    ("attempt", "Attempt of the current round", lambda f: f.attempt),
    ("contributors", "Islands in the newest version", lambda f: f.num_contributors),
    ("version_age_seconds", "Time since the newest version", lambda f: f.age_s),
    ("awaited_islands", "Islands for which the open round waits", lambda f: f.num_waits_for),
)
_REFUSALS = "Calls refused; no island: nobody has proved whose they were"


def coordinator_metrics(status: StatusReply) -> Iterator[Metric]:
    """Give what a coordinator knows: the run, its islands, its fragments."""
    yield _gauge("run_info", "The run", ["run"], [([status.run], 1)])
    yield _gauge("run_state", "1 for the state of the run", ["state"], [([status.state], 1)])
    yield _gauge("run_timeline", "Resumes from a checkpoint so far", [], [([], status.timeline)])
    if status.total_tokens:
        yield _gauge("run_total_tokens", "Where the run ends", [], [([], status.total_tokens)])
    else:
        yield _gauge("run_inner_steps", "Where the run ends", [], [([], status.inner_steps)])
    if status.checkpoint_steps:
        newest = max(status.checkpoint_steps)
        what = "Inner step of the newest complete checkpoint"
        yield _gauge("run_checkpoint_inner_step", what, [], [([], newest)])
    syncers = [([str(each.syncer_id)], each) for each in status.syncers]
    epochs = [(labels, float(each.syncer_epoch)) for labels, each in syncers]
    yield _gauge("run_syncer_epoch", "Starts of the syncer", ["syncer"], epochs)
    ages = [(labels, each.age_s) for labels, each in syncers]
    what = "Since the syncer's last word; +Inf: none since the coordinator's start"
    yield _gauge("run_syncer_age_seconds", what, ["syncer"], ages)
    yield from _island_metrics(status.islands)
    own = [r for r in status.refusals if r.service == "coordinator"]
    refusals = [([r.island, r.cause], float(r.count)) for r in own]
    yield _counter("coordinator_refusals", _REFUSALS, ["island", "cause"], refusals)
    yield from _alarm_metrics(status.alarms)
    by_fragment = [(str(f.fragment_id), f) for f in status.fragments]
    for name, what, read in _FRAGMENT_GAUGES:
        samples = [([fragment], read(f)) for fragment, f in by_fragment]
        yield _gauge(f"fragment_{name}", what, ["fragment"], samples)
    phases = [([fragment, f.phase], 1.0) for fragment, f in by_fragment]
    yield _gauge("fragment_phase", "1 for the phase of the round", ["fragment", "phase"], phases)


def _alarm_metrics(alarms: Sequence[AlarmStatus]) -> Iterator[Metric]:
    labels = ["alarm", "island", "fragment", "reporter"]
    named = [
        ([a.alarm.kind, a.alarm.island, str(a.alarm.fragment_id), a.reporter], a) for a in alarms
    ]
    holds = [(names, float(a.holds)) for names, a in named]
    yield _gauge("run_alarm", "1 while an alarm holds, 0 for an hour after", labels, holds)
    counts = [(names, float(a.alarm.count)) for names, a in named]
    yield _counter("run_alarms", "How often an alarm was raised while it held", labels, counts)


def _island_metrics(islands: Sequence[IslandStatus]) -> Iterator[Metric]:
    starts = [([i.island], float(i.incarnation)) for i in islands]
    yield _gauge("island_incarnation", "Starts of the island so far", ["island"], starts)
    leases = [([i.island, i.lease], 1.0) for i in islands if i.lease]
    yield _gauge("island_lease", "1 for how it stands in the run", ["island", "lease"], leases)
    told = [(i.island, i.last_report) for i in islands if i.HasField("last_report")]
    ages = [([i.island], i.report_age_s) for i in islands if i.HasField("last_report")]
    yield _gauge("island_report_age_seconds", "Time since the last report", ["island"], ages)
    states = [([island, report.state], 1.0) for island, report in told]
    yield _gauge("island_state", "1 for the state it reported", ["island", "state"], states)
    for name, what, read in _ISLAND_GAUGES:
        samples = [([island], read(report)) for island, report in told]
        yield _gauge(f"island_{name}", what, ["island"], samples)
    for name, what, read in _KNOWN_GAUGES:
        known = [([island], read(report)) for island, report in told if read(report)]
        yield _gauge(f"island_{name}", what, ["island"], known)
    yield from _link_metrics(told)
    newest = [max(r.held_out, key=lambda h: h.checkpoint, default=None) for _, r in told]
    losses = [([i], h.nats_per_byte) for (i, _), h in zip(told, newest, strict=True) if h]
    what = "Held-out loss at its newest checkpoint, nats a byte"
    yield _gauge("island_held_out_nats_per_byte", what, ["island"], losses)
    for name, what, read in _ISLAND_COUNTERS:
        samples = [([island], read(report)) for island, report in told]
        yield _counter(f"island_{name}", f"{what}, since its start", ["island"], samples)


def _link_metrics(told: Sequence[tuple[str, ReportRequest]]) -> Iterator[Metric]:
    """Sum up an island's ways to its syncers: 16 of each of 1,000 islands were 80,000 series."""
    links = [([island], link_figures(report.link)) for island, report in told]
    gauges: Sequence[tuple[str, str, Callable[[LinkFigures], float]]] = (
        ("uplink_bytes_per_second", "Sent by all ranks of late", lambda f: f.up_bps / 8),
        ("downlink_bytes_per_second", "Received by all ranks of late", lambda f: f.down_bps / 8),
    )
    for name, what, read in gauges:
        yield _gauge(f"island_{name}", what, ["island"], [(i, read(f)) for i, f in links])
    trips = [(island, figures.round_trip_s) for island, figures in links if figures.round_trip_s]
    what = "To the nearest syncer and back"
    yield _gauge("island_round_trip_seconds", what, ["island"], trips)
    what = "Attempts of calls of the first rank that broke, since its start"
    failed = [(island, float(figures.failed_calls)) for island, figures in links]
    yield _counter("island_failed_calls", what, ["island"], failed)


# -- the syncer --------------------------------------------------------------------------------


def syncer_metrics(
    states: Sequence[FragmentState], meter: SyncerMeter, *, syncer_epoch: int
) -> Iterator[Metric]:
    """Give what a syncer knows: versions, and what it has done since it started.

    Args:
        states: Public state of each fragment.
        meter: Of this start.
        syncer_epoch: Of this start.
    """
    fragment, both = ["fragment"], ["fragment", "island"]
    versions = [([str(s.fragment_id)], float(s.version)) for s in states if s.is_founded]
    yield _gauge("syncer_epoch", "Starts of the syncer", [], [([], syncer_epoch)])
    yield _gauge("syncer_fragment_version", "Newest published version", fragment, versions)
    counts = meter.counts
    sums: Sequence[tuple[str, str, Mapping[int, int]]] = (
        ("rounds_published", "Versions published", counts.published),
        ("rounds_expired", "Attempts that expired", counts.expired),
        ("rounds_solo", "Versions of one island, where others were members", counts.solo),
        ("disk_full", "Versions and expiries that found no room at first", counts.disk_full),
    )
    for name, what, by_fragment in sums:
        # From zero on, so that the first increase is seen.
        samples = [([str(s.fragment_id)], by_fragment.get(s.fragment_id, 0)) for s in states]
        yield _counter(f"syncer_{name}", what, fragment, samples)
    for name, what, durations in (
        ("round_wait", "Time from an opening to the close", counts.waited),
        ("round_grace", "Time that a quorum waited for stragglers", counts.grace),
        ("merge", "Time of a merge and its outer step", counts.merges),
        ("commit", "Time until a version was durable", counts.commits),
    ):
        yield _histogram(f"syncer_{name}_seconds", what, durations, states)
    waits = [
        ([str(s.fragment_id)], float(s.fragment_id in counts.waiting_for_disk)) for s in states
    ]
    yield _gauge("syncer_waits_for_disk", "1 while a version finds no room", fragment, waits)
    outcomes = [
        ([str(p), island, outcome], float(count))
        for outcome, counted in (
            ("included", counts.included),
            ("refused", counts.refused),
            ("rejected", counts.rejected),
        )
        for (p, island), count in sorted(counted.items())
    ]
    refusals = [([island, why], float(n)) for (island, why), n in sorted(counts.refusals.items())]
    yield _counter("syncer_refusals", _REFUSALS, ["island", "cause"], refusals)
    what = "Contributions to published versions"
    yield _counter("syncer_contributions", what, [*both, "outcome"], outcomes)
    for name, what, by_both in (
        ("received_bytes", "Payload of accepted lanes", counts.received_bytes),
        ("sent_bytes", "Payload of fetched lanes", counts.sent_bytes),
    ):
        sized = [([str(p), island], float(n)) for (p, island), n in sorted(by_both.items())]
        yield _counter(f"syncer_{name}", what, both, sized)


_Samples = Iterable[tuple[Sequence[str], float]]


def _gauge(name: str, what: str, labels: Sequence[str], samples: _Samples) -> Metric:
    return _filled(GaugeMetricFamily(f"diloco_{name}", what, labels=labels), samples)


def _counter(name: str, what: str, labels: Sequence[str], samples: _Samples) -> Metric:
    return _filled(CounterMetricFamily(f"diloco_{name}", what, labels=labels), samples)


def _histogram(
    name: str, what: str, durations: Mapping[int, Durations], states: Sequence[FragmentState]
) -> Metric:
    family = HistogramMetricFamily(f"diloco_{name}", what, labels=["fragment"])
    for p in (state.fragment_id for state in states):
        taken = durations.get(p, Durations())
        below = zip((*map(str, BOUNDS_S), "+Inf"), itertools.accumulate(taken.counts), strict=True)
        family.add_metric([str(p)], list(below), taken.sum_s)
    return family


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: _Samples) -> Metric:
    for values, value in samples:
        family.add_metric(values, value)
    return family
