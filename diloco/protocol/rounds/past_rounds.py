"""Says how contributions to published rounds ended.

Source: PROTOCOL.md, "Outcomes".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from diloco.bounded_text import MOST_REASON, bounded_text
from diloco.protocol.rounds.terms import Inclusion, Outcome, OutcomeKind, PastRound, RoundKey


class PastRounds:
    """Rounds that were published, by base version, and each island's newest counted contribution.

    Of rounds that are forgotten only the newest counted contribution of each island is known.
    """

    def __init__(
        self,
        by_base: Mapping[int, PastRound] | None = None,
        last_included: Mapping[str, Inclusion] | None = None,
    ) -> None:
        """Take what a restart has found."""
        self.by_base = {base: _bounded(past) for base, past in (by_base or {}).items()}
        self._last_included = dict(last_included or {})

    def published(self, key: RoundKey, past: PastRound) -> None:
        """Add a round."""
        self.by_base[key.version] = past
        for island, incarnation in past.contributors:
            self._last_included[island] = Inclusion(incarnation, key.version, key.attempt)

    def forget_before(self, version: int) -> None:
        """Forget rounds whose base is older than `version`."""
        self.by_base = {base: past for base, past in self.by_base.items() if base >= version}

    def outcome(self, key: RoundKey, island: str, incarnation: int) -> Outcome:
        """Say how a contribution to an older version than the newest ended."""
        past = self.by_base.get(key.version)
        if past is None:
            counted = self._last_included.get(island)
            if counted == Inclusion(incarnation, key.version, key.attempt):
                return Outcome(key, OutcomeKind.INCLUDED)
            return Outcome(key, OutcomeKind.NOT_INCLUDED, "published long ago")
        if key.attempt < past.attempt:
            return Outcome(key, OutcomeKind.EXPIRED, "the attempt is over")
        if (island, incarnation) in past.contributors:
            return Outcome(key, OutcomeKind.INCLUDED)
        why = past.refused.get(island) or past.rejected.get(island)
        if why is not None:
            return Outcome(key, OutcomeKind.REFUSED, why)
        published = f"version {key.version + 1} is published"
        return Outcome(key, OutcomeKind.NOT_INCLUDED, published)

    def newest_counted(self, island: str, incarnation: int) -> Inclusion | None:
        """Return the newest contribution of a start that counts, as far as is remembered."""
        newest = self._last_included.get(island)
        if newest is not None and newest.incarnation == incarnation:
            return newest
        versions = [v for v, p in self.by_base.items() if (island, incarnation) in p.contributors]
        if not versions:
            return None
        return Inclusion(incarnation, max(versions), self.by_base[max(versions)].attempt)


def _bounded(past: PastRound) -> PastRound:
    refused = {island: bounded_text(why, MOST_REASON) for island, why in past.refused.items()}
    return replace(past, refused=refused)
