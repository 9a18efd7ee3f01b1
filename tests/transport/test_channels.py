"""How many connections, and which of them; what the kernel counts on real ones."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket

import pytest

from diloco.transport.channels import (
    MOST_CHANNELS,
    MOST_TOLERANT,
    Channels,
    LossMeter,
    SegmentCounts,
    wanted_channels,
)
from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.errors import ConnectError
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.tcp_counters import can_count, round_trips_s, segment_counts

DEADLINE_S = 30.0


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [(0.0, 1), (5e-6, 1), (1e-5, 2), (1e-4, 8), (1e-3, 16), (0.01, MOST_CHANNELS)],
)
def test_connections_grow_with_the_loss_and_share_lanes_evenly(loss: float, wanted: int) -> None:
    assert wanted_channels(loss) == wanted


def test_loss_is_that_of_the_worse_direction_and_of_what_is_new() -> None:
    meter = LossMeter()
    assert (meter.sent_loss, meter.received_loss, meter.wanted) == (0.0, 0.0, 1)
    meter.count({1: SegmentCounts(sent=900, retransmitted=900)})
    assert meter.wanted == 1  # too few to say

    meter = LossMeter()
    meter.count({1: SegmentCounts(sent=20_000, retransmitted=25)})
    assert meter.sent_loss == pytest.approx(15 / 20_000)  # 25 are two deviations over 15
    assert meter.wanted == 16

    # One of 10,000 lost leaves 122 segments behind a hole.
    meter = LossMeter()
    for look in range(1, 4):
        assert meter.wanted == 1
        meter.count({2: SegmentCounts(received=look * 10_000, out_of_order=look * 122)})
    assert meter.received_loss == pytest.approx(1e-4)
    assert meter.wanted == 8


def test_a_slow_connection_does_not_hide_its_losses() -> None:
    """One that carries some 400 segments a look, which are few each."""
    meter, wanted = LossMeter(), []
    for look in range(1, 31):
        meter.count({2: SegmentCounts(received=look * 390, out_of_order=look * 15)})
        wanted.append(meter.wanted)

    assert wanted[0] == 1
    assert wanted[-1] == 16


def test_one_look_without_a_hole_forgets_nothing() -> None:
    meter, received, behind_holes = LossMeter(), 0, 0
    for is_holed in (True, True, True, False, True, False, True):
        received, behind_holes = received + 10_000, behind_holes + 150 * is_holed
        meter.count({2: SegmentCounts(received=received, out_of_order=behind_holes)})
        if received >= 30_000:
            assert meter.wanted >= 4
    for _ in range(4):
        received += 10_000
        meter.count({2: SegmentCounts(received=received, out_of_order=behind_holes)})

    assert meter.wanted == 1


@pytest.mark.parametrize("num_lost", range(5))
@pytest.mark.parametrize("sent", [1000, 2000, 49_000])
def test_a_few_losses_open_no_connection(num_lost: int, sent: int) -> None:
    meter = LossMeter()
    meter.count({1: SegmentCounts(sent=sent, retransmitted=num_lost)})

    assert meter.wanted == 1


def test_one_loss_of_a_large_window_opens_no_connection() -> None:
    meter = LossMeter()
    meter.count({1: SegmentCounts(received=10_000, out_of_order=8000)})
    for look in range(2, 5):
        meter.count({1: SegmentCounts(received=look * 10_000, out_of_order=8000)})

    assert meter.wanted == 1


@pytest.mark.parametrize(
    ("controls", "wanted"),
    [(["cubic"], 16), (["bbr"], MOST_TOLERANT), (["bbr", "bbr"], MOST_TOLERANT), (["bbr", ""], 16)],
    ids=str,
)
def test_a_control_that_bears_losses_keeps_few_connections(
    controls: list[str], wanted: int
) -> None:
    meter = LossMeter()
    meter.count(
        {
            n: SegmentCounts(sent=100_000, retransmitted=1000, control=control)
            for n, control in enumerate(controls)
        }
    )
    assert meter.wanted == wanted

    for look in range(1, 4):  # how the peer sends is not known
        counts = SegmentCounts(received=look * 10_000, out_of_order=look * 1000, control="bbr")
        meter.count({9: counts})
    assert meter.wanted == MOST_CHANNELS


def test_old_losses_are_forgotten() -> None:
    meter = LossMeter()
    meter.count({1: SegmentCounts(sent=10_000, retransmitted=100)})
    for total in range(20_000, 1_000_000, 10_000):
        meter.count({1: SegmentCounts(sent=total, retransmitted=100)})

    assert meter.wanted == 1


def test_connections_come_and_go_without_counting_twice() -> None:
    meter = LossMeter()
    meter.count({1: SegmentCounts(sent=3000, retransmitted=30)})
    meter.count({2: SegmentCounts(sent=3000)})
    meter.count({2: SegmentCounts(sent=3000)})

    assert meter.sent_loss == pytest.approx((30 - 2 * 30**0.5) / 6000)


def test_calls_are_dealt_to_the_least_busy_connection() -> None:
    channels = Channels(3)

    assert [channels.enter(size) for size in (100, 10, 20, 5, 0)] == [0, 1, 2, 1, 1]
    channels.leave(0, 100)
    assert channels.enter(7) == 0
    channels.num_channels = 1
    assert channels.enter(1) == 0


@pytest.mark.skipif(not can_count(), reason="this system does not count segments")
def test_the_kernels_counts_are_found_among_our_own_sockets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        others = *socket.socketpair(), socket.socket(type=socket.SOCK_DGRAM), socket.socket()
        with (
            contextlib.ExitStack() as stack,
            socket.create_connection(("127.0.0.1", port)) as sender,
        ):
            for other in others:
                stack.enter_context(other)
            receiver, _ = listener.accept()
            with receiver:
                sender.sendall(bytes(50_000))
                left = 50_000
                while left:
                    left -= len(receiver.recv(left))
                (counts,) = segment_counts({("127.0.0.1", port)}).values()
                here, elsewhere = ("127.0.0.1", port), ("127.0.0.2", port)
                trips_s = round_trips_s({here, elsewhere, ("localhost", port)})
                assert trips_s.keys() == {here, ("localhost", port)}
                assert 0 < trips_s[here] < 1
                assert counts.sent >= 1 and counts.retransmitted == 0
                used = sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                assert counts.control == used.rstrip(b"\0").decode() != ""
                assert len(segment_counts({("localhost", port)})) == 1
                assert len(segment_counts({("[::ffff:127.0.0.1]", port)})) == 1
                assert segment_counts({("127.0.0.2", port), ("127.0.0.1", 1)}) == {}
                back = segment_counts({("127.0.0.1", sender.getsockname()[1])})
                assert next(iter(back.values())).received >= 1
        assert segment_counts({("127.0.0.1", port)}) == {}


def test_without_a_descriptor_left_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("os.listdir", refuse)
    assert segment_counts({("127.0.0.1", 1)}) == {}


@pytest.mark.parametrize(("channels", "connections"), [(1, 1), (3, 3)])
def test_concurrent_calls_use_as_many_connections_as_told(channels: int, connections: int) -> None:
    peers: set[str] = set()

    async def run() -> None:
        everybody = asyncio.Barrier(6)

        async def note(call: IncomingCall) -> Reply:
            peers.add(call.peer)
            await everybody.wait()
            return Reply(b"", await call.read_payload())

        server = GrpcServer("127.0.0.1:0", {"note": note})
        await server.start()
        transport = GrpcTransport(server.address, channels=channels)
        await asyncio.gather(
            *(
                transport.call(
                    "note", b"", bytes(1000), deadline_s=DEADLINE_S, max_reply_bytes=1000
                )
                for _ in range(6)
            )
        )
        await transport.close()
        await server.stop(0.0)

    asyncio.run(run())
    assert len(peers) == connections


@pytest.mark.skipif(not can_count(), reason="this system does not count segments")
def test_measured_loss_opens_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    lossy = {1: SegmentCounts(sent=100_000, retransmitted=100)}
    monkeypatch.setattr("diloco.transport.grpc.client.segment_counts", lambda places: lossy)
    peers: set[str] = set()

    async def run() -> None:
        everybody = asyncio.Barrier(8)

        async def note(call: IncomingCall) -> Reply:
            peers.add(call.peer)
            await everybody.wait()
            return Reply(b"", await call.read_payload())

        server = GrpcServer("127.0.0.1:0", {"note": note})
        await server.start()
        transport = GrpcTransport(server.address, channels=0)
        calls = (
            transport.call("note", b"", b"x", deadline_s=DEADLINE_S, max_reply_bytes=1)
            for _ in range(8)
        )
        await asyncio.gather(*calls)
        await transport.close()
        await server.stop(0.0)

    asyncio.run(run())
    assert len(peers) == 8


@pytest.mark.skipif(not can_count(), reason="this system does not count segments")
@pytest.mark.parametrize("proxy", ["http://127.0.0.1:2", "http://user:password@127.0.0.1:2/"])
def test_connections_to_a_proxy_are_looked_at_too(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_for: list[set[tuple[str, int]]] = []

    def look(places: set[tuple[str, int]]) -> dict[int, SegmentCounts]:
        looked_for.append(places)
        return {}

    monkeypatch.setattr("diloco.transport.grpc.client.segment_counts", look)

    async def run() -> None:
        transport = GrpcTransport("127.0.0.1:1", channels=0, proxy=proxy)
        with pytest.raises(ConnectError):
            await transport.call("note", b"", b"x", deadline_s=DEADLINE_S)
        await transport.close()

    asyncio.run(run())
    assert looked_for == [{("127.0.0.1", 1), ("127.0.0.1", 2)}]


def test_an_impossible_number_is_refused() -> None:
    with pytest.raises(ValueError, match="channels = -1"):
        GrpcTransport("127.0.0.1:1", channels=-1)
