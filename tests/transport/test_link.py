import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.transport.shaping.link import CATCH_UP_S, Link, LinkProfile, LinkQueue

NAN = float("nan")


@pytest.mark.parametrize(
    "values",
    [(0, 0), (-1, 0), (NAN, 0), (float("inf"), 0), (1, -1), (1, NAN), (1, float("inf")),
     (1, 0, -1), (1, 0, NAN), (1, 0, 0, -0.1), (1, 0, 0, 1), (1, 0, 0, NAN)],
)  # fmt: skip
def test_impossible_links_are_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        Link(*values)


def test_an_idle_link_takes_size_over_bandwidth_plus_delay() -> None:
    state = LinkQueue(Link(bandwidth_bps=8e3, delay_s=0.5), seed=0)

    assert state.reserve(10.0, 1000) == (11.0, 11.5)
    assert state.reserve(10.0, 1000) == (12.0, 12.5)  # behind the first
    assert state.reserve(20.0, 1000) == (21.0, 21.5)  # idle for 8 s: nothing is saved up
    assert state.reserve(21.0, 0) == (21.0, 21.5)
    assert state.carried_bytes == 3000


def test_late_wake_ups_cost_no_bandwidth() -> None:
    state = LinkQueue(Link(bandwidth_bps=8e6, delay_s=0.1), seed=0)
    now = 0.0
    for _ in range(1000):
        release, _ = state.reserve(now, 10_000)
        now = release + CATCH_UP_S * 0.9  # each time the sender comes back 9 ms late

    # 1000 chunks of 10 ms each; a bucket anchored at each wake-up would need 19 s.
    assert release == pytest.approx(10.0)


def test_the_catch_up_credit_does_not_shorten_the_delay() -> None:
    state = LinkQueue(Link(bandwidth_bps=8e9, delay_s=0.1), seed=0)
    release, _ = state.reserve(0.0, 1000)
    now = release + CATCH_UP_S * 0.9

    release, delivery = state.reserve(now, 1000)

    assert release < now
    assert delivery == now + 0.1


def test_a_pause_longer_than_the_credit_is_not_made_up_for() -> None:
    state = LinkQueue(Link(bandwidth_bps=8e3, delay_s=0.0), seed=0)
    release, _ = state.reserve(0.0, 1000)

    assert state.reserve(release + 2 * CATCH_UP_S, 1000)[0] == release + 2 * CATCH_UP_S + 1.0


@given(
    seed=st.integers(0, 2**32),
    steps=st.lists(st.tuples(st.floats(0, 0.1), st.integers(0, 100_000)), max_size=50),
)
def test_order_is_kept_and_nothing_is_faster_than_the_link(
    seed: int, steps: list[tuple[float, int]]
) -> None:
    link = Link(bandwidth_bps=1e7, delay_s=0.02, jitter_s=0.05, loss=0.2)
    state = LinkQueue(link, seed=seed)
    now = last = 0.0
    for gap, size in steps:
        now += gap
        release, delivery = state.reserve(now, size)
        assert delivery >= max(release, now) + link.delay_s
        assert delivery >= last
        last = delivery
    assert state.carried_bytes >= sum(size for _, size in steps)


def test_jitter_is_spread_over_its_range() -> None:
    link = Link(bandwidth_bps=1e12, delay_s=1.0, jitter_s=0.5)
    state = LinkQueue(link, seed=1)
    extra = [state.reserve(10.0 * i, 1)[1] - 10.0 * i - 1.0 for i in range(500)]

    assert 0.0 <= min(extra) < 0.01 and 0.49 < max(extra) <= 0.5 + 1e-9


def test_a_lost_chunk_takes_the_link_twice_and_one_round_trip_more() -> None:
    link = Link(bandwidth_bps=8e3, delay_s=0.5, loss=0.25)
    state = LinkQueue(link, seed=5)
    for i in range(4000):
        release, delivery = state.reserve(100.0 * i, 1000)
        took = (release - 100.0 * i, delivery - release)
        assert took == pytest.approx((1.0, 0.5)) or took == pytest.approx((2.0, 1.5))

    # Binomial(4000, 0.25): 1000 +- 27.
    assert 890 < state.num_lost < 1110
    assert state.carried_bytes == (4000 + state.num_lost) * 1000


def test_the_same_seed_gives_the_same_link() -> None:
    link = Link(bandwidth_bps=1e6, delay_s=0.01, jitter_s=0.01, loss=0.3)
    runs = [
        [state.reserve(0.01 * i, 500) for i in range(100)]
        for state in (LinkQueue(link, seed=seed) for seed in (7, 7, 8))
    ]

    assert runs[0] == runs[1] != runs[2]


def test_both_directions_of_a_profile_draw_differently() -> None:
    lossy = Link(bandwidth_bps=50e6, delay_s=0.05, loss=0.001)
    up, down = LinkProfile("lossy", lossy, lossy, source="test").states(seed=3)
    lost = [[i for i in range(20_000) if _is_lost(state)] for state in (up, down)]  # about 20 each

    assert lost[0] != lost[1]


def _is_lost(state: LinkQueue) -> bool:
    before = state.num_lost
    state.reserve(0.0, 1)
    return state.num_lost > before
