"""A run's CA as a directory, and `diloco certs` over it."""

from __future__ import annotations

import asyncio
import datetime
import shutil
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.config.load import load_config
from diloco.errors import ConfigError
from diloco.security.run_ca import RunCa, Taken
from diloco.state_dir import hold
from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.errors import ConnectError, Unauthorised
from diloco.transport.grpc.client import GrpcTransport
from diloco.transport.grpc.server import GrpcServer
from diloco.transport.identity import Identity, Role
from diloco.transport.security.tls import Tls
from diloco.transport.security.tokens import TABLE_FILE, TokenTable, read_token
from tests.run_files import write_run
from tests.waiting import Patience

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
    ca.issue("coordinator", 30, again=False)
    with pytest.raises(ConfigError, match="diloco certs rotate coordinator replaces it"):
        ca.issue("coordinator", 30, again=False)
    with pytest.raises(ConfigError, match=r"syncers issue .* diloco certs rotate coordinator"):
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

    first, second = (entry.serial for entry in ca.entries())
    assert ca.revoke("island/east", keep_newest=True) == Taken([first], has_token=False)
    assert [e.is_revoked for e in ca.entries()] == [True, False]
    for _ in range(2):
        taken = ca.revoke("island/east", keep_newest=False)
        assert taken == Taken([first, second], has_token=False)
    with pytest.raises(ConfigError, match="no certificate was issued to operator"):
        ca.revoke("operator", keep_newest=False)
    with pytest.raises(ConfigError, match="replace the CA, diloco certs rotate ca"):
        ca.revoke("coordinator", keep_newest=True)


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


def test_who_is_revoked_has_no_token_either(ca: RunCa) -> None:
    token = read_token(ca.make_token("island/east"))
    table = TokenTable(ca.directory / TABLE_FILE)
    assert table.identify(token) == EAST

    assert ca.revoke("island/east", keep_newest=False) == Taken([], has_token=True)

    with pytest.raises(Unauthorised, match="not one of this run"):
        table.identify(token)


def test_a_ca_at_its_end_issues_nothing_and_is_replaced(ca: RunCa, clock: Clock) -> None:
    ca.issue("operator", 30, again=False)
    clock.forward(999.5)

    with pytest.raises(ConfigError, match="diloco certs rotate ca"):
        ca.issue("operator", 30, again=True)
    with pytest.raises(ConfigError, match="holds one CA, so none is to be retired"):
        ca.retire_authority()
    ca.replace_authority(1000)
    with pytest.raises(ConfigError, match="is being replaced already"):
        ca.replace_authority(1000)
    ca.issue("operator", 30, again=True)
    assert [entry.is_of_newest_ca for entry in ca.entries()] == [False, True]


def test_a_replacement_that_was_killed_is_begun_again(
    ca: RunCa, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(name: str, text: bytes, mode: int = 0o644) -> None:
        if name == "ca.pem":
            raise KeyboardInterrupt
        write(name, text, mode)

    write = ca._write
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ca, "_write", killed)
        ca.replace_authority(1000)

    ca.issue("operator", 30, again=False)
    ca.replace_authority(1000)
    ca.issue("operator", 30, again=True)
    ca.retire_authority()
    assert [entry.is_of_newest_ca for entry in ca.entries()] == [False, True]


def test_a_key_of_another_ca_issues_nothing(ca: RunCa, tmp_path: Path, clock: Clock) -> None:
    other = RunCa(tmp_path / "other", clock)
    other.create("test", 100)
    (ca.directory / "ca.key").write_bytes((other.directory / "ca.key").read_bytes())

    with pytest.raises(ConfigError, match=r"ca\.key is not the key of .*ca\.pem"):
        ca.issue("operator", 30, again=False)


def test_the_ca_is_replaced_under_a_running_run(ca: RunCa, tmp_path: Path) -> None:
    server_site, east_site = tmp_path / "server", tmp_path / "east"

    def bring(site: Path, *names: str) -> None:
        site.mkdir(exist_ok=True)
        for name in names:
            shutil.copy2(ca.directory / name, site / f"{name}.new")
            (site / f"{name}.new").replace(site / name)

    for short in ("coordinator", "island/east"):
        ca.issue(short, 30, again=False)
    bring(server_site, "ca.pem", "coordinator.pem")
    bring(east_site, "ca.pem", "island-east.pem")
    stolen = Tls(ca.directory, EAST)

    async def who(call: IncomingCall) -> Reply:
        return Reply(call.caller.short.encode() if call.caller else b"")

    async def ask(transport: GrpcTransport) -> None:
        # A server listens with changed files some seconds later; until then it hangs up.
        patience = Patience(30.0)
        while True:
            try:
                reply = await transport.call("who", b"", deadline_s=30.0)
            except ConnectError:
                assert patience.left_s() > 0
                await asyncio.sleep(0.05)
            else:
                break
        assert reply.header == b"island/east"

    async def run() -> None:
        tls = Tls(server_site, Identity("test", Role.COORDINATOR))
        server = GrpcServer("127.0.0.1:0", {"who": who}, tls=tls)
        await server.start()
        east = GrpcTransport(server.address, tls=Tls(east_site, EAST))
        thief = GrpcTransport(server.address, tls=stolen)
        try:
            await replace(tls, east, thief)
        finally:
            await thief.close()
            await east.close()
            await server.stop(0.0)

    async def replace(tls: Tls, east: GrpcTransport, thief: GrpcTransport) -> None:
        await ask(east)
        await ask(thief)
        old = (ca.directory / "island-east.pem").read_bytes()

        ca.replace_authority(1000)
        for site in (server_site, east_site):
            bring(site, "ca.pem")
            await ask(east)
        with pytest.raises(ConfigError, match="coordinator, island/east: the certificates are of"):
            ca.retire_authority()
        for short, site in (("coordinator", server_site), ("island/east", east_site)):
            bring(site, ca.issue(short, 30, again=True).name)
            await ask(east)
        ca.retire_authority()
        for site in (east_site, server_site):
            bring(site, "ca.pem")
            await ask(east)
        with pytest.raises(Unauthorised, match="is foreign"):
            tls.identify(old)

    asyncio.run(run())


def test_two_commands_at_once_do_not_lose_each_other(ca: RunCa) -> None:
    with (
        hold(ca.directory / "ca.lock"),
        pytest.raises(ConfigError, match="another command changes"),
    ):
        ca.issue("operator", 30, again=False)


def test_without_the_key_nothing_is_issued(ca: RunCa) -> None:
    (ca.directory / "ca.key").unlink()

    with pytest.raises(ConfigError, match=r"no CA with its key.*diloco certs init RUN\.toml"):
        ca.issue("operator", 30, again=False)


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


def test_init_takes_a_run_file_that_needs_the_certificates_it_makes(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, {"east": ""})
    wide = (
        'listen = "0.0.0.0:4711"\nsyncer_listen = "0.0.0.0:0"\naddress = "10.0.0.5:4711"\nstate_dir'
    )
    run_file.write_text(run_file.read_text().replace("state_dir", wide, 1))
    with pytest.raises(ConfigError, match="diloco certs"):
        load_config(run_file)

    code, said = invoke("init", str(run_file), "--dir", str(tmp_path / "certs"))

    assert (code, "ca.key stays here" in said) == (0, True)
    load_config(run_file, [f"transport.certs={tmp_path / 'certs'}"])


def test_a_site_is_shown_what_it_has(tmp_path: Path) -> None:
    directory, site = tmp_path / "certs", tmp_path / "site"
    site.mkdir()
    invoke("init", str(write_run(tmp_path, {"east": ""})), "--dir", str(directory))
    for name in ("ca.pem", "island-east.pem"):
        shutil.copy2(directory / name, site / name)

    code, said = invoke("show", "--dir", str(site))
    assert (code, "island-east.pem: valid until" in said) == (0, True)
    assert "of run 'test'" in said
    (site / "operator.pem").write_text("half a fi")
    code, said = invoke("show", "--dir", str(site))
    assert code == 1
    assert "operator.pem holds no certificate" in said.replace("\n", "")


def test_show_names_what_needs_a_hand(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, {"east": ""})
    directory = str(tmp_path / "certs")
    invoke("init", str(run_file), "--dir", directory)
    invoke("rotate", "island/east", "--dir", directory, "--days", "10")
    code, said = invoke("revoke", "island/east", "--earlier", "--dir", directory)
    assert (code, "the coordinator does not know of it yet" in said) == (0, True)

    code, said = invoke("show", "--dir", directory)

    assert code == 1
    assert "revoked" in said
    assert "expires in 10 days" in said
    assert f"renew it: diloco certs rotate island/east --dir {directory}" in said.replace("\n", "")


def test_the_replacement_of_the_ca_is_led_step_by_step(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, {"east": ""})
    place = ("--dir", str(tmp_path / "certs"))
    invoke("init", str(run_file), *place)

    code, said = invoke("rotate", "ca", *place)
    assert (code, said.count("diloco certs rotate ")) == (0, 4)
    assert "First bring it to every site" in said
    code, said = invoke("show", *place)
    assert (code, said.count("renew it: diloco certs rotate")) == (1, 3)
    assert invoke("rotate", "ca", "--finish", *place)[0] == 2
    for short in ("coordinator", "operator", "island/east"):
        assert invoke("rotate", short, *place)[0] == 0
    code, said = invoke("show", *place)
    assert (code, "rotate ca --finish" in said.replace("\n", " ")) == (1, True)
    code, said = invoke("rotate", "ca", "--finish", *place)
    assert (code, "ca.pem to every site" in said.replace("\n", " ")) == (0, True)
    assert invoke("show", *place)[0] == 0
    assert "of the CA: diloco certs rotate ca --finish" in invoke(
        "rotate", "operator", "--finish", *place
    )[1]  # fmt: skip


def test_other_commands_say_what_to_bring_where(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, {"east": ""})
    directory = str(tmp_path / "certs")
    invoke("init", str(run_file), "--dir", directory)

    code, said = invoke("issue", "island/later", "--dir", directory)
    assert (code, "island-later.pem: bring it to its site" in said) == (0, True)
    code, said = invoke("revoke", "coordinator", "--dir", directory)
    assert (code, "diloco certs rotate ca" in said) == (2, True)
    code, said = invoke("token", "island/east", "--dir", directory)
    assert (code, "tokens.json" in said) == (0, True)
    code, said = invoke("issue", "island/later", "--dir", str(tmp_path / "elsewhere"))
    assert code == 2
    assert "diloco certs init RUN.toml" in said
