"""The ideal times of all-reduces over islands, by hand."""

import math

import pytest

from diloco.baseline.time_model import ReductionTime, tcp_bps

MIB = 1 << 20


def reduction(**changes):
    told = {"num_islands": 2, "num_ranks": 2, "num_bytes": 64 * MIB, "wan_bps": 100e6}
    return ReductionTime(**{**told, "rtt_s": 0.06, **changes})


def test_between_two_islands_one_vector_crosses_each_way():
    ideal = reduction()

    assert ideal.between_s == pytest.approx(8 * 64 * MIB / 100e6)
    assert ideal.latency_s == pytest.approx(0.06)
    assert ideal.hierarchical_s == pytest.approx(5.36870912 + 0.06)


def test_chunks_hide_the_shorter_phase_but_for_one_chunk_of_it():
    # Inside 2 (g-1)/g 8 S / B = 0.537 s, besides 5.369 s between.
    whole, chunks = reduction(inside_bps=1e9), reduction(inside_bps=1e9, num_chunks=16)

    assert whole.hierarchical_s == whole.inside_s + whole.between_s + whole.latency_s
    assert whole.hierarchical_s - chunks.hierarchical_s == pytest.approx(0.536870912 * 15 / 16)


def test_a_flat_ring_carries_half_as_much_again_between_two_islands_of_two():
    # 2 (N-1)/N = 6/4 of the vector over every edge, and 3 of 6 hops are long ones.
    assert reduction().flat_s == pytest.approx(1.5 * 5.36870912 + 3 * 0.03)


def test_one_rank_alone_needs_no_time():
    alone = reduction(num_islands=1, num_ranks=1)

    assert alone.flat_s == alone.hierarchical_s == 0


def test_coded_values_shorten_what_is_between_only():
    ideal = reduction(wire_share=0.5, inside_bps=1e9)

    assert ideal.between_s == pytest.approx(5.36870912 / 2)
    assert ideal.inside_s == reduction(inside_bps=1e9).inside_s


def test_a_stream_of_tcp_is_bounded_by_loss():
    one = tcp_bps(1e9, rtt_s=0.1, loss=1e-3)

    assert one == pytest.approx(8 * 1448 / 0.1 * 1.22 / math.sqrt(1e-3))
    assert tcp_bps(1e9, rtt_s=0.1, loss=1e-3, streams=4) == pytest.approx(4 * one)
    assert tcp_bps(1e6, rtt_s=0.1, loss=1e-3, streams=4) == 1e6 * 1448 / 1500
