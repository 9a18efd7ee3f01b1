"""Small files of a syncer's store: its epoch, the starts of islands that count, its last orders.

Source: PROTOCOL.md, "Syncer epoch" and "Restart of a syncer".
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.config.load import with_settings
from diloco.durable import read_json, rename, write_json
from diloco.protocol.rounds.orders import Orders
from diloco.protocol.rounds.terms import Roster

if TYPE_CHECKING:  # torch is imported once the store is ours
    from diloco.config.schema import Config
    from diloco.syncer.rules import SyncerRules

logger = logging.getLogger(__name__)


class SeenIncarnations:
    """Highest accepted incarnation of each island, in one file."""

    def __init__(self, path: Path) -> None:
        """Assign only."""
        self._path = path

    def load(self) -> dict[str, int]:
        """Read them.

        Raises:
            ValueError: If the file is damaged.
        """
        try:
            stored = read_json(self._path) or {}
            return {str(island): int(number) for island, number in stored.items()}
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{self._path} is damaged: {error}") from error

    def store(self, incarnations: dict[str, int]) -> None:
        """Write them durably."""
        write_json(self._path, incarnations)


class KeptOrders:
    """The coordinator's last orders, in one file, and what they make of a configuration."""

    def __init__(self, path: Path, config: Config, rules: SyncerRules) -> None:
        """Assign only; `rules` are those of this start."""
        self._path = path
        self._config = config
        self._rules = rules

    def load(self) -> Orders:
        """Read the last orders; damaged ones are set aside, the coordinator says them again."""
        try:
            content = read_json(self._path)
            return Orders.from_json(content) if content else Orders()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            aside = self._path.with_name(self._path.name + ".damaged")
            rename(self._path, aside)
            logger.error(
                "%s is damaged and set aside as %s: nothing opens before the coordinator has said "
                "again who takes part: %r",
                self._path, aside.name, error,
            )  # fmt: skip
            return Orders(Roster((), is_paused=True))

    def store(self, orders: Orders) -> None:
        """Write them durably."""
        write_json(self._path, orders.to_json())

    def rules(self, orders: Orders) -> SyncerRules:
        """Give the rules of this start with what an operator has set since."""
        from diloco.forecast.build import build_syncer_rules

        return build_syncer_rules(
            with_settings(self._config, orders.policy_json),
            timeline=self._rules.timeline,
            merges_at_once=self._rules.merges_at_once,
            policy_revision=orders.policy_revision,
        )


def next_epoch(path: Path, now_unix_s: float) -> int:
    """Raise the number of a syncer's starts; durable when this returns.

    It is the time of the start, in seconds, or one more than the last: islands take no word of a
    lower number, so that a counter from 1 on would end the run where its file is damaged, lost or
    an older copy.
    """
    try:
        before = int(read_json(path) or 0)
    except (ValueError, TypeError) as error:
        logger.error("the number of the last start is damaged: %s", error)
        before = 0
    epoch = max(before + 1, int(now_unix_s))
    write_json(path, epoch)
    return epoch
