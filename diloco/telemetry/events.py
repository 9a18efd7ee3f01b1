"""The events of a run: one frozen dataclass each.

Reports, tests and the live table read events, never log lines. Units are in the names; `kind` is
the word under which an event is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, dataclass_transform


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Event:
    """Base of all events; a subclass is made a frozen dataclass, and names its `kind`."""

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, *, kind: str) -> None:
        """Make the subclass a dataclass."""
        cls.kind = kind
        dataclass(frozen=True)(cls)

    def as_dict(self) -> dict[str, Any]:
        """Return the event as JSON values, its kind among them."""
        return {"kind": self.kind, **asdict(self)}


class InnerStepDone(Event, kind="inner_step"):
    """One inner step of an island; the loss is the mean over its whole batch, in nats a token.

    Loss, norm and rate are None where the loop has not told them. `tflops_per_s` is that of a
    rank; `mfu` the share of its device's peak in [0, 1], 0 where that is not known
    (`diloco.trainer.flops`). `metrics`: what else the loop has logged, by name.
    """

    inner_step: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    num_tokens: int
    duration_s: float
    tflops_per_s: float = 0.0
    mfu: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)


class FragmentSent(Event, kind="fragment_sent"):
    """A contribution left, or was declined (`declined` says why); norm over the rank's lanes."""

    inner_step: int
    fragment_id: int
    version: int
    attempt: int
    weight_tokens: int
    weight_steps: int
    is_flush: bool
    lanes_norm: float
    declined: str = ""


class FragmentMerged(Event, kind="fragment_merged"):
    """A published version replaced the anchor; `blocked_s` is what training waited for it.

    `digest` is the syncer's word on that version; what the model holds, `IslandEnded` says. A rank
    that carries no lanes of the fragment does not know it, nor the contributors: both are empty.
    `dropped_tokens` will be counted by no contribution; `overwritten_steps` are inner steps whose
    local effect the merge replaced and the version does not have.
    """

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


class PhaseDone(Event, kind="phase"):
    """One phase of a round has ended on a rank, just now, after so many seconds.

    `phase`: "gather" and "merge" are the training thread's between parameters and lanes, "wait" is
    what it waited for an outcome; "encode" and "decode" are the codecs, "send" and "fetch" calls
    to the syncer, until they are answered. `version` is the round's base; `lane_id` -1: all lanes
    of the rank, or several together.
    """

    phase: str
    fragment_id: int
    version: int
    lane_id: int
    duration_s: float


class PrefetchWithoutRoom(Event, kind="prefetch_without_room"):
    """Parts of a fragment had no room on the device before their merge, and came there with it."""

    inner_step: int
    fragment_id: int
    num_parts: int


class RoundExpiredSeen(Event, kind="round_expired"):
    """An attempt expired: nobody merges; from here only the audit log reproduces the run."""

    inner_step: int
    fragment_id: int
    version: int
    attempt: int
    blocked_s: float


class DigestMismatch(Event, kind="digest_mismatch"):
    """A staged lane was not what the syncer published; it was fetched again, dense."""

    fragment_id: int
    version: int
    lane_id: int


class AnchorMended(Event, kind="anchor_mended"):
    """A lane of the anchor was not what was published any more; it was fetched again."""

    fragment_id: int
    version: int
    lane_id: int


class PublishedTaken(Event, kind="published_taken"):
    """What an island had trained was not sound: it took the published values of all fragments.

    `reason` is that of the rank which saw it. `dropped_tokens`, by fragment, will be counted by no
    contribution. `mend`: what becomes of the inner optimizer
    (`diloco.protocol.island.soundness.Mend`).
    """

    inner_step: int
    reason: str
    mend: str
    dropped_tokens: tuple[int, ...]


class InnerStateMended(Event, kind="inner_state_mended"):
    """Values of an inner optimizer's moments that it cannot have made were set to zero."""

    inner_step: int
    num_values: int
    source: str


class LossAccepted(Event, kind="loss_accepted"):
    """The loss of an island is far beyond what it was, with the published values, too.

    Nobody else contributed either: it goes on from there, and an operator should look.
    """

    inner_step: int
    loss: float
    reason: str


class CaughtUp(Event, kind="caught_up"):
    """An island staged a version that is not the one after its own.

    `how`: by retained "deltas", or "whole", as float32 values.
    """

    fragment_id: int
    from_version: int
    version: int
    how: str


class FragmentStaged(Event, kind="fragment_staged"):
    """A rank that carries a whole fragment has a version, and what its own values hash to."""

    fragment_id: int
    version: int
    digest: str


class OutcomeHeard(Event, kind="outcome_heard"):
    """A contribution was not included, and why; written where it was heard of first."""

    fragment_id: int
    version: int
    attempt: int
    outcome: str
    reason: str


class InitialOverwritten(Event, kind="initial_overwritten"):
    """Initial parameters that differed from the run's version 0 were replaced by it."""

    inner_step: int
    fragment_ids: tuple[int, ...]


class IslandRejoined(Event, kind="island_rejoined"):
    """An island returned to a run under way; `lost_steps` were made by its last start in vain."""

    inner_step: int
    lost_steps: int


class IslandResumed(Event, kind="island_resumed"):
    """An island goes on from a run checkpoint of this inner step, in a new timeline."""

    inner_step: int
    timeline: int


class SyncerRestarted(Event, kind="syncer_restarted"):
    """The syncer answered with a new epoch; outstanding lanes are sent again."""

    syncer_epoch: int
    resent_lanes: int


class DamagedOnTheWay(Event, kind="damaged_on_the_way"):
    """Messages between this rank and a syncer came to harm and were sent again; one event a second.

    `damaged` counts them since the rank's start, `recent` those of the last ten minutes, and
    `is_too_much` says that these are more than a line should damage. `text` is about the last.
    """

    peer: str
    method: str
    damaged: int
    recent: int
    is_too_much: bool
    text: str


class BytesMoved(Event, kind="bytes_moved"):
    """What all ranks of an island have sent and received since its start, headers included."""

    inner_step: int
    bytes_up: int
    bytes_down: int


class CheckpointWritten(Event, kind="checkpoint_written"):
    """An island's part of the run checkpoint of an inner step is on disk; bytes of all ranks.

    `seconds` until it was, on this rank; `blocked_s` of them training waited; of these `awaited_s`
    for the checkpoint before.
    """

    inner_step: int
    bytes: int
    seconds: float
    blocked_s: float
    awaited_s: float


class CheckpointFailed(Event, kind="checkpoint_failed"):
    """A checkpoint could not be written, and training goes on; earlier ones are untouched."""

    inner_step: int
    reason: str


class CheckpointMirrored(Event, kind="checkpoint_mirrored"):
    """A checkpoint (inner step, or cut) is whole in `checkpoint.mirror`, too; 0 bytes: it was."""

    inner_step: int
    checkpoint: int
    bytes: int
    seconds: float


class CheckpointMirrorFailed(Event, kind="checkpoint_mirror_failed"):
    """A checkpoint is not in `checkpoint.mirror`; on disk it is, and training goes on."""

    inner_step: int
    checkpoint: int
    reason: str


class MemoryCopied(Event, kind="memory_copied"):
    """All ranks' inner states of inner step `copied_step` are known to lie whole in host memory.

    Bytes of all ranks and copies; `seconds` is what training waited for it on this rank.
    """

    inner_step: int
    copied_step: int
    bytes: int
    seconds: float


class MemoryCopyFailed(Event, kind="memory_copy_failed"):
    """A copy in host memory is not what its owner sent; the one before it is untouched."""

    inner_step: int
    copied_step: int
    reason: str


class InnerStateTaken(Event, kind="inner_state_taken"):
    """An island that joins or returns has taken its inner optimizer, as of inner step `taken_step`.

    `source` is "memory" (copies in host memory), "checkpoint" (storage), "island" (another island,
    `from_island`, as its `checkpoint` has it, by its own count of inner steps), or "fresh": it
    begins again, and `reason` says why it was given none where it asked for one. `received_bytes`
    is what came from other hosts' memory, of all ranks.
    """

    inner_step: int
    taken_step: int
    source: str
    received_bytes: int
    seconds: float
    from_island: str = ""
    checkpoint: int = 0
    reason: str = ""


class SlotDrawn(Event, kind="slot_drawn"):
    """What this start has drawn from a slot of the text under one grant, so far; of the leader.

    `begun` and `drawn` are draws of the slot by source, those of others before it included;
    `untold` are draws of the island, of all slots, that the coordinator has not heard of.
    """

    inner_step: int
    slot: int
    grant: int
    begun: dict[str, int]
    drawn: dict[str, int]
    untold: int


class TextUntold(Event, kind="text_untold"):
    """The island draws beyond what may be untold, as the coordinator does not answer; in draws."""

    inner_step: int
    untold: int
    bound: int


class Evaluated(Event, kind="evaluated"):
    """Held-out loss in nats a byte; `parameters` is "published" or "local"."""

    inner_step: int
    parameters: str
    nats_per_byte: float


class AlarmRaised(Event, kind="alarm"):
    """What an operator should know of; told to the coordinator (`diloco.protocol.run.alarms`).

    `alarm` is the `AlarmKind`; `island` is whom it is about, empty: the whole run; `fragment_id`
    -1: no fragment.
    """

    alarm: str
    text: str
    about: str = ""
    fragment_id: int = -1


class AlarmCleared(Event, kind="alarm_cleared"):
    """The alarm of the same three, raised by `AlarmRaised`, is over."""

    alarm: str
    about: str = ""
    fragment_id: int = -1


class MemoryUsed(Event, kind="memory_used"):
    """What a rank took of memory, now and at most since its start; zeros where it has no GPU."""

    inner_step: int
    resident_bytes: int
    resident_peak_bytes: int
    device_bytes: int = 0
    device_peak_bytes: int = 0
    device_reserved_bytes: int = 0


class ProfileWritten(Event, kind="profile_written"):
    """A trace of the inner steps from `first_step` to `inner_step` is on disk.

    `memory_path` is the snapshot of a GPU's memory; empty: there is none.
    """

    inner_step: int
    first_step: int
    path: str
    memory_path: str


class RankLost(Event, kind="rank_lost"):
    """A collective of the island did not end, or failed, and this rank ends.

    `ranks` are the culprits, if known; `collective` is what this rank waited in for long, `dump`
    where the collectives lie that its flight recorders have; both may be empty. `text` says where
    the culprits stand, and what to do.
    """

    inner_step: int
    ranks: tuple[int, ...]
    collective: str
    dump: str
    text: str


class IslandEnded(Event, kind="island_ended"):
    """Sums over an island's life; `digests`: what its model was found to hold of each fragment.

    Tokens of the whole island, by share of the parameters: `dropped_tokens` are in no version,
    `left_tokens` were in none when it ended. An island that left early has no digests.
    """

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
