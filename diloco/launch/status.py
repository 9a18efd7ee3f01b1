"""How a run stands: what its coordinator tells anybody who asks. Imports no torch."""

from __future__ import annotations

import random

from diloco.errors import CoordinatorUnavailable
from protos.control_pb2 import StatusReply, StatusRequest
from transport.contracts import PROTOCOL_VERSION, Reply, Transport
from transport.errors import TransportError
from transport.retry import RetryPolicy, retry

_CALL_S = 5.0


async def ask_status(transport: Transport, *, patience_s: float = 0.0) -> StatusReply:
    """Ask a coordinator how its run stands.

    Raises:
        CoordinatorUnavailable: If it does not answer in time, `patience_s` of trying included.
    """
    header = StatusRequest(protocol_version=PROTOCOL_VERSION).SerializeToString()

    async def attempt() -> Reply:
        return await transport.call("control.status", header, deadline_s=_CALL_S)

    policy = RetryPolicy(max_wait_s=1.0, budget_s=patience_s)
    try:
        reply = await (retry(attempt, policy, random.Random()) if patience_s else attempt())
    except TransportError as error:
        raise CoordinatorUnavailable(
            f"no coordinator answered at {transport.peer}: {error}\n"
            f"Is the address the one that the coordinator printed? If it does not run, start it: "
            f"diloco coordinator RUN.toml"
        ) from error
    return StatusReply.FromString(reply.header)


async def look(transport: Transport, *, patience_s: float = 0.0) -> StatusReply:
    """Ask a coordinator once, and close the connection.

    Raises:
        CoordinatorUnavailable: As `ask_status`.
    """
    try:
        return await ask_status(transport, patience_s=patience_s)
    finally:
        await transport.close()
