"""Asks a coordinator for the status of its run, and sends it commands. Imports no torch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

from google.protobuf.message import Message

from diloco.errors import ConfigError, CoordinatorUnavailable
from diloco.protos.control_pb2 import (
    OperateReply,
    OperateRequest,
    RunStateReply,
    RunStateRequest,
    StatusReply,
    StatusRequest,
)
from diloco.transport.contracts import PROTOCOL_VERSION, Reply, Transport
from diloco.transport.errors import ConnectError, Overloaded, TransportError, Unauthorised
from diloco.transport.retry import RetryPolicy, retry

_CALL_S = 5.0
#: Seconds that a coordinator has to copy a run.
_BACKUP_S = 3600.0
#: Seconds for which a coordinator may be away while its answer is waited for.
_AWAY_S = 60.0
#: Seconds after which an island that does not say that it holds a version is taken at its word.
_NOT_HELD_S = 15.0
_LOOK_S = 0.5
#: Seconds after which a call that did not arrive is made once more.
_AGAIN_S = 0.3


async def ask_status(
    transport: Transport, *, patience_s: float = 0.0, watches: bool = False
) -> StatusReply:
    """Ask a coordinator, as an operator, how its run stands; `watches` says that it asks again.

    Raises:
        CoordinatorUnavailable: If it does not answer in time, `patience_s` of trying included, or
            refuses.
    """
    request = StatusRequest(protocol_version=PROTOCOL_VERSION, watches=watches)
    reply = await _ask(transport, "control.status", request, patience_s)
    return StatusReply.FromString(reply.header)


async def ask_run_state(
    transport: Transport, island: str, *, patience_s: float = 0.0
) -> RunStateReply:
    """Ask a coordinator, as an island, how the run and this island stand.

    Raises:
        CoordinatorUnavailable: As `ask_status`.
    """
    request = RunStateRequest(protocol_version=PROTOCOL_VERSION, island=island)
    reply = await _ask(transport, "control.standing", request, patience_s)
    return RunStateReply.FromString(reply.header)


async def operate(transport: Transport, command: str, arguments: Mapping[str, str]) -> str:
    """Give a coordinator a command, as an operator; returns in words what was done.

    Raises:
        ConfigError: If it does not do it; says why, and what to do.
        CoordinatorUnavailable: As `ask_status`.
    """
    request = OperateRequest(
        protocol_version=PROTOCOL_VERSION, command=command, arguments=arguments
    )
    deadline_s = _BACKUP_S if command == "backup" else _CALL_S
    reply = await _ask(transport, "control.operate", request, 0.0, deadline_s)
    answer = OperateReply.FromString(reply.header)
    if not answer.is_done:
        raise ConfigError(f"diloco {command}: {answer.message}")
    return answer.message


async def wait_for_repair(transport: Transport, fragment_id: int, island: str) -> str:
    """Wait, as an operator, until a damaged fragment is served again; returns that in words.

    Args:
        transport: To the coordinator.
        fragment_id: The fragment.
        island: That it was asked of.

    Raises:
        ConfigError: If the island does not hold it any more, or the run is over.
        CoordinatorUnavailable: As `ask_status`.
    """
    loop = asyncio.get_running_loop()
    held_at = loop.time()
    while True:
        status = await ask_status(transport, patience_s=_AWAY_S)
        found = [f for f in status.fragments if f.fragment_id == fragment_id]
        if found and not found[0].damage:
            return f"fragment {fragment_id} is served again, its newest version is now " + str(
                found[0].version
            )
        # Of a start of the coordinator or the syncer nobody has called yet.
        if not found or island in found[0].holders:
            held_at = loop.time()
        if status.state in ("failed", "finished", "stopped"):
            raise ConfigError(f"diloco repair: the run is {status.state}: {status.message}")
        if loop.time() - held_at > _NOT_HELD_S:
            raise ConfigError(
                f"diloco repair: {island} does not hold what fragment {fragment_id} has lost any "
                f"more: {found[0].damage}"
            )
        await asyncio.sleep(_LOOK_S)


async def _ask(
    transport: Transport,
    method: str,
    request: Message,
    patience_s: float,
    deadline_s: float = _CALL_S,
) -> Reply:
    header = request.SerializeToString()

    async def attempt() -> Reply:
        return await transport.call(method, header, deadline_s=deadline_s)

    policy = RetryPolicy(max_wait_s=1.0, budget_s=patience_s)
    try:
        if patience_s:
            return await retry(attempt, policy, random.Random())
        try:
            return await attempt()
        except ConnectError:  # as of a server that replaces its certificates at this moment
            await asyncio.sleep(_AGAIN_S)
            return await attempt()
    except Unauthorised as error:
        raise CoordinatorUnavailable(
            f"the coordinator at {transport.peer} refused to answer: {error}\n"
            f"What is wrong with this site's certificate or token: diloco doctor RUN.toml"
        ) from error
    except Overloaded as error:
        raise CoordinatorUnavailable(
            f"the coordinator at {transport.peer} cannot do it now: {error}"
        ) from error
    except TransportError as error:
        raise CoordinatorUnavailable(
            f"no coordinator answered at {transport.peer}: {error}\n"
            f"Is the address the one that the coordinator printed? If it does not run, start it: "
            f"diloco coordinator RUN.toml"
        ) from error
