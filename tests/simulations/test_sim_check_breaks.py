"""Every row of `diloco sim check` fails when what it is a row of is broken."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.compression.sparse import TopKCodec
from diloco.outer import fragments
from diloco.outer.optimizer import OuterOptimizer
from diloco.outer.schedule import Schedule
from diloco.protocol.rounds.timing import MeasuredTiming
from diloco.simulations.engine.network import Pipe
from diloco.simulations.goodput import decoupled_table
from diloco.simulations.goodput.config import RoundsConfig
from diloco.simulations.goodput.failures import Fleet, simulate_fleet
from diloco.simulations.goodput.lifetimes import Lifetimes
from diloco.simulations.goodput.rounds import FragmentSyncer
from diloco.simulations.published import check
from diloco.simulations.published import goodput as published
from diloco.simulations.published.check_row import Comparison, Miss
from diloco.simulations.scenarios import utilization

_rounds = RoundsConfig.rounds
_rules = utilization.syncer_rules
_draw = Lifetimes.draw
_line_bits = utilization.line_bits


def _all_known_or_none(self: Any, members: Any) -> tuple[float, float] | None:
    """Give a grace only where all members have made steps, as it was once."""
    is_known = len(self._steps.of(members)) == len(members)
    return _slack_terms(self, members) if is_known else None


_slack_terms = MeasuredTiming.slack_terms


class _TwoStepsLater:
    """Schedules that merge two steps later than they should, where there are as many."""

    @staticmethod
    def make(**given: Any) -> Schedule:
        later = 2 if given["inner_steps_per_round"] > 3 else 0
        return Schedule.make(**{**given, "overlap_steps": given["overlap_steps"] + later})


#: What is broken -> (target, part of the rows that must fail, whose attribute, which, its break).
BREAKS: dict[str, tuple[str, str, Any, str, Any]] = {
    "diloco-sends-all-twice": (
        "A4", "outer share", utilization, "line_bits",
        lambda scenario: _line_bits(scenario) * (1 + (scenario.method == "diloco")),
    ),
    "diloco-overlaps": ("A11", "utilisation", utilization, "Schedule", _TwoStepsLater),
    "short-rounds-overlap": ("A12", "utilisation", utilization, "Schedule", _TwoStepsLater),
    "streaming-overlaps-more": ("A13", "4 bits", utilization, "Schedule", _TwoStepsLater),
    "codec-of-bytes": ("A12", "topk64", TopKCodec, "wire_bytes", lambda self, numel: numel),
    "learners-wait-for-all": (
        "A5", "as one job", decoupled_table, "simulate_fleet",
        functools.partial(simulate_fleet, waits_for_all=True),
    ),
    "no-grace-under-failures": ("A5", "in rounds", MeasuredTiming, "grace_s", lambda *_: 0.0),
    "long-stops": ("A6", "trains, in 30 days", Fleet, "stop_s", property(lambda _: 120.0)),
    "no-grace": ("A7", "K=1 + grace", MeasuredTiming, "grace_s", lambda *_: 0.0),
    "a-grace-for-all": ("A7", "K=1: goodput", MeasuredTiming, "grace_s", lambda *_: 5.0),
    "another-quorum": (
        "A7", "K=1: goodput", RoundsConfig, "rounds",
        lambda self, m: _rounds(self, m) if self.merge == "scheduled" else replace(
            _rounds(self, m), quorum=m
        ),
    ),
    "nobody-waits": ("A7", "K=8", FragmentSyncer, "until", lambda self, version: iter(())),
    "joiners-are-no-members": ("A8", "wall time", FragmentSyncer, "join", lambda *_: None),
    "no-grace-while-one-joins": (
        "A9", "a copy of", MeasuredTiming, "slack_terms", _all_known_or_none,
    ),
    "rounds-wait-for-who-joins": (
        "A9", "a copy of", utilization, "syncer_rules",
        lambda *given: replace(_rules(*given), quorum=None),
    ),
    "three-outer-vectors": (
        "A14", "momentum", OuterOptimizer, "has_second_moment", property(lambda _: True),
    ),
    "fewer-fragments": (
        "A14", "2 of 36", published, "make_plan",
        lambda layers, num_fragments: fragments.make_plan(layers, num_fragments=12),
    ),
    "lives-twice-as-long": (
        "A16", "failures", Lifetimes, "draw", lambda self, n, rng: 2 * _draw(self, n, rng),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_row_fails_when_what_it_is_a_row_of_is_broken(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, what, broken, attribute, instead = BREAKS[name]
    monkeypatch.setattr(broken, attribute, instead)

    verdicts = {row.what: row.verdict for row in check.check([target]) if what in row.what}

    assert verdicts
    assert "FAIL" in verdicts.values(), verdicts


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_known_misses_fail_when_lines_carry_what_they_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(utilization, "Pipe", lambda name, bandwidth_bps: Pipe(name, math.inf))

    verdicts = [row.verdict for row in check.check(["A10"]) if row.what.startswith("decoupled")]

    assert verdicts == ["FAIL", "FAIL"]


def test_a_known_miss_is_one_only_where_ours_is_what_is_known() -> None:
    def row(ours: float, *, holds: bool = True) -> str:
        miss = Miss(3.0, "why")
        return Comparison("A0", "", 1.0, ours, 0.1, True, "", "", holds, miss).row.verdict

    assert (row(1.0), row(3.2), row(2.0)) == ("pass", "miss", "FAIL")
    assert row(1.0, holds=False) == row(3.0, holds=False) == "FAIL"


@given(groups=st.integers(1, 6), copies=st.integers(1, 3), lost=st.integers(0, 5))
def test_peers_survive_at_least_as_often_as_the_papers_bound_says(
    groups: int, copies: int, lost: int
) -> None:
    """1 - (N / m) C(N - m, k - m) / C(N, k), which counts ways that lose two groups twice."""
    machines, lost = groups * copies, min(lost, groups * copies)
    among: Callable[[int, int], int] = math.comb
    bound = 1.0
    if lost >= copies:
        bound -= groups * among(machines - copies, lost - copies) / among(machines, lost)

    counted = published.peers_survive(machines, copies, lost)

    assert counted >= bound - 1e-12
    if lost < 2 * copies:
        assert counted == pytest.approx(bound)


@given(write=st.floats(0.1, 90), interval=st.floats(1, 60), read=st.floats(0, 60))
def test_a_failure_loses_the_write_half_an_interval_and_the_read(
    write: float, interval: float, read: float
) -> None:
    lost = published.lost_to_checkpoints(write, interval, read)

    # Of 1,000 moments, one may lie on the other side of the end of a write.
    assert lost == pytest.approx(write + interval / 2 + read, abs=2e-3 * interval)
