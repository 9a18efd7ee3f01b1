"""An island's processes, for real: all alive or all ended, restarts, and the right exit code."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.island_site import (
    END_S,
    IDLE,
    NOBODY,
    START_S,
    Site,
    children,
    free_port,
    is_alive,
    island_site,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

ONE_RANK = ("islands.east.ranks=1", "islands.east.mesh={}")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with island_site(tmp_path) as site:
        yield site


def test_killed_ranks_are_started_again_until_the_budget_is_used_up(site: Site) -> None:
    supervisor = site.start(
        "east", "islands.east.max_restarts=1", "islands.east.restart_wait=100ms", program=IDLE
    )

    before = site.wait_for_ranks(0, 1)
    os.kill(before[1], signal.SIGKILL)
    after = site.wait_for_ranks(0, 1, but=frozenset(before))
    ended_first = not any(map(is_alive, before))
    os.kill(after[1], signal.SIGKILL)
    said = site.end(supervisor)

    assert supervisor.returncode == 40
    assert ended_first, "no rank of the first start met one of the second"
    assert re.findall(r"wait_s=([0-9.]+), restarts_left=(\d) of 1: rank 1 of", said) == [
        ("0.1", "0")
    ]
    assert said.count("was ended by SIGKILL; out/east-1.log ends with") == 2
    assert "islands.east.max_restarts = 1) are used up" in said
    assert f"diloco island RUN.toml --island east --coordinator {NOBODY}" in said
    assert not any(map(is_alive, after))


def test_ranks_end_when_their_supervisor_is_killed(site: Site) -> None:
    supervisor = site.start("east")
    ranks = site.wait_for_ranks(0, 1)
    assert all(map(is_alive, ranks))

    os.kill(supervisor.pid, signal.SIGKILL)

    wait_until(lambda: not any(map(is_alive, ranks)), 10.0)


def test_terminated_island_ends_its_ranks_and_says_so(site: Site) -> None:
    supervisor = site.start("east", program=IDLE)
    ranks = site.wait_for_ranks(0, 1)

    supervisor.terminate()
    said = site.end(supervisor)

    assert supervisor.returncode == 128 + signal.SIGTERM
    assert "stopping island east, signal=SIGTERM" in said
    assert not any(map(is_alive, ranks))


@pytest.mark.slow
def test_who_reached_nobody_is_started_again_whatever_the_budget(site: Site) -> None:
    supervisor = site.start(
        "east",
        *ONE_RANK,
        "transport.unreachable=1s",
        "islands.east.max_restarts=1",
        "islands.east.restart_wait=10ms",
        "islands.east.restart_reset=30s",
    )

    seen = frozenset[int]()
    for _ in range(3):
        seen |= frozenset(site.wait_for_ranks(0, but=seen))
    supervisor.terminate()
    said = site.end(supervisor)

    assert supervisor.returncode == 128 + signal.SIGTERM
    assert "rank 0 of island east" in said
    assert f"the coordinator at {NOBODY} gave no answer to control.join" in said
    assert said.count("starts again") >= 2
    assert "for 72 h of an outage" in said


def test_who_reached_nobody_and_is_never_to_be_started_again_ends_as_its_rank(site: Site) -> None:
    supervisor = site.start(
        "east", *ONE_RANK, "transport.unreachable=1s", "islands.east.max_restarts=0"
    )

    said = site.end(supervisor, START_S + END_S)

    assert supervisor.returncode == 30
    assert "its restarts (islands.east.max_restarts = 0) are used up" in said


def test_variables_of_a_launcher_make_it_a_rank_of_that_job(site: Site) -> None:
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job["GLOO_SOCKET_IFNAME"] = "lo"

    ranks = [site.start("east", "transport.unreachable=1s", RANK=str(r), **job) for r in range(2)]
    seen = [0, 0]
    while ranks[0].poll() is None:
        seen = [max(a, len(children(rank.pid))) for a, rank in zip(seen, ranks, strict=True)]
        time.sleep(0.05)
    for rank in ranks:
        site.end(rank)

    # Rank 0 could not reach the coordinator; rank 1 lost rank 0 while it waited for the answer.
    assert ranks[0].returncode == 30
    assert ranks[1].returncode not in (0, None)
    assert "gave no answer to control.join" in site.log("east-0.log")
    assert seen == [0, 0]
    assert not (site.output / "resolved-east.toml").exists()


@pytest.mark.parametrize(
    ("island", "options", "words"),
    [
        ("west", (), "islands.west.ranks = 1, but the launcher started 2"),
        (
            "east",
            ("--nnodes", "2", "--rdzv", "127.0.0.1:29998"),
            "--nnodes 2: RANK, WORLD_SIZE and MASTER_ADDR are set",
        ),
    ],
    ids=["another-size", "spread-twice"],
)
def test_job_that_does_not_fit_is_refused(
    site: Site, island: str, options: tuple[str, ...], words: str
) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}

    process = site.start(island, options=options, **job)
    said = site.end(process, START_S)

    assert process.returncode == 2
    assert words in " ".join(said.split())
