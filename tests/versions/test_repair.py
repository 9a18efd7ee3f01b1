"""A store is mended out of what is whole; what cannot be is said, and left alone."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest

from diloco.versions.frames import frame_path, locate_version
from diloco.versions.pins import valid_pins
from diloco.versions.record import (
    CONTRIBUTION,
    RecordInvalid,
    StoredRecord,
    locate,
    record_path,
)
from diloco.versions.repair import Condition, RepairFinding, repair_fragment
from diloco.versions.store import FragmentStore
from diloco.versions.version import VersionRecord
from tests.versions.test_store import FRAGMENT, PLAN, assert_same, commit


@pytest.fixture(params=[1, 4], ids=["snapshot", "log"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FragmentStore:
    store = FragmentStore(tmp_path, FRAGMENT, 4, snapshot_rounds=request.param)
    store.recover()
    return store


@pytest.fixture
def records(store: FragmentStore) -> list[VersionRecord]:
    """Versions 0 to 4; of a log, 0 and 4 are whole records."""
    return commit(store, 4)


def damage(store: FragmentStore, version: int, section: str) -> None:
    stored = locate_version(store.store_dir / "fragment-0000", version)
    data = bytearray(stored.path.read_bytes())
    data[stored.sections[section].start] ^= 1
    stored.path.write_bytes(data)


def notable(store: FragmentStore) -> list[RepairFinding]:
    return [f for f in repair_fragment(store) if f.condition is not Condition.WHOLE]


def test_a_whole_store_stays_as_it_is(
    store: FragmentStore, records: list[VersionRecord], tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in tmp_path.rglob("v*")}

    found = list(repair_fragment(store))

    assert [f.what for f in found] == [f"version {v}" for v in range(5)]
    assert {f.condition for f in found} == {Condition.WHOLE}
    assert {path: path.read_bytes() for path in tmp_path.rglob("v*")} == before


def test_what_is_whole_is_verified_without_all_contributions_in_memory(
    store: FragmentStore, records: list[VersionRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(version: int, *, with_contributions: bool = True) -> VersionRecord:
        assert not with_contributions, "of a thousand islands they are more than any memory"
        return FragmentStore.load(store, version, with_contributions=False)

    monkeypatch.setattr(store, "load", load)

    assert notable(store) == []


def test_a_version_is_made_again_with_one_contribution_in_memory(
    store: FragmentStore, records: list[VersionRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Watched(bytearray):
        __hash__ = object.__hash__

    read, most = StoredRecord.read, [0]
    held: weakref.WeakSet[Watched] = weakref.WeakSet()

    def watched(stored: StoredRecord, name: str) -> bytearray:
        section = Watched(read(stored, name))
        if name.startswith(CONTRIBUTION):
            held.add(section)
            most.append(len(held))
        return section

    damage(store, 4, "payload/0")
    monkeypatch.setattr(StoredRecord, "read", watched)

    store.make_again(4)

    assert max(most) <= 2 < len(records[4].contributions) * len(FRAGMENT.lanes) <= len(most)
    assert_same(store.load(4), records[4])


@pytest.mark.parametrize("section", ["payload/0", "payload/1"])
@pytest.mark.parametrize("version", [2, 4])
def test_a_payload_is_made_again(
    store: FragmentStore, records: list[VersionRecord], version: int, section: str
) -> None:
    damage(store, version, section)

    (finding,) = notable(store)

    assert (finding.what, finding.condition) == (f"version {version}", Condition.REPAIRED)
    assert section in finding.detail
    for record in records:
        assert_same(store.load(record.version), record)
    assert not notable(store)


@pytest.mark.parametrize("section", ["theta/0", "published/1", "momentum/0"])
def test_state_is_made_again_from_the_version_before(
    store: FragmentStore, records: list[VersionRecord], section: str
) -> None:
    damage(store, 4, section)

    (finding,) = notable(store)

    assert (finding.what, finding.condition) == ("version 4", Condition.REPAIRED)
    assert_same(store.load(4), records[4])


def test_a_contribution_is_nowhere_else_and_its_version_is_served(
    store: FragmentStore, records: list[VersionRecord]
) -> None:
    damage(store, 4, "contribution/a/0")

    (finding,) = notable(store)

    assert (finding.what, finding.condition) == ("version 4", Condition.DAMAGED)
    assert "contribution/a/0" in finding.detail
    recovered = store.recover()
    assert recovered is not None
    assert_same(recovered.record, records[4], is_recovered=True)
    with pytest.raises(RecordInvalid, match="contribution/a/0"):
        store.load(4)


def test_a_newest_frame_without_its_contributions_is_told_as_damaged(tmp_path: Path) -> None:
    store = FragmentStore(tmp_path, FRAGMENT, 4, snapshot_rounds=4)
    store.recover()
    records = commit(store, 3)
    damage(store, 3, "contribution/a/0")

    found = notable(store)

    assert [(f.what, f.condition) for f in found] == [("version 3", Condition.DAMAGED)]
    assert "contribution/a/0" in found[0].detail
    assert_same(store.load(2), records[2])


def test_a_torn_frame_is_told_as_damaged_and_an_unfinished_one_is_removed(tmp_path: Path) -> None:
    store = FragmentStore(tmp_path, FRAGMENT, 4, snapshot_rounds=4)
    store.recover()
    commit(store, 3)
    path = frame_path(tmp_path / "fragment-0000", 3)
    whole = path.read_bytes()

    unfinished = path.with_suffix(".frame.tmp")
    unfinished.write_bytes(whole[:-1])
    (finding,) = notable(store)
    assert (finding.what, finding.condition) == (unfinished.name, Condition.REPAIRED)

    path.write_bytes(whole[:-1])
    (finding,) = notable(store)
    assert (finding.what, finding.condition) == ("version 3", Condition.DAMAGED)


def test_version_0_is_made_of_nothing_here(
    store: FragmentStore, records: list[VersionRecord]
) -> None:
    damage(store, 0, "theta/0")

    found = notable(store)

    assert found[0].what == "version 0"
    assert found[0].condition is Condition.DAMAGED
    assert_same(store.load(4), records[4])


def test_leftovers_of_a_killed_writer_go(
    store: FragmentStore, records: list[VersionRecord], tmp_path: Path
) -> None:
    leftover = tmp_path / "fragment-0000" / "v000000000005.record.tmp"
    leftover.write_bytes(b"half a record")

    (finding,) = notable(store)

    assert (finding.what, finding.condition) == (leftover.name, Condition.REPAIRED)
    assert not leftover.exists()


def test_a_pin_takes_the_record_of_the_store_again(
    store: FragmentStore, records: list[VersionRecord], tmp_path: Path
) -> None:
    store.pin(16, 4)
    damage(store, 4, "theta/1")  # one file under two names
    assert valid_pins(tmp_path, PLAN) == []

    found = notable(store)

    assert [f.condition for f in found] == [Condition.REPAIRED] * 2
    assert valid_pins(tmp_path, PLAN) == [16]
    own = record_path(tmp_path / "fragment-0000", 4)
    pinned = tmp_path / "pins" / "step-000000000016" / "fragment-0000" / own.name
    assert own.samefile(pinned)
    assert locate(pinned).header == records[4].header()
