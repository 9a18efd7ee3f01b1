"""The lines of islands that exchange among themselves: what one pulls crosses two of them.

A transfer shares its holder's line up with all that is pulled from there, and its puller's line
down with all that it pulls; its delay, jitter and loss are the worse ones of both. Links that are
shaped in the process (`transport.link`) are the puller's alone, which is the same where all are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from diloco.simulations.engine.network import Network, Path, Pipe, Tcp
from diloco.transport.shaping.link import Link, LinkProfile


class Mesh:
    """Ways between all islands, and from each to the coordinator."""

    def __init__(
        self,
        network: Network,
        profiles: Mapping[str, LinkProfile],
        tcp: Tcp | None,
        *,
        is_shaped: bool,
    ) -> None:
        """Take every island's line.

        Args:
            network: Of the run.
            profiles: By island.
            tcp: Ceilings of a connection; None: none.
            is_shaped: Whether lines are those that a process shapes.
        """
        self._network, self._profiles, self._tcp = network, profiles, tcp
        self._is_shaped = is_shaped
        self._ups = {
            n: Pipe(f"{n}-up", math.inf if is_shaped else p.up.bandwidth_bps)
            for n, p in profiles.items()
        }
        self._downs = {n: Pipe(f"{n}-down", p.down.bandwidth_bps) for n, p in profiles.items()}

    def control_s(self, island: str) -> tuple[float, float]:
        """Give the seconds of a call to the coordinator on its way there and back."""
        if self._is_shaped:
            return 0.0, 0.0
        profile = self._profiles[island]
        return profile.up.delay_s, profile.down.delay_s

    def request_s(self, puller: str, holder: str) -> float:
        """Give the seconds after which a request arrives at another island."""
        own_s = self._profiles[puller].up.delay_s
        return own_s if self._is_shaped else max(own_s, self._profiles[holder].down.delay_s)

    def path(self, holder: str, puller: str, fragment_id: int) -> Path:
        """Give the way of what one island pulls from another."""
        down = self._profiles[puller].down
        up = down if self._is_shaped else self._profiles[holder].up
        link = Link(
            min(up.bandwidth_bps, down.bandwidth_bps),
            max(up.delay_s, down.delay_s),
            max(up.jitter_s, down.jitter_s),
            max(up.loss, down.loss),
        )
        rtt_s = self.request_s(puller, holder) + link.delay_s
        name = f"{holder}>{puller}/{fragment_id}"
        return Path(name, (self._ups[holder], self._downs[puller]), link, rtt_s, self._tcp)

    def drop(self, holder: str, puller: str, fragment_id: int) -> None:
        """Forget what is on this way: it is not wanted any more, or its holder is gone."""
        self._network.drop(self.path(holder, puller, fragment_id))
