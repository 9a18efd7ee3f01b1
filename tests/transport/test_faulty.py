"""Every fault, alone: that it fires, when the script says so, and what its caller gets."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from diloco.transport.contracts import IncomingCall, Reply, Transport
from diloco.transport.errors import (
    ChecksumMismatch,
    ConnectError,
    DeadlineExceeded,
    HandlerFailed,
    PeerReset,
    TransportError,
)
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.shaping.faulty import (
    Fault,
    Faults,
    FaultScript,
    FaultyTransport,
    Gate,
)
from tests.contract.kinds import KINDS, Kind
from tests.faulty_handlers import faulty_handlers

DEADLINE_S = 30.0
SHORT_S = 0.3
PAYLOAD = bytes(range(256)) * 8
Claim = Callable[["Faulty"], Awaitable[None]]


class Faulty:
    """A transport with one fault at one of its ends, and what its peer's handler saw."""

    def __init__(self, kind: Kind, end: str, faults: Faults) -> None:
        self.kind = kind
        self.end = end
        self.faults = faults
        self.heard: list[tuple[bytes, bytes]] = []
        self.transport: Transport

    async def echo(self, call: IncomingCall) -> Reply:
        payload = await call.read_payload()
        self.heard.append((call.header, bytes(payload)))
        return Reply(call.header, payload)

    async def run(self, claim: Claim) -> None:
        handlers = {"echo": self.echo}
        if self.end == "server":
            handlers = dict(faulty_handlers(handlers, self.faults))
        server = self.kind.serve(handlers, "")
        await server.start()
        self.transport = self.kind.connect(server.address)
        if self.end == "client":
            self.transport = FaultyTransport(self.transport, self.faults)
        try:
            await claim(self)
        finally:
            await self.transport.close()
            await server.stop(0.0)

    async def call(
        self, text: bytes = b"", payload: bytes = PAYLOAD, deadline_s: float = DEADLINE_S
    ) -> bytes:
        """Echo, and insist on the header."""
        reply = await self.transport.call(
            "echo", text, payload, deadline_s=deadline_s, max_reply_bytes=len(payload)
        )
        assert reply.header == text
        return bytes(reply.payload)


_SLOW_KINDS = [pytest.param(name, marks=pytest.mark.slow) for name in ("mtls", "hivemind")]


@pytest.fixture(params=["loopback", "grpc", *_SLOW_KINDS])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    return KINDS[request.param](tmp_path)


@pytest.fixture(params=["client", "server"])
def play(request: pytest.FixtureRequest, kind: Kind) -> Callable[..., Faults]:
    def run(fault: Fault, claim: Claim, rate: float = 1.0, **settings: float) -> Faults:
        script = FaultScript(seed=3, rates={fault: rate}, **settings)  # type: ignore[arg-type]
        faulty = Faulty(kind, request.param, Faults(script, "link"))
        kind.run(faulty.run(claim))
        return faulty.faults

    return run


async def seconds(call: Awaitable[object]) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await call
    return loop.time() - began


def test_a_dropped_call_is_never_heard(play: Callable[..., Faults]) -> None:
    async def claim(faulty: Faulty) -> None:
        with pytest.raises(DeadlineExceeded):
            await faulty.call(deadline_s=2.0)  # the first call makes the connection, too
        assert faulty.heard == []

    assert play(Fault.DROP, claim).fired == {Fault.DROP: 1}


@pytest.mark.parametrize(
    ("gate", "is_heard"), [(Gate.CUT, False), (Gate.NO_REQUESTS, False), (Gate.NO_REPLIES, True)]
)
def test_what_a_shut_gate_holds_arrives_once_it_is_open(
    kind: Kind, gate: Gate, is_heard: bool
) -> None:
    faults = Faults(FaultScript(seed=3), "link")
    faulty = Faulty(kind, "client", faults)

    async def claim(faulty: Faulty) -> None:
        await faulty.call(b"before")
        faults.script = FaultScript(seed=3, gate=gate)
        with pytest.raises(DeadlineExceeded):
            await faulty.call(b"lost", deadline_s=SHORT_S)
        assert [header for header, _ in faulty.heard[1:]] == [b"lost"] * is_heard
        call = asyncio.create_task(faulty.call(b"held"))
        await asyncio.sleep(SHORT_S)
        assert not call.done()
        faults.script = FaultScript(seed=3)
        assert await call == PAYLOAD

    kind.run(faulty.run(claim))

    assert faults.num_held == 2


def test_a_reply_on_its_way_is_held_by_a_link_that_is_cut(kind: Kind) -> None:
    faults = Faults(FaultScript(seed=3, rates={Fault.DELAY: 1.0}, delay_s=0.1), "link")
    faulty = Faulty(kind, "client", faults)

    async def claim(faulty: Faulty) -> None:
        call = asyncio.create_task(faulty.call(b"under way"))
        await asyncio.sleep(0.05)
        faults.script = FaultScript(seed=3, gate=Gate.CUT)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(call), SHORT_S)
        faults.script = FaultScript(seed=3)
        assert await call == PAYLOAD

    kind.run(faulty.run(claim))

    assert faults.num_held == 1


def test_a_half_open_peer_does_it_and_says_nothing(play: Callable[..., Faults]) -> None:
    async def claim(faulty: Faulty) -> None:
        with pytest.raises(DeadlineExceeded):
            await faulty.call(b"done", deadline_s=2.0)
        assert faulty.heard == [(b"done", PAYLOAD)]

    assert play(Fault.HALF_OPEN, claim).fired == {Fault.HALF_OPEN: 1}


def test_a_delayed_call_arrives_late(play: Callable[..., Faults]) -> None:
    async def claim(faulty: Faulty) -> None:
        assert await seconds(faulty.call()) >= SHORT_S

    assert play(Fault.DELAY, claim, delay_s=SHORT_S).fired == {Fault.DELAY: 1}


def test_a_slow_reader_takes_its_time_for_every_byte(play: Callable[..., Faults]) -> None:
    async def claim(faulty: Faulty) -> None:
        assert await seconds(faulty.call()) >= 2 * SHORT_S  # the request, and as much of a reply

    slow_bps = 8 * len(PAYLOAD) / SHORT_S
    assert play(Fault.SLOW_READER, claim, slow_bps=slow_bps).fired == {Fault.SLOW_READER: 1}


def test_a_corrupted_payload_differs_by_a_bit(play: Callable[..., Faults]) -> None:
    async def claim(faulty: Faulty) -> None:
        got = await faulty.call()
        assert got == faulty.heard[0][1], "damaged on the way there"
        differing = [a ^ b for a, b in zip(got, PAYLOAD, strict=True) if a != b]
        assert differing == [1]
        assert await faulty.call(payload=b"") == b"", "nothing to damage"

    assert play(Fault.CORRUPT, claim).fired == {Fault.CORRUPT: 1}


def test_a_duplicate_is_heard_twice(play: Callable[..., Faults]) -> None:
    async def claim(faulty: Faulty) -> None:
        assert await faulty.call(b"twice") == PAYLOAD
        assert faulty.heard == [(b"twice", PAYLOAD)] * 2

    assert play(Fault.DUPLICATE, claim).fired == {Fault.DUPLICATE: 1}


def test_a_reset_comes_before_or_after_the_work(kind: Kind) -> None:
    async def claim(faulty: Faulty) -> None:
        for index in range(12):
            with pytest.raises(PeerReset) as caught:
                await faulty.call(b"%d" % index)
            assert (caught.value.peer, caught.value.method) == (faulty.transport.peer, "echo")
        assert 0 < len(faulty.heard) < 12

    faults = Faults(FaultScript(seed=3, rates={Fault.RESET: 1.0}), "link")
    kind.run(Faulty(kind, "client", faults).run(claim))

    assert faults.fired == {Fault.RESET: 12}
    with pytest.raises(ValueError, match="callers' end"):
        faulty_handlers({}, faults)


def test_a_call_is_overtaken_by_the_next(play: Callable[..., Faults]) -> None:
    async def claim(faulty: Faulty) -> None:
        await faulty.call(b"-1")  # makes the connection
        calls = []
        for index in range(6):
            calls.append(asyncio.create_task(faulty.call(b"%d" % index)))
            await asyncio.sleep(0.05)
        assert await asyncio.gather(*calls) == [PAYLOAD] * 6
        order = [int(header) for header, _ in faulty.heard][1:]
        assert sorted(order) == list(range(6))
        assert order != sorted(order)

    faults = play(Fault.REORDER, claim, rate=0.5, delay_s=SHORT_S)
    assert 0 < faults.fired[Fault.REORDER] < 6


def test_all_that_fires_as_reorder_is_out_of_order(tmp_path: Path) -> None:
    async def claim(faulty: Faulty) -> None:
        calls = []
        for index in range(8):
            calls.append(asyncio.create_task(faulty.call(b"%d" % index)))
            await asyncio.sleep(0.05)
        await asyncio.gather(*calls)
        heard.extend(int(header) for header, _ in faulty.heard)

    heard: list[int] = []
    faults = Faults(FaultScript(seed=1, rates={Fault.REORDER: 1.0}, delay_s=1.0), "link")
    kind = KINDS["loopback"](tmp_path)
    kind.run(Faulty(kind, "client", faults).run(claim))

    assert heard == [1, 0, 3, 2, 5, 4, 7, 6]
    assert faults.fired == {Fault.REORDER: 4}


def test_a_call_that_is_lost_overtakes_nobody(tmp_path: Path) -> None:
    async def claim(faulty: Faulty) -> None:
        assert isinstance(faulty.transport, FaultyTransport)
        began = asyncio.get_running_loop().time()
        held = asyncio.create_task(faulty.call(b"held"))
        await asyncio.sleep(0.1)
        with pytest.raises(DeadlineExceeded):
            await faulty.call(b"dropped", deadline_s=0.1)
        await held
        # The loopback's clock is virtual: it waits for as long as the script says, and no more.
        assert asyncio.get_running_loop().time() - began == pytest.approx(1.0, abs=0.01)

    script = FaultScript(seed=1, rates={Fault.REORDER: 0.5, Fault.DROP: 0.5}, delay_s=1.0)
    wanted = [Fault.REORDER, Fault.DROP]
    link = next(
        name
        for name in map(str, range(1000))
        if [script.fault_of(name, index) for index in range(2)] == wanted
    )
    faults = Faults(script, link)
    kind = KINDS["loopback"](tmp_path)
    kind.run(Faulty(kind, "client", faults).run(claim))

    assert faults.fired == {Fault.DROP: 1}


@pytest.mark.parametrize("fault", [Fault.DUPLICATE, Fault.CORRUPT, Fault.RESET])
def test_what_nobody_heard_has_not_fired(tmp_path: Path, fault: Fault) -> None:
    kind = KINDS["loopback"](tmp_path)
    script = FaultScript(seed=1, rates={fault: 1.0})
    link = next(name for name in map(str, range(1000)) if script.draw(name, 0, "when") >= 0.5)
    faults = Faults(script, link)

    async def run() -> None:
        transport = FaultyTransport(kind.connect("nobody"), faults)
        with pytest.raises(ConnectError):
            await transport.call("echo", b"", PAYLOAD, deadline_s=DEADLINE_S)
        await transport.close()

    kind.run(run())
    assert faults.fired == {}


def test_damage_that_the_peer_refuses_has_fired(tmp_path: Path) -> None:
    kind = KINDS["loopback"](tmp_path)
    faults = Faults(FaultScript(seed=1, rates={Fault.CORRUPT: 1.0}), "link")

    async def refuse(call: IncomingCall) -> Reply:
        assert bytes(await call.read_payload()) != PAYLOAD
        raise ValueError("damaged")

    async def run() -> None:
        server = kind.serve({"refuse": refuse}, "")
        await server.start()
        transport = FaultyTransport(kind.connect(server.address), faults)
        with pytest.raises(HandlerFailed, match="damaged"):
            await transport.call("refuse", b"", PAYLOAD, deadline_s=DEADLINE_S)
        await transport.close()
        await server.stop(0.0)

    kind.run(run())
    assert faults.fired == {Fault.CORRUPT: 1}


def test_nobody_overtakes_the_only_call(play: Callable[..., Faults]) -> None:
    async def claim(faulty: Faulty) -> None:
        await faulty.call()

    assert play(Fault.REORDER, claim).fired == {}


@pytest.mark.parametrize(
    ("size", "where"),
    [(4 << 10, "the first message"), (300 << 10, "the chunk at byte 0 of 307200")],
)
def test_a_bit_that_the_wire_flips_is_a_checksum_mismatch(size: int, where: str) -> None:
    """CORRUPT is above the checksums of frames; this is below them."""
    payload = b"AAAA" + random.Random(size).randbytes(size - 4)  # no chunk shrinks

    async def claim(address: str, damaged: asyncio.Event) -> None:
        transport = GrpcTransport(address)
        await transport.call("echo", b"", b"sound", deadline_s=DEADLINE_S, max_reply_bytes=5)
        damaged.set()
        with pytest.raises(ChecksumMismatch, match=where):
            await transport.call("echo", b"", payload, deadline_s=DEADLINE_S)
        await transport.close()

    async def run() -> None:
        faulty = Faulty(KINDS["grpc"](Path()), "none", Faults(FaultScript(seed=1), "link"))
        server = GrpcServer("127.0.0.1:0", {"echo": faulty.echo})
        await server.start()
        host, port = server.address.rsplit(":", 1)
        damaged = asyncio.Event()

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                writer.write(data.replace(b"AAAA", b"AAAB", 1) if damaged.is_set() else data)
            writer.close()

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            try:
                await asyncio.gather(
                    pass_on(reader, far_writer), pass_on(far_reader, writer), return_exceptions=True
                )
            finally:  # also where the test ends first
                far_writer.close()
                writer.close()

        proxy = await asyncio.start_server(relay, "127.0.0.1", 0)
        address = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        await claim(address, damaged)
        assert [payload for _, payload in faulty.heard] == [b"sound"]
        proxy.close()
        await server.stop(0.0)

    asyncio.run(run())


def test_a_script_plays_the_same_way_again(kind: Kind) -> None:
    rates = dict.fromkeys((Fault.RESET, Fault.DUPLICATE, Fault.CORRUPT, Fault.DELAY), 0.1)
    script = FaultScript(seed=5, rates=rates, delay_s=0.001)

    def history(link: str) -> tuple[list[str], dict[Fault, int]]:
        said: list[str] = []

        async def claim(faulty: Faulty) -> None:
            for _ in range(40):
                try:
                    said.append("ok" if await faulty.call() == PAYLOAD else "damaged")
                except TransportError as error:
                    said.append(type(error).__name__)

        faulty = Faulty(kind, "client", Faults(script, link))
        kind.run(faulty.run(claim))
        return said, dict(faulty.faults.fired)

    first = history("one")
    assert history("one") == first
    assert set(first[1]) == set(rates), "every kind of the script fired"
    assert history("another") != first


def test_faults_meet_the_methods_of_the_script_only(kind: Kind) -> None:
    script = FaultScript(seed=1, rates={Fault.RESET: 1.0}, methods=frozenset({"other"}))

    async def claim(faulty: Faulty) -> None:
        assert await faulty.call() == PAYLOAD

    faulty = Faulty(kind, "client", Faults(script, "link"))
    kind.run(faulty.run(claim))
    assert not faulty.faults.fired


def test_rates_are_met_and_faults_do_not_hang_together() -> None:
    script = FaultScript(seed=9, rates={Fault.DROP: 0.1, Fault.RESET: 0.3})
    drawn = [script.fault_of("link", index) for index in range(4000)]

    # Four standard deviations of a binomial share over 4000 calls.
    assert drawn.count(Fault.DROP) / 4000 == pytest.approx(0.1, abs=4 * (0.09 / 4000) ** 0.5)
    assert drawn.count(Fault.RESET) / 4000 == pytest.approx(0.3, abs=4 * (0.21 / 4000) ** 0.5)
    assert drawn.count(None) == 4000 - drawn.count(Fault.DROP) - drawn.count(Fault.RESET)


@pytest.mark.parametrize(
    "settings",
    [
        {"rates": {Fault.DROP: -0.1}},
        {"rates": {Fault.DROP: 0.6, Fault.RESET: 0.6}},
        {"delay_s": -1.0},
        {"slow_bps": 0.0},
    ],
)
def test_impossible_scripts_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"rates|delay_s"):
        FaultScript(seed=1, **settings)  # type: ignore[arg-type]
