"""When an island's own losses, steps and refusals say that it must not send what it trained."""

from __future__ import annotations

import math
import random

import pytest
import torch

from diloco.outer.pseudo_gradient import farthest
from diloco.protocol.island.ledger import FragmentLedger, Settled, Verdict
from diloco.protocol.island.soundness import Mend, OwnLosses, Reach, Returns, StepBound, Trials

H = 8


def trained(num_steps: int = 100, loss: float = 2.5, spread: float = 0.1) -> OwnLosses:
    losses, rng = OwnLosses(H), random.Random(0)
    for _ in range(num_steps):
        losses.note(loss + rng.uniform(-spread, spread), 1)
    return losses


def test_a_loss_that_stays_far_off_forbids_sends_until_the_published_values_are_taken() -> None:
    losses = trained()

    for _ in range(2):
        losses.note(5.545, 1)
        assert not losses.reason, "one odd batch is none"
    losses.note(5.545, 1)

    assert losses.wants_return and "the loss of this island is 5.545, beyond" in losses.reason
    losses.returned()
    losses.note(2.5, 1)
    assert not (losses.reason or losses.wants_return or losses.is_astray)


def test_last_losses_that_are_high_ask_for_trials_until_they_are_usual() -> None:
    losses = trained()

    for loss in (3.3, 2.4, 3.2):
        losses.note(loss, 1)
    assert losses.high == "its own loss is 3.2, where 2.518 is usual" and not losses.reason
    losses.note(2.5, 1)
    losses.note(2.5, 1)
    assert not losses.high, "of the last three one is high"
    for _ in range(64):
        losses.note(3.2, 1)
    assert not losses.high, "for so long that it is usual"


def test_losses_that_fall_or_too_few_of_them_ask_for_no_trial() -> None:
    losses = OwnLosses(H)

    for step in range(200):
        losses.note((5.5 - 0.02 * step) * (1.1 if step % 3 else 1.0), 1)
        assert not losses.high
    few = OwnLosses(H)
    for loss in [2.5] * 10 + [3.5] * 5:
        few.note(loss, 1)
    assert not few.high


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_counts_at_once_however_few_are_known(loss: float) -> None:
    losses = OwnLosses(H)

    losses.note(loss, 1)

    assert losses.wants_return and losses.reason


@pytest.mark.parametrize(
    "told",
    [
        pytest.param([5.5 - 0.03 * step for step in range(100)], id="from-scratch"),
        pytest.param([*[2.5] * 50, 3.1, 3.6, 3.5, 3.2, 2.9, *[2.6] * 20], id="a-spike"),
        pytest.param([*[2.5] * 50, 9.0, 2.5, 9.0, 9.0, 2.5], id="odd-batches"),
        pytest.param([*[2.0] * 80, *[2.0 + 0.004 * s for s in range(100)]], id="restarted-rate"),
        pytest.param([8.0, 4.0, 3.0, *[2.0] * 30], id="warm-start"),
    ],
)
def test_what_happens_in_training_forbids_nothing(told: list[float]) -> None:
    losses = OwnLosses(H)

    for loss in told:
        losses.note(loss, 1)
        assert not (losses.reason or losses.wants_return)


@pytest.mark.parametrize("usual", [H + 1, 40], ids=["a-round", "a-slow-link"])
def test_a_merge_that_overwrites_what_was_trained_alone_forbids_nothing(usual: int) -> None:
    def falling(steps_since_start: float) -> float:
        return 2.5 + 3.0 * math.exp(-steps_since_start / 60)

    losses, published = OwnLosses(H), 0
    for local_steps in [*range(1, usual + 1)] * 3:
        losses.note(falling(published + local_steps), local_steps)
        published += local_steps // usual
    for local_steps in range(1, 250):  # the syncer is away
        losses.note(falling(published + local_steps), local_steps)
        assert not losses.reason
    for local_steps in [*range(1, usual + 1)] * 6:
        losses.note(falling(published + local_steps), local_steps)
        assert not losses.reason, "back to what was published before"


def test_what_breaks_while_it_trains_alone_is_found_and_after_it_too() -> None:
    losses = trained()
    for local_steps in range(1, 250):
        losses.note(2.5, local_steps)
    for local_steps in range(250, 253):
        losses.note(5.545, local_steps)

    assert losses.wants_return

    losses.returned()
    for local_steps in range(1, 4):
        losses.note(2.5, local_steps)
    for local_steps in range(4, 7):
        losses.note(5.545, local_steps)
    assert losses.wants_return


def test_where_rounds_are_long_its_losses_are_known_all_the_same() -> None:
    losses = OwnLosses(H)
    for local_steps in [*range(1, 101)] * 3:
        losses.note(2.5, local_steps)

    for local_steps in range(90, 93):
        losses.note(5.545, local_steps)

    assert losses.wants_return


def test_where_the_published_values_are_no_better_it_declines_and_does_not_return_again() -> None:
    losses = trained()
    for _ in range(3):
        losses.note(7.0, 1)
    losses.returned()

    for _ in range(20):
        losses.note(7.0, 1)
        assert losses.is_astray and losses.reason and not losses.wants_return
    for _ in range(3):
        losses.note(2.5, 1)

    assert losses.wants_return, "what it did meanwhile is not to be sent"
    assert losses.reason == "the loss of this island was far off, and is 2.5 again"
    losses.returned()
    losses.note(2.5, 1)
    assert not (losses.reason or losses.is_astray)


def test_losses_that_nobody_can_better_are_taken_for_granted() -> None:
    losses = trained()
    for _ in range(3):
        losses.note(7.0, 1)
    losses.returned()
    losses.note(7.0, 1)

    losses.accept()
    for _ in range(40):
        losses.note(7.0, 1)

    assert not (losses.reason or losses.wants_return or losses.is_astray)


def test_returns_mend_then_renew_then_give_up_and_are_forgotten() -> None:
    returns = Returns(24, num_fragments=2)

    assert returns.mend(100, is_new=False) is Mend.MOMENTS
    assert returns.mend(110, is_new=False) is Mend.ALL
    assert returns.is_recent(206) and not returns.is_recent(207)
    assert returns.mend(120, is_new=False) is None

    assert returns.mend(900, is_new=False) is Mend.MOMENTS
    returns.included(0)
    assert returns.mend(910, is_new=False) is Mend.ALL, "one fragment of two proves nothing"
    returns.included(0)
    returns.included(1)
    assert returns.mend(920, is_new=False) is Mend.MOMENTS
    assert returns.mend(2000, is_new=True) is Mend.ALL


def test_values_are_beyond_reach_by_what_the_steps_since_the_merge_allow() -> None:
    reach = Reach()
    for _ in range(10):
        reach = reach.after(StepBound(0.01, 0.001))
    anchor = torch.tensor([1.0, -100.0, 0.0])

    assert reach.limits == pytest.approx((0.2, 0.02))
    assert not farthest(torch.tensor([0.2, 2.1, -0.19]), anchor, reach.limits)
    found = farthest(torch.tensor([0.1, 0.1, -0.3]), anchor, reach.limits)
    assert found.startswith("value 2 is -0.3 from its anchor 0")
    assert not farthest(torch.tensor([9e9, 0.0, 0.0]), anchor, Reach(math.inf).limits)
    # A flipped anchor allows no more than weight decay of it would.
    assert farthest(torch.tensor([4.8e35]), torch.tensor([4.8e35]), reach.limits)


def test_a_merge_that_keeps_local_values_keeps_a_share_of_their_reach() -> None:
    reach = Reach(0.4, 0.02)

    assert reach.mixed(0.0, 5.0) == Reach()
    assert reach.mixed(0.5, 0.2) == Reach(pytest.approx(0.3), pytest.approx(0.01))


def test_work_that_was_given_up_counts_only_where_it_was_included() -> None:
    def returned_after_send() -> FragmentLedger:
        ledger = FragmentLedger(0, 0)
        for _ in range(4):
            ledger.count(10)
        ledger.send(4, is_flush=False)
        ledger.count(10)
        assert ledger.drop_work() == Settled(1, 10)
        ledger.count(10)
        return ledger

    included, declined, expired = (returned_after_send() for _ in range(3))

    assert included.settle(Verdict.INCLUDED, attempt=0, local_mix=0.0).dropped_tokens == 0
    assert declined.settle(Verdict.DECLINED, attempt=0, local_mix=0.0).dropped_tokens == 50
    assert expired.settle(Verdict.EXPIRED, attempt=1, local_mix=0.0).dropped_tokens == 40
    assert [(x.tokens, x.steps) for x in (included, declined, expired)] == [
        (10, 1),
        (0, 0),
        (10, 1),
    ]


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        pytest.param([-0.9, -0.3, 0.02, -0.1, -0.04, -0.2, 0.01], [], id="sound"),
        pytest.param([0.3, -0.3, -0.1], [0], id="a-rise"),
        pytest.param([-0.02, 0.02, 0.01, -0.01, -0.01, 0.0, -0.01, 0.02], [2], id="noise"),
        pytest.param([math.nan], [0], id="not-finite"),
    ],
)
def test_what_raises_the_held_out_loss_or_leaves_it_to_chance_is_not_sent(
    changes: list[float], refused: list[int]
) -> None:
    trials = Trials()

    worse = [trials.is_worse(2.5, 2.5 * (1 + percent / 100)) for percent in changes]
    below_zero = Trials()
    assert [below_zero.is_worse(-2.0, after) for after in (-2.1, -1.9)] == [False, True]

    assert [index for index, is_worse in enumerate(worse) if is_worse] == refused
    assert not trials.is_worse(math.nan, math.nan), "what is published is not this island's fault"
