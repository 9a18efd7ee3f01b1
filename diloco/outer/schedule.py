"""Computes after which inner steps a fragment is sent, and after which its result is merged.

Every H inner steps each fragment is sent once. The sends of different fragments are spread over
these H steps, so that the link is used evenly, and the result of a send is merged tau steps later,
so that training does not wait for the network:

    H = 6, P = 3, tau = 1:    inner step   1  2  3  4  5  6  7  8 ...
                              sends           0     1     2     0
                              merges             0     1     2

The same configuration gives the same steps on every island, so islands need not agree on anything
at run time.

Source: Streaming DiLoCo (arXiv 2501.18512), staggered fragments with overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from diloco.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps at which every fragment of a scheduled run is sent and merged.

    Fragment p is due (to be sent) after inner step s if s >= 1 and (s - phase_p) mod H == 0; what
    is sent then is merged after inner step s + tau.

    Attributes:
        inner_steps_per_round: H, inner steps between two sends of the same fragment, >= 1.
        num_fragments: P, >= 1.
        overlap_steps: tau, inner steps between sending a fragment and merging its result, in
            [0, H); 0 merges at once.
        inner_steps: Inner steps of the whole run, >= 1.
        flush: Whether work that is not yet sent at the end goes into a last contribution of each
            fragment, the flush.
        phases: First due step of each fragment, in [0, H], in any order; 0 means H.
    """

    inner_steps_per_round: int
    num_fragments: int
    overlap_steps: int
    inner_steps: int
    flush: bool
    phases: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse impossible schedules.

        Raises:
            ConfigError: Naming the field, its value and the allowed range.
        """
        period = self.inner_steps_per_round
        for path, value in (
            ("outer.inner_steps_per_round", period),
            ("outer.num_fragments", self.num_fragments),
            ("run.inner_steps", self.inner_steps),
        ):
            if value < 1:
                raise ConfigError(f"{path} = {value} must be at least 1")
        if not 0 <= self.overlap_steps < period:
            raise ConfigError(
                f"outer.overlap_steps = {self.overlap_steps} is outside [0, {period}): a result "
                "must be merged before its fragment is due again; lower it or raise "
                "outer.inner_steps_per_round"
            )
        if len(self.phases) != self.num_fragments:
            raise ConfigError(
                f"outer.phases has {len(self.phases)} values for {self.num_fragments} fragments: "
                "give one a fragment, or none for an even spread"
            )
        outside = [phase for phase in self.phases if not 0 <= phase <= period]
        if outside:
            raise ConfigError(
                f"outer.phases has {outside}, outside [0, {period}]: "
                "a phase is an inner step of the first round"
            )

    @classmethod
    def make(
        cls,
        *,
        inner_steps_per_round: int,
        num_fragments: int,
        overlap_steps: int,
        inner_steps: int,
        flush: bool,
        phases: Sequence[int] = (),
    ) -> Schedule:
        """Build a schedule; empty `phases` spread evenly: phase_p = floor(H (p + 1) / P).

        Raises:
            ConfigError: Naming the field, its value and the allowed range.
        """
        spread = [inner_steps_per_round * p // num_fragments for p in range(1, num_fragments + 1)]
        return cls(
            inner_steps_per_round=inner_steps_per_round,
            num_fragments=num_fragments,
            overlap_steps=overlap_steps,
            inner_steps=inner_steps,
            flush=flush,
            phases=tuple(phases or spread),
        )

    @property
    def is_one_at_a_time(self) -> bool:
        """Whether each send is merged before the next one, so that sends never share the link.

        Fragments that are sent after the same inner step count as one send.
        """
        period = self.inner_steps_per_round
        dues = sorted({phase % period for phase in self.phases})
        gaps = (after - due for due, after in pairwise([*dues, dues[0] + period]))
        return self.overlap_steps < min(gaps)

    def due(self, inner_step: int) -> tuple[int, ...]:
        """Return the fragments to send after `inner_step` completed inner steps, ascending.

        A send whose result would come too late is not made: with `flush`, one that would be merged
        at the last inner step or later (the flush contains that work); without, one that would be
        merged after the last inner step.
        """
        if not self._is_sending(inner_step):
            return ()
        return tuple(
            fragment_id
            for fragment_id, phase in enumerate(self.phases)
            if (inner_step - phase) % self.inner_steps_per_round == 0
        )

    def num_sends(self, fragment_id: int, after: int = 0) -> int:
        """Count the inner steps > `after` >= 0 at which a fragment is sent."""
        first = self.next_due(fragment_id, after)
        if first is None:
            return 0
        last = self.inner_steps - self.flush - self.overlap_steps
        return (last - first) // self.inner_steps_per_round + 1

    def next_due(self, fragment_id: int, after: int) -> int | None:
        """Return the first inner step > `after` >= 0 at which a fragment is sent; None if none."""
        period = self.inner_steps_per_round
        step = after + 1 + (self.phases[fragment_id] - after - 1) % period
        return step if self._is_sending(step) else None

    def _is_sending(self, inner_step: int) -> bool:
        """Say whether what is sent at a step is merged in time; see `due`."""
        return inner_step >= 1 and self.merge_step(inner_step) <= self.inner_steps - self.flush

    def merge_step(self, due_step: int) -> int:
        """Return the inner step after which what was sent at `due_step` is merged."""
        return due_step + self.overlap_steps
