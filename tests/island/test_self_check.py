"""What the ends of contributions say of an island's own training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from diloco.island.self_check import SelfCheck
from diloco.protocol.island.ledger import Verdict


def made() -> SelfCheck:
    parts: Any = SimpleNamespace(
        exchange=SimpleNamespace(island="west", unsound=(-1, "")),
        agreement=None,
        on_event=lambda event: None,
        schedule=SimpleNamespace(inner_steps_per_round=4),
        plan=SimpleNamespace(fragments=[None, None]),
    )
    return SelfCheck(parts, parts)


def test_three_refusals_of_one_fragment_in_a_row_are_unsound_whatever_others_do() -> None:
    check = made()

    for number in range(3):
        assert not check.unsound
        check.take_end(0, Verdict.REFUSED, 4 * number)
        if number < 2:
            check.take_end(1, Verdict.INCLUDED, 4 * number + 2)

    assert check.unsound == "the syncer refused 3 contributions in a row"


def test_after_a_refusal_only_that_fragment_is_sent_until_it_counts() -> None:
    check = made()
    assert not check.before_send(1, 4, is_flush=False)

    check.take_end(0, Verdict.REFUSED, 4)
    assert not check.before_send(0, 8, is_flush=False)
    assert "the last contribution to fragment 0 was refused" in check.before_send(
        1, 8, is_flush=False
    )
    assert check.before_send(0, 8, is_flush=True)

    check.take_end(0, Verdict.INCLUDED, 8)
    assert not check.before_send(1, 12, is_flush=False)
    assert not check.before_send(1, 12, is_flush=True)
