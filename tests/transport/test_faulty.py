"""Every fault, alone: that it fires, when the script says so, and what its caller gets."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.contract.kinds import KINDS, Kind
from transport.contracts import IncomingCall, Reply, Transport
from transport.errors import DeadlineExceeded, PeerReset, TransportError
from transport.faulty import Fault, Faults, FaultScript, FaultyTransport, faulty_handlers

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


@pytest.fixture(params=["loopback", "grpc"])
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
            await faulty.call(deadline_s=SHORT_S)
        assert faulty.heard == []

    assert play(Fault.DROP, claim).fired == {Fault.DROP: 1}


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
        calls = []
        for index in range(6):
            calls.append(asyncio.create_task(faulty.call(b"%d" % index)))
            await asyncio.sleep(0.05)
        assert await asyncio.gather(*calls) == [PAYLOAD] * 6
        order = [int(header) for header, _ in faulty.heard]
        assert sorted(order) == list(range(6))
        assert order != sorted(order)

    faults = play(Fault.REORDER, claim, rate=0.5, delay_s=SHORT_S)
    assert 0 < faults.fired[Fault.REORDER] < 6


def test_nobody_overtakes_the_only_call(play: Callable[..., Faults]) -> None:
    async def claim(faulty: Faulty) -> None:
        await faulty.call()

    assert play(Fault.REORDER, claim).fired == {}


def test_a_script_plays_the_same_way_again(kind: Kind) -> None:
    rates = dict.fromkeys((Fault.RESET, Fault.DUPLICATE, Fault.CORRUPT, Fault.DELAY), 0.1)
    script = FaultScript(seed=5, rates=rates, delay_s=0.001)

    def tape(link: str) -> tuple[list[str], dict[Fault, int]]:
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

    first = tape("one")
    assert tape("one") == first
    assert set(first[1]) == set(rates), "every kind of the script fired"
    assert tape("another") != first


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
