import pytest

from diloco.transport.libp2p.address import (
    PeerAddress,
    is_peer_address,
    multiaddr_from_bytes,
    multiaddr_to_bytes,
    parse_peer_address,
    peer_id_from_bytes,
    peer_id_to_bytes,
    tcp_port,
    through,
    to_multiaddr,
)

PEER = "12D3KooWN5P2Q2iiazQx4nT1YLy7dtk141rSerXCWfCod4awDsn9"
RSA_PEER = "QmQLxPbD2BoyiGKB3RuTTZEs2uK1avhQZZyPkagYHoKiim"


@pytest.mark.parametrize(
    ("text", "ways"),
    [
        (f"/p2p/{PEER}", ()),
        (f"/ip4/192.0.2.7/tcp/4711/p2p/{PEER}", ("/ip4/192.0.2.7/tcp/4711",)),
        (
            f"/ip6/2001:db8::1/tcp/1/p2p/{PEER},/dns/hub.example.org/tcp/2/p2p/{PEER}",
            ("/ip6/2001:db8::1/tcp/1", "/dns/hub.example.org/tcp/2"),
        ),
        (
            f"/ip4/192.0.2.7/tcp/4711/p2p/{RSA_PEER}/p2p-circuit/p2p/{PEER}",
            (f"/ip4/192.0.2.7/tcp/4711/p2p/{RSA_PEER}/p2p-circuit",),
        ),
    ],
    ids=["identity", "one way", "two ways", "relayed"],
)
def test_addresses_are_read_and_written(text: str, ways: tuple[str, ...]) -> None:
    address = parse_peer_address(text)

    assert (address.peer_id, address.routes) == (PEER, ways)
    assert str(address) == text
    assert is_peer_address(text)
    for way in ways:
        assert multiaddr_from_bytes(multiaddr_to_bytes(way)) == way


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "127.0.0.1:80",
        "/ip4/127.0.0.1/tcp/80",
        "/p2p/short",
        f"/p2p/{PEER},",
        f"/p2p/{PEER},/p2p/{RSA_PEER}",
        f"/p2p/{PEER}/tcp/1",
        f"ip4/1.2.3.4/p2p/{PEER}",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be the multiaddr of one peer"):
        parse_peer_address(text)


def test_bytes_are_those_of_the_specification() -> None:
    # Examples of multiformats/multiaddr and libp2p/specs (peer-ids).
    assert multiaddr_to_bytes("/ip4/127.0.0.1/udp/1234").hex() == "047f000001910204d2"
    assert multiaddr_to_bytes("/ip6/::1/tcp/80").hex() == f"29{'0' * 31}1060050"
    assert multiaddr_to_bytes("/dns4/a.b/tcp/1").hex() == "3603" + b"a.b".hex() + "060001"
    assert peer_id_to_bytes(PEER)[:6].hex() == "002408011220"  # identity of an Ed25519 key
    assert peer_id_to_bytes(RSA_PEER)[:2].hex() == "1220"  # sha2-256
    for peer in (PEER, RSA_PEER):
        assert peer_id_from_bytes(peer_id_to_bytes(peer)) == peer


@pytest.mark.parametrize(
    "text",
    ["/ip4/::1/tcp/1", "/ip4/1.2.3/tcp/1", "/tcp/70000", "/tcp", "/carrier-pigeon/1", "/tcp/-1"],
)
def test_multiaddrs_that_cannot_be_written_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no multiaddr of ip4"):
        multiaddr_to_bytes(text)


@pytest.mark.parametrize("data", ["04", "047f0000", "ff", "80808080808080808080", "7f", "3603"])
def test_bytes_that_are_no_multiaddr_are_refused(data: str) -> None:
    with pytest.raises(ValueError):
        multiaddr_from_bytes(bytes.fromhex(data))


@pytest.mark.parametrize(
    ("address", "multiaddr", "port"),
    [
        ("127.0.0.1:80", "/ip4/127.0.0.1/tcp/80", 80),
        ("[::]:0", "/ip6/::/tcp/0", 0),
        ("hub.example.org:4711", "/dns/hub.example.org/tcp/4711", 4711),
    ],
)
def test_host_and_port_become_a_multiaddr(address: str, multiaddr: str, port: int) -> None:
    assert to_multiaddr(address) == multiaddr
    assert tcp_port(parse_peer_address(f"{multiaddr}/p2p/{PEER}")) == port


def test_a_way_through_a_relay_is_none_of_the_peers_own_ports() -> None:
    relay = parse_peer_address(f"/ip4/192.0.2.7/tcp/4711/p2p/{RSA_PEER}")
    (way,) = through(relay)

    assert way == f"/ip4/192.0.2.7/tcp/4711/p2p/{RSA_PEER}/p2p-circuit"
    assert multiaddr_from_bytes(multiaddr_to_bytes(way)) == way
    assert tcp_port(PeerAddress(PEER, (way,))) == 0
    assert tcp_port(PeerAddress(PEER, (way, "/ip4/192.0.2.9/tcp/12"))) == 12
