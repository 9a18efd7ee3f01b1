"""Hosts of an island: what may be typed, which ranks follow, where the hosts meet."""

import socket

import pytest

from diloco.errors import ConfigError
from diloco.launch.host_position import HostPosition

RDZV = "10.0.0.1:29400"


@pytest.mark.parametrize(
    ("nnodes", "node_rank", "rdzv", "words"),
    [
        (0, 0, RDZV, r"--nnodes 0: .* ranks = 4"),
        (3, 0, RDZV, r"--nnodes 3: .* ranks = 4, which must be a multiple"),
        (2, 2, RDZV, r"--node-rank 2: must be from 0 to 1"),
        (2, -1, RDZV, r"--node-rank -1: must be from 0 to 1"),
        (1, 1, "", r"--node-rank 1: must be from 0 to 0"),
        (1, 0, "abc", r"--rdzv abc: .* HOST:PORT"),
        (None, 0, RDZV, r"--node-rank 0 and --rdzv 10.0.0.1:29400 .*: give --nnodes too"),
        (None, 1, "", r"--node-rank 1 and --rdzv \(not given\) .*: give --nnodes too"),
        (2, 0, "", r"--rdzv \(not given\): with --nnodes 2 give HOST:PORT"),
        (2, 0, "10.0.0.1", r"--rdzv 10.0.0.1: .* HOST:PORT"),
        (2, 0, "10.0.0.1:0", r"--rdzv 10.0.0.1:0: .* HOST:PORT"),
        (2, 0, "10.0.0.1:99999", r"--rdzv 10.0.0.1:99999: .* HOST:PORT"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    nnodes: int | None, node_rank: int, rdzv: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        HostPosition.of(4, nnodes=nnodes, node_rank=node_rank, rdzv=rdzv)


def test_hosts_hold_consecutive_ranks_and_say_their_options() -> None:
    positions = [HostPosition.of(4, nnodes=2, node_rank=index, rdzv=RDZV) for index in range(2)]

    assert [list(position.island_ranks(4)) for position in positions] == [[0, 1], [2, 3]]
    assert positions[1].options() == f" --nnodes 2 --node-rank 1 --rdzv {RDZV}"


@pytest.mark.parametrize(("nnodes", "rdzv"), [(None, ""), (1, ""), (1, RDZV)])
def test_one_host_holds_all_ranks_and_meets_nobody(nnodes: int | None, rdzv: str) -> None:
    alone = HostPosition.of(4, nnodes=nnodes, node_rank=0, rdzv=rdzv)

    assert (list(alone.island_ranks(4)), alone.options()) == ([0, 1, 2, 3], "")
    assert alone.host == "127.0.0.1"


def test_the_first_host_listens_where_it_was_told() -> None:
    with HostPosition(2, 0, "127.0.0.2:29400").listen(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.2"


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_refused_on_the_first_host(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"--rdzv {host}:29400: .* cannot listen at {host}"):
        HostPosition(2, 0, f"{host}:29400").listen(29400)


def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(ConfigError, match=rf"cannot listen at 127.0.0.1:{port}: .* in use"):
            HostPosition(2, 0, f"127.0.0.1:{port}").listen(port)


def test_a_name_that_means_this_machine_only_here_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resolve(*_: object, **__: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    with pytest.raises(ConfigError, match=r"box is 127.0.1.1 on this host, .* give its address"):
        HostPosition(2, 0, "box:29400").listen(0)


def test_the_interface_that_faces_the_first_host_is_named() -> None:
    assert HostPosition().interface() == "lo"
    assert HostPosition(2, 1, "127.0.0.2:29400").interface() == "lo"
    assert HostPosition(2, 1, "no-such-host.invalid:29400").interface() == ""
