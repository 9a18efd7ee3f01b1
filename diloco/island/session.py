"""`DiLoCo`, runs the outer loop in a training loop of your own.

    import diloco

    config = diloco.load_config("run.toml", island="eu-west")
    with diloco.connect(config) as connection:
        outer = diloco.DiLoCo(model, config.outer, transport=connection)
        for inner_step in range(outer.start_step, outer.inner_steps):
            loss = train_one_step(model, optimizer)
            outer.log(loss=loss)
            outer.step(num_tokens=tokens_of_the_island)
            if outer.evaluation_due:
                with outer.global_parameters():
                    outer.evaluated(evaluate(model))
            if outer.checkpoint_due:
                with outer.checkpointing():
                    save(model, optimizer, outer.state_dict(), outer.checkpoint_number)
            if outer.is_stopping:
                break
        outer.finish()
        with outer.global_parameters():
            evaluate(model)

With `outer.merge = "on_arrival"` no island waits for another, tokens end the run, and islands make
different numbers of inner steps; the loop is

        while not outer.is_over:
            set_learning_rate(optimizer, outer.schedule_step, outer.inner_steps)
            train_one_step(model, optimizer)
            outer.step(num_tokens=tokens_of_the_island)
            ...  # checkpoints and stops as above
        outer.finish()

(which serves scheduled runs, too). Every rank of an island makes the same calls. Everything here
belongs to the training thread; what needs the network runs in the connection's IO thread. At a
graceful stop `checkpointing` ends when every island has its checkpoint; should one return meanwhile
that can stop only later, the loop goes on to there; should the stop be taken back, because one
stays away, it goes on as if never asked.

Source: PROTOCOL.md, "When islands send and merge" and "Graceful stop".
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.compression.warm_up import warm_up
from diloco.config.outer import OuterConfig
from diloco.device_thread import take_stream
from diloco.errors import ConfigError
from diloco.io_thread import Waits
from diloco.island.agreement import Agreement
from diloco.island.arguments import (
    check_kinds,
    check_logged,
    check_same,
    check_tokens,
    early_text,
    over_text,
)
from diloco.island.checkpoint_part import CheckpointPart, CutTaken
from diloco.island.connection import Connection
from diloco.island.graceful_stop import CommonStop, GracefulStop
from diloco.island.groups import island_sums, make_groups
from diloco.island.lanes.parameters import Trained, TrainedParameters, tensor_specs
from diloco.island.lanes.shards import LaneShards
from diloco.island.layout import build_plan, build_schedule
from diloco.island.outer_loop import OuterLoop
from diloco.island.outer_state import LoopParts
from diloco.island.profile import memory_used
from diloco.island.registration import IslandState
from diloco.protocol.island.soundness import Mend, StepBound
from diloco.protos.control_pb2 import JoinReply, ReportRequest
from diloco.telemetry.events import Event

logger = logging.getLogger(__name__)


class DiLoCo:
    """One rank's part in a run: counts inner steps, sends and merges fragments when they are due.

    Values are written into the parameters in place, so an optimizer may be built before or after;
    its state is its own and no merge touches it. FSDP2 modules are resharded before parameters are
    read or written, so an evaluation between two steps is harmless.

    Attributes:
        island_slot: Index of the island among the run's; chooses its data.
        start_step: Inner steps that lie behind this start: 0; a warm start's; where an island that
            returns goes on; or that of the checkpoint to resume from.
        resume_step: `checkpoint_number` of the run checkpoint that must be loaded before the first
            step: model, inner optimizer and data by the loop, the rest with `load_state_dict`;
            None: nothing is to be loaded.
        inner_steps: Inner steps of the run, as the coordinator has it; on arrival, what islands
            make on average.
        plan: Fragments and lanes of the run.
        timeline: Counter of the run's resumes.
        loss_of: Measures the loss of the parameters as they are, on a fixed piece of held-out text;
            called on all ranks, within `step` or `finish`, where what this island sends goes
            against what the only other one sends. A contribution that raises it is not sent. None:
            both are merged, and an alarm tells of it.
        island_bytes: What all ranks had sent and received at the last due step.
    """

    start_step: int
    resume_step: int | None
    loss_of: Callable[[], float] | None
    island_bytes: tuple[int, int]

    def __init__(
        self,
        trained: Trained,
        outer: OuterConfig,
        *,
        transport: Connection,
        group: dist.ProcessGroup | None = None,
        start_step: int = 0,
        data_digest: str = "",
        tokenizer_digest: str = "",
        overwrite_initial: bool = True,
        step_bytes: int = 0,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """Join the run and agree on the published parameters; collective, and waits for the others.

        A new run takes the initial parameters of the first island in sorted order; an island that
        returns takes what is published, into its parameters too.

        Args:
            trained: Module, list of modules with distinct parameter names, or name -> parameter;
                parallelised already (FSDP2, TP), float32, on any device.
            outer: `outer` of the configuration that went to `diloco.connect`.
            transport: The open connection; one `DiLoCo` each.
            group: The island's ranks; None: all of the default process group, or this process
                alone where there is none.
            start_step: Inner step at which a new run starts, a warm start's; equal on all islands.
            data_digest: Of the training text; where given, islands with another are refused.
            tokenizer_digest: Of the tokenizer; likewise, and by its name.
            overwrite_initial: Whether initial parameters that differ from the run's are replaced,
                with an event, or refused.
            step_bytes: That inner steps take of this rank's device besides parameters, at their
                peak, so that what is kept there for the outer loop leaves them room; 0: not known.
            on_event: Called with every event at once, in whichever thread; `step` returns the same,
                and the sinks of the run file have them, too.

        Raises:
            ValueError: If nothing is trainable, a parameter is not float32, or names collide.
            ConfigError: If `outer` is not the connection's, or the connection is not open.
            RunStopped: If the run has been stopped, with this island's checkpoint: only end.
            DilocoError: As the join and the first published version may fail.
        """
        check_kinds(outer, transport)
        transport.check_new()
        check_same(outer, transport.config.outer)
        self._connection = transport
        self._trained = TrainedParameters(trained)
        self._on_event = on_event
        self._events: deque[Event] = deque()
        self.loss_of = None
        self._record = transport.record
        self._tokens = 0
        self._state = IslandState.WAITING
        self.island_bytes = (0, 0)
        settings = transport.config.transport
        # The leader may wait that long for the coordinator, and again for a syncer.
        patience_s = 2 * (settings.unreachable.seconds + settings.rpc_timeout.seconds)
        self._groups = make_groups(
            group,
            patience_s=patience_s,
            collective_s=transport.config.island.collective_timeout.seconds,
        )
        transport.island_moved = None if self._groups.num_ranks == 1 else ()
        transport.open_record(self._groups.island_rank)
        specs = tensor_specs(
            self._trained.named, frozen=self._trained.frozen, group=self._groups.shards
        )
        self.plan = build_plan(outer, specs)
        shards = LaneShards(
            self.plan,
            self._trained.named,
            group=self._groups.shards,
            carrier_hosts=self._connection.config.island.carrier_hosts,
        )
        # Anchor and what is staged; a residual, and that of what is outstanding; what it carries.
        num_vectors = 2 + 2 * outer.error_feedback + (outer.local_mix == "since_send")
        shards.find_room(num_vectors, step_bytes)
        transport.io.post(take_stream, shards.device)
        kind = shards.device.type
        warm_up(self.plan, (outer.uplink, outer.downlink), kind)  # no island waits for this one yet
        reply = self._join(start_step, data_digest, tokenizer_digest)
        self.island_slot = reply.island_slot
        self.timeline = reply.grant.timeline
        self.resume_step = reply.resume_step if reply.is_resumed else None
        self.start_step = reply.resume_step if not outer.is_on_arrival else reply.last_inner_step
        self._is_ready = not reply.is_resumed
        self._build_loop(reply, shards, start_step)
        transport.progress = self._progress
        transport.start_reporting(self._graceful_stop)
        policy = transport.config.outer  # the coordinator's: mostly the same, and then done
        warm_up(self.plan, (policy.uplink, policy.downlink), kind)
        if self._is_ready:
            self._enter(
                self._loop.starting(
                    overwrite_initial=overwrite_initial, last_inner_step=reply.last_inner_step
                )
            )

    def _join(self, start_step: int, data_digest: str, tokenizer_digest: str) -> JoinReply:
        """Let the leader join, and everybody have the answer."""

        def join() -> bytes:
            reply = self._connection.join(
                self.plan,
                num_ranks=self._groups.num_ranks,
                start_step=start_step,
                data_digest=data_digest,
                tokenizer_digest=tokenizer_digest,
            )
            return reply.SerializeToString()

        return JoinReply.FromString(self._groups.leader_says("could not join", join))

    def _build_loop(self, reply: JoinReply, shards: LaneShards, start_step: int) -> None:
        """Build what the coordinator's policy shapes."""
        connection, plan = self._connection, self.plan
        config = connection.joined(reply)
        self._on_arrival = config.outer.is_on_arrival
        self.inner_steps = config.run.inner_steps
        self._period = config.outer.inner_steps_per_round
        self._checkpoint_every = config.checkpoint.every_inner_steps
        self._judge_every = config.evaluation.every_checkpoints
        self._evaluate_every = config.evaluation.every_inner_steps
        self._schedule = build_schedule(config.outer, self.inner_steps)
        self._graceful_stop = GracefulStop(self._schedule, on_arrival=self._on_arrival)
        self._exchange = connection.exchange(
            reply, plan, shards, island_rank=self._groups.island_rank, on_event=self._record_event
        )
        agreement = Agreement(self._groups.agreement)
        self._stopping = CommonStop(
            self._graceful_stop,
            self._exchange,
            agreement,
            unreachable_s=config.transport.unreachable.seconds,
            clock=time.monotonic,
        )
        self._loop = OuterLoop(
            LoopParts(
                plan,
                self._schedule,
                shards,
                self._exchange,
                connection.io,
                agreement,
                timeline=reply.grant.timeline,
                local_mix=config.outer.local_mix,
                clock=time.monotonic,
                on_event=self._record_event,
                start_step=start_step,
            ),
            # The coordinator's word: its file may name islands that this one does not.
            total_tokens=(reply.total_tokens or config.total_tokens) if self._on_arrival else None,
        )
        self._loop.loss_of = self._trial_loss
        self._loop.check.late_loss = self._record.settle
        self._loop.must_leave = lambda: self._graceful_stop.must_leave
        self._loop.asked_cut = lambda: self._graceful_stop.cut

    def __repr__(self) -> str:
        """Say where the island stands: steps, versions, what is in flight, what it waited."""
        return (
            f"DiLoCo(run={self._connection.config.run.name!r}, "
            f"island={self._connection.config.island_id!r}, slot={self.island_slot}, "
            f"{self._state.value}, inner_step={self.inner_step} of {self.inner_steps}, "
            f"versions={list(self.versions)}, in_flight={self.num_in_flight}, "
            f"blocked_s={self.blocked_s:.1f})"
        )

    @property
    def inner_step(self) -> int:
        """Completed inner steps."""
        return self._loop.inner_step if self._is_ready else self.start_step

    @property
    def is_over(self) -> bool:
        """Whether training ends here: leave the loop, then call `finish`.

        By the run's inner steps; on arrival, when all fragments have merged the run's tokens, or
        when this island was told to leave (`is_leaving`).
        """
        return self._is_ready and self._loop.is_over

    @property
    def is_leaving(self) -> bool:
        """Whether this island ends before the run does, without its flush.

        By an operator's word, or because `finish` was called early.
        """
        return self._loop.is_leaving

    @property
    def schedule_step(self) -> float:
        """Inner steps of the whole run that lie behind: what a learning rate follows.

        `inner_step` in a scheduled run; on arrival by the share of the run's tokens that is merged.
        """
        return self._loop.schedule_step if self._is_ready else self.start_step

    @property
    def num_in_flight(self) -> int:
        """Number of fragments whose contribution has no outcome yet."""
        return self._loop.num_in_flight

    @property
    def blocked_s(self) -> float:
        """Seconds for which steps of this rank waited for outcomes."""
        return self._loop.blocked_s

    @property
    def overwritten_steps(self) -> float:
        """Inner steps whose local effect a merge replaced, by share of the parameters."""
        return self._loop.merging.overwritten_steps

    @property
    def dropped_tokens(self) -> float:
        """Tokens that no version will have, by share of the parameters."""
        return self._loop.merging.dropped_tokens

    @property
    def left_tokens(self) -> float:
        """Tokens that no version has yet, by share of the parameters."""
        return self._loop.left_tokens

    @property
    def versions(self) -> tuple[int, ...]:
        """Version of each fragment that this island last merged."""
        return self._loop.versions

    @property
    def digests(self) -> tuple[str, ...]:
        """Digest of what the model holds of each fragment, in hex, as `finish` found it.

        Of the published values; empty before the end of `finish`, and after a graceful stop.
        """
        return self._loop.digests

    @property
    def bytes_up(self) -> int:
        """Bytes that this rank has sent to the syncer."""
        return self._exchange.bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes that this rank has received from the syncer."""
        return self._exchange.bytes_down

    @property
    def is_stopping(self) -> bool:
        """Whether everybody stops after the step just made, for a resume: leave the loop.

        After its checkpoint: until every island has that, the stop may move to a later step or be
        taken back; not so on arrival, where each stops by itself.
        """
        if self._on_arrival:
            return self._loop.cut.is_last
        return self._stopping.step == self.inner_step < self.inner_steps

    @property
    def mend(self) -> Mend:
        """What is to be done to the inner optimizer after the last step: mostly nothing.

        Where the island has just taken the published values, because its own were not sound, its
        optimizer's state may not be either: `diloco.mend_moments_(optimizer)` for MOMENTS, a new
        state for ALL.
        """
        return self._loop.check.mend

    @property
    def is_in_doubt(self) -> bool:
        """Whether the island has lately taken the published values, or declines for its loss."""
        return self._loop.check.is_in_doubt(self.inner_step)

    # -- training --------------------------------------------------------------------------------

    def log(
        self, *, loss: float | None = None, duration_s: float | None = None, **metrics: float | None
    ) -> None:
        """Hand over figures of the inner step under way; the `step` that follows records them.

        Args:
            loss: Of the whole island, before the update, the same on all its ranks. It is recorded
                and reported, and says whether the parameters are sound: with one that is far off,
                the island sends nothing and takes what is published (`mend`). None: not known.
            duration_s: Of the inner step; None: since the last `step` returned, evaluations and
                checkpoints not counted.
            metrics: Others by name, such as `grad_norm` and `learning_rate`; the leader's are
                recorded. One that is None is left out.

        Raises:
            ValueError: If one is no number.
        """
        self._record.log(check_logged({"loss": loss, "duration_s": duration_s, **metrics}))

    def log_later(self, figures: Callable[[], Mapping[str, float | None]]) -> None:
        """Hand over figures of the inner step under way that an accelerator has yet to compute.

        Args:
            figures: Gives what `log` takes, and may wait for that step. Called once: within the
                `step` after the next inner step was launched, or earlier where the loss must be
                known or the device is waited for anyway: a send, an evaluation, a checkpoint, the
                end. The event of the step is written then.
        """
        self._record.log_later(lambda: check_logged(figures()))

    def step(self, *, num_tokens: int = 0, bound: StepBound | None = None) -> list[Event]:
        """Account for one inner step, just made, then send and merge what is due; collective.

        Args:
            num_tokens: Tokens of the whole island in this inner step: the weight of what it sends.
            bound: How far the inner step can have moved a value, as `diloco.step_bound(optimizer)`
                gives it; None: values may lie anywhere.

        Returns:
            What happened since the last call, in order; empty in most steps.

        Raises:
            ValueError: If `num_tokens` is not a positive integer, or the set of trained parameters
                is not the one that this object was made with.
            ConfigError: If the run is over, or a checkpoint must be loaded first.
            DilocoError: If the island cannot go on.
        """
        self._check_training()
        check_tokens(num_tokens)
        self._loop.check.settle()
        loss = self._record.step(self.inner_step + 1, num_tokens, is_quiet=not self.num_in_flight)
        due = self._is_due(self.inner_step + 1)
        if due:
            self._trained.settle(self.inner_step)
        elif self.num_in_flight or self._on_arrival:
            self._trained.reshard()
        if bound is None:
            bound = StepBound()
        self._connection.io.drive(self._loop.stepping(num_tokens, loss=loss, bound=bound))
        self._tokens += num_tokens
        if due:  # no collective in a step that has none anyway
            word = self._sum(self._stopping.word(self.inner_step))
            self._connection.io.drive(self._stopping.passing(self.inner_step, word))
        self._record.stepped(self._loop, self.island_bytes)
        return self._take_events()

    def finish(self) -> list[Event]:
        """Merge what is outstanding and flush: no last steps are lost; collective.

        Then the published values are read back from the model and hashed (`digests`).
        After a graceful stop nothing is flushed: what is in flight is in the checkpoint. Before the
        end of the run the island leaves: what it has sent is merged, its steps since then are in
        no version, and the other islands go on without it.

        Returns:
            What happened since the last call, in order.

        Raises:
            ConfigError: If it was called before.
            IslandFailed: On all ranks, if the model does not hold what was published.
            DilocoError: If the island cannot go on.
        """
        self._check_training(is_stepping=False)
        self._loop.check.settle()
        self._trained.settle(self.inner_step)
        is_stopping = self.is_stopping
        if is_stopping and not self._connection.has_kept(self.checkpoint_number):
            raise ConfigError(
                f"outer.finish() at the graceful stop after inner step {self.inner_step}, and "
                f"this island has no checkpoint of it to resume from: while outer.checkpoint_due, "
                f"save inside `with outer.checkpointing():`, before the loop is left"
            )
        is_early = not (is_stopping or self.is_over)
        if is_early and self._groups.is_leader:
            logger.warning(
                "%s", early_text(self._connection.config, self.inner_step, self.inner_steps)
            )
        if not is_stopping:
            self._state = IslandState.FLUSHING
            self._connection.io.drive(self._loop.finishing(is_early=is_early))
        wall_s = self._record.wall_s
        how = "left early" if self.is_leaving else "finished"
        how = f"{'stopped' if is_stopping else how} after inner step {self.inner_step}"
        self._connection.finished(how, is_stopped=is_stopping, is_early=is_early)
        # All ranks have stopped their exchange when the leader leaves and the run may end.
        self._sum()
        self._state = IslandState.STOPPED if is_stopping else IslandState.FINISHED
        if not is_stopping:
            self._record.ended(self._loop, self.island_bytes, wall_s=wall_s)
        return self._take_events()

    @contextlib.contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Put the published values that this island last merged in place; restore afterwards.

        What the run has learned so far, equal on all islands: what to evaluate and to export.
        Collective at both ends.
        """
        if not self._is_ready:
            self._check_training()
        self._loop.check.settle()
        self._trained.settle(self.inner_step)
        with self._record.evaluating(), self._loop.global_parameters():
            try:
                yield
            finally:
                self._trained.reshard()

    @property
    def evaluation_due(self) -> bool:
        """Whether a held-out loss of the published values belongs after the step just made.

        As `evaluation.every_inner_steps` says, and where islands judge the run checkpoint that is
        due (`evaluation.every_checkpoints`): take it with `global_parameters`, before the
        checkpoint, and hand it to `evaluated`.
        """
        every = self._evaluate_every
        is_asked = every > 0 and self.inner_step % every == 0 and not self.is_over
        return is_asked or self._is_judged

    def evaluated(self, nats_per_byte: float, *, parameters: str = "published") -> None:
        """Record a held-out loss; that of a checkpoint that is judged goes to the coordinator.

        It keeps the last checkpoint that most islands found good, and has the run return to it if
        later ones are bad several times in a row.

        Args:
            nats_per_byte: Equal text on all islands; another unit will do, if it is the same.
            parameters: Of which values: "published", or "local" for this island's own.
        """
        self._loop.check.settle()
        self._record.evaluated(self.inner_step, parameters, nats_per_byte)
        if parameters == "published" and self._is_judged:
            self._connection.report_held_out(self.checkpoint_number, nats_per_byte)

    # -- checkpoints -----------------------------------------------------------------------------

    @property
    def checkpoint_due(self) -> bool:
        """Whether a run checkpoint belongs after the step just made."""
        step, every = self.inner_step, self._checkpoint_every
        if self._on_arrival:
            return self._loop.is_cut_due
        if self.is_stopping:
            return True
        return (
            every > 0
            and step % every == 0
            and max(self.start_step, self._loop.first_checkpoint_step - 1) < step < self.inner_steps
        )

    @property
    def checkpoint_number(self) -> int:
        """Names the run checkpoint of this moment, equal on all islands.

        `inner_step`; on arrival, where islands make different numbers of inner steps, that of the
        cut that the coordinator asks for, 0 while it asks for none.
        """
        return self._loop.cut.number if self._on_arrival else self.inner_step

    @property
    def _is_judged(self) -> bool:
        """Whether the run checkpoint that is due is one that islands judge."""
        every, number = self._judge_every, self.checkpoint_number
        if not (every and self.checkpoint_due) or self.is_stopping:
            return False
        return (number if self._on_arrival else number // self._checkpoint_every) % every == 0

    @contextlib.contextmanager
    def checkpointing(self, *, text_json: str = "") -> Iterator[None]:
        """Make what is saved inside the island's part of the run checkpoint of this inner step.

        The syncer keeps the present versions before; after it, if the block raised on no rank, the
        coordinator records that the island has it. Save the model, the inner optimizer,
        the data position and `state_dict()`, in any form and place but `checkpoint.dir`/ISLAND,
        which is the built-in loop's. Collective at both ends. A graceful stop waits here until
        every island has the checkpoint, so that none leaves before, or until it is taken back.

        On arrival an island has its part for itself: the syncer keeps versions when all have
        theirs, and no island waits.

        Args:
            text_json: What of the text the coordinator is to share out again when this checkpoint
                is resumed (the built-in loop's; on arrival only).

        Raises:
            ConfigError: On arrival, if no checkpoint is due.
            DilocoError: If the syncer cannot keep the present versions, or the stop has failed.
        """
        with self._record.aside():
            self._loop.check.settle()
            part, is_saved = self._begin_part(text_json), False
            try:
                yield
                is_saved = True
            finally:
                is_whole = self._groups.all_say(is_saved)
                part.end(is_whole=is_whole)
                self._part_over()
            if not is_whole:
                logger.error("no part of %s: another rank could not save", part)
            elif self.is_stopping and not self._on_arrival:
                self._connection.io.drive(self._stopping.completing(self.inner_step))

    @contextlib.contextmanager
    def checkpoint_part(self, *, text_json: str = "") -> Iterator[CheckpointPart]:
        """Copy inside what is to be saved, and save it while training goes on; collective.

        As `checkpointing`, but it is reported to the coordinator when `CheckpointPart.end` was
        called on every rank, from any thread: the ranks must have agreed that all have saved, or
        that one has not. One part at a time; end it before the next, and before `finish`.

        Args:
            text_json: As for `checkpointing`.

        Raises:
            ConfigError: At a graceful stop, which must wait: `checkpointing`; on arrival, if no
                checkpoint is due.
            DilocoError: If the syncer cannot keep the present versions.
        """
        if self.is_stopping:
            raise ConfigError(
                f"the graceful stop after inner step {self.inner_step} must wait for its "
                f"checkpoint: save it inside `with outer.checkpointing():`"
            )
        part = self._begin_part(text_json)
        try:
            yield part
        except BaseException:
            part.end(is_whole=False)
            raise
        finally:
            self._part_over()

    def _begin_part(self, text_json: str) -> CheckpointPart:
        """Have the syncer keep the present versions; on arrival, say that a cut is being taken."""
        self._check_training(is_stepping=False)
        if not self._on_arrival:
            self._connection.io.drive(self._loop.pinning())
            return CheckpointPart(self._connection, self.inner_step)
        if not self.checkpoint_due:
            raise ConfigError(
                f"no run checkpoint is due after inner step {self.inner_step}: with outer.merge = "
                f'"on_arrival" the coordinator asks for them (checkpoint.every_tokens, diloco stop '
                f"HOST:PORT --checkpoint): use outer.checkpointing() while outer.checkpoint_due"
            )
        number = self.checkpoint_number
        self._connection.cutting(number)
        cut = CutTaken(number, self.versions, text_json)
        return CheckpointPart(self._connection, self.inner_step, cut)

    def _part_over(self) -> None:
        if self._on_arrival:
            self._loop.cut_over()

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's part of the island's outer state, by lane; collective.

        Names are those of lanes, so the union over the ranks serves any number of ranks; it goes
        through `torch.distributed.checkpoint` as it is. The tensors are in use, maybe on the
        device: they may be read and saved, not written to. While a checkpoint waits to be loaded,
        tensors of the same names and shapes, to load into.

        A rank that raises instead of calling this must end, or the others wait for it for minutes.
        """
        if not self._is_ready:
            expected = self._exchange.layout.expected().items()
            return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in expected}
        return self._connection.io.drive(self._loop.capturing())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state_dict` was taken, at `resume_step`; collective.

        Load the model's own parameters, too: they are not in it.

        Args:
            state: At least the lanes of this rank, such as the union over the ranks that saved it.

        Raises:
            ConfigError: If this start resumes no checkpoint, or this is another one, or of another
                plan or codec.
            DilocoError: If the run cannot be entered there.
        """
        if self._is_ready:
            raise ConfigError(
                f"nothing is to be resumed at inner step {self.inner_step} (outer.resume_step is "
                f"{self.resume_step}): a run goes on from a checkpoint after `diloco coordinator "
                f"RUN.toml --resume`; an island that starts again takes what is published, and "
                f"needs its inner optimizer only"
            )
        self._check_resumed(state)
        self._enter(self._loop.resuming(state))

    # -- inside ----------------------------------------------------------------------------------

    def _is_due(self, inner_step: int) -> bool:
        """Whether ranks compare notes after an inner step: at due ones, on arrival once a round."""
        if self._on_arrival:
            return inner_step % self._period == 0
        return bool(self._schedule.due(inner_step))

    def _check_resumed(self, state: Mapping[str, Tensor]) -> None:
        """Check that a state is of the checkpoint that is resumed, on all ranks; collective.

        Raises:
            ConfigError: On all ranks, if one of them has another.
        """
        step, what = self.resume_step, "cut" if self._on_arrival else "inner step"
        if "meta" in state and state["meta"].shape == (5,):  # else it is refused as it is restored
            _, _, inner_step, cut, _ = state["meta"].tolist()
            step = cut if self._on_arrival else inner_step
        if not self._groups.all_say(step == self.resume_step):
            other = "another rank's is not" if step == self.resume_step else f"of {what} {step}"
            raise ConfigError(
                f"the run is resumed at {what} {self.resume_step}, this outer state is "
                f"{other}: load the checkpoint of outer.resume_step on all ranks"
            )

    def _enter(self, entering: Waits[None]) -> None:
        """Enter the run, at its start or where it is resumed, and begin to train, together."""
        self._trained.settle(self.start_step)
        self._connection.io.drive(entering)
        self.start_step = self._loop.inner_step
        self._is_ready = True
        self._graceful_stop.begin(self._loop.inner_step, self._loop.first_checkpoint_step)
        self._groups.barrier()
        self._record.begin(self._loop, self._connection.config, self._trained.device)
        self._state = IslandState.TRAINING

    def _check_open(self) -> None:
        self._connection.check_open()
        if self._state in (IslandState.FINISHED, IslandState.STOPPED):
            raise ConfigError(
                f"outer.finish() was called after inner step {self.inner_step}: this start of the "
                f"island is over; train on with a new connection and a new DiLoCo"
            )

    def _check_training(self, *, is_stepping: bool = True) -> None:
        self._check_open()
        if not self._is_ready:
            raise ConfigError(
                f"the run is resumed at inner step {self.resume_step}: load the checkpoint that "
                f"was saved there (model, optimizer, data), then outer.load_state_dict(...), "
                f"before the first step"
            )
        if is_stepping and self.is_over:
            raise ConfigError(
                over_text(self.inner_step, self.inner_steps, on_arrival=self._on_arrival)
            )
        if is_stepping and self.is_stopping:
            raise ConfigError(
                f"inner step {self.inner_step + 1}: the run was asked to stop after inner step "
                f"{self.inner_step}, and the other islands stop there: leave the loop when "
                f"outer.is_stopping, after the checkpoint, then call outer.finish()"
            )

    def _trial_loss(self) -> float | None:
        if self.loss_of is None:
            return None
        with self._record.evaluating():
            loss = self.loss_of()
        self._trained.reshard()  # else values that a forward has gathered would stay
        return loss

    def _sum(self, word: int = 0) -> int:
        """Sum the bytes that all ranks have moved, and the leader's word; collective.

        Waits for all ranks, where the collect of what was due has just done so: a stop must be
        known before the next inner step, or ranks would part.
        """
        own = [num_bytes for pair in self._exchange.moved for num_bytes in pair]
        *moved, word = island_sums(
            self._groups, [*own, word], tokens=self._tokens, inner_step=self.inner_step
        )
        self.island_bytes = (sum(moved[::2]), sum(moved[1::2]))
        if self._groups.num_ranks > 1:
            self._connection.island_moved = tuple(zip(moved[::2], moved[1::2], strict=True))
        return word

    def _progress(self) -> ReportRequest:
        """Return what a report says; called in the IO thread."""
        meter, is_training = self._record.meter, self._tokens > 0
        up, down = self.island_bytes if is_training else (self.bytes_up, self.bytes_down)
        memory = memory_used(self.inner_step, self._record.device)
        return ReportRequest(
            state=self._state,
            inner_step=self.inner_step,
            loss_nats=self._record.loss_nats,
            tokens_per_s=meter.tokens_per_s,
            tokens=self._tokens,
            fragments_in_flight=self.num_in_flight,
            bytes_up=up,
            bytes_down=down,
            blocked_s=self.blocked_s,
            utilisation=meter.utilisation(self._record.wall_s),
            step_s=self._exchange.step_s,
            left_s=meter.left_s(self.inner_steps - self.schedule_step),
            resident_bytes=memory.resident_bytes,
            device_bytes=memory.device_reserved_bytes,
            mfu=min(1.0, self._record.compute.mfu(meter.tokens, meter.inner_s)),
        )

    def _record_event(self, event: Event) -> None:
        self._events.append(event)
        self._record.write(event)
        self._connection.on_event(event)
        if self._on_event is not None:
            self._on_event(event)

    def _take_events(self) -> list[Event]:
        return [self._events.popleft() for _ in range(len(self._events))]
