"""Agreement inside an island: what every rank has staged, what the leader says, who failed.

One int64 vector, all-reduced with MIN on a CPU group of the island's own:

    [ -(exit code), -(unsound), leader's words: heard, leaving, cut | for every fragment: staged
      version, -(staged version), then the leader's verdict, attempt, target (version, tokens,
      whether the flush and to be tried after), open version, ending ]

What is the leader's (`island_rank` 0) travels in the same message: other ranks put the largest
integer there. A version is merged only when the smallest and the largest staged version say that
every rank has it: ranks hear of versions at different times, and each stages one at a time.

Source: PROTOCOL.md, "Agreement of ranks".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from diloco.errors import DilocoError, IslandFailed
from diloco.protocol.island.ledger import Target, Verdict

_VERDICTS = tuple(Verdict)
_UNDECIDED = len(_VERDICTS)
#: Another rank's word where only the leader's counts: the smallest is taken.
NOT_MINE = torch.iinfo(torch.int64).max
_FIELDS = 9
_NO_TARGET = Target(-1)
#: In place of a staged version: nothing, or not the same on all ranks.
NOTHING_STAGED = -1
#: In place of a staged version: the syncer has the target no more.
GONE = -2


@dataclass(frozen=True, slots=True)
class FragmentVote:
    """One rank's word on one fragment; agreed, everything but the first is the leader's.

    Args:
        staged_version: Of which the rank holds all its lanes, or `NOTHING_STAGED`, or `GONE`.
        verdict: On what is outstanding.
        attempt: That is announced last.
        target: What all ranks are to stage; None: nothing newer is known.
        open_version: Base of the attempt that waits for this island; -1: none does.
        is_ending: Whether only flushes are left to be made, or not even those.
    """

    staged_version: int
    verdict: Verdict | None
    attempt: int
    target: Target | None = None
    open_version: int = -1
    is_ending: bool = False


@dataclass(frozen=True, slots=True)
class AgreedCut:
    """A run checkpoint of islands that merge on arrival; `number` 0: none.

    `is_last`: this start ends with it.
    """

    number: int = 0
    is_last: bool = False


NO_CUT = AgreedCut()


@dataclass(frozen=True, slots=True)
class Agreed:
    """The island's common word: `exit_code` 0 means that no rank failed.

    `is_leaving`: the leader was told to end this start; `cut`: it was asked for this one last;
    `is_unsound`: what the island trained is not to be trusted, as some rank found.
    """

    exit_code: int
    standings: tuple[FragmentVote, ...]
    is_leaving: bool = False
    cut: AgreedCut = NO_CUT
    is_unsound: bool = False


class Agreement:
    """All-reduces of standings over one island.

    `group` must be used by nothing else; None means that the island has one rank.

    Attributes:
        num_heard: How often this rank has heard of the coordinator; the leader's travels with every
            word, for nobody else hears of it.
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
        """Whether this is the rank whose word counts."""
        return self._is_leader

    def smallest(self, values: Sequence[int]) -> list[int]:
        """Return the smallest of every rank's values, one by one: a barrier for the island."""
        heard = self.num_heard() if self._is_leader else NOT_MINE
        vector = torch.tensor([heard, *values], dtype=torch.int64)
        if self._group is not None:
            dist.all_reduce(vector, dist.ReduceOp.MIN, group=self._group)
        heard, *smallest = vector.tolist()
        self._hear(heard)
        return smallest

    def start(
        self,
        exit_code: int,
        standings: Sequence[FragmentVote],
        *,
        is_leaving: bool = False,
        cut: AgreedCut = NO_CUT,
        is_unsound: bool = False,
    ) -> None:
        """Start an all-reduce that `read` ends in the next outer step: no barrier now."""
        vector = self._encode(exit_code, standings, is_leaving, cut, is_unsound)
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
            with record_function("diloco/agree"):
                work.wait()
        self._hear(int(vector[2]))
        return _decode(vector)

    def _hear(self, num_heard: int) -> None:
        if num_heard > self._num_heard and not self._is_leader:
            self.on_heard()
        self._num_heard = num_heard

    def now(
        self,
        exit_code: int,
        standings: Sequence[FragmentVote],
        *,
        is_leaving: bool = False,
        cut: AgreedCut = NO_CUT,
        is_unsound: bool = False,
    ) -> Agreed:
        """Agree at once: a barrier for the island."""
        self.start(exit_code, standings, is_leaving=is_leaving, cut=cut, is_unsound=is_unsound)
        agreed = self.read()
        assert agreed is not None
        return agreed

    def _encode(
        self,
        exit_code: int,
        standings: Sequence[FragmentVote],
        is_leaving: bool = False,
        cut: AgreedCut = NO_CUT,
        is_unsound: bool = False,
    ) -> Tensor:
        words = [self.num_heard(), int(is_leaving), 2 * cut.number + cut.is_last]
        values = [-exit_code, -int(is_unsound)]
        values += words if self._is_leader else [NOT_MINE] * len(words)
        for standing in standings:
            values += [standing.staged_version, -standing.staged_version]
            values += _leaders_words(standing) if self._is_leader else [NOT_MINE] * (_FIELDS - 2)
        return torch.tensor(values, dtype=torch.int64)


def _leaders_words(standing: FragmentVote) -> list[int]:
    known, target = standing.verdict, standing.target or _NO_TARGET
    return [
        _UNDECIDED if known is None else _VERDICTS.index(known),
        standing.attempt,
        target.version,
        target.merged_tokens,
        int(target.is_flush) + 2 * target.asks_trial,
        standing.open_version,
        int(standing.is_ending),
    ]


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
    minus_code, minus_unsound, _, is_leaving, cut, *values = vector.tolist()
    standings = tuple(
        _standing(*values[first : first + _FIELDS]) for first in range(0, len(values), _FIELDS)
    )
    return Agreed(
        -minus_code,
        standings,
        bool(is_leaving),
        AgreedCut(cut // 2, bool(cut % 2)),
        bool(minus_unsound),
    )


def _standing(
    least: int,
    minus_most: int,
    verdict: int,
    attempt: int,
    target: int,
    tokens: int,
    flags: int,
    open_version: int,
    is_ending: int,
) -> FragmentVote:
    staged = least if least in (-minus_most, GONE) else NOTHING_STAGED
    return FragmentVote(
        staged,
        None if verdict == _UNDECIDED else _VERDICTS[verdict],
        attempt,
        None if target < 0 else Target(target, tokens, bool(flags % 2), bool(flags // 2)),
        open_version,
        bool(is_ending),
    )
