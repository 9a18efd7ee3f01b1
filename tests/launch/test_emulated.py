"""A run's file, laid over the network that surrounds the run."""

import json
from pathlib import Path

import pytest

from diloco.config.load import load_config, resolved_toml
from diloco.errors import ConfigError
from diloco.launch.process.emulated import VARIABLE, Emulated
from tests.run_files import write_run

EMULATED = Emulated(
    {
        "wan": "wan.toml",
        "coordinator": "10.77.0.4",
        "islands": {name: {"enter": ["enter", name]} for name in ("east", "west")},
    }
)


def test_coordinator_and_syncer_listen_where_islands_reach_them(tmp_path: Path) -> None:
    config = load_config(
        write_run(tmp_path, {"east": "", "west": ""}, inner_steps=4),
        ["coordinator.listen=127.0.0.1:4711", "transport.link=thin-5M-60ms"],
    )

    placed = EMULATED.placed(config)

    assert placed.coordinator.listen == "10.77.0.4:4711"
    assert placed.coordinator.syncer_listen == "10.77.0.4:0"
    assert placed.transport.link == ""
    again = tmp_path / "again.toml"
    again.write_text(resolved_toml(placed))
    assert load_config(again) == placed  # what every process of the run reads
    assert EMULATED.prefix("west") == ["enter", "west"]


def test_an_encrypted_run_stays_encrypted(tmp_path: Path) -> None:
    config = load_config(
        write_run(tmp_path, {"east": ""}, inner_steps=4), [f"transport.certs={tmp_path}"]
    )

    assert not EMULATED.placed(config).transport.insecure


def test_islands_that_the_network_has_not_are_named(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path, {"east": "", "north": ""}, inner_steps=4))

    with pytest.raises(ConfigError, match=r"no island north; it has east, west"):
        EMULATED.placed(config)


def test_the_environment_says_where_it_is(tmp_path: Path) -> None:
    description = tmp_path / "emulation.json"
    description.write_text(json.dumps(EMULATED.description))

    assert Emulated.surrounding({}) is None
    assert Emulated.surrounding({VARIABLE: str(description)}) == EMULATED
    with pytest.raises(ConfigError, match="has ended"):
        Emulated.surrounding({VARIABLE: str(tmp_path / "gone.json")})
