"""Turns events into scalars: names and axes, the same in every sink.

Where torchtitan has a name it is taken, so that dashboards fit: `loss_metrics/global_avg_loss`,
`grad_norm`, `lr`, `throughput(tps)`, `tflops`, `mfu(%)`, `memory/max_active(GiB)`,
`n_tokens_seen`, `time_metrics/end_to_end(s)`; what prime and OpenDiLoCo added is named like theirs:
`perplexity`, `outer_step`, `num_peers`. All values are one island's, as its leader sees them. Pure:
reads no clock, writes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from diloco.telemetry.events import (
    BytesMoved,
    CheckpointWritten,
    Evaluated,
    Event,
    FragmentMerged,
    FragmentSent,
    InnerStepDone,
    IslandEnded,
    MemoryCopied,
    MemoryUsed,
    PhaseDone,
    RoundExpiredSeen,
)

#: The two axes; every row of scalars has both.
INNER_STEP_AXIS = "inner_step"
TOKENS_AXIS = "n_tokens_seen"

_LARGEST_EXPONENT = 700.0
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """Scalars by name, and where on the axes they belong."""

    inner_step: int
    tokens: int
    scalars: dict[str, float]


class Metrics:
    """Turns one start's events into rows, in the order in which they come.

    Keeps what a row needs of earlier events: the axes, what the island was blocked since its last
    inner step, and how often what was rare has happened in this start.
    """

    def __init__(self) -> None:
        """Begin before the first event."""
        self._inner_step: int | None = None
        self._tokens = 0
        self._blocked_s = 0.0
        self._times: Counter[str] = Counter()

    def row(self, event: Event) -> MetricsRow | None:
        """Give the scalars of an event; None before any event has said an inner step.

        None of phases, too: of those, a timeline is drawn (`diloco sim trace`).
        """
        match event:
            case PhaseDone():
                return None
            case InnerStepDone():
                scalars = self._of_inner_step(event)
            case FragmentSent():
                scalars = self._of_sent(event)
            case FragmentMerged():
                scalars = self._of_merged(event)
            case BytesMoved():
                scalars = {
                    "outer/uplink_bytes": event.bytes_up,
                    "outer/downlink_bytes": event.bytes_down,
                }
            case Evaluated():
                scalars = {
                    f"validation_metrics/{event.parameters}_nats_per_byte": event.nats_per_byte
                }
            case CheckpointWritten():
                scalars = {
                    "checkpoint/bytes": event.bytes,
                    "checkpoint/write(s)": event.seconds,
                    "checkpoint/blocked(s)": event.blocked_s,
                    "checkpoint/awaited(s)": event.awaited_s,
                }
            case MemoryCopied():
                scalars = {"memory_copy/bytes": event.bytes, "memory_copy/wait(s)": event.seconds}
            case MemoryUsed():
                scalars = {
                    "memory/resident(GiB)": event.resident_bytes / _GIB,
                    "memory/max_resident(GiB)": event.resident_peak_bytes / _GIB,
                    "memory/max_active(GiB)": event.device_peak_bytes / _GIB,
                    "memory/max_reserved(GiB)": event.device_reserved_bytes / _GIB,
                }
            case IslandEnded():
                scalars = {
                    "utilisation": event.utilisation,
                    "goodput": event.goodput,
                    "outer/overwritten_steps": event.overwritten_steps,
                }
            case _:
                if isinstance(event, RoundExpiredSeen):
                    self._blocked_s += event.blocked_s
                scalars = {f"events/{event.kind}": self._count(event.kind)}
        self._inner_step = getattr(event, "inner_step", self._inner_step)
        if self._inner_step is None:
            return None
        return MetricsRow(self._inner_step, self._tokens, scalars)

    def _of_inner_step(self, event: InnerStepDone) -> dict[str, float]:
        # Steps before this start (a resume, a return, a warm start) are taken to be like this one.
        before = self._tokens or (event.inner_step - 1) * event.num_tokens
        self._tokens = before + event.num_tokens
        wall_s, self._blocked_s = event.duration_s + self._blocked_s, 0.0
        told = {
            "loss_metrics/global_avg_loss": event.loss,
            "perplexity": None
            if event.loss is None
            else math.exp(min(event.loss, _LARGEST_EXPONENT)),
            "grad_norm": event.grad_norm,
            "lr": event.learning_rate,
        }
        return {
            # Not 0 where they are not known: absent.
            **{name: value for name, value in told.items() if value is not None},
            "throughput(tps)": event.num_tokens / wall_s if wall_s > 0 else 0.0,
            **({"tflops": event.tflops_per_s} if event.tflops_per_s else {}),
            **({"mfu(%)": 100 * event.mfu} if event.mfu else {}),
            "time_metrics/inner_step(s)": event.duration_s,
            "time_metrics/end_to_end(s)": wall_s,
            **event.metrics,
        }

    def _of_sent(self, event: FragmentSent) -> dict[str, float]:
        if event.declined:
            return {"events/declined": self._count("declined")}
        # Of the lanes that the leader carries: without another rank's lanes it is not the island's.
        return {f"leader_lanes_pseudo_gradient_norm/fragment-{event.fragment_id}": event.lanes_norm}

    def _of_merged(self, event: FragmentMerged) -> dict[str, float]:
        self._blocked_s += event.blocked_s
        return {
            f"outer_step/fragment-{event.fragment_id}": event.version,
            "num_peers": len(event.contributors),
            "outer/staleness(steps)": event.staleness_steps,
            "time_metrics/blocked(s)": event.blocked_s,
            f"outer/{event.outcome}": self._count(event.outcome),
        }

    def _count(self, what: str) -> int:
        self._times[what] += 1
        return self._times[what]
