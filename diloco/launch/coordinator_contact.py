"""How a syncer reaches the coordinator of now, and how long it bears that nobody speaks to it.

Source: PROTOCOL.md, "Coordinator away".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from diloco.errors import CoordinatorUnavailable
from diloco.loop_clock import loop_now
from diloco.security.security import Security
from diloco.state_dir import StateDir, read_endpoint
from diloco.syncer.reporter import HELLO_INTERVAL_S
from diloco.transport.contracts import Transport
from diloco.transport.errors import ConnectError
from diloco.transport.identity import Role

#: Reports that a syncer which reaches nobody waits for at least; looks meanwhile, and the longest
#: time between two.
_LEAST_REPORTS = 3
_LOOKS = 20
_MOST_LOOK_S = 5.0


class WayToCoordinator:
    """The way to the coordinator of now, by the addresses that the state directory names."""

    def __init__(self, state: StateDir, security: Security) -> None:
        """Assign only."""
        self._state, self._security = state, security
        self._num_turns = 0

    def turn(self) -> None:
        """Try the next address first."""
        self._num_turns += 1

    def connect(self) -> Transport:
        """Open it; raises ConnectError if none is known."""
        coordinator = read_endpoint(self._state.coordinator)
        if coordinator is None:
            raise ConnectError(f"{self._state.coordinator} names no coordinator")
        first, *others = coordinator.address.split(",")
        addresses = [first, *others]
        turned = self._num_turns % len(addresses)
        address = ",".join(addresses[turned:] + addresses[:turned])
        return self._security.transport(address, Role.COORDINATOR)


async def end_when_unreachable(num_words: Callable[[], int], unreachable_s: float) -> None:
    """Raise once nothing has come for `unreachable_s` seconds; else go on for ever.

    Silence is counted by looking: time in which this process was frozen does not count.

    Args:
        num_words: Counts what has come, from any process.
        unreachable_s: `transport.unreachable`; some reports are waited for in any case.

    Raises:
        CoordinatorUnavailable: Then.
    """
    unreachable_s = max(unreachable_s, _LEAST_REPORTS * HELLO_INTERVAL_S)
    look_s = min(unreachable_s / _LOOKS, _MOST_LOOK_S)
    known, silent_s, looked = num_words(), 0.0, loop_now()
    while silent_s < unreachable_s:
        await asyncio.sleep(look_s)
        now = loop_now()
        silent_s += min(now - looked, 2 * look_s)
        looked = now
        if (words := num_words()) != known:
            known, silent_s = words, 0.0
    raise CoordinatorUnavailable(
        f"for {unreachable_s:g} s (transport.unreachable) neither the coordinator has answered nor "
        "any island called: this syncer ends. All that it has published is durable, and it is "
        "started again by its coordinator (diloco coordinator RUN.toml) or by diloco syncer"
    )
