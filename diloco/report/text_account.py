"""Accounts for the text that the islands of a run drew, from their events.

What a killed island drew after it had last noted it, at most half of `data.handover_samples`, is
in no event: another has drawn it again, and here it counts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.config.schema import Config
from diloco.protocol.run.slots import Account, Holding, account

Events = Sequence[Mapping[str, Any]]  # JSON values, as a sink wrote them


@dataclass(frozen=True, slots=True)
class TextSummary:
    """Accounts by source; `unit` is what is counted, a draw.

    `num_holdings` counts how often some start of an island took a slot, its first ones included;
    `most_untold` are the most draws that an island had ahead of what the coordinator knew;
    `num_beyond` counts how often one went beyond the bound, as the coordinator did not answer.
    """

    accounts: dict[str, Account]
    unit: str
    num_holdings: int
    most_untold: int
    handover_samples: int
    num_beyond: int = 0

    def as_text(self) -> str:
        """Say it in a line."""
        sources = "; ".join(
            f"{source}: {found.trained:,} trained, {found.repeated:,} of them again, "
            f"{found.skipped:,} skipped"
            + (f", {found.abandoned:,} given up by resumes in addition" if found.abandoned else "")
            for source, found in self.accounts.items()
        )
        elsewhere = (
            " (or drawn by islands whose events are elsewhere)"
            if any(found.skipped for found in self.accounts.values())
            else ""
        )
        times = "once" if self.num_beyond == 1 else f"{self.num_beyond} times"
        beyond = f", passed {times} as the coordinator did not answer" if self.num_beyond else ""
        return (
            f"Text in {self.unit}: {sources}{elsewhere}. Slots were taken up {self.num_holdings} "
            f"times; an island was at most {self.most_untold:,} ahead of what it had told "
            f"(data.handover_samples = {self.handover_samples:,}{beyond})."
        )


def text_summary(config: Config, events: Mapping[str, Events]) -> TextSummary | None:
    """Add up what was drawn; None where nothing was noted: every island had one slot for ever.

    Args:
        config: The run's configuration.
        events: Island id -> its events, of all its starts.
    """
    found = [event for of in events.values() for event in of]
    drawn = [event for event in found if event["kind"] == "slot_drawn"]
    beyond = [event for event in found if event["kind"] == "text_untold"]
    if not drawn:
        return None
    last = {(e["island"], e["incarnation"], e["slot"], e["grant"]): e for e in drawn}
    holdings = [Holding(e["timeline"], e["slot"], e["begun"], e["drawn"]) for e in last.values()]
    return TextSummary(
        accounts=account(holdings),
        unit="batches" if config.data.source == "stdlib" else "samples",
        num_holdings=len(holdings),
        most_untold=max(event["untold"] for event in (*drawn, *beyond)),
        handover_samples=config.data.handover_samples,
        num_beyond=len(beyond),
    )
