"""No value of any field of any message that a rightful member says ends a run, or stays in it.

Messages and fields are found by the descriptors of `access.RULES`, so a new one is covered by
itself. A member says an otherwise valid message with one field set to an extreme; two islands are
at work meanwhile, against a real coordinator and syncer. Afterwards the run still publishes, also
after all services have started again from what is durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import blake3
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from diloco.baseline.exchange import Bounds, ValueExchange
from diloco.baseline.group import BaselineMember
from diloco.config.classes import identity_difference
from diloco.config.load import load_config
from diloco.coordinator.daemon import Coordinator
from diloco.coordinator.grants import is_valid, sign
from diloco.coordinator.journal import Journal
from diloco.coordinator.operator_service import Operations
from diloco.errors import DilocoError
from diloco.protocol.rounds.messages import key_message
from diloco.protocol.rounds.terms import MOST_NUMBER, MOST_ROUNDS, Weights
from diloco.protocol.rounds.transfer_manifest import LaneDigest, TransferManifest
from diloco.protocol.run.claims import Claims
from diloco.protocol.run.membership import Membership
from diloco.protocol.run.peer_bounds import BOUNDS, RunLimits, bound_of, is_bounded_by_type
from diloco.protocol.run.plan_bytes import packed
from diloco.protocol.run.terms import terms_of
from diloco.protos import baseline_pb2, control_pb2, fragment_pb2, payload_pb2
from diloco.protos.control_pb2 import ROLE_ISLAND, ROLE_SYNCER, Grant
from diloco.security.access import RULES, guarded
from diloco.transport.bucket.server import ObjectCalls
from diloco.transport.calls.loopback import run_virtual
from diloco.transport.contracts import PROTOCOL_VERSION, Handlers
from diloco.transport.errors import TransportError
from tests.signed_store import SignedStore
from tests.virtual_run import RUN, Setting, VirtualIsland, VirtualRun

TOKENS = 8
NUMEL = 6
SECRET = bytes(32)
SYNCER = sign(Grant(run=RUN, roles=[ROLE_SYNCER]), SECRET)
LANE = bytes(4 * NUMEL)
DIGEST = blake3.blake3(LANE).digest()
IDENTITY = json.dumps({"run.seed": 7})
#: What a caller may be told.
NAMED = (TransportError, DilocoError, PermissionError)
#: What ends a run by the law: the word of its syncer that rounds cannot go on.
_AUTHORITY = {"diloco.control.v1.RoundReport.fatal_reason"}
_CONFIG = load_config(
    Path(__file__).resolve().parents[2] / "configs" / "runs" / "two-islands.toml",
    ["outer.preset=decoupled", "run.open=true", "run.max_islands=4"],
)

_WHOLE = {
    FieldDescriptor.CPPTYPE_UINT32: (2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT32: (2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_UINT64: (10**15, 2**53 + 1, 2**62, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (99,),
}
_REAL = (float("nan"), float("inf"), float("-inf"), -1.0, 5e-324, 1e308)
_TEXTS = (
    "x" * 100_000,
    "[" * 5000,
    '{"revision": 1e999, "slots": {}}',
    json.dumps({"timeline": 0, "fragment_id": 0, "version": 2**62, "digest": ""}),
    json.dumps(
        {
            "revision": 2**62,
            "slots": {
                "2": {
                    "grant": 2**62,
                    "is_final": True,
                    "position": {"drawn": {"web": 2**62}, "cursor": {"web": -(2**70)}},
                }
            },
        }
    ),
)


def extremes(field: FieldDescriptor) -> tuple[Any, ...]:
    """Values of one element of a field that nobody has reason to say."""
    kind = field.cpp_type
    if kind in _WHOLE:
        return _WHOLE[kind]
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return (True,)
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return _REAL
    is_bytes = field.type == FieldDescriptor.TYPE_BYTES
    return (b"", bytes(100_000)) if is_bytes else ("", *_TEXTS)


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


Edit = Callable[[Any], None]


def edits(descriptor: Descriptor) -> Iterator[tuple[str, Edit]]:
    """Give changes of a message: each of its fields to each extreme, those within it, too."""
    for field in descriptor.fields:
        name = f"{descriptor.full_name}.{field.name}"
        if name in _AUTHORITY or field.name == "protocol_version":
            continue
        if is_map(field):
            for text in _TEXTS:
                yield name, lambda m, f=field.name, t=text: getattr(m, f).update({t[:50]: t})
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            for deep, edit in edits(field.message_type):
                yield deep, lambda m, f=field, e=edit: e(one_of(m, f))
            if field.is_repeated:
                many = [field.message_type._concrete_class()] * 2000
                yield name, lambda m, f=field.name, v=many: getattr(m, f).extend(v)
        elif field.is_repeated:
            values = extremes(field)
            few = {FieldDescriptor.CPPTYPE_STRING: "x"}.get(field.cpp_type, 1)
            small = b"x" if field.type == FieldDescriptor.TYPE_BYTES else few
            for listed in [*([value] for value in values), [values[0]] * 3, [small] * 2000]:
                yield name, lambda m, f=field.name, v=listed: set_list(m, f, v)
        else:
            for value in extremes(field):
                yield name, lambda m, f=field.name, v=value: setattr(m, f, v)


def one_of(message: Any, field: FieldDescriptor) -> Any:
    """Give the message in a field, the first of several."""
    inner = getattr(message, field.name)
    if not field.is_repeated:
        return inner
    return inner[0] if inner else inner.add()


def set_list(message: Any, name: str, values: list[Any]) -> None:
    message.ClearField(name)
    getattr(message, name).extend(values)


def descriptors() -> dict[str, Descriptor]:
    """All messages that a caller can say, with those in them, by their full names."""
    found: dict[str, Descriptor] = {}

    def walk(descriptor: Descriptor) -> None:
        if descriptor.full_name not in found:
            found[descriptor.full_name] = descriptor
            for field in descriptor.fields:
                if field.message_type is not None and not is_map(field):
                    walk(field.message_type)

    for rule in RULES.values():
        walk(rule.message.DESCRIPTOR)
    return found


def test_every_field_of_every_message_has_a_bound_and_no_row_is_of_none() -> None:
    fields = [field for each in descriptors().values() for field in each.fields]

    without = [f.full_name for f in fields if not is_bounded_by_type(f) and bound_of(f) is None]
    rows = {f"{message}.{field}" for message, row in BOUNDS.items() for field in row}

    assert not without, "give them a row in diloco.protocol.run.peer_bounds.BOUNDS"
    assert rows <= {field.full_name for field in fields}


@dataclass
class Call:
    """A call as handlers see it, of a caller who is not known by certificate."""

    method: str
    header: bytes
    payload: bytes = b""
    peer: str = "test"
    caller: None = None
    has_asked: bool = True
    is_local: bool = True

    @property
    def payload_bytes(self) -> int:
        return len(self.payload)

    async def read_payload(self) -> bytes:
        return self.payload


@dataclass(frozen=True)
class Said:
    """A valid message of a rightful member, made again for the moment at which it is said."""

    message: Any
    payload: bytes = b""


class Speaker:
    """Says valid messages with fields changed, and counts what became of them."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    async def say_all(self, site: Site, of_a_field: int) -> None:
        """Say of each method each change of a valid message, so many of a field, at most."""
        for method in site.valid:
            said = Counter[str]()
            for name, edit in edits(RULES[method].message.DESCRIPTOR):
                said[name] += 1
                if said[name] <= of_a_field:
                    await self._say(site, method, [edit])

    async def say_several(self, site: Site, count: int, seed: int) -> None:
        """Say messages of which up to four fields are changed."""
        rng = random.Random(seed)
        known = {m: [e for _, e in edits(RULES[m].message.DESCRIPTOR)] for m in site.valid}
        for _ in range(count):
            method = rng.choice([method for method, found in known.items() if found])
            changes = rng.choices(known[method], k=rng.randint(1, 4))
            await self._say(site, method, changes)

    async def _say(self, site: Site, method: str, changes: Sequence[Edit]) -> None:
        await site.ready()
        said = site.valid[method]()
        message = said.message
        message.protocol_version = PROTOCOL_VERSION
        for edit in changes:
            edit(message)
        call = Call(method, message.SerializeToString(), said.payload)
        try:
            async with asyncio.timeout(600):  # of virtual time
                await site.handlers[method](call)
            self.outcomes["answered"] += 1
        except NAMED as error:
            self.outcomes[type(error).__name__] += 1


class Site:
    """A run in which islands a and b work and c speaks: real coordinator, journal and syncer."""

    limits = RunLimits(num_fragments=1, num_lanes=1, num_islands=4, num_syncers=1)

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        setting = Setting(
            {"w": [100.0] * NUMEL}, self._descend, directory / "store", 10**6,
            islands=("a", "b", "c"), tokens=dict.fromkeys("abc", TOKENS), overlap_steps=1,
        ).on_arrival(10**9)  # fmt: skip
        self.setting = replace(setting, weights=Weights(setting.inner_steps_per_round, 10**9))
        self.run = VirtualRun(self.setting)
        self.run.named_transfers = [
            control_pb2.StateTransfer(source="c", island=island, checkpoint=1) for island in "ac"
        ]
        self.refusals: Counter[tuple[str, str]] = Counter()
        self.tasks: list[asyncio.Task[None]] = []
        self.islands: dict[str, VirtualIsland] = {}
        member = BaselineMember("a", 0)
        bounds = Bounds(max_bytes=1 << 16, max_vectors=4, patience_s=1.0, streams=1)
        self.baseline = ValueExchange(
            member, "", frozenset({member, BaselineMember("c", 0)}), bounds
        )
        self.grant = Grant()
        self.num_starts = 0

    @staticmethod
    def _descend(island: str, inner_step: int, parameters: dict[str, Any]) -> None:
        for parameter in parameters.values():
            parameter.mul_(0.999)

    async def start(self) -> None:
        self.journal = Journal(self.directory / "journal.sqlite")
        self.journal.open()
        self.membership = Membership(
            RUN, ("a", "b", "c"), IDENTITY, identity_difference, 10**6, num_checkpoints=2,
            claims=Claims(4, ("a", "b", "c")),
        )  # fmt: skip
        self.membership.apply(self.journal.entries().items())
        self.coordinator = Coordinator(
            membership=self.membership,
            journal=self.journal,
            secret=SECRET,
            terms=terms_of(_CONFIG),
            unix_clock=lambda: 0.0,
            operations=Operations(_CONFIG, lambda config: None, self._back_up),
        )
        self.run.intercept = self._guard
        await self.run.start_syncer()

    def _guard(self, handlers: Handlers) -> Handlers:
        self.run.syncer._admission._is_granted = lambda held: is_valid(
            held, SECRET, run=RUN, role=ROLE_ISLAND, now_unix_s=0.0
        )
        served = {**self.coordinator.handlers, **handlers, **self.baseline.handlers}
        behind = guarded(served, self.limits, self._refused)
        around = ObjectCalls(SignedStore()).around(behind)
        self.handlers = {**behind, **guarded(around, self.limits, self._refused)}
        return self.handlers

    async def begin(self) -> None:
        """Have two islands work, and the third ready to speak."""
        for name in "ab":
            held = (await self.join(name)).grant
            island = self.run.island(name, held.incarnation, held)
            self.islands[name] = island
            self.tasks.append(asyncio.create_task(island.run()))
        await self.ready()

    async def join(self, name: str) -> control_pb2.JoinReply:
        self.num_starts += 1
        request = control_pb2.JoinRequest(
            protocol_version=PROTOCOL_VERSION, run=RUN, island=name, identity_json=IDENTITY,
            plan=packed(self.setting.plan().to_json()), start_id=str(self.num_starts),
            tokens_per_inner_step=TOKENS,
        )  # fmt: skip
        call = Call("control.join", request.SerializeToString())
        reply = control_pb2.JoinReply.FromString((await self.handlers["control.join"](call)).header)
        assert reply.status == control_pb2.JOIN_STATUS_ACCEPTED, reply.message
        return reply

    async def ready(self) -> None:
        """Have the speaker be a member whose word counts, and time pass for the others."""
        member = self.membership.members["c"]
        if member.incarnation != self.grant.incarnation or member.exit_code is not None:
            self.grant = (await self.join("c")).grant
        await asyncio.sleep(0.05)
        for task in self.tasks:
            assert not task.done(), task.result()

    async def _back_up(self, arguments: Any) -> str:
        return "copied"

    def _refused(self, island: str, cause: str) -> None:
        self.refusals[island, cause] += 1

    @property
    def version(self) -> int:
        return self.run.syncer.states[0].version

    async def end(self) -> None:
        """End all processes, with all that is not durable."""
        await stop(self.tasks, self.islands.values())
        await self.run.kill_syncer()
        self.journal.close()

    def check_sane(self) -> None:
        """Check that nothing durable says more than there can be."""
        states, membership = self.run.syncer.states, self.membership
        most = 3 * MOST_ROUNDS * self.setting.inner_steps_per_round * 2 * TOKENS
        assert 0 < states[0].merged_tokens <= states[0].version * most
        assert self.run.syncer.failure is None and self.run.syncer.fatal is None
        assert not membership.fatal_reason and not self.coordinator.ended.is_set()
        for key, value in self.journal.entries().items():
            assert all(abs(number) <= MOST_NUMBER for number in numbers_in(value)), (key, value)

    # -- valid messages ----------------------------------------------------------------------------

    @property
    def valid(self) -> dict[str, Callable[[], Said]]:
        """Method -> a message of the speaker as it may be said now."""
        return {
            "control.join": lambda: Said(
                control_pb2.JoinRequest(
                    run=RUN, island="c", identity_json=IDENTITY, num_ranks=1, start_id="again",
                    plan=packed(self.setting.plan().to_json()), tokens_per_inner_step=TOKENS,
                )
            ),
            "control.report": lambda: Said(
                control_pb2.ReportRequest(
                    grant=self.grant, inner_step=5, loss_nats=2.0, tokens=40, state="training",
                    position_json=json.dumps({"revision": 0, "slots": {}}), step_s=1.0,
                )
            ),
            "control.leave": lambda: Said(control_pb2.LeaveRequest(grant=self.grant, exit_code=1)),
            "control.status": lambda: Said(control_pb2.StatusRequest()),
            "control.operate": lambda: Said(
                control_pb2.OperateRequest(
                    command="set", arguments={"key": "outer.optimizer.lr", "value": "0.5"}
                )
            ),
            "control.standing": lambda: Said(control_pb2.RunStateRequest(island="c")),
            "control.clock": lambda: Said(control_pb2.ClockRequest()),
            "control.syncer_hello": lambda: Said(
                control_pb2.SyncerHelloRequest(grant=SYNCER, address="syncer", syncer_epoch=1)
            ),
            "control.round_report": lambda: Said(
                control_pb2.RoundReport(grant=SYNCER, syncer_epoch=1)
            ),
            "fragment.submit": self._submit,
            "fragment.decline": lambda: Said(
                fragment_pb2.DeclineRequest(grant=self.grant, key=self._key, reason="nothing")
            ),
            "fragment.upload": lambda: Said(
                fragment_pb2.UploadHeader(grant=self.grant, digest=DIGEST), LANE
            ),
            "fragment.poll": lambda: Said(
                fragment_pb2.PollRequest(grant=self.grant, outstanding=[self._key], step_s=1.0)
            ),
            "fragment.fetch": lambda: Said(
                fragment_pb2.FetchHeader(
                    grant=self.grant, version=self.version, lane_ids=[0],
                    kind=fragment_pb2.FETCH_KIND_DENSE,
                )
            ),
            "fragment.pin": lambda: Said(
                fragment_pb2.PinRequest(
                    grant=self.grant, checkpoint_step=1,
                    versions=[fragment_pb2.Pinned(version=self.version)],
                )
            ),
            "payload.call": lambda: Said(
                payload_pb2.ObjectCall(
                    method="fragment.submit",
                    header=self._submit().message.SerializeToString(),
                    transfer=bytes(16),
                    payload_bytes=len(LANE),
                    digest=DIGEST,
                    is_written=True,
                )
            ),
            "baseline.vector": lambda: Said(baseline_pb2.VectorHeader(island="c"), LANE),
            "heal.put": lambda: Said(
                fragment_pb2.StatePutHeader(
                    grant=self.grant, checkpoint=1, is_manifest=True,
                    digest=blake3.blake3(self._manifest).digest(),
                ),
                self._manifest,
            ),
            "heal.get": lambda: Said(
                fragment_pb2.StateGetHeader(
                    grant=self.grant, source="c", checkpoint=1, is_manifest=True
                )
            ),
        }  # fmt: skip

    @property
    def _key(self) -> fragment_pb2.RoundKey:
        return key_message(self.run.syncer._services[0].runner.rounds.key)

    def _submit(self) -> Said:
        return Said(
            fragment_pb2.SubmitHeader(
                grant=self.grant, key=self._key, codec="float32", digest=DIGEST,
                sent_at_inner_step=4, weight_steps=4, weight_tokens=4 * TOKENS,
            ),
            LANE,
        )  # fmt: skip

    @property
    def _manifest(self) -> bytes:
        lanes = {"0/0": LaneDigest(2 * len(LANE) + 100, bytes(32).hex())}
        plan = self.setting.plan().fingerprint()
        return TransferManifest(RUN, 0, "c", 1, 2, "adamw", 2, (0,), plan, lanes).to_json()


async def stop(tasks: list[asyncio.Task[None]], islands: Iterable[VirtualIsland]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()
    for island in islands:
        await island.drop()


async def publishes(site: Site, rounds: int = 3) -> None:
    """Check that the run goes on."""
    version = site.version
    async with asyncio.timeout(3600):  # of virtual time
        while site.version < version + rounds:
            await site.ready()


def told(site: Site, say: Callable[[Speaker], Awaitable[None]]) -> Counter[str]:
    """Have everything said to a run, and insist that it goes on, before and after a restart."""
    speaker = Speaker()

    async def scenario() -> None:
        await site.start()
        await site.begin()
        await publishes(site)
        await say(speaker)
        await publishes(site)
        await site.end()
        await site.start()
        await site.begin()
        await publishes(site)
        site.check_sane()
        await site.end()

    run_virtual(scenario())
    return speaker.outcomes


def numbers_in(text: str) -> list[float]:
    """Give all numbers of a JSON text; none of another."""
    found: list[float] = []

    def note(digits: str) -> float:
        found.append(float(digits))
        return 0.0

    with contextlib.suppress(ValueError):
        json.loads(text, parse_int=note, parse_float=note, parse_constant=note)
    return found


@pytest.fixture(autouse=True)
def no_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nothing here is about power loss


def test_every_method_is_spoken_to(tmp_path: Path) -> None:
    methods: set[str] = set()

    async def scenario() -> None:
        site = Site(tmp_path)
        await site.start()
        await site.begin()
        await publishes(site)
        methods.update(site.valid)
        await site.end()

    run_virtual(scenario())
    assert methods == RULES.keys()


def test_no_extreme_value_of_any_field_ends_a_run(tmp_path: Path) -> None:
    site = Site(tmp_path)

    outcomes = told(site, lambda speaker: speaker.say_all(site, 20))

    assert outcomes["answered"] and outcomes["OutOfRange"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_no_extreme_values_of_several_fields_end_a_run(seed: int, tmp_path: Path) -> None:
    site = Site(tmp_path)

    outcomes = told(site, lambda speaker: speaker.say_several(site, 10_000, seed))

    assert outcomes["answered"] and outcomes["OutOfRange"]
