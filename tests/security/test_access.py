"""Least privilege: every method has one role, and an island speaks for itself alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from diloco.baseline import exchange
from diloco.coordinator.daemon import Coordinator
from diloco.coordinator.island_service import IslandService
from diloco.coordinator.operator_service import OperatorService
from diloco.coordinator.syncer_service import SyncerService
from diloco.protocol.run.peer_bounds import RunLimits
from diloco.protos.control_pb2 import Grant
from diloco.protos.fragment_pb2 import FragmentState, PollRequest, RoundKey
from diloco.refusals import Cause
from diloco.security.access import RULES, guarded
from diloco.syncer.polls import Polls
from diloco.syncer.syncer import Syncer
from diloco.transport.bucket import server as bucket
from diloco.transport.contracts import PROTOCOL_VERSION, IncomingCall, Reply
from diloco.transport.errors import FrameError, OutOfRange, Unauthorised, VersionMismatch
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.identity import Identity, Role
from tests.transport.pki import COORDINATOR, EAST, OPERATOR, SYNCER, WEST, Pki

WHO = {Role.ISLAND: EAST, Role.SYNCER: SYNCER, Role.OPERATOR: OPERATOR}


class Call:
    peer, payload_bytes = "test", 0

    def __init__(
        self, method: str, header: bytes, caller: Identity | None, *, is_local: bool = False
    ) -> None:
        self.method, self.header, self.caller = method, header, caller
        self.is_local = is_local

    async def read_payload(self) -> bytes:
        return b""


async def reached(call: IncomingCall) -> Reply:
    return Reply(b"reached")


def message(method: str, island: str, version: int = PROTOCOL_VERSION) -> Message:
    kind: Any = RULES[method].message
    if "grant" in kind.DESCRIPTOR.fields_by_name:
        built: Message = kind(protocol_version=version, grant=Grant(island=island))
    elif "island" in kind.DESCRIPTOR.fields_by_name:
        built = kind(protocol_version=version, island=island)
    else:
        built = kind(protocol_version=version)
    return built


def ask(method: str, caller: Identity | None, header: bytes, *, is_local: bool = False) -> bytes:
    call = Call(method, header, caller, is_local=is_local)
    return asyncio.run(guarded({method: reached})[method](call)).header


SERVICES = {
    "_island_service": IslandService,
    "_syncer_service": SyncerService,
    "_operator_service": OperatorService,
}


def test_every_method_of_every_service_has_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (Coordinator, Syncer)
    services: list[Any] = [object.__new__(kind) for kind in kinds]
    for name, kind in SERVICES.items():
        setattr(services[0], name, object.__new__(kind))
    services[0]._journal = None
    services[1]._polls = object.__new__(Polls)

    # Of a baseline, served one by one, and of what stands around all handlers.
    members = {exchange.METHOD, bucket.METHOD}
    assert RULES.keys() == members | {m for service in services for m in service.handlers}
    with pytest.raises(KeyError, match=r"control\.new"):
        guarded({"control.new": reached})


@pytest.mark.parametrize("method", sorted(RULES))
@pytest.mark.parametrize("caller", [EAST, SYNCER, OPERATOR, COORDINATOR], ids=lambda i: i.role)
def test_a_role_may_call_its_own_methods_and_no_other(method: str, caller: Identity) -> None:
    header = message(method, "east").SerializeToString()

    if RULES[method].role in (None, caller.role):
        assert ask(method, caller, header) == b"reached"
    else:
        with pytest.raises(Unauthorised, match=f"may not call {method}, which is for role"):
            ask(method, caller, header)


@pytest.mark.parametrize("method", sorted(m for m, r in RULES.items() if r.island_of))
def test_an_island_cannot_speak_for_another(method: str) -> None:
    with pytest.raises(Unauthorised, match="island/west may not speak for island 'east'"):
        ask(method, WEST, message(method, "east").SerializeToString())
    with pytest.raises(Unauthorised, match="may not speak for island ''"):
        ask(method, WEST, message(method, "").SerializeToString())


@pytest.mark.parametrize("method", sorted(RULES))
def test_headers_that_are_none_go_no_further(method: str) -> None:
    with pytest.raises(FrameError, match=f"the header of {method} is no "):
        ask(method, None, b"\xff\xff\xff")
    if method != "control.join":  # answers it with the version to install
        with pytest.raises(VersionMismatch, match="protocol version 99, this process"):
            ask(method, None, message(method, "east", 99).SerializeToString())


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (PollRequest.OUTSTANDING_FIELD_NUMBER, r"outstanding = 65 of them: at most 64"),
        (PollRequest.KNOWN_FIELD_NUMBER, r"known = 5 of them: at most 4"),
        (PollRequest.GRANT_FIELD_NUMBER, r"grant = 2 of them: at most 1"),
        (500, r"unknown = 65 of them: at most 64"),
    ],
    ids=["outstanding", "known", "grant", "unknown"],
)
def test_lists_longer_than_a_run_has_are_refused_unread(
    number: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[tuple[str, Cause]] = []
    limits = RunLimits(num_fragments=4, num_lanes=4, num_islands=3)
    handlers = guarded({"fragment.poll": reached}, limits, lambda *refusal: refused.append(refusal))
    tag = bytes([number << 3 & 0x7F | 2 | 0x80 * (number > 15), *[number >> 4] * (number > 15)])
    million = tag + b"\0"

    with pytest.raises(OutOfRange, match=words):
        asyncio.run(handlers["fragment.poll"](Call("fragment.poll", million * 300_000, WEST)))
    assert refused == [("west", Cause.BOUNDS)]


def test_what_is_torn_or_of_another_kind_is_refused_however_long() -> None:
    for header, words in (
        (bytes([PollRequest.GRANT_FIELD_NUMBER << 3 | 2, 0xFF, 0x7F]) + bytes(9000), "is no Poll"),
        (bytes([15 << 3 | 3]) * 9000, "wire type 3: none has one"),
        (b"\xff" * 9000, "wire type 7: none has one"),
    ):
        with pytest.raises((FrameError, OutOfRange), match=words):
            ask("fragment.poll", WEST, header)


def test_a_poll_of_all_that_a_run_has_is_read() -> None:
    limits = RunLimits(num_fragments=64, num_lanes=4, num_islands=3)
    keys = [RoundKey(timeline=2**53, fragment_id=63, version=2**53, attempt=2**31)] * 16 * 64
    known = [FragmentState(fragment_id=63, version=2**53, lane_digests=[b"x" * 32] * 4)] * 64
    poll = PollRequest(
        protocol_version=PROTOCOL_VERSION, grant=Grant(island="west"), outstanding=keys, known=known
    )
    call = Call("fragment.poll", poll.SerializeToString(), WEST)

    assert len(call.header) > 16 << 10
    handle = guarded({"fragment.poll": reached}, limits)["fragment.poll"]
    assert asyncio.run(handle(call)).header == b"reached"


def test_where_nobody_is_known_an_operators_methods_are_for_this_machine_alone() -> None:
    for method, rule in RULES.items():
        header = message(method, "east").SerializeToString()

        assert ask(method, None, header, is_local=True) == b"reached"
        if rule.role is Role.OPERATOR:
            with pytest.raises(Unauthorised, match=r"diloco status 127.*diloco certs token oper"):
                ask(method, None, header)
        else:
            assert ask(method, None, header) == b"reached"


def test_the_identity_of_the_connection_decides(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "certs")
    handlers = guarded(dict.fromkeys(RULES, reached))

    async def run() -> None:
        server = GrpcServer("127.0.0.1:0", handlers, tls=pki.tls(COORDINATOR))
        await server.start()
        west = GrpcTransport(server.address, tls=pki.tls(WEST))

        async def call(method: str, island: str) -> bytes:
            header = message(method, island).SerializeToString()
            return (await west.call(method, header, deadline_s=30.0)).header

        assert await call("fragment.submit", "west") == b"reached"
        assert await call("control.standing", "west") == b"reached"
        for method, island in [
            ("fragment.submit", "east"),
            ("control.join", "east"),
            ("control.standing", "east"),
            ("control.status", ""),
            ("control.round_report", ""),
        ]:
            with pytest.raises(Unauthorised):
                await call(method, island)
        await west.close()
        await server.stop(0.0)

    asyncio.run(run())
