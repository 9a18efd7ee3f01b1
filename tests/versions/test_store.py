"""The durable record of a version: it exists if and only if it is valid, byte by byte."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.compression.base import to_bytes
from diloco.compression.registry import get_codec
from diloco.outer.combination import mean_of
from diloco.outer.fragments import TensorSpec, make_plan
from diloco.outer.optimizer import OuterOptimizer
from diloco.protocol.rounds.terms import Contributor, RecordExpiry, RoundKey
from diloco.versions.frames import headers_in
from diloco.versions.publication import LaneState, PublicationRules, lane_blake3
from diloco.versions.record import RecordInvalid, header_path, record_path
from diloco.versions.store import FragmentStore
from diloco.versions.value_digest import lane_digest
from diloco.versions.version import VersionRecord
from tests.remaking import publish_lane, recompute

# 128 blocks, 65,536 bytes a lane: two lanes.
PLAN = make_plan([TensorSpec("w", (32768,))], num_fragments=1)
FRAGMENT = PLAN.fragments[0]
RULES = PublicationRules("int4", "int4", OuterOptimizer("nesterov", 0.7, 0.9, 2), seed=0)
RETAINED = 2


@pytest.fixture
def store(tmp_path: Path) -> FragmentStore:
    store = FragmentStore(tmp_path / "state" / "store", FRAGMENT, RETAINED)
    assert store.recover() is None
    return store


@pytest.fixture(params=[1, 3], ids=["snapshot", "log"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> FragmentStore:
    """A store of each policy; `log` has a snapshot every third version."""
    store = FragmentStore(
        tmp_path / "state" / "store", FRAGMENT, RETAINED, snapshot_rounds=request.param
    )
    assert store.recover() is None
    return store


def path_of(store: FragmentStore, version: int) -> Path:
    return record_path(store._directory, version)


def first(seed: int = 0) -> VersionRecord:
    generator = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(lane.numel, generator=generator) for lane in FRAGMENT.lanes]
    return VersionRecord(
        version=0,
        fragment_id=0,
        timeline=0,
        key=None,
        is_flush=False,
        payload_codec="float32",
        lane_digests=tuple(map(lane_digest, vectors)),
        lane_blake3=tuple(map(lane_blake3, vectors)),
        lanes=tuple(LaneState(v, v, torch.zeros_like(v)) for v in vectors),
    )


def following(
    before: VersionRecord,
    *,
    rules: PublicationRules = RULES,
    is_flush: bool = False,
    attempt: int = 0,
) -> VersionRecord:
    """The next version, from two islands' seeded contributions."""
    generator = torch.Generator().manual_seed(100 + before.version)
    codec = get_codec(rules.uplink_codec)
    contributions = {
        island: [
            bytes(to_bytes(codec.encode(torch.randn(lane.numel, generator=generator))))
            for lane in FRAGMENT.lanes
        ]
        for island in ("a", "b")
    }
    contributors = tuple(
        Contributor(island, 1, tokens, 24, 24, (b"\x01" * 32, b"\x02" * 32))
        for island, tokens in (("a", 300), ("b", 100))
    )
    made = [
        publish_lane(
            state,
            [contributions[c.island][lane_id] for c in contributors],
            mean_of([c.weight_tokens for c in contributors], FRAGMENT.padded_numel),
            rules,
            fragment=FRAGMENT,
            lane_id=lane_id,
            key=RoundKey(0, 0, before.version, attempt),
            is_flush=is_flush,
        )
        for lane_id, state in enumerate(before.lanes)
    ]
    return VersionRecord(
        version=before.version + 1,
        fragment_id=0,
        timeline=0,
        key=RoundKey(0, 0, before.version, attempt),
        is_flush=is_flush,
        payload_codec=rules.payload_codec(is_flush),
        lane_digests=tuple(lane.digest for lane in made),
        lane_blake3=tuple(lane.blake3 for lane in made),
        lanes=tuple(lane.state for lane in made),
        payloads=tuple(lane.payload for lane in made),
        contributors=contributors,
        contributions=contributions,
        refused={"c": "declined: not finite"},
        rules=rules.to_json(),
    )


def put(store: FragmentStore, record: VersionRecord) -> None:
    """Commit a version as a merger does."""
    sizes = {i: [len(lane) for lane in lanes] for i, lanes in record.contributions.items()}
    payload_bytes = [len(payload) for payload in record.payloads]
    store.commit(record, store.draft(record, payload_bytes, sizes))


def commit(store: FragmentStore, num_versions: int) -> list[VersionRecord]:
    """Commit version 0 and some more."""
    records = [first()]
    while len(records) <= num_versions:
        records.append(following(records[-1]))
    for record in records:
        put(store, record)
    return records


def assert_same(found: VersionRecord, made: VersionRecord, *, is_recovered: bool = False) -> None:
    """Compare all; what a start of a syncer has read is without contributions."""
    assert found.header() == made.header()
    assert found.key == made.key
    assert found.payloads == made.payloads
    contributions = {k: [bytes(x) for x in v] for k, v in found.contributions.items()}
    assert contributions == ({} if is_recovered else made.contributions)
    for one, other in zip(found.lanes, made.lanes, strict=True):
        for name in ("theta", "published", "momentum"):
            assert torch.equal(getattr(one, name), getattr(other, name))


def test_an_empty_store_has_no_version(store: FragmentStore) -> None:
    assert store.recover() is None


def test_a_record_comes_back_as_it_was_written(either: FragmentStore) -> None:
    records = commit(either, 2)

    for record in records:
        assert_same(either.load(record.version), record)
    recovered = either.recover()
    assert recovered is not None
    assert_same(recovered.record, records[2], is_recovered=True)
    assert recovered.attempt == 0


def test_the_outcomes_of_retained_rounds_are_recovered(either: FragmentStore) -> None:
    commit(either, 2)

    recovered = either.recover()

    assert recovered is not None
    assert sorted(recovered.past) == [0, 1]
    assert recovered.past[1].attempt == 0
    assert recovered.past[1].contributors == {("a", 1), ("b", 1)}
    assert recovered.past[1].refused == {"c": "declined: not finite"}


def test_only_the_retained_versions_are_kept(store: FragmentStore) -> None:
    commit(store, 5)

    kept = [path.name for path in path_of(store, 0).parent.glob("*.record")]
    assert sorted(kept) == [path_of(store, version).name for version in (3, 4, 5)]
    with pytest.raises(RecordInvalid, match="does not exist"):
        store.load(2)


# -- damage --------------------------------------------------------------------------------------


def borders(data: bytes) -> dict[str, int]:
    """Offsets at which a section of a record ends."""
    header_bytes = int.from_bytes(data[8:16], "little")
    at = 48 + header_bytes
    ends = {"magic": 8, "length": 16, "prefix": 48, "header": at}
    for section in json.loads(data[48:at])["sections"]:
        at += section["bytes"]
        ends[section["name"]] = at
    assert at == len(data)
    return ends


def assert_previous(store: FragmentStore, records: list[VersionRecord]) -> None:
    with pytest.raises(RecordInvalid):
        store.load(records[-1].version)
    recovered = store.recover()
    assert recovered is not None
    assert_same(recovered.record, records[-2], is_recovered=True)


def assert_served_and_found_by_who_reads_it(
    store: FragmentStore, records: list[VersionRecord]
) -> None:
    assert_made_again(store, records)
    with pytest.raises(RecordInvalid, match="contribution/"):
        store.unverified()[0].verify()


def assert_made_again(store: FragmentStore, records: list[VersionRecord]) -> None:
    with pytest.raises(RecordInvalid):
        store.load(records[-1].version)
    recovered = store.recover()
    assert recovered is not None
    assert_same(recovered.record, records[-1], is_recovered=True)


@pytest.mark.parametrize("is_pipe", [True, False], ids=["pipe", "link-to-itself"])
def test_what_is_no_file_in_the_place_of_a_record_is_damage(
    store: FragmentStore, is_pipe: bool
) -> None:
    commit(store, 2)
    path = path_of(store, 2)
    path.unlink()
    os.mkfifo(path) if is_pipe else path.symlink_to(path)

    with pytest.raises(RecordInvalid, match="is no file" if is_pipe else "cannot be"):
        store.load(2)


def test_a_record_torn_at_any_border_was_published_and_is_lost(store: FragmentStore) -> None:
    """All of it was durable before it had its name."""
    records = commit(store, 2)
    path = path_of(store, 2)
    data = path.read_bytes()
    ends = borders(data)
    assert "contribution/b/1" in ends

    for end in sorted({0, 1, *ends.values(), *(end - 1 for end in ends.values())} - {len(data)}):
        path.write_bytes(data[:end])
        assert_previous(store, records)
        assert store.lost == 2


def test_a_record_with_any_bit_flipped_is_made_again_or_found_or_does_not_exist(
    store: FragmentStore,
) -> None:
    """Of its header there is no other copy; contributions nobody reads at a start."""
    records = commit(store, 2)
    path = path_of(store, 2)
    data = path.read_bytes()
    ends = borders(data)

    for begin, (name, end) in zip([0, *ends.values()], ends.items(), strict=False):
        for at, bit in ((begin, 0), ((begin + end) // 2, 4), (end - 1, 7)):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            if name.startswith("contribution/"):
                assert_served_and_found_by_who_reads_it(store, records)
            elif "/" in name:
                assert_made_again(store, records)
                assert path.read_bytes() == data
            else:
                assert_previous(store, records)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
        lambda data: bytes(len(data)),
        lambda data: b"",
    ],
    ids=["second-half-zero", "all-zero", "empty"],
)
def test_other_damage(store: FragmentStore, damage: Callable[[bytes], bytes]) -> None:
    records = commit(store, 1)
    path = path_of(store, 1)

    path.write_bytes(damage(path.read_bytes()))

    assert_previous(store, records)


def test_a_record_that_is_too_long_is_made_again(store: FragmentStore) -> None:
    records = commit(store, 1)
    path_of(store, 1).write_bytes(path_of(store, 1).read_bytes() + b"\x00")

    assert_made_again(store, records)


def test_the_record_of_another_version_or_fragment_is_not_taken(
    store: FragmentStore, tmp_path: Path
) -> None:
    commit(store, 1)
    other = replace(FRAGMENT, fragment_id=1)

    os.replace(path_of(store, 1), path_of(store, 7))
    with pytest.raises(RecordInvalid, match="version 1 of fragment 0"):
        store.load(7)
    with pytest.raises(RecordInvalid, match="version 0 of fragment 0"):
        elsewhere = FragmentStore(tmp_path, other, RETAINED)
        elsewhere.recover()
        path_of(elsewhere, 0).write_bytes(path_of(store, 0).read_bytes())
        elsewhere.load(0)


def test_a_record_of_another_plan_is_not_taken(store: FragmentStore, tmp_path: Path) -> None:
    store.commit(first())
    other = make_plan([TensorSpec("w", (32768 + 256,))], num_fragments=1).fragments[0]
    assert len(other.lanes) == len(FRAGMENT.lanes)

    with pytest.raises(RecordInvalid, match="plan has"):
        FragmentStore(tmp_path / "state" / "store", other, RETAINED).load(0)


def test_a_damaged_version_in_between_does_not_hide_the_newest(store: FragmentStore) -> None:
    records = commit(store, 2)
    path_of(store, 1).write_bytes(b"rot")

    recovered = store.recover()

    assert recovered is not None
    assert_same(recovered.record, records[2], is_recovered=True)
    assert sorted(recovered.past) == [1]


@pytest.mark.parametrize(("number", "is_lost"), [(errno.EIO, True), (errno.EMFILE, False)])
def test_what_the_disk_does_not_give_back_is_lost_and_a_lack_of_descriptors_is_not_that(
    store: FragmentStore, monkeypatch: pytest.MonkeyPatch, number: int, is_lost: bool
) -> None:
    commit(store, 2)
    newest, opened = path_of(store, 2), Path.open

    def failing(path: Path, *given: Any, **named: Any) -> Any:  # of other threads' files, too
        if path == newest:
            raise OSError(number, os.strerror(number))
        return opened(path, *given, **named)

    monkeypatch.setattr(Path, "open", failing)
    if is_lost:
        store.recover()
        assert store.lost == 2
    else:
        with pytest.raises(OSError, match="open files"):
            store.recover()


def test_what_is_skipped_is_said_once_however_often_it_is_read(
    store: FragmentStore, caplog: pytest.LogCaptureFixture
) -> None:
    commit(store, 3)
    for version in (1, 3):
        path_of(store, version).write_bytes(b"rot")

    for _ in range(3):
        store.recover()

    assert [caplog.text.count(f"version {version} skipped") for version in (1, 3)] == [1, 1]


def test_two_versions_in_a_row_are_made_again(store: FragmentStore) -> None:
    records = commit(store, 3)
    for version in (2, 3):
        data = bytearray(path_of(store, version).read_bytes())
        data[borders(bytes(data))["header"]] ^= 1  # of theta
        path_of(store, version).write_bytes(data)

    recovered = store.recover()

    assert recovered is not None
    assert_same(recovered.record, records[3], is_recovered=True)
    assert store.lost == -1


def test_what_a_killed_writer_left_is_removed_and_is_no_version(either: FragmentStore) -> None:
    records = commit(either, 1)
    leftover = path_of(either, 2).with_name(path_of(either, 2).name + ".tmp")
    leftover.write_bytes(path_of(either, 0).read_bytes())

    recovered = either.recover()

    assert recovered is not None
    assert_same(recovered.record, records[1], is_recovered=True)
    assert not leftover.exists()


def test_a_version_is_written_again_over_a_damaged_one(store: FragmentStore) -> None:
    records = commit(store, 2)
    path_of(store, 2).write_bytes(b"torn")

    store.commit(records[2])

    assert_same(store.load(2), records[2])


# -- power loss ----------------------------------------------------------------------------------


def test_every_write_is_synced_before_the_record_has_its_name(
    store: FragmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    sync, rename = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        steps.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        sync(descriptor)

    def note_rename(source: Path, target: Path) -> None:
        steps.append(f"rename {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)

    store.commit(first())

    name = path_of(store, 0).name
    assert steps == [f"sync {name}.tmp", f"rename {name}", "sync fragment-0000"]


def test_the_directories_of_a_new_store_are_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = os.fsync

    def note_sync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note_sync)

    FragmentStore(tmp_path / "state" / "store", FRAGMENT, RETAINED).recover()

    # The last: names left by a writer that was killed before it could make them durable.
    assert synced == [tmp_path.name, "state", "store", "fragment-0000"]


# -- headers that were not indexed -----------------------------------------------------------------


def kept_headers(store: FragmentStore) -> list[int]:
    return sorted(int(path.stem[1:]) for path in path_of(store, 0).parent.glob("*.header"))


def test_headers_outlive_their_records_until_the_coordinator_has_them(tmp_path: Path) -> None:
    indexed: set[int] = set()
    store = FragmentStore(tmp_path, FRAGMENT, RETAINED, is_indexed=indexed.__contains__)
    store.recover()
    records = commit(store, 5)

    assert kept_headers(store) == [0, 1, 2]
    recovered = FragmentStore(tmp_path, FRAGMENT, RETAINED).recover()
    assert recovered is not None
    assert list(recovered.headers) == [record.header() for record in records]

    indexed.update(range(5))
    store.commit(following(records[-1]))
    assert kept_headers(store) == []


def test_a_header_that_rots_is_passed_over_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FragmentStore(tmp_path, FRAGMENT, RETAINED, is_indexed=lambda version: False)
    store.recover()
    records = commit(store, 4)
    path = header_path(path_of(store, 0).parent, 0)
    whole = path.read_bytes()

    for at in (0, len(whole) // 2, len(whole) - 1):
        for bit in (0, 4):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            recovered = FragmentStore(tmp_path, FRAGMENT, RETAINED).recover()
            assert recovered is not None
            assert list(recovered.headers) == [record.header() for record in records[1:]]
    for rotten in (b"", b"{}", whole[:70]):
        path.write_bytes(rotten)
        assert list(headers_in(path.parent)) == [record.header() for record in records[1:]]
    assert f"{path} is damaged" in caplog.text


def test_header_of_a_damaged_record_is_passed_over(tmp_path: Path) -> None:
    store = FragmentStore(tmp_path, FRAGMENT, RETAINED, is_indexed=lambda version: False)
    store.recover()
    records = commit(store, 3)
    path_of(store, 1).write_bytes(path_of(store, 1).read_bytes()[:60])

    store.commit(following(records[-1]))

    assert kept_headers(store) == [0]
    assert [h["version"] for h in headers_in(path_of(store, 0).parent)] == [0, 2, 3, 4]


def test_headers_are_read_without_a_record_being_whole(store: FragmentStore) -> None:
    records = commit(store, 1)
    data = path_of(store, 1).read_bytes()
    path_of(store, 1).write_bytes(data[: borders(data)["header"]])

    assert list(headers_in(path_of(store, 1).parent)) == [record.header() for record in records]
    recovered = store.recover()
    assert recovered is not None
    assert store.lost == 1
    assert list(recovered.headers) == [record.header() for record in records], "told, though lost"


def test_a_record_of_an_earlier_format_is_invalid_by_name(store: FragmentStore) -> None:
    commit(store, 1)
    path = path_of(store, 1)
    path.write_bytes(path.read_bytes().replace(b"DILOREC3", b"DILOREC1", 1))

    with pytest.raises(RecordInvalid, match=r"begins with b'DILOREC1', not b'DILOREC3'"):
        store.load(1)
    recovered = store.recover()
    assert recovered is not None
    assert recovered.record.version == 0


# -- expiries ------------------------------------------------------------------------------------


def attempt_file(store: FragmentStore) -> Path:
    return path_of(store, 0).parent / "attempt.json"


def test_a_restart_opens_the_attempt_after_the_last_recorded(either: FragmentStore) -> None:
    commit(either, 1)
    for attempt in range(3):
        expiry = RecordExpiry(
            RoundKey(0, 0, 1, attempt),
            "",
            ("east", "west")[:attempt],
            broken_in_a_row=attempt // 2,
            rejected_in_a_row=attempt // 2,
            refused_at={"east": (attempt, "too large")},
        )
        either.record_expiry(expiry)

        recovered = either.recover()

        assert recovered is not None
        assert recovered.missing == expiry.missing
        assert recovered.expired_in_a_row == attempt + 1 - attempt // 2
        assert recovered.broken_in_a_row == recovered.rejected_in_a_row == attempt // 2
        assert recovered.refused_at == expiry.refused_at
        assert (recovered.record.version, recovered.attempt) == (1, attempt + 1)


def test_an_expiry_of_an_earlier_version_is_over_with_it(either: FragmentStore) -> None:
    records = commit(either, 1)
    either.record_expiry(RecordExpiry(RoundKey(0, 0, 1, 0), "", ()))
    put(either, following(records[1], attempt=1))

    recovered = either.recover()

    assert recovered is not None
    assert (recovered.record.version, recovered.attempt) == (2, 0)
    assert recovered.past[1].attempt == 1


def test_an_expiry_counts_again_when_the_next_version_is_torn(store: FragmentStore) -> None:
    records = commit(store, 1)
    store.record_expiry(RecordExpiry(RoundKey(0, 0, 1, 0), "", ()))
    store.commit(following(records[1], attempt=1))
    path_of(store, 2).write_bytes(b"torn")

    recovered = store.recover()

    assert recovered is not None
    assert (recovered.record.version, recovered.attempt) == (1, 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:10],
        lambda data: data[:-1],
        lambda data: data.replace(b"1", b"0"),
        lambda data: bytes(len(data)),
    ],
    ids=["empty", "without-body", "torn", "changed", "zero"],
)
def test_after_a_damaged_expiry_record_no_announced_attempt_is_opened_again(
    either: FragmentStore, damage: Callable[[bytes], bytes]
) -> None:
    commit(either, 1)
    either.record_expiry(RecordExpiry(RoundKey(0, 0, 1, 0), "", ()))
    path = attempt_file(either)

    path.write_bytes(damage(path.read_bytes()))

    recovered = either.recover()
    assert recovered is not None
    assert recovered.attempt > 1000
    either.record_expiry(RecordExpiry(RoundKey(0, 0, 1, recovered.attempt), "", ()))
    again = either.recover()
    assert again is not None
    assert again.expired_in_a_row == 1, "numbers skipped are not expiries"


# -- recomputing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("up", "down"), [("float32", "float32"), ("int4", "int4"), ("int4", "float32")]
)
def test_retained_versions_are_recomputed_bit_by_bit(
    either: FragmentStore, up: str, down: str
) -> None:
    rules = PublicationRules(up, down, RULES.optimizer, seed=0)
    records = [first()]
    for is_flush in (False, False, True):
        records.append(following(records[-1], rules=rules, is_flush=is_flush))
    for record in records:
        put(either, record)

    for version in (2, 3):
        before, after = either.load(version - 1), either.load(version)
        assert recompute(before, after, rules, FRAGMENT) == after.lane_digests


def test_recomputing_sees_a_changed_weight(either: FragmentStore) -> None:
    records = commit(either, 2)
    contributors = records[2].contributors
    changed = replace(
        records[2],
        contributors=(replace(contributors[0], weight_tokens=301), *contributors[1:]),
    )

    assert recompute(records[1], changed, RULES, FRAGMENT) != changed.lane_digests
