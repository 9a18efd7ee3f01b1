"""Versions as frames of a log: torn and damaged segments, snapshots, pins, what is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco.outer.optimizer import OuterOptimizer
from diloco.versions.log import (
    KEPT,
    damaged_path,
    frames_in,
    frames_of,
    headers_in,
    keep_segment,
    keep_without_state,
    segment_path,
    segments_in,
)
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


def segment(store: FragmentStore, start: int = 0) -> Path:
    return segment_path(directory_of(store), start)


def damage(store: FragmentStore, version: int, section: str) -> None:
    frame = frames_in(directory_of(store))[version]
    data = bytearray(frame.path.read_bytes())
    data[frame.sections[section].start] ^= 1
    frame.path.write_bytes(data)


def assert_newest(store: FragmentStore, version: int) -> None:
    recovered = FragmentStore(store.store_dir, FRAGMENT, RETAINED).recover()
    assert recovered is not None
    assert recovered.record.version == version


def test_every_fourth_version_is_a_snapshot_and_the_others_are_frames(store: FragmentStore) -> None:
    records = commit(store, 6)

    assert versions_in(directory_of(store)) == [4]
    assert segments_in(directory_of(store)) == [4]
    assert sorted(frames_in(directory_of(store))) == [5, 6]
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

    # 9 is four after the snapshot at 5; until then frames 6, 7 and 8 follow that.
    assert versions_in(tmp_path / "fragment-0000") == [5, 9]
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


def test_a_segment_torn_anywhere_ends_at_the_last_whole_frame(store: FragmentStore) -> None:
    """What is left of a frame with a header may have been published, and is in doubt."""
    records = commit(store, 3)
    path = segment(store)
    data = path.read_bytes()
    frames = list(frames_of(path))
    ends = [frame.end for frame in frames]
    borders = {*ends, *(section.start for frame in frames for section in frame.sections.values())}

    for end in sorted({0, 1, 8, 47, 48, *borders, *(b - 1 for b in borders)} - {len(data)}):
        path.write_bytes(data[:end])
        store = FragmentStore(store.store_dir, FRAGMENT, RETAINED)
        recovered = store.recover()

        whole = sum(1 for e in ends if e <= end)
        aside = damaged_path(directory_of(store), whole + 1)
        assert (store.lost, store.is_in_doubt) == (-1, end not in (0, *ends))
        if store.is_in_doubt:
            assert aside.read_bytes() == data[([0, *ends][whole]) : end]
            store.recover()
            assert store.is_in_doubt, "until it is published, or said not to be"
            aside.unlink()
        assert recovered is not None
        assert_same(recovered.record, records[whole], is_recovered=True)
        assert path.stat().st_size == ([0, *ends][whole]), "what never existed is cut off"


def test_a_segment_that_is_forgotten_while_it_is_read_ends_there(store: FragmentStore) -> None:
    commit(store, 3)
    frames = frames_of(segment(store))

    assert next(frames).header["version"] == 1
    segment(store).unlink()

    assert list(frames) == []


@pytest.mark.parametrize("fill", [b"\x00", b"\xff", b"DILOREC2"])
def test_what_a_killed_writer_left_after_the_last_frame_has_no_header_or_is_in_doubt(
    store: FragmentStore, fill: bytes
) -> None:
    records = commit(store, 2)
    whole = segment(store).read_bytes()
    segment(store).write_bytes(whole + fill * 3000)

    again = opened(store.store_dir)
    assert_same(again.recover().record, records[2], is_recovered=True)
    assert (again.lost, again.is_in_doubt) == (-1, any(fill))
    assert segment(store).read_bytes() == whole
    put(store, following(records[2]))
    assert_newest(store, 3)


@pytest.mark.parametrize("num_zeros", [8, 48, 512, -1], ids=["8", "48", "512", "the header"])
def test_a_newest_frame_that_lost_the_beginning_of_its_header_is_in_doubt(
    store: FragmentStore, num_zeros: int
) -> None:
    records = commit(store, 2)
    last = frames_in(directory_of(store))[2]
    header_bytes = min(section.start for section in last.sections.values()) - last.start
    num_zeros = header_bytes if num_zeros < 0 else num_zeros
    data = bytearray(last.path.read_bytes())
    data[last.start : last.start + num_zeros] = bytes(num_zeros)
    last.path.write_bytes(data)

    again = opened(store.store_dir)

    assert_same(again.load(1), records[1])
    assert again.is_in_doubt == (num_zeros < header_bytes), "or it was never written"
    assert frames_in(directory_of(again)).keys() == {1}


def test_any_bit_flipped_in_a_frame_is_seen(store: FragmentStore) -> None:
    records = commit(store, 3)
    path = segment(store)
    data = path.read_bytes()
    frames = list(frames_of(path))
    begins = [0, *(frame.end for frame in frames)]
    for number, frame in enumerate(frames):
        places = {"header": begins[number]}
        places |= {name: section.start for name, section in frame.sections.items()}
        for (name, begin), end in zip(
            places.items(), [*list(places.values())[1:], frame.end], strict=True
        ):
            for at, bit in ((begin, 0), (end - 1, 7)):
                damaged = bytearray(data)
                damaged[at] ^= 1 << bit
                path.write_bytes(damaged)
                store = FragmentStore(store.store_dir, FRAGMENT, RETAINED)

                recovered = store.recover()

                # Without its payload a version cannot be sent, but be made again if it is the
                # newest, and those after it be computed.
                leads_on = name.startswith("payload/")
                assert recovered is not None
                assert_same(recovered.record, records[3 if leads_on else number], is_recovered=True)
                if leads_on and number == 2:
                    record_path(directory_of(store), 3).unlink()
                with pytest.raises(RecordInvalid):
                    store.load(number + 1)


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


def test_a_newest_frame_that_cannot_be_made_again_is_set_aside(
    store: FragmentStore, caplog: pytest.LogCaptureFixture
) -> None:
    records = commit(store, 3)
    third = frames_in(directory_of(store))[3]
    damage(store, 3, "contribution/b/0")
    data = segment(store).read_bytes()

    again = FragmentStore(store.store_dir, FRAGMENT, RETAINED)
    recovered = again.recover()

    assert recovered is not None
    assert_same(recovered.record, records[2], is_recovered=True)
    assert (again.lost, again.is_in_doubt) == (-1, True)
    aside = damaged_path(directory_of(store), 3)
    assert aside.read_bytes() == data[third.start :]
    assert segment(store).read_bytes() == data[: third.start]
    assert "version 3 is damaged and set aside" in caplog.text
    put(store, following(records[2]))
    damage(store, 3, "contribution/a/0")
    put(store, following(store.load(2)))
    again.recover()
    assert (again.lost, again.is_in_doubt) == (-1, False)
    assert_newest(store, 3)
    assert aside.exists(), "until there is another"


@pytest.mark.parametrize("after_it", ["damaged", "torn"])
def test_a_frame_that_rots_is_lost_where_another_was_begun_after_it(
    store: FragmentStore, after_it: str
) -> None:
    commit(store, 3)
    damage(store, 2, "contribution/b/0")
    if after_it == "damaged":
        damage(store, 3, "contribution/b/0")
    else:
        segment(store).write_bytes(segment(store).read_bytes()[:-1])

    again = FragmentStore(store.store_dir, FRAGMENT, RETAINED)
    recovered = again.recover()

    assert recovered is not None
    assert (recovered.record.version, again.lost, again.is_in_doubt) == (1, 2, False)


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
    assert (again.lost, again.is_in_doubt) == (-1, False)


def test_nothing_is_lost_after_a_resume(store: FragmentStore) -> None:
    """A damaged frame in the middle hides one, until the segment ends before both."""
    records = commit(store, 3)
    store.pin(8, 1)
    data = bytearray(segment(store).read_bytes())
    data[frames_in(directory_of(store))[2].start] ^= 1
    segment(store).write_bytes(data)
    store.recover()
    assert store.lost == 2

    restore(store.store_dir, SimpleNamespace(fragments=(FRAGMENT,)), step=8, abandoned_timeline=0)

    assert_newest(store, 1)
    store.recover()
    assert store.lost == -1
    put(store, following(records[1]))
    assert_newest(store, 2)


def test_damage_in_the_middle_is_left_alone_and_the_log_goes_on_from_a_snapshot(
    store: FragmentStore,
) -> None:
    store._snapshot_rounds = 100
    records = commit(store, 5)
    path = segment(store)
    data = bytearray(path.read_bytes())
    data[list(frames_of(path))[2].sections["contribution/a/0"].start] ^= 1
    path.write_bytes(data)

    assert_newest(store, 2)
    assert path.read_bytes() == data, "what it holds may be all that is left of versions 4 and 5"
    third = following(records[2], rules=STEEPER)
    put(store, third)
    assert_same(opened(store.store_dir).recover().record, third, is_recovered=True)
    fourth = following(third)
    put(store, fourth)

    assert versions_in(directory_of(store)) == [0, 3]
    assert_same(opened(store.store_dir).recover().record, fourth, is_recovered=True)


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
    lie = replace(following(records[1]), lane_digests=records[1].lane_digests)
    put(store, lie)

    with pytest.raises(RecordInvalid, match="comes to digest"):
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
    assert segments_in(directory_of(store)) == [4, 8]


def test_headers_of_forgotten_frames_stay_until_they_are_indexed(tmp_path: Path) -> None:
    indexed: set[int] = set()
    store = FragmentStore(
        tmp_path, FRAGMENT, RETAINED, is_indexed=indexed.__contains__, snapshot_rounds=3
    )
    store.recover()

    records = commit(store, 8)

    assert headers_in(directory_of(store)) == [record.header() for record in records]
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
        frame = kept[record.version]
        for island, lanes in record.contributions.items():
            for lane_id, contribution in enumerate(lanes):
                assert bytes(frame.read(f"contribution/{island}/{lane_id}")) == contribution
        assert bytes(frame.read("payload/1")) == bytes(record.payloads[1])
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
        assert all(len(list(frames_of(segment(store, s)))) < 4 for s in segments_in(directory))
        assert len(frames_in(directory)) < RETAINED + 2 * 4

    assert_same(opened(tmp_path).recover().record, records[-1], is_recovered=True)
    kept = {**frames_in(directory / KEPT), **frames_in(directory)}
    assert {*kept, *versions_in(directory)} == set(range(15))
    for version, frame in kept.items():
        frame.verify()
        assert frame.header["lane_digests"] == records[version].header()["lane_digests"]


def test_what_the_guard_knew_is_kept_too(tmp_path: Path) -> None:
    store = opened(tmp_path, snapshot_rounds=1)
    directory = directory_of(store)
    put(store, replace(following(commit(store, 0)[0]), guard=b"usual sizes"))

    keep_without_state(directory, locate(record_path(directory, 1)))

    assert frames_in(directory / KEPT)[1].read("guard") == b"usual sizes"


def test_a_version_that_is_kept_twice_does_not_hide_what_is_kept_after_it(tmp_path: Path) -> None:
    store = opened(tmp_path, snapshot_rounds=8)
    commit(store, 5)
    directory = directory_of(store)
    store.pin(8, 2)
    second = locate(record_path(directory, 2))
    (directory / KEPT).mkdir()
    keep_without_state(directory, second)
    assert not segments_in(directory / KEPT), "its frame will be kept with those after it"
    damaged = bytearray(segment(store).read_bytes())
    damaged[frames_in(directory)[2].sections["payload/0"].start] ^= 1
    segment(store).write_bytes(damaged)

    keep_without_state(directory, second)
    keep_segment(directory, segment(store))

    kept = frames_in(directory / KEPT)
    assert sorted(kept) == [1, 2, 3, 4, 5]
    kept[2].verify()
