"""What the ends of contributions say of an island's own training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from diloco.island.self_check import SelfCheck
from diloco.protocol.island.ledger import Verdict


def test_three_refusals_of_one_fragment_in_a_row_are_unsound_whatever_others_do() -> None:
    parts: Any = SimpleNamespace(
        exchange=SimpleNamespace(island="west", unsound=(-1, "")),
        agreement=None,
        on_event=lambda event: None,
        schedule=SimpleNamespace(inner_steps_per_round=4),
        plan=SimpleNamespace(fragments=[None, None]),
    )
    check = SelfCheck(parts, parts)

    for number in range(3):
        assert not check.unsound
        check.take_end(0, Verdict.REFUSED, 4 * number)
        if number < 2:
            check.take_end(1, Verdict.INCLUDED, 4 * number + 2)

    assert check.unsound == "the syncer refused 3 contributions in a row"
