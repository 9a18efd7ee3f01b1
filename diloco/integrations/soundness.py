"""What an island's soundness check takes from another trainer's optimizers, and asks of them."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer

from diloco.protocol.island.soundness import Mend, StepBound
from diloco.trainer.optimizers.optimizer import step_bound
from diloco.trainer.state import mend_moments_


def common_bound(optimizers: Iterable[Optimizer]) -> StepBound:
    """Bound how far the next step of several optimizers can move a value, see `diloco.step_bound`.

    Infinite if one of them is neither Adam nor AdamW: nothing is known of it.
    """
    bounds = list(map(step_bound, optimizers))
    return StepBound(max(b.update for b in bounds), max(b.decay for b in bounds))


def repair_state_(optimizers: Iterable[Optimizer], repair: Mend) -> None:
    """Do to the optimizers' state what `DiLoCo.mend` asks after a step; mostly nothing."""
    for optimizer in optimizers:
        match repair:
            case Mend.MOMENTS:
                mend_moments_(optimizer)
            case Mend.ALL:
                optimizer.state.clear()  # the next step begins a new one
