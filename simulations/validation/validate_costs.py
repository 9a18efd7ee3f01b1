"""What hosts take, calibrated once from real runs without a link, for all points of a codec.

Two runs whose fragments differ in size; of every phase of a round a line is put through both:

    seconds of a fragment = each + rate * values

so that nothing is fitted to a point that a prediction is judged by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from diloco.simulations.runs.costs import HostCosts

#: What an island waits for, one after the other, where nothing is hidden.
_WAITED_FOR = ("up", "commit", "down")
_REST = "rest"


@dataclass(frozen=True, slots=True)
class Calibration:
    """A run without a link.

    Attributes:
        numel: Values of a fragment.
        phases: By phase its seconds a fragment (`validate_run.figures`).
    """

    numel: float
    phases: Mapping[str, float]

    def seconds(self, phase: str) -> float:
        """Give the seconds of a phase; the rest is what an island waited for beyond all others."""
        if phase == _REST:
            known_s = sum(self.phases.get(each, 0.0) for each in _WAITED_FOR)
            return max(0.0, self.phases["wait"] - known_s)
        return self.phases.get(phase, 0.0)


@dataclass(frozen=True, slots=True)
class _Line:
    each_s: float
    rate_s: float


def host_costs(calibrations: Sequence[Calibration], *, num_islands: int) -> HostCosts:
    """Turn calibrations of a codec into the inputs of a simulation.

    Of the islands' calls the syncer's part cannot be told from theirs: up, it is what a syncer
    takes for a contribution, of all islands one after the other, as they share this machine; down,
    what a fetch carries and decodes. The merge is a part of the commit.

    Args:
        calibrations: Runs of one codec whose fragments differ in size; of one alone nothing is
            constant.
        num_islands: That sent at the same time.
    """
    lines = {
        phase: _line(calibrations, phase)
        for phase in (*_WAITED_FOR, "encode", "gather", "merge", _REST)
    }
    encode_s = lines["encode"].rate_s
    down_s = lines["down"].rate_s + lines[_REST].rate_s
    return HostCosts(
        collect_s=lines["gather"].rate_s,
        distribute_s=lines["merge"].rate_s,
        encode_s=encode_s,
        stage_s=encode_s,
        plain_s=encode_s,
        carry_s=max(0.0, down_s - encode_s),
        verify_s=max(0.0, lines["up"].rate_s - encode_s) / num_islands,
        decode_s=0.0,
        outer_s=0.0,
        publish_s=0.0,
        commit_s=lines["commit"].rate_s,
        commit_round_s=lines["commit"].each_s + lines[_REST].each_s,
        call_s=(lines["up"].each_s + lines["down"].each_s) / 2,
        lane_s=0.0,  # in those of the call
        byte_s=0.0,  # in what is carried by value, as a calibration is of one codec
    )


def _line(calibrations: Sequence[Calibration], phase: str) -> _Line:
    """Put a line through the smallest and the largest fragments; neither part is negative."""
    small, large = (choose(calibrations, key=lambda each: each.numel) for choose in (min, max))
    low_s, high_s = small.seconds(phase), large.seconds(phase)
    if large.numel == small.numel or high_s * small.numel >= low_s * large.numel:
        return _Line(0.0, high_s / large.numel)  # more than in proportion: nothing is constant
    rate_s = max(0.0, (high_s - low_s) / (large.numel - small.numel))
    return _Line(max(0.0, high_s - rate_s * large.numel), rate_s)
