"""Which connections of strangers are too many."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest

from diloco.transport.own_sockets import can_look
from diloco.transport.security.connection_limits import ConnectionLimits, excess


def test_an_address_keeps_its_newest_connections() -> None:
    hosts = {5: "a", 3: "a", 8: "b", 1: "a"}  # the oldest first

    assert excess(hosts, per_address=2, in_all=10) == [5]
    assert excess(hosts, per_address=3, in_all=10) == []


def test_where_all_are_too_many_each_address_keeps_an_equal_share() -> None:
    hosts = dict.fromkeys(range(90), "many") | {100 + n: f"one {n}" for n in range(10)}

    closed = excess(hosts, per_address=50, in_all=33)

    assert sorted(closed) == list(range(87))  # 33 // 11 stay


def test_whatever_comes_the_bounds_hold_and_nothing_goes_needlessly() -> None:
    rng = random.Random(0)
    for _ in range(300):
        hosts = {n: f"host {int(rng.paretovariate(0.5))}" for n in range(rng.randrange(200))}
        per_address, in_all = rng.randrange(1, 40), rng.randrange(1, 150)

        closed = set(excess(hosts, per_address=per_address, in_all=in_all))

        left = [host for number, host in hosts.items() if number not in closed]
        assert len(left) <= in_all
        assert all(left.count(host) <= per_address for host in left)
        counts = [list(hosts.values()).count(host) for host in {*hosts.values()}]
        if len(hosts) <= in_all and all(count <= per_address for count in counts):
            assert not closed


@pytest.mark.skipif(not can_look(), reason="needs a system that shows descriptors")
def test_connections_of_callers_and_to_other_ports_stay() -> None:
    async def run() -> None:
        ends: list[asyncio.StreamWriter] = []

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ends.append(writer)

        listening, other = [await asyncio.start_server(accept, "127.0.0.1", 0) for _ in range(2)]
        port, other_port = (s.sockets[0].getsockname()[1] for s in (listening, other))
        strangers = ConnectionLimits(per_address=2, in_all=10)
        raw = []
        for number in range(8):
            raw.append(socket.create_connection(("127.0.0.1", other_port if number == 7 else port)))
            if number in (0, 3):
                host, own_port = raw[-1].getsockname()
                strangers.called(f"ipv4:{host}:{own_port}")
        while len(ends) < len(raw):
            await asyncio.sleep(0)

        assert strangers.close_excess(port, now=0.0) == 3
        assert strangers.close_excess(port, now=0.0) == 0
        open_ones = []
        for number, each in enumerate(raw):
            each.setblocking(False)
            try:
                each.recv(1)
            except BlockingIOError:
                open_ones.append(number)
            each.close()
        assert {0, 3, 7} < set(open_ones)
        assert len(open_ones) == 5
        for end in ends:
            end.close()
        for server in (listening, other):
            server.close()
            await server.wait_closed()

    asyncio.run(run())
