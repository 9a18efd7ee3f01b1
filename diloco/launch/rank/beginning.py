"""Asks the coordinator where a run began, before a warm start is opened.

Source: PROTOCOL.md, "Version 0" and "Return of an island".
"""

from __future__ import annotations

from diloco.checkpoint.warm_start import WarmStart, find_warm_start
from diloco.config.schema import Config
from diloco.coordinator.status import ask_run_state
from diloco.io_thread import IoThread
from diloco.island.groups import make_groups
from diloco.protos.control_pb2 import RunStateReply
from diloco.security.security import Security
from diloco.transport.identity import Role


def find_beginning(
    config: Config, coordinator_address: str, io: IoThread
) -> tuple[WarmStart | None, int]:
    """Open the warm start, and say at which inner step the run began or will; collective.

    A run that has published anything, or was resumed, has left it behind: an island that
    returns needs no more than that inner step, and the source may be gone.

    Args:
        config: With an island selected.
        coordinator_address: HOST:PORT.
        io: Where the leader asks.

    Returns:
        The warm start, None where there is none or it lies behind; and the inner step.

    Raises:
        ConfigError: As `find_warm_start`.
        CoordinatorUnavailable: If it does not answer for `transport.unreachable`.
        IslandFailed: On the other ranks, if the leader had no answer.
    """
    if not config.run.warm_start:
        return None, 0
    patience_s = config.transport.unreachable.seconds

    def start_step() -> int | None:
        security = Security.of(config, Role.ISLAND, config.island_id).knowing(coordinator_address)
        transport = security.transport(coordinator_address, Role.COORDINATOR)

        async def ask() -> RunStateReply:
            try:
                return await ask_run_state(transport, config.island_id, patience_s=patience_s)
            finally:
                await transport.close()

        run_state = io.run(ask())
        return run_state.start_step if run_state.timeline or run_state.has_published else None

    # The default group would give up while the leader still waits for the coordinator.
    timeout_s = config.island.collective_timeout.seconds
    groups = make_groups(None, patience_s=patience_s, collective_s=timeout_s)
    told = groups.leader_says("could not learn where the run began", start_step)
    if told is not None:
        return None, told
    warm = find_warm_start(config)
    assert warm is not None
    return warm, warm.start_step
