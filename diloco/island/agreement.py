"""Agreement inside an island: all ranks act on one common vote.

One int64 vector, all-reduced with MIN on a CPU group of the island's own:

    [ -(exit code), -(unsound), of the leader: words heard, leaving, cut | for every fragment:
      staged version, -(staged version), then of the leader: verdict, attempt, target (version,
      tokens, whether it is the flush and is tried), open version, ending ]

What the leader (`island_rank` 0) knows travels in the same message: other ranks put the largest
integer there. A version is merged only when the smallest and the largest staged version say that
every rank has it: ranks learn of versions at different times, and each stages one at a time. One
that follows no lane of a fragment has nothing to stage of it, and puts the largest integer there.

Source: PROTOCOL.md, "Agreement of ranks".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from diloco.errors import DilocoError, IslandFailed
from diloco.island.lanes.parameters import gathered
from diloco.protocol.island.ledger import Target, Verdict
from diloco.protocol.island.votes import (
    GONE,
    NOT_MINE,
    NOTHING_STAGED,
    AgreedCut,
    FragmentVote,
    IslandVote,
)

_VERDICTS = (*Verdict, None)
_FIELDS = 9
_NO_TARGET = Target(-1)


class Agreement:
    """Takes the votes of all ranks of an island together.

    `group` must be used by nothing else; None means that the island has one rank.

    Attributes:
        num_heard: How often this rank has heard of the coordinator; the leader's number travels
            with every vote, because the other ranks have no connection to the coordinator.
        on_heard: Called on the other ranks when the leader has heard of it again.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Assign only."""
        self._group = group
        self._is_leader = group is None or dist.get_rank(group) == 0
        self._started: tuple[Tensor, dist.Work | None] | None = None
        self.num_heard: Callable[[], int] = lambda: 0
        self.on_heard: Callable[[], None] = lambda: None
        self._num_heard = 0

    @property
    def is_alone(self) -> bool:
        """Whether the island has one rank: agreeing takes no time."""
        return self._group is None

    @property
    def is_leader(self) -> bool:
        """Whether this is the rank that speaks with the coordinator."""
        return self._is_leader

    def smallest(self, values: Sequence[int], failure: DilocoError | None = None) -> list[int]:
        """Return the smallest of every rank's values, one by one: a barrier for the island.

        Args:
            values: As many on all ranks.
            failure: Why this rank cannot go on.

        Raises:
            DilocoError: On all ranks, if one of them has failed (`raise_failure`).
        """
        heard = self.num_heard() if self._is_leader else NOT_MINE
        code = 0 if failure is None else failure.exit_code
        vector = torch.tensor([heard, -code, *values], dtype=torch.int64)
        if self._group is not None:
            dist.all_reduce(vector, dist.ReduceOp.MIN, group=self._group)
        heard, minus_code, *smallest = vector.tolist()
        self._take_num_heard(heard)
        self.raise_failure(failure, -minus_code)
        return smallest

    def raise_failure(self, own: DilocoError | None, exit_code: int) -> None:
        """Stop on every rank when any rank failed; collective where they agreed that one has.

        Args:
            own: Why this rank cannot go on.
            exit_code: That they agreed on; 0: none has failed.

        Raises:
            DilocoError: `own`; else IslandFailed, with the exit code, the rank that failed with it,
                and why.
        """
        if exit_code == 0:
            return
        try:
            failures = gathered(None if own is None else (own.exit_code, str(own)), self._group)
        except RuntimeError:  # a rank does not come any more
            if own is None:
                raise
        if own is not None:
            raise own
        rank, why = next((n, f[1]) for n, f in enumerate(failures) if f and f[0] == exit_code)
        error = IslandFailed(f"rank {rank} of this island failed with exit code {exit_code}: {why}")
        error.exit_code = exit_code
        raise error

    def largest(self, values: Sequence[int], failure: DilocoError | None = None) -> list[int]:
        """Return the largest of every rank's values, one by one; raises as `smallest`."""
        return [-value for value in self.smallest([-value for value in values], failure)]

    def start(self, vote: IslandVote) -> None:
        """Start an all-reduce that `read` ends in the next outer step: no barrier now."""
        vector, work = self._encode(vote), None
        if self._group is not None:
            work = dist.all_reduce(vector, dist.ReduceOp.MIN, group=self._group, async_op=True)
        self._started = vector, work

    def read(self) -> IslandVote | None:
        """End what `start` started; None when nothing was started."""
        if self._started is None:
            return None
        (vector, work), self._started = self._started, None
        if work is not None:
            with record_function("diloco/agree"):
                work.wait()
        self._take_num_heard(int(vector[2]))
        return _decode(vector)

    def now(self, vote: IslandVote) -> IslandVote:
        """Agree at once: a barrier for the island."""
        self.start(vote)
        agreed = self.read()
        assert agreed is not None
        return agreed

    def _take_num_heard(self, num_heard: int) -> None:
        if num_heard > self._num_heard and not self._is_leader:
            self.on_heard()
        self._num_heard = num_heard

    def _encode(self, vote: IslandVote) -> Tensor:
        of_leader = [self.num_heard(), int(vote.is_leaving), 2 * vote.cut.number + vote.cut.is_last]
        values = [-vote.exit_code, -int(vote.is_unsound)]
        values += of_leader if self._is_leader else [NOT_MINE] * len(of_leader)
        for each in vote.votes:
            staged = each.staged_version
            values += [staged, staged if staged == NOT_MINE else -staged]
            values += _of_leader(each) if self._is_leader else [NOT_MINE] * (_FIELDS - 2)
        return torch.tensor(values, dtype=torch.int64)


def _of_leader(vote: FragmentVote) -> list[int]:
    target = vote.target or _NO_TARGET
    return [
        _VERDICTS.index(vote.verdict),
        vote.attempt,
        target.version,
        target.merged_tokens,
        int(target.is_flush) + 2 * target.asks_trial,
        vote.open_version,
        int(vote.is_ending),
    ]


def _decode(vector: Tensor) -> IslandVote:
    minus_code, minus_unsound, _, is_leaving, cut, *values = vector.tolist()
    votes = (_vote(*values[at : at + _FIELDS]) for at in range(0, len(values), _FIELDS))
    is_last = bool(cut % 2)
    return IslandVote(
        -minus_code,
        tuple(votes),
        bool(is_leaving),
        AgreedCut(cut // 2, is_last),
        bool(minus_unsound),
    )


def _vote(least: int, minus_most: int, verdict: int, attempt: int, *of_leader: int) -> FragmentVote:
    target, tokens, flags, open_version, is_ending = of_leader
    return FragmentVote(
        least if least in (-minus_most, GONE) else NOTHING_STAGED,
        _VERDICTS[verdict],
        attempt,
        None if target < 0 else Target(target, tokens, bool(flags % 2), bool(flags // 2)),
        open_version,
        bool(is_ending),
    )
