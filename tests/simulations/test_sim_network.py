"""Links under the virtual clock: who gets how much of them, and when things arrive."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.simulations.engine.clock import Engine
from diloco.simulations.engine.lives import Failures, Weibull
from diloco.simulations.engine.network import Network, Path, Pipe, Tcp
from diloco.transport.shaping.link import Link


def path(name: str, *pipes: Pipe, tcp: Tcp | None = None, **link: float) -> Path:
    delay_s = link.get("delay_s", 0.0)
    jitter_s, loss = link.get("jitter_s", 0.0), link.get("loss", 0.0)
    line = Link(pipes[0].bandwidth_bps, delay_s, jitter_s, loss)
    return Path(name, pipes, line, 2 * delay_s, tcp)


def arrivals(*sends: tuple[float, Path, float, int], seed: int = 0) -> list[float]:
    """Send (when, path, bytes, streams); returns when each has arrived."""
    engine = Engine(seed)
    return arrivals_on(engine, Network(engine), *sends)


def arrivals_on(
    engine: Engine, network: Network, *sends: tuple[float, Path, float, int]
) -> list[float]:
    arrived = [math.nan] * len(sends)

    def begin(index: int) -> None:
        _, way, num_bytes, streams = sends[index]
        event = network.cross(way, num_bytes, streams)
        assert event.callbacks is not None
        event.callbacks.append(lambda _: arrived.__setitem__(index, engine.now))

    for index, send in enumerate(sends):
        engine.call_at(send[0], lambda index=index: begin(index))  # type: ignore[misc]
    engine.run()
    return arrived


def test_a_transfer_takes_its_bits_over_the_bandwidth_and_the_delay() -> None:
    assert arrivals((1.0, path("a", Pipe("p", 8e6), delay_s=0.05), 1e6, 1)) == pytest.approx([2.05])


def test_transfers_share_a_pipe_and_take_over_what_others_leave() -> None:
    pipe = Pipe("p", 8e6)

    both = arrivals((0.0, path("a", pipe), 1e6, 1), (0.0, path("b", pipe), 0.5e6, 1))

    assert both == pytest.approx([1.5, 1.0])


def test_streams_are_weights() -> None:
    pipe = Pipe("p", 8e6)

    both = arrivals((0.0, path("a", pipe), 0.75e6, 3), (0.0, path("b", pipe), 0.75e6, 1))

    assert both == pytest.approx([1.0, 1.5])


def test_a_shared_uplink_is_divided_and_a_thin_line_leaves_its_rest_to_others() -> None:
    """Lines of 2 and 8 Mbit/s into an uplink of 8: 2 and 6."""
    hub = Pipe("hub", 8e6)
    thin, fat = path("a", Pipe("thin", 2e6), hub), path("b", Pipe("fat", 8e6), hub)

    assert arrivals((0.0, thin, 0.25e6, 1), (0.0, fat, 0.75e6, 1)) == pytest.approx([1.0, 1.0])


def test_headers_take_their_share_of_a_line_however_many_transfers_share_it() -> None:
    pipe = Pipe("p", 8e6)

    alone = arrivals((0.0, path("a", pipe, tcp=Tcp()), 1e6, 1))
    both = arrivals(*((0.0, path(name, pipe, tcp=Tcp()), 0.5e6, 1) for name in "ab"))

    assert alone == pytest.approx([1500 / 1448])
    assert both == pytest.approx([1500 / 1448] * 2)


@pytest.mark.parametrize(
    ("tcp", "streams", "bps"),
    [
        pytest.param(Tcp(window_bytes=1e5), 1, 8e5 / 0.1, id="window"),
        pytest.param(Tcp(window_bytes=1e5), 4, 4 * 8e5 / 0.1, id="four-windows"),
        pytest.param(Tcp(loss=1e-4), 1, 8 * 1448 / 0.1 * 1.22 / 1e-2, id="mathis"),
        pytest.param(Tcp(), 1, 1e9 * 1448 / 1500, id="headers-only"),
    ],
)
def test_tcp_bounds_a_transfer(tcp: Tcp, streams: int, bps: float) -> None:
    way = path("a", Pipe("p", 1e9), delay_s=0.05, tcp=tcp)

    assert arrivals((0.0, way, 1e7, streams)) == pytest.approx([8e7 / bps + 0.05])


def test_jitter_keeps_order_and_a_seed_keeps_everything() -> None:
    pipe = Pipe("p", 8e9)
    ways = [path("a", pipe, delay_s=0.01, jitter_s=0.05, loss=0.1) for _ in range(20)]
    sends = [(0.001 * i, way, 1e3, 1) for i, way in enumerate(ways)]

    first, again, other = arrivals(*sends), arrivals(*sends), arrivals(*sends, seed=1)

    assert first == pytest.approx(sorted(first)) and first == again
    assert first != other


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[Pipe], list[tuple[list[int], int, float]]]:
    """Draw pipes, and transfers over some of them: pipes, streams and bytes."""
    rates = draw(st.lists(st.floats(1e5, 1e9), min_size=1, max_size=5))
    some = st.lists(st.integers(0, len(rates) - 1), min_size=1, max_size=3, unique=True)
    flows = st.lists(
        st.tuples(some, st.integers(1, 8), st.floats(1e3, 1e7)), min_size=1, max_size=6
    )
    return [Pipe(str(i), rate) for i, rate in enumerate(rates)], draw(flows)


@settings(deadline=None, max_examples=60)
@given(meshes())
def test_shares_are_max_min_fair_and_every_bit_is_carried_once(
    mesh: tuple[list[Pipe], list[tuple[list[int], int, float]]],
) -> None:
    """Each transfer has a full pipe on which nobody has more a stream than it has."""
    pipes, flows = mesh
    engine = Engine(0)
    network = Network(engine)
    for index, (own, streams, num_bytes) in enumerate(flows):
        network.send(path(str(index), *(pipes[i] for i in own)), num_bytes, streams)
    engine.step()  # at 0: what has begun is shared

    rates = network.rates_bps
    used = [sum(rates[str(i)] for i, f in enumerate(flows) if p in f[0]) for p in range(len(pipes))]
    assert all(u <= pipe.bandwidth_bps * (1 + 1e-9) for u, pipe in zip(used, pipes, strict=True))
    for index, (own, streams, _) in enumerate(flows):
        level = rates[str(index)] / streams
        assert any(
            used[p] >= pipes[p].bandwidth_bps * (1 - 1e-9)
            and all(
                rates[str(other)] / flow[1] <= level * (1 + 1e-9)
                for other, flow in enumerate(flows)
                if p in flow[0]
            )
            for p in own
        )
    engine.run()
    for p, pipe in enumerate(pipes):
        carried = 8 * sum(num_bytes for own, _, num_bytes in flows if p in own)
        assert pipe.carried_bits == pytest.approx(carried, rel=1e-6, abs=1)


@pytest.mark.parametrize("shape", [0.7, 1.0, 3.0])
def test_failures_have_the_mean_that_was_asked_for(shape: float) -> None:
    """20,000 draws: the mean's standard error is at most 1.5 / sqrt(20000) = 1.1 % of it."""
    stream, law = random.Random(1), Weibull(100.0, shape)

    mean_s = sum(law.draw(stream) for _ in range(20_000)) / 20_000

    assert mean_s == pytest.approx(100.0, rel=0.04)


def test_absences_follow_one_another() -> None:
    failures = Failures(Weibull(10.0), Weibull(2.0, 0.8))
    drawn = list(itertools.islice(failures.draw(random.Random(1)), 20))

    times = [moment for each in drawn for moment in (each.begin_s, each.end_s)]
    assert times == sorted(times)
