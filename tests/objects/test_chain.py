"""A chain of objects: one order, one writer, whatever answers are lost."""

from __future__ import annotations

import errno
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import ConfigError, Fenced
from diloco.objects.chain import Chain, Read, sealed
from diloco.objects.store import ObjectLost, ObjectStore, StoreAway


class LosingStore(ObjectStore):
    """A directory that loses the answers to some writes, or the writes themselves."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"file://{path}")
        self.lost_answers = self.lost_writes = 0

    def create(self, name: str, data: bytes) -> bool:
        if self.lost_writes:
            self.lost_writes -= 1
            raise StoreAway(errno.EIO, "lost on the way")
        created = super().create(name, data)
        if self.lost_answers:
            self.lost_answers -= 1
            raise StoreAway(errno.EIO, "no answer")
        return created


@pytest.fixture
def store(tmp_path: Path) -> LosingStore:
    return LosingStore(tmp_path / "objects")


def opened(store: ObjectStore, who: str) -> Chain:
    chain = Chain(store, "c")
    chain.open(lambda number: {"who": who, "at": number}, lambda found: None)
    return chain


def said(found: Read) -> list[Any]:
    return [content["x"] for _, content in found.entries if "x" in content]


def test_entries_are_read_in_the_order_in_which_they_were_written(store: LosingStore) -> None:
    chain = opened(store, "one")

    numbers = [chain.append({"x": x}) for x in range(5)]

    found = Chain(store, "c").read()
    assert numbers == [1, 2, 3, 4, 5]
    assert said(found) == [0, 1, 2, 3, 4]
    assert found.opened == {"who": "one", "at": 0} and found.number == 5


def test_a_writer_that_another_one_has_followed_can_write_nothing(store: LosingStore) -> None:
    old = opened(store, "old")
    old.append({"x": 1})
    opened(store, "new")

    with pytest.raises(Fenced, match="who new"):
        old.append({"x": 2})
    with pytest.raises(Fenced):
        old.check(old.look())

    assert said(Chain(store, "c").read()) == [1]


def test_it_can_write_nothing_after_any_number_of_snapshots_either(store: LosingStore) -> None:
    old = opened(store, "old")
    old.append({"x": 1})
    new = opened(store, "new")
    for x in range(2, 9):
        number = new.append({"x": x})
        new.put_snapshot({"until": number})

    with pytest.raises(Fenced, match="who new"):
        old.append({"x": 99})

    found = Chain(store, "c").read()
    assert said(found) == [] and found.snapshot == {"until": number}
    assert len(store.names("c/log")) == 3 and len(store.names("c/snapshot")) == 1


def test_an_entry_without_an_answer_does_not_count_once_another_is_written(
    store: LosingStore,
) -> None:
    chain = opened(store, "one")
    store.lost_answers = 1
    with pytest.raises(StoreAway):
        chain.append({"x": "failed"})

    chain.append({"x": "after"})

    assert said(Chain(store, "c").read()) == ["after"]


def test_the_same_entry_again_counts_once(store: LosingStore) -> None:
    chain = opened(store, "one")
    store.lost_answers = 1
    with pytest.raises(StoreAway):
        chain.append({"x": "again"})

    chain.append({"x": "again"})

    assert said(Chain(store, "c").read()) == ["again"]


def test_an_entry_that_was_lost_leaves_no_gap(store: LosingStore) -> None:
    chain = opened(store, "one")
    store.lost_writes = 2
    for _ in range(2):
        with pytest.raises(StoreAway):
            chain.append({"x": "lost"})

    assert chain.append({"x": 1}) == 1
    assert said(Chain(store, "c").read()) == [1]


def test_lost_answers_one_after_the_other_are_all_void(store: LosingStore) -> None:
    chain = opened(store, "one")
    for x in ("a", "b", "c"):
        store.lost_answers = 1
        with pytest.raises(StoreAway):
            chain.append({"x": x})

    chain.append({"x": "d"})
    chain.append({"x": "e"})

    assert said(Chain(store, "c").read()) == ["d", "e"]


def test_a_writer_finds_that_the_objects_were_removed(store: LosingStore) -> None:
    chain = opened(store, "one")
    chain.append({"x": 1})
    chain.check(chain.look())
    store.delete(store.names("c/log"))

    with pytest.raises(ObjectLost, match="objects of the run were removed"):
        chain.check(chain.look())


def test_what_is_taken_back_does_not_count(store: LosingStore) -> None:
    chain = opened(store, "one")
    chain.take_back(chain.append({"x": 1}))

    chain.append({"x": 2})

    assert said(Chain(store, "c").read()) == [2]


def test_two_that_open_it_at_once_come_one_after_the_other(store: LosingStore) -> None:
    first, second = Chain(store, "c"), Chain(store, "c")
    seen: list[Mapping[str, Any]] = []

    def check(found: Read) -> None:
        seen.append(found.opened)
        if len(seen) == 1:  # between its look and its write
            second.open(lambda number: {"who": "second"}, lambda found: None)

    first.open(lambda number: {"who": "first"}, check)

    assert [dict(opened) for opened in seen] == [{}, {"who": "second"}]
    with pytest.raises(Fenced):
        second.append({"x": 1})


def test_a_chain_that_lacks_an_entry_is_not_read(store: LosingStore, tmp_path: Path) -> None:
    chain = opened(store, "one")
    for x in range(3):
        chain.append({"x": x})
    (tmp_path / "objects/c/log/0000000000000002").unlink()

    with pytest.raises(ObjectLost, match="lacks an entry"):
        Chain(store, "c").read()


def test_objects_of_others_are_passed_over_and_damaged_entries_named(store: LosingStore) -> None:
    chain = opened(store, "one")
    chain.append({"x": 1})
    for name in ("c/log/README.txt", "c/log/12", "c/snapshot/folder", "other/x"):
        store.put(name, b"not ours")
    assert said(Chain(store, "c").read()) == [1]
    chain.put_snapshot({"until": 1})
    store.put("c/log/0000000000000002", b"{}")

    with pytest.raises(ObjectLost, match="log/0000000000000002 does not hold what was written"):
        Chain(store, "c").read()


def test_a_snapshot_that_was_begun_leaves_the_entries(store: LosingStore, tmp_path: Path) -> None:
    """Killed between the snapshot and the removal of the entries it has what both say."""
    chain = opened(store, "one")
    number = chain.append({"x": 1})
    store.lost_writes = 1  # of the entry that names it
    with pytest.raises(StoreAway):
        chain.put_snapshot({"until": number})
    chain.append({"x": 2})

    found = Chain(store, "c").read()

    assert said(found) == [1, 2] and found.snapshot == {}
    chain.put_snapshot({"until": 3})
    chain.append({"x": 3})
    found = Chain(store, "c").read()
    assert said(found) == [3] and found.snapshot == {"until": 3}
    assert found.opened == {"who": "one", "at": 0}
    assert len(store.names("c/snapshot")) == 1


def test_a_fenced_writer_that_was_putting_a_snapshot_removes_nothing(store: LosingStore) -> None:
    old = opened(store, "old")
    old.append({"x": 1})
    put, held = store.put, []

    def frozen(name: str, data: bytes) -> None:
        """Be followed by another writer between the snapshot and the entry that names it."""
        put(name, data)
        held.append(opened(store, "new"))

    store.put = frozen  # type: ignore[method-assign, assignment]
    with pytest.raises(Fenced, match="who new"):
        old.put_snapshot({"until": 1})

    found = Chain(store, "c").read()
    assert said(found) == [1] and found.snapshot == {} and found.opened["who"] == "new"
    held[0].append({"x": 2})
    assert said(Chain(store, "c").read()) == [1, 2]


def test_a_number_that_is_free_again_makes_no_second_writer(store: LosingStore) -> None:
    """One reads the chain, sleeps, and creates a number that was used and removed meanwhile."""
    holder, late = opened(store, "holder"), Chain(store, "c")
    seen: list[str] = []

    def check(found: Read) -> None:
        seen.append(found.opened["who"])
        if len(seen) == 1:  # asleep, between its look and its write
            for x in range(5):
                holder.append({"x": x})
            holder.put_snapshot({"until": holder.number})
            holder.append({"x": "after"})

    late.open(lambda number: {"who": "late", "at": number}, check)

    assert seen == ["holder", "holder"]
    with pytest.raises(Fenced, match="who late"):
        holder.append({"x": "lost"})
    found = Chain(store, "c").read()
    assert said(found) == ["after"] and found.opened["who"] == "late"
    late.append({"x": "new"})
    assert said(Chain(store, "c").read()) == ["after", "new"]


def test_one_that_died_after_such_a_number_is_not_taken_for_the_holder(store: LosingStore) -> None:
    holder = opened(store, "holder")
    for x in range(5):
        holder.append({"x": x})
    holder.put_snapshot({"until": holder.number})
    stray = {"opened": {"who": "dead"}, "by": "dead", "of": 1}
    assert store.create("c/log/0000000000000001", sealed(stray))

    assert Chain(store, "c").read().opened["who"] == "holder"
    holder.append({"x": "more"})
    assert said(Chain(store, "c").read()) == ["more"]


def test_a_store_that_replaces_what_is_to_be_created_is_refused(tmp_path: Path) -> None:
    class Replacing(ObjectStore):
        def create(self, name: str, data: bytes) -> bool:
            self.put(name, data)
            return True

    with pytest.raises(ConfigError, match="If-None-Match"):
        opened(Replacing(f"file://{tmp_path / 'objects'}"), "one")


def test_what_is_tried_again_and_again_takes_no_room(store: LosingStore) -> None:
    chain = opened(store, "one")
    store.lost_writes = 1
    with pytest.raises(StoreAway):
        chain.append({"x": 0})
    store.fails_fast, store._away = True, StoreAway(errno.EIO, "away")
    create = ObjectStore.create
    store.create = lambda name, data: create(store, name, data)  # type: ignore[method-assign]
    for x in range(100):
        with pytest.raises(StoreAway):
            chain.append({"x": x})

    assert len(chain._tried) == 1


def test_a_chain_whose_opening_is_gone_is_not_read(store: LosingStore) -> None:
    chain = opened(store, "one")
    chain.append({"x": 1})
    chain.put_snapshot({"until": 1})
    store.delete(["c/log/0000000000000000"])

    with pytest.raises(ObjectLost, match="lacks an entry"):
        Chain(store, "c").read()


@pytest.mark.parametrize("what", ["log/0000000000000003", "snapshot/"])
def test_other_bytes_on_the_way_are_read_again(store: LosingStore, what: str) -> None:
    """And an entry that came so is no other writer's."""
    chain, reader = opened(store, "one"), Chain(store, "c")
    chain.append({"x": 1})
    chain.put_snapshot({"until": 1})
    chain.append({"x": 2})
    get, num_flipped = store.get, 0

    def flipped(name: str) -> bytes | None:
        nonlocal num_flipped
        there = get(name)
        if there is None or what not in name or num_flipped > 2:
            return there
        num_flipped += 1
        return there.replace(b"1", b"0").replace(b"2", b"3")

    store.get = store.get_large = flipped  # type: ignore[method-assign]

    found = reader.read()

    assert num_flipped == 3
    assert said(found) == [2] and found.snapshot == {"until": 1}


def test_a_long_chain_is_read_while_half_of_what_comes_has_other_bytes(store: LosingStore) -> None:
    chain, draw, get = opened(store, "one"), random.Random(7), store.get
    for x in range(100):
        chain.append({"x": x})
    store.get = lambda name: (get(name) or b"")[draw.randrange(2) :]  # type: ignore[method-assign]

    assert said(Chain(store, "c").read()) == [*range(100)]


def test_an_entry_that_comes_with_other_bytes_is_not_another_writers(store: LosingStore) -> None:
    chain = opened(store, "one")
    store.lost_answers, get = 1, store.get
    with pytest.raises(StoreAway):
        chain.append({"x": 1})
    store.get = lambda name: (get(name) or b"").replace(b"1", b"0")  # type: ignore[method-assign]

    with pytest.raises(StoreAway, match="cannot be read"):
        chain.append({"x": 1})
    chain.check(chain.look())

    store.get = get  # type: ignore[method-assign]
    chain.append({"x": 1})
    assert said(Chain(store, "c").read()) == [1]
