"""Memory that outlives its writers: slots, what a killed writer leaves, too little of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.checkpoint import host_memory
from diloco.checkpoint.host_memory import (
    CopySlots,
    Header,
    HostMemory,
    check_memory,
    next_sequence,
)
from diloco.errors import ConfigError

BODY_BYTES = 5000


@pytest.fixture
def descriptor() -> Iterator[int]:
    with HostMemory("east", [3]) as memory:
        descriptor = memory.descriptor(3)
        assert descriptor is not None
        yield descriptor


def opened(descriptor: int) -> CopySlots:
    slots = CopySlots(descriptor, num_states=2, body_bytes=BODY_BYTES)
    slots.open()
    return slots


def write(slots: CopySlots, state: int, sequence: int, step: int, value: int) -> Header:
    slots.empty(state, sequence)
    body = slots.body(state, sequence)
    body[:] = bytes([value]) * len(body)
    header = Header.of(sequence, step, body)
    slots.seal(state, header)
    return header


def test_what_was_sealed_is_found_by_who_opens_the_memory_next(descriptor: int) -> None:
    first = opened(descriptor)
    written = [
        write(first, state, sequence, 10 * sequence, 7 * state + sequence)
        for state in (0, 1)
        for sequence in (1, 2, 3)
    ]

    again = CopySlots(descriptor, num_states=2, body_bytes=BODY_BYTES)
    missing = again.missing_bytes
    again.open()

    assert missing == 0
    for state in (0, 1):
        found = sorted(again.headers(state), key=lambda header: header.sequence)
        assert found == written[3 * state + 1 : 3 * state + 3], "the third is over the first"
        assert all(again.is_whole(state, header) for header in found)
        assert bytes(again.body(state, 2)[:2]) == bytes([7 * state + 2] * 2)


def test_all_of_the_memory_is_taken_at_once(descriptor: int) -> None:
    slots = CopySlots(descriptor, num_states=2, body_bytes=BODY_BYTES)
    asked = slots.missing_bytes
    slots.open()

    assert asked == slots.num_bytes == 4 * (4096 + 8192)
    assert os.fstat(descriptor).st_blocks * 512 == slots.num_bytes


def test_a_writer_that_is_killed_leaves_an_empty_slot_and_the_other_as_it_was(
    descriptor: int,
) -> None:
    slots = opened(descriptor)
    kept = write(slots, 0, 1, 10, 1)
    write(slots, 0, 2, 20, 2)
    child = os.fork()
    if child == 0:
        slots.empty(0, 4)
        slots.body(0, 4)[:2000] = bytes([4]) * 2000
        os.kill(os.getpid(), 9)

    _, status = os.waitpid(child, 0)

    assert os.WTERMSIG(status) == 9
    assert opened(descriptor).headers(0) == [kept]


@pytest.mark.parametrize("at", [0, BODY_BYTES - 1], ids=["first", "last"])
def test_a_flipped_bit_is_found(descriptor: int, at: int) -> None:
    slots = opened(descriptor)
    header = write(slots, 1, 1, 10, 1)
    slots.body(1, 1)[at] ^= 16

    assert not slots.is_whole(1, header)
    assert not slots.is_whole(1, Header(3, 10, header.digest)), "nor is it another copy"


def test_the_memory_is_gone_with_its_owner() -> None:
    with HostMemory("east", [0]) as memory:
        descriptor = memory.descriptor(0)
        assert descriptor is not None
        assert memory.descriptor(1) is None

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_more_than_the_host_has_is_refused() -> None:
    check_memory("a.b = 5", "copies", 4096, "or lower it")

    with pytest.raises(ConfigError, match=r"b = 5: copies take 1024 TiB.* available; or lower it"):
        check_memory("a.b = 5", "copies", 1 << 50, "or lower it")


#: How far a rank got in a copy; at the end of all ranks it was whole, and known to be.
NOT_BEGUN, EMPTIED, SEALED = 0, 1, 2
COPY = st.tuples(*[st.sampled_from([NOT_BEGUN, EMPTIED, SEALED])] * 3)
#: Starts of an island of three ranks, their copies, and whether a torn one was somebody's death.
HISTORIES = st.lists(st.lists(st.tuples(COPY, st.booleans()), max_size=5), max_size=6)


@given(HISTORIES)
def test_the_newest_whole_copy_outlives_every_history_of_deaths(
    history: list[list[tuple[tuple[int, int, int], bool]]],
) -> None:
    slots: list[dict[int, tuple[int, int]]] = [{}, {}, {}]  # by rank: slot -> (sequence, copy)
    newest, number = 0, 0

    for start in history:
        whole = max(set.intersection(*(set(held.values()) for held in slots)), default=None)
        assert (whole[1] if whole else 0) == newest
        last = max((sequence for held in slots for sequence, _ in held.values()), default=0)
        known = None if whole is None else whole[0]
        for reached, is_death in start:
            sequence, number = next_sequence(last, known), number + 1
            last = sequence
            for held, stage in zip(slots, reached, strict=True):
                if stage != NOT_BEGUN:
                    held.pop(sequence % 2, None)
                if stage == SEALED:
                    held[sequence % 2] = (sequence, number)
            if set(reached) == {SEALED}:
                known, newest = sequence, number
            elif is_death:
                break  # all ranks start again


def test_a_cgroup_has_less_memory_than_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "groups" / "job" / "rank"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (tmp_path / "groups/job/memory.max").write_text("10000\n")
    (tmp_path / "groups/job/memory.current").write_text("7000\n")
    (tmp_path / "groups/job/memory.stat").write_text("anon 2000\ninactive_file 3000\n")
    (tmp_path / "self").write_text("0::/job/rank\n")
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path / "self")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path / "groups")

    check_memory("here", "copies", 6000, "or lower it")

    with pytest.raises(ConfigError, match=r"and 5\.859 KiB are available"):
        check_memory("here", "copies", 6001, "or lower it")
