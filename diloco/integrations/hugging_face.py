"""`DiLoCoCallback` runs the outer loop in `transformers.Trainer`.

    with diloco.connect(config) as connection:
        callback = DiLoCoCallback(connection)
        trainer = Trainer(model, arguments, train_dataset=..., callbacks=[callback])
        trainer.train()
        trainer.save_model()  # the published parameters

An optimizer step of the Trainer, its gradient accumulation included, is an inner step. The Trainer
evaluates the published parameters, and saves where the run's checkpoints are due
(`checkpoint.every_inner_steps`, a graceful stop): its own state, and the outer one next to it. In a
decoupled run its learning rate follows the run's tokens, and `max_steps` is a bound.
The outer loop is given the loss that the model returns, and the bound of an Adam or AdamW step.

See `Trainer._inner_training_loop` and `_maybe_log_save_evaluate` of transformers 5.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.hooks import RemovableHandle

from diloco.errors import ConfigError
from diloco.extras import missing
from diloco.integrations.other_trainers import (
    OUTER_FILES,
    common_bound,
    finish,
    follow_,
    followed,
    joined,
    load_outer,
    num_kept_checkpoints,
    repair_state_,
    save_outer,
    skip_to,
)
from diloco.island.connection import Connection
from diloco.island.session import DiLoCo
from diloco.protocol.island.soundness import StepBound
from diloco.telemetry.events import Event

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ModuleNotFoundError as absent:
    raise missing("diloco.integrations.hugging_face", str(absent.name)) from absent

#: Metadata of such a file: the run checkpoint that it is a part of.
_NUMBER = "checkpoint_number"


class DiLoCoCallback(TrainerCallback):
    """Steps, saves, resumes and stops one island's outer loop from the Trainer's events.

    Give it to one Trainer, which calls `train` once. Callbacks that ask for an evaluation must
    stand before it.

    Attributes:
        outer: The island's `DiLoCo`, from the beginning of the training on.
    """

    outer: DiLoCo

    def __init__(
        self, connection: Connection, *, on_event: Callable[[Event], None] | None = None
    ) -> None:
        """Assign only; the run is joined when the training begins.

        Args:
            connection: Open: `with diloco.connect(config) as connection:`.
            on_event: Called with every event of the outer loop, in any thread.
        """
        self._connection = connection
        self._on_event = on_event
        self._on_arrival = connection.config.outer.is_on_arrival
        self._evaluation = contextlib.ExitStack()
        self._saving = contextlib.ExitStack()
        self._tokens_seen = 0
        self._losses: list[Tensor] = []  # of the micro-batches of this inner step
        self._is_scaled = False  # whether each is a part of the mean, and not a mean itself
        self._schedulers: list[LambdaLR] = []  # that follow the tokens of a decoupled run
        self._hook: RemovableHandle | None = None
        self._bound = StepBound()

    # -- begin -----------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Join the run, and agree with the Trainer on where it stands.

        Raises:
            ConfigError: If the Trainer's arguments, model or checkpoint do not fit the run.
            DilocoError: As the join may fail.
        """
        model = kwargs["model"]
        self._check_arguments(args, model)
        self.outer = outer = joined(
            model,
            self._connection,
            self._on_event,
            steps=args.max_steps,
            setting="max_steps",
            is_bound=True,
        )
        if self._on_arrival:
            self._schedulers = followed([kwargs["lr_scheduler"]])
        if outer.resume_step is not None:
            self._resume(args, state.global_step, outer.resume_step)
        elif state.global_step > outer.start_step:
            raise ConfigError(
                f"the Trainer was resumed at step {state.global_step}, and the run stands at inner "
                f"step {outer.start_step}: call trainer.train() without resume_from_checkpoint, or "
                f"resume the run, too (diloco coordinator RUN.toml --resume)"
            )
        elif state.global_step < outer.start_step:
            skip_to(outer.start_step, state.global_step, kwargs["lr_scheduler"].step)
            state.global_step = outer.start_step
        self._follow(args)
        self._tokens_seen = state.num_input_tokens_seen
        if not args.torch_compile and args.n_gpu <= 1:  # else a hook breaks graphs, or has copies
            self._hook = model.register_forward_hook(self._note_loss, with_kwargs=True)
        if args.eval_on_start:
            self._evaluation.enter_context(outer.global_parameters())

    def _check_arguments(self, args: TrainingArguments, model: nn.Module) -> None:
        """Refuse what would train, save or load something else than the run."""
        problems = []
        if str(getattr(args.save_strategy, "value", args.save_strategy)) != "no":
            problems.append(
                f'save_strategy="{args.save_strategy}": islands save together, when a checkpoint '
                f'of the run is due: set save_strategy="no", and checkpoint.every_inner_steps in '
                f"the run file"
            )
        needed = num_kept_checkpoints(self._connection.config)
        if args.save_total_limit is not None and args.save_total_limit < needed:
            problems.append(
                f"save_total_limit={args.save_total_limit} removes checkpoints to which the run "
                f"may be taken back: set save_total_limit={needed} or more"
            )
        fixed = [name for name in args.lr_scheduler_kwargs or {} if name.endswith("_steps")]
        if args.warmup_steps >= 1:
            fixed.append("warmup_steps")
        if self._on_arrival and fixed:
            problems.append(
                f"{', '.join(fixed)}: in a decoupled run the learning rate follows the share of "
                f"the run's tokens, whatever number of steps this island makes: give a share of "
                f"max_steps, such as warmup_steps=0.05, or an lr_scheduler_type without steps"
            )
        if args.load_best_model_at_end:
            problems.append(
                "load_best_model_at_end=True replaces what the islands published: leave it out"
            )
        if args.deepspeed is not None:
            problems.append("deepspeed=...: its parameters lie flat in ZeRO's own memory: use FSDP")
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            problems.append(
                "fsdp_config version 1 has flat parameters: set fsdp_config={'version': 2}"
            )
        if problems:
            raise ConfigError("TrainingArguments: " + "; ".join(problems))

    def _resume(self, args: TrainingArguments, global_step: int, resume_step: int) -> None:
        """Load the outer state next to what the Trainer has loaded of the same checkpoint."""
        checkpoint = _checkpoint(args, global_step)
        if _number_of(checkpoint) != resume_step:
            folders = Path(checkpoint.parent).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
            if not (found := [path for path in folders if _number_of(path) == resume_step]):
                raise ConfigError(
                    f"the run is resumed at its checkpoint {resume_step}, and no {OUTER_FILES} "
                    f"below {checkpoint.parent} is of it: keep output_dir from one start to the "
                    f"next, or resume the run at another checkpoint"
                )
            raise ConfigError(
                f"the run is resumed at its checkpoint {resume_step}, the Trainer at step "
                f'{global_step}: call trainer.train(resume_from_checkpoint="{found[0]}")'
            )
        load_outer(self.outer, checkpoint)

    # -- train -----------------------------------------------------------------------------------

    def _follow(self, args: TrainingArguments) -> None:
        """Set the learning rate of the next step of a decoupled run, by the share of its tokens.

        The Trainer has spread its schedule over `max_steps`.
        """
        share = self.outer.schedule_step / self.outer.inner_steps
        follow_(self._schedulers, share * args.max_steps)

    def _note_loss(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Keep what the model says of a micro-batch; models that return no loss say nothing."""
        if model.training and isinstance(output, dict) and output.get("loss") is not None:
            self._losses.append(output["loss"].detach().float())
            self._is_scaled = kwargs.get("num_items_in_batch") is not None

    def _loss(self, args: TrainingArguments) -> float | None:
        """Mean loss of the island in this inner step, the same on all ranks; None: not known."""
        losses, self._losses = self._losses, []
        if not losses:
            return None
        loss = torch.stack(losses).sum() / (1 if self._is_scaled else len(losses))
        if args.world_size > 1:
            dist.all_reduce(loss)
            if not (self._is_scaled and args.average_tokens_across_devices):
                loss /= args.world_size
        return loss.item()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the bound of the optimizer step, whose learning rates are set now."""
        self._bound = common_bound([_unwrapped(kwargs["optimizer"])])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Account for an optimizer step, and prepare what the Trainer does after it."""
        outer = self.outer
        num_tokens = self._num_tokens(args, state)
        outer.log(loss=self._loss(args))
        outer.step(num_tokens=num_tokens, bound=self._bound)
        repair_state_([_unwrapped(kwargs["optimizer"])], outer.mend)
        self._follow(args)
        if outer.is_over:
            control.should_training_stop = True
        if outer.checkpoint_due:
            self._saving.enter_context(outer.checkpointing())
            control.should_save = True
        self._prepare_evaluation(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prepare an evaluation after an epoch."""
        self._prepare_evaluation(control)

    def _num_tokens(self, args: TrainingArguments, state: TrainerState) -> int:
        """Tokens of the whole island in this inner step: counted by the Trainer, or configured."""
        seen, before = state.num_input_tokens_seen, self._tokens_seen
        self._tokens_seen = seen
        if args.include_num_input_tokens_seen in ("no", False):
            return self._connection.config.island.tokens_per_inner_step
        return int(seen - before)

    def _prepare_evaluation(self, control: TrainerControl) -> None:
        if control.should_evaluate:
            self._evaluation.enter_context(self.outer.global_parameters())

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put the island's own parameters back."""
        self._evaluation.close()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the outer state next to the Trainer's, and end training if the run stops here."""
        outer = self.outer
        checkpoint = _checkpoint(args, outer.inner_step)
        with self._saving:
            number = str(outer.checkpoint_number)
            save_outer(outer, checkpoint, args.process_index, {_NUMBER: number})
        if outer.is_stopping:
            control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Merge what is outstanding; see `finish`."""
        if self._hook is not None:
            self._hook.remove()
        hint = "leave out callbacks that stop the Trainer, and give it data for all steps"
        finish(self.outer, "the Trainer", hint)


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer within accelerate's, which has it as `optimizer`."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _checkpoint(args: TrainingArguments, step: int) -> Path:
    """Where the Trainer saves after a step."""
    assert args.output_dir is not None  # the Trainer has a default
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def _number_of(checkpoint: Path) -> int | None:
    """Return the run checkpoint that a folder of the Trainer is a part of; None: of none."""
    for file in checkpoint.glob(OUTER_FILES):
        with safe_open(file, "pt") as saved:
            return int((saved.metadata() or {}).get(_NUMBER, -1))
    return None
