"""`diloco coordinator` and `diloco status`: run the control plane of a run, and look at it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from diloco.cli.terminal.options import (
    Address,
    AsJson,
    Certs,
    Insecure,
    Overrides,
    PageOptions,
    RunFile,
    Tokens,
    WithPage,
    flag,
    option,
)
from diloco.errors import ConfigError

if TYPE_CHECKING:  # commands import what they need when they run
    from google.protobuf.message import Message

    from diloco.protos.control_pb2 import StatusReply
    from diloco.transport.contracts import Transport

_WATCH_S = 1.0
_RESTART_S = 15.0
#: States of a run that is over.
_ENDED = frozenset({"failed", "finished", "stopped"})


def coordinator(
    run_file: RunFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        flag("Take the run back to its newest complete checkpoint, if there is one.", "--resume"),
    ] = False,
    resume_stopped: Annotated[
        bool,
        flag(
            "Do so if a graceful stop has ended it, else go on where it was: for supervisors, "
            "which type the same command at every start.",
            "--resume-stopped",
        ),
    ] = False,
    at_step: Annotated[
        int | None,
        option("With --resume: to that checkpoint (inner step or cut).", "STEP", "--at", min=0),
    ] = None,
    standby: Annotated[
        bool,
        flag(
            "Where run.state is in an object store: wait for the end of the machine that holds the "
            "run, then take it over.",
            "--standby",
        ),
    ] = False,
    page: WithPage = False,
    page_options: PageOptions = "",
) -> None:
    """Coordinate a run and keep its syncer alive; prints the address that islands need.

    Started again after a crash, with the same file, it goes on where it was, under the same
    address. Ctrl-C stops the run gracefully: every island goes on to one inner step, writes a
    checkpoint and leaves; --resume goes on from there. A second Ctrl-C stops coordinator and syncer
    at once; nothing published is lost. Where islands merge on arrival they have no inner step in
    common: each writes its part of a cut after its next one, and leaves.

    With run.state = "s3://BUCKET/PREFIX" the run outlives this machine: the same command on any
    other one, with the same file, goes on with all that was published, once this one is silent for
    10 s. --standby waits for that.

    With --page it starts diloco page in a process of its own, for this machine's browsers unless
    --page-options say more; it is started again when it dies, and ends with the coordinator.

    Example: diloco coordinator configs/runs/two-islands.toml
    """
    from diloco.cli.run.doctor import show_at_start
    from diloco.cli.run.page import page_process
    from diloco.config.load import load_config
    from diloco.launch.coordinator import run_coordinator

    if at_step is not None and not resume:
        raise ConfigError(f"--at {at_step} says where to resume: add --resume, or leave it out")
    config = load_config(run_file, overrides or ())
    show_at_start(config.coordinator.listen)
    run = run_coordinator(
        config,
        announce=typer.echo,
        page=page_process(config, page, page_options, typer.echo),
        resume=resume,
        resume_stopped=resume_stopped,
        at_step=at_step,
        is_standby=standby,
    )
    raise typer.Exit(asyncio.run(run))


def status(
    address: Address,
    watch: Annotated[
        bool, flag("Look every second until the run ends, or Ctrl-C.", "--watch")
    ] = False,
    as_json: AsJson = False,
    certs: Certs = "",
    tokens: Tokens = "",
    insecure: Insecure = False,
) -> None:
    """Show a run: its islands and their throughput, its fragments and their versions.

    From another machine the coordinator answers the operator alone: --certs (made by `diloco
    certs init`), --tokens (`diloco certs token operator`), or both, as the run file says. A run
    with transport.insecure = true and no tokens answers on the coordinator's own machine only.

    --watch ends with the run: exit code 0 after a good end or a stop, else that of the failure.
    --json prints one line a look.

    Example: diloco status 127.0.0.1:29400 --watch
    """
    transport = operator_transport(address, certs=certs, tokens=tokens, insecure=insecure)
    try:
        code = asyncio.run(_show(transport, watch=watch, as_json=as_json))
    except KeyboardInterrupt:
        code = 0
    raise typer.Exit(code)


async def _show(transport: Transport, *, watch: bool, as_json: bool) -> int:
    """Show the run; returns the exit code of a failed one that was watched to its end."""
    from rich.live import Live

    from diloco.cli.terminal.tables import status_view

    looks = _looks(transport, watch=watch)
    code = 0
    if as_json:
        async for reply in looks:
            code = reply.exit_code
            typer.echo(json.dumps(as_plain(reply)))
    elif not watch:
        async for reply in looks:
            Console().print(status_view(reply))
    else:
        with Live(auto_refresh=False) as live:
            async for reply in looks:
                code = reply.exit_code
                live.update(status_view(reply), refresh=True)
    return code if watch else 0


async def _looks(transport: Transport, *, watch: bool) -> AsyncIterator[StatusReply]:
    """Ask the coordinator once, or every second until the run ends.

    A watcher bears with a restart of the coordinator, which ends where a watcher sees how.
    """
    from diloco.coordinator.status import ask_status

    try:
        reply = await ask_status(transport, watches=watch)
        yield reply
        while watch and reply.state not in _ENDED:
            await asyncio.sleep(_WATCH_S)
            reply = await ask_status(transport, patience_s=_RESTART_S, watches=True)
            yield reply
    finally:
        await transport.close()


def as_plain(message: Message) -> dict[str, Any]:
    """Turn a message into JSON values, hence `Any`; every field is there, integers stay numbers.

    A message that is not set is None. (protobuf's own JSON writes 64-bit integers as texts.)
    """
    plain: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is None:
            plain[field.name] = list(value) if field.is_repeated else value
        elif field.is_repeated:
            plain[field.name] = [as_plain(item) for item in value]
        else:
            plain[field.name] = as_plain(value) if message.HasField(field.name) else None
    return plain


def operator_transport(address: str, *, certs: str, tokens: str, insecure: bool) -> Transport:
    """Open the operator's way to a coordinator; KIND://HOST:PORT is by another package's transport.

    Raises:
        ConfigError: If the address, or what proves who the operator is, cannot be used.
    """
    from diloco.security.security import Security, added_transport
    from diloco.transport.identity import Identity, Role

    kind, sign, rest = address.partition("://")
    address = rest if sign else address
    _check_address(address)
    operator = Identity("", Role.OPERATOR)
    security = Security.open(operator, certs=certs, tokens=tokens, insecure=insecure)
    if sign:
        security = replace(security, added=added_transport(kind))
    return security.transport(address, Role.COORDINATOR)


def _check_address(address: str) -> None:
    from diloco.transport.addresses import split_address, split_candidates
    from diloco.transport.libp2p.address import is_peer_address, parse_peer_address

    try:
        if is_peer_address(address):
            parse_peer_address(address)
            return
        ports = [split_address(candidate)[1] for candidate in split_candidates(address)]
    except ValueError as error:
        raise ConfigError(f"{error}: write it as the coordinator printed it") from None
    if 0 in ports:
        raise ConfigError(f"{address!r} has no port: write it as the coordinator printed it")


def send_operation(
    address: str, command: str, arguments: dict[str, str], certs: str, tokens: str, insecure: bool
) -> None:
    """Give the command, and print what was done and what comes next."""
    from diloco.coordinator.status import operate

    talk(
        address,
        (lambda transport: operate(transport, command, arguments),),
        certs,
        tokens,
        insecure,
    )


def talk(
    address: str,
    steps: Sequence[Callable[[Transport], Awaitable[str]]],
    certs: str,
    tokens: str,
    insecure: bool,
) -> None:
    """Do one step after the other with a coordinator, and print what each says."""
    transport = operator_transport(address, certs=certs, tokens=tokens, insecure=insecure)

    async def run() -> None:
        try:
            for step in steps:
                typer.echo(await step(transport))
        finally:
            await transport.close()

    asyncio.run(run())
