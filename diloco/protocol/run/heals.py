"""Who wishes for an inner optimizer, of which checkpoint, and who gives it.

An island that starts without any state of its own wishes; its wish is in each of its reports until
it trains. It is given of a checkpoint that its donor has written: the newest run checkpoint, or,
where islands merge on arrival, the cut that is under way, for which one is named if there is none.
So the donor stood at a known version of every fragment, and no other state is written for it. The
donor hears of it in the answer to its own report, and puts it at the syncers.

Nothing is durable: after a restart wishes come again.

Source: Decoupled DiLoCo (arXiv 2604.21428, App. E.3).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco.bounded_text import bounded_text
from diloco.protocol.run.admission import Entries
from diloco.protocol.run.leases import Lease
from diloco.protocol.run.membership import Membership
from diloco.protos.control_pb2 import HealAnswer, HealWord, ReportReply

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Wish:
    """Of one start; `checkpoint` 0: not chosen; `donor` empty: not chosen."""

    incarnation: int
    checkpoint: int = 0
    donor: str = ""
    declined: dict[str, str] = field(default_factory=dict)


class Heals:
    """The wishes of one run."""

    def __init__(self, membership: Membership, *, keep: Callable[[Entries], None]) -> None:
        """Assign only.

        Args:
            membership: Of the run.
            keep: Makes what was decided durable, then true.
        """
        self._membership = membership
        self._keep = keep
        self._wishes: dict[str, _Wish] = {}

    def heard(self, island: str, word: HealWord, reply: ReportReply) -> None:
        """Take what an island says of heals, and answer it; `reply` gets what it is to know."""
        incarnation = self._membership.members[island].incarnation
        if word.declined:
            self._declined(island, word.declined, bounded_text(word.reason))
        if not word.is_wished:
            self._wishes.pop(island, None)
        elif island not in self._wishes or self._wishes[island].incarnation != incarnation:
            self._wishes[island] = _Wish(incarnation)
        for absent in self._wishes.keys() - set(self._membership.holders):
            del self._wishes[absent]  # whoever starts it again wishes again
        if (wish := self._wishes.get(island)) is not None:
            reply.heal.CopyFrom(self._answer(island, wish))
        self._membership.cuts.given = {w.checkpoint for w in self._wishes.values()}
        # One after the other: a later wish breaks off nothing that is under way.
        asked = [w.checkpoint for w in self._wishes.values() if w.donor == island]
        reply.donate = min(asked, default=0)

    def _declined(self, donor: str, checkpoint: int, reason: str) -> None:
        for island, wish in self._wishes.items():
            if (wish.donor, wish.checkpoint) == (donor, checkpoint):
                logger.warning(
                    "%s cannot give %s the inner optimizer of checkpoint %d: %s",
                    donor, island, checkpoint, reason,
                )  # fmt: skip
                wish.declined[donor], wish.donor = reason, ""

    def _answer(self, island: str, wish: _Wish) -> HealAnswer:
        if not wish.checkpoint and (refusal := self._choose(island, wish)):
            return HealAnswer(refusal=refusal)
        donors = self._donors(island, wish)
        if wish.donor not in donors:
            if wish.donor:
                wish.declined.setdefault(wish.donor, "it is away")
            # What is given of one checkpoint is there for all; of another it comes after that.
            busy = {w.donor for w in self._wishes.values() if w.checkpoint != wish.checkpoint}
            wish.donor = max(donors, key=lambda d: (d not in busy, donors[d], d), default="")
            if wish.donor:
                logger.info(
                    "%s is asked for the inner optimizer of checkpoint %d for %s",
                    wish.donor, wish.checkpoint, island,
                )  # fmt: skip
        if wish.donor:
            return HealAnswer(donor=wish.donor, checkpoint=wish.checkpoint)
        if self._is_awaited(island, wish):
            return HealAnswer()
        why = "; ".join(f"{donor}: {reason}" for donor, reason in sorted(wish.declined.items()))
        name = self._membership.checkpoint_name(wish.checkpoint)
        return HealAnswer(
            refusal=bounded_text(f"no island at work can give that of {name}. {why}".strip())
        )

    def _choose(self, island: str, wish: _Wish) -> str:
        """Choose the checkpoint; returns why there is none."""
        membership = self._membership
        if membership.is_stopping:
            return "the run is stopping"
        if not self._others(island):
            return "no other island is at work"
        if not membership.rules.is_elastic:
            if not membership.checkpoints:
                return "no run checkpoint is complete yet (checkpoint.every_inner_steps)"
            wish.checkpoint = membership.checkpoints[-1]
            return ""
        if (cut := membership.cuts.open(membership.timeline)) is None:
            self._keep(membership.cut())
            cut = membership.cuts.newest(membership.timeline)
        assert cut is not None
        wish.checkpoint = cut.number
        return ""

    def _others(self, island: str) -> list[str]:
        """Islands at work that have an inner optimizer."""
        membership = self._membership
        return [
            other
            for other in membership.holders
            if other not in {island, *self._wishes} and membership.lease_of(other) is Lease.ACTIVE
        ]

    def _donors(self, island: str, wish: _Wish) -> dict[str, int]:
        """Islands that have it and can give it, and how far each had come; 0: not known."""
        membership = self._membership
        others = [other for other in self._others(island) if other not in wish.declined]
        if not membership.rules.is_elastic:
            return dict.fromkeys(others, 0)
        parts = membership.cuts[wish.checkpoint].parts
        return {other: parts[other].inner_step for other in others if other in parts}

    def _is_awaited(self, island: str, wish: _Wish) -> bool:
        """Whether somebody is still to write the cut that it is of."""
        if not self._membership.rules.is_elastic:
            return False
        owing = self._membership.cuts[wish.checkpoint].owing
        return any(o in owing and o not in wish.declined for o in self._others(island))
