"""Agreement inside an island: what every rank has staged, what the leader says, who failed.

One int64 vector, all-reduced with MIN on a CPU group of the island's own:

    [ -(exit code) | for every fragment: staged version, leader's verdict, leader's attempt ]

The verdict is the leader's (`island_rank` 0) and travels in the same message: other ranks put the
largest integer there. A version is merged only when the smallest staged version says that every
rank has it.

Source: protocol.md section 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.errors import DilocoError, IslandFailed
from diloco.sync.ledger import Verdict

_VERDICTS = tuple(Verdict)
_UNDECIDED = len(_VERDICTS)
#: Another rank's word where only the leader's counts: the smallest is taken.
NOT_MINE = torch.iinfo(torch.int64).max
_FIELDS = 3


@dataclass(frozen=True, slots=True)
class Standing:
    """One rank's word on one fragment."""

    staged_version: int
    verdict: Verdict | None
    attempt: int


@dataclass(frozen=True, slots=True)
class Agreed:
    """The island's common word: `exit_code` 0 means that no rank failed."""

    exit_code: int
    standings: tuple[Standing, ...]


class Agreement:
    """All-reduces of standings over one island.

    `group` must be used by nothing else; None means that the island has one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Assign only."""
        self._group = group
        self._is_leader = group is None or dist.get_rank(group) == 0
        self._started: tuple[Tensor, dist.Work | None] | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this is the rank whose word counts."""
        return self._is_leader

    def smallest(self, values: Sequence[int]) -> list[int]:
        """Return the smallest of every rank's values, one by one: a barrier for the island."""
        vector = torch.tensor(values, dtype=torch.int64)
        if self._group is not None:
            dist.all_reduce(vector, dist.ReduceOp.MIN, group=self._group)
        return list(vector.tolist())

    def start(self, exit_code: int, standings: Sequence[Standing]) -> None:
        """Start an all-reduce that `read` ends in the next outer step: no barrier now."""
        vector = self._encode(exit_code, standings)
        work: dist.Work | None = None
        if self._group is not None:
            work = dist.all_reduce(vector, dist.ReduceOp.MIN, group=self._group, async_op=True)
        self._started = (vector, work)

    def read(self) -> Agreed | None:
        """End what `start` started; None when nothing was started."""
        if self._started is None:
            return None
        (vector, work), self._started = self._started, None
        if work is not None:
            work.wait()
        return _decode(vector)

    def now(self, exit_code: int, standings: Sequence[Standing]) -> Agreed:
        """Agree at once: a barrier for the island."""
        self.start(exit_code, standings)
        agreed = self.read()
        assert agreed is not None
        return agreed

    def _encode(self, exit_code: int, standings: Sequence[Standing]) -> Tensor:
        values = [-exit_code]
        for standing in standings:
            verdict, attempt = NOT_MINE, NOT_MINE
            if self._is_leader:
                known = standing.verdict
                verdict = _UNDECIDED if known is None else _VERDICTS.index(known)
                attempt = standing.attempt
            values += [standing.staged_version, verdict, attempt]
        return torch.tensor(values, dtype=torch.int64)


def exit_code_of(failure: DilocoError | None) -> int:
    """Return a rank's word on its failure: 0 for none."""
    return 0 if failure is None else failure.exit_code


def raise_failure(own: DilocoError | None, exit_code: int) -> None:
    """Stop on every rank when any rank failed; with its own error where it happened.

    Raises:
        DilocoError: `own`, or one that tells of another rank's `exit_code`, where that is not 0.
    """
    if exit_code == 0:
        return
    if own is not None:
        raise own
    error = IslandFailed(
        f"another rank of this island failed with exit code {exit_code}: see its log"
    )
    error.exit_code = exit_code
    raise error


def _decode(vector: Tensor) -> Agreed:
    values = vector.tolist()
    standings = tuple(
        Standing(staged, None if verdict == _UNDECIDED else _VERDICTS[verdict], attempt)
        for staged, verdict, attempt in zip(
            values[1::_FIELDS], values[2::_FIELDS], values[3::_FIELDS], strict=True
        )
    )
    return Agreed(-values[0], standings)
