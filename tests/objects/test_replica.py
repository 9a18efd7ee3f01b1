"""A directory whose durable files are in an object store: any machine makes it again."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco import durable
from diloco.errors import ConfigError, Fenced
from diloco.objects import replica as replicas
from diloco.objects.replica import Replica
from diloco.objects.store import ObjectLost, ObjectStore, StoreAway

LARGE = os.urandom(100_000)


class Failing(ObjectStore):
    """Fails as often as it is told to."""

    num_failures = num_large = 0
    gives_bytes: int | None = None  # before it fails

    def put(self, name: str, data: Any, **options: Any) -> None:
        self.num_large += 1
        super().put(name, data, **options)

    def create(self, name: str, data: bytes) -> bool:
        if self.num_failures:
            self.num_failures -= 1
            raise StoreAway(errno.EIO, "503 Slow Down")
        return super().create(name, data)

    def read(self, parts: Iterable[tuple[str, int, int]]) -> Iterator[bytes]:
        for name, start, size in parts:
            left = size if self.gives_bytes is None else min(size, self.gives_bytes)
            yield from super().read([(name, start, left)])
            if left < size:
                raise StoreAway(errno.EIO, "503 Slow Down")


@pytest.fixture
def store(tmp_path: Path) -> Failing:
    return Failing(f"file://{tmp_path / 'objects'}")


@pytest.fixture(autouse=True)
def only_here() -> Iterator[None]:
    yield
    durable.replicate(None)


def replica_at(store: ObjectStore, root: Path, *, at_work: bool = True) -> Replica:
    root.mkdir(exist_ok=True)
    replica = Replica(store, "syncer", root, lambda path: path.parts[0] != "lock")
    replica.open(lambda number: {"who": root.name}, lambda found: None)
    durable.replicate(replica if at_work else None)
    return replica


def held(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def test_another_machine_makes_the_same_directory(store: Failing, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    replica_at(store, one)
    durable.write_json(one / "epoch.json", 7)
    durable.write_json(one / "epoch.json", 8)
    durable.write_durably(one / "secret", [b"key"], mode=0o600)
    durable.make_directory_durably(one / "fragment-0000")
    durable.write_durably(one / "fragment-0000/v1.record", [LARGE])
    durable.make_directory_durably(one / "pins/step-1")
    durable.link(one / "fragment-0000/v1.record", one / "pins/step-1/v1.record")
    durable.sync_directory(one / "pins/step-1")
    durable.write_durably(one / "lock", [b"of this machine"])

    replica = replica_at(store, two, at_work=False)
    fetched = replica.restore()

    assert fetched == len(LARGE) + len(b"key") + 1  # once, whatever names it has
    assert held(two) == {k: v for k, v in held(one).items() if k != "lock"}
    assert (two / "secret").stat().st_mode & 0o777 == 0o600
    assert replica.restore() == 0


def test_what_is_there_by_another_name_is_not_written_again(store: Failing, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    replica_at(store, one)
    for name in ("v1.record", "pinned.record"):  # as they come from another store
        durable.write_durably(one / name, [LARGE])
    assert store.num_large == 1
    durable.unlink(one / "v1.record")
    durable.sync_directory(one)

    replica = replica_at(store, two, at_work=False)

    assert replica.restore() == len(LARGE)
    assert held(two) == {"pinned.record": LARGE}


def test_what_was_moved_and_removed_is_moved_and_removed(store: Failing, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    replica_at(store, one)
    for name in ("a", "b", "pins/x/c", "pins/y/d", "e"):
        durable.make_directory_durably((one / name).parent)
        durable.write_durably(one / name, [name.encode() * 10_000])

    durable.rename(one / "pins/x", one / "pins/aside")
    durable.rename(one / "a", one / "A")
    durable.unlink(one / "b")
    durable.remove_tree(one / "pins/y")
    durable.sync_directory(one)

    replica_at(store, two, at_work=False).restore()
    assert held(two) == held(one)
    assert sorted(held(two)) == ["A", "e", "pins/aside/c"]


def test_what_is_here_and_not_in_the_store_is_removed(store: Failing, tmp_path: Path) -> None:
    """It was never durable: another machine may have made another version of that number."""
    root = tmp_path / "one"
    replica = replica_at(store, root)
    durable.write_durably(root / "v1.record", [b"one" * 10_000])
    durable.replicate(None)
    durable.write_durably(root / "v2.record", [b"two"])
    (root / "v1.record").write_bytes(b"own" * 10_000)

    replica_at(store, root).restore()

    assert held(root) == {"v1.record": b"one" * 10_000}
    del replica


def test_a_file_gets_its_name_only_when_the_store_has_it(store: Failing, tmp_path: Path) -> None:
    root = tmp_path / "one"
    replica_at(store, root)
    durable.write_durably(root / "state", [b"before"])
    store.num_failures = 1

    with pytest.raises(durable.DiskFull, match="503"):
        durable.write_durably(root / "state", [b"after"])

    assert (root / "state").read_bytes() == b"before"
    durable.write_durably(root / "state", [b"again"])
    other = tmp_path / "two"
    replica_at(store, other, at_work=False).restore()
    assert held(other) == {"state": b"again"}


def test_a_removal_that_is_not_synced_comes_with_the_next_write(
    store: Failing, tmp_path: Path
) -> None:
    root, other = tmp_path / "one", tmp_path / "two"
    replica = replica_at(store, root)
    durable.write_durably(root / "old", [b"x"])
    number = replica.number
    durable.unlink(root / "old")
    assert replica.number == number

    durable.write_durably(root / "new", [b"y"])

    assert replica.number == number + 1
    replica_at(store, other, at_work=False).restore()
    assert held(other) == {"new": b"y"}


def test_a_machine_that_lost_its_lease_changes_nothing(store: Failing, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    said: list[Fenced] = []
    old = replica_at(store, one)
    old._on_fenced = said.append
    durable.write_durably(one / "v1", [b"1" * 50_000])
    new = replica_at(store, two)
    new.restore()
    durable.write_durably(two / "v2", [b"2"])
    durable.replicate(old)

    with pytest.raises(Fenced):
        durable.write_durably(one / "v2", [b"other"])
    with pytest.raises(Fenced):
        old.check()

    assert len(said) == 2 and not (one / "v2").exists()
    durable.replicate(None)
    replica_at(store, tmp_path / "three", at_work=False).restore()
    assert held(tmp_path / "three") == {"v1": b"1" * 50_000, "v2": b"2"}


def test_snapshots_take_the_place_of_entries_and_forget_objects(
    store: Failing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco.objects.replica._SNAPSHOT_ENTRIES", 10)
    root = tmp_path / "one"
    replica_at(store, root)
    for version in range(40):
        durable.write_durably(root / f"v{version}", [bytes([version]) * 50_000])
        if version >= 2:
            durable.unlink(root / f"v{version - 2}")
    durable.sync_directory(root)

    num_entries, num_objects = len(store.names("syncer/log")), len(store.names("syncer/data"))

    assert num_entries <= 11 and num_objects <= 13
    other = tmp_path / "two"
    replica_at(store, other, at_work=False).restore()
    assert held(other) == held(root) == {f"v{v}": bytes([v]) * 50_000 for v in (38, 39)}
    assert len(store.names("syncer/data")) == 2, "opened again, it forgets what no entry names"


def test_the_same_bytes_under_two_names_are_one_object(store: Failing, tmp_path: Path) -> None:
    root = tmp_path / "one"
    replica_at(store, root)
    durable.write_durably(root / "a", [LARGE])
    durable.write_durably(root / "b", [LARGE])
    durable.unlink(root / "a")
    durable.sync_directory(root)

    replica_at(store, tmp_path / "two", at_work=False).restore()

    assert held(tmp_path / "two") == {"b": LARGE}


def test_an_object_that_holds_other_bytes_is_named(
    store: Failing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "one"
    replica_at(store, root)
    durable.write_durably(root / "v1", [LARGE])
    (name,) = store.names("syncer/data")
    store.put(name, LARGE[:-1] + b"!")

    durable.write_durably(root / "v2", [b"2"])
    durable.replicate(None)

    replica_at(store, tmp_path / "two", at_work=False).restore()

    assert held(tmp_path / "two") == {"v2": b"2"}
    assert f"data/{name.rpartition('/')[2]}, which is v1 of the run, is gone or" in caplog.text
    store.delete([name])
    caplog.clear()
    replica_at(store, tmp_path / "three", at_work=False).restore()
    assert "which is v1 of the run, is gone or" in caplog.text


def test_a_torn_file_here_is_fetched_again(store: Failing, tmp_path: Path) -> None:
    root = tmp_path / "one"
    replica = replica_at(store, root)
    durable.write_durably(root / "v1", [LARGE])
    (root / "v1").write_bytes(LARGE[:5000])

    assert replica.restore() == len(LARGE)
    assert (root / "v1").read_bytes() == LARGE


def test_a_file_is_fetched_on_from_where_the_store_failed_and_whole_where_that_is_torn(
    store: Failing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica_at(store, tmp_path / "one")
    durable.write_durably(tmp_path / "one/v1", [LARGE])
    two = replica_at(store, tmp_path / "two", at_work=False)
    monkeypatch.setattr(replicas, "_READ_BYTES", 30_000)
    store.gives_bytes = 60_000
    with pytest.raises(StoreAway):
        two.fetch_all()
    (part,) = (tmp_path / "two").iterdir()
    assert part.read_bytes() == LARGE[:60_000]

    came: list[int] = []
    two.fetch_all(on_piece=came.append)
    assert came == [30_000, 30_000, 40_000], "what is here is read in pieces that a stop ends"
    assert held(tmp_path / "two") == {"v1": LARGE}

    (tmp_path / "two/v1").unlink()
    part.write_bytes(b"torn")
    store.gives_bytes = None
    two.fetch_all()
    assert held(tmp_path / "two") == {"v1": LARGE}


def test_a_directory_is_not_emptied_by_a_chain_that_keeps_nothing(
    store: Failing, tmp_path: Path
) -> None:
    root = tmp_path / "one"
    replica_at(store, root)
    durable.write_durably(root / "v1", [LARGE])
    durable.replicate(None)
    store.delete([*store.names("syncer/log"), *store.names("syncer/data")])

    with pytest.raises(ConfigError, match=r"has nothing of .*/one, where there is v1"):
        replica_at(store, root, at_work=False).restore()

    assert held(root) == {"v1": LARGE}


def test_an_earlier_writer_removes_nothing_of_a_later_one(store: Failing, tmp_path: Path) -> None:
    """Two machines write the same bytes; the first wakes and forgets its own."""
    old = replica_at(store, tmp_path / "one")
    durable.write_durably(tmp_path / "one/v1", [LARGE])
    durable.unlink(tmp_path / "one/v1")
    durable.sync_directory(tmp_path / "one")
    new = replica_at(store, tmp_path / "two")
    new.restore()
    durable.write_durably(tmp_path / "two/v2", [LARGE])
    durable.replicate(None)

    with pytest.raises(Fenced):
        old.put_snapshot()
    old._delete(old._dropped)  # as it may have been about to

    replica_at(store, tmp_path / "three", at_work=False).restore()
    assert held(tmp_path / "three") == {"v2": LARGE}


def test_an_object_that_is_gone_is_written_again_while_the_file_is_here(
    store: Failing, tmp_path: Path
) -> None:
    root = tmp_path / "one"
    replica = replica_at(store, root)
    for name in ("v1", "v2"):
        durable.write_durably(root / name, [LARGE, name.encode()])
    assert not replica.mend()
    one, two = store.names("syncer/data")
    store.delete([one])
    store.put(two, b"cut off")

    said = replica.mend()

    assert said.startswith(f"{store.url}/syncer/data/") and "one of 2 objects" in said
    assert not replica.mend()
    other = replica_at(store, tmp_path / "two", at_work=False)
    other.restore()
    assert held(tmp_path / "two") == held(root)


def test_what_is_gone_there_and_here_is_named(store: Failing, tmp_path: Path) -> None:
    root = tmp_path / "one"
    replica = replica_at(store, root)
    durable.write_durably(root / "v1", [LARGE])
    store.delete(store.names("syncer/data"))
    (root / "v1").write_bytes(LARGE[:-1] + b"!")

    with pytest.raises(ObjectLost, match="which is v1 of the run, is gone, and that file is not"):
        replica.mend()

    assert not store.names("syncer/data")
    durable.unlink(root / "v1")
    assert not replica.mend()


@pytest.mark.parametrize("after_snapshot", [False, True])
def test_an_entry_or_snapshot_that_is_gone_is_made_up_for(
    store: Failing, tmp_path: Path, after_snapshot: bool
) -> None:
    root = tmp_path / "one"
    replica = replica_at(store, root)
    for n in range(3):
        durable.write_durably(root / f"v{n}", [b"small"])
    if after_snapshot:
        replica.put_snapshot()
        (gone,) = store.names("syncer/snapshot")
    else:
        gone = store.names("syncer/log")[2]
    store.delete([gone])

    assert replica.mend().startswith(f"{store.url}/{gone} was gone")

    assert not replica.mend()
    other = replica_at(store, tmp_path / "two", at_work=False)
    other.restore()
    assert held(tmp_path / "two") == held(root)


def test_a_look_again_parses_what_is_new_of_the_files_that_are_asked_for(
    store: Failing, tmp_path: Path
) -> None:
    writer = replica_at(store, tmp_path / "one")
    for name in ("kept", "other", "replaced", "removed"):
        durable.write_durably(tmp_path / "one" / name, [LARGE])
    writer.put_snapshot()
    reader = Replica(
        store, "syncer", tmp_path / "two", lambda path: True, reads=lambda name: name != "other"
    )
    reader.look()
    before = reader.files(only=lambda name: True)

    durable.write_durably(tmp_path / "one" / "replaced", [b"new"])
    durable.unlink(tmp_path / "one" / "removed")
    durable.sync_directory(tmp_path / "one")
    reader.look()
    after = reader.files(only=lambda name: True)
    reader.look()

    assert before.keys() == {"kept", "replaced", "removed"}
    assert after.keys() == {"kept", "replaced"} and reader.files(only=after.__contains__) == after
    assert after["kept"] is before["kept"]
    assert reader.contents(["replaced"]) == {"replaced": b"new"}
    writer.put_snapshot()
    reader.look()
    assert reader.files(only=lambda name: True) == after
