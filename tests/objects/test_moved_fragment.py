"""A fragment goes from one syncer's store to another's, with each killed at any moment."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from diloco import durable
from diloco.config.load import load_config
from diloco.durable import DiskFull, replicate
from diloco.errors import ConfigError, Fenced
from diloco.launch import syncer_moves
from diloco.launch.syncer_moves import SyncerMoves
from diloco.objects import moved_fragment
from diloco.objects.lease import store_replica
from diloco.objects.moved_fragment import (
    CopyStopped,
    FragmentCopy,
    SyncerFiles,
    forget,
    has_not_let_go,
    let_go,
    let_go_for_lost,
    serve,
    take_back,
    was_let_go,
    withdraw,
    withdraw_for_lost,
)
from diloco.objects.replica import Replica
from diloco.objects.store import ObjectStore
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.protocol.rounds.terms import RoundKey
from diloco.protocol.run.alarms import Alarms
from diloco.protos.control_pb2 import FragmentMove, FragmentSource, MoveStage, SyncerHelloReply
from diloco.state_dir import StateDir, Timeline
from diloco.syncer.reporter import Reporter
from diloco.versions.publication import LaneState, lane_blake3
from diloco.versions.store import FragmentStore
from diloco.versions.value_digest import lane_digest
from diloco.versions.version import VersionRecord
from tests.run_files import write_run

PLAN = make_plan([TensorSpec(name, (3,)) for name in "uvw"], num_fragments=3)
#: What the first syncer has of the fragment that moves, and of the one that stays.
FILES = {
    "fragment-0000/v000000000004.record": b"kept",
    "fragment-0001/v000000000007.record": b"seven",
    "fragment-0001/v000000000008.frame": b"eight",
    "fragment-0001/attempt.json": b"[1]",
    "pins/step-000000000020/fragment-0000/v000000000003.record": b"three",
    "pins/step-000000000020/fragment-0001/v000000000007.record": b"seven",
    "pins/step-000000000020/east.asked": b"",
}
MOVED = {name: content for name, content in FILES.items() if "fragment-0000" not in name}


class Killed(BaseException):
    """The process ends here."""


@dataclass
class Machine:
    """A syncer's machine: its process may be killed at a change of its disk, and starts again."""

    store: ObjectStore
    state: StateDir
    replica: Replica | None = None

    def start(self) -> None:
        replicate(None)
        self.state.create([self.state.syncer_name])
        self.replica = store_replica(self.store, self.state, 1, "test")
        self.replica.restore()
        replicate(self.replica)

    def files(self) -> dict[str, bytes]:
        """What any other machine would find of the store."""
        there = Replica(self.store, self.state.syncer_name, self.state.store, lambda path: True)
        there.look()
        return there.contents(there._files)

    def served(self) -> list[int] | None:
        return SyncerFiles(self.store, self.state).read()[0]

    def write(self, files: dict[str, bytes], *removed: str) -> None:
        """Have it publish; a snapshot of its chain takes objects away."""
        assert self.replica is not None
        before = durable._replica
        replicate(self.replica)
        for name, content in files.items():
            durable.make_directory_durably((self.state.store / name).parent)
            durable.write_durably(self.state.store / name, [content])
        for name in removed:
            durable.unlink(self.state.store / name)
            durable.sync_directory((self.state.store / name).parent)
        self.replica.put_snapshot()
        replicate(before)

    def copy(self, p: int, source: Machine, store: ObjectStore | None = None) -> FragmentCopy:
        name = source.state.syncer_name
        return FragmentCopy(store or self.store, self.state, PLAN.fragments[p], name)

    def takes(self, p: int, source: Machine, timeline: Timeline | None = None) -> bool:
        copy = self.copy(p, source)
        if is_let_go := copy.copy():
            copy.take(timeline or Timeline())
        return is_let_go


@pytest.fixture
def machines(tmp_path: Path):  # type: ignore[no-untyped-def]
    store = ObjectStore(f"file://{tmp_path}/objects")
    made = [
        Machine(store, StateDir(tmp_path / name).placed(name, n))
        for n, name in enumerate(("eu", "us"))
    ]
    for machine, own, files in zip(made, ([0, 1], [2]), (FILES, {}), strict=True):
        machine.start()
        machine.write(files)
        durable.write_json(machine.state.fragments, own)
        durable.write_json(machine.state.incarnations, {"east": 2})
    yield made
    replicate(None)


def dying_at(patch: pytest.MonkeyPatch, num_calls: int) -> None:
    """Let the process die before its n-th change of the disk."""
    left = iter(range(num_calls))

    def dying(change: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            if next(left, None) is None:
                raise Killed
            return change(*arguments, **options)

        return call

    for name in ("rename", "unlink", "remove_tree", "sync_directory"):
        patch.setattr(durable, name, dying(getattr(durable, name)))


def until_done(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]
) -> int:
    """Do work that is killed at one change of the disk after the other; returns how many."""
    num_calls = 0
    while True:
        machine.start()
        with monkeypatch.context() as patch:
            dying_at(patch, num_calls)
            try:
                work()
                return num_calls
            except Killed:
                num_calls += 1


def test_a_move_that_is_killed_anywhere_is_done_again_to_the_same_end(
    machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    eu, us = machines
    expired, new = "fragment-0001/v000000000007.record", "fragment-0001/v000000000009.record"

    def copied() -> None:
        assert not us.copy(1, eu).copy(), "it was not let go of"

    def taken() -> None:
        if 1 in (us.served() or ()):
            return  # killed once that was durable
        assert us.takes(1, eu)
        serve(us.state, [1], {"east": 5, "west": 0})

    assert until_done(us, monkeypatch, copied) > 6
    eu.write({new: b"nine"}, expired)
    us.start()
    copied()
    copy = us.state.moved / "fragment-0001"
    assert (copy / new).read_bytes() == b"nine" and not (copy / expired).exists()
    assert until_done(eu, monkeypatch, lambda: let_go(eu.state, {1})) >= 3
    assert eu.served() == [0]
    assert until_done(us, monkeypatch, taken) > 10

    shutil.rmtree(us.state.root)
    us.start()
    own = {name: content for name, content in us.files().items() if "/" in name}
    assert own == {n: c for n, c in MOVED.items() if n != expired} | {new: b"nine"}
    assert json.loads(us.files()["fragments.json"]) == [1, 2]
    assert json.loads(us.files()["incarnations.json"]) == {"east": 5}
    assert {n: eu.files().get(n) for n in FILES if n != expired} == {
        n: c for n, c in FILES.items() if n != expired
    }, "nothing is lost there"
    eu.start()
    forget(eu.state, 1)
    assert not [name for name in eu.files() if "fragment-0001" in name]


class Watched(ObjectStore):
    """Notes which objects are read, and does something before the first one is."""

    def __init__(self, url: str, work: Callable[[], None] = lambda: None) -> None:
        super().__init__(url)
        self.read_names: list[str] = []
        self._work, self._lock = [work], threading.Lock()

    def read(self, parts: Iterable[tuple[str, int, int]]) -> Iterator[bytes]:
        parts = list(parts)
        with self._lock:
            while self._work:
                self._work.pop()()
            self.read_names += [
                name.rpartition("/data/")[2] for name, *_ in parts if "/data/" in name
            ]
        return super().read(parts)


def test_what_is_published_and_removed_meanwhile_is_copied_or_left_out_and_then_little_is_lacking(
    machines: list[Machine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    eu, us = machines
    names = [f"fragment-0001/v00000000001{n}.record" for n in range(4)]
    content = {name: bytes([n]) * 100_000 for n, name in enumerate(names)}
    eu.write({name: content[name] for name in names[:2]})
    us.start()
    later = {name: content[name] for name in names[2:]}
    copy = us.copy(1, eu, Watched(us.store.url, lambda: eu.write(later, names[0])))
    monkeypatch.setattr(moved_fragment, "_LITTLE_S", -1.0)

    ready = [copy.is_ready for _ in range(2) if not copy.copy()]
    assert ready == [False, True], "it brought three versions, then nothing was lacking"
    assert copy.copied_bytes >= copy.total_bytes >= 300_000
    eu.write({names[0]: content[names[0]]}, names[1])
    assert not copy.copy() and copy.is_ready, "it brought one"

    staged = us.state.moved / "fragment-0001"
    there = {path.name for path in (staged / "fragment-0001").glob("v00000000001*")}
    assert there == {Path(name).name for name in (names[0], *names[2:])}
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
    copied = {name for name in us.files() if name.startswith("moved/")}
    assert {name.removeprefix("moved/fragment-0001/") for name in copied} > {names[0], *names[2:]}
    copy.stop()
    with pytest.raises(CopyStopped):
        copy.copy()


def test_what_was_copied_before_a_failure_is_not_copied_again_and_nothing_without_room(
    machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    eu, us = machines
    large = {f"fragment-0001/v00000000000{n}.record": bytes([n]) * 100_000 for n in (5, 6)}
    eu.write(large)
    kept, pin = max(large), "pins/step-000000000020/fragment-0001/v000000000006.record"
    replicate(eu.replica)
    durable.link(eu.state.store / kept, eu.state.store / pin)
    let_go(eu.state, {1})
    us.start()
    assert eu.replica is not None
    [lost] = eu.replica._files[min(large)].objects
    objects = Path(us.store.url.removeprefix("file://")) / eu.state.syncer_name / "data"

    copy = us.copy(1, eu)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=150_000))
        needed = r"195\.3 KiB are needed and 146\.5 KiB are free below .*: make room, or move it to"
        with pytest.raises(ConfigError, match=needed):
            copy.copy()
    assert not copy.is_ready and not [p for p in us.state.moved.rglob("*") if p.is_file()]
    (objects / lost).rename(objects / "away")
    with pytest.raises(ConfigError, match="is gone or does not hold what was written"):
        copy.copy()
    (objects / "away").rename(objects / lost)
    watched = Watched(us.store.url)
    copy = us.copy(1, eu, watched)
    assert copy.copy() and watched.read_names == [lost]
    copy.take(Timeline())

    own = {name: content for name, content in us.files().items() if "/" in name}
    assert own == MOVED | large | {pin: large[kept]}
    assert (us.state.store / kept).samefile(us.state.store / pin)


def test_a_lost_syncer_writes_nothing_more_once_its_fragments_were_let_go_of(
    machines: list[Machine],
) -> None:
    eu, us = machines
    assert eu.replica is not None
    replicate(None)

    let_go_for_lost(eu.store, eu.state, 1, "test", [0])
    assert eu.served() == [1], "of what it may have taken lately the newest is there"
    let_go_for_lost(eu.store, eu.state, 1, "test", [0, 1, 2])

    with pytest.raises(Fenced):
        eu.replica.check()
    assert eu.served() == []
    us.start()
    for p in (0, 1):
        assert us.takes(p, eu)
    assert {n: c for n, c in us.files().items() if "/" in n} == FILES
    eu.start()  # a machine that comes back has what the object store says
    assert durable.read_json(eu.state.fragments) == []


def test_a_syncer_that_never_began_is_waited_for_until_it_was_given_up(
    machines: list[Machine], tmp_path: Path
) -> None:
    _, us = machines
    asia = Machine(us.store, StateDir(tmp_path / "asia").placed("asia", 2))
    us.start()
    assert asia.served() is None and not us.takes(0, asia)

    let_go_for_lost(asia.store, asia.state, 1, "test", [0])

    assert asia.served() == []
    assert us.takes(0, asia), "with no version: it is founded where it is now"
    asia.start()
    assert was_let_go(asia.state, 0) and not was_let_go(asia.state, 1)


def test_a_lost_syncer_takes_nothing_any_more_that_goes_to_another_and_serves_what_it_has(
    machines: list[Machine],
) -> None:
    _, us = machines
    assert us.replica is not None
    us.start()
    withdraw(us.state, {0: 2, 1: 4})
    withdraw(us.state, {1: 3})
    replicate(None)

    withdraw_for_lost(us.store, us.state, 1, "test", {1: 7})

    with pytest.raises(Fenced):
        us.replica.check()
    assert SyncerFiles(us.store, us.state).read() == ([2], {0: 2, 1: 7})


COPYING = frozenset([int(MoveStage.MOVE_STAGE_COPYING)])
READY = frozenset([int(MoveStage.MOVE_STAGE_READY)])


@dataclass
class Told:
    """What a start of a syncer is told, and the answers of another one."""

    assigned: SyncerHelloReply
    moves: Callable[[], Iterable[FragmentMove]] = tuple
    alarms: Alarms = field(default_factory=Alarms)

    def stages(self) -> dict[int, int]:
        return {word.fragment_id: word.stage for word in self.moves()}


def answer(
    source: str,
    *,
    own: Iterable[int] = (2,),
    number: int = 1,
    is_held: bool = False,
    withdrawn: int = 0,
    incarnation: int = 3,
) -> SyncerHelloReply:
    """Fragment 1 is to be taken, or is withdrawn."""
    said = FragmentSource(fragment_id=1, syncer=source, number=number or withdrawn, is_held=is_held)
    reply = SyncerHelloReply(
        fragment_ids=[*own, 1],
        takes=[said] if number else [],
        withdrawn=[said] if withdrawn else [],
    )
    reply.islands.append("east")
    reply.incarnations.append(incarnation)
    return reply


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SyncerMoves]:
    monkeypatch.setattr(syncer_moves, "_LOOK_S", 0.01)
    placed = [f"run.state=file://{tmp_path}/objects", "syncers.eu={}", "syncers.us={}"]
    config = load_config(write_run(tmp_path / "run", {"east": "", "west": ""}), placed)

    def begin(machine: Machine, told: Told, timeline: Timeline | None = None) -> SyncerMoves:
        reporter = cast(Reporter, told)
        return SyncerMoves(config, machine.state, PLAN, timeline or Timeline(), reporter)

    return begin


def test_starts_that_the_first_syncer_knew_when_it_let_go_are_known_to_the_second(
    machines: list[Machine],
    begin: Callable[..., SyncerMoves],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    eu, us = machines
    source = eu.state.syncer_name
    us.start()
    told = Told(answer(source))
    moves = begin(us, told)

    async def move() -> None:
        due = asyncio.create_task(moves.due())
        await until(lambda: told.stages() == {1: MoveStage.MOVE_STAGE_READY})
        [word] = told.moves()
        assert word.copied_bytes == word.total_bytes > 0 and not moves.taken
        replicate(eu.replica)
        let_go(eu.state, [1])
        replicate(us.replica)
        await until(lambda: moves.taken)
        await asyncio.sleep(0.1)
        assert told.stages() == {1: MoveStage.MOVE_STAGE_TAKEN}
        assert not due.done(), "the coordinator may know of a start after that answer"
        told.assigned = answer(source, incarnation=4)
        await due
        await moves.settle(asyncio.Event())

    asyncio.run(move())

    assert caplog.text.count("fragment 1 taken from syncer-eu") == 1
    assert durable.read_json(us.state.incarnations) == {"east": 4}
    assert durable.read_json(us.state.fragments) == [1, 2]


def test_fragments_that_move_together_are_let_go_of_and_taken_by_one_start(
    machines: list[Machine], begin: Callable[..., SyncerMoves]
) -> None:
    eu, us = machines
    us.start()

    def both() -> SyncerHelloReply:
        reply = answer(eu.state.syncer_name, own=[0, 2])
        reply.takes.add(fragment_id=0, syncer=eu.state.syncer_name, number=1)
        return reply

    told = Told(both())
    moves = begin(us, told)

    async def move() -> None:
        due, seen = asyncio.create_task(moves.due()), set[frozenset[int]]()
        while seen != {READY}:
            seen = {frozenset(told.stages().values())}
            assert seen <= {READY, COPYING}, "one is not ready before the other"
            await asyncio.sleep(0)
        replicate(eu.replica)
        let_go(eu.state, [0, 1])
        replicate(us.replica)
        while not due.done():
            told.assigned = both()
            await asyncio.sleep(0.01)
        await due
        await moves.settle(asyncio.Event())

    asyncio.run(move())

    assert us.served() == [0, 1, 2]


def test_what_is_withdrawn_is_not_taken_and_what_was_let_go_of_is_taken_back(
    machines: list[Machine], begin: Callable[..., SyncerMoves], monkeypatch: pytest.MonkeyPatch
) -> None:
    eu, us = machines
    source = eu.state.syncer_name
    replicate(eu.replica)
    let_go(eu.state, [1])
    us.start()
    held = Told(answer(source, is_held=True))

    def full(path: Path, value: object) -> None:
        raise DiskFull(f"no room for {path}")

    async def withdrawn() -> None:
        due = asyncio.create_task(begin(us, held).due())
        await until(lambda: held.stages() == {1: MoveStage.MOVE_STAGE_READY})
        await asyncio.sleep(0.1)
        assert not due.done(), "another one may have taken it"
        with monkeypatch.context() as patch:
            patch.setattr(durable, "write_json", full)
            held.assigned = answer(source, number=0, withdrawn=2)
            await until(lambda: bool(held.alarms.holding(0.0)))
            (said,) = held.alarms.holding(0.0)
            assert "fragment 1 cannot be left to another syncer yet: no room" in said.alarm.text
        await until(lambda: held.stages() == {1: MoveStage.MOVE_STAGE_WITHDRAWN})
        assert not held.alarms.holding(0.0)
        await until(lambda: not (us.state.moved / "fragment-0001").exists())
        held.assigned = answer(source, number=1)  # of a coordinator that does not know it yet
        await asyncio.sleep(0.1)
        assert not due.done()
        held.assigned = answer(source, number=3)
        await until(lambda: held.stages() == {1: MoveStage.MOVE_STAGE_TAKEN})
        due.cancel()

    async def taken_back(timeline: Timeline) -> str:
        told = Told(answer(source, own=[0], number=3))
        moves = begin(eu, told, timeline)
        due = asyncio.create_task(moves.due())
        await until(lambda: moves.taken or any(word.waits for word in told.moves()))
        if not moves.taken:
            due.cancel()
            return next(iter(told.moves())).waits
        while not due.done():  # answers come again and again
            told.assigned = answer(source, own=[0], number=3)
            await asyncio.sleep(0.05)
        await due
        await moves.settle(asyncio.Event())
        return ""

    asyncio.run(withdrawn())
    assert us.served() == [2] and SyncerFiles(us.store, us.state).read()[1] == {1: 2}
    eu.start()
    assert "fragment 1 of syncer-eu cannot be taken back to checkpoint 20" in asyncio.run(
        taken_back(Timeline(1, 20))
    )

    async def held_back() -> None:
        held.assigned = answer(source, own=[0], number=3, is_held=True)
        due = asyncio.create_task(begin(eu, held).due())
        await until(lambda: held.stages() == {1: MoveStage.MOVE_STAGE_READY})
        due.cancel()

    asyncio.run(held_back())
    assert asyncio.run(taken_back(Timeline())) == ""
    assert eu.served() == [0, 1] and was_let_go(eu.state, 1)
    has_not_let_go(eu.state, [0, 1])  # the next start
    assert {name: eu.files()[name] for name in FILES} == FILES
    assert not was_let_go(eu.state, 1) and not us.takes(1, eu)


def test_what_is_to_stay_after_all_is_not_let_go_of(
    machines: list[Machine], begin: Callable[..., SyncerMoves]
) -> None:
    eu, _ = machines
    replicate(eu.replica)
    told = Told(SyncerHelloReply(fragment_ids=[0]))
    moves = begin(eu, told)
    asyncio.run(moves.due())
    assert moves.let_go_of == {1}
    told.assigned = SyncerHelloReply(fragment_ids=[0, 1])  # while the start ended

    asyncio.run(moves.settle(asyncio.Event()))

    assert eu.served() == [0, 1] and not was_let_go(eu.state, 1)


def test_what_was_let_go_of_in_an_earlier_timeline_goes_back_to_its_checkpoint(
    machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    eu, us = machines
    replicate(eu.replica)
    forget(eu.state, 1)
    kept = FragmentStore(eu.state.store, PLAN.fragments[1], 4)
    kept.recover()
    for version in range(4):
        kept.commit(record(version))
    kept.pin(40, 2)
    let_go(eu.state, {1})

    us.start()
    assert us.takes(1, eu, Timeline(1, 40))

    def taken_back() -> None:
        if 1 not in (eu.served() or ()):
            take_back(eu.state, PLAN.fragments[1], Timeline(1, 40))
            serve(eu.state, [1], {})

    eu.start()
    eu.write({"pins/step-000000000080/fragment-0000/v000000000009.record": b"since"})
    assert until_done(eu, monkeypatch, taken_back) >= 5
    assert eu.served() == [0, 1]
    assert eu.files()["pins/step-000000000080/fragment-0000/v000000000009.record"] == b"since"
    for store in (us.state.store, eu.state.store):
        found = FragmentStore(store, PLAN.fragments[1], 4).recover()
        assert found is not None and found.record.version == 2 and found.attempt == 0


def record(version: int) -> VersionRecord:
    values = [torch.full((lane.numel,), float(version)) for lane in PLAN.fragments[1].lanes]
    return VersionRecord(
        version=version,
        fragment_id=1,
        timeline=0,
        key=RoundKey(0, 1, version - 1, 0) if version else None,
        is_flush=False,
        payload_codec="float32",
        lane_digests=tuple(map(lane_digest, values)),
        lane_blake3=tuple(map(lane_blake3, values)),
        lanes=tuple(LaneState(each, each, each) for each in values),
        payloads=tuple(bytes(4) for _ in values) if version else (),
        contributors=(),
        contributions={},
    )
