"""A run's CA as a directory, and `diloco certs` over it."""

from __future__ import annotations

import datetime
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.errors import ConfigError
from diloco.launch.run_ca import RunCa
from diloco.launch.state_dir import hold
from tests.run_files import write_run
from transport.identity import Identity, Role
from transport.tls import Tls
from transport.tokens import TABLE_FILE, TokenTable, read_token

EAST = Identity("test", Role.ISLAND, "east")


class Clock:
    def __init__(self) -> None:
        self.now = datetime.datetime.now(datetime.UTC)

    def __call__(self) -> datetime.datetime:
        return self.now

    def forward(self, days: float) -> None:
        self.now += datetime.timedelta(days=days)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ca(tmp_path: Path, clock: Clock) -> RunCa:
    ca = RunCa(tmp_path / "certs", clock)
    ca.create("test", 1000)
    return ca


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_it_issues_is_what_a_process_loads(ca: RunCa) -> None:
    path = ca.issue("island/east", 30, again=False)

    assert Tls(ca.directory, EAST).identity == EAST
    assert (ca.run, [entry.identity for entry in ca.entries()]) == ("test", [EAST])
    assert mode_of(path) == mode_of(ca.directory / "ca.key") == 0o600
    assert mode_of(ca.directory) == 0o700
    assert not list(ca.directory.glob("*.tmp"))


def test_one_ca_a_directory_and_one_certificate_a_name(ca: RunCa) -> None:
    with pytest.raises(ConfigError, match="holds a CA already"):
        ca.create("other", 10)
    ca.issue("syncer", 30, again=False)
    with pytest.raises(ConfigError, match="diloco certs rotate syncer replaces it"):
        ca.issue("syncer", 30, again=False)
    with pytest.raises(ConfigError, match="diloco certs issue operator makes it"):
        ca.issue("operator", 30, again=True)
    with pytest.raises(ConfigError, match="write coordinator, syncer, operator or island/NAME"):
        ca.issue("root", 30, again=False)


def test_a_creation_that_was_killed_is_begun_again(tmp_path: Path, clock: Clock) -> None:
    ca = RunCa(tmp_path, clock)
    (tmp_path / "ca.key").write_text("half")

    ca.create("test", 10)

    assert ca.run == "test"


def test_rotation_replaces_the_file_and_revokes_when_asked(ca: RunCa) -> None:
    ca.issue("island/east", 30, again=False)
    tls = Tls(ca.directory, EAST)
    before = tls.stamp
    ca.issue("island/east", 30, again=True)
    assert tls.stamp != before
    assert [(e.is_current, e.is_revoked) for e in ca.entries()] == [(False, False), (True, False)]

    assert ca.revoke("island/east", keep_newest=True) == 1
    assert [e.is_revoked for e in ca.entries()] == [True, False]
    assert ca.revoke("island/east", keep_newest=False) == 1
    assert ca.revoke("island/east", keep_newest=False) == 0
    with pytest.raises(ConfigError, match="no certificate was issued to operator"):
        ca.revoke("operator", keep_newest=False)


def test_revocations_add_up(ca: RunCa) -> None:
    for short in ("island/east", "island/west", "island/asia"):
        ca.issue(short, 30, again=False)

    ca.revoke("island/east", keep_newest=False)
    ca.revoke("island/asia", keep_newest=False)

    assert [entry.is_revoked for entry in ca.entries()] == [True, False, True]


def test_a_token_is_drawn_in_place_of_the_last(ca: RunCa) -> None:
    path = ca.make_token("island/east")
    first = read_token(path)
    second = read_token(ca.make_token("island/east"))
    table = TokenTable(ca.directory / TABLE_FILE)

    assert first != second
    assert table.identify(second) == EAST
    assert mode_of(path) == 0o600
    assert first not in (ca.directory / TABLE_FILE).read_text()


def test_two_commands_at_once_do_not_lose_each_other(ca: RunCa) -> None:
    with (
        hold(ca.directory / "ca.lock"),
        pytest.raises(ConfigError, match="another command changes"),
    ):
        ca.issue("syncer", 30, again=False)


def test_without_the_key_nothing_is_issued(ca: RunCa) -> None:
    (ca.directory / "ca.key").unlink()

    with pytest.raises(ConfigError, match=r"no CA with its key.*diloco certs init RUN\.toml"):
        ca.issue("syncer", 30, again=False)


# -- the command line ------------------------------------------------------------------------------


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["certs", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 2, str(result.exception)
    return result.exit_code, result.output


def test_init_makes_all_that_a_run_needs_and_says_where_it_goes(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, {"east": "", "west": ""})
    directory = tmp_path / "certs"

    code, said = invoke("init", str(run_file), "--dir", str(directory))

    assert code == 0
    assert "island/east: ca.pem island-east.pem" in said
    assert "ca.key stays here" in said
    for role, name in (("coordinator", ""), ("syncer", ""), ("operator", ""), ("island", "west")):
        Tls(directory, Identity("test", Role(role), name))
    assert invoke("show", "--dir", str(directory))[0] == 0


def test_show_names_what_needs_a_hand(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, {"east": ""})
    directory = str(tmp_path / "certs")
    invoke("init", str(run_file), "--dir", directory)
    invoke("rotate", "island/east", "--dir", directory, "--days", "10", "--revoke")

    code, said = invoke("show", "--dir", directory)

    assert code == 1
    assert "revoked" in said
    assert "expires in 10 days" in said
    assert f"renew it: diloco certs rotate island/east --dir {directory}" in said.replace("\n", "")


def test_other_commands_say_what_to_bring_where(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, {"east": ""})
    directory = str(tmp_path / "certs")
    invoke("init", str(run_file), "--dir", directory)

    code, said = invoke("issue", "island/later", "--dir", directory)
    assert (code, "island-later.pem: bring it to its site" in said) == (0, True)
    code, said = invoke("revoke", "coordinator", "--dir", directory)
    assert (code, "make a new CA" in said) == (0, True)
    code, said = invoke("token", "island/east", "--dir", directory)
    assert (code, "tokens.json" in said) == (0, True)
    code, said = invoke("issue", "island/later", "--dir", str(tmp_path / "elsewhere"))
    assert code == 2
    assert "diloco certs init RUN.toml" in said
