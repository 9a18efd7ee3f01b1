"""Copies of inner states in host memory, by real ranks: taken back whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from diloco.checkpoint.host_memory import Header, HostMemory
from diloco.checkpoint.memory_copies import MemoryCopies
from diloco.checkpoint.state_copy import StateCopy
from diloco.island.lanes.boxes import stored
from diloco.telemetry.events import Event, MemoryCopied
from diloco.trainer.state import moments, optimizer_step
from tests.checkpoint.late_copies import late_copier
from tests.checkpoint.small_checkpoint import Trained, make_optimizer
from tests.distributed import RankFailed, run_ranks

EVERY = 2


@contextlib.contextmanager
def host(*island_ranks: int) -> Iterator[dict[int, str]]:
    """Keep the memory of some ranks, as their supervisor does; give paths that open it."""
    with HostMemory("east", island_ranks) as memory:
        yield {rank: f"/proc/{os.getpid()}/fd/{memory.descriptor(rank)}" for rank in island_ranks}


class Rank:
    """One rank of one start of an island, with copies after every second inner step, made late."""

    def __init__(self, paths: dict[int, str], num_hosts: int, **about: Any) -> None:
        self.trained = Trained(seed=1, num_steps=0)
        if (num_ranks := dist.get_world_size()) > 1:
            fully_shard(self.trained.model, mesh=init_device_mesh("cpu", (num_ranks,)))
            self.trained.optimizer = make_optimizer(self.trained.model)
        self.events: list[Event] = []
        self.copies = MemoryCopies(
            os.open(paths[dist.get_rank()], os.O_RDWR),
            model=self.trained.model,
            optimizer=self.trained.optimizer,
            about={"run": "test", "timeline": 0, **about},
            num_hosts=num_hosts,
            copies=min(2, num_hosts),
            every=EVERY,
            island="east",
            on_event=self.events.append,
        )
        self.copies._copier = late_copier(self.trained.optimizer)
        self.copies.open()

    def train(self, first: int, last: int) -> dict[int, list[list[float]]]:
        """Make inner steps; returns what was copied after which."""
        copied = {}
        for step in range(first, last + 1):
            self.trained.step()
            if self.copies.is_due(step):
                self.copies.copy(step, data={"inner_step": step})
                copied[step] = self.held()
        self.copies.precede()
        return copied

    def held(self) -> list[list[float]]:
        """Moments that this rank stores."""
        sections = moments(self.trained.model, self.trained.optimizer)
        tensors: list[Tensor] = [t for named in sections.values() for t in named.values()]
        return [stored(tensor).flatten().tolist() for tensor in tensors]

    def copied_steps(self) -> list[int]:
        return [event.copied_step for event in self.events if isinstance(event, MemoryCopied)]

    def take(self) -> dict[str, Any]:
        """Take the newest copy, and say what is held now."""
        newest = self.copies.newest
        if newest is None:
            return {"newest": None}
        data, received = self.copies.load_()
        age = optimizer_step(self.trained.optimizer)
        return {
            "newest": newest, "data": data, "age": age, "received": received, "held": self.held()
        }  # fmt: skip


def first_start(
    island_rank: int, paths: dict[int, str], num_hosts: int, last: int
) -> dict[str, Any]:
    rank = Rank(paths, num_hosts)
    before = rank.copies.newest
    copied = rank.train(1, last)
    rank.copies.close(last)
    return {"before": before, "copied": copied, "told": rank.copied_steps()}


def take(
    island_rank: int, paths: dict[int, str], num_hosts: int, about: dict[str, Any]
) -> dict[str, Any]:
    return Rank(paths, num_hosts, **about).take()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_new_start_takes_the_newest_copy_bit_for_bit(num_ranks: int) -> None:
    with host(*range(num_ranks)) as paths:
        first = run_ranks(first_start, num_ranks, paths, 1, 5)
        second = run_ranks(take, num_ranks, paths, 1, {})
        other = run_ranks(take, num_ranks, paths, 1, {"timeline": 1})

    assert [start["told"] for start in first] == [[2, 4], []][:num_ranks], "the leader tells"
    for before, after in zip(first, second, strict=True):
        assert before["before"] is None
        assert (after["newest"], after["age"], after["received"]) == (4, 4, 0)
        assert after["data"] == {"inner_step": 4}
        assert after["held"] == before["copied"][4]
        assert after["held"] != before["copied"][2]
    assert other == [{"newest": None}] * num_ranks, "of another timeline"


def die_in_the_middle(island_rank: int, paths: dict[int, str]) -> None:
    rank = Rank(paths, 1)
    rank.train(1, 5)
    copier = rank.copies._copier
    whole = copier.copy

    def torn(pairs: Iterable[tuple[Tensor, Tensor]]) -> StateCopy:
        def half() -> Iterator[tuple[Tensor, Tensor]]:
            for number, pair in enumerate(pairs):
                if number == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield pair

        return whole(half())

    with mock.patch.object(copier, "copy", torn if island_rank == 1 else whole):
        rank.train(6, 6)
    rank.copies.settle(6)


def go_on(island_rank: int, paths: dict[int, str]) -> dict[str, Any]:
    rank = Rank(paths, 1)
    taken = rank.take()
    copied = rank.train(5, 8)
    rank.copies.close(8)
    return {**taken, "copied": copied, "told": rank.copied_steps()}


def test_a_copy_that_a_killed_rank_tore_leaves_the_one_before_and_is_never_mistaken() -> None:
    with host(0, 1) as paths:
        with pytest.raises(RankFailed, match="rank 1 of 2: died without a word, exit code -9"):
            run_ranks(die_in_the_middle, 2, paths)
        second = run_ranks(go_on, 2, paths)
        third = run_ranks(take, 2, paths, 1, {})

    assert [rank["newest"] for rank in second] == [4, 4]
    assert second[0]["told"] == [6, 8]
    assert [rank["newest"] for rank in third] == [8, 8]
    assert [rank["held"] for rank in third] == [rank["copied"][8] for rank in second]


def test_a_lost_host_takes_its_states_back_from_another_and_two_lost_cost_everything() -> None:
    with host(0, 1) as first_host:
        with host(2, 3) as second_host:
            first = run_ranks(first_start, 4, first_host | second_host, 2, 4)
        with host(2, 3) as second_host:
            second = run_ranks(take, 4, first_host | second_host, 2, {})
    with host(0, 1) as first_host, host(2, 3) as second_host:
        third = run_ranks(take, 4, first_host | second_host, 2, {})

    assert [rank["newest"] for rank in second] == [4] * 4
    assert [rank["held"] for rank in second] == [rank["copied"][4] for rank in first]
    assert all(rank["received"] > 0 for rank in second)
    assert third == [{"newest": None}] * 4


def damage_and_take(island_rank: int, paths: dict[int, str]) -> dict[str, Any]:
    if island_rank == 0:  # the end of the slot of even copies, of which there is the second
        memory = os.open(paths[0], os.O_RDWR)
        at = os.fstat(memory).st_size // 2 - 8192
        while (byte := os.pread(memory, 1, at)) == b"\0":
            at -= 1
        os.pwrite(memory, bytes([byte[0] ^ 1]), at)
        os.close(memory)
    dist.barrier()
    return Rank(paths, 1).take()


def test_damage_of_one_rank_s_copy_is_everybody_s() -> None:
    with host(0, 1) as paths:
        first = run_ranks(first_start, 2, paths, 1, 4)
        second = run_ranks(damage_and_take, 2, paths)

    assert [rank["newest"] for rank in second] == [2, 2]
    assert [rank["held"] for rank in second] == [rank["copied"][2] for rank in first]


def mishear(island_rank: int, paths: dict[int, str]) -> dict[str, Any]:
    rank = Rank(paths, 2)
    rank.train(1, 3)
    real = rank.copies._receive

    def flipped(state: int, owner: int, sequence: int) -> Callable[[], str]:
        finish = real(state, owner, sequence)

        def finish_flipped() -> str:
            with mock.patch.object(Header, "of", lambda *_: None):
                return finish()

        return finish_flipped

    rank.copies.settle(3)
    if island_rank == 1:
        with mock.patch.object(rank.copies, "_receive", flipped):
            rank.train(4, 4)
            rank.copies.settle(4)
    else:
        rank.train(4, 4)
        rank.copies.settle(4)
    rank.train(5, 6)
    rank.copies.close(6)
    return {"events": [(e.kind, e.as_dict().get("copied_step")) for e in rank.events]}


def test_a_copy_that_arrived_damaged_is_told_and_the_next_one_is_whole_again() -> None:
    with host(0) as first_host, host(1) as second_host:
        leader, other = run_ranks(mishear, 2, first_host | second_host)
        taken = run_ranks(take, 2, first_host | second_host, 2, {})

    assert leader["events"] == [
        ("memory_copied", 2), ("memory_copy_failed", 4), ("memory_copied", 6),
    ]  # fmt: skip
    assert other["events"] == []
    assert [rank["newest"] for rank in taken] == [6, 6]


def lack_memory(island_rank: int, paths: dict[int, str]) -> str:
    with mock.patch("os.posix_fallocate", side_effect=OSError(12, "Cannot allocate memory")):
        try:
            Rank(paths, 1)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_memory_that_the_host_does_not_give_is_an_error_that_names_the_key() -> None:
    with host(0) as paths:
        (said,) = run_ranks(lack_memory, 1, paths)

    assert said.startswith("ConfigError: islands.east.memory_checkpoint_steps = 2: this host")
    assert "copies of rank 0: Cannot allocate memory; set it to 0" in said
