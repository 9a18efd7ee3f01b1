"""`diloco page`: the page of a run in a browser, of a live run and of recorded ones."""

from __future__ import annotations

import asyncio
import shlex
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diloco.cli.run.control import operator_transport
from diloco.cli.terminal.options import Certs, Insecure, Tokens, flag, option
from diloco.errors import ConfigError
from diloco.extras import require

if TYPE_CHECKING:  # commands import what they need when they run
    from diloco.config.schema import Config
    from diloco.launch.page_process import PageProcess
    from diloco.page.sources import Source


def page(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="HOST:PORT|RUN_DIR...",
            help="A coordinator, or state directories of runs, also of one under way.",
        ),
    ],
    listen: Annotated[
        str, option("Where browsers reach the page; port 0: any free one.", "HOST:PORT")
    ] = "127.0.0.1:0",
    certificate: Annotated[
        str, option("Certificate chain (PEM) with the names by which browsers call it.", "FILE")
    ] = "",
    key: Annotated[str, option("Key of the certificate (PEM).", "FILE")] = "",
    token_file: Annotated[
        str, option("Token that a browser is asked for: 32 characters or more.", "FILE")
    ] = "",
    acts: Annotated[
        bool, flag("Let who has the token act on a live run, as an operator.", "--acts")
    ] = False,
    certs: Certs = "",
    tokens: Tokens = "",
    insecure: Insecure = False,
    descriptor: Annotated[
        int,
        option("Inherited socket to listen at; it ends with its standard input.", "N", hidden=True),
    ] = -1,
) -> None:
    """Serve a page that shows a run in a browser; prints its address, and runs until Ctrl-C.

    It says in a sentence what goes on, and shows losses, alarms with the command that they name,
    islands, the timeline of fragments, events and configuration.

    Of a live run it asks the coordinator, as an operator, what diloco status shows, with the same
    --certs and --tokens: once a second however many look, and not at all while nobody does. It may
    run on any machine, and changes nothing, unless it is started with --acts: then who has the
    token may pause, unpause, set, drain, kick, repair, move, backup and stop, each after a preview,
    as the commands of these names do. Of a state directory it reads the events, as they are
    written; several are shown next to each other, with the settings that differ.

    diloco coordinator RUN.toml --page and diloco local RUN.toml --page start it with the run.

    The page is for this machine alone. For others give --listen, --certificate, --key and
    --token-file (openssl rand -hex 32 > FILE; chmod 600 FILE); or leave it as it is, and come by
    ssh -L.

    Example: diloco page 127.0.0.1:29400
    """
    require("diloco page", "starlette")
    from diloco.launch.process.ending import end_with_starter
    from diloco.page.access import Access
    from diloco.page.server import Page, serve
    from diloco.transport.addresses import is_loopback

    if descriptor >= 0:
        end_with_starter()
    host, listening = _bound(listen, descriptor)
    with listening:
        token, hosts = _allowed(listen, host, certificate, key, token_file, acts)
        sources = [source_of(each, certs, tokens, insecure) for each in runs]
        port = int(listening.getsockname()[1])
        shown = Page(
            sources, Access(token, hosts), port=port, is_encrypted=bool(certificate), may_act=acts
        )
        called = host if is_loopback(host) else next(iter(hosts), host)
        url = f"{'https' if certificate else 'http'}://{called}:{port}/"

        def announce() -> None:
            typer.echo(f"page: {url}")

        asyncio.run(serve(shown, listening, announce, certificate=certificate, key=key))


def page_process(
    config: Config, is_asked: bool, options: str, announce: Callable[[str], None]
) -> PageProcess | None:
    """Bind and check a page that is to be started along with a run; None: none is asked for.

    Args:
        config: The run; the page's credentials are those of its operator on this machine.
        is_asked: Whether there is to be one; it is, too, where there are options.
        options: Of `diloco page`, as they are typed.
        announce: See `PageProcess`.

    Raises:
        ConfigError: If the options, or the operator's files, cannot be used.
    """
    if not (is_asked or options):
        return None
    require("--page", "starlette")
    from typer.main import get_command

    from diloco.launch.page_process import PageProcess
    from diloco.security.security import Security
    from diloco.transport.identity import Identity, Role

    try:
        words = shlex.split(options)
    except ValueError as error:
        raise ConfigError(f"--page-options {options}: {error}; quote it as a shell does") from error
    alone = typer.Typer(add_completion=False)
    alone.command()(page)
    given = get_command(alone).make_context("diloco page", ["127.0.0.1:1", *words]).params
    transport = config.transport
    try:
        Security.open(
            Identity(config.run.name, Role.OPERATOR),
            certs=given["certs"] or transport.certs,
            tokens=given["tokens"] or transport.tokens,
        )
    except ConfigError as error:
        raise ConfigError(
            f"the page asks the coordinator as an operator: {error}. Or leave --page out here, and "
            f"type diloco page where these files are"
        ) from error
    host, listening = _bound(given["listen"])
    try:
        names = ("listen", "certificate", "key", "token_file", "acts")
        _allowed(host=host, **{name: given[name] for name in names})
    except ConfigError:
        listening.close()
        raise
    return PageProcess(config, words, listening, announce)


def _bound(listen: str, descriptor: int = -1) -> tuple[str, socket.socket]:
    """Bind the address, or take the socket that is bound to it; gives its host, too.

    Raises:
        ConfigError: If it cannot be.
    """
    from diloco.transport.addresses import split_address

    try:
        host, port = split_address(listen)
        if descriptor >= 0:
            return host, socket.socket(fileno=descriptor)
        family, kind, proto, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM
        )[0]
        listening = socket.socket(family, kind, proto)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--listen {listen}: {error}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"--listen {listen}: cannot be bound: {error.strerror}; choose another port, or 0"
        ) from error
    return host, listening


def _allowed(
    listen: str, host: str, certificate: str, key: str, token_file: str, acts: bool
) -> tuple[str, list[str]]:
    """Refuse a page that others reach without TLS and a token; gives the token, and its names.

    Raises:
        ConfigError: Saying what is missing, or cannot be used.
    """
    from diloco.transport.addresses import is_loopback

    if bool(certificate) != bool(key):
        raise ConfigError("--certificate and --key belong together: give both, or none")
    given = {"--certificate": certificate, "--key": key, "--token-file": token_file}
    if not is_loopback(host) and (missing := [name for name, value in given.items() if not value]):
        raise ConfigError(
            f"--listen {listen} is reached from other machines: give {' and '.join(missing)}, too, "
            f"or leave it on 127.0.0.1 and come by ssh -L"
        )
    if acts and not token_file:
        raise ConfigError("--acts lets others act on a run: give --token-file, too")
    return _token(token_file) if token_file else "", _names(certificate) if certificate else []


def _token(token_file: str) -> str:
    from diloco.page.access import LEAST_TOKEN

    path = Path(token_file)
    try:
        token, mode = path.read_text(encoding="ascii").strip(), path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {path}: cannot be read: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"--token-file {path}: others may read it; type chmod 600 {path}")
    if len(token) < LEAST_TOKEN:
        raise ConfigError(
            f"--token-file {path}: holds {len(token)} characters, not {LEAST_TOKEN} or more; "
            f"type openssl rand -hex 32 > {path}"
        )
    return token


def _names(certificate: str) -> list[str]:
    """Give the host names and addresses that a certificate is for."""
    from cryptography import x509

    try:
        leaf = x509.load_pem_x509_certificates(Path(certificate).read_bytes())[0]
        extension = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(
            f"--certificate {certificate}: {error}. It must be a PEM file with the host names by "
            f"which browsers call the page (subject alternative names)"
        ) from error
    names = extension.value.get_values_for_type(x509.DNSName)
    addresses = extension.value.get_values_for_type(x509.IPAddress)
    return [*names, *(f"[{each}]" if each.version == 6 else str(each) for each in addresses)]


def source_of(run: str, certs: str, tokens: str, insecure: bool) -> Source:
    """Find a run: by the address of its coordinator, or in its state directory.

    Raises:
        ConfigError: If it is neither.
    """
    from diloco.page.sources import LiveSource, RecordedSource

    if Path(run).is_dir():
        return RecordedSource(Path(run))
    if ":" not in run:
        raise ConfigError(f"{run}: is neither HOST:PORT of a coordinator nor a directory")
    transport = operator_transport(run, certs=certs, tokens=tokens, insecure=insecure)
    return LiveSource(run, transport)
