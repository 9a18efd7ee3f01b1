"""What the ends of contributions, and an island's own losses, say of its training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from diloco.island.agreement import Agreement
from diloco.island.self_check import SelfCheck
from diloco.protocol.island.ledger import FragmentLedger, Verdict
from diloco.protocol.island.soundness import Mend
from diloco.protocol.island.votes import NOT_FOLLOWED, FragmentView, IslandVote
from diloco.telemetry.events import AlarmRaised, Event, LossAccepted


class Site:
    """A check, and what it made of the rest: events and released sends, with why they are not."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.released: list[tuple[int, str]] = []
        self.losses = 2.5, 2.6
        self.view = FragmentView(contributors=("east", "north", "south", "west"))
        parts: Any = SimpleNamespace(
            exchange=SimpleNamespace(
                island="west",
                unsound=(-1, ""),
                failure=None,
                verify_anchors=lambda: None,
                view=lambda fragment_id: self.view,
            ),
            agreement=Agreement(None),
            on_event=self.events.append,
            schedule=SimpleNamespace(inner_steps_per_round=4),
            plan=SimpleNamespace(fragments=[None, None]),
        )
        merging: Any = SimpleNamespace(
            trying=self._trying,
            release=lambda *args: self.released.append(args),
            take_published=lambda ledger: 0,
        )
        self.check = SelfCheck(parts, merging)

    def _trying(self, fragment_id: int, loss_of: object) -> Iterator[None]:
        yield from ()
        return self.losses  # type: ignore[return-value]

    def train(self, loss: float, num_steps: int, ledger: FragmentLedger) -> None:
        for _ in range(num_steps):
            ledger.local_steps = 1
            self.check.begin_step(loss, [ledger])

    def send(self, ledger: FragmentLedger, inner_step: int) -> bool:
        """Whether it was tried."""
        if is_tried := self.check.is_tried(ledger, ""):
            for _ in self.check.trying(ledger, inner_step, lambda: None):
                pass
        return is_tried


def test_three_refusals_of_one_fragment_in_a_row_are_unsound_whatever_others_do() -> None:
    check = Site().check

    for number in range(3):
        assert not check.unsound
        check.take_end(FragmentLedger(0, 0), Verdict.REFUSED, 4 * number)
        if number < 2:
            check.take_end(FragmentLedger(0, 1), Verdict.INCLUDED, 4 * number + 2)

    assert check.unsound == "the syncer refused 3 contributions in a row"


def test_after_a_refusal_only_that_fragment_is_sent_until_it_counts() -> None:
    check = Site().check
    assert not check.before_send(FragmentLedger(0, 1), 4, is_flush=False)

    check.take_end(FragmentLedger(0, 0), Verdict.REFUSED, 4)
    assert not check.before_send(FragmentLedger(0, 0), 8, is_flush=False)
    assert "the last contribution to fragment 0 was refused" in check.before_send(
        FragmentLedger(0, 1), 8, is_flush=False
    )
    assert check.before_send(FragmentLedger(0, 0), 8, is_flush=True)

    check.take_end(FragmentLedger(0, 0), Verdict.INCLUDED, 8)
    assert not check.before_send(FragmentLedger(0, 1), 12, is_flush=False)
    assert not check.before_send(FragmentLedger(0, 1), 12, is_flush=True)


def test_of_two_refused_fragments_each_is_sent_to_see_whether_it_counts() -> None:
    check = Site().check
    check.take_end(FragmentLedger(0, 0), Verdict.REFUSED, 4)
    check.take_end(FragmentLedger(0, 1), Verdict.REFUSED, 6)

    assert not check.before_send(FragmentLedger(0, 0), 8, is_flush=False)
    assert not check.before_send(FragmentLedger(0, 1), 8, is_flush=False)
    assert check.before_send(FragmentLedger(0, 2), 8, is_flush=False)


def test_a_flush_that_expired_without_it_is_sent_in_doubt_too() -> None:
    check = Site().check
    check.take_end(FragmentLedger(0, 0), Verdict.REFUSED, 4)

    assert check.before_send(FragmentLedger(0, 1), 8, is_flush=True)
    assert not check.before_send(FragmentLedger(0, 1, attempt=1), 8, is_flush=True)


def test_who_has_high_losses_tries_what_it_sends_and_keeps_what_makes_it_worse() -> None:
    site, ledger = Site(), FragmentLedger(0, 0)
    site.train(2.5, 20, ledger)
    assert not site.send(ledger, 20)

    site.train(3.3, 2, ledger)
    assert site.send(ledger, 22)

    ((fragment_id, reason),) = site.released
    assert fragment_id == 0 and reason == site.check.unsound
    assert reason.endswith("raised it, and its own loss is 3.3, where 2.5 is usual")


def test_what_is_better_is_sent_however_high_the_losses_are() -> None:
    site, ledger = Site(), FragmentLedger(0, 0)
    site.train(2.5, 20, ledger)
    site.train(3.3, 2, ledger)
    site.losses = 2.5, 2.4

    assert site.send(ledger, 22)

    assert site.released == [(0, "")] and not site.check.unsound


def test_where_no_island_sends_high_losses_are_taken_for_granted() -> None:
    site, ledger = Site(), FragmentLedger(0, 0)
    site.train(2.5, 20, ledger)
    site.train(3.3, 2, ledger)
    site.send(ledger, 22)

    site.check.take_end(FragmentLedger(0, 0), Verdict.EXPIRED, 22)

    (accepted,) = [event for event in site.events if isinstance(event, LossAccepted)]
    assert accepted.loss == 3.3 and "takes the held-out loss" in accepted.reason
    site.train(3.3, 20, ledger)
    assert not site.send(ledger, 42)


def test_a_high_loss_never_ends_an_island_by_itself() -> None:
    site, ledger = Site(), FragmentLedger(0, 0)
    site.train(2.5, 40, ledger)

    for number in range(5):  # the text has changed: within a few steps all trials fail
        site.train(3.3, 2, ledger)
        assert site.send(ledger, 42 + 2 * number)
        site.check.take_end(ledger, Verdict.DECLINED, 42 + 2 * number)
        assert site.check._take_return(42 + 2 * number) is Mend.MOMENTS
        assert site.check.is_in_doubt(42 + 2 * number)


def test_what_was_accepted_is_not_tried_again_though_a_version_asked_for_it() -> None:
    site, ledger = Site(), FragmentLedger(0, 0)
    site.train(2.5, 20, ledger)
    site.train(3.3, 2, ledger)
    ledger.asks_trial = True
    assert site.send(ledger, 22)

    site.check.take_end(ledger, Verdict.EXPIRED, 22)

    assert not site.send(ledger, 26)


def test_of_many_islands_none_tries_what_its_own_noise_outweighs() -> None:
    site, ledger = Site(), FragmentLedger(0, 0)
    site.train(2.5, 20, ledger)
    site.train(3.3, 2, ledger)

    site.view = FragmentView(contributors=(*site.view.contributors, "centre"))
    assert not site.send(ledger, 22)
    site.view = NOT_FOLLOWED
    assert not site.send(ledger, 22), "how many there are, other ranks know"


def test_what_is_declined_anyway_is_not_tried() -> None:
    ledger = FragmentLedger(0, 0, asks_trial=True)

    assert not Site().check.is_tried(ledger, "the last contribution was refused")


def test_where_others_were_merged_they_are_not() -> None:
    site, ledger = Site(), FragmentLedger(0, 0)
    site.train(2.5, 20, ledger)
    site.train(3.3, 2, ledger)
    site.send(ledger, 22)

    site.check.take_end(FragmentLedger(0, 0), Verdict.DECLINED, 22)
    site.check.take_end(FragmentLedger(0, 0), Verdict.EXPIRED, 26)

    assert not site.events


def test_a_loss_that_comes_late_is_asked_for_before_a_send_and_counts_for_its_own_step() -> None:
    site, ledger = Site(), FragmentLedger(0, 0)
    coming = [math.nan]
    site.check.late_loss = lambda: coming.pop() if coming else None
    ledger.local_steps = 1

    site.check.begin_step(None, [ledger])

    assert site.check.unsound == ""
    assert "the loss of this island is nan" in site.check.before_send(ledger, 1, is_flush=False)
    assert "the loss of this island is nan" in site.check.unsound
    assert coming == []


def test_a_return_says_for_which_loss_though_one_that_came_later_is_good() -> None:
    site, ledger = Site(), FragmentLedger(0, 0)
    coming = [2.5]
    site.train(math.nan, 1, ledger)
    site.check.take_vote(IslandVote(0, (), is_unsound=True))
    site.check.late_loss = lambda: coming.pop() if coming else None

    for _ in site.check.returning(None, [ledger], 2):
        pass

    (text,) = [event.text for event in site.events if isinstance(event, AlarmRaised)]
    assert text.startswith("after inner step 2 the loss of this island is nan, ")
    assert coming == [] and site.check.unsound == ""
