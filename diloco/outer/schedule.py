"""Computes after which inner steps a fragment is sent, and after which its result is merged.

Every H inner steps each fragment is sent once. The sends of different fragments are spread over
these H steps, so that the link is used evenly, and the result of a send is merged tau steps later,
so that training does not wait for the network:

    H = 6, P = 3, tau = 1:    inner step   1  2  3  4  5  6  7  8 ...
                              sends           0     1     2     0
                              merges             0     1     2

Rounds may grow: the first has fewer inner steps, each one more than the one before, up to H. In the
first rounds islands are then almost data parallel, when their steps differ most.

    first 2, H = 4, P = 1:    rounds end after 2, 5, 9, 13, 17 ... inner steps

The same configuration gives the same steps on every island, so islands need not agree on anything
at run time.

Source: Streaming DiLoCo (arXiv 2501.18512), staggered fragments with overlap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from diloco.errors import ConfigError


def grown_steps(full: int, first: int) -> int:
    """Return the inner steps of the rounds that grow from `first` to `full`; `first` 0: none."""
    return (first + full - 1) * (full - first) // 2 if first else 0


def round_of(inner_step: int, full: int, first: int) -> tuple[int, int, int]:
    """Return the round that has begun by an inner step: its number r, B_r and L_r (`Schedule`).

    Args:
        inner_step: Completed inner steps.
        full: H.
        first: F; 0: H.
    """
    first = first or full
    if inner_step >= (grown := grown_steps(full, first)):
        number, rest = divmod(inner_step - grown, full)
        return full - first + number, inner_step - rest, full
    # The largest r for which B_r = F r + r (r - 1) / 2 <= s.
    number = (math.isqrt((2 * first - 1) ** 2 + 8 * inner_step) - (2 * first - 1)) // 2
    return number, first * number + number * (number - 1) // 2, first + number


def num_rounds(inner_steps: int, full: int, first: int) -> int:
    """Count the rounds that a run of so many inner steps begins; see `round_of`."""
    number, begin, _ = round_of(inner_steps, full, first)
    return number + (begin < inner_steps)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps at which every fragment of a scheduled run is sent and merged.

    Round r = 0, 1, ... has L_r = min(F + r, H) inner steps, and begins after B_r = L_0 + ... +
    L_(r-1). Fragment p is due (to be sent) after inner step B_r + floor(L_r phase_p / H) >= 1; what
    is sent after inner step s is merged after s + tau. With F = H these are the s >= 1 for which
    (s - phase_p) mod H = 0.

    Attributes:
        inner_steps_per_round: H, inner steps between two sends of the same fragment, >= 1.
        first_round: F, that of the first round, in [1, H].
        num_fragments: P, >= 1.
        overlap_steps: tau, inner steps between sending a fragment and merging its result, in
            [0, F); 0 merges at once.
        inner_steps: Inner steps of the whole run, >= 1.
        flush: Whether work that is not yet sent at the end goes into a last contribution of each
            fragment, the flush.
        phases: First due step of each fragment, in [0, H], in any order; 0 means H.
    """

    inner_steps_per_round: int
    first_round: int
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
        if not 1 <= self.first_round <= period:
            raise ConfigError(
                f"outer.first_inner_steps_per_round = {self.first_round} is outside [1, {period}]: "
                "rounds grow from it to outer.inner_steps_per_round"
            )
        if not 0 <= self.overlap_steps < self.first_round:
            raise ConfigError(
                f"outer.overlap_steps = {self.overlap_steps} is outside [0, {self.first_round}): a "
                "result must be merged before its fragment is due again; lower it or raise "
                "outer.inner_steps_per_round, and first_inner_steps_per_round"
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
        first_round: int = 0,
    ) -> Schedule:
        """Build a schedule; empty `phases` spread evenly: phase_p = floor(H (p + 1) / P).

        A `first_round` of 0 is one of H.

        Raises:
            ConfigError: Naming the field, its value and the allowed range.
        """
        spread = [inner_steps_per_round * p // num_fragments for p in range(1, num_fragments + 1)]
        return cls(
            inner_steps_per_round=inner_steps_per_round,
            first_round=first_round or inner_steps_per_round,
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
        lengths = range(self.first_round, self.inner_steps_per_round + 1)
        return not self.overlap_steps or all(
            self.overlap_steps < self._least_gap(length) for length in lengths
        )

    def _least_gap(self, length: int) -> int:
        """Return the fewest inner steps from one send to the next in rounds of a length."""
        dues = sorted({self._offset(p, length) % length for p in range(self.num_fragments)})
        return min(after - due for due, after in pairwise([*dues, dues[0] + length]))

    def due(self, inner_step: int) -> tuple[int, ...]:
        """Return the fragments to send after `inner_step` completed inner steps, ascending.

        A send whose result would come too late is not made: with `flush`, one that would be merged
        at the last inner step or later (the flush contains that work); without, one that would be
        merged after the last inner step.
        """
        if not self._is_sending(inner_step):
            return ()
        _, begin, length = self._round(inner_step)
        ends = (length,) if inner_step == begin else ()  # of the round before
        offsets = (inner_step - begin, *ends)
        return tuple(p for p in range(self.num_fragments) if self._offset(p, length) in offsets)

    def num_sends(self, fragment_id: int, after: int = 0) -> int:
        """Count the inner steps > `after` >= 0 at which a fragment is sent."""
        last = self.inner_steps - self.flush - self.overlap_steps
        return max(0, self._num_due(fragment_id, last) - self._num_due(fragment_id, after))

    def next_due(self, fragment_id: int, after: int) -> int | None:
        """Return the first inner step > `after` >= 0 at which a fragment is sent; None if none."""
        number, begin, length = self._round(after)
        step = begin + self._offset(fragment_id, length)
        if step <= after:
            step = begin + length + self._offset(fragment_id, self.round_length(number + 1))
        return step if self._is_sending(step) else None

    def last_due(self, fragment_id: int) -> int | None:
        """Return the last inner step at which a fragment is sent; None if there is none."""
        last = self.inner_steps - self.flush - self.overlap_steps
        number, begin, length = self._round(max(0, last))
        step = begin + self._offset(fragment_id, length)
        if step > last and number:
            length = self.round_length(number - 1)
            step = begin - length + self._offset(fragment_id, length)
        return step if self._is_sending(step) else None

    def round_length(self, number: int) -> int:
        """Return L_r, the inner steps of a round, the first of which has number 0."""
        return min(self.first_round + number, self.inner_steps_per_round)

    def _offset(self, fragment_id: int, length: int) -> int:
        """When a fragment is due in a round of that length, in inner steps from its begin."""
        return length * self.phases[fragment_id] // self.inner_steps_per_round

    def _round(self, inner_step: int) -> tuple[int, int, int]:
        return round_of(inner_step, self.inner_steps_per_round, self.first_round)

    def _num_due(self, fragment_id: int, until: int) -> int:
        """Count the inner steps in [1, `until`] at which a fragment is due."""
        if until < 1:
            return 0
        number, begin, length = self._round(until)
        has_come = begin + self._offset(fragment_id, length) <= until
        return number + has_come - (self._offset(fragment_id, self.first_round) == 0)

    def _is_sending(self, inner_step: int) -> bool:
        """Say whether what is sent at a step is merged in time; see `due`."""
        return inner_step >= 1 and self.merge_step(inner_step) <= self.inner_steps - self.flush

    def merge_step(self, due_step: int) -> int:
        """Return the inner step after which what was sent at `due_step` is merged."""
        return due_step + self.overlap_steps
