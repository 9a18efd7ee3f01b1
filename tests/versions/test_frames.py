"""Versions as frames: torn and damaged ones, snapshots, pins, what is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco.outer.optimizer import OuterOptimizer
from diloco.versions.frames import KEPT, frame_path, frame_versions_in, frames_in, headers_in
from diloco.versions.pins import restore, valid_pins
from diloco.versions.record import RecordInvalid, locate, record_path, versions_in
from diloco.versions.store import FragmentStore, PinRefused
from tests.versions.test_store import (
    FRAGMENT,
    PLAN,
    RULES,
    assert_same,
    commit,
    first,
    following,
    put,
)

RETAINED = 2
STEEPER = replace(RULES, optimizer=OuterOptimizer("nesterov", 0.1, 0.5, 0), seed=7)


@pytest.fixture
def store(tmp_path: Path) -> FragmentStore:
    return opened(tmp_path)


def opened(directory: Path, *, snapshot_rounds: int = 4, keeps_all: bool = False) -> FragmentStore:
    store = FragmentStore(
        directory, FRAGMENT, RETAINED, snapshot_rounds=snapshot_rounds, keeps_all=keeps_all
    )
    store.recover()
    return store


def directory_of(store: FragmentStore) -> Path:
    return store.store_dir / "fragment-0000"


def frame(store: FragmentStore, version: int) -> Path:
    return frame_path(directory_of(store), version)


def damage(store: FragmentStore, version: int, section: str) -> None:
    stored = frames_in(directory_of(store))[version]
    data = bytearray(stored.path.read_bytes())
    data[stored.sections[section].start] ^= 1
    stored.path.write_bytes(data)


def assert_newest(store: FragmentStore, version: int) -> None:
    recovered = FragmentStore(store.store_dir, FRAGMENT, RETAINED).recover()
    assert recovered is not None
    assert recovered.record.version == version


def test_every_fourth_version_is_a_snapshot_and_the_others_are_frames(store: FragmentStore) -> None:
    records = commit(store, 6)

    assert versions_in(directory_of(store)) == [4]
    assert frame_versions_in(directory_of(store)) == [5, 6]
    for record in records[4:]:
        assert_same(store.load(record.version), record)


def test_a_frame_is_half_a_byte_a_parameter_for_each_payload(tmp_path: Path) -> None:
    written = {}
    for rounds in (1, 1000):
        store = opened(tmp_path / str(rounds), snapshot_rounds=rounds)
        commit(store, 1)
        before = store.written_bytes
        put(store, following(store.load(1)))
        written[rounds] = (store.written_bytes - before) / FRAGMENT.padded_numel

    payloads = 3 * (1 / 2 + 2 / 128)  # two contributions and what was published, int4
    header = 0.15  # of so few parameters
    assert payloads < written[1000] < payloads + header
    assert 12 + payloads < written[1] < 12 + payloads + header


def test_frames_name_the_rules_that_they_were_made_by(store: FragmentStore) -> None:
    put(store, first())
    put(store, following(first()))
    second = following(following(first()), rules=STEEPER)
    put(store, second)

    assert_same(store.load(2), second)


def test_a_policy_may_change_with_any_start(tmp_path: Path) -> None:
    record, records = first(), []
    for rounds in (1, 1, 4, 4, 1, 1, 4, 4, 4, 4):
        put(opened(tmp_path, snapshot_rounds=rounds), record)
        records.append(record)
        assert_same(opened(tmp_path).recover().record, record, is_recovered=True)
        record = following(record)

    # A record leads to each retained version: 5, and 8, which is a multiple of four.
    assert versions_in(tmp_path / "fragment-0000") == [5, 8]
    for record in records[5:]:
        assert_same(opened(tmp_path).load(record.version), record)


@pytest.mark.parametrize("section", ["theta", "momentum", "published"])
def test_a_lane_of_a_frame_is_computed_alone(store: FragmentStore, section: str) -> None:
    records = commit(store, 3)

    _, body = store.load_lane(3, 1, section)

    expected = records[3].lanes[1].vectors[section]
    assert bytes(body) == expected.numpy().tobytes()
    codec, payload = store.load_lane(3, 1, "payload")
    assert (codec, bytes(payload)) == ("int4", bytes(records[3].payloads[1]))


# -- damage ----------------------------------------------------------------------------------------


def test_a_frame_torn_anywhere_was_published_and_is_lost(store: FragmentStore) -> None:
    """All of it was durable before it had its name."""
    records = commit(store, 3)
    path = frame(store, 3)
    data = path.read_bytes()
    starts = [section.start for section in frames_in(directory_of(store))[3].sections.values()]

    for end in sorted({0, 1, 8, 47, 48, *starts, *(s - 1 for s in starts), len(data) - 1}):
        path.write_bytes(data[:end])
        store = FragmentStore(store.store_dir, FRAGMENT, RETAINED)
        recovered = store.recover()

        assert store.lost == 3
        assert recovered is not None
        assert_same(recovered.record, records[2], is_recovered=True)


def test_a_frame_that_a_killed_writer_left_unfinished_is_removed(store: FragmentStore) -> None:
    records = commit(store, 2)
    torn = frame(store, 3).with_suffix(".frame.tmp")
    torn.write_bytes(frame(store, 2).read_bytes()[:-1])

    again = opened(store.store_dir)

    assert not torn.exists()
    assert again.lost == -1
    put(store, following(records[2]))
    assert_newest(store, 3)


def test_any_bit_flipped_in_a_frame_is_seen(store: FragmentStore) -> None:
    records = commit(store, 3)
    for version, stored in frames_in(directory_of(store)).items():
        data = stored.path.read_bytes()
        places = {"header": 0, **{name: s.start for name, s in stored.sections.items()}}
        for (name, begin), end in zip(
            places.items(), [*list(places.values())[1:], stored.end], strict=True
        ):
            for at, bit in ((begin, 0), (end - 1, 7)):
                damaged = bytearray(data)
                damaged[at] ^= 1 << bit
                stored.path.write_bytes(damaged)
                store = FragmentStore(store.store_dir, FRAGMENT, RETAINED)

                recovered = store.recover()

                # Without its payload a version cannot be sent, but be made again if it is the
                # newest, and those after it be computed.
                leads_on = name.startswith("payload/")
                newest = records[3 if leads_on else version - 1]
                assert recovered is not None
                assert_same(recovered.record, newest, is_recovered=True)
                if leads_on and version == 3:
                    record_path(directory_of(store), 3).unlink()
                with pytest.raises(RecordInvalid):
                    store.load(version)
        stored.path.write_bytes(data)


def test_the_newest_frame_is_made_again_where_its_contributions_are_whole(
    store: FragmentStore, caplog: pytest.LogCaptureFixture
) -> None:
    records = commit(store, 3)
    damage(store, 3, "payload/1")

    recovered = FragmentStore(store.store_dir, FRAGMENT, RETAINED).recover()

    assert recovered is not None
    assert_same(recovered.record, records[3], is_recovered=True)
    assert_same(store.load(3), records[3])
    assert "version 3 made again" in caplog.text
    put(store, following(records[3]))
    assert_newest(store, 4)


def test_a_newest_frame_that_cannot_be_made_again_is_lost(store: FragmentStore) -> None:
    records = commit(store, 3)
    damage(store, 3, "contribution/b/0")

    again = FragmentStore(store.store_dir, FRAGMENT, RETAINED)
    recovered = again.recover()

    assert recovered is not None
    assert_same(recovered.record, records[2], is_recovered=True)
    assert again.lost == 3


@pytest.mark.parametrize("newest", [5, 6])
def test_what_rots_in_a_snapshot_is_made_again_with_all_that_follows_from_it(
    store: FragmentStore, newest: int
) -> None:
    records = commit(store, 4)
    store.retained_versions = 4
    for version in range(5, newest + 1):
        records.append(following(records[-1]))
        put(store, records[version])
    path = record_path(directory_of(store), 4)
    data = bytearray(path.read_bytes())
    data[locate(path).sections["theta/0"].start] ^= 1
    path.write_bytes(data)
    damage(store, newest, "payload/0")

    again = FragmentStore(store.store_dir, FRAGMENT, 4)
    recovered = again.recover()

    assert recovered is not None
    assert_same(recovered.record, records[newest], is_recovered=True)
    assert again.lost == -1


def test_nothing_is_lost_after_a_resume(store: FragmentStore) -> None:
    """A damaged frame in the middle hides one, until both are moved aside."""
    records = commit(store, 3)
    store.pin(8, 1)
    damage(store, 2, "contribution/a/0")
    store.recover()
    assert store.lost == 3

    restore(store.store_dir, SimpleNamespace(fragments=(FRAGMENT,)), step=8, abandoned_timeline=0)

    assert_newest(store, 1)
    store.recover()
    assert store.lost == -1
    put(store, following(records[1]))
    assert_newest(store, 2)


def test_damage_in_the_middle_is_left_alone(store: FragmentStore) -> None:
    store._snapshot_rounds = 100
    commit(store, 5)
    damage(store, 3, "contribution/a/0")
    before = {path.name: path.read_bytes() for path in directory_of(store).iterdir()}

    assert_newest(store, 2)

    store.recover()
    assert store.lost == 5
    after = {path.name: path.read_bytes() for path in directory_of(store).iterdir()}
    assert after == before, "what they hold may be all that is left of versions 4 and 5"


def test_a_record_is_written_where_nothing_leads_to_a_frame(store: FragmentStore) -> None:
    records = commit(store, 2)
    frame(store, 1).unlink()
    third = following(records[2])

    put(store, third)

    assert versions_in(directory_of(store)) == [3]
    assert_same(store.load(3), third)


def test_a_damaged_snapshot_is_passed_by_where_frames_lead_past_it(store: FragmentStore) -> None:
    records = commit(store, 3)
    store.pin(8, 2)
    path = record_path(directory_of(store), 2)
    assert path.exists()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert_same(store.load(3), records[3])

    data = bytearray(path.read_bytes())
    data[len(data) // 4] ^= 1  # in a section of state
    path.write_bytes(data)

    assert_same(store.load(3), records[3])
    assert_same(store.load(2), records[2])


def test_a_frame_that_does_not_come_to_its_digest_is_damaged(store: FragmentStore) -> None:
    records = commit(store, 1)
    lie = replace(following(records[1]), lane_blake3=records[1].lane_blake3)
    put(store, lie)

    with pytest.raises(RecordInvalid, match="comes to blake3"):
        store.load(2)
    assert_newest(store, 1)


# -- snapshots, pins, headers --------------------------------------------------------------------


def test_a_frame_is_pinned_as_a_record(store: FragmentStore) -> None:
    records = commit(store, 3)

    store.pin(8, 2)
    store.pin(8, 2)

    pinned = FragmentStore(store.store_dir / "pins" / "step-000000000008", FRAGMENT, RETAINED)
    assert_same(pinned.load(2), records[2])
    assert valid_pins(store.store_dir, PLAN) == [8]
    with pytest.raises(PinRefused, match="version 9 is not here"):
        store.pin(16, 9)


@pytest.mark.parametrize("num_versions", [3, 6, 9])
def test_a_resume_goes_on_from_the_pinned_version(store: FragmentStore, num_versions: int) -> None:
    records = commit(store, 2)
    store.pin(8, 2)
    for _ in range(2, num_versions):
        records.append(following(records[-1]))
        put(store, records[-1])

    restore(store.store_dir, PLAN, step=8, abandoned_timeline=0)

    assert_newest(store, 2)
    put(opened(store.store_dir), following(records[2]))
    assert_newest(store, 3)


def test_retained_versions_stay_though_a_snapshot_has_come(store: FragmentStore) -> None:
    records = commit(store, 4)
    for newest in range(5, 10):
        records.append(following(records[-1]))
        put(store, records[-1])
        for version in range(newest - RETAINED, newest + 1):
            assert_same(store.load(version), records[version])

    assert versions_in(directory_of(store)) == [4, 8]
    assert frame_versions_in(directory_of(store)) == [5, 6, 7, 9]


def test_headers_of_forgotten_frames_stay_until_they_are_indexed(tmp_path: Path) -> None:
    indexed: set[int] = set()
    store = FragmentStore(
        tmp_path, FRAGMENT, RETAINED, is_indexed=indexed.__contains__, snapshot_rounds=3
    )
    store.recover()

    records = commit(store, 8)

    assert list(headers_in(directory_of(store))) == [record.header() for record in records]
    recovered = FragmentStore(tmp_path, FRAGMENT, RETAINED).recover()
    assert recovered is not None
    assert list(recovered.headers) == [record.header() for record in records]
    indexed.update(range(9))
    put(store, following(records[-1]))
    assert not list(tmp_path.rglob("*.header"))


@pytest.mark.parametrize("snapshot_rounds", [1, 3])
def test_everything_that_a_run_was_made_of_is_kept(tmp_path: Path, snapshot_rounds: int) -> None:
    store = opened(tmp_path, snapshot_rounds=snapshot_rounds, keeps_all=True)

    records = commit(store, 9)

    directory = directory_of(store)
    found = frames_in(directory / KEPT)
    kept = {**found, **frames_in(directory)}
    for record in records[1:]:
        path = record_path(directory, record.version)
        if path.exists():
            assert_same(store.load(record.version), record)
            continue
        stored = kept[record.version]
        for island, lanes in record.contributions.items():
            for lane_id, contribution in enumerate(lanes):
                assert bytes(stored.read(f"contribution/{island}/{lane_id}")) == contribution
        assert bytes(stored.read("payload/1")) == bytes(record.payloads[1])
    assert_same(store.load(0), records[0])
    assert_newest(store, 9)


@pytest.mark.parametrize(("every", "lag"), [(3, 0), (2, 1)])
def test_pins_put_off_no_snapshot_and_all_is_kept(tmp_path: Path, every: int, lag: int) -> None:
    """A pin makes a record of a frame, of the newest version or of one before it."""
    store = opened(tmp_path, keeps_all=True)
    directory = directory_of(store)
    records = commit(store, 0)

    for version in range(1, 15):
        records.append(following(records[-1]))
        put(store, records[-1])
        if version % every == lag and version > lag:
            store.pin(version, version - lag)
        assert len(frames_in(directory)) < RETAINED + 2 * 4

    assert_same(opened(tmp_path).recover().record, records[-1], is_recovered=True)
    kept = {**frames_in(directory / KEPT), **frames_in(directory)}
    assert {*kept, *versions_in(directory)} == set(range(15))
    for version, stored in kept.items():
        stored.verify()
        assert stored.header["lane_digests"] == records[version].header()["lane_digests"]


def test_what_the_guard_knew_is_kept_too(tmp_path: Path) -> None:
    store = opened(tmp_path, snapshot_rounds=1, keeps_all=True)
    directory = directory_of(store)
    put(store, replace(following(commit(store, 0)[0]), guard=b"usual sizes"))
    for _ in range(RETAINED + 1):
        put(store, following(store.newest()))

    assert frames_in(directory / KEPT)[1].read("guard") == b"usual sizes"


def test_of_a_damaged_frame_its_record_is_kept(tmp_path: Path) -> None:
    store = opened(tmp_path, snapshot_rounds=8, keeps_all=True)
    commit(store, 5)
    store.pin(8, 2)
    damage(store, 2, "payload/0")

    store._retention.forget(2)

    frames_in(directory_of(store) / KEPT)[2].verify()
