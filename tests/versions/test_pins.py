"""Pins hold on to records; a store is taken back to one of them, wherever it is killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diloco import durable
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.protocol.rounds.terms import Contributor, RecordExpiry, RoundKey
from diloco.versions.pins import (
    forget_pins,
    pin_directory,
    pinned_steps,
    restore,
    valid_pins,
    verify_pin,
)
from diloco.versions.publication import LaneState, lane_blake3
from diloco.versions.record import RecordInvalid, fragment_directory, record_path, versions_in
from diloco.versions.store import FragmentStore, PinRefused
from diloco.versions.value_digest import lane_digest
from diloco.versions.version import VersionRecord

PLAN = make_plan([TensorSpec("v", (300,)), TensorSpec("w", (300,))], num_fragments=2)
RETAINED = 2


def record_of(fragment_id: int, version: int, timeline: int = 0) -> VersionRecord:
    """A record whose values tell fragment, version and timeline."""
    lanes = PLAN.fragments[fragment_id].lanes
    vectors = [
        torch.full((lane.numel,), 100.0 * timeline + 10.0 * version + fragment_id) for lane in lanes
    ]
    contributor = Contributor("a", 1, 5, 4, 4 * version, (b"\x01" * 32,) * len(lanes))
    is_first = version == 0
    return VersionRecord(
        version=version,
        fragment_id=fragment_id,
        timeline=timeline,
        key=None if is_first else RoundKey(timeline, fragment_id, version - 1, 0),
        is_flush=False,
        payload_codec="float32",
        lane_digests=tuple(map(lane_digest, vectors)),
        lane_blake3=tuple(map(lane_blake3, vectors)),
        lanes=tuple(LaneState(v, v, v) for v in vectors),
        payloads=() if is_first else tuple(bytes(4) for _ in lanes),
        contributors=() if is_first else (contributor,),
        contributions={} if is_first else {"a": [bytes(4) for _ in lanes]},
    )


class Store:
    """A syncer's store of two fragments."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fragments = [FragmentStore(directory, f, RETAINED) for f in PLAN.fragments]
        for fragment in self.fragments:
            fragment.recover()

    def commit(self, *versions: int, timeline: int = 0) -> None:
        for version in versions:
            for p, fragment in enumerate(self.fragments):
                fragment.commit(record_of(p, version, timeline))

    def pin(self, step: int, *versions: int) -> None:
        for fragment, version in zip(self.fragments, versions, strict=True):
            fragment.pin(step, version)

    def versions(self, p: int = 0) -> list[int]:
        return versions_in(fragment_directory(self.directory, p))

    def newest(self) -> list[tuple[int, int, float]]:
        """Version, timeline and first value of each fragment."""
        found = []
        for fragment in self.fragments:
            recovered = fragment.recover()
            assert recovered is not None and recovered.attempt == 0
            value = recovered.record.lanes[0].published[0].item()
            found.append((recovered.record.version, recovered.record.timeline, value))
        return found


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def pinned_file(store: Store, step: int, p: int, version: int) -> Path:
    return record_path(fragment_directory(pin_directory(store.directory, step), p), version)


# -- pinning -------------------------------------------------------------------------------------


def test_a_pin_outlives_the_version_it_holds_on_to(store: Store) -> None:
    store.commit(0, 1, 2)
    store.pin(8, 2, 1)
    store.commit(3, 4, 5, 6)

    assert store.versions() == [4, 5, 6]
    assert valid_pins(store.directory, PLAN) == [8]
    pinned = FragmentStore(pin_directory(store.directory, 8), PLAN.fragments[1], RETAINED)
    assert pinned.load(1).header() == record_of(1, 1).header()


def test_a_pin_is_a_link_and_repeating_it_changes_nothing(store: Store) -> None:
    store.commit(0, 1)

    store.pin(8, 1, 0)
    inode = pinned_file(store, 8, 0, 1).stat().st_ino
    store.pin(8, 1, 0)

    assert inode == record_path(fragment_directory(store.directory, 0), 1).stat().st_ino
    assert pinned_file(store, 8, 0, 1).stat().st_ino == inode
    store.commit(2, 3, 4)
    store.pin(8, 1, 0)  # of an island that is late: the store itself has forgotten it
    assert valid_pins(store.directory, PLAN) == [8]


def test_islands_that_merged_different_versions_have_no_common_checkpoint(store: Store) -> None:
    store.commit(0, 1)
    store.pin(8, 1, 0)

    with pytest.raises(PinRefused, match=r"fragment 1: .* step 8 holds version 0, not 1"):
        store.pin(8, 1, 1)

    verify_pin(store.directory, PLAN, 8)
    store.pin(9, 1, 1)
    assert pinned_steps(store.directory) == [8, 9]


@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_what_is_not_whole_is_not_pinned(store: Store, damage: str) -> None:
    store.commit(0, 1)
    path = record_path(fragment_directory(store.directory, 0), 1)
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(PinRefused, match="version 1 is not here to be kept"):
        store.pin(8, 1, 1)

    assert valid_pins(store.directory, PLAN) == []


def test_every_name_on_the_way_to_a_pin_is_durable(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(0)
    steps: list[str] = []
    sync, link = os.fsync, os.link

    def note_sync(descriptor: int) -> None:
        steps.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        sync(descriptor)

    def note_link(source: Path, target: Path) -> None:
        steps.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "link", note_link)

    store.fragments[1].pin(8, 0)

    assert steps == [
        "link", "sync fragment-0001", "sync step-000000000008", "sync pins", "sync store",
    ]  # fmt: skip


def test_pinning_reads_no_more_than_the_header(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(0)

    def refuse(path: Path) -> bytes:
        raise AssertionError(f"{path} is read in the thread that merges")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        store.pin(8, 0, 0)

    assert valid_pins(store.directory, PLAN) == [8]


@pytest.mark.parametrize(
    ("complete", "kept", "never_complete"),
    [
        ([], [32, 40], [8, 16, 24]),
        ([16], [16, 32, 40], [24]),
        ([8, 24], [8, 24, 32, 40], []),
        ([40], [40], []),
        ([48], [], []),
    ],
)
def test_only_what_is_complete_or_may_become_so_stays_pinned(
    store: Store, complete: list[int], kept: list[int], never_complete: list[int]
) -> None:
    store.commit(0)
    for step in (8, 16, 24, 32, 40):
        store.pin(step, 0, 0)

    dropped = forget_pins(store.directory, complete=complete, num_unsure=2)

    assert pinned_steps(store.directory) == kept
    assert dropped == never_complete


def test_what_one_island_asks_for_takes_nothing_from_the_others(store: Store) -> None:
    store.commit(0)
    for step in (8, 16, 24, 32, 900, 910, 920, 930):
        store.pin(step, 0, 0)
    east, west = [16, 24, 32], [32, 900, 910, 920, 930]

    dropped = forget_pins(store.directory, complete=[8], num_unsure=2, asked=[east, west])

    assert pinned_steps(store.directory) == [8, 24, 32, 920, 930]
    assert dropped == [16, 900, 910]


def test_what_was_abandoned_goes_when_a_later_checkpoint_is_complete(tmp_path: Path) -> None:
    store = grown(tmp_path / "store")
    restore(store.directory, PLAN, step=16, abandoned_timeline=0)
    store.commit(6, timeline=1)
    store.pin(20, 6, 6)

    for complete, num_asides in [((), 3), ((8, 16), 3), ((16, 20), 0)]:
        forget_pins(store.directory, complete=complete, num_unsure=5)
        assert len(list(store.directory.rglob("abandoned-*"))) == num_asides
    assert valid_pins(store.directory, PLAN) == [16, 20]


# -- which pins are whole --------------------------------------------------------------------------


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def rot(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        tear,
        rot,
        Path.unlink,
        lambda path: shutil.rmtree(path.parent),
        lambda path: shutil.copy(path, path.with_name("v000000000007.record")),
        lambda path: path.rename(path.with_name("v000000000007.record")),
    ],
    ids=["torn", "rotten", "missing", "no-fragment", "two-versions", "misnamed"],
)
def test_a_pin_that_is_not_whole_is_skipped(
    store: Store, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    store.commit(0, 1)
    store.pin(8, 0, 0)
    store.pin(16, 1, 1)

    damage(pinned_file(store, 16, 1, 1))

    assert valid_pins(store.directory, PLAN) == [8]
    assert "pin skipped, step=16" in caplog.text


def test_a_pin_of_another_plan_is_not_whole(store: Store) -> None:
    store.commit(0)
    store.pin(8, 0, 0)
    other = make_plan([TensorSpec("v", (300,)), TensorSpec("w", (900,))], num_fragments=2)

    assert valid_pins(store.directory, other) == []


def test_a_store_without_pins_has_none(tmp_path: Path) -> None:
    assert pinned_steps(tmp_path) == valid_pins(tmp_path, PLAN) == []


# -- restoring -------------------------------------------------------------------------------------


def grown(directory: Path) -> Store:
    """A store at version 6, with pins of versions 2 and 1, 5 and 4, and 6 and 6."""
    store = Store(directory)
    store.commit(0, 1, 2)
    store.pin(8, 2, 1)
    store.commit(3, 4, 5)
    store.pin(16, 5, 4)
    store.commit(6)
    store.pin(24, 6, 6)
    store.fragments[0].record_expiry(RecordExpiry(RoundKey(0, 0, 6, 0), "", ()))
    return store


@pytest.mark.parametrize(
    ("step", "newest", "later_pins"),
    [
        (8, [(2, 0, 20.0), (1, 0, 11.0)], [16, 24]),
        (16, [(5, 0, 50.0), (4, 0, 41.0)], [24]),
        (24, [(6, 0, 60.0), (6, 0, 61.0)], []),
    ],
    ids=["forgotten-by-the-store", "retained", "newest"],
)
def test_a_pinned_version_becomes_the_newest_again(
    tmp_path: Path, step: int, newest: list[tuple[int, int, float]], later_pins: list[int]
) -> None:
    store = grown(tmp_path / "store")

    restore(store.directory, PLAN, step=step, abandoned_timeline=0)

    assert store.newest() == newest
    name = f"abandoned-timeline-0000-after-{step:012d}"
    aside = fragment_directory(store.directory, 0) / name
    assert versions_in(aside) == [v for v in (4, 5, 6) if v > newest[0][0]]
    assert (aside / "attempt.json").exists()
    assert valid_pins(store.directory, PLAN) == [s for s in (8, 16, 24) if s <= step]
    moved = store.directory / "pins" / name
    assert sorted(path.name for path in moved.glob("*")) == [f"step-{s:012d}" for s in later_pins]


def test_what_an_earlier_resume_moved_aside_goes_with_the_next(tmp_path: Path) -> None:
    store = grown(tmp_path / "store")
    restore(store.directory, PLAN, step=16, abandoned_timeline=0)
    store.commit(6, 7, timeline=1)
    store.pin(24, 7, 7)

    restore(store.directory, PLAN, step=16, abandoned_timeline=1)

    asides = sorted(path.name for path in store.directory.rglob("abandoned-*"))
    assert asides == ["abandoned-timeline-0001-after-000000000016"] * 3
    assert store.newest() == [(5, 0, 50.0), (4, 0, 41.0)]


@pytest.mark.parametrize("damage", [tear, rot, Path.unlink], ids=["torn", "rotten", "missing"])
def test_nothing_is_touched_when_the_pin_is_damaged(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    store = grown(tmp_path / "store")
    damage(pinned_file(store, 8, 1, 1))
    before = sorted(store.directory.rglob("*"))

    with pytest.raises(RecordInvalid, match="fragment-0001"):
        restore(store.directory, PLAN, step=8, abandoned_timeline=0)

    assert sorted(store.directory.rglob("*")) == before


def test_a_damaged_record_of_the_store_is_replaced_by_the_pinned_one(tmp_path: Path) -> None:
    store = grown(tmp_path / "store")
    own = record_path(fragment_directory(store.directory, 0), 5)
    data = own.read_bytes()
    own.unlink()
    own.write_bytes(data[:100])

    restore(store.directory, PLAN, step=16, abandoned_timeline=0)

    assert store.newest()[0] == (5, 0, 50.0)


class Killed(BaseException):
    """The process ends here."""


def killed_at(monkeypatch: pytest.MonkeyPatch, num_calls: int) -> None:
    """Let the process die before its n-th change of the disk."""
    done: list[str] = []

    def dying(name: str, change: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            if len(done) == num_calls:
                raise Killed
            done.append(name)
            return change(*arguments, **options)

        return call

    for name in ("link", "rename", "make_directory", "unlink", "remove_tree", "sync_directory"):
        monkeypatch.setattr(durable, name, dying(name, getattr(durable, name)))


def test_a_restore_that_is_killed_anywhere_is_done_again_to_the_same_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # many stores, no power loss
    num_calls, is_whole = 0, False
    while not is_whole:
        store = grown(tmp_path / f"store-{num_calls}")
        leftover = fragment_directory(store.directory, 1) / "v000000000007.record.tmp"
        leftover.write_bytes(b"half a record")
        earlier = fragment_directory(store.directory, 1) / "abandoned-timeline-0007"
        earlier.mkdir()
        with monkeypatch.context() as patch:
            killed_at(patch, num_calls)
            try:
                restore(store.directory, PLAN, step=8, abandoned_timeline=0)
                is_whole = True
            except Killed:
                pass

        restore(store.directory, PLAN, step=8, abandoned_timeline=0)

        assert store.newest() == [(2, 0, 20.0), (1, 0, 11.0)]
        assert valid_pins(store.directory, PLAN) == [8]
        for p in (0, 1):
            directory = fragment_directory(store.directory, p)
            (aside,) = directory.glob("abandoned-timeline-0000-after-000000000008")
            assert versions_in(aside) == [4, 5, 6]
        assert not earlier.exists()
        num_calls += 1
    assert num_calls > 20
