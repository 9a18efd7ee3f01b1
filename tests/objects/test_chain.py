"""A chain of objects: one order, one writer, whatever answers are lost."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import Fenced
from diloco.objects.chain import Chain, Read
from diloco.objects.store import ObjectStore, StoreAway


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
        old.check_next()

    assert said(Chain(store, "c").read()) == [1]


def test_it_can_write_nothing_after_any_number_of_snapshots_either(store: LosingStore) -> None:
    old = opened(store, "old")
    old.append({"x": 1})
    new = opened(store, "new")
    for x in range(2, 9):
        number = new.append({"x": x})
        new.put_snapshot(number, {"until": number})

    with pytest.raises(Fenced, match="who new"):
        old.append({"x": 99})

    found = Chain(store, "c").read()
    assert said(found) == [] and found.snapshot == {"until": number}
    assert found.openings == {0, 2}


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

    assert seen == [{}, {"who": "second"}]
    with pytest.raises(Fenced):
        second.append({"x": 1})


def test_a_chain_that_lacks_an_entry_is_not_read(store: LosingStore, tmp_path: Path) -> None:
    chain = opened(store, "one")
    for x in range(3):
        chain.append({"x": x})
    (tmp_path / "objects/c/log/0000000000000002").unlink()

    with pytest.raises(StoreAway, match="an entry of the chain is not there"):
        Chain(store, "c").read()


def test_a_snapshot_that_was_begun_leaves_the_entries(store: LosingStore, tmp_path: Path) -> None:
    """Killed between the snapshot and the removal of the entries it has what both say."""
    chain = opened(store, "one")
    number = chain.append({"x": 1})
    store.create(f"c/snapshot/{number:016d}", json.dumps({"until": number}).encode())
    chain.append({"x": 2})

    found = Chain(store, "c").read()

    assert said(found) == [2] and found.start == number and found.opened == {}
