"""Who is to blame when a collective does not end, or fails."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from diloco.config.load import load_config
from diloco.island.groups import make_groups
from diloco.launch.rank.flight_recorder import (
    Collective,
    FlightRecorders,
    PendingCollectives,
    pending_entries,
)
from diloco.launch.rank.job import Job, limit_collectives
from diloco.launch.rank.lost_rank import Seen, Sign, describe, find_culprits
from diloco.launch.rank.watch import RankWatch, is_of_collective, signed
from diloco.telemetry.events import Event, RankLost
from tests.distributed import RankFailed, run_ranks
from tests.run_files import write_run

LIMIT_S = 10.0
SILENT_S = 5.0


def seen(
    inner_step: int,
    *,
    waits_in: str = "",
    error: str = "",
    has_left: bool = False,
    silent_s: float = 0.0,
) -> Seen:
    where = "collect (diloco/island/lanes/shards.py:138)"
    return Seen(Sign(3, "host-7", inner_step, where, 12.0, waits_in, error, has_left), silent_s)


WAITS, LEFT = seen(41, waits_in="gloo:all_reduce"), seen(41, has_left=True)
ASLEEP, FROZEN = seen(41), seen(41, silent_s=9.0)


@pytest.mark.parametrize(
    ("others", "is_overdue", "culprits"),
    [
        ({1: WAITS, 2: ASLEEP, 3: WAITS}, True, [2]),
        ({1: WAITS, 2: FROZEN, 3: ASLEEP}, True, [2]),
        ({1: FROZEN, 2: seen(41, error="ValueError('no')")}, True, [2]),
        ({1: ASLEEP, 2: seen(40), 3: seen(39, waits_in="nccl:send")}, True, [2]),
        ({1: seen(41, has_left=True, silent_s=9.0), 2: Seen(None, 9.0)}, True, [2]),
        ({1: WAITS, 2: LEFT}, True, []),
        ({1: ASLEEP, 2: LEFT}, False, []),
        ({1: ASLEEP, 2: FROZEN}, False, [2]),
    ],
    ids=[
        "one-that-waits-in-nothing",
        "one-that-is-silent-rather",
        "one-that-failed-by-itself-first",
        "the-furthest-behind-of-those-that-do-not-wait",
        "one-never-seen-and-not-one-that-left",
        "nobody-where-all-wait",
        "nobody-that-lives-where-a-connection-broke",
        "one-that-died-where-a-connection-broke",
    ],
)
def test_the_rank_for_which_the_others_wait_is_found(
    others: dict[int, Seen], is_overdue: bool, culprits: list[int]
) -> None:
    assert find_culprits(others, silent_s=SILENT_S, is_overdue=is_overdue) == culprits


def test_what_is_known_of_a_culprit_is_said_with_its_host_and_where_it_stands() -> None:
    said = describe(FROZEN, SILENT_S)

    for part in ("9.0 s", "host-7", "inner step 41", "12.0 s in collect (diloco/island/lanes"):
        assert part in said


def collective(record: int, *, recorder: str = "gloo", timeout_s: float = LIMIT_S) -> Collective:
    return Collective(recorder, record, "0", f"{recorder}:all_reduce", "0", record, timeout_s)


@pytest.mark.parametrize(
    ("looks", "is_due"),
    [
        ([(0, 7, [8]), (5, 7, [8]), (9.9, 7, [8])], False),
        ([(0, 7, [8]), (5, 7, [8]), (10, 7, [8])], True),
        ([(0, 7, [8]), (5, 8, [9]), (10, 8, [9])], False),
        ([(0, 7, []), (5, 7, []), (99, 7, [9])], False),
        ([(0, 7, [8]), (5, None, []), (10, 7, [8])], False),
    ],
    ids=[
        "not-yet",
        "at-the-limit",
        "one-has-ended",
        "just-begun-though-the-last-ones-ended-in-another-order",
        "nothing-was-pending-meanwhile",
    ],
)
def test_a_collective_is_overdue_once_its_group_stands_still_for_the_limit(
    looks: list[tuple[float, int | None, list[int]]], is_due: bool
) -> None:
    pending = PendingCollectives(LIMIT_S)
    for now, completed, records in looks:
        pending.look(
            now,
            {} if completed is None else {("gloo", "0"): completed},
            functools.partial(list, map(collective, records)),
        )

    assert pending.is_due(now) == is_due


@pytest.mark.parametrize(
    ("recorder", "timeout_s", "is_due"),
    [("gloo", 70.0, False), ("nccl", 70.0, True), ("nccl", 71.0, False)],
)
def test_a_group_with_more_patience_keeps_it_and_nccl_has_a_minute_more_than_the_island(
    recorder: str, timeout_s: float, is_due: bool
) -> None:
    pending = PendingCollectives(LIMIT_S)
    found = [collective(1, recorder=recorder, timeout_s=timeout_s)]
    for now in (0, 5, 10):
        pending.look(now, {(recorder, "0"): 0}, lambda: found)

    assert pending.is_due(10) == is_due


def test_what_was_sent_in_a_batch_is_over_once_the_batch_is() -> None:
    def entry(record: int, group: int, *, is_retired: bool) -> dict[str, Any]:
        return {
            "record_id": record,
            "pg_id": group,
            "retired": is_retired,
            "profiling_name": "nccl:send 0->1",
            "process_group": ["3", "undefined"],
            "is_p2p": True,
            "p2p_seq_id": record,
            "timeout_ms": 10_000,
        }

    ended = [entry(1, 0, is_retired=False), entry(2, 0, is_retired=True)]
    begun = [entry(3, 0, is_retired=False), entry(4, 1, is_retired=True)]

    (found,) = pending_entries("nccl", [*ended, *begun])
    assert str(found) == "nccl:send 0->1 number 3 of group 3"


class GlooAsNccl(FlightRecorders):
    """Gloo's collectives under the name of NCCL, so that their timeout may be later, too."""

    def __init__(self, *, has_nccl: bool) -> None:
        super().__init__(has_nccl=has_nccl)
        self._dumps = {"nccl": self._dumps["gloo"]}


def started(
    island_rank: int,
    directory: Path,
    on_event: Callable[[Event], None],
    recorders: FlightRecorders,
) -> RankWatch:
    run_file = write_run(directory / str(island_rank), {"west": ""})
    watch = RankWatch(
        load_config(run_file, ["islands.west.collective_timeout=1s"], island="west"),
        Job(island_rank, 2, ""),
        directory,
        recorders=recorders,
        inner_step=lambda: 41,
        on_event=on_event,
    )
    watch.start()
    return watch


def fail_and_be_seen(island_rank: int, directory: Path) -> tuple[int, list[Event]]:
    """Rank 0 fails by itself, and rank 1 in a collective that it left."""
    told: list[Event] = []
    dist.all_reduce(torch.ones(1))
    watch = started(island_rank, directory, told.append, FlightRecorders(has_nccl=False))
    code = watch.failed(ValueError("no") if island_rank == 0 else dist.DistError("left"))
    watch.stop()
    return code, told


def test_a_rank_that_failed_by_itself_is_named_by_the_ranks_that_it_left(tmp_path: Path) -> None:
    (code, told), (code_of_other, told_of_other) = run_ranks(fail_and_be_seen, 2, tmp_path)

    assert (code, told, code_of_other) == (1, [], 40)
    (lost,) = told_of_other
    assert isinstance(lost, RankLost)
    assert lost.ranks == (0,)
    assert "lost rank 0: it failed of ValueError('no')" in lost.text
    assert "gloo:all_reduce" in Path(lost.dump).read_text()


def hang(island_rank: int, directory: Path) -> None:
    """Rank 0 comes to no collective, and the training thread of rank 1 never returns from it."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=30))

    def write(event: Event) -> None:
        (directory / f"{island_rank}.json").write_text(json.dumps(event.as_dict()))

    started(island_rank, directory, write, GlooAsNccl(has_nccl=False))
    if island_rank == 1:
        dist.all_reduce(torch.ones(1), group=group)
    time.sleep(1e6)


def test_a_rank_names_another_and_ends_though_its_training_thread_never_returns(
    tmp_path: Path,
) -> None:
    with pytest.raises(RankFailed, match="exit code 40"):
        run_ranks(hang, 2, tmp_path, timeout_s=20)

    told = json.loads((tmp_path / "1.json").read_text())
    assert (told["ranks"], told["inner_step"]) == ([0], 41)
    assert told["collective"] == "gloo:all_reduce number 1 of group 1"
    assert "lost rank 0: it lives, and comes to no collective" in told["text"]


def test_of_512_ranks_those_with_a_sign_of_life_are_found_with_few_questions() -> None:
    class Asked(HashStore):
        num_questions = 0

        def check(self, keys: list[str]) -> bool:
            self.num_questions += 1
            return bool(super().check(keys))

    store, silent = Asked(), {17, 400}
    for rank in set(range(512)) - silent:
        store.set(f"diloco/sign/{rank}", "")

    assert signed(store, list(range(512))) == sorted(set(range(512)) - silent)
    assert store.num_questions < 40


def pending_while_another_is_away(island_rank: int) -> tuple[list[str], int]:
    recorders, store = FlightRecorders(has_nccl=False), dist.distributed_c10d._get_default_store()
    if island_rank == 1:
        store.wait(["looked"])
    work = dist.all_reduce(torch.ones(1), async_op=True)
    found = [str(each) for each in recorders.pending()], len(recorders.completed())
    store.set("looked", "")
    work.wait()
    return found


def test_the_recorder_says_in_which_collective_a_rank_waits() -> None:
    (names, num_groups), _ = run_ranks(pending_while_another_is_away, 2)

    assert (names, num_groups) == (["gloo:all_reduce number 1 of group 0 (default_pg)"], 1)


def timeouts_s(island_rank: int) -> list[float]:
    """Of the default group, one that an optimizer made, and the loop's for starts."""
    loop = make_groups(None, patience_s=30.0, collective_s=7.0).start
    groups = [dist.group.WORLD, dist.new_group([0, 1]), loop]
    limit_collectives(7.0)
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


def test_a_rank_is_given_up_in_every_group_but_the_loops_have_their_own_patience() -> None:
    assert run_ranks(timeouts_s, 2, timeout_s=50) == [[7.0, 7.0, 37.0]] * 2


def test_an_error_of_this_rank_is_not_taken_for_a_lost_one() -> None:
    assert is_of_collective(RuntimeError("[/third_party/gloo/tcp/pair.cc] Connection closed"))
    assert is_of_collective(dist.DistNetworkError("reset"))
    assert not is_of_collective(RuntimeError("shapes do not match"))
    assert not is_of_collective(ValueError("gloo"))
