"""Metrics over HTTP: own registry, units in names, collected where the objects live."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import REGISTRY, Collector

from diloco.errors import ConfigError
from diloco.protos.control_pb2 import (
    FragmentStatus,
    HeldOut,
    IslandStatus,
    LinkUse,
    RefusalCount,
    ReportRequest,
    StatusReply,
    SyncerLinkUse,
    SyncerStatus,
)
from diloco.protos.fragment_pb2 import FragmentState
from diloco.refusals import Cause
from diloco.telemetry.prometheus import MetricsServer, coordinator_metrics, syncer_metrics
from diloco.telemetry.round_events import RoundClosed
from diloco.telemetry.syncer_meter import SyncerMeter


class _Given(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def samples(metrics: list[Metric]) -> dict[str, float]:
    """Sample -> value, as Prometheus reads the text."""
    registry = CollectorRegistry()
    registry.register(_Given(metrics))
    text = generate_latest(registry).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def status() -> StatusReply:
    report = ReportRequest(
        inner_step=12, loss_nats=2.5, tokens_per_s=100.0, tokens=768, fragments_in_flight=1,
        bytes_up=70, bytes_down=80, blocked_s=1.5, utilisation=0.9, state="training",
        resident_bytes=4096, mfu=0.25,
        link=LinkUse(
            up_capacity_bps=80.0,
            syncers=[
                SyncerLinkUse(up_bps=8.0, down_bps=16.0, round_trip_s=0.0625, failed_calls=3),
                SyncerLinkUse(up_bps=24.0),
            ],
        ),
        held_out=[
            HeldOut(checkpoint=100, nats_per_byte=2.0),
            HeldOut(checkpoint=200, nats_per_byte=1.5),
        ],
    )  # fmt: skip
    return StatusReply(
        run="demo",
        timeline=1,
        islands=[
            IslandStatus(
                island="east", incarnation=2, last_report=report, report_age_s=0.5, lease="active"
            ),
            IslandStatus(island="west"),
        ],
        fragments=[
            FragmentStatus(
                fragment_id=0, version=3, attempt=1, contributors=["east"], num_contributors=2,
                age_s=4.0, phase="open", num_waits_for=1,
            )
        ],
        syncers=[SyncerStatus(syncer_id=n, syncer_epoch=2 + n, age_s=0.25) for n in (0, 1)],
        state="running",
        inner_steps=325,
        checkpoint_steps=[100, 200],
        refusals=[
            RefusalCount(service="coordinator", island="east", cause="plan", count=3),
            RefusalCount(service="syncer", island="west", cause="size", count=1),
        ],
    )  # fmt: skip


def test_coordinator_tells_of_run_islands_and_fragments() -> None:
    assert samples(list(coordinator_metrics(status()))) == {
        "diloco_run_info{run=demo}": 1,
        "diloco_run_state{state=running}": 1,
        "diloco_run_timeline": 1,
        "diloco_run_inner_steps": 325,
        "diloco_run_checkpoint_inner_step": 200,
        "diloco_run_syncer_epoch{syncer=0}": 2,
        "diloco_run_syncer_epoch{syncer=1}": 3,
        "diloco_run_syncer_age_seconds{syncer=0}": 0.25,
        "diloco_run_syncer_age_seconds{syncer=1}": 0.25,
        "diloco_coordinator_refusals_total{cause=plan,island=east}": 3,
        "diloco_island_incarnation{island=east}": 2,
        "diloco_island_incarnation{island=west}": 0,
        "diloco_island_lease{island=east,lease=active}": 1,
        "diloco_island_held_out_nats_per_byte{island=east}": 1.5,
        "diloco_island_report_age_seconds{island=east}": 0.5,
        "diloco_island_state{island=east,state=training}": 1,
        "diloco_island_inner_step{island=east}": 12,
        "diloco_island_loss_nats{island=east}": 2.5,
        "diloco_island_tokens_per_second{island=east}": 100,
        "diloco_island_in_flight_fragments{island=east}": 1,
        "diloco_island_utilisation_ratio{island=east}": 0.9,
        "diloco_island_tokens_total{island=east}": 768,
        "diloco_island_uplink_bytes_total{island=east}": 70,
        "diloco_island_downlink_bytes_total{island=east}": 80,
        "diloco_island_blocked_seconds_total{island=east}": 1.5,
        "diloco_island_resident_memory_bytes{island=east}": 4096,
        "diloco_island_mfu_ratio{island=east}": 0.25,
        "diloco_island_uplink_capacity_bytes_per_second{island=east}": 10,
        "diloco_island_uplink_bytes_per_second{island=east}": 4,
        "diloco_island_downlink_bytes_per_second{island=east}": 2,
        "diloco_island_round_trip_seconds{island=east}": 0.0625,
        "diloco_island_failed_calls_total{island=east}": 3,
        "diloco_fragment_version{fragment=0}": 3,
        "diloco_fragment_attempt{fragment=0}": 1,
        "diloco_fragment_contributors{fragment=0}": 2,
        "diloco_fragment_version_age_seconds{fragment=0}": 4,
        "diloco_fragment_awaited_islands{fragment=0}": 1,
        "diloco_fragment_phase{fragment=0,phase=open}": 1,
    }


CLOSED = RoundClosed(
    fragment_id=0,
    version=0,
    attempt=0,
    members=("east", "north", "west"),
    contributors=("east",),
    quorum=1,
    waited_s=7.0,
    grace_s=2.5,
    commit_s=0.25,
    is_solo=True,
    is_flush=False,
    refused={"west": "declined"},
    rejected={"north": "its norm"},
    merged_tokens=4,
    digest="",
)


def test_syncer_tells_what_it_has_done_and_counts_from_zero() -> None:
    ticks = iter([1.0, 1.5, 2.0, 2.25])
    meter = SyncerMeter(lambda: next(ticks))
    states = [
        FragmentState(fragment_id=0, version=1, is_founded=True),
        FragmentState(fragment_id=1),
    ]

    meter.received(0, "east", 100)
    with meter.merging(0):
        pass
    with meter.committing(0):
        pass
    meter.published(CLOSED)
    meter.expired(1)
    meter.disk_full(0)
    meter.disk_full(1)
    meter.disk_free(1)
    meter.refusal("west", Cause.DIGEST)
    meter.refusal("west", Cause.DIGEST)
    meter.refusal("", Cause.GRANT)
    meter.sent(0, "east", 30)
    meter.sent(0, "east", 30)

    found = samples(list(syncer_metrics(states, meter, syncer_epoch=4)))
    durations = {name: value for name, value in found.items() if "_seconds" in name}

    assert {name: found.pop(name) for name in durations if "bucket" not in name} == {
        f"diloco_syncer_{name}_seconds_{what}{{fragment={p}}}": value * (p == 0)
        for name, seconds in (
            ("round_wait", 7.0), ("round_grace", 2.5), ("merge", 0.5), ("commit", 0.25)
        )
        for what, value in (("sum", seconds), ("count", 1.0))
        for p in (0, 1)
    }  # fmt: skip
    within = "diloco_syncer_round_wait_seconds_bucket{fragment=0,le="
    assert [durations[f"{within}{s}}}"] for s in ("3.0", "10.0", "+Inf")] == [0, 1, 1]
    assert {name: value for name, value in found.items() if "bucket" not in name} == {
        "diloco_syncer_epoch": 4,
        "diloco_syncer_fragment_version{fragment=0}": 1,
        "diloco_syncer_rounds_published_total{fragment=0}": 1,
        "diloco_syncer_rounds_published_total{fragment=1}": 0,
        "diloco_syncer_rounds_expired_total{fragment=0}": 0,
        "diloco_syncer_rounds_expired_total{fragment=1}": 1,
        "diloco_syncer_rounds_solo_total{fragment=0}": 1,
        "diloco_syncer_rounds_solo_total{fragment=1}": 0,
        "diloco_syncer_disk_full_total{fragment=0}": 1,
        "diloco_syncer_disk_full_total{fragment=1}": 1,
        "diloco_syncer_waits_for_disk{fragment=0}": 1,
        "diloco_syncer_waits_for_disk{fragment=1}": 0,
        "diloco_syncer_contributions_total{fragment=0,island=east,outcome=included}": 1,
        "diloco_syncer_contributions_total{fragment=0,island=west,outcome=refused}": 1,
        "diloco_syncer_contributions_total{fragment=0,island=north,outcome=rejected}": 1,
        "diloco_syncer_refusals_total{cause=digest,island=west}": 2,
        "diloco_syncer_refusals_total{cause=grant,island=}": 1,
        "diloco_syncer_received_bytes_total{fragment=0,island=east}": 100,
        "diloco_syncer_sent_bytes_total{fragment=0,island=east}": 60,
    }


def test_seconds_of_a_merge_that_failed_count() -> None:
    ticks = iter([1.0, 3.0])
    meter = SyncerMeter(lambda: next(ticks))

    with pytest.raises(ValueError, match="broken"), meter.merging(0):
        raise ValueError("broken")

    assert meter.counts.merges[0].sum_s == 2.0


def one_gauge() -> list[Metric]:
    return [GaugeMetricFamily("diloco_test", "A number", value=7)]


async def scrape(address: str, path: str = "metrics") -> str:
    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/{path}", timeout=10) as reply:
            return str(reply.read().decode())

    return await asyncio.to_thread(get)


def serve(collect, check) -> None:
    """Serve `collect` on a free port while `check(address)` runs."""

    async def run() -> None:
        server = MetricsServer("127.0.0.1:0", collect, setting="telemetry.test")
        await server.start(is_restart=False)
        try:
            await check(server.address)
        finally:
            await server.stop()
            await server.stop()
        assert server.address == ""

    asyncio.run(run())


def test_a_scrape_asks_on_the_loop_and_makes_its_samples_in_a_thread_of_its_own() -> None:
    """Of a thousand islands and 16 syncers making the samples takes a fifth of a second."""
    threads: list[threading.Thread] = []
    made: list[threading.Thread] = []

    def samples_of(metrics: list[Metric]) -> Iterator[Metric]:
        made.append(threading.current_thread())
        yield from metrics

    def collect() -> Iterator[Metric]:
        threads.append(threading.current_thread())
        return samples_of(one_gauge())

    async def check(address: str) -> None:
        text = await scrape(address)
        assert "# HELP diloco_test A number" in text
        assert "diloco_test 7.0" in text
        assert "python_info" not in text
        assert await scrape(address) == text

    serve(collect, check)

    assert threads == [threading.main_thread()] * 2
    assert len(made) == 2 and threading.main_thread() not in made
    assert not any(name.startswith("diloco") for name in REGISTRY._names_to_collectors)


def test_empty_address_serves_nothing() -> None:
    async def run() -> str:
        server = MetricsServer("", one_gauge, setting="telemetry.test")
        await server.start(is_restart=False)
        await server.stop()
        return server.address

    assert asyncio.run(run()) == ""


def test_server_that_was_stopped_answers_no_more() -> None:
    async def run() -> None:
        server = MetricsServer("127.0.0.1:0", one_gauge, setting="telemetry.test")
        await server.start(is_restart=False)
        address = server.address
        await server.stop()
        with pytest.raises(urllib.error.URLError):
            await scrape(address)

    asyncio.run(run())


def test_port_that_is_taken_refuses_a_new_run_and_names_the_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        server = MetricsServer(address, one_gauge, setting="telemetry.syncer_metrics", busy_s=0)

        with pytest.raises(ConfigError, match=f"telemetry.syncer_metrics = {address}") as taken:
            asyncio.run(server.start(is_restart=False))

    assert "Address already in use" in str(taken.value)
    assert "ss -ltnp" in str(taken.value)


def test_port_that_is_taken_ends_no_run_that_is_under_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        server = MetricsServer(address, one_gauge, setting="telemetry.syncer_metrics", busy_s=0)

        async def run() -> None:
            await server.start(is_restart=True)
            await server.stop()

        asyncio.run(run())

    (warning,) = [record.getMessage() for record in caplog.records]
    assert "goes on without metrics" in warning
    assert f"telemetry.syncer_metrics = {address}" in warning


def test_port_that_its_last_owner_still_holds_is_tried_again() -> None:
    holder = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{holder.getsockname()[1]}"

    async def run() -> str:
        server = MetricsServer(address, one_gauge, setting="telemetry.test", busy_s=30)
        starting = asyncio.create_task(server.start(is_restart=True))
        await asyncio.sleep(0)  # it has tried once, in vain
        holder.close()
        await starting
        text = await scrape(server.address)
        await server.stop()
        return text

    assert "diloco_test 7.0" in asyncio.run(run())
