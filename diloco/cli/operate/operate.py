"""What an operator does to a run under way: `diloco pause`, `drain`, `kick`, `set` and the like.

A command here is its options, its help and what it sends to the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from diloco.cli.run.control import send_operation
from diloco.cli.terminal.options import Address, Certs, Insecure, Tokens, flag, option, with_options
from diloco.errors import ConfigError
from diloco.transport.addresses import is_loopback, split_address

Island = Annotated[str, typer.Argument(metavar="ISLAND", help="Name of the island.")]
Arguments: TypeAlias = dict[str, str]


def _operation(declared: Callable[..., Arguments]) -> Callable[..., None]:
    """Make a command of the function of its name, which makes arguments of its options."""

    def send(
        address: str, certs: str, tokens: str, insecure: bool, **options: str | bool | Path
    ) -> None:
        arguments = declared(address, **options)
        command = declared.__name__.rstrip("_")
        send_operation(address, command, arguments, certs, tokens, insecure)

    return with_options(send, declared, _of_operator)


def _of_operator(certs: Certs = "", tokens: Tokens = "", insecure: Insecure = False) -> None:
    """Options that every command has."""


@_operation
def pause(address: Address) -> Arguments:
    """Let no round open until `diloco unpause`; open rounds end as ever.

    Islands that merge on arrival train on meanwhile, others wait at their next merge. Like all
    commands of an operator it is written down before it is answered, and typed again it changes
    nothing; from another machine it takes the operator's certificate or token.

    Example: diloco pause 127.0.0.1:29400
    """
    return {}


@_operation
def unpause(address: Address) -> Arguments:
    """Let rounds open again after `diloco pause`.

    Example: diloco unpause 127.0.0.1:29400
    """
    return {}


@_operation
def drain(address: Address, island: Island) -> Arguments:
    """Have an island leave for good: it sends and merges what is outstanding, then ends with 0.

    For runs whose islands merge on arrival. No new round counts it; started again it is welcome.

    Example: diloco drain 10.0.0.1:29400 eu-west --certs certs
    """
    return {"island": island}


@_operation
def kick(
    address: Address,
    island: Island,
    reason: Annotated[str, typer.Option(help="Why; the island's log has it.")] = "",
    undo: Annotated[bool, flag("Let it join again.", "--undo")] = False,
) -> Arguments:
    """Take an island out at once: nothing that it has not yet merged counts any more.

    Its present start is fenced and ends with exit code 41 at its next report, later ones are
    refused until --undo. A scheduled run goes on without it.

    Example: diloco kick 10.0.0.1:29400 eu-west --reason "disk broken" --certs certs
    """
    given = {"island": island, "reason": reason, "undo": "true" if undo else ""}
    return {name: value for name, value in given.items() if value}


@_operation
def set_(
    address: Address,
    setting: Annotated[
        str, typer.Argument(metavar="KEY=VALUE", help="Such as outer.optimizer.lr=0.5.")
    ],
) -> Arguments:
    """Change a policy of the run under way, such as the outer learning rate.

    Checked as the run file is. Rules of rounds count from each fragment's next opening, and the
    header of every version says under which revision it was made. It stays so over restarts. Which
    keys can be changed is said when another one is given.

    Example: diloco set 127.0.0.1:29400 outer.optimizer.lr=0.5
    """
    key, sign, value = setting.partition("=")
    if not (sign and key.strip()):
        raise ConfigError(f"{setting!r}: write KEY=VALUE, such as outer.optimizer.lr=0.5")
    return {"key": key.strip(), "value": value.strip()}


@_operation
def stop(
    address: Address,
    now: Annotated[bool, flag("Without a checkpoint: every island ends at once.", "--now")] = False,
) -> Arguments:
    """Stop the run with a checkpoint, as Ctrl-C at its coordinator does.

    Every island saves and leaves, at one inner step or with a cut; then syncer and coordinator end,
    and `diloco coordinator RUN.toml --resume` goes on as if nothing had happened. With --now, or
    where no island could write a checkpoint, they end at once: nothing published is lost, and the
    run goes on where it was when coordinator and islands are started again.

    Example: diloco stop 127.0.0.1:29400
    """
    return {"now": "true"} if now else {}


@_operation
def move(
    address: Address,
    fragments: Annotated[str, option("Numbers of fragments.", "P,P,...", "--fragments")] = "",
    from_: Annotated[str, option("All fragments of this syncer.", "NAME", "--from")] = "",
    to: Annotated[str, option("Which syncer they go to; of --from: all others.", "NAME")] = "",
) -> Arguments:
    """Move fragments from one syncer to another while the run goes on; islands go on, too.

    For syncers with machines of their own. The second one copies a fragment, with its versions and
    pins, out of the object store while the first one serves it; once little is lacking that one
    lets go of it, and the other takes it. No version is lost, and what is published is the same. A
    syncer that is lost for good needs no process any more: --from takes all that it has, and deals
    it over the others by size and share.

    Both syncers start again for it. No round of what moves opens from then on until what came last
    is copied; that of a lost syncer waits until all of it is. diloco status says how far it is, and
    what it waits for, such as room on a disk. A move that is not done can be given another target,
    also the syncer that had the fragment.

    Example: diloco move 127.0.0.1:29400 --from eu-west
    """
    given = {"fragments": fragments, "from": from_, "to": to}
    return {name: value for name, value in given.items() if value}


@_operation
def backup(
    address: Address,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="On the coordinator's machine, and not there yet.")
    ],
    with_secret: Annotated[
        bool, flag("The secret that signs the islands' grants, too.", "--with-secret")
    ] = False,
) -> Arguments:
    """Copy the state of a run under way: the journal, the plan, the newest records and the pins.

    The copy is a coordinator.state_dir, from which the run can go on. What is not in it is said.
    A relative DIR is counted from here, where the coordinator is on this machine.

    Example: diloco backup 127.0.0.1:29400 /backups/demo
    """
    if not directory.is_absolute() and _is_here(address):
        directory = directory.absolute()
    return {"directory": str(directory)} | ({"with_secret": "true"} if with_secret else {})


def _is_here(address: str) -> bool:
    try:
        return is_loopback(split_address(address)[0])
    except ValueError:  # of another kind, or none: that is said when it is used
        return False
