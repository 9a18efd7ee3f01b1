"""The figures of a summary: of islands, of fragments, and of other ways of training.

Figures alone: `diloco.report.summary` reads them, `diloco.report.summary_text` says them in words.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Share of wall time from which on it is worth saying why an island was blocked.
WORTH_SAYING = 0.01


@dataclass(frozen=True, slots=True)
class IslandSummary:
    """One island's life; bytes are those of all its carriers, headers included.

    `inner_steps` is where it ended, `num_steps` what it made: fewer after a warm start. Times are
    of its `num_starts` starts together, those of inner steps made in vain left out;
    `undisturbed_step_s` and `overwritten_steps` are of the last start alone; `lost_steps` are those
    that its `num_returns` returns cost. `published_nats_per_byte` is None of one that left early.
    """

    island: str
    shape: str
    inner_steps: int
    num_steps: int
    tokens: int
    local_nats_per_byte: float
    published_nats_per_byte: float | None
    utilisation: float
    goodput: float
    overwritten_steps: float
    blocked_s: float
    wall_s: float
    undisturbed_step_s: float
    bytes_up: int
    bytes_down: int
    digests: tuple[str, ...]
    num_starts: int
    num_returns: int
    lost_steps: int
    dropped_tokens: float = 0.0
    left_tokens: float = 0.0
    tflops_per_s: float = 0.0
    mfu: float = 0.0
    memory_bytes: int = 0

    @property
    def has_left_early(self) -> bool:
        """Whether it ended before the run did, and holds no last version."""
        return not self.digests

    @property
    def is_shared(self) -> bool:
        """Whether its quiet steps were not undisturbed (`diloco.telemetry.meter.utilisation`)."""
        inner_s = self.goodput * self.wall_s
        return self.num_steps * self.undisturbed_step_s > (1 + WORTH_SAYING) * inner_s


@dataclass(frozen=True, slots=True)
class FragmentSummary:
    """A fragment's last version and whether it could be recomputed from its contributions.

    `is_bit_equal` is None where there was nothing to recompute: nothing was published, or an
    all-reduce handed on the mean of many islands. `problem` says what is not as it was published.
    """

    fragment_id: int
    version: int
    digest: str
    contributors: tuple[str, ...]
    recomputed_versions: tuple[int, ...]
    is_bit_equal: bool | None
    problem: str = ""
    merged_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ArrivalSummary:
    """Rounds of a run in which nobody waited, flushes left out, as its islands saw them merged.

    `num_solo` of them counted one island only. `total_tokens` is what ended the run.
    """

    num_rounds: int
    num_solo: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class TrafficAlternative:
    """The traffic of another way of training, and its time on the same link."""

    name: str
    bytes_up: int
    bytes_down: int
    transfer_s: float | None
