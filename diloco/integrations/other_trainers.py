"""Fits the loop of another trainer to the run; shared by the integrations."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.island.connection import Connection
from diloco.island.lanes.parameters import Trained
from diloco.island.session import DiLoCo
from diloco.protocol.island.soundness import Mend, StepBound
from diloco.telemetry.events import Event
from diloco.trainer.optimizers.optimizer import step_bound
from diloco.trainer.state import mend_moments_

logger = logging.getLogger(__name__)

#: Of the ranks' outer states, in a folder of a trainer's checkpoint.
OUTER_FILES = "diloco-outer-*.safetensors"


def num_kept_checkpoints(config: Config) -> int:
    """Return how many checkpoints a trainer must keep so that the run can return to one."""
    apart = config.outer.inner_steps_per_round + config.outer.overlap_steps
    return config.checkpoint.keep + config.checkpoint.num_unsure(apart) + 2


def joined(
    trained: Trained,
    connection: Connection,
    on_event: Callable[[Event], None] | None,
    *,
    steps: int,
    setting: str,
    is_bound: bool = False,
) -> DiLoCo:
    """Join the run with a trainer that makes as many steps.

    Args:
        trained: As `DiLoCo` takes it.
        connection: Open.
        on_event: Called with every event, or None.
        steps: That the trainer is set to.
        setting: What sets them, for the error.
        is_bound: Whether the trainer can make no more: a decoupled run needs `most_inner_steps`.

    Raises:
        ConfigError: If the run has another number, or the bound is too low.
        DilocoError: As the join may fail.
    """
    outer = DiLoCo(trained, connection.config.outer, transport=connection, on_event=on_event)
    config = connection.config
    if is_bound and config.outer.is_on_arrival:
        if steps < (needed := config.most_inner_steps):
            raise ConfigError(
                f"{setting}={steps}: tokens end a decoupled run, and until then this island may "
                f"make up to {needed} inner steps: set {setting}=config.most_inner_steps, of the "
                f"configuration that diloco.load_config returns"
            )
    elif steps != outer.inner_steps:
        raise ConfigError(
            f"{setting}={steps}: the run has run.inner_steps = {outer.inner_steps}, which every "
            f"trainer's schedule must have: set {setting}={outer.inner_steps}"
        )
    return outer


def finish(outer: DiLoCo, trainer: str, hint: str) -> None:
    """Merge what is outstanding, as a trainer has ended; the model then has the published values.

    Args:
        outer: Of the island.
        trainer: What has ended.
        hint: What must not end it.

    Raises:
        ConfigError: If it ended before the run.
        DilocoError: If the island cannot go on.
    """
    if not (outer.is_over or outer.is_stopping):
        raise ConfigError(
            f"{trainer} ended after inner step {outer.inner_step} of {outer.inner_steps}, and the "
            f"other islands go on: to end the run early stop it (diloco stop HOST:PORT); {hint}"
        )
    outer.finish()


def save_outer(outer: DiLoCo, folder: Path, rank: int, about: dict[str, str] | None = None) -> None:
    """Save a rank's outer state next to what its trainer saves; inside `checkpointing`."""
    from safetensors.torch import save_file  # not every trainer brings it

    # Views of one lane's memory: the file wants tensors of their own.
    tensors = {name: value.clone() for name, value in outer.state_dict().items()}
    save_file(tensors, folder / OUTER_FILES.replace("*", str(rank)), about)


def load_outer(outer: DiLoCo, folder: Path) -> None:
    """Load the outer state that the ranks of an island have saved in a folder."""
    from safetensors.torch import load_file

    loaded: dict[str, Tensor] = {}
    for file in sorted(folder.glob(OUTER_FILES)):
        loaded.update(load_file(file))
    outer.load_state_dict(loaded)


def skip_to(start_step: int, step: int, scheduler_step: Callable[[], object]) -> None:
    """Let a trainer's learning rate go on where the run stands, as its island returns to it."""
    logger.warning(
        "the island returns at inner step %d, its trainer stood at step %d: the data goes on from "
        "the trainer's step, the learning rate with the run's",
        start_step,
        step,
    )
    with warnings.catch_warnings():  # of a scheduler that steps before its optimizer
        warnings.simplefilter("ignore")
        for _ in range(step, start_step):
            scheduler_step()


def followed(schedulers: Iterable[object]) -> list[LambdaLR]:
    """Return the schedulers, whose learning rates can follow the tokens of a decoupled run.

    Raises:
        ConfigError: Naming the first that is no `LambdaLR`.
    """
    found = []
    for scheduler in schedulers:
        if not isinstance(scheduler, LambdaLR):
            raise ConfigError(
                f"the learning rate is set by a {type(scheduler).__name__}, and in a decoupled run "
                f"it follows the tokens that all islands have trained, not this island's steps: "
                f"take a torch.optim.lr_scheduler.LambdaLR, whose rate may be asked for any step"
            )
        found.append(scheduler)
    return found


def follow_(schedulers: Iterable[LambdaLR], schedule_step: float) -> None:
    """Set the learning rates of the next step to those after so many steps of the schedule."""
    with warnings.catch_warnings():  # of a scheduler that steps before its optimizer
        warnings.simplefilter("ignore")
        for scheduler in schedulers:
            scheduler.last_epoch = int(schedule_step) - 1
            scheduler.step()


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
