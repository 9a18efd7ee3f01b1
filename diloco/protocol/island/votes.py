"""Votes of the ranks of an island, and what a rank knows of its fragments.

Source: PROTOCOL.md, "Agreement of ranks".
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco.protocol.island.ledger import Target, Verdict
from diloco.protocol.rounds.terms import RoundKey

#: In place of a staged version: nothing, or not the same on all ranks.
NOTHING_STAGED = -1
#: In place of a staged version: the syncer has the target no more.
GONE = -2
#: In place of a value of which the smallest of all ranks is taken: other ranks know it.
NOT_MINE = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class FragmentVote:
    """One rank's word on one fragment; agreed, everything but the first is the leader's.

    Args:
        staged_version: Of which the rank holds all its lanes, or `NOTHING_STAGED`, or `GONE`;
            `NOT_MINE` where it follows none of them.
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
class IslandVote:
    """The island's common word: `exit_code` 0 means that no rank failed.

    `is_leaving`: the leader was told to end this start; `cut`: it was asked for this one last;
    `is_unsound`: what the island trained is not to be trusted, as some rank found.
    """

    exit_code: int
    votes: tuple[FragmentVote, ...]
    is_leaving: bool = False
    cut: AgreedCut = NO_CUT
    is_unsound: bool = False


@dataclass(frozen=True, slots=True)
class AnnouncedVersion:
    """A published version, as the syncer announced it; hex digest."""

    target: Target
    digest: str = ""
    contributors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FragmentView:
    """A rank's knowledge of a fragment, for the training thread.

    `anchor_version` is what the lanes hold (-1 before the island has entered the run; then
    `is_overwritten` says whether own values differed); `staged_version` is the newest version of
    which all of this rank's lanes are verified (-1: none); `key` is what is outstanding and
    `verdict` its end, None while it is undecided. Commands that were posted and not yet carried out
    are not in it: hold `key` against what was sent. `sent_at_inner_step`, `is_flush`,
    `merged_tokens` and `asks_trial` are the syncer's word on `version`, `anchor_tokens` that on the
    anchor with which the island entered.

    `staging` is what this rank stages, or has staged; `gone_version` the newest of which it heard
    that the syncer has it no more. `is_open`: the attempt that is announced waits for this island;
    `is_ending`: it takes a flush, or there is none any more. `counted` is the newest contribution
    of the start whose checkpoint is resumed: the version that counts it (0: none), and the attempt.
    `is_damaged`: its syncer has lost a version, and does not serve it until that is repaired.
    """

    key: RoundKey | None = None
    anchor_version: int = -1
    is_overwritten: bool = False
    version: int = -1
    attempt: int = 0
    staged_version: int = -1
    verdict: Verdict | None = None
    digest: str = ""
    contributors: tuple[str, ...] = ()
    sent_at_inner_step: int = 0
    is_flush: bool = False
    merged_tokens: int = 0
    anchor_tokens: int = 0
    staging: AnnouncedVersion | None = None
    gone_version: int = -1
    is_open: bool = False
    is_ending: bool = False
    counted: tuple[int, int] = (0, 0)
    is_damaged: bool = False
    asks_trial: bool = False

    @property
    def newest(self) -> Target:
        """The newest version, as a target."""
        return Target(self.version, self.merged_tokens, self.is_flush, self.asks_trial)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to wait for on this rank."""
        if self.key is None or (self.verdict is not None and self.verdict.has_expired):
            return True
        return self.verdict is not None and self.staged_version > self.key.version


#: Of a fragment that this rank does not ask about: it carries none of its lanes, and leads nobody.
NOT_FOLLOWED = FragmentView(anchor_version=NOT_MINE, staged_version=NOT_MINE)
