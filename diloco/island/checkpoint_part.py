"""An island's part of a run checkpoint, from the moment it is taken until all ranks have saved it.

Source: PROTOCOL.md, "Run checkpoints and pins" and "Cuts".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.island.connection import Connection


@dataclass(frozen=True, slots=True)
class CutTaken:
    """A part of a cut, as it is reported to the coordinator; of the moment it was taken.

    Args:
        number: Of the cut.
        versions: That the island had merged, by fragment.
        text_json: What of the text is to be shared out again when the cut is resumed.
    """

    number: int
    versions: Sequence[int]
    text_json: str


class CheckpointPart:
    """One rank's handle on the island's part; `end` it once the ranks know how saving went."""

    def __init__(
        self, connection: Connection, inner_step: int, cut: CutTaken | None = None
    ) -> None:
        """Assign only; `cut`: where islands merge on arrival."""
        self._connection = connection
        self._inner_step = inner_step
        self._cut = cut

    def __str__(self) -> str:
        """Name the run checkpoint that it is of."""
        step = f"the checkpoint of inner step {self._inner_step}"
        return step if self._cut is None else f"cut {self._cut.number}"

    def end(self, *, is_whole: bool) -> None:
        """Report to the coordinator that the island has its part, or that it has none.

        Any thread may call it, once, on every rank with the same word.

        Args:
            is_whole: Whether all ranks have saved theirs.
        """
        cut = self._cut
        if cut is not None:
            versions = cut.versions if is_whole else ()
            self._connection.cut(cut.number, self._inner_step, versions, cut.text_json)
        elif is_whole:
            self._connection.kept(self._inner_step)
