"""One direction inside the relay: delay, order, loss, outage; all with a given clock and seed."""

import itertools
import math

import pytest

from diloco.simulations.emulate.line import (
    LATE_BOUNDS_S,
    EmulatedLine,
    LineSettings,
    late_quantile_s,
)
from diloco.simulations.emulate.packets import VNET_BYTES, VNET_HEADER
from tests.simulations.frames import MSS, TCP4, make_frame

PACKET = VNET_HEADER.pack(0, 0, 0, 0, 0, 0) + b"\x45" + bytes(99)


def test_frames_are_due_after_the_delay_and_counted() -> None:
    line = EmulatedLine(LineSettings(delay_s=0.03), seed=1)

    assert line.next_due() == math.inf
    line.accept(PACKET, 10.0)
    line.accept(make_frame(TCP4, bytes(3 * MSS)), 10.5)

    assert [due for due, _ in line.held] == [pytest.approx(10.03), pytest.approx(10.53)]
    assert line.counters.packets == 1 + 3
    assert line.counters.bytes == sum(len(frame) - VNET_BYTES for _, frame in line.held)


@pytest.mark.parametrize("spacing_s", [0.0001, 0.02], ids=["dense", "sparse"])
def test_jitter_keeps_the_order_and_its_bounds(spacing_s: float) -> None:
    line = EmulatedLine(LineSettings(delay_s=0.03, jitter_s=0.01), seed=1)
    times = [spacing_s * n for n in range(1000)]

    for now in times:
        line.accept(PACKET, now)

    dues = [due for due, _ in line.held]
    late = [due - now for due, now in zip(dues, times, strict=True)]
    assert dues == sorted(dues)
    assert min(late) >= 0.03 - 1e-9 and max(late) <= 0.04 + 1e-9
    if spacing_s > 0.01:  # none waits for the one before it: uniform
        assert sum(late) / len(late) == pytest.approx(0.035, abs=0.0004)  # four standard errors


@pytest.mark.parametrize("loss", [0.01, 0.1, 0.5])
def test_loss_hits_packets_inside_super_packets_as_often_as_alone(loss: float) -> None:
    frame = make_frame(TCP4, bytes(40 * MSS))
    settings = LineSettings(delay_s=0.0, loss=loss)
    together, alone = EmulatedLine(settings, seed=3), EmulatedLine(settings, seed=3)
    num_frames = math.ceil(2000 / (40 * loss))

    for _ in range(num_frames):
        together.accept(frame, 0.0)
        for _ in range(40):
            alone.accept(PACKET, 0.0)

    # The same seed loses the same packets, whatever they come in; 2000 expected: 4 sigma < 9 %.
    assert together.counters.lost_packets == alone.counters.lost_packets
    assert together.counters.lost_packets == pytest.approx(40 * loss * num_frames, rel=0.09)
    assert len(alone.held) == alone.counters.packets - alone.counters.lost_packets


def test_lost_packets_do_not_come_in_bursts() -> None:
    line = EmulatedLine(LineSettings(delay_s=0.0, loss=0.1), seed=5)
    fates = []
    for _ in range(20_000):
        before = line.counters.lost_packets
        line.accept(PACKET, 0.0)
        fates.append(line.counters.lost_packets > before)

    pairs = sum(a and b for a, b in itertools.pairwise(fates))

    assert pairs == pytest.approx(200, abs=60)  # 0.1 x 0.1 of 20,000; four standard errors


def test_an_outage_loses_all_and_what_is_on_its_way_arrives() -> None:
    line = EmulatedLine(LineSettings(delay_s=0.5), seed=1)

    line.accept(PACKET, 0.0)
    line.change(LineSettings(delay_s=0.5, is_up=False))
    line.accept(PACKET, 0.1)
    line.change(LineSettings(delay_s=0.1))
    line.accept(PACKET, 0.2)

    assert [due for due, _ in line.held] == [0.5, 0.5]  # a shorter delay overtakes nothing
    assert line.counters.outage_packets == 1


def test_lateness_is_reported_as_an_upper_bound() -> None:
    line = EmulatedLine(LineSettings(delay_s=0.0), seed=1)
    for late_s in [0.0, 10e-6, 50e-6, 0.9, 1e6]:
        line.note_late(late_s)

    assert late_quantile_s(line.late, 0.5) == pytest.approx(64e-6)
    assert 0.9 <= late_quantile_s(line.late, 0.8) < 1.8
    assert late_quantile_s(line.late, 1.0) == LATE_BOUNDS_S[-1]
    assert late_quantile_s([0] * len(LATE_BOUNDS_S), 0.99) == 0.0
