"""Whatever arrives: frames, replies of a hostile server, and every message of every handler.

2,000 cases by default; in the slow set (`pytest -n0 -m slow tests/transport/test_fuzz.py`) 100,000
of frames, of replies, and of messages to each RPC. Messages are drawn from their descriptors, with
values at the borders of their types and values that lead far into the handlers (islands that exist,
signed grants, open rounds, payloads of the right size and digest); some are damaged after that.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import blake3
import pytest
import xxhash
import zstandard
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco.baseline.exchange import Bounds, ValueExchange
from diloco.baseline.group import BaselineMember
from diloco.config.classes import identity_difference
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.coordinator.daemon import Coordinator
from diloco.coordinator.grants import sign
from diloco.coordinator.journal import Journal
from diloco.coordinator.operator_service import Operations
from diloco.errors import ConfigError, DilocoError
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.protocol.rounds.orders import Orders
from diloco.protocol.rounds.transfer_manifest import LaneDigest, TransferManifest
from diloco.protocol.run.claims import Claims
from diloco.protocol.run.membership import Membership
from diloco.protocol.run.plan_bytes import packed
from diloco.protocol.run.terms import Terms, terms_of
from diloco.protos import fragment_pb2
from diloco.protos.control_pb2 import (
    ROLE_ISLAND,
    ROLE_SYNCER,
    FragmentStatus,
    Grant,
    RoundReport,
    RoundReportReply,
    StatusReply,
    StatusRequest,
)
from diloco.security.access import RULES, guarded
from diloco.syncer import polls as polls_module
from diloco.transport.bucket.server import ObjectCalls
from diloco.transport.calls.loopback import VirtualClockLoop
from diloco.transport.calls.requesting import Request
from diloco.transport.contracts import PROTOCOL_VERSION, Handlers, Reply
from diloco.transport.errors import TransportError
from diloco.transport.framing import (
    MAX_HEADER_BYTES,
    FrameReader,
    frame_chunk,
    frame_messages,
    frame_opening,
    frame_whole,
)
from diloco.transport.identity import Identity, Role
from diloco.transport.shaping.pacing import Pacer
from diloco.transport.shaping.packing import Packers
from diloco.transport.shaping.turns import LineTurns
from diloco.transport.transfer import Partial, Transfer
from tests.raw_island import NUMEL, RawIsland, founded
from tests.signed_store import SignedStore
from tests.virtual_run import RUN, Setting, VirtualRun, grant

SECRET = bytes(32)
IDENTITY = json.dumps({"run.seed": 7})
MEMBERS = frozenset(BaselineMember(island, rank) for island in ("a", "b") for rank in range(2))
BOUNDS = Bounds(max_bytes=1 << 16, max_vectors=4, patience_s=1.0, streams=1)
_OPEN_RUN = ["outer.preset=decoupled", "run.open=true", "run.max_islands=4"]
_RUN_FILE = Path(__file__).resolve().parents[2] / "configs" / "runs" / "two-islands.toml"
#: What a handler may raise at a caller's nonsense; anything else is a defect of ours.
NAMED = (TransportError, DilocoError, PermissionError)
#: A case may build a plan of a megabyte of text, on a loaded machine.
CASE_S = 20.0
#: Seconds of virtual time for which a poll may wait here.
POLL_S = 1.0

settled = settings(deadline=None, suppress_health_check=list(HealthCheck))


# -- frames ----------------------------------------------------------------------------------------

_MOST = 1 << 16


def read_frames(messages: list[bytes]) -> None:
    try:
        reader = FrameReader(messages[0] if messages else b"")
        assert len(reader.accept(_MOST).payload) <= _MOST
        for message in messages[1:]:
            reader.feed(message)
    except TransportError:
        return


def sealed(body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(body) + body


@st.composite
def damaged_frames(draw: st.DrawFn) -> list[bytes]:
    """Messages of a frame: changed, dropped, doubled, cut."""
    header, payload = draw(st.binary(max_size=40)), draw(st.binary(max_size=200))
    messages = [frame_whole(header, payload)]
    if draw(st.booleans()):
        messages = list(frame_messages(header, payload, draw(st.integers(1, 64))))
    if draw(st.booleans()):
        opening = frame_opening(header, 200, 200)
        messages = [opening, frame_chunk(b"", zstandard.compress(payload[:1] * 200 or bytes(200)))]
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(messages) - 1))
        message = bytearray(messages[at])
        start = draw(st.integers(0, len(message)))
        end = draw(st.integers(start, len(message)))
        message[start:end] = draw(st.binary(max_size=16))
        messages[at : at + draw(st.integers(0, 1))] = [bytes(message)]
    return messages


_NAMES = st.sampled_from([bytes(16), b"n" * 16, b"m" * 16])


@st.composite
def openings(draw: st.DrawFn) -> bytes:
    """Draw a first message with a right checksum, whatever it says (`diloco.transport.framing`)."""
    header = draw(st.binary(max_size=20))
    body = draw(st.binary(max_size=60))
    declared = draw(st.sampled_from([len(body), 0, 1, 200, 1 << 16, 2**63, 2**64 - 1]))
    failure = draw(st.sampled_from([0] * 9 + [1, 7, 8, 65535]))
    chunk_bytes = draw(st.sampled_from([64, 1, 0, 1 << 20, 8 << 20, 2**32 - 1]))
    flags = draw(st.one_of(st.integers(0, 15), st.integers(0, 255)))
    offset = draw(st.sampled_from([0, 1, 5, 64, 199, 200, 2**63, 2**64 - 1]))
    opening = struct.pack(
        "<4sHHIIQB16s16sQ", b"DLCO", PROTOCOL_VERSION, failure, len(header), chunk_bytes,
        declared, flags, draw(_NAMES), draw(_NAMES), offset,
    )  # fmt: skip
    return sealed(opening + header + (body if flags & 4 else b""))


@st.composite
def sealed_frames(draw: st.DrawFn) -> list[bytes]:
    """Messages whose checksums are right: an opening, then positions and chunks of any size."""
    positions = st.sampled_from([0, 1, 64, 200, 2**63]).map(
        lambda offset: sealed(struct.pack("<4sQ", b"DLCP", offset))
    )
    sizes = st.sampled_from([1, 8, 60, 64, 136, 200])
    packed = sizes.map(lambda size: zstandard.compress(bytes(size)))
    chunks = st.one_of(
        sizes.map(lambda size: frame_chunk(bytes(size))),
        packed.map(lambda data: frame_chunk(b"", data)),
        st.tuples(packed, st.binary(max_size=8), st.integers(0, 30)).map(
            lambda drawn: frame_chunk(b"", drawn[0][: drawn[2]] + drawn[1] or b"?")
        ),
        st.binary(max_size=70).map(sealed),
    )
    before = draw(st.lists(positions, max_size=1))
    return [*before, draw(openings()), *draw(st.lists(st.one_of(chunks, positions), max_size=4))]


frames = st.one_of(damaged_frames(), sealed_frames(), st.lists(st.binary(max_size=80), max_size=4))


@settings(settled, max_examples=200)
@given(frames)
def test_frames_of_any_kind_are_read_or_refused(messages: list[bytes]) -> None:
    read_frames(messages)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(settled, max_examples=100_000)
@given(frames)
def test_many_frames_of_any_kind_are_read_or_refused(messages: list[bytes]) -> None:
    read_frames(messages)


def test_openings_with_right_checksums_are_read_and_say_all_that_there_is() -> None:
    """Else nothing behind the checksum is tried."""
    seen: dict[str, set[object]] = {}

    @settings(settled, max_examples=100, database=None, derandomize=True)
    @given(openings())
    def look(message: bytes) -> None:
        try:
            said = FrameReader(message).resumption
        except TransportError:
            return
        for name in ("transfer", "is_resuming", "is_bulk", "takes_none", "reply", "offset"):
            seen.setdefault(name, set()).add(getattr(said, name))

    look()

    assert min(map(len, seen.values())) >= 2


# -- replies of a server ---------------------------------------------------------------------------


@st.composite
def attempts(draw: st.DrawFn) -> tuple[Transfer | None, int, list[list[bytes]]]:
    """A caller's memory of a call, its payload's size, and what attempts of it are answered."""
    transfer = None
    if draw(st.booleans()):
        transfer = Transfer(is_bulk=draw(st.booleans()), asks_first=draw(st.booleans()))
        if draw(st.booleans()):
            size = draw(st.sampled_from([0, 60, 200]))
            transfer.reply = Partial(bytearray(size), draw(st.integers(0, size)))
            transfer.reply_name = draw(_NAMES)
    payload_bytes = draw(st.sampled_from([0, 100, 1 << 10, 300_000]))
    return transfer, payload_bytes, draw(st.lists(frames, min_size=1, max_size=2))


class Caller:
    """Asks with one loop for all cases."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def ask(
        self, transfer: Transfer | None, payload_bytes: int, answers: list[list[bytes]]
    ) -> None:
        async def once(messages: list[bytes]) -> None:
            request = Request(
                b"header", bytes(payload_bytes), transfer, max_reply_bytes=_MOST,
                chunk_bytes=1 << 10, packer=Packers(Pacer()).of("", ""),
                under_way=LineTurns(1 << 10).call(payload_bytes, _MOST, is_bulk=False),
            )  # fmt: skip
            left = iter(messages)

            async def read() -> bytes | None:
                return next(left, None)

            try:
                reply = await request.read_reply(read)
                assert len(reply.header) <= MAX_HEADER_BYTES
                assert len(memoryview(reply.payload)) <= _MOST
            except TransportError:
                pass
            finally:
                request.close()

        for messages in answers:
            self._runner.run(once(messages))
        if transfer is not None and transfer.reply is not None:
            assert transfer.reply.filled <= len(transfer.reply.payload) <= _MOST
            assert 0 <= transfer.acknowledged_bytes <= payload_bytes

    def close(self) -> None:
        self._runner.close()


@pytest.fixture
def caller() -> Iterator[Caller]:
    caller = Caller()
    try:
        yield caller
    finally:
        caller.close()


@settings(settled, max_examples=200)
@given(case=attempts())
def test_replies_of_any_kind_are_read_or_refused(
    caller: Caller, case: tuple[Transfer | None, int, list[list[bytes]]]
) -> None:
    caller.ask(*case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(settled, max_examples=100_000)
@given(case=attempts())
def test_many_replies_of_any_kind_are_read_or_refused(
    caller: Caller, case: tuple[Transfer | None, int, list[list[bytes]]]
) -> None:
    caller.ask(*case)


# -- messages --------------------------------------------------------------------------------------

_PLAN = make_plan([TensorSpec("w", (NUMEL,))], num_fragments=1)
#: Of a lane as float32: initial parameters and contributions.
_LANE_BYTES = [4 * lane.numel for lane in _PLAN.fragments[0].lanes]
_MUCH = MAX_HEADER_BYTES - 2000
#: Of a transfer of an inner optimizer: every lane's safetensors are zeros, as far as syncers look.
_GIVEN = {f"0/{n}": bytes(2 * size + 100) for n, size in enumerate(_LANE_BYTES)}
_MANIFEST = TransferManifest(
    RUN, 0, "a", 1, 2, "adamw", 2, (0,), _PLAN.fingerprint(),
    {name: LaneDigest(len(data), blake3.blake3(data).hexdigest()) for name, data in _GIVEN.items()},
).to_json()  # fmt: skip

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: st.sampled_from([0, -1, 1, 2**31 - 1, -(2**31)]),
    FieldDescriptor.CPPTYPE_UINT32: st.sampled_from([0, 0, 1, 2, 7, 2**31, 2**32 - 1]),
    FieldDescriptor.CPPTYPE_UINT64: st.sampled_from([0, 1, 2, 100, 2**53 + 1, 2**63, 2**64 - 1]),
    FieldDescriptor.CPPTYPE_ENUM: st.sampled_from([0, 1, 2, 3, 2**31 - 1, -1]),
}
_TEXTS = st.one_of(
    st.sampled_from(
        [
            "", "a", "b", "c", RUN, "other", IDENTITY, "{}", "[]", "null", "{", "[" * 2000,
            "float32", "int4", '{"fragments": 1e99}', '{"run.seed": NaN}',
            '{"tensors": [], "fragments": []}', "theta", "payload", "training",
            "../../x", "\0", "x" * 3000, "x" * _MUCH, "\x01" * 180_000, '"' * (_MUCH // 2),
        ]
    ),
    st.text(max_size=20),
)  # fmt: skip
_DOUBLES = st.sampled_from(
    [0.0, -1.0, 1.0, 1.0, 5e-324, 1e308, float("inf"), float("-inf"), float("nan")]
)
_DIGESTS = [blake3.blake3(bytes(size)).digest() for size in _LANE_BYTES]
_BYTES = st.one_of(
    st.binary(max_size=40), st.sampled_from([b"", bytes(32), *_DIGESTS, *_DIGESTS, bytes(_MUCH)])
)


def grants() -> list[Grant]:
    """Grants that are good somewhere: at coordinator and syncer."""
    roles = [
        Grant(run=RUN, island="a", incarnation=1, roles=[r]) for r in (ROLE_ISLAND, ROLE_SYNCER)
    ]
    return [*(sign(each, SECRET) for each in roles), grant("a"), grant("b")]


_GRANTS = grants()


@st.composite
def positions(draw: st.DrawFn) -> str:
    """Draw how far slots of the text are drawn: mostly what an island says."""
    cursor = draw(st.sampled_from([{}, {"web": 7}, {"web": float("nan")}, {"web": "x" * 300_000}]))
    word = {
        "grant": draw(st.sampled_from([0, 0, 0, 1, -1, 2**70, True])),
        "is_final": draw(st.sampled_from([False, True, 0])),
        "position": draw(
            st.sampled_from(
                [
                    {"drawn": {"web": 3}, "cursor": cursor},
                    {"drawn": {"web": draw(st.sampled_from([-1, 2**63, 1.5]))}, "cursor": {}},
                    {"drawn": {"web": 3}},
                    [],
                ]
            )
        ),
    }
    slots = draw(st.lists(st.sampled_from(["0", "1", "2", "3", "4", "-1", "9" * 5000]), max_size=3))
    revision = draw(st.sampled_from([0, 1, -1, 2**70, "1", None]))
    return json.dumps({"revision": revision, "slots": dict.fromkeys(slots, word)})


#: Values with which a message gets far: of sound ones every such field has one of these.
_LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "arguments": st.sampled_from(
        [
            {},
            {"island": "a"},
            {"island": "b", "undo": "1"},
            {"checkpoint": "1"},
            {"key": "outer.optimizer.lr", "value": "0.5"},
            {"key": "outer", "value": "[" * 1000},
        ]
    ),
    "checkpoint": st.just(1),
    "codec": st.just("float32"),
    "command": st.sampled_from(["pause", "unpause", "drain", "kick", "set", "stop", "backup"]),
    "digest": st.sampled_from(_DIGESTS),
    "source": st.just("a"),
    "is_flush": st.just(False),
    "island": st.sampled_from(["a", "b", "c", "d"]),
    "key": st.sampled_from(
        [
            fragment_pb2.RoundKey(version=v, attempt=a)
            for v, a in ((0, 0), (0, 0), (0, 1), (0, 2), (1, 0))
        ]
    ),
    "fragment_id": st.just(0),
    "lane_digests": st.just(_DIGESTS),
    "lane_id": st.sampled_from([0, 1]),
    "lane_ids": st.sampled_from([[0], [1], [0, 1]]),
    "run": st.just(RUN),
    "identity_json": st.just(IDENTITY),
    "plan": st.just(packed(_PLAN.to_json())),
    "position_json": positions(),
    "state": st.sampled_from(["waiting", "training"]),
    "weight_tokens": st.sampled_from([1, 4]),
}


def value_of(field: Any, depth: int) -> st.SearchStrategy[Any]:
    """Draw a value of a field; descriptors are not typed, hence any."""
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_MESSAGE:
        return message_of(field.message_type._concrete_class, depth + 1)
    if kind in _INTEGERS:
        return _INTEGERS[kind]
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return _DOUBLES
    return _BYTES if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS


@st.composite
def message_of(draw: st.DrawFn, kind: type[Message], depth: int = 0) -> Message:
    """Draw a message from its descriptor; most grants are good, and half of the messages sound."""
    if kind is Grant and draw(st.integers(0, 3)):
        return draw(st.sampled_from(_GRANTS))
    is_sound = kind is not FragmentStatus and draw(st.booleans())  # whose digest is a text
    fields: dict[str, Any] = {}
    for field in kind.DESCRIPTOR.fields:
        if field.name == "protocol_version" and draw(st.integers(0, 7)):
            fields[field.name] = PROTOCOL_VERSION
        elif is_sound and field.name in _LIKELY:
            fields[field.name] = draw(_LIKELY[field.name])
        elif field.name == "grant" or draw(st.booleans()):
            value = value_of(field, depth)
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                held = value_of(field.message_type.fields_by_name["value"], depth)
                fields[field.name] = draw(st.dictionaries(_TEXTS, held, max_size=3))
            elif not field.is_repeated:
                fields[field.name] = draw(value)
            elif draw(st.integers(0, 9)):
                fields[field.name] = draw(st.lists(value, max_size=3))
            else:
                repeated = draw(value)
                size = repeated.ByteSize() if isinstance(repeated, Message) else len(str(repeated))
                most = 2 * MAX_HEADER_BYTES // (size + 1)  # more is never let in
                fields[field.name] = [repeated] * min(draw(st.sampled_from([100, 20_000])), most)
    return kind(**fields)


@st.composite
def calls(draw: st.DrawFn, methods: list[str]) -> tuple[str, bytes, bytes]:
    """Draw a method, a header for it, sound or damaged, and a payload."""
    method = draw(st.sampled_from(methods))
    message = draw(message_of(RULES[method].message))
    given = draw(transferred(message)) if method == "heal.put" else None
    header = message.SerializeToString()
    if draw(st.integers(0, 4)) == 0:
        damaged = bytearray(header)
        start = draw(st.integers(0, len(damaged)))
        damaged[start : start + 3] = draw(st.binary(max_size=6))
        header = bytes(damaged)
    size = draw(st.sampled_from([0, 4, 160_000, *_LANE_BYTES * 3]))
    return method, header, bytes(size) if given is None else given


@st.composite
def transferred(draw: st.DrawFn, header: Any) -> bytes | None:
    """Draw a payload of a transfer, and let its header have the digest; None: anything else."""
    if not draw(st.integers(0, 3)):
        return None
    payload = _MANIFEST if header.is_manifest else _GIVEN.get(f"0/{header.lane_id}", b"")
    if header.is_manifest and draw(st.booleans()):
        payload = mutated(payload, random.Random(draw(st.integers(0, 2**32 - 1))))
    header.digest = blake3.blake3(payload).digest()
    return payload


def mutated(header: bytes, rng: random.Random) -> bytes:
    """Change, cut, double or swap some bytes."""
    data = bytearray(header)
    for _ in range(rng.randint(1, 2)):
        start = rng.randint(0, len(data))
        end = min(len(data), start + rng.randint(0, 8))
        match rng.randrange(8):
            case 1:
                del data[start:end]
            case 2:
                data[start:start] = data[start:end]
            case 3:
                data[start:end] = rng.randbytes(end - start)
            case _ if data:  # mostly one bit, which leaves most messages readable
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


class Call:
    """A call as handlers see it, from this machine: else nobody would get as far as a command."""

    peer, is_local, has_asked = "fuzz", True, False

    def __init__(self, method: str, header: bytes, payload: bytes, caller: Identity | None) -> None:
        self.method, self.header, self.caller = method, header, caller
        self.payload_bytes = len(payload)
        self._payload = payload

    async def read_payload(self) -> bytes:
        return self._payload


def _is_good(held: Grant) -> bool:
    return held.run == RUN and held.incarnation == 1


class Service:
    """Coordinator and syncer, with version 0, and a loop for them.

    They are there twice: of a run whose islands are fixed, and of one that any island may join and
    in which none is waited for. What a hostile caller with a good grant can end by the rules
    (rounds that expire three times in a row end a run) is begun again; `outcomes` counts the
    answers by method.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._runner = asyncio.Runner(loop_factory=VirtualClockLoop)
        self._num_begun = 0
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self._runner.run(self._begin())

    async def _begin(self) -> None:
        self._num_begun += 1
        directory = self._directory / str(self._num_begun)
        directory.mkdir()
        self.journal = Journal(directory / "journal.sqlite")
        self.journal.open()
        terms = Terms(json.dumps({"run.inner_steps": 100}), unreachable_s=600.0)
        self.coordinator = self._coordinator(self.journal, terms, load_config(_RUN_FILE), None)
        self.run, _ = await founded(self._setting(directory / "syncer"))
        self.open_journal = Journal(directory / "open.sqlite")
        self.open_journal.open()
        config = load_config(_RUN_FILE, _OPEN_RUN)
        claims = Claims(config.max_islands, ("a", "b"))
        self.open = self._coordinator(self.open_journal, terms_of(config), config, claims)
        setting = self._setting(directory / "open", min_members=1, quorum=1)
        self.open_run = VirtualRun(replace(setting, timing=setting.measured()))
        await self.open_run.start_syncer()
        islands = [RawIsland(self.open_run, name) for name in ("a", "b")]
        for island in islands:
            await island.poll(step_s=1.0)
        await islands[0].upload()
        await asyncio.sleep(setting.inner_steps_per_round)
        for run in (self.run, self.open_run):
            # Else a grant that nobody signed would fence all others for good.
            run.syncer._admission._is_granted = _is_good
        together: Handlers = {
            **self.coordinator.handlers,
            **self.run.syncer.handlers,
            **ValueExchange(BaselineMember("a", 0), "", MEMBERS, BOUNDS).handlers,
        }
        self.handlers = with_payloads(guarded(together))
        openly = {**self.open.handlers, **self.open_run.syncer.handlers}
        self.open_handlers = with_payloads(guarded(openly))

    def _coordinator(
        self, journal: Journal, terms: Terms, config: Config, claims: Claims | None
    ) -> Coordinator:
        return Coordinator(
            membership=Membership(
                RUN, ("a", "b"), IDENTITY, identity_difference, 100, num_checkpoints=2,
                claims=claims,
            ),
            journal=journal,
            secret=SECRET,
            terms=terms,
            unix_clock=lambda: 0.0,
            operations=Operations(config, lambda config: None, self._back_up),
        )  # fmt: skip

    @staticmethod
    def _setting(directory: Path, **changes: Any) -> Setting:
        directory.mkdir()
        return Setting({"w": [0.0] * NUMEL}, lambda *_: None, directory, inner_steps=8, **changes)

    async def _end(self) -> None:
        for run in (self.run, self.open_run):
            await run.kill_syncer()
        for journal in (self.journal, self.open_journal):
            journal.close()

    def answer(self, method: str, payload: bytes, *headers: bytes) -> None:
        """Answer calls, or refuse them by name; insist that the rest still works."""

        async def all_of_them() -> None:
            for header in headers:
                if len(header) <= MAX_HEADER_BYTES:  # no transport lets more in
                    await self._answer(method, header, payload)
            await self._check_service()

        began = time.monotonic()
        self._runner.run(all_of_them())
        assert time.monotonic() - began < CASE_S * len(headers)

    async def _answer(self, method: str, header: bytes, payload: bytes) -> None:
        for handlers in (self.handlers, self.open_handlers):
            if method not in handlers:
                continue
            try:
                async with asyncio.timeout(600):  # of virtual time
                    reply = await handlers[method](Call(method, header, payload, None))
                assert len(reply.header) <= MAX_HEADER_BYTES
                self.outcomes[method, "answered"] += 1
            except NAMED as error:
                self.outcomes[method, type(error).__name__] += 1

    async def _back_up(self, arguments: Mapping[str, str]) -> str:
        raise ConfigError(f"no directory {arguments}")

    async def _check_service(self) -> None:
        """Check that operator and islands are answered, in messages that transports take."""
        operator = Identity(RUN, Role.OPERATOR)
        status = StatusRequest(protocol_version=PROTOCOL_VERSION)
        for handlers in (self.handlers, self.open_handlers):
            reply = await self._ask("control.status", status, operator, handlers)
            assert StatusReply.FromString(reply.header).run == RUN
        for run in (self.run, self.open_run):
            assert run.syncer.failure is None
        poll = {"protocol_version": PROTOCOL_VERSION, "grant": grant("b")}
        await self._ask("fragment.poll", fragment_pb2.PollRequest(**poll))
        report = RoundReport(protocol_version=PROTOCOL_VERSION, grant=_GRANTS[1])
        reply = await self._ask("control.round_report", report, None, self.open_handlers)
        self.open_run.syncer.set_orders(Orders.of(RoundReportReply.FromString(reply.header)))
        poll["grant"] = grant("a")
        await self._ask("fragment.poll", fragment_pb2.PollRequest(**poll), None, self.open_handlers)
        runs = (self.run, self.open_run)
        is_lost = any(run.syncer.fatal is not None for run in runs)
        memberships = (each._membership for each in (self.coordinator, self.open))
        is_operated = any(each.settings._num_operations > 0 for each in memberships)
        if is_lost or is_operated:
            await self._end()
            await self._begin()

    async def _ask(
        self,
        method: str,
        request: Message,
        caller: Identity | None = None,
        handlers: Handlers | None = None,
    ) -> Reply:
        call = Call(method, request.SerializeToString(), b"", caller)
        reply = await (handlers or self.handlers)[method](call)
        assert len(reply.header) <= MAX_HEADER_BYTES
        return reply

    def close(self) -> None:
        self._runner.run(self._end())
        self._runner.close()


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nothing here is about power loss
    monkeypatch.setattr(polls_module, "_MAX_POLL_S", POLL_S)
    service = Service(tmp_path)
    try:
        yield service
    finally:
        service.close()


def with_payloads(handlers: Handlers) -> Handlers:
    """Add what stands around all handlers."""
    return {**handlers, **guarded(ObjectCalls(SignedStore()).around(handlers))}


def test_every_method_is_served_here(service: Service) -> None:
    assert service.handlers.keys() == RULES.keys()
    arriving = {m for m in RULES if not m.startswith("baseline.")}
    assert service.open_handlers.keys() == arriving


def tell(service: Service, methods: list[str], num_drawn: int, num_mutated: int) -> None:
    """Let a service answer as many drawn messages, and so many mutations of each."""

    @settings(settled, max_examples=num_drawn)
    @given(call=calls(methods), seed=st.integers(0, 2**32 - 1))
    def answer(call: tuple[str, bytes, bytes], seed: int) -> None:
        method, header, payload = call
        rng = random.Random(seed)
        service.answer(method, payload, header, *(mutated(header, rng) for _ in range(num_mutated)))

    answer()


def test_messages_of_any_kind_are_answered_or_refused(service: Service) -> None:
    tell(service, sorted(RULES), num_drawn=400, num_mutated=3)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("method", sorted(RULES))
def test_many_messages_of_any_kind_are_answered_or_refused(service: Service, method: str) -> None:
    tell(service, [method], num_drawn=2_000, num_mutated=49)

    assert service.outcomes[method, "answered"]
