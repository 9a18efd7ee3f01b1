"""Whatever arrives: frames and every message of every handler.

A few hundred cases by default, 100,000 in the slow set (`pytest -m slow tests/transport`). Messages
are drawn from their descriptors, with values at the borders of their types and values that lead far
into the handlers (islands that exist, signed grants, open rounds); some are damaged after that.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco.config.classes import identity_difference
from diloco.coordinator.daemon import Coordinator
from diloco.coordinator.grants import sign
from diloco.coordinator.journal import Journal
from diloco.coordinator.membership import Membership
from diloco.errors import DilocoError
from diloco.launch.access import RULES, guarded
from protos.control_pb2 import ROLE_ISLAND, ROLE_SYNCER, Grant, StatusReply, StatusRequest
from tests.raw_island import founded
from tests.virtual_run import RUN, Setting
from transport.contracts import PROTOCOL_VERSION, Handlers, Reply
from transport.errors import TransportError
from transport.framing import FrameReader, frame_messages, frame_whole
from transport.identity import Identity, Role
from transport.loopback import VirtualClockLoop

SECRET = bytes(32)
IDENTITY = json.dumps({"run.seed": 7})
#: What a handler may raise at a caller's nonsense; anything else is a defect of ours.
NAMED = (TransportError, DilocoError, ValueError, KeyError, PermissionError)
#: A case may build a plan of a megabyte of text, on a loaded machine.
CASE_S = 20.0

few = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
many = settings(few, max_examples=100_000, suppress_health_check=list(HealthCheck))


# -- frames ----------------------------------------------------------------------------------------


def read_frames(messages: list[bytes]) -> None:
    try:
        reader = FrameReader(messages[0] if messages else b"")
        reader.accept(1 << 16)
        for message in messages[1:]:
            reader.feed(message)
    except TransportError:
        return


@st.composite
def damaged_frames(draw: st.DrawFn) -> list[bytes]:
    """Messages of a frame: changed, dropped, doubled, cut."""
    header, payload = draw(st.binary(max_size=40)), draw(st.binary(max_size=200))
    messages = [frame_whole(header, payload)]
    if draw(st.booleans()):
        messages = list(frame_messages(header, payload, draw(st.integers(1, 64))))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(messages) - 1))
        message = bytearray(messages[at])
        start = draw(st.integers(0, len(message)))
        end = draw(st.integers(start, len(message)))
        message[start:end] = draw(st.binary(max_size=16))
        messages[at : at + draw(st.integers(0, 1))] = [bytes(message)]
    return messages


frames = st.one_of(damaged_frames(), st.lists(st.binary(max_size=80), max_size=4))


@few
@given(frames)
def test_frames_of_any_kind_are_read_or_refused(messages: list[bytes]) -> None:
    read_frames(messages)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@many
@given(frames)
def test_many_frames_of_any_kind_are_read_or_refused(messages: list[bytes]) -> None:
    read_frames(messages)


# -- messages --------------------------------------------------------------------------------------

_INTEGERS = {
    FieldDescriptor.CPPTYPE_UINT32: st.sampled_from([0, 1, 2, 7, 2**31, 2**32 - 1]),
    FieldDescriptor.CPPTYPE_UINT64: st.sampled_from([0, 1, 2, 100, 2**53 + 1, 2**63, 2**64 - 1]),
    FieldDescriptor.CPPTYPE_ENUM: st.sampled_from([0, 1, 2, 3, 2**31 - 1, -1]),
}
_TEXTS = st.one_of(
    st.sampled_from(
        [
            "", "a", "b", "c", RUN, "other", IDENTITY, "{}", "[]", "null", "{", "[" * 2000,
            "float32", "int4", '{"fragments": 1e99}', '{"run.seed": NaN}',
            '{"tensors": [], "fragments": []}',
            "../../x", "\0", "x" * 3000,
        ]
    ),
    st.text(max_size=20),
)  # fmt: skip
_DOUBLES = st.sampled_from([0.0, -1.0, 1.0, 1e308, float("inf"), float("nan")])
_BYTES = st.one_of(st.binary(max_size=40), st.sampled_from([b"", bytes(32)]))


def granted(role: int) -> Grant:
    grant = Grant(run=RUN, island="a", incarnation=1, roles=[role])
    return sign(grant, SECRET)


def value_of(field: Any, depth: int) -> st.SearchStrategy[Any]:
    """Draw a value of a field; descriptors are not typed, hence any."""
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_MESSAGE:
        return message_of(field.message_type._concrete_class, depth + 1)
    if kind in _INTEGERS:
        return _INTEGERS[kind]
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind == FieldDescriptor.CPPTYPE_DOUBLE:
        return _DOUBLES
    return _BYTES if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS


@st.composite
def message_of(draw: st.DrawFn, kind: type[Message], depth: int = 0) -> Message:
    """Draw a message from its descriptor, half of its grants good."""
    if kind is Grant and draw(st.booleans()):
        return granted(draw(st.sampled_from([ROLE_ISLAND, ROLE_SYNCER])))
    fields: dict[str, Any] = {}
    for field in kind.DESCRIPTOR.fields:
        if field.name == "protocol_version" and draw(st.booleans()):
            fields[field.name] = PROTOCOL_VERSION
        elif draw(st.booleans()):
            value = value_of(field, depth)
            is_list = field.is_repeated
            fields[field.name] = draw(st.lists(value, max_size=3)) if is_list else draw(value)
    return kind(**fields)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, bytes, bytes]:
    """Draw a method, a header for it, sound or damaged, and a payload."""
    method = draw(st.sampled_from(sorted(RULES)))
    header = draw(message_of(RULES[method].message)).SerializeToString()
    if draw(st.integers(0, 4)) == 0:
        damaged = bytearray(header)
        start = draw(st.integers(0, len(damaged)))
        damaged[start : start + 3] = draw(st.binary(max_size=6))
        header = bytes(damaged)
    size = draw(st.sampled_from([0, 1, 4, 160_000, 80_000]))
    return method, header, bytes(size)


class Call:
    """A call as handlers see it."""

    peer, is_local = "fuzz", False

    def __init__(self, method: str, header: bytes, payload: bytes, caller: Identity | None) -> None:
        self.method, self.header, self.caller = method, header, caller
        self.payload_bytes = len(payload)
        self._payload = payload

    async def read_payload(self) -> bytes:
        return self._payload


class Service:
    """A coordinator and a syncer with version 0, and a loop in which they live."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._runner = asyncio.Runner(loop_factory=VirtualClockLoop)
        self._runner.run(self._start())

    async def _start(self) -> None:
        self.journal = Journal(self._directory / "journal.sqlite")
        self.journal.open()
        membership = Membership(
            RUN, ("a", "b"), IDENTITY, identity_difference, 100, num_checkpoints=2
        )
        self.coordinator = Coordinator(
            membership=membership,
            journal=self.journal,
            secret=SECRET,
            unreachable_s=600.0,
            policy_json=json.dumps({"run.inner_steps": 100}),
            unix_clock=lambda: 0.0,
        )
        setting = Setting({"w": [0.0] * 40_000}, lambda *_: None, self._directory, inner_steps=8)
        self.run, _ = await founded(setting)
        handlers: Handlers = {**self.coordinator.handlers, **self.run.syncer.handlers}
        self.handlers = guarded(handlers)

    def answer(self, method: str, header: bytes, payload: bytes) -> Reply | None:
        """Answer a call, or refuse it by name; insist that the rest still works."""

        async def once() -> Reply | None:
            try:
                async with asyncio.timeout(600):  # of virtual time
                    return await self.handlers[method](Call(method, header, payload, None))
            except NAMED:
                return None

        began = time.monotonic()
        reply = self._runner.run(once())
        assert time.monotonic() - began < CASE_S
        assert self.run.syncer.failure is None
        return reply

    def insist_on_service(self) -> None:
        """Insist that an operator and an island are still answered."""
        header = StatusRequest(protocol_version=PROTOCOL_VERSION).SerializeToString()
        operator = Identity(RUN, Role.OPERATOR)
        call = Call("control.status", header, b"", operator)
        reply = self._runner.run(self.handlers["control.status"](call))
        assert StatusReply.FromString(reply.header).run == RUN
        assert len(self.run.syncer.states) == 1

    def close(self) -> None:
        self._runner.run(self.run.kill_syncer())
        self._runner.close()
        self.journal.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    try:
        yield service
    finally:
        service.close()


@few
@given(call=calls())
def test_messages_of_any_kind_are_answered_or_refused(
    service: Service, call: tuple[str, bytes, bytes]
) -> None:
    service.answer(*call)
    service.insist_on_service()


@pytest.mark.slow
@pytest.mark.timeout(7200)
@many
@given(call=calls())
def test_many_messages_of_any_kind_are_answered_or_refused(
    service: Service, call: tuple[str, bytes, bytes]
) -> None:
    service.answer(*call)
    service.insist_on_service()
