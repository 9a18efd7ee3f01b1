"""Who has not been sent yet what was published last: what xi_sync is measured by.

Source: PROTOCOL.md, "Quorum, grace and close".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Fetches:
    """The contributors of the newest version, and the lanes that each was not sent yet."""

    def __init__(self) -> None:
        """Wait for nobody."""
        self._missing: dict[str, set[int]] = {}
        self._last_at: float | None = None  # when the last of the others had all lanes

    def begun(self, contributors: Iterable[str], num_lanes: int) -> None:
        """Wait for each of them to be sent every lane of a new version."""
        self._missing = {island: set(range(num_lanes)) for island in contributors}
        self._last_at = None

    def given_up(self) -> None:
        """Wait for nobody any more; that measures nothing: who has not asked yet may be dead."""
        self._missing = {}

    def sent(self, island: str, lane_ids: Iterable[int], now: float) -> float | None:
        """Record lanes that were sent to the last byte.

        Returns:
            When the last of those waited for was sent all lanes; None: it is not over, or was.
        """
        missing = self._missing.get(island)
        if missing is None:
            return None
        missing.difference_update(lane_ids)
        if missing:
            return None
        self._last_at = now
        return self.gone([island])

    def gone(self, islands: Iterable[str]) -> float | None:
        """Wait for these no more: who died or lapsed measures nothing, its silence is no transfer.

        Returns:
            As `sent` does.
        """
        was_waiting = bool(self._missing)
        for island in islands:
            self._missing.pop(island, None)
        return self._last_at if was_waiting and not self._missing else None

    def gone_but(self, live: Collection[str]) -> float | None:
        """Wait for the living alone; returns as `sent` does."""
        return self.gone(set(self._missing) - set(live))
