"""Work that a round did not wait for, and that the next contribution carries: `late = "carry"`.

    carried <- cap(carried + (1 - alpha) Delta)          after a merge that did not count Delta
    x        = Delta + residual + carried                of every contribution until one is INCLUDED

where cap bounds the norm by that of the last Delta that was included, or, before there is one, by
that of this Delta: what piles up while an island is late must not outweigh a round. With alpha > 0
the merge has kept its share of the work, so only the rest is carried. Norms are of lanes, so that
nothing depends on which rank carries them.

Source: PROTOCOL.md, "Counters and residuals".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diloco.outer.pseudo_gradient import bit_sum, l2_norm


class Over:
    """What one fragment's lanes on one rank carry over."""

    def __init__(self) -> None:
        """Carry nothing."""
        self._carried: dict[int, Tensor] = {}
        self._sums: dict[int, int] = {}
        self._norms: dict[int, float] = {}

    def of(self, lane_id: int) -> Tensor | None:
        """Return what the next contribution of a lane carries; None: nothing."""
        return self._carried.get(lane_id)

    def forget_flipped(self, lane_id: int) -> bool:
        """Carry nothing if a bit of it has flipped since it was made; returns whether one has."""
        carried = self._carried.get(lane_id)
        if carried is None or bit_sum(carried) == self._sums[lane_id]:
            return False
        del self._carried[lane_id]
        return True

    def captured(self, lane_id: int, numel: int) -> tuple[Tensor, Tensor]:
        """Return what a lane carries and the bound of its norm, for `restore`; not copied."""
        norm = torch.tensor([self._norms.get(lane_id, -1.0)], dtype=torch.float64)
        return self._carried.get(lane_id, torch.zeros(numel)), norm

    def restore(self, lane_id: int, carried: Tensor, norm: Tensor) -> None:
        """Carry what was captured."""
        if bool(carried.any()):
            self._keep(lane_id, carried)
        if (most := float(norm)) >= 0:
            self._norms[lane_id] = most

    def included(self, lane_id: int, delta: Tensor) -> None:
        """Take note that a contribution of `delta` counts: what it carried is used up."""
        self._carried.pop(lane_id, None)
        self._norms[lane_id] = l2_norm(delta)

    def missed(self, lane_id: int, delta: Tensor, local_mix: float) -> None:
        """Carry a lane's work that no version counts.

        Args:
            lane_id: The lane.
            delta: Its pseudo-gradient, float32; unchanged. One that is not finite is lost.
            local_mix: alpha of the merge that came without it.
        """
        norm = l2_norm(delta)
        if not math.isfinite(norm):
            return
        carried = delta * (1.0 - local_mix)
        if (before := self._carried.get(lane_id)) is not None:
            carried += before
        most, size = self._norms.get(lane_id, norm), l2_norm(carried)
        if size > most:
            carried *= most / size
        self._keep(lane_id, carried)

    def _keep(self, lane_id: int, carried: Tensor) -> None:
        self._carried[lane_id], self._sums[lane_id] = carried, bit_sum(carried)
