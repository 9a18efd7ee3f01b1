"""Files of emulated networks: what is shipped loads, what is wrong is named with its path."""

from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco.simulations.emulate.config import load_wan
from diloco.simulations.emulate.network import build_network

SHIPPED = sorted((Path(__file__).resolve().parents[2] / "configs" / "wan").glob("*.toml"))

LINK = """
[links.thin]
source = "a test"
up = { bandwidth = "5Mbit/s", delay = "30ms" }
down = { bandwidth = "5Mbit/s", delay = "30ms" }
"""
STAR = f"""
topology = "star"
{LINK}
[islands.a]
link = "thin"
[islands.b]
link = "thin"
"""
MESH = f"""
topology = "mesh"
coordinator_at = "a"
link = "thin"
{LINK}
[islands.a]
[islands.b]
"""


def write(directory: Path, text: str) -> Path:
    path = directory / "wan.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_file_loads_and_its_links_say_their_source(path: Path) -> None:
    wan = load_wan(path)
    network = build_network(wan)

    assert all(wire.profile.source for wire in network.wires)
    for node in network.nodes:
        assert network.routes(node).keys() == {*network.nodes} - {node}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (STAR.replace('"5Mbit/s"', "5", 1), ["links.thin.up.bandwidth: 5", "Rate of IP packets"]),
        (STAR.replace('"5Mbit/s"', '"5"', 1), ["links.thin.up.bandwidth", "with a unit", "Mbit/s"]),
        (STAR.replace('"30ms"', '"-1ms"', 1), ["links.thin.up.delay", "'-1ms'", "0 or more"]),
        (
            STAR.replace('"30ms" }', '"30ms", loss = 1.0 }', 1),
            ["links.thin.up.loss: 1.0: is out of range", ">= 0 and < 1", "packets that are lost"],
        ),
        (
            STAR.replace('"30ms" }', '"30ms", jiter = "1ms" }', 1),
            ["links.thin.up.jiter", 'did you mean "jitter"?'],
        ),
        (STAR.replace('source = "a test"', ""), ["links.thin.source: missing"]),
        (STAR.replace('"star"', '"ring"'), ["topology", '"star" or "mesh" or "two-tier"']),
        ("topologie = 'star'" + STAR, ["topologie", 'did you mean "topology"?']),
        (STAR.replace('[islands.b]\nlink = "thin"', "[islands.b]"), ["islands.b.link", "star"]),
        (STAR.replace('link = "thin"', 'link = "fat"', 1), ["islands.a.link", "fat", "thin"]),
        (STAR.replace("islands.b", "islands.core"), ["islands.core", "node in the middle"]),
        (STAR.replace("islands.b", "islands.B_1"), ["islands.B_1", "must match"]),
        (STAR + 'region = "eu"', ["islands.b.region", "two-tier"]),
        ("coordinator_at = 'c'" + STAR, ['coordinator_at: "c": must be one of a, b, core']),
        (MESH.replace('coordinator_at = "a"', ""), ["coordinator_at", "must be one of a, b"]),
        (MESH.replace('link = "thin"', "", 1), ["link", "a/b"]),
        (MESH + 'link = "thin"', ["islands.b.link", "in a mesh pairs have links"]),
        (
            MESH + '[paths.x]\nbetween = ["a", "c"]\nlink = "thin"',
            ["paths.x.between", "must be two islands"],
        ),
        (
            STAR.replace('"star"', '"two-tier"'),
            ["islands.a.region", "islands.b.region", "[regions.NAME]"],
        ),
        (
            STAR + '[changes.cut]\nat = "1s"\nlink = "c"\noutage = true',
            ["changes.cut.link", "must be one of a, b"],
        ),
        (STAR + '[changes.cut]\nat = 3\nlink = "a"', ["changes.cut.at: 3", "was started"]),
        (STAR + "[tcp]\nmax_buffer = '4'", ["tcp.max_buffer", "with a unit"]),
        ("[", ["is not valid TOML"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_wrong_file_is_refused_with_path_value_and_hint(
    tmp_path: Path, text: str, said: list[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_wan(write(tmp_path, text))

    for words in said:
        assert words in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load_wan(tmp_path / "nowhere.toml")
