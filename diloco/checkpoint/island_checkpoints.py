"""Loads what a start of the built-in loop begins with, and writes its checkpoints.

    resumed run     everything from the run checkpoint that the operator named, bit for bit; where
                    islands merge on arrival, of those that have a part of it
    return          parameters as published; inner optimizer from the newest of the island's
                    checkpoints and of its copies in memory (`diloco.checkpoint.memory_copies`); of
                    neither, from another island, where it is to
                    (`diloco.checkpoint.state_transfer`)
    warm start      parameters and, from one of our checkpoints, inner optimizer and data position
    new run         nothing

The files are written by `checkpoint_writer`.

Source: PROTOCOL.md, "Run checkpoints and pins".
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from diloco.checkpoint.checkpoint_writer import (
    CheckpointWriter,
    RankPart,
    SaveThread,
    check_all_ranks,
)
from diloco.checkpoint.checkpoints import (
    Checkpoint,
    abandon_later,
    found_directory,
    read_manifest,
    remove_old,
    written_steps,
)
from diloco.checkpoint.memory_copies import MemoryCopies
from diloco.checkpoint.mirror import Mirror, Mirroring
from diloco.checkpoint.state_copy import StateCopier
from diloco.checkpoint.state_transfer import StateReceiver
from diloco.checkpoint.warm_start import WarmStart
from diloco.config.classes import fingerprint
from diloco.data.batches import Batches
from diloco.errors import ConfigError, DilocoError
from diloco.island.connection import Connection
from diloco.island.exchange.state_transfer import NotTransferred
from diloco.island.session import DiLoCo
from diloco.launch.process.progress import progress_bar
from diloco.outer.fragments import plan_difference, tensor_difference
from diloco.protocol.island.soundness import Mend
from diloco.telemetry.events import (
    CheckpointFailed,
    CheckpointWritten,
    Event,
    InnerStateMended,
    InnerStateTaken,
)
from diloco.trainer.state import (
    INNER_OPTIMIZER,
    Read,
    check_optimizer,
    kept_tensors,
    load_moments_,
    load_parameters_,
    mend_moments_,
    optimizer_name,
    optimizer_step,
    training_tensors,
)
from diloco.trainer.trainer import InnerTrainer

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
        receiver: StateReceiver | None = None,
        mirror: Mirror | None = None,
        on_event: Callable[[Event], None],
    ) -> None:
        """Assign only; the run has been joined.

        Args:
            connection: Of this rank.
            outer: Says where this start begins.
            trainer: Whose model and inner optimizer are kept.
            batches: The island's text.
            memory: Opened; None: no copies in memory.
            receiver: Takes an inner optimizer from another island; None: it is not to.
            mirror: Second place of the checkpoints; None: there is none.
            on_event: Called with the events of the leader's checkpoints.
        """
        config = connection.config
        group = dist.group.WORLD if dist.is_initialized() else None
        self._connection = connection
        self._config = config
        self._outer = outer
        self._trainer = trainer
        self._batches = batches
        self._memory = memory
        self._receiver = receiver
        self._on_event = on_event
        self._group = group
        self._island_rank = 0 if group is None else dist.get_rank(group)
        self._num_ranks = 1 if group is None else dist.get_world_size(group)
        self._is_leader = self._island_rank == 0
        self._writer = CheckpointWriter(
            config.checkpoint_dir, config.island_id, outer.plan, group=group
        )
        self._copier = StateCopier(trainer.optimizer)
        self._thread = SaveThread(self._copier.device)
        self._mirror = mirror
        self._mirroring: Mirroring | None = None
        if mirror is not None and self._is_leader:
            self._mirroring = Mirroring(mirror, *self._place, on_event=on_event)

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
                check_optimizer(self._trainer.optimizer, warm.inner_optimizer, warm.source)
                self._load_moments(warm.read, warm.start_step)
            if warm.data_state is not None:
                self._batches.load_state_dict(warm.data_state)

    def _seek(self) -> None:
        """Go to where this start begins in the text, unless the coordinator says where that is."""
        if not self._config.outer.is_on_arrival:
            self._batches.seek(self._outer.start_step)

    def write(self) -> None:
        """Write the checkpoint of the present inner step, once the one before is written.

        Training launches a copy to host memory (`state_copy`), and the files are written behind it;
        those of a graceful stop are waited for. Where it cannot be written, training goes on
        without it.

        Raises:
            DilocoError: If it was the checkpoint of a graceful stop.
        """
        outer, step, began = self._outer, self._outer.inner_step, time.monotonic()
        self.settle()
        awaited_s = time.monotonic() - began
        number = outer.checkpoint_number
        cut = number if self._config.outer.is_on_arrival else 0
        text = {slot: position.as_json() for slot, position in self._batches.positions().items()}
        text_json = json.dumps(text) if cut else ""
        if self._config.checkpoint.asynchronous and not outer.is_stopping:
            with outer.checkpoint_part(text_json=text_json) as part:
                state = outer.state_dict()
                taken, about = self._take(state), self._about(state)
            blocked_s = time.monotonic() - began

            def save() -> None:
                try:
                    num_bytes = self._writer.save(step, taken, about=about, cut=cut)
                except OSError as error:
                    part.end(is_whole=False)
                    self._emit_failed(step, error)
                    return
                part.end(is_whole=True)
                times = time.monotonic() - began, blocked_s, awaited_s
                self._written(step, number, num_bytes, *times)

            self._thread.start(save)
            return
        try:
            with outer.checkpointing(text_json=text_json):
                num_bytes = self._write_awaited(step, outer.state_dict(), cut)
                seconds = time.monotonic() - began
        except OSError as error:
            reason = self._emit_failed(step, error)
            if outer.is_stopping:
                raise DilocoError(
                    f"the run was asked to stop, and can be resumed from an earlier checkpoint "
                    f"only: {reason}"
                ) from error
        else:
            self._written(step, number, num_bytes, seconds, seconds, awaited_s)

    def _take(self, state: Mapping[str, Tensor]) -> RankPart:
        training = kept_tensors(self._trainer.model, self._trainer.optimizer)
        return self._writer.take(training, state, copier=self._copier, group=self._thread.group)

    def _write_awaited(self, step: int, state: Mapping[str, Tensor], cut: int) -> int:
        """Write a checkpoint that is waited for; as `CheckpointWriter.write`.

        What was copied is written by the thread, whose ranks wait for each other's disks, and not
        only for `collective_timeout`.
        """
        about = self._about(state)
        if self._config.checkpoint.asynchronous:
            taken = self._take(state)
            return self._thread.run(lambda: self._writer.save(step, taken, about=about, cut=cut))
        model, optimizer = self._trainer.model, self._trainer.optimizer  # no room for a copy
        about["optimizer_step"] = optimizer_step(optimizer)
        training = training_tensors(model, optimizer)
        return self._writer.write(step, training=training, outer=state, about=about, cut=cut)

    def check(self) -> None:
        """Raise what has ended the writing behind, if anything but a disk has; waits for nothing.

        A disk that fails ends one checkpoint, which was told then.
        """
        self._thread.check()

    def settle(self) -> None:
        """Wait for the checkpoint that is being written."""
        self._thread.settle()

    def end_training(self) -> None:
        """Wait for it, and let what follows the last inner step write to what is being copied."""
        self.settle()
        if self._memory is not None:
            self._memory.precede()

    def copy(self) -> None:
        """Copy the inner state to memory, if that is due after the present inner step."""
        is_due = self._memory is not None and self._memory.is_due(self._outer.inner_step)
        if self._memory is not None and is_due and not self._outer.is_in_doubt:
            self._memory.copy(self._outer.inner_step, data=self._batches.state_dict())

    def mend(self, what: Mend) -> None:
        """Repair the inner optimizer as the last outer step asks; collective for ALL."""
        began, inner_step = time.monotonic(), self._outer.inner_step
        if what is Mend.MOMENTS:
            self._emit_mended(self._trainer.mend(is_new=False), inner_step, "training")
            return
        self._trainer.mend(is_new=True)
        refusal = self._take_anothers(began)
        if refusal is not None:
            logger.warning("the inner optimizer begins again after inner step %d", inner_step)
            self._emit_taken(began, 0, "fresh", reason=refusal)

    def _emit_mended(self, num_values: int, inner_step: int, source: str) -> None:
        """Say how many values of the moments could not be right, if any."""
        if num_values:
            logger.error(
                "%d values of the inner optimizer's moments, as they came from %s, cannot be right "
                "and are set to zero",
                num_values, source,
            )  # fmt: skip
            self._on_event(InnerStateMended(inner_step, num_values, source))

    def close(self) -> None:
        """Wait for the copies that are under way, in memory and to the mirror."""
        if self._mirroring is not None:
            self._mirroring.close()
        if self._memory is not None:
            self._memory.close(self._outer.inner_step)

    def _about(self, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """Say of what a checkpoint is, for its manifest; how old the moments are is with them."""
        return {
            "run": self._config.run.name,
            "config_fingerprint": fingerprint(self._config),
            "model": self._config.model.model_dump(),
            INNER_OPTIMIZER: optimizer_name(self._trainer.optimizer),
            "data": self._batches.state_dict(),
            "timeline": int(state["meta"][1]),
            "versions": self._outer.versions,
            "text": {
                str(slot): position.as_json()
                for slot, position in self._batches.positions().items()
            },
        }

    def _written(
        self,
        step: int,
        number: int,
        num_bytes: int,
        seconds: float,
        blocked_s: float,
        awaited_s: float,
    ) -> None:
        """Tell of a checkpoint that is whole, and remove those that it makes needless."""
        if self._is_leader:
            self._on_event(CheckpointWritten(step, num_bytes, seconds, blocked_s, awaited_s))
            left = self._remove_old(number)
            if self._mirroring is not None:
                self._mirroring.add(step, number, left)

    def _emit_failed(self, step: int, error: OSError) -> str:
        reason = (
            f"no checkpoint after inner step {step}, earlier ones stay: {error}. Make room in "
            f"checkpoint.dir = {self._config.checkpoint_dir}"
        )
        logger.error("%s", reason)
        if self._is_leader:
            self._on_event(CheckpointFailed(step, reason))
        return reason

    def _remove_old(self, step: int) -> list[int]:
        """Remove what no resume can need; returns what is left."""
        complete = self._connection.reports.complete_checkpoints
        if complete is None:
            return written_steps(*self._place)  # with the next one
        resumed = self._outer.resume_step
        # An island that crashes before anything new is published resumes once more.
        needed = complete if resumed is None else (*complete, resumed)
        in_use = () if self._mirroring is None else self._mirroring.in_use
        try:
            left = remove_old(
                *self._place,
                newest=step,
                needed=needed,
                num_unsure=self._config.num_unsure_checkpoints,
                in_use=in_use,
            )
        except OSError as error:
            logger.warning("old checkpoints cannot be removed: %s", error)
            return written_steps(*self._place)
        self._connection.report_checkpoints(left)
        return left

    def _resume(self, step: int) -> None:
        try:
            checkpoint = self._open_or_fetch(step)
        except ConfigError as error:
            raise ConfigError(f"{error}. {self._others_text(step)}") from error
        self._check_plan(checkpoint)
        self._check_optimizer(checkpoint)
        load_parameters_(self._trainer.model, checkpoint.read)
        self._load_moments(checkpoint.read, int(checkpoint.manifest["optimizer_step"]))
        if not self._config.outer.is_on_arrival:  # there the coordinator says where that is
            self._batches.load_state_dict(checkpoint.manifest["data"])
        self._outer.load_state_dict(checkpoint.outer_state(self._outer.state_dict()))
        if self._is_leader:
            abandon_later(*self._place, step=step, timeline=self._outer.timeline)
            if self._mirroring is not None:
                self._mirroring.abandon_later(step, self._outer.timeline)
        self._connection.report_checkpoints([step])

    def _check_plan(self, checkpoint: Checkpoint) -> None:
        here, there = self._outer.plan, checkpoint.plan
        if here == there:
            return
        source = f"the checkpoint of {checkpoint.step} in {self._config.checkpoint_dir}"
        if differing := tensor_difference(here, there):
            raise ConfigError(
                f"{source} is of another model than run {self._config.run.name!r}: {differing}; "
                f"give the [model] that it was made with, or the checkpoint.dir of this run"
            )
        raise ConfigError(
            f"{source} is of another plan (there) than run {self._config.run.name!r} (here): "
            + "; ".join(plan_difference(here.to_json(), there.to_json()))
        )

    def _return(self) -> None:
        """Take the inner optimizer from this island's newest copy in memory or checkpoint."""
        steps = written_steps(*self._place) or self._fetch_newest()
        if not self._config.outer.is_on_arrival:  # later ones will be written again
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
                self._check_optimizer(checkpoint)
                self._seek()
                self._load_moments(checkpoint.read, int(checkpoint.manifest["optimizer_step"]))
                self._taken("checkpoint", inner_step, began)
                return
        if memory is not None and copied is not None:
            data, received_bytes = memory.load_()
            self._mend_taken("a copy in memory")
            if data["inner_step"] <= self._outer.start_step:
                self._batches.load_state_dict(data)  # so that no text is read once more
            self._seek()
            self._taken("memory", copied, began, received_bytes)
            return
        self._seek()
        self._begin_again(began)

    def _take_anothers(self, began: float) -> str | None:
        """Take a source's optimizer, if this island is to; returns why not, None: it was taken."""
        if self._receiver is None:
            return ""
        try:
            taken = self._receiver.take_(self._trainer.model, self._trainer.optimizer)
        except NotTransferred as error:
            return str(error)
        where = f"island {taken.source} (checkpoint {taken.checkpoint})"
        logger.info("inner optimizer of its inner step %d: %s", taken.inner_step, where)
        self._emit_taken(
            began, taken.inner_step, "island", from_island=taken.source, checkpoint=taken.checkpoint
        )
        return None

    def _begin_again(self, began: float) -> None:
        """Go on without any state of this island: with a source's optimizer, or with a new one."""
        config = self._config
        if (reason := self._take_anothers(began)) is None:
            return
        every = "every_tokens" if config.outer.is_on_arrival else "every_inner_steps"
        unset = [f"checkpoint.{every}"]
        if self._memory is None:
            unset.append(f"islands.{config.island_id}.memory_checkpoint_steps")
        if self._receiver is None:
            unset.append(f"islands.{config.island_id}.heal_optimizer")
        logger.warning(
            "no checkpoint of island %s in %s, no copy in memory%s: its inner optimizer begins "
            "again (set %s to keep it over a restart)",
            config.island_id, config.checkpoint_dir, reason and f", none of another: {reason}",
            " or ".join(unset),
        )  # fmt: skip
        self._emit_taken(began, 0, "fresh", reason=reason)

    def _taken(self, source: str, step: int, began: float, received_bytes: int = 0) -> None:
        """Say where the inner optimizer came from."""
        where = "its checkpoint" if source == "checkpoint" else "memory"
        logger.info("inner optimizer of inner step %d taken from %s", step, where)
        self._emit_taken(began, step, source, received_bytes)

    def _emit_taken(
        self,
        began: float,
        step: int,
        source: str,
        received_bytes: int = 0,
        *,
        from_island: str = "",
        checkpoint: int = 0,
        reason: str = "",
    ) -> None:
        if self._is_leader:
            at, seconds = self._outer.start_step, time.monotonic() - began
            self._on_event(
                InnerStateTaken(
                    at, step, source, received_bytes, seconds, from_island, checkpoint, reason
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
            checkpoint.check_owner(self._config.run.name, self._config.island_id)
        except ConfigError as error:
            problem = str(error)
        check_all_ranks(self._group, problem, error=ConfigError)
        assert checkpoint is not None
        return checkpoint

    def _open_or_fetch(self, step: int) -> Checkpoint:
        """Open a checkpoint; what is not whole here is taken from the mirror; collective.

        Raises:
            ConfigError: On all ranks, if it is whole in neither place.
        """
        try:
            return self._open(step)
        except ConfigError as error:
            if self._mirror is None:
                raise
            logger.warning("%s: it is looked for in the mirror", error)
            try:
                self._fetch(step)
            except ConfigError as other:
                raise ConfigError(f"{error}; {other}") from other
        return self._open(step)

    def _fetch_newest(self) -> list[int]:
        """Take the newest mirrored checkpoint, where none is on disk; returns those on disk."""
        if self._mirror is None:
            return []
        steps: list[int] = []
        try:
            if self._is_leader:
                steps = self._mirror.steps()[-1:]
        except Exception as error:  # of as many types as there are file systems
            logger.warning("the mirror %s cannot be read: %r", self._mirror.url, error)
        steps = check_all_ranks(self._group, "", steps)[0]
        try:
            for step in steps:
                self._fetch(step)
        except ConfigError as error:
            logger.warning("%s", error)
            return []
        return steps

    def _fetch(self, step: int) -> None:
        """Let the leader copy a checkpoint from the mirror; collective.

        Raises:
            ConfigError: On all ranks, if it could not.
        """
        problem = ""
        if self._is_leader and self._mirror is not None:
            try:
                self._mirror.fetch(step, *self._place)
            except ConfigError as error:
                problem = str(error)
        check_all_ranks(self._group, problem, error=ConfigError)

    def _others_text(self, step: int) -> str:
        """Say from what else the run could be resumed, without reading any of it."""
        others = [other for other in written_steps(*self._place) if other != step]
        listed = f"Others of this island in {self._config.checkpoint_dir}: {others or 'none'}"
        if not others:
            return f"{listed}; bring the directory back, or set checkpoint.dir"
        return (
            f"{listed}; to go on from one: diloco coordinator RUN.toml --resume --at {others[-1]}"
        )

    def _check_optimizer(self, checkpoint: Checkpoint) -> None:
        source = f"the checkpoint of {checkpoint.step} in {self._config.checkpoint_dir}"
        found = checkpoint.manifest[INNER_OPTIMIZER]
        check_optimizer(self._trainer.optimizer, found, source)

    def _load_moments(self, read: Read, step: int) -> None:
        load_moments_(self._trainer.model, self._trainer.optimizer, read, step=step)
        self._mend_taken("a checkpoint")

    def _mend_taken(self, source: str) -> None:
        """Take out of an optimizer that was stored what gradients cannot have made."""
        num_values = mend_moments_(self._trainer.optimizer)
        self._emit_mended(num_values, self._outer.start_step, source)
