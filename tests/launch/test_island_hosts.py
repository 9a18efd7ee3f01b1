"""An island of two hosts: two supervisors on loopback addresses, one rank each, for real."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.island_site import (
    END_S,
    IDLE,
    START_S,
    Site,
    free_port,
    is_alive,
    island_site,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

#: Linux answers on all of 127.0.0.0/8: the first host's address is not the other's.
FIRST_HOST = "127.0.0.2"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with island_site(tmp_path) as site:
        yield site


@pytest.fixture
def rdzv() -> str:
    return f"{FIRST_HOST}:{free_port(FIRST_HOST)}"


def host(
    site: Site, rdzv: str, node_rank: int, *overrides: str, **how: Any
) -> subprocess.Popen[bytes]:
    options = ("--nnodes", "2", "--node-rank", str(node_rank), "--rdzv", rdzv)
    wait = "islands.east.restart_wait=100ms"
    return site.start("east", wait, *overrides, options=options, **how)


def test_a_rank_killed_on_one_host_restarts_the_ranks_of_both(site: Site, rdzv: str) -> None:
    budget = "islands.east.max_restarts=1"
    other, first = (host(site, rdzv, node, budget, program=IDLE) for node in (1, 0))
    before = site.wait_for_ranks(0, 1)

    os.kill(before[1], signal.SIGKILL)
    after = site.wait_for_ranks(0, 1, but=frozenset(before))
    os.kill(after[0], signal.SIGKILL)
    ends = site.end(first), site.end(other)

    assert (first.returncode, other.returncode) == (40, 40), ends
    assert re.findall(r"restarts_left=(\d) of 1: (rank \d) of island east", ends[0]) == [
        ("0", "rank 1")
    ]
    assert "was ended by SIGKILL" in ends[0]
    assert "islands.east.max_restarts = 1) are used up" in ends[0]
    assert f"--island east --nnodes 2 --node-rank 0 --rdzv {rdzv}" in ends[0]
    assert "the first host says: rank 0 of island east" in ends[1]
    assert not any(map(is_alive, before + after))


@pytest.mark.slow
def test_either_host_may_die_and_come_back_and_a_signal_at_one_ends_both(
    site: Site, rdzv: str
) -> None:
    first, other = host(site, rdzv, 0), host(site, rdzv, 1)
    ranks = site.wait_for_ranks(0, 1)

    os.kill(other.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, ranks)), END_S)
    other = host(site, rdzv, 1)
    ranks += site.wait_for_ranks(0, 1, but=frozenset(ranks))
    said_by_first = site.said(first)
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, ranks)), END_S)
    first = host(site, rdzv, 0)
    ranks += site.wait_for_ranks(0, 1, but=frozenset(ranks))
    other.terminate()
    ends = site.end(first), site.end(other)

    assert [first.returncode, other.returncode] == [128 + signal.SIGTERM] * 2, ends
    assert "host 1 of island east (--node-rank 1) broke its connection" in said_by_first
    assert said_by_first.count("starts again") == 1
    assert "SIGTERM asked the supervisor of island east on host 1 to end" in ends[0]
    assert f"the first host of island east at {rdzv} is gone" in ends[1]
    assert "stopping island east, signal=SIGTERM" in ends[1]
    assert not any(map(is_alive, ranks))


@pytest.mark.slow
def test_a_signal_at_the_first_host_ends_the_wait_of_the_other(site: Site, rdzv: str) -> None:
    first, other = host(site, rdzv, 0), host(site, rdzv, 1)
    site.wait_for_ranks(1)

    first.send_signal(signal.SIGINT)
    ends = site.end(first), site.end(other)

    assert [first.returncode, other.returncode] == [128 + signal.SIGINT] * 2, ends
    assert "the first host says: SIGINT asked the supervisor of island east on host 0" in ends[1]


@pytest.mark.parametrize("present", [0, 1])
def test_a_host_that_stays_away_ends_the_wait_with_the_command_to_type(
    site: Site, rdzv: str, present: int
) -> None:
    alone = host(site, rdzv, present, "transport.unreachable=1s")

    said = " ".join(site.end(alone, START_S).split())

    assert alone.returncode == 40
    if present == 0:
        assert "host 1 of this island did not come within 1 s" in said
        assert f"--island east --nnodes 2 --node-rank 1 --rdzv {rdzv}" in said
    else:
        assert f"the first host of this island does not answer at --rdzv {rdzv}" in said


def test_another_program_at_the_meeting_place_is_no_first_host(site: Site, rdzv: str) -> None:
    address, _, port = rdzv.rpartition(":")
    with socket.create_server((address, int(port))) as stranger:
        alone = host(site, rdzv, 1, "transport.unreachable=100ms")
        stranger.settimeout(0.1)
        while alone.poll() is None:
            with contextlib.suppress(TimeoutError):
                stranger.accept()[0].close()

    assert alone.returncode == 40
    assert f"no first host of this island is at --rdzv {rdzv}" in site.said(alone)


def test_a_host_that_trains_something_else_is_refused_by_name(site: Site, rdzv: str) -> None:
    first = host(site, rdzv, 0)
    other = host(site, rdzv, 1, "run.seed=2", "islands.east.tokens_per_inner_step=64")

    said = site.end(other, START_S)

    assert other.returncode == 2
    assert "tokens_per_inner_step: 64 there, 128 on the first host" in said
    assert "configuration: " in said
    assert first.poll() is None
