"""Where a start of the built-in loop takes up, and the checkpoints that it leaves.

    resumed run     everything from the run checkpoint that the operator named, bit for bit; where
                    islands merge on arrival, of those that have a part of it
    return          parameters as published; inner optimizer from the newest of the island's
                    checkpoints and of its copies in memory (`diloco.launch.memory_copies`); of
                    neither, from another island, where it is to (`diloco.launch.healing`)
    warm start      parameters and, from one of our checkpoints, inner optimizer and data position
    new run         nothing

Source: protocol.md section 9.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from diloco.config.classes import fingerprint
from diloco.data.batches import Batches
from diloco.errors import ConfigError, DilocoError
from diloco.inner.state import (
    INNER_OPTIMIZER,
    Read,
    insist_on_optimizer,
    load_moments_,
    load_parameters_,
    optimizer_name,
    optimizer_step,
    training_tensors,
)
from diloco.inner.trainer import InnerTrainer
from diloco.launch.checkpoint_writer import CheckpointWriter, insist_on_all_ranks
from diloco.launch.checkpoints import (
    Checkpoint,
    abandon_later,
    found_directory,
    read_manifest,
    remove_old,
    written_steps,
)
from diloco.launch.disk import num_unsure_checkpoints
from diloco.launch.healing import Healing
from diloco.launch.memory_copies import MemoryCopies
from diloco.launch.progress import progress_bar
from diloco.launch.warm_start import WarmStart
from diloco.outer.fragments import plan_difference
from diloco.sync.connection import Connection
from diloco.sync.heal import NotHealed
from diloco.sync.session import DiLoCo
from diloco.telemetry.events import (
    CheckpointFailed,
    CheckpointWritten,
    Event,
    InnerStateTaken,
)

logger = logging.getLogger(__name__)


class IslandCheckpoints:
    """One rank's part in the checkpoints of its island; every rank makes the same calls."""

    def __init__(
        self,
        connection: Connection,
        outer: DiLoCo,
        trainer: InnerTrainer,
        batches: Batches,
        *,
        memory: MemoryCopies | None,
        healing: Healing | None = None,
        on_event: Callable[[Event], None],
    ) -> None:
        """Assign only; the run has been joined.

        Args:
            connection: Of this rank.
            outer: Says where this start begins.
            trainer: Whose model and inner optimizer are kept.
            batches: The island's text.
            memory: Opened; None: no copies in memory.
            healing: Takes an inner optimizer from another island; None: it is not to.
            on_event: Hears of the leader's checkpoints.
        """
        config = connection.config
        group = dist.group.WORLD if dist.is_initialized() else None
        self._connection = connection
        self._config = config
        self._outer = outer
        self._trainer = trainer
        self._batches = batches
        self._memory = memory
        self._healing = healing
        self._on_event = on_event
        self._group = group
        self._island_rank = 0 if group is None else dist.get_rank(group)
        self._num_ranks = 1 if group is None else dist.get_world_size(group)
        self._is_leader = self._island_rank == 0
        self._writer = CheckpointWriter(
            config.checkpoint_dir, config.island_id, outer.plan, group=group
        )

    @property
    def _place(self) -> tuple[Path, str]:
        return self._config.checkpoint_dir, self._config.island_id

    def take_up(self, warm: WarmStart | None) -> None:
        """Bring inner optimizer and data, and in a resumed run everything, to where it begins.

        Raises:
            ConfigError: If the checkpoint of a resumed run cannot be loaded.
        """
        outer = self._outer
        if outer.resume_step is not None:
            self._resume(outer.resume_step)
        elif any(outer.versions) or outer.start_step > (0 if warm is None else warm.start_step):
            self._return()
        elif warm is not None:
            if warm.has_optimizer:
                insist_on_optimizer(self._trainer.optimizer, warm.inner_optimizer, warm.source)
                self._load_moments(warm.read, warm.start_step)
            if warm.data_state is not None:
                self._batches.load_state_dict(warm.data_state)

    def _seek(self) -> None:
        """Go to where this start begins in the text, unless the coordinator says where that is."""
        if not self._config.outer.is_on_arrival:
            self._batches.seek(self._outer.start_step)

    def write(self) -> None:
        """Write the checkpoint of the present inner step.

        Where it cannot be written, training goes on without it.

        Raises:
            DilocoError: If it was the checkpoint of a graceful stop.
        """
        outer, step, began = self._outer, self._outer.inner_step, time.monotonic()
        number = outer.checkpoint_number
        cut = number if self._config.outer.is_on_arrival else 0
        text = {slot: position.as_json() for slot, position in self._batches.positions().items()}
        training = training_tensors(self._trainer.model, self._trainer.optimizer)
        about = {
            "run": self._config.run.name,
            "config_fingerprint": fingerprint(self._config),
            "model": self._config.model.model_dump(),
            INNER_OPTIMIZER: optimizer_name(self._trainer.optimizer),
            "optimizer_step": optimizer_step(self._trainer.optimizer),
            "data": self._batches.state_dict(),
        }
        try:
            with outer.checkpointing(text_json=json.dumps(text) if cut else ""):
                state = outer.state_dict()
                about["timeline"] = int(state["meta"][1])
                about["versions"] = outer.versions
                num_bytes = self._writer.write(
                    step, training=training, outer=state, about=about, cut=cut
                )
                if self._is_leader:
                    self._on_event(CheckpointWritten(step, num_bytes, time.monotonic() - began))
        except OSError as error:
            self._failed(step, error)
            return
        if self._is_leader:
            self._remove_old(number)

    def copy(self) -> None:
        """Copy the inner state to memory, if that is due after the present inner step."""
        if self._memory is not None and self._memory.is_due(self._outer.inner_step):
            self._memory.copy(self._outer.inner_step, data=self._batches.state_dict())

    def close(self) -> None:
        """Wait for the copy that is under way."""
        if self._memory is not None:
            self._memory.close(self._outer.inner_step)

    def _failed(self, step: int, error: OSError) -> None:
        reason = (
            f"no checkpoint after inner step {step}, earlier ones stay: {error}. Make room in "
            f"checkpoint.dir = {self._config.checkpoint_dir}"
        )
        logger.error("%s", reason)
        if self._is_leader:
            self._on_event(CheckpointFailed(step, reason))
        if self._outer.is_stopping:
            raise DilocoError(
                f"the run was asked to stop, and can be resumed from an earlier checkpoint only: "
                f"{reason}"
            )

    def _remove_old(self, step: int) -> None:
        complete = self._connection.complete_checkpoints
        if complete is None:
            return  # with the next one
        resumed = self._outer.resume_step
        # An island that crashes before anything new is published resumes once more.
        needed = complete if resumed is None else (*complete, resumed)
        try:
            left = remove_old(
                *self._place,
                newest=step,
                needed=needed,
                num_unsure=num_unsure_checkpoints(self._config),
            )
        except OSError as error:
            logger.warning("old checkpoints cannot be removed: %s", error)
        else:
            self._connection.report_checkpoints(left)

    def _resume(self, step: int) -> None:
        try:
            checkpoint = self._open(step)
        except ConfigError as error:
            raise ConfigError(f"{error}. {self._others_text(step)}") from error
        if checkpoint.plan != self._outer.plan:
            raise ConfigError(
                f"the checkpoint of inner step {step} in {self._config.checkpoint_dir} is of "
                f"another plan (there) than run {self._config.run.name!r} (here): "
                + "; ".join(plan_difference(self._outer.plan.to_json(), checkpoint.plan.to_json()))
            )
        self._insist_on_optimizer(checkpoint)
        load_parameters_(self._trainer.model, checkpoint.read)
        self._load_moments(checkpoint.read, int(checkpoint.manifest["optimizer_step"]))
        if not self._config.outer.is_on_arrival:  # there the coordinator says where that is
            self._batches.load_state_dict(checkpoint.manifest["data"])
        self._outer.load_state_dict(checkpoint.outer_state(self._outer.state_dict()))
        if self._is_leader:
            abandon_later(*self._place, step=step, timeline=self._outer.timeline)
        self._connection.report_checkpoints([step])

    def _return(self) -> None:
        """Take the inner optimizer from this island's newest copy in memory or checkpoint."""
        steps = written_steps(*self._place)
        if not self._config.outer.is_on_arrival:  # later ones will be written anew
            self._connection.report_checkpoints(s for s in steps if s <= self._outer.start_step)
        memory, began, copied = self._memory, time.monotonic(), None
        if memory is not None:
            began, copied = began - memory.search_s, memory.newest
        for step in reversed(steps):
            try:
                inner_step = read_manifest(found_directory(*self._place, step))["inner_step"]
                if copied is not None and inner_step <= copied:
                    break
                checkpoint = self._open(step)
            except ConfigError as error:
                logger.warning("checkpoint skipped, step=%d: %s", step, error)
                continue
            if checkpoint.plan == self._outer.plan:
                self._insist_on_optimizer(checkpoint)
                self._seek()
                self._load_moments(checkpoint.read, int(checkpoint.manifest["optimizer_step"]))
                self._taken("checkpoint", inner_step, began)
                return
        if memory is not None and copied is not None:
            data, received_bytes = memory.load_()
            if data["inner_step"] <= self._outer.start_step:
                self._batches.load_state_dict(data)  # so that no text is read once more
            self._seek()
            self._taken("memory", copied, began, received_bytes)
            return
        self._seek()
        self._begin_anew(began)

    def _begin_anew(self, began: float) -> None:
        """Go on without any state of this island: with a donor's optimizer, or with a new one."""
        reason, config = "", self._config
        if self._healing is not None:
            try:
                taken = self._healing.take_(self._trainer.model, self._trainer.optimizer)
            except NotHealed as error:
                reason = str(error)
            else:
                where = f"island {taken.donor} (checkpoint {taken.checkpoint})"
                logger.info("inner optimizer of its inner step %d: %s", taken.inner_step, where)
                self._tell(
                    began,
                    taken.inner_step,
                    "donor",
                    donor=taken.donor,
                    checkpoint=taken.checkpoint,
                )
                return
        every = "every_tokens" if config.outer.is_on_arrival else "every_inner_steps"
        unset = [f"checkpoint.{every}"]
        if self._memory is None:
            unset.append(f"islands.{config.island_id}.memory_checkpoint_steps")
        if self._healing is None and config.outer.exchange == "syncer":
            unset.append(f"islands.{config.island_id}.heal_optimizer")
        logger.warning(
            "no checkpoint of island %s in %s, no copy in memory%s: its inner optimizer begins "
            "anew (set %s to keep it over a restart)",
            config.island_id, config.checkpoint_dir, reason and f", none of another: {reason}",
            " or ".join(unset),
        )  # fmt: skip
        self._tell(began, 0, "fresh", reason=reason)

    def _taken(self, source: str, step: int, began: float, received_bytes: int = 0) -> None:
        """Say where the inner optimizer came from."""
        where = "its checkpoint" if source == "checkpoint" else "memory"
        logger.info("inner optimizer of inner step %d taken from %s", step, where)
        self._tell(began, step, source, received_bytes)

    def _tell(
        self,
        began: float,
        step: int,
        source: str,
        received_bytes: int = 0,
        *,
        donor: str = "",
        checkpoint: int = 0,
        reason: str = "",
    ) -> None:
        if self._is_leader:
            at, seconds = self._outer.start_step, time.monotonic() - began
            self._on_event(
                InnerStateTaken(
                    at, step, source, received_bytes, seconds, donor, checkpoint, reason
                )
            )

    def _open(self, step: int) -> Checkpoint:
        """Open a checkpoint; the ranks share the reading that proves it whole.

        Raises:
            ConfigError: On all ranks, if one of them found it damaged.
        """
        problem, checkpoint = "", None
        try:
            checkpoint = Checkpoint.open(
                *self._place,
                step,
                share=(self._island_rank, self._num_ranks),
                on_progress=progress_bar(f"verifying the checkpoint of step {step}", logger.info),
            )
        except ConfigError as error:
            problem = str(error)
        insist_on_all_ranks(self._group, problem, error=ConfigError)
        assert checkpoint is not None
        return checkpoint

    def _others_text(self, step: int) -> str:
        """Say from what else the run could be resumed, without reading any of it."""
        others = [other for other in written_steps(*self._place) if other != step]
        listed = f"Others of this island in {self._config.checkpoint_dir}: {others or 'none'}"
        if not others:
            return f"{listed}; bring the directory back, or set checkpoint.dir"
        return (
            f"{listed}; to go on from one: diloco coordinator RUN.toml --resume --at {others[-1]}"
        )

    def _insist_on_optimizer(self, checkpoint: Checkpoint) -> None:
        source = f"the checkpoint of {checkpoint.step} in {self._config.checkpoint_dir}"
        found = checkpoint.manifest[INNER_OPTIMIZER]
        insist_on_optimizer(self._trainer.optimizer, found, source)

    def _load_moments(self, read: Read, step: int) -> None:
        load_moments_(self._trainer.model, self._trainer.optimizer, read, step=step)
