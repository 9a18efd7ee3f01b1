"""Contributions that came by the object store: files are made of what is in it already."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import blake3
import pytest

from diloco import durable
from diloco.objects import replica as replica_module
from diloco.objects.payload_shelf import KEPT_METHOD, PayloadShelf
from diloco.objects.replica import Replica
from diloco.objects.reusable import KEPT_S
from diloco.objects.store import ObjectStore
from diloco.objects.stored_file import Part, StoredFile
from diloco.transport.bucket.server import PayloadLacking
from diloco.transport.errors import ChecksumMismatch
from diloco.versions.record import RecordDraft, contributions_in, locate

#: Three contributions; of the first two of them objects are offered, in two pieces each.
SENT = [os.urandom(50_000 + n) for n in range(3)]
STATE = os.urandom(70_000)


@pytest.fixture(autouse=True)
def only_here() -> Iterator[None]:
    yield
    durable.replicate(None)


class Counting(ObjectStore):
    """Counts what is sent to it."""

    num_bytes = 0

    def put(self, name, data, *, num_bytes=0, probes=False) -> None:  # type: ignore[no-untyped-def]
        if not isinstance(data, bytes | Path):
            data = b"".join(data)
            assert len(data) == num_bytes
        self.num_bytes += data.stat().st_size if isinstance(data, Path) else len(data)
        super().put(name, data, num_bytes=num_bytes, probes=probes)


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    return Counting(f"file://{tmp_path / 'objects'}")


def opened(store: ObjectStore, root: Path) -> Replica:
    root.mkdir(exist_ok=True)
    replica = Replica(store, "syncer", root, lambda path: True, sections=contributions_in)
    replica.open(lambda number: {"who": root.name}, lambda found: None)
    return replica


def taken(store: ObjectStore, replica: Replica, payload: bytes, epoch: int = 1) -> bytes:
    """Take a payload as an island has written it: in two objects."""
    own = f"payloads/syncer/{epoch:016d}"
    pieces = {"a-0": payload[:30_000], "a-1": payload[30_000:]}
    for name, piece in pieces.items():
        ObjectStore.put(store, f"{own}/{name}", piece)
    shelf = PayloadShelf(store, replica, epoch)
    sizes = {name: len(piece) for name, piece in pieces.items()}
    return bytes(shelf.take(KEPT_METHOD, sizes, blake3.blake3(payload).digest()))


def write(path: Path, order: tuple[int, ...] = (0, 2, 1)) -> None:
    names = {f"contribution/{n}/0": SENT[n] for n in order}
    sections = {"theta/0": STATE, **names, "guard": b"g" * 10}
    draft = RecordDraft(path, {"version": 1}, [(n, len(b)) for n, b in sections.items()])
    for name, body in sections.items():
        draft.write(name, body)
    draft.commit({"version": 1})


def test_a_record_is_made_of_what_islands_wrote(store: Counting, tmp_path: Path) -> None:
    replica = opened(store, tmp_path / "one")
    durable.replicate(replica)
    for payload in SENT[:2]:
        assert taken(store, replica, payload) == payload
    before = store.num_bytes
    write(tmp_path / "one" / "v1.record")
    durable.replicate(None)

    assert store.num_bytes - before < len(STATE) + len(SENT[2]) + 1000
    for name in store.names("payloads"):  # an island may write there, and it is of no matter
        ObjectStore.put(store, name, b"something else")
    other = opened(store, tmp_path / "two")
    assert not other.lacks("v1.record")
    other.restore()
    locate(tmp_path / "two" / "v1.record").verify()
    assert (tmp_path / "two/v1.record").read_bytes() == (tmp_path / "one/v1.record").read_bytes()


def test_objects_of_a_file_go_with_it_and_are_in_no_later_one(
    store: Counting, tmp_path: Path
) -> None:
    root = tmp_path / "one"
    replica = opened(store, root)
    durable.replicate(replica)
    taken(store, replica, SENT[0])
    write(root / "v1.record", (0,))
    assert len(store.names("syncer/data")) == 3

    durable.unlink(root / "v1.record")
    durable.sync_directory(root)
    replica.put_snapshot()
    assert not store.names("syncer/data")
    write(root / "v2.record", (0,))
    durable.replicate(None)

    opened(store, tmp_path / "two").restore()
    locate(tmp_path / "two" / "v2.record").verify()


def test_what_no_file_is_made_of_is_removed(
    store: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = opened(store, tmp_path / "one")
    durable.replicate(replica)
    taken(store, replica, SENT[0])
    write(tmp_path / "one" / "v1.record", (0,))
    taken(store, replica, SENT[1])
    assert len(store.names("syncer/data")) == 5

    now = replica_module.time.monotonic() + KEPT_S + 1
    monkeypatch.setattr(replica_module.time, "monotonic", lambda: now)
    taken(store, replica, SENT[2])
    replica.put_snapshot()

    assert len(store.names("syncer/data")) == 5  # those of the file, and the newest
    opened(store, tmp_path / "two").restore()
    locate(tmp_path / "two" / "v1.record").verify()
    # What the writer before has left that no file is made of is gone, too.
    assert len(store.names("syncer/data")) == 3


def test_what_is_not_what_was_sent_is_kept_nowhere(store: Counting, tmp_path: Path) -> None:
    replica = opened(store, tmp_path / "one")
    shelf = PayloadShelf(store, replica, 1)
    ObjectStore.put(store, "payloads/syncer/0000000000000001/a-0", b"other")

    with pytest.raises(ChecksumMismatch):
        shelf.take(KEPT_METHOD, {"a-0": 5}, blake3.blake3(b"right").digest())
    with pytest.raises(PayloadLacking):
        shelf.take(KEPT_METHOD, {"a-0": 5, "nothing": 5}, blake3.blake3(b"otherright").digest())
    with pytest.raises(PayloadLacking):
        shelf.take(KEPT_METHOD, {"a-0": 6}, blake3.blake3(b"other1").digest())
    for method in (KEPT_METHOD, "fragment.upload"):  # larger than was declared
        with pytest.raises(PayloadLacking, match=r"has 5 bytes in place of 3|0 of 3 bytes"):
            shelf.take(method, {"a-0": 3}, blake3.blake3(b"oth").digest())

    assert not store.names("syncer/data")


def test_a_contribution_that_is_asked_for_again_is_copied_once(
    store: Counting, tmp_path: Path
) -> None:
    replica = opened(store, tmp_path / "one")
    for _ in range(3):
        assert taken(store, replica, SENT[0]) == SENT[0]
    assert len(store.names("syncer/data")) == 2

    store.delete(store.names("syncer/data"))
    assert taken(store, replica, SENT[0]) == SENT[0]  # copied once more
    replica.put_snapshot()


@pytest.mark.parametrize("is_composed", [False, True])
def test_an_object_that_was_cut_off_is_named(
    store: Counting, tmp_path: Path, is_composed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    replica = opened(store, tmp_path / "one")
    durable.replicate(replica)
    if is_composed:
        taken(store, replica, SENT[0])
    write(tmp_path / "one" / "v1.record", (0,))
    durable.replicate(None)
    cut = store.names("syncer/data")[-1]
    ObjectStore.put(store, cut, b"".join(store.pieces(cut, 10)))

    other = opened(store, tmp_path / "two")
    assert cut in other.lacks("v1.record")
    other.restore()

    assert not (tmp_path / "two" / "v1.record").exists()
    assert cut.rpartition("/")[2] in caplog.text


def test_a_start_removes_what_earlier_ones_have_left_and_nothing_else(
    store: Counting, tmp_path: Path
) -> None:
    replica = opened(store, tmp_path / "one")
    for epoch in (1, 2, 3):
        taken(store, replica, SENT[0], epoch)

    PayloadShelf(store, replica, 2).clear()

    assert [name.split("/")[2] for name in store.names("payloads")] == [
        f"{epoch:016d}" for epoch in (2, 2, 3, 3)
    ]


def test_each_object_of_a_record_is_written_again(store: Counting, tmp_path: Path) -> None:
    replica = opened(store, tmp_path / "one")
    durable.replicate(replica)
    for payload in SENT[:2]:
        taken(store, replica, payload)
    write(tmp_path / "one" / "v1.record")
    durable.replicate(None)
    before = {name: store.get(name) for name in store.names("syncer/data")}
    assert len(before) == 5
    store.delete(before)

    assert "one of 5 objects" in replica.mend()

    assert {name: store.get(name) for name in store.names("syncer/data")} == before


def test_an_entry_has_one_item_for_a_contribution_however_many_pieces_it_came_in(
    store: Counting, tmp_path: Path
) -> None:
    replica = opened(store, tmp_path / "one")
    durable.replicate(replica)
    for payload in SENT:
        taken(store, replica, payload)
    write(tmp_path / "one" / "v1.record")
    durable.replicate(None)

    file = replica._files["v1.record"]
    written = file.to_json()

    assert len(file.parts) == 2 + 3 * 2  # header and state, the guard; two objects each
    assert len(written[-1]) == 2 + 3
    assert StoredFile.from_json(written) == file


def test_what_is_in_a_file_is_known_for_as_long_and_after_a_restart(
    store: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = opened(store, tmp_path / "one")
    durable.replicate(replica)
    taken(store, replica, SENT[0])
    write(tmp_path / "one" / "v1.record", (0,))
    now = replica_module.time.monotonic() + KEPT_S + 1
    monkeypatch.setattr(replica_module.time, "monotonic", lambda: now)
    taken(store, replica, SENT[1])
    for again in ("one", "two"):
        before = store.num_bytes
        write(tmp_path / again / "kept.record", (0,))  # as a pin of a frame does
        assert store.num_bytes - before < len(STATE) + 1000
        if again == "one":
            replica = opened(store, tmp_path / "two")
            replica.restore()
            durable.replicate(replica)
    for name in ("v1.record", "kept.record"):
        durable.unlink(tmp_path / "two" / name)
    durable.sync_directory(tmp_path / "two")
    replica.put_snapshot()
    durable.replicate(None)

    assert not replica.objects_of(blake3.blake3(SENT[0]).hexdigest())
    assert not store.names("syncer/data")


def test_series_of_parts_are_written_and_read() -> None:
    whole = [Part("0-a-b-0", 0, 8), Part("0-a-b-1", 0, 8), Part("0-a-b-2", 0, 3)]
    for parts in (
        whole,
        whole[:1],
        [Part("0-x", 0, 5), *whole, Part("0-x", 5, 2)],
        [whole[0], whole[2]],
        [*whole, *whole],
        [Part("0-a-b-0", 2, 8), whole[1]],
        [whole[0], whole[1], Part("0-a-b-2", 0, 9)],
        [*whole, Part("0-a-b-3", 0, 8)],
        [Part("plain", 0, 1)],
    ):
        file = StoredFile("", 0, 0, "", None, tuple(parts))
        assert StoredFile.from_json(file.to_json()).parts == tuple(parts)
