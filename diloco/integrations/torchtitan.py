"""`DiLoCoTrainer`: the outer loop inside a torchtitan `Trainer`, which wants GPUs.

    config = ConfigManager().parse_args()
    with diloco.connect(diloco.load_config("run.toml", island="eu-west")) as connection:
        trainer = DiLoCoTrainer(config, connection)
        trainer.train()
        trainer.close()

torchtitan's own loop goes on; the outer one joins after its load, steps after every `train_step`,
saves where the run's checkpoints are due, and has the validator see the published parameters. In a
decoupled run the learning rate follows the run's tokens, and checkpoints are numbered by the run.
The loss of every step is summed over the island for it, which waits for the device.

See `Trainer`, `CheckpointManager` and `Validator` of torchtitan 0.3.0; its API moves with every
release, so no other version is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from diloco.errors import ConfigError
from diloco.integrations.other_trainers import (
    common_bound,
    finish,
    follow_,
    followed,
    joined,
    num_kept_checkpoints,
    repair_state_,
    skip_to,
)
from diloco.island.connection import Connection
from diloco.island.session import DiLoCo
from diloco.telemetry.events import Event

#: Versions of torchtitan that this was written against.
VERSIONS = ("0.3.0",)
#: The outer state's key in a checkpoint.
_OUTER = "diloco"


def _check_torchtitan() -> None:
    """Refuse what this module cannot work with.

    Raises:
        ConfigError: If torchtitan is missing, or another version.
    """
    wanted = f"pip install torchtitan=={VERSIONS[-1]}"
    try:
        found = version("torchtitan")
    except PackageNotFoundError as missing:
        raise ConfigError(
            f"diloco.integrations.torchtitan needs torchtitan, which is not installed: {wanted}"
        ) from missing
    if found not in VERSIONS:
        raise ConfigError(
            f"diloco.integrations.torchtitan is for torchtitan {', '.join(VERSIONS)}, and {found} "
            f"is installed, whose Trainer may call other things: {wanted}"
        )


_check_torchtitan()

try:
    from torchtitan.tools import utils as device_utils

    if device_utils.device_type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "diloco.integrations.torchtitan needs a GPU, and torch finds none: on CPUs use "
            "diloco island, or the loop of diloco.DiLoCo (diloco/integrations/README.md)"
        )
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.trainer import Trainer
except ModuleNotFoundError as missing_part:
    raise ConfigError(
        f"torchtitan cannot be imported without the package {missing_part.name}: install what its "
        f"page asks for (https://github.com/pytorch/torchtitan)"
    ) from missing_part


class DiLoCoTrainer(Trainer):  # type: ignore[misc]  # Any where torchtitan is not installed
    """A torchtitan `Trainer` of one island.

    An inner step is a `train_step`, gradient accumulation included.

    Attributes:
        outer: The island's `DiLoCo`, from the load at the beginning of `train` on.
    """

    outer: DiLoCo
    # torchtitan's own attributes, which take ours in their place.
    checkpointer: Any
    validator: Any
    optimizers: Any
    step: int

    def __init__(
        self,
        config: Trainer.Config,
        connection: Connection,
        *,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """Build what torchtitan builds; the run is joined when `train` begins.

        Args:
            config: torchtitan's.
            connection: Open: `with diloco.connect(config) as connection:`.
            on_event: Called with every event of the outer loop, in any thread.

        Raises:
            ConfigError: If torchtitan's configuration does not fit the run.
        """
        check_fit(config, connection)
        super().__init__(config)
        check_shared_buffers(self.model_parts)
        self._connection, self._on_event = connection, on_event
        self._num_tokens = self._island_tokens()
        self._followed: list[LambdaLR] = []  # schedulers that follow the tokens of a decoupled run
        self.checkpointer = RunCheckpoints(self, self.checkpointer)
        if config.validator.enable:
            self.validator = PublishedValidation(self, self.validator)

    def _island_tokens(self) -> int:
        """Tokens of the whole island in an inner step, as the run file must have them.

        Raises:
            ConfigError: If it has another number.
        """
        training, dims = self.config.training, self.parallel_dims
        replicas = dims.get_mesh("batch").size() if dims.dp_enabled else 1
        sequences = training.local_batch_size * replicas * self.gradient_accumulation_steps
        tokens, island = int(sequences * training.seq_len), self._connection.config.island
        if tokens != island.tokens_per_inner_step:
            name = self._connection.config.island_id
            raise ConfigError(
                f"torchtitan trains {sequences} sequences of {training.seq_len} tokens a step, and "
                f"islands.{name}.tokens_per_inner_step = {island.tokens_per_inner_step}: set it to "
                f"{tokens}, or training.global_batch_size"
            )
        return tokens

    def join(self) -> None:
        """Join the run after torchtitan's own load, and agree on where it stands; collective.

        Raises:
            ConfigError: If what was loaded is ahead of the run, or its checkpoint is missing.
            DilocoError: As the join may fail.
        """
        manager = self.checkpointer.manager
        self.outer = outer = joined(
            self.model_parts,
            self._connection,
            self._on_event,
            steps=self.config.training.steps,
            setting="training.steps",
        )
        if self._connection.config.outer.is_on_arrival:
            self._followed = followed(self.lr_schedulers.schedulers)
        manager.states[_OUTER] = outer  # it is a Stateful, whose names are those of lanes
        if outer.resume_step is not None:
            self.checkpointer.load_again(outer.resume_step)
        elif self.step > outer.start_step:
            raise ConfigError(
                f"torchtitan loaded a checkpoint of step {self.step} from {manager.folder}, and "
                f"the run stands at inner step {outer.start_step}: give another "
                f"checkpoint.folder, or resume the run, too (diloco coordinator RUN.toml --resume)"
            )
        elif self.step < outer.start_step:
            skip_to(outer.start_step, self.step, self.lr_schedulers.step)
            self.step = outer.start_step
        follow_(self._followed, outer.schedule_step)

    # -- what torchtitan's loop calls --------------------------------------------------------------

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Make an inner step, then send and merge what is due."""
        self._losses: list[torch.Tensor] = []
        bound = common_bound(self.optimizers.optimizers)  # the learning rates change in the step
        super().train_step(data_iterator)
        self.outer.log(loss=self._island_loss())
        self.outer.step(num_tokens=self._num_tokens, bound=bound)
        repair_state_(self.optimizers.optimizers, self.outer.mend)
        follow_(self._followed, self.outer.schedule_step)

    def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        """Keep the loss of a micro-batch: torchtitan itself adds it up where it is logged."""
        loss: torch.Tensor = super().forward_backward_step(**kwargs)
        self._losses.append(loss.detach().float().sum())
        return loss

    def _island_loss(self) -> float:
        """Mean loss of the inner step, of which each rank has a part; the same on all ranks."""
        dims, loss = self.parallel_dims, torch.stack(self._losses).sum()
        if dims.pp_enabled and not self.pp_has_last_stage:
            loss = torch.zeros_like(loss)  # torchtitan says -1 there
        for name in ("loss", "pp"):
            if (mesh := dims.get_optional_mesh(name)) is not None:
                loss = dist_utils.dist_sum_tensor(loss, mesh)
        return loss.item()

    def should_continue_training(self) -> bool:
        """Go on until the run is over, or everybody stops."""
        return not (self.outer.is_over or self.outer.is_stopping)

    def train(self) -> None:
        """Train to the end of the run, merge what is outstanding, save the published parameters.

        Raises:
            ConfigError: If torchtitan ended before the run.
            DilocoError: If the island cannot go on.
        """
        super().train()
        finish(self.outer, "torchtitan", "give it data for all steps")
        if self.outer.is_over:
            manager = self.checkpointer.manager
            del manager.states[_OUTER]  # there is nothing to go on from
            manager.save(self.step, last_step=True)


class RunCheckpoints:
    """What the Trainer takes for its checkpoint manager: saves when the run's checkpoints are due.

    Attributes:
        manager: torchtitan's own.
    """

    def __init__(self, trainer: DiLoCoTrainer, manager: Any) -> None:
        """Assign only; `manager` is a `CheckpointManager`."""
        self._trainer, self.manager = trainer, manager

    def load(self, step: int = -1) -> bool:
        """Load what torchtitan would, then join the run."""
        is_loaded = bool(self.manager.load(step))
        self._trainer.join()
        return is_loaded

    def load_again(self, resume_step: int) -> None:
        """Load the run checkpoint that is resumed, the outer state with it.

        Raises:
            ConfigError: If it is not there.
        """
        try:
            self.manager.load(resume_step)
        except FileNotFoundError as error:
            raise ConfigError(
                f"the run is resumed at its checkpoint {resume_step}, and torchtitan has no such "
                f"checkpoint: {error}; keep checkpoint.folder from one start to the next"
            ) from error

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if the run's checkpoint is due; the last step is saved after the last merge."""
        outer, manager = self._trainer.outer, self.manager
        if not outer.checkpoint_due:
            return False
        with outer.checkpointing():
            every, manager.interval = manager.interval, 1  # it saves at multiples of it
            try:
                is_saved = bool(manager.save(outer.checkpoint_number))
            finally:
                manager.interval = every
            manager.maybe_wait_for_staging()
            manager.maybe_wait_for_saving()
        return is_saved

    def maybe_wait_for_staging(self) -> None:
        """See `CheckpointManager`; `save` has waited."""
        self.manager.maybe_wait_for_staging()

    def close(self) -> None:
        """Release what torchtitan's manager has."""
        self.manager.close()


class PublishedValidation:
    """What the Trainer takes for its validator: shows it the published parameters."""

    def __init__(self, trainer: DiLoCoTrainer, validator: Any) -> None:
        """Assign only; `validator` is a `BaseValidator`."""
        self._trainer, self._validator = trainer, validator

    def should_validate(self, step: int) -> bool:
        """See `BaseValidator`."""
        return bool(self._validator.should_validate(step))

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Validate what all islands have learned; collective."""
        with self._trainer.outer.global_parameters():
            self._validator.validate(model_parts, step)


def check_fit(config: Trainer.Config, connection: Connection) -> None:
    """Refuse a configuration of torchtitan that would train or save something else than the run.

    Raises:
        ConfigError: Naming every setting and what to set.
    """
    run, checkpoint = connection.config, config.checkpoint
    problems = []
    if not checkpoint.enable or checkpoint.load_only:
        problems.append(
            "checkpoint.enable = false or checkpoint.load_only = true: the run could neither be "
            "stopped nor resumed: give --checkpoint.enable, without load_only"
        )
    if (every := run.checkpoint.every_inner_steps) and checkpoint.interval != every:
        problems.append(
            f"checkpoint.interval = {checkpoint.interval}: islands save together, every "
            f"checkpoint.every_inner_steps = {every} of the run file: give --checkpoint.interval "
            f"{every}"
        )
    if checkpoint.enable_first_step_checkpoint:
        problems.append(
            "checkpoint.enable_first_step_checkpoint = true: no checkpoint of the run is due then: "
            "leave it out"
        )
    needed = num_kept_checkpoints(run)
    if 0 < checkpoint.keep_latest_k < needed:
        problems.append(
            f"checkpoint.keep_latest_k = {checkpoint.keep_latest_k} removes checkpoints to which "
            f"the run may be taken back: set {needed} or more, or 0"
        )
    if not config.training.disable_cuda_graphs:
        problems.append(
            "training.disable_cuda_graphs = false: merges between replays of a captured step are "
            "untried: give --training.disable_cuda_graphs"
        )
    if problems:
        raise ConfigError("torchtitan's configuration: " + "; ".join(problems))


def check_shared_buffers(model_parts: list[nn.Module]) -> None:
    """Refuse buffers that training changes: islands synchronise parameters.

    Raises:
        ConfigError: Naming the first.
    """
    for part in model_parts:
        for name, buffer in part.named_buffers():
            if name.endswith("expert_bias_E") and buffer is not None:
                raise ConfigError(
                    f"{name} is changed by torchtitan's load balancing, and no merge touches "
                    f"buffers: each island would have its own: set load_balance_coeff = None in "
                    f"the model's configuration, or train its experts with diloco island"
                )
