"""Measures the contributions to one merge for the guard, lane by lane while they are merged.

See `diloco.outer.guard`, which judges.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from diloco.outer.aggregate import measured
from diloco.outer.fragments import Fragment, buffer_runs
from diloco.outer.guard import (
    KINDS,
    LEAST_COMPARED,
    Floats,
    History,
    Round,
    Sample,
    cosine_of_two,
    is_unsettled,
    refused,
    sampling_stride,
)
from diloco.outer.units import Unit
from diloco.protocol.rounds.terms import Contributor
from diloco.versions.gram_matrices import units_in
from diloco.versions.publication import PublicationRules
from diloco.versions.version import VersionRecord


class MergeWatch:
    """Measures of the contributions to one merge; lanes may be measured in any thread.

    Every lane is measured once, and its contributions in their order. Nothing is measured where
    the rules have no guard.
    """

    def __init__(
        self,
        fragment: Fragment,
        units: Sequence[Unit],
        rules: PublicationRules,
        contributors: Sequence[Contributor],
        base: VersionRecord,
        *,
        is_flush: bool,
        rejected_in_a_row: int = 0,
    ) -> None:
        """Make room for samples; `base` is the version before, of which nothing has moved yet.

        A flush is of whatever was left, and says nothing about a round, nor about directions.
        `rejected_in_a_row` attempts before this one expired with all its members refused.
        """
        self._fragment, self._units = fragment, units
        self._is_on = rules.merge.guard
        self._contributors = contributors
        self._base = base
        history = History.from_bytes(base.guard, len(units))
        self._history = history.unless_rejected(rejected_in_a_row)
        #: By lane: what was measured of its units, [contributions, kinds, units].
        self._found: dict[int, Floats] = {}
        self._own: dict[int, tuple[Floats, Floats]] = {}
        self._is_flush = is_flush
        num_counted = sum(c.weight_tokens > 0 for c in contributors)
        #: What was sampled of each contribution, in their order, lane by lane; a vector each, since
        #: little ones would lie scattered between those of the merge.
        self._samples: list[Sample] = []
        self._sampled_before: list[int] = []
        if self._is_on and not is_flush and num_counted >= LEAST_COMPARED:
            sampled = (int(self._sampling(lane.lane_id)[1].sum()) for lane in fragment.lanes)
            self._sampled_before = [*itertools.accumulate(sampled, initial=0)]
            size = self._sampled_before[-1]
            self._samples = [np.empty(size, np.float32) for _ in contributors]

    def lane(self, lane_id: int) -> Callable[[Tensor], None]:
        """Begin a lane; returns what is to be called with each decoded contribution to it."""
        if not self._is_on:
            return lambda delta: None
        _, places = units_in(self._fragment, self._units, lane_id)
        found = self._found[lane_id] = np.zeros((len(self._contributors), len(KINDS), len(places)))
        order = itertools.count()
        if is_unsettled(self._history):
            self._own[lane_id] = measured(self._base.lanes[lane_id].published, places)
        samples: list[Sample] = []
        if self._samples:
            places_sampled, is_sampled = self._sampling(lane_id)
            start, end = self._sampled_before[lane_id : lane_id + 2]
            samples = [of_all[start:end] for of_all in self._samples]

        def look(delta: Tensor) -> None:
            m = next(order)
            found[m] = measured(delta, places)
            if samples:
                samples[m][:] = delta[places_sampled].numpy()[is_sampled]

        return look

    def outliers(self) -> dict[str, str]:
        """Say whom the guard refuses, and why, once all lanes were measured."""
        if not self._is_on:
            return {}
        found = refused(self._round(), self._samples, self._history, self._units)
        return {self._contributors[m].island: why for m, why in found.items()}

    def guard(self) -> bytes:
        """Give what the guard knows after this merge, for its record; before it, as many bytes."""
        if not self._is_on:
            return b""
        history = self._history
        if not self._is_flush:
            seen = self._round()
            cosine = cosine_of_two(self._samples if self._found else (), seen)
            history = history.after(seen.sizes, seen.steps, cosine)
        return history.to_bytes()

    def _sampling(self, lane_id: int) -> tuple[slice, npt.NDArray[np.bool_]]:
        """Say which values of a lane are sampled: the same of the fragment however it is cut.

        Returns:
            A slice of the lane, and which of its values are of no buffer.
        """
        lane = self._fragment.lanes[lane_id]
        stride = sampling_stride(self._fragment.padded_numel, len(self._contributors))
        positions = np.arange(-lane.start % stride, lane.numel, stride)
        is_sampled = np.ones(len(positions), bool)
        for place, is_buffer in buffer_runs(self._fragment, lane_id):
            if is_buffer:
                is_sampled &= (positions < place.start) | (positions >= place.stop)
        return slice(-lane.start % stride, lane.numel, stride), is_sampled

    def _round(self) -> Round:
        num = len(self._contributors)
        squares, largest = np.zeros((2, num, len(self._units)))
        own = np.zeros((len(KINDS), len(self._units)))
        # Added in the order of lanes, whichever was measured first.
        for lane_id in sorted(self._found):
            indices, _ = units_in(self._fragment, self._units, lane_id)
            for m, (sums, peaks) in enumerate(self._found[lane_id]):
                squares[m, indices] += sums
                largest[m, indices] = np.maximum(largest[m, indices], peaks)
            if lane_id in self._own:
                sums, peaks = self._own[lane_id]
                own[0, indices] += sums
                own[1, indices] = np.maximum(own[1, indices], peaks)
        own[0] = np.sqrt(own[0])
        return Round(
            np.stack([np.sqrt(squares), largest], axis=1),
            np.array([c.weight_steps for c in self._contributors], float),
            [c.weight_tokens for c in self._contributors],
            own,
        )
