"""Assigns fragments to syncers, with the first join and for good.

Source: PROTOCOL.md, "Fragments and lanes".
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from diloco.outer.assignment import assign_fragments
from diloco.outer.fragments import Plan
from diloco.protocol.run.admission import Entries

#: Of the journal's entry; a run with one syncer has none.
ASSIGNED = "syncers"


@dataclass(slots=True)
class FragmentAssignment:
    """Fragments of each syncer of a run.

    Args:
        shares: Name and share of each syncer of the run, in order, from its first start to its end.
        fragments: Of each syncer, as it was decided; empty before the first join, and for the only
            syncer of a run, which has all of them.
    """

    shares: Mapping[str, float] = field(default_factory=lambda: {"syncer": 1.0})
    fragments: tuple[tuple[int, ...], ...] = ()

    @property
    def num_syncers(self) -> int:
        """How many syncers the run has."""
        return len(tuple(self.shares.values()))

    def decided(self, plan_json: str) -> Entries:
        """Spread the fragments of a new run's plan; no entry where there is nothing to decide.

        Raises:
            ConfigError: If there are more syncers than fragments.
            PlanMismatch: If it is no plan.
        """
        if self.num_syncers == 1:
            return ()
        assigned = assign_fragments(Plan.from_json(plan_json), tuple(self.shares.values()))
        return ((ASSIGNED, json.dumps(assigned)),)

    def apply(self, entries: Mapping[str, str]) -> None:
        """Take over what is durable."""
        if ASSIGNED in entries:
            self.fragments = tuple(map(tuple, json.loads(entries[ASSIGNED])))

    def of(self, syncer_id: int, plan_json: str) -> list[int]:
        """Give the fragments of one syncer; none before the first join."""
        if self.fragments:
            return list(self.fragments[syncer_id])
        if not plan_json or self.num_syncers > 1:
            return []
        return list(range(_num_fragments(plan_json)))

    def of_all(self, plan_json: str) -> list[int]:
        """Give the fragments of the run; none before the first join."""
        return sorted(p for n in range(self.num_syncers) for p in self.of(n, plan_json))


@functools.lru_cache(maxsize=4)
def _num_fragments(plan_json: str) -> int:
    """Count a plan's fragments; a large plan takes a while to read, and is asked for often."""
    return len(json.loads(plan_json)["fragments"])
