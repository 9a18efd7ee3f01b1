"""Traces of rounds, as an OTLP server takes them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from diloco.errors import ConfigError
from diloco.telemetry import traces
from diloco.telemetry.events import (
    Event,
    FragmentMerged,
    FragmentSent,
    PhaseDone,
    RoundExpiredSeen,
)
from diloco.telemetry.round_events import RoundClosed, RoundExpired, RoundOpened
from diloco.telemetry.sinks import Sink
from diloco.telemetry.traces import traces_to
from tests.run_files import write_run


class Collector(BaseHTTPRequestHandler):
    """Takes what is exported."""

    taken: ClassVar[list[tuple[dict[str, str], Span]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        for of in ExportTraceServiceRequest.FromString(body).resource_spans:
            who = {each.key: each.value.string_value for each in of.resource.attributes}
            self.taken.extend((who, span) for scope in of.scope_spans for span in scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[str]:
    Collector.taken.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def write(sink: Sink, clock: list[float], events: dict[float, list[Event]]) -> None:
    sink.open()
    for clock[0], several in events.items():
        for event in several:
            sink.write(event)
    sink.close()


def closed(version: int) -> RoundClosed:
    both = ("east", "west")
    return RoundClosed(
        3, version, 0, both, both, 2, 10.0, 2.0, 1.0, False, False, {}, {}, 640, "d1"
    )


def test_a_syncer_and_its_islands_write_one_trace_of_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    run = {"run": "r", "timeline": 1}
    with collector() as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)

        def sink_of(service: str, name: str) -> Sink:
            return traces.TraceSink(service, name, run, lambda: clock[0])

        assert len(traces_to("diloco-island", "east", run, lambda: 0.0)) == 1
        for name in ("east", "west"):
            merged = FragmentMerged(9, 3, 8, "included", 1, 0.5, "d1", ("east",), False)
            write(
                sink_of("diloco-island", name),
                clock,
                {
                    101.0: [FragmentSent(8, 3, 7, 0, 64, 8, False, 1.0)],
                    103.0: [PhaseDone("upload", 3, 7, 2, 1.5)],
                    112.0: [merged, merged],
                    113.0: [FragmentSent(11, 3, 8, 0, 64, 8, False, 1.0)],
                    114.0: [RoundExpiredSeen(12, 3, 8, 0, 0.5)],
                    115.0: [FragmentSent(12, 3, 8, 1, 64, 8, False, 1.0)],
                    116.0: [replace(merged, version=12, outcome="not_included")],
                },
            )
        rounds: dict[float, list[Event]] = {
            100.0: [RoundOpened(3, 7, 0, ("east",), False), RoundOpened(4, 7, 0, ("east",), False)],
            105.0: [RoundExpired(4, 7, 0, ("east",), ("west",), "late")],
            111.0: [closed(7)],
        }
        write(sink_of("diloco-syncer", "syncer-0"), clock, rounds)

    of_name = {(who["service.instance.id"], s.name): s for who, s in reversed(Collector.taken)}
    assert {name for _, name in of_name} == {
        "round", "collect", "grace", "commit", "exchange", "upload", "expired attempt",
    }  # fmt: skip
    root = of_name["syncer-0", "round"]
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (100 * 10**9, 111 * 10**9)
    said = {each.key: each.value for each in root.attributes}
    assert said["merged_tokens"].int_value == 640 and said["run"].string_value == "r"
    for name in ("east", "west"):
        exchange, upload = of_name[name, "exchange"], of_name[name, "upload"]
        assert exchange.trace_id == upload.trace_id == root.trace_id
        assert (exchange.parent_span_id, upload.parent_span_id) == (root.span_id, exchange.span_id)
        assert upload.end_time_unix_nano - upload.start_time_unix_nano == 1_500_000_000
        assert exchange.end_time_unix_nano == 112 * 10**9
        own = [s for who, s in Collector.taken if who["service.instance.id"] == name]
        ends = [s.end_time_unix_nano // 10**9 for s in own if s.name == "exchange"]
        assert sorted(ends) == [112, 114, 116], "also of what expired, and was leapt over"
    expired = of_name["syncer-0", "expired attempt"]
    assert expired.trace_id != root.trace_id and expired.status.message == "late"
    assert of_name["syncer-0", "grace"].parent_span_id == root.span_id


def test_only_who_is_told_where_writes_traces_and_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def sinks() -> list[Sink]:
        return traces_to("diloco-island", "east", {}, lambda: 0.0)

    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert not sinks()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://collector:4318/v1/traces")
    with monkeypatch.context() as patch:
        patch.setenv("OTEL_SDK_DISABLED", "true")
        assert not sinks() and not caplog.text
    monkeypatch.setattr(traces, "is_installed", lambda package: False)
    assert not sinks()
    assert "ENDPOINT is set, and traces need the package" in caplog.text
    assert "pip install 'diloco[otel]'" in caplog.text


def test_a_process_ends_in_time_though_nobody_takes_its_traces() -> None:
    said = """
import time
from diloco.telemetry import traces
from diloco.telemetry.events import PhaseDone
traces._CLOSE_S = 0.5
(sink,) = traces.traces_to("diloco-island", "east", {}, time.time)
sink.open()
sink.write(PhaseDone("upload", 3, 7, 2, 1.5))
began = time.monotonic()
sink.close()
assert time.monotonic() - began < 2
"""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": url}
        subprocess.run([sys.executable, "-c", said], check=True, env=environment, timeout=10)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_BSP_MAX_QUEUE_SIZE", "0"), ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "-1")],
)
def test_a_variable_that_cannot_be_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(variable, value)
    (sink,) = traces_to("diloco-island", "east", {}, lambda: 0.0)
    with pytest.raises(ConfigError, match=rf"the environment says \(.*{variable}.*leave it out"):
        sink.open()


@pytest.mark.slow
def test_a_run_writes_a_trace_of_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector() as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        run_file = write_run(tmp_path, {"east": "", "west": ""}, inner_steps=16)
        subprocess.run([sys.executable, "-m", "diloco", "local", str(run_file)], check=True)

    rounds = {span.trace_id for _, span in Collector.taken if span.name == "round"}
    assert len(rounds) > 2
    for name in ("east", "west"):
        own = [s for who, s in Collector.taken if who["service.instance.id"] == name]
        assert {s.trace_id for s in own if s.name == "exchange"} <= rounds
        assert {"gather", "exchange"} <= {span.name for span in own}
