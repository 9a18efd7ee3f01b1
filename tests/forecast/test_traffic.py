"""Bytes of a run counted by hand.

Tensors of 200 values, in one row that is never cut, and 100 are fragments 0 and 1, padded to 2 and
1 blocks of 128 values: 1024 and 512 bytes in float32, 132 and 66 in int4 (66 a block). H = 4 and 8
inner steps: fragment 0 is sent after inner steps 2 and 6, fragment 1 after 4, and after 8 unless a
flush ends the run.
"""

import pytest

from diloco.forecast.traffic import Traffic, data_parallel_traffic, diloco_traffic, fragment_bytes
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.outer.schedule import Schedule
from diloco.transport.shaping.link import Link, LinkProfile

PLAN = make_plan([TensorSpec("a", (100,)), TensorSpec("b", (1, 200))], num_fragments=2)


def schedule(*, flush: bool) -> Schedule:
    return Schedule.make(
        inner_steps_per_round=4, num_fragments=2, overlap_steps=0, inner_steps=8, flush=flush
    )


def test_bytes_of_a_fragment_are_those_of_its_padded_lanes() -> None:
    sizes = {(p, c): fragment_bytes(PLAN, p, c) for p in (0, 1) for c in ("float32", "int4")}

    assert sizes == {(0, "float32"): 1024, (1, "float32"): 512, (0, "int4"): 132, (1, "int4"): 66}


@pytest.mark.parametrize(
    ("flush", "uplink_codec", "downlink_codec", "expected"),
    [
        # Fragment 0 twice and fragment 1 twice.
        (False, "float32", "float32", Traffic(2 * 1024 + 2 * 512, 2 * 1024 + 2 * 512, 4)),
        (False, "int4", "int4", Traffic(396, 396, 4)),
        # Fragment 0 twice and fragment 1 once, then both; a flush goes down in float32.
        (True, "int4", "int4", Traffic(330 + 198, 330 + 1536, 5)),
        (True, "int4", "float32", Traffic(330 + 198, 2560 + 1536, 5)),
    ],
    ids=["float32", "int4", "int4_and_flush", "mixed_and_flush"],
)
def test_traffic_follows_the_schedule(
    flush: bool, uplink_codec: str, downlink_codec: str, expected: Traffic
) -> None:
    counted = diloco_traffic(
        PLAN,
        schedule(flush=flush),
        uplink_codec=uplink_codec,
        downlink_codec=downlink_codec,
    )

    assert counted == expected


def test_data_parallel_moves_every_value_at_every_inner_step() -> None:
    assert data_parallel_traffic(PLAN, 8) == Traffic(8 * 1200, 8 * 1200, 8)


@pytest.mark.parametrize(
    ("traffic", "seconds"),
    [
        (Traffic(2000, 2000, 4), 2.0 + 4 * 0.3),
        (Traffic(1000, 8000, 0), 4.0),
        (Traffic(0, 0, 0), 0.0),
    ],
    ids=["up_is_slower", "down_is_slower", "nothing"],
)
def test_transfers_take_the_slower_direction_and_their_round_trips(
    traffic: Traffic, seconds: float
) -> None:
    link = LinkProfile("path", up=Link(8000, 0.1), down=Link(16000, 0.2), source="test")

    assert traffic.transfer_s(link) == pytest.approx(seconds)
