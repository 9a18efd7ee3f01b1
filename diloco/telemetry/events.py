"""The events of a run: one frozen dataclass each.

Reports, tests and the live table read events, never log lines. Units are in the names; `kind` is
the word under which an event is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""

    kind: ClassVar[str] = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the event as JSON values, its kind among them."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, slots=True)
class InnerStepDone(Event):
    """One inner step of an island; the loss is the mean over its whole batch, in nats a token.

    Loss, norm and rate are None where the loop has not told them. `tflops_per_s` is that of a
    rank; `mfu` the share of its device's peak in [0, 1], 0 where that is not known
    (`diloco.trainer.flops`). `metrics`: what else the loop has logged, by name.
    """

    kind: ClassVar[str] = "inner_step"
    inner_step: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    num_tokens: int
    duration_s: float
    tflops_per_s: float = 0.0
    mfu: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FragmentSent(Event):
    """A contribution left, or was declined (`declined` says why); norm over the rank's lanes."""

    kind: ClassVar[str] = "fragment_sent"
    inner_step: int
    fragment_id: int
    version: int
    attempt: int
    weight_tokens: int
    weight_steps: int
    is_flush: bool
    lanes_norm: float
    declined: str = ""


@dataclass(frozen=True, slots=True)
class FragmentMerged(Event):
    """A published version replaced the anchor; `blocked_s` is what training waited for it.

    `digest` is the syncer's word on that version; what the model holds, `IslandEnded` says.
    `dropped_tokens` will be counted by no contribution; `overwritten_steps` are inner steps whose
    local effect the merge replaced and the version does not have.
    """

    kind: ClassVar[str] = "fragment_merged"
    inner_step: int
    fragment_id: int
    version: int
    outcome: str
    staleness_steps: int
    blocked_s: float
    digest: str
    contributors: tuple[str, ...]
    is_flush: bool
    dropped_tokens: int = 0
    overwritten_steps: int = 0


@dataclass(frozen=True, slots=True)
class PhaseDone(Event):
    """One phase of a round has ended on a rank, just now, after so many seconds.

    `phase`: "gather" and "merge" are the training thread's between parameters and lanes, "wait" is
    what it waited for an outcome; "encode" and "decode" are the codecs, "send" and "fetch" calls
    to the syncer, until they are answered. `version` is the round's base; `lane_id` -1: all lanes
    of the rank, or several together.
    """

    kind: ClassVar[str] = "phase"
    phase: str
    fragment_id: int
    version: int
    lane_id: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class PrefetchWithoutRoom(Event):
    """Parts of a fragment had no room on the device before their merge, and came there with it."""

    kind: ClassVar[str] = "prefetch_without_room"
    inner_step: int
    fragment_id: int
    num_parts: int


@dataclass(frozen=True, slots=True)
class RoundExpiredSeen(Event):
    """An attempt expired: nobody merges; from here only the audit log reproduces the run."""

    kind: ClassVar[str] = "round_expired"
    inner_step: int
    fragment_id: int
    version: int
    attempt: int
    blocked_s: float


@dataclass(frozen=True, slots=True)
class DigestMismatch(Event):
    """A staged lane was not what the syncer published; it was fetched again, dense."""

    kind: ClassVar[str] = "digest_mismatch"
    fragment_id: int
    version: int
    lane_id: int


@dataclass(frozen=True, slots=True)
class AnchorMended(Event):
    """A lane of the anchor was not what was published any more; it was fetched again."""

    kind: ClassVar[str] = "anchor_mended"
    fragment_id: int
    version: int
    lane_id: int


@dataclass(frozen=True, slots=True)
class PublishedTaken(Event):
    """What an island had trained was not sound: it took the published values of all fragments.

    `reason` is that of the rank which saw it. `dropped_tokens`, by fragment, will be counted by no
    contribution. `mend`: what becomes of the inner optimizer
    (`diloco.protocol.island.soundness.Mend`).
    """

    kind: ClassVar[str] = "published_taken"
    inner_step: int
    reason: str
    mend: str
    dropped_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InnerStateMended(Event):
    """Values of an inner optimizer's moments that it cannot have made were set to zero."""

    kind: ClassVar[str] = "inner_state_mended"
    inner_step: int
    num_values: int
    source: str


@dataclass(frozen=True, slots=True)
class LossAccepted(Event):
    """The loss of an island is far beyond what it was, with the published values, too.

    Nobody else contributed either: it goes on from there, and an operator should look.
    """

    kind: ClassVar[str] = "loss_accepted"
    inner_step: int
    loss: float
    reason: str


@dataclass(frozen=True, slots=True)
class CaughtUp(Event):
    """An island staged a version that is not the one after its own.

    `how`: by retained "deltas", or "whole", as float32 values.
    """

    kind: ClassVar[str] = "caught_up"
    fragment_id: int
    from_version: int
    version: int
    how: str


@dataclass(frozen=True, slots=True)
class FragmentStaged(Event):
    """A rank that carries a whole fragment has a version, and what its own values hash to."""

    kind: ClassVar[str] = "fragment_staged"
    fragment_id: int
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class OutcomeHeard(Event):
    """A contribution was not included, and why; written where it was heard of first."""

    kind: ClassVar[str] = "outcome_heard"
    fragment_id: int
    version: int
    attempt: int
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True)
class InitialOverwritten(Event):
    """Initial parameters that differed from the run's version 0 were replaced by it."""

    kind: ClassVar[str] = "initial_overwritten"
    inner_step: int
    fragment_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IslandRejoined(Event):
    """An island returned to a run under way; `lost_steps` were made by its last start in vain."""

    kind: ClassVar[str] = "island_rejoined"
    inner_step: int
    lost_steps: int


@dataclass(frozen=True, slots=True)
class IslandResumed(Event):
    """An island goes on from a run checkpoint of this inner step, in a new timeline."""

    kind: ClassVar[str] = "island_resumed"
    inner_step: int
    timeline: int


@dataclass(frozen=True, slots=True)
class SyncerRestarted(Event):
    """The syncer answered with a new epoch; outstanding lanes are sent again."""

    kind: ClassVar[str] = "syncer_restarted"
    syncer_epoch: int
    resent_lanes: int


@dataclass(frozen=True, slots=True)
class DamagedOnTheWay(Event):
    """Messages between this rank and a syncer came to harm and were sent again; one event a second.

    `damaged` counts them since the rank's start, `recent` those of the last ten minutes, and
    `is_too_much` says that these are more than a line should damage. `text` is about the last.
    """

    kind: ClassVar[str] = "damaged_on_the_way"
    peer: str
    method: str
    damaged: int
    recent: int
    is_too_much: bool
    text: str


@dataclass(frozen=True, slots=True)
class BytesMoved(Event):
    """What all ranks of an island have sent and received since its start, headers included."""

    kind: ClassVar[str] = "bytes_moved"
    inner_step: int
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True)
class CheckpointWritten(Event):
    """An island's part of the run checkpoint of an inner step is on disk; bytes of all ranks.

    `seconds` until it was, on this rank; `blocked_s` of them training waited.
    """

    kind: ClassVar[str] = "checkpoint_written"
    inner_step: int
    bytes: int
    seconds: float
    blocked_s: float


@dataclass(frozen=True, slots=True)
class CheckpointFailed(Event):
    """A checkpoint could not be written, and training goes on; earlier ones are untouched."""

    kind: ClassVar[str] = "checkpoint_failed"
    inner_step: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointMirrored(Event):
    """A checkpoint (inner step, or cut) is whole in `checkpoint.mirror`, too; 0 bytes: it was."""

    kind: ClassVar[str] = "checkpoint_mirrored"
    inner_step: int
    checkpoint: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckpointMirrorFailed(Event):
    """A checkpoint is not in `checkpoint.mirror`; on disk it is, and training goes on."""

    kind: ClassVar[str] = "checkpoint_mirror_failed"
    inner_step: int
    checkpoint: int
    reason: str


@dataclass(frozen=True, slots=True)
class MemoryCopied(Event):
    """All ranks' inner states of inner step `copied_step` are known to lie whole in host memory.

    Bytes of all ranks and copies; `seconds` is what training waited for it on this rank.
    """

    kind: ClassVar[str] = "memory_copied"
    inner_step: int
    copied_step: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MemoryCopyFailed(Event):
    """A copy in host memory is not what its owner sent; the one before it is untouched."""

    kind: ClassVar[str] = "memory_copy_failed"
    inner_step: int
    copied_step: int
    reason: str


@dataclass(frozen=True, slots=True)
class InnerStateTaken(Event):
    """An island that joins or returns has taken its inner optimizer, as of inner step `taken_step`.

    `source` is "memory" (copies in host memory), "checkpoint" (storage), "island" (another island,
    `from_island`, as its `checkpoint` has it, by its own count of inner steps), or "fresh": it
    begins again, and `reason` says why it was given none where it asked for one. `received_bytes`
    is what came from other hosts' memory, of all ranks.
    """

    kind: ClassVar[str] = "inner_state_taken"
    inner_step: int
    taken_step: int
    source: str
    received_bytes: int
    seconds: float
    from_island: str = ""
    checkpoint: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SlotDrawn(Event):
    """What this start has drawn from a slot of the text under one grant, so far; of the leader.

    `begun` and `drawn` are draws of the slot by source, those of others before it included;
    `untold` are draws of the island, of all slots, that the coordinator has not heard of.
    """

    kind: ClassVar[str] = "slot_drawn"
    inner_step: int
    slot: int
    grant: int
    begun: dict[str, int]
    drawn: dict[str, int]
    untold: int


@dataclass(frozen=True, slots=True)
class TextUntold(Event):
    """The island draws beyond what may be untold, as the coordinator does not answer; in draws."""

    kind: ClassVar[str] = "text_untold"
    inner_step: int
    untold: int
    bound: int


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    """Held-out loss in nats a byte; `parameters` is "published" or "local"."""

    kind: ClassVar[str] = "evaluated"
    inner_step: int
    parameters: str
    nats_per_byte: float


@dataclass(frozen=True, slots=True)
class AlarmRaised(Event):
    """What an operator should know of; told to the coordinator (`diloco.protocol.run.alarms`).

    `alarm` is the `AlarmKind`; `island` is whom it is about, empty: the whole run; `fragment_id`
    -1: no fragment.
    """

    kind: ClassVar[str] = "alarm"
    alarm: str
    text: str
    about: str = ""
    fragment_id: int = -1


@dataclass(frozen=True, slots=True)
class AlarmCleared(Event):
    """What `AlarmRaised` told of the same three is over."""

    kind: ClassVar[str] = "alarm_cleared"
    alarm: str
    about: str = ""
    fragment_id: int = -1


@dataclass(frozen=True, slots=True)
class MemoryUsed(Event):
    """What a rank took of memory, now and at most since its start; zeros where it has no GPU."""

    kind: ClassVar[str] = "memory_used"
    inner_step: int
    resident_bytes: int
    resident_peak_bytes: int
    device_bytes: int = 0
    device_peak_bytes: int = 0
    device_reserved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ProfileWritten(Event):
    """A trace of the inner steps from `first_step` to `inner_step` is on disk.

    `memory_path` is the snapshot of a GPU's memory; empty: there is none.
    """

    kind: ClassVar[str] = "profile_written"
    inner_step: int
    first_step: int
    path: str
    memory_path: str


@dataclass(frozen=True, slots=True)
class RankLost(Event):
    """A collective of the island failed, and this rank ends; `ranks` are the culprits, if known.

    `collective` is the last one that this rank's flight recorder has, `dump` where all lie that it
    has; both empty where nothing is recorded.
    """

    kind: ClassVar[str] = "rank_lost"
    inner_step: int
    ranks: tuple[int, ...]
    collective: str
    dump: str
    error: str


@dataclass(frozen=True, slots=True)
class IslandEnded(Event):
    """Sums over an island's life; `digests`: what its model was found to hold of each fragment.

    Tokens of the whole island, by share of the parameters: `dropped_tokens` are in no version,
    `left_tokens` were in none when it ended. An island that left early has no digests.
    """

    kind: ClassVar[str] = "island_ended"
    inner_step: int
    tokens: int
    wall_s: float
    inner_s: float
    blocked_s: float
    undisturbed_step_s: float
    utilisation: float
    goodput: float
    overwritten_steps: float
    bytes_up: int
    bytes_down: int
    digests: tuple[str, ...]
    dropped_tokens: float = 0.0
    left_tokens: float = 0.0
    tflops_per_s: float = 0.0
    mfu: float = 0.0
