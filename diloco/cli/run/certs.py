"""`diloco certs`: the run's own certificate authority, and what it hands to the sites."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.terminal.fitted_table import FittedTable
from diloco.cli.terminal.options import RunFile, Tokens, flag, option
from diloco.cli.terminal.progress import output
from diloco.errors import ConfigError

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.security.run_ca import IssuedEntry, RunCa

certs = typer.Typer(
    no_args_is_help=True,
    help="Make and keep the certificates with which the sites of a run know each other.",
)

_Directory = Annotated[Path, option("Directory of the CA and its certificates.", "DIR", "--dir")]
_Name = Annotated[
    str, typer.Argument(metavar="NAME", help="coordinator, syncer, operator or island/NAME.")
]
_Days = Annotated[int, typer.Option(min=1, help="Days for which the certificate is valid.")]
_DIRECTORY = Path("certs")
_DAYS = 365
_CA_DAYS = 3650
_CA = "ca"
#: Serial numbers that one command sends: the newest.
_MOST = 64


@certs.command()
def init(run_file: RunFile, directory: _Directory = _DIRECTORY, days: _Days = _DAYS) -> None:
    """Make the CA of a run, and certificates for its coordinator, operator and islands.

    Example: diloco certs init RUN.toml --dir certs
    """
    from diloco.config.load import load_config

    # As it will be: a file for several machines is refused as long as nothing protects them.
    config = load_config(
        run_file, [f"transport.certs={directory.absolute()}", "transport.insecure=false"]
    )
    islands = issue_all(config.run.name, config.islands, directory, days)
    typer.echo(
        f"{directory} holds the CA of run {config.run.name!r}. Set transport.certs = "
        f'"{directory}" in the run file, and bring to that directory of each site, over a way that '
        f"you trust:\n"
        f"  coordinator: ca.pem coordinator.pem"
    )
    for short in islands:
        typer.echo(f"  {short}: ca.pem {short.replace('/', '-')}.pem")
    typer.echo(
        "  diloco status: ca.pem operator.pem\n"
        "ca.key stays here and nowhere else: anyone who has it is every island. What coordinator, "
        "syncers and islands show each other lasts for transport.certificate_lifetime; the "
        "coordinator issues it."
    )


def issue_all(
    run: str, islands: Iterable[str], directory: Path, days: int = _DAYS
) -> Sequence[str]:
    """Make the CA of a run, and what its sites need; returns the identities of the islands."""
    ca = _ca(directory)
    ca.create(run, max(days, _CA_DAYS))
    identities = [f"island/{name}" for name in sorted(islands)]
    for short in ("coordinator", "operator", *identities):
        ca.issue(short, days, again=False)
    return identities


@certs.command()
def issue(name: _Name, directory: _Directory = _DIRECTORY, days: _Days = _DAYS) -> None:
    """Issue one more certificate, such as that of an island that joins later.

    Example: diloco certs issue island/asia-south --dir certs
    """
    _show_issued(_ca(directory).issue(name, days, again=False))


@certs.command()
def rotate(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="coordinator, syncer, operator, island/NAME, ca.")
    ],
    directory: _Directory = _DIRECTORY,
    days: Annotated[
        int | None,
        typer.Option(min=1, help="Days for which it is valid; usually 365, or 3650 for ca."),
    ] = None,
    finish: Annotated[bool, flag("With ca: believe the earlier CA no longer.", "--finish")] = False,
) -> None:
    """Issue a new certificate with a new key in place of the old one.

    Running processes take it up without a restart once its file is at their site. Earlier ones
    stay valid until they expire, or until `revoke NAME --earlier`.

    The CA is replaced in three steps, under a running run: `rotate ca`, and ca.pem to every site;
    `rotate NAME` for each name, and its file to its site; `rotate ca --finish`, and ca.pem to every
    site. A server takes up to six seconds to listen with changed files.

    Example: diloco certs rotate island/eu-west --dir certs
    """
    ca = _ca(directory)
    if name == _CA:
        if finish and days:
            raise ConfigError("rotate ca takes --days, or --finish")
        if finish:
            ca.retire_authority()
            typer.echo(f"the earlier CA is retired: bring {directory / 'ca.pem'} to every site")
        else:
            ca.replace_authority(days or _CA_DAYS)
            _show_replaced(ca, directory)
        return
    if finish:
        raise ConfigError(f"--finish is of the CA: diloco certs rotate ca --finish, not {name}")
    _show_issued(ca.issue(name, days or _DAYS, again=True))


@certs.command()
def revoke(
    name: _Name,
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Of the coordinator of the run under way.")
    ] = "",
    directory: _Directory = _DIRECTORY,
    earlier: Annotated[bool, flag("All but the newest, and not the token.", "--earlier")] = False,
    tokens: Tokens = "",
) -> None:
    """Take all certificates of an identity back, and its token.

    The coordinator refuses its next call, issues no more certificates to it, and takes an island
    out of the run at once, as `diloco kick` does. What it was issued before is of no use without
    the coordinator, and ends within transport.certificate_lifetime. To let it in again: `rotate
    NAME`, and for an island `diloco kick --undo`. With --earlier a run goes on with the newest.
    The list, revoked.json, is read when a coordinator starts: where the CA is elsewhere, bring the
    file to its transport.certs, or a run that begins again (--fresh) does not know of it.

    Example: diloco certs revoke island/eu-west 10.0.0.1:29400 --dir certs
    """
    from diloco.cli.run.control import send_operation

    taken = _ca(directory).revoke(name, keep_newest=earlier)
    if taken.has_token:
        typer.echo(f"its token, too: bring {directory / 'tokens.json'} to the coordinator's site")
    if not taken.serials:
        if earlier:
            typer.echo(f"{name} has no earlier certificate")
        return
    if not address:
        flag = " --earlier" * earlier
        again = f"diloco certs revoke {name} HOST:PORT --dir {directory}{flag}"
        typer.echo(f"noted here; the coordinator does not know of it yet: {again}")
        return
    arguments = {"identity": name, "serials": ",".join(f"{s:x}" for s in taken.serials[-_MOST:])}
    if earlier:
        arguments["earlier"] = "true"
    send_operation(address, "revoke", arguments, str(directory), tokens, insecure=False)


@certs.command()
def token(name: _Name, directory: _Directory = _DIRECTORY) -> None:
    """Make a token for an identity, in place of its last one.

    A run whose transport.tokens is set asks for them with every call: besides certificates, or
    instead of them on a private network without.

    Example: diloco certs token operator --dir certs
    """
    path = _ca(directory).make_token(name)
    typer.echo(
        f"{path}: bring it to its site, and tokens.json to that of the coordinator, over a way "
        f"that you trust; set transport.tokens at both"
    )


@certs.command()
def show(directory: _Directory = _DIRECTORY) -> None:
    """Show what was issued and how long it lasts; exit code 1 if something needs a hand.

    At a site, where the key of the CA is not, it shows what lies there.

    Example: diloco certs show --dir certs
    """
    from diloco.security.run_ca import site_certificates
    from diloco.transport.security.tls import CA_FILE, KEY_FILE, WARN_DAYS

    if (directory / CA_FILE).exists() and not (directory / KEY_FILE).exists():
        found = site_certificates(directory, _now())
        for file, state in found.items():
            typer.echo(f"{file}: {state}")
        raise typer.Exit(0 if all(state.startswith("valid") for state in found.values()) else 1)
    ca, now = _ca(directory), _now()
    columns: dict[str, Callable[[IssuedEntry], object]] = {
        "identity": lambda entry: entry.identity.short,
        "serial": lambda entry: f"{entry.serial:x}"[:8] + "..",
        "expires (UTC)": lambda entry: f"{entry.expires:%Y-%m-%d %H:%M}",
        "state": lambda entry: _state(entry, now),
    }
    typer.echo(f"run {ca.run}")
    output().print(FittedTable.of(ca.entries(), columns))
    needy = [
        entry.identity.short
        for entry in ca.entries()
        if entry.is_current and not entry.is_revoked
        if _state(entry, now).startswith("expire") or not entry.is_of_newest_ca
    ]
    typer.echo(f"the CA itself expires at {ca.expires:%Y-%m-%d}")
    if (ca.expires - now).days < WARN_DAYS:
        needy.insert(0, _CA)
    for short in needy:
        typer.echo(f"renew it: diloco certs rotate {short} --dir {directory}")
    if not needy and ca.is_being_replaced:
        typer.echo(
            f"the CA is being replaced; once every file is at its site: diloco certs rotate ca "
            f"--finish --dir {directory}"
        )
        needy.append(_CA)
    raise typer.Exit(1 if needy else 0)


def _state(entry: IssuedEntry, now: datetime.datetime) -> str:
    from diloco.transport.security.tls import WARN_DAYS

    days = entry.days_left(now)
    if entry.is_revoked:
        return "revoked"
    if days < 0:
        return "expired"
    if not entry.is_current:
        return "replaced, still valid"
    if not entry.is_of_newest_ca:
        return "of the earlier CA"
    return f"expires in {days:.0f} days" if days < WARN_DAYS else "valid"


def _show_issued(path: Path) -> None:
    typer.echo(f"{path}: bring it to its site, over a way that you trust")


def _show_replaced(ca: RunCa, directory: Path) -> None:
    typer.echo(
        f"{directory / 'ca.pem'} holds a new CA and the earlier one. First bring it to every site; "
        f"running processes then believe both. After that, and bring each file to its site:"
    )
    for short in sorted({e.identity.short for e in ca.entries() if not e.is_revoked}):
        typer.echo(f"  diloco certs rotate {short} --dir {directory}")
    typer.echo(f"At the end: diloco certs rotate ca --finish --dir {directory}")


def _ca(directory: Path) -> RunCa:
    from diloco.security.run_ca import RunCa

    return RunCa(directory, _now)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
