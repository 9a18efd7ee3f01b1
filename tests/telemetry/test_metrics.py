"""Scalars of events: names that people expect, on two axes."""

from __future__ import annotations

import math

import pytest

from diloco.telemetry.events import (
    BytesMoved,
    CheckpointWritten,
    Evaluated,
    Event,
    FragmentMerged,
    FragmentSent,
    InnerStepDone,
    IslandRejoined,
    MemoryCopied,
    MemoryUsed,
    PhaseDone,
    RoundExpiredSeen,
    SyncerRestarted,
)
from diloco.telemetry.metrics import Metrics, MetricsRow


def step(inner_step: int, *, loss: float = 2.0, duration_s: float = 0.5) -> InnerStepDone:
    return InnerStepDone(inner_step, loss, 0.25, 1e-3, 64, duration_s)


def sent(*, declined: str = "") -> FragmentSent:
    return FragmentSent(3, 1, 4, 0, 192, 3, False, 0.75, declined)


def merged(blocked_s: float = 1.5, outcome: str = "included") -> FragmentMerged:
    return FragmentMerged(4, 1, 5, outcome, 1, blocked_s, "d", ("east", "west"), False)


def row(metrics: Metrics, event: Event) -> MetricsRow:
    result = metrics.row(event)
    assert result is not None
    return result


def test_inner_step_has_the_names_of_torchtitan() -> None:
    first = row(Metrics(), step(1))

    assert (first.inner_step, first.tokens) == (1, 64)
    assert first.scalars == {
        "loss_metrics/global_avg_loss": 2.0,
        "perplexity": math.exp(2.0),
        "grad_norm": 0.25,
        "lr": 1e-3,
        "throughput(tps)": 128.0,
        "time_metrics/inner_step(s)": 0.5,
        "time_metrics/end_to_end(s)": 0.5,
    }


def test_throughput_counts_what_the_island_was_blocked_since_its_last_step() -> None:
    metrics = Metrics()

    metrics.row(step(1))
    metrics.row(merged(blocked_s=1.0))
    metrics.row(RoundExpiredSeen(4, 0, 4, 0, blocked_s=0.5))
    blocked = row(metrics, step(2))
    free = row(metrics, step(3))

    assert blocked.scalars["time_metrics/end_to_end(s)"] == 2.0
    assert blocked.scalars["throughput(tps)"] == 32.0
    assert free.scalars["throughput(tps)"] == 128.0


@pytest.mark.parametrize(
    ("event", "scalars"),
    [
        (sent(), {"leader_lanes_pseudo_gradient_norm/fragment-1": 0.75}),
        (sent(declined="not finite"), {"events/declined": 1}),
        (
            merged(),
            {
                "outer_step/fragment-1": 5,
                "num_peers": 2,
                "outer/staleness(steps)": 1,
                "time_metrics/blocked(s)": 1.5,
                "outer/included": 1,
            },
        ),
        (BytesMoved(4, 70, 80), {"outer/uplink_bytes": 70, "outer/downlink_bytes": 80}),
        (
            Evaluated(4, "published", 1.25),
            {"validation_metrics/published_nats_per_byte": 1.25},
        ),
        (
            CheckpointWritten(4, 900, 0.5, 0.25, 0.125),
            {
                "checkpoint/bytes": 900,
                "checkpoint/write(s)": 0.5,
                "checkpoint/blocked(s)": 0.25,
                "checkpoint/awaited(s)": 0.125,
            },
        ),
        (MemoryCopied(4, 3, 800, 0.5), {"memory_copy/bytes": 800, "memory_copy/wait(s)": 0.5}),
        (
            MemoryUsed(4, 1 << 30, 2 << 30, 1, 3 << 30, 4 << 30),
            {
                "memory/resident(GiB)": 1.0,
                "memory/max_resident(GiB)": 2.0,
                "memory/max_active(GiB)": 3.0,
                "memory/max_reserved(GiB)": 4.0,
            },
        ),
        (RoundExpiredSeen(4, 0, 4, 0, 0.5), {"events/round_expired": 1}),
        (IslandRejoined(4, 7), {"events/island_rejoined": 1}),
    ],
    ids=[
        "sent",
        "declined",
        "merged",
        "bytes",
        "evaluated",
        "checkpoint",
        "memory",
        "memory-used",
        "expired",
        "rejoined",
    ],
)
def test_scalars_of_an_event(event: Event, scalars: dict[str, float]) -> None:
    assert row(Metrics(), event).scalars == scalars


def test_events_are_counted_and_stand_at_the_last_inner_step() -> None:
    metrics = Metrics()

    metrics.row(step(1))
    first = row(metrics, SyncerRestarted(2, 3))
    second = row(metrics, SyncerRestarted(3, 0))

    assert (first.inner_step, first.tokens) == (1, 64)
    assert [r.scalars for r in (first, second)] == [
        {"events/syncer_restarted": 1},
        {"events/syncer_restarted": 2},
    ]


def test_nothing_is_drawn_before_an_inner_step_is_known() -> None:
    assert Metrics().row(SyncerRestarted(2, 3)) is None


def test_phases_are_for_timelines_not_for_scalars() -> None:
    metrics = Metrics()
    row(metrics, step(1))

    assert metrics.row(PhaseDone("send", 0, 0, 3, 0.5)) is None


def test_tokens_of_earlier_starts_are_on_the_axis() -> None:
    metrics = Metrics()

    assert row(metrics, step(101)).tokens == 101 * 64
    assert row(metrics, step(102)).tokens == 102 * 64


@pytest.mark.parametrize("loss", [math.nan, math.inf], ids=str)
def test_a_loss_that_diverged_is_a_row_too(loss: float) -> None:
    scalars = row(Metrics(), step(1, loss=loss)).scalars

    assert not math.isfinite(scalars["loss_metrics/global_avg_loss"])
