"""A fragment goes from one syncer's store to another's, with each killed at any moment."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from diloco import durable
from diloco.config.load import load_config
from diloco.durable import replicate
from diloco.errors import ConfigError, Fenced
from diloco.launch import syncer
from diloco.objects.lease import store_replica
from diloco.objects.moved_fragment import (
    forget,
    let_go,
    let_go_for_lost,
    serve,
    served_from,
    take,
    was_let_go,
)
from diloco.objects.replica import Replica
from diloco.objects.store import ObjectStore
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.protocol.rounds.terms import RoundKey
from diloco.protos.control_pb2 import FragmentSource, SyncerHelloReply
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


@pytest.fixture
def machines(tmp_path: Path):  # type: ignore[no-untyped-def]
    store = ObjectStore(f"file://{tmp_path}/objects")
    made = [
        Machine(store, StateDir(tmp_path / name).placed(name, n))
        for n, name in enumerate(("eu", "us"))
    ]
    for machine, own, files in zip(made, ([0, 1], [2]), (FILES, {}), strict=True):
        machine.start()
        for name, content in files.items():
            path = machine.state.store / name
            durable.make_directory_durably(path.parent)
            durable.write_durably(path, [content])
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
    source, fragment = eu.state.syncer_name, PLAN.fragments[1]

    def taken() -> None:
        if 1 in (served_from(us.store, us.state) or ()):
            return  # killed once that was durable
        assert take(us.store, us.state, fragment, source, Timeline())
        serve(us.state, [1], {"east": 5, "west": 0})

    us.start()
    assert not take(us.store, us.state, fragment, source, Timeline()), "it was not let go of"
    assert until_done(eu, monkeypatch, lambda: let_go(eu.state, {1})) >= 3
    assert served_from(eu.store, eu.state) == [0]
    assert until_done(us, monkeypatch, taken) > 20

    shutil.rmtree(us.state.root)
    us.start()
    own = {name: content for name, content in us.files().items() if "/" in name}
    assert own == MOVED
    assert json.loads(us.files()["fragments.json"]) == [1, 2]
    assert json.loads(us.files()["incarnations.json"]) == {"east": 5}
    assert {name: eu.files()[name] for name in FILES} == FILES, "nothing is lost there"
    eu.start()
    forget(eu.state, 1)
    assert not [name for name in eu.files() if "fragment-0001" in name]


def test_what_was_fetched_before_a_failure_is_not_fetched_again_and_nothing_without_room(
    machines: list[Machine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    eu, us = machines
    arguments = us.store, us.state, PLAN.fragments[1], eu.state.syncer_name, Timeline()
    replicate(eu.replica)
    large = {f"fragment-0001/v00000000000{n}.record": bytes([n]) * 100_000 for n in (5, 6)}
    for name, content in large.items():
        durable.write_durably(eu.state.store / name, [content])
    kept, pin = max(large), "pins/step-000000000020/fragment-0001/v000000000006.record"
    durable.link(eu.state.store / kept, eu.state.store / pin)
    let_go(eu.state, {1})
    us.start()
    assert eu.replica is not None
    [lost] = eu.replica._files[min(large)].objects
    objects = Path(us.store.url.removeprefix("file://")) / eu.state.syncer_name / "data"

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=150_000))
        with pytest.raises(ConfigError, match=r"it has 195\.3 KiB, and 146\.5 KiB are free below"):
            take(*arguments)
    assert not [path for path in us.state.moved.rglob("*") if path.is_file()]
    (objects / lost).rename(objects / "away")
    with pytest.raises(ConfigError, match="is gone or does not hold what was written"):
        take(*arguments)
    (objects / "away").rename(objects / lost)
    with caplog.at_level(logging.INFO):
        assert take(*arguments)

    assert "fragment 1 taken from syncer-eu, bytes=100000" in caplog.text
    own = {name: content for name, content in us.files().items() if "/" in name}
    assert own == MOVED | large | {pin: large[kept]}
    assert (us.state.store / kept).samefile(us.state.store / pin)


def test_a_lost_syncer_writes_nothing_more_once_its_fragments_were_let_go_of(
    machines: list[Machine],
) -> None:
    eu, us = machines
    assert eu.replica is not None
    replicate(None)

    let_go_for_lost(eu.store, eu.state, 1, "test", [0, 1, 2])

    with pytest.raises(Fenced):
        eu.replica.check()
    assert served_from(eu.store, eu.state) == []
    us.start()
    for p in (0, 1):
        assert take(us.store, us.state, PLAN.fragments[p], eu.state.syncer_name, Timeline())
    assert {n: c for n, c in us.files().items() if "/" in n} == FILES
    eu.start()  # a machine that comes back has what the object store says
    assert durable.read_json(eu.state.fragments) == []


def test_a_syncer_that_never_began_is_waited_for_until_it_was_given_up(
    machines: list[Machine], tmp_path: Path
) -> None:
    _, us = machines
    asia = Machine(us.store, StateDir(tmp_path / "asia").placed("asia", 2))
    arguments = us.store, us.state, PLAN.fragments[0], asia.state.syncer_name, Timeline()
    us.start()
    assert served_from(asia.store, asia.state) is None and not take(*arguments)

    let_go_for_lost(asia.store, asia.state, 1, "test", [0])

    assert served_from(asia.store, asia.state) == []
    assert take(*arguments), "with no version: it is founded where it is now"
    asia.start()
    assert was_let_go(asia.state, 0) and not was_let_go(asia.state, 1)


def test_starts_that_the_first_syncer_knew_when_it_let_go_are_known_to_the_second(
    machines: list[Machine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eu, us = machines
    monkeypatch.setattr(syncer, "_MOVES_LOOK_S", 0.01)
    placed = [f"run.state=file://{tmp_path}/objects", "syncers.eu={}", "syncers.us={}"]
    config = load_config(write_run(tmp_path / "run", {"east": "", "west": ""}), placed)

    def told(incarnation: int) -> SyncerHelloReply:
        takes = [FragmentSource(fragment_id=1, syncer=eu.state.syncer_name)]
        answer = SyncerHelloReply(fragment_ids=[1, 2], takes=takes)
        answer.islands.append("east")
        answer.incarnations.append(incarnation)
        return answer

    replicate(eu.replica)
    let_go(eu.state, [1])
    us.start()
    reporter = SimpleNamespace(assigned=told(3))
    moves = syncer._Moves(config, us.state, PLAN, Timeline(), cast(Reporter, reporter))

    async def move() -> None:
        due = asyncio.create_task(moves.due())
        while not moves.taken:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert not due.done(), "the coordinator may know of a start after that answer"
        reporter.assigned = told(4)
        await due
        await moves.settle(asyncio.Event())

    asyncio.run(move())

    assert durable.read_json(us.state.incarnations) == {"east": 4}
    assert durable.read_json(us.state.fragments) == [1, 2]


def test_what_was_let_go_of_in_an_earlier_timeline_goes_back_to_its_checkpoint(
    machines: list[Machine],
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
    assert take(us.store, us.state, PLAN.fragments[1], eu.state.syncer_name, Timeline(1, 40))

    found = FragmentStore(us.state.store, PLAN.fragments[1], 4).recover()
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
