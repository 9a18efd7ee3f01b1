"""What supervisors of one island say to each other, both ends in one process."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from diloco.errors import IslandFailed
from diloco.launch.host_position import HostPosition
from diloco.launch.hosts import FirstHost, HostLost, OtherHost
from diloco.launch.ranks import RanksEnd
from tests.launch.island_site import free_port
from tests.waiting import wait_until

HELLO = {"island": "east", "ranks": 6, "mesh": {"tp": 1}}
SOON_S = 10.0


def nothing() -> None:
    """Nobody asks for the end."""


class Island:
    """The hosts of one island of three."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.meeting = f"127.0.0.1:{free_port()}"
        self.first = stack.enter_context(FirstHost(self.position(0), HELLO))

    def position(self, index: int) -> HostPosition:
        return HostPosition(3, index, self.meeting)

    def other(self, index: int, **changes: Any) -> OtherHost:
        other = self.stack.enter_context(OtherHost(self.position(index), {**HELLO, **changes}))
        other.connect(nothing, time.monotonic() + SOON_S)
        return other

    def both(self) -> tuple[OtherHost, OtherHost]:
        others = self.other(1), self.other(2)
        assert self.first.gather(nothing, SOON_S) is None
        return others


@pytest.fixture
def island() -> Iterator[Island]:
    with ExitStack() as stack:
        yield Island(stack)


def heard(other: OtherHost) -> dict[str, Any]:
    return dict(wait_until(other.next))


def test_a_start_ends_well_when_it_has_on_every_host(island: Island) -> None:
    one, two = island.both()

    island.first.start("tcp://127.0.0.1:4711")
    starts = [heard(one), heard(two)]
    one.ended(RanksEnd(0))
    before = island.first.look()
    two.ended(RanksEnd(0))
    after = wait_until(island.first.look)
    island.first.over(after)

    assert starts == [{"kind": "start", "rendezvous": "tcp://127.0.0.1:4711"}] * 2
    assert before is None
    assert after == RanksEnd(0)
    assert heard(one) == {"kind": "over", "code": 0, "reason": ""}


def test_the_end_that_tells_most_is_the_islands(island: Island) -> None:
    one, two = island.both()
    island.first.start("tcp://127.0.0.1:4711")

    one.ended(RanksEnd(1, "rank 2 lost its neighbour"))
    assert wait_until(island.first.look).code == 1
    two.ended(RanksEnd(-9, "rank 4 was killed"))

    assert island.first.end() == RanksEnd(-9, "rank 4 was killed")
    assert [heard(one)["kind"], heard(one)["kind"]] == ["start", "end"]


def test_a_host_that_is_gone_has_failed_and_may_come_again(island: Island) -> None:
    one, two = island.both()
    island.first.start("tcp://127.0.0.1:4711")

    two.__exit__()
    end = wait_until(island.first.look)
    one.ended(RanksEnd(0))
    island.first.end()
    island.other(2)

    assert end.reason.startswith("host 2 of island east (--node-rank 2) broke its connection: ")
    assert (end.exit_code, end.is_worth_a_restart) == (40, True)
    assert island.first.gather(nothing, SOON_S) is None


def test_a_second_supervisor_of_a_host_replaces_the_first(island: Island) -> None:
    one, _ = island.both()
    island.first.start("tcp://127.0.0.1:4711")

    island.other(1)

    assert "(--node-rank 1) was started again" in wait_until(island.first.look).reason
    assert heard(one)["kind"] == "start"
    with pytest.raises(HostLost):
        wait_until(one.next)


def test_an_ordered_end_is_heard_between_two_starts(island: Island) -> None:
    one, _ = island.both()

    one.ended(RanksEnd(143, "SIGTERM asked", is_final=True))
    end = wait_until(lambda: island.first.gather(nothing, SOON_S))

    assert (end.exit_code, end.is_worth_a_restart) == (143, False)


def test_who_does_not_belong_is_told_why(island: Island) -> None:
    island.both()

    differing = island.other(1, mesh={"tp": 2}, ranks=4)
    beyond = OtherHost(HostPosition(9, 5, island.meeting), HELLO)
    with beyond:
        beyond.connect(nothing, time.monotonic() + SOON_S)

        def hear(other: OtherHost) -> dict[str, Any] | None:
            island.first.gather(nothing, SOON_S)
            told = other.next()
            return None if told is None else dict(told)

        told = [wait_until(lambda other=other: hear(other)) for other in (differing, beyond)]

    assert all((t["kind"], t["code"]) == ("over", 2) for t in told)
    assert "ranks: 4 there, 6 on the first host" in told[0]["reason"]
    assert "mesh: {'tp': 2} there, {'tp': 1} on the first host" in told[0]["reason"]
    assert "--node-rank 5 is none of 1 to 2" in told[1]["reason"]


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"kind": "hello"}\n', b"x" * 70_000]
)
def test_another_program_at_the_port_does_no_harm(island: Island, said: bytes) -> None:
    host, _, port = island.meeting.rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(said)
        island.both()
        stranger.settimeout(SOON_S)
        # Closed with bytes unread is a reset.
        try:
            answer = stranger.recv(100)
        except ConnectionResetError:
            answer = b""
        assert answer == b""


def test_missing_host_is_named_after_the_wait(island: Island) -> None:
    island.other(2)

    with pytest.raises(IslandFailed, match=r"host 1 .*0\.2 s; .*--island east --nnodes 3 --node"):
        island.first.gather(nothing, 0.2)
