"""What an operator does to a run under way: `diloco pause`, `drain`, `kick`, `set` and the like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diloco.cli.run.control import send_operation, talk
from diloco.cli.terminal.options import Address, Certs, Insecure, Tokens

Island = Annotated[str, typer.Argument(metavar="ISLAND", help="Name of the island.")]


def pause(
    address: Address, certs: Certs = "", tokens: Tokens = "", insecure: Insecure = False
) -> None:
    """Let no round open until `diloco unpause`; open rounds end as ever.

    Islands that merge on arrival train on meanwhile, others wait at their next merge. Like all
    commands of an operator it is written down before it is answered, and typed again it changes
    nothing; from another machine it takes the operator's certificate or token.
    """
    send_operation(address, "pause", {}, certs, tokens, insecure)


def unpause(
    address: Address, certs: Certs = "", tokens: Tokens = "", insecure: Insecure = False
) -> None:
    """Let rounds open again after `diloco pause`."""
    send_operation(address, "unpause", {}, certs, tokens, insecure)


def drain(
    address: Address,
    island: Island,
    certs: Certs = "",
    tokens: Tokens = "",
    insecure: Insecure = False,
) -> None:
    """Have an island leave for good: it sends and merges what is outstanding, then ends with 0.

    For runs whose islands merge on arrival. No new round counts it; started again it is welcome.
    """
    send_operation(address, "drain", {"island": island}, certs, tokens, insecure)


def kick(
    address: Address,
    island: Island,
    reason: Annotated[str, typer.Option(help="Why; the island is told.")] = "",
    undo: Annotated[bool, typer.Option("--undo", help="Let it join again.")] = False,
    certs: Certs = "",
    tokens: Tokens = "",
    insecure: Insecure = False,
) -> None:
    """Take an island out at once: nothing that it has not yet merged counts any more.

    Its present start is fenced and ends with exit code 41 at its next report, later ones are
    refused until --undo. A scheduled run goes on without it.
    """
    arguments = {"island": island}
    if reason:
        arguments["reason"] = reason
    if undo:
        arguments["undo"] = "true"
    send_operation(address, "kick", arguments, certs, tokens, insecure)


def set_(
    address: Address,
    setting: Annotated[
        str, typer.Argument(metavar="KEY=VALUE", help="Such as outer.optimizer.lr=0.5.")
    ],
    certs: Certs = "",
    tokens: Tokens = "",
    insecure: Insecure = False,
) -> None:
    """Change a policy of the run under way, such as the outer learning rate.

    Checked as the run file is. Rules of rounds count from each fragment's next opening, and the
    header of every version says under which revision it was made. It stays so over restarts. Which
    keys can be changed is said when another one is given.
    """
    from diloco.errors import ConfigError

    key, sign, value = setting.partition("=")
    if not (sign and key.strip()):
        raise ConfigError(f"{setting!r}: write KEY=VALUE, such as outer.optimizer.lr=0.5")
    send_operation(
        address, "set", {"key": key.strip(), "value": value.strip()}, certs, tokens, insecure
    )


def stop(
    address: Address,
    now: Annotated[
        bool, typer.Option("--now", help="Without a checkpoint: every island is told to end.")
    ] = False,
    certs: Certs = "",
    tokens: Tokens = "",
    insecure: Insecure = False,
) -> None:
    """Stop the run with a checkpoint, as Ctrl-C at its coordinator does.

    Every island saves and leaves, at one inner step or with a cut; then syncer and coordinator end,
    and `diloco coordinator RUN.toml --resume` goes on as if nothing had happened. With --now, or
    where no island could write a checkpoint, they end at once: nothing published is lost, and the
    run goes on where it was when coordinator and islands are started again.
    """
    arguments = {"now": "true"} if now else {}
    send_operation(address, "stop", arguments, certs, tokens, insecure)


def backup(
    address: Address,
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="On the coordinator's machine, and not there yet."),
    ],
    with_secret: Annotated[
        bool, typer.Option("--with-secret", help="The secret that signs the islands' grants, too.")
    ] = False,
    certs: Certs = "",
    tokens: Tokens = "",
    insecure: Insecure = False,
) -> None:
    """Copy the state of a run under way: the journal, the plan, the newest records and the pins.

    The copy is a coordinator.state_dir, from which the run can go on. What is not in it is said.
    A relative DIR is counted from here, where the coordinator is on this machine.
    """
    if not directory.is_absolute() and _is_here(address):
        directory = directory.absolute()
    arguments = {"directory": str(directory)}
    if with_secret:
        arguments["with_secret"] = "true"
    send_operation(address, "backup", arguments, certs, tokens, insecure)


def _is_here(address: str) -> bool:
    from diloco.transport.addresses import is_loopback, split_address

    try:
        return is_loopback(split_address(address)[0])
    except ValueError:  # of another kind, or none: that is said when it is used
        return False


def repair_from_island(
    address: str, fragment: int, island: str, certs: str, tokens: str, insecure: bool
) -> None:
    """Have a fragment repaired, and print how that ended; an error says why it could not be."""
    from diloco.coordinator.status import operate, wait_for_repair

    arguments = {"fragment": str(fragment), "island": island}
    talk(
        address,
        (
            lambda transport: operate(transport, "repair", arguments),
            lambda transport: wait_for_repair(transport, fragment, island),
        ),
        certs,
        tokens,
        insecure,
    )
