"""Late work that the next contribution carries, by hand."""

from __future__ import annotations

import pytest
import torch

from diloco.island.exchange.late import Over


def test_late_work_is_carried_without_the_share_that_the_merge_has_kept() -> None:
    over = Over()
    assert over.of(0) is None

    over.missed(0, torch.tensor([3.0, 4.0]), 0.25)

    carried = over.of(0)
    assert carried is not None and carried.tolist() == [2.25, 3.0]
    assert over.of(1) is None


def test_what_piles_up_has_at_most_the_norm_of_the_last_included_delta() -> None:
    over = Over()
    over.included(0, torch.tensor([0.0, 2.0]))

    over.missed(0, torch.tensor([3.0, 4.0]), 0.0)  # 5, cut to 2
    over.missed(0, torch.tensor([3.0, 4.0]), 0.0)  # 7, cut to 2

    carried = over.of(0)
    assert carried is not None and carried.tolist() == pytest.approx([1.2, 1.6])


def test_before_any_is_included_its_own_norm_is_the_bound() -> None:
    over = Over()
    over.missed(0, torch.tensor([3.0, 4.0]), 0.0)

    over.missed(0, torch.tensor([0.3, 0.4]), 0.0)

    carried = over.of(0)
    assert carried is not None and carried.tolist() == pytest.approx([0.3, 0.4])


def test_an_included_contribution_uses_it_up_and_what_is_not_finite_is_lost() -> None:
    over = Over()
    over.missed(0, torch.tensor([1.0]), 0.0)
    over.missed(0, torch.tensor([float("nan")]), 0.0)
    carried = over.of(0)
    assert carried is not None and carried.tolist() == [1.0]

    over.included(0, torch.tensor([1.0]))

    assert over.of(0) is None
