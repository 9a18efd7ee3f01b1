"""Which run checkpoints are good, which are kept, and when a run returns: decisions alone."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import pytest

from diloco.protocol.run.candidates import Candidates, CheckpointVerdict, JudgeRules, newest_first

RULES = JudgeRules(most_rise=0.1, most_returns=2)
TWO = ("east", "west")


class Run:
    """Candidates whose entries are applied at once, and again to a restarted one."""

    def __init__(self, islands: Collection[str] = TWO, rules: JudgeRules = RULES) -> None:
        self.candidates = Candidates()
        self.islands, self.rules = islands, rules
        self.complete: tuple[int, ...] = ()
        self.timeline = 0

    def vote(self, number: int, *losses: float) -> CheckpointVerdict | None:
        self.complete = self.candidates.kept({*self.complete, number}, 2)
        for island, loss in zip(self.islands, losses, strict=False):
            self.apply(
                self.candidates.voted(
                    island, number, loss,
                    voters=lambda _: self.islands, complete=self.complete, rules=self.rules,
                )
            )  # fmt: skip
        return self.candidates.verdict(number)

    def all_say(self, number: int, loss: float) -> CheckpointVerdict | None:
        return self.vote(number, *[loss] * len(self.islands))

    def go_back(self) -> int:
        """Make the return that is decided."""
        pending = self.candidates.pending
        assert pending is not None
        self.timeline += 1
        self.complete = tuple(n for n in self.complete if n <= pending.to)
        self.apply(self.candidates.resumed(pending.to, self.timeline, is_return=True))
        return pending.to

    def apply(self, entries: tuple[tuple[str, str], ...]) -> None:
        self.candidates.apply(entries)
        again = Candidates()  # what a restarted coordinator knows
        again.apply(entries)
        if entries:
            assert again._state == self.candidates._state


def test_an_island_alone_sets_no_standard_of_what_is_good() -> None:
    for lie in (0.0, 1e9):
        two, three = Run(), Run(("east", "north", "west"))
        assert two.vote(1, 2.0, lie) is CheckpointVerdict.DISPUTED
        assert "east 2.0000, west" in two.candidates.alarm
        assert three.vote(1, lie, 2.0, 2.1) is CheckpointVerdict.GOOD
        assert three.vote(2, lie, 5.5, 5.6) is CheckpointVerdict.BAD


def test_a_vote_that_is_repeated_is_judged_again_only_when_it_is_known_who_votes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidates, asked = Candidates(), list[int]()
    judge = candidates._judge

    def judging(votes: dict[str, float], num_voters: int, rules: JudgeRules) -> Any:
        asked.append(num_voters)
        return judge(votes, num_voters, rules)

    monkeypatch.setattr(candidates, "_judge", judging)

    def repeat(who: Collection[str]) -> None:
        for island in TWO * 5:
            entries = candidates.voted(
                island, 1, 2.0, voters=lambda _: who, complete=(), rules=RULES
            )
            candidates.apply(entries)

    repeat(())  # a cut of which parts are missing
    assert candidates.verdict(1) is None and asked == [0, 0]
    repeat(TWO)

    assert candidates.verdict(1) is CheckpointVerdict.GOOD and asked == [0, 0, 2]


@pytest.mark.parametrize(
    ("islands", "losses", "verdict"),
    [
        (("a",), (2.0,), CheckpointVerdict.GOOD),
        (("a",), (3.0,), CheckpointVerdict.BAD),
        (("a",), (math.nan,), CheckpointVerdict.BAD),
        (("a", "b"), (2.0,), None),
        (("a", "b"), (3.0,), None),
        (("a", "b"), (2.0, 2.1), CheckpointVerdict.GOOD),
        (("a", "b"), (3.0, 9.0), CheckpointVerdict.BAD),
        (("a", "b"), (2.0, math.nan), CheckpointVerdict.DISPUTED),
        (("a", "b", "c"), (3.0,), None),
        (("a", "b", "c"), (2.0, 3.0), None),
        (("a", "b", "c"), (2.0, 3.0, 2.1), CheckpointVerdict.GOOD),
        (("a", "b", "c"), (math.inf, 3.0), CheckpointVerdict.BAD),
        (("a", "b", "c", "d"), (3.0, 3.0, 2.0, 2.0), CheckpointVerdict.DISPUTED),
        (("a", "b", "c", "d"), (3.0, 3.0, 2.0, 4.0), CheckpointVerdict.BAD),
    ],
)
def test_most_islands_judge_and_none_alone(
    islands: tuple[str, ...], losses: tuple[float, ...], verdict: CheckpointVerdict | None
) -> None:
    run = Run(islands)
    run.all_say(1, 2.0)

    assert run.vote(2, *losses) is verdict


def test_an_island_that_says_another_loss_moves_no_reference() -> None:
    run = Run(("a", "b", "c"))
    for number in range(1, 9):
        assert run.vote(number, 2.0, 2.0, 1e-9) is CheckpointVerdict.GOOD
    assert run.vote(9, 2.1, 2.1, 1e9) is CheckpointVerdict.GOOD


def test_losses_that_rise_in_small_steps_are_bad_in_the_end() -> None:
    run = Run(rules=JudgeRules(0.1, most_returns=0))
    verdicts = [run.all_say(number, 2.0 * 1.03**number) for number in range(1, 12)]

    assert verdicts.index(CheckpointVerdict.BAD) == 6
    assert CheckpointVerdict.GOOD not in verdicts[6:]


def test_the_last_good_checkpoints_are_kept_however_many_follow() -> None:
    run = Run(rules=JudgeRules(0.1, most_returns=0))
    run.all_say(1, 2.0)
    run.all_say(2, 1.9)
    assert run.complete == (1, 2)

    for number in range(3, 40):
        run.vote(number, *([5.5, 5.5] if number % 2 else [1.9]))
        assert run.complete == (1, 2, number)
    run.all_say(40, 1.9)
    run.all_say(41, 1.9)
    run.all_say(42, 1.9)

    assert run.complete == (40, 41, 42)
    assert newest_first((2, 38, 39), run.candidates) == [38, 2, 39]


def test_a_run_of_which_none_is_judged_keeps_the_newest_as_ever() -> None:
    candidates = Candidates()

    assert candidates.kept({1, 5, 9}, 2) == (5, 9)
    assert newest_first((5, 9), candidates) == [9, 5]


def test_two_bad_ones_in_a_row_or_one_that_is_not_finite_lead_back() -> None:
    run = Run()
    run.all_say(1, 2.0)
    run.all_say(2, 5.5)
    assert run.candidates.pending is None
    assert "5.5" in run.candidates.alarm
    run.all_say(3, 2.0)
    assert not run.candidates.alarm
    run.all_say(4, 5.5)
    run.all_say(5, 5.5)
    assert run.candidates.pending is not None
    assert "east 5.5000, west 5.5000" in run.candidates.pending.why

    assert run.go_back() == 3
    assert run.candidates.last_return
    assert run.candidates.verdict(4) is None, "it will be made again"
    assert run.all_say(4, 2.0) is CheckpointVerdict.GOOD
    run.all_say(5, math.nan)

    assert run.go_back() == 4


def test_a_return_that_does_not_help_is_followed_by_one_to_an_older_one_then_by_the_end() -> None:
    run = Run()
    run.all_say(1, 2.0)
    run.all_say(2, 2.0)
    run.all_say(3, math.inf)
    assert run.go_back() == 2
    run.all_say(3, math.inf)
    assert run.go_back() == 1
    assert not run.candidates.is_lost(RULES)
    run.all_say(2, math.inf)

    assert run.candidates.is_lost(RULES)


def test_returns_count_no_more_once_five_good_ones_follow() -> None:
    run = Run()
    run.all_say(1, 2.0)
    for first in (2, 12, 22, 32):
        run.all_say(first, math.inf)
        run.go_back()
        assert not run.candidates.is_lost(RULES)
        for number in range(first, first + 5):
            run.all_say(number, 2.0)
        assert not run.candidates.last_return


def test_nothing_to_return_to_and_no_returns_wanted_are_alarms_alone() -> None:
    run, unwanted = Run(), Run(rules=JudgeRules(0.1, most_returns=0))
    run.all_say(1, math.nan)
    unwanted.all_say(1, 2.0)
    unwanted.all_say(2, math.nan)

    assert run.candidates.pending is unwanted.candidates.pending is None
    assert run.candidates.alarm and unwanted.candidates.alarm


def test_what_an_operator_resumes_counts_as_calm() -> None:
    run = Run()
    run.all_say(1, 2.0)
    run.all_say(2, math.nan)
    run.go_back()
    assert run.candidates.num_returns == 1
    assert run.candidates.is_followed(0)

    run.apply(run.candidates.resumed(1, 2, is_return=False))

    assert run.candidates.num_returns == 0
    assert not run.candidates.is_followed(1)
    assert run.candidates.is_followed(2)


def test_what_a_newer_program_wrote_is_refused_and_not_half_read() -> None:
    with pytest.raises(ValueError, match="later"):
        Candidates().apply([("candidates", '{"num_bad": 1, "later": 1}')])
