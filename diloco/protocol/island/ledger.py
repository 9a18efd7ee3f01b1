"""Counts the tokens and inner steps of one fragment at an island, and applies outcomes to them.

A contribution weighs the tokens that it was trained on. Every token must be counted exactly once:
in a contribution that was INCLUDED, or as dropped. `FragmentLedger` holds the counters since they
last restarted and the contribution that is outstanding; `OUTCOMES`, the table of PROTOCOL.md, "A
contribution", says what each outcome does to them. What happens to the tensors (anchor, residual,
payload) follows from the same outcome, elsewhere.

The ledger has integers only and is equal on every rank of the island.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple, TypeAlias

from diloco.protocol.rounds.terms import RoundKey

#: Largest number of expired attempts of one version in a run that goes on: three in a row end it.
#: Larger numbers come from a syncer whose record of expiries was damaged, and are ignored.
MAX_EXPIRED = 2

#: What a merge keeps of the local values: alpha of them, or what was trained since the send.
LocalMix: TypeAlias = float | Literal["since_send"]


class Verdict(StrEnum):
    """How an outstanding contribution ended, as the island leader saw it."""

    INCLUDED = "included"
    NOT_INCLUDED = "not_included"
    REFUSED = "refused"
    DECLINED = "declined"
    EXPIRED = "expired"
    #: It was refused, and then its attempt expired.
    REFUSED_EXPIRED = "refused_expired"
    #: Nothing was outstanding: a version was published without this island.
    ABSENT = "absent"

    @property
    def has_expired(self) -> bool:
        """Whether the attempt ended without a version."""
        return self in (Verdict.EXPIRED, Verdict.REFUSED_EXPIRED)


class Counters(StrEnum):
    """From where tokens and steps are counted after an outcome."""

    SEND = "restart from the send"
    MERGE = "restart from the merge"
    KEEP = "keep"


class Settlement(NamedTuple):
    """What an outcome does to an island.

    Args:
        verdict: The outcome.
        merges: Whether a version is merged.
        counters: What the counters do if alpha is 0: the merge overwrites what was done since the
            send.
        mixed: What they do if alpha is greater, or where the work since the send is kept (`SENT`).
    """

    verdict: Verdict
    merges: bool
    counters: Counters
    mixed: Counters


_SEND, _MERGE, _KEEP = Counters
OUTCOMES = (
    Settlement(Verdict.INCLUDED, True, _SEND, _SEND),
    Settlement(Verdict.NOT_INCLUDED, True, _MERGE, _SEND),
    Settlement(Verdict.REFUSED, True, _MERGE, _KEEP),
    Settlement(Verdict.DECLINED, True, _MERGE, _KEEP),
    Settlement(Verdict.ABSENT, True, _MERGE, _KEEP),
    Settlement(Verdict.EXPIRED, False, _KEEP, _KEEP),
    Settlement(Verdict.REFUSED_EXPIRED, False, _KEEP, _KEEP),
)
#: After this a merge can keep what was trained since the send: all ranks have sent their lanes. Of
#: other outcomes a rank may have declined its own too late to be heard.
SENT = (Verdict.INCLUDED,)
#: After these what was sent is still counted.
_KEEPING = (Verdict.REFUSED, Verdict.DECLINED, Verdict.EXPIRED, Verdict.REFUSED_EXPIRED)
_SETTLEMENTS = {each.verdict: each for each in OUTCOMES}


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A contribution whose outcome is not known yet."""

    key: RoundKey
    sent_at_inner_step: int
    weight_tokens: int
    weight_steps: int
    is_flush: bool


@dataclass(frozen=True, slots=True)
class Target:
    """A published version that an island is to merge.

    Attributes:
        version: Its number.
        merged_tokens: Tokens of all contributions to all versions up to it.
        is_flush: Whether it is made of flush contributions.
        asks_trial: Whether what is sent after it is tried on held-out text first.
    """

    version: int
    merged_tokens: int = 0
    is_flush: bool = False
    asks_trial: bool = False


@dataclass(frozen=True, slots=True)
class Settled:
    """What an outcome cost.

    Attributes:
        overwritten_steps: Inner steps whose local effect was replaced by a merge with alpha = 0 and
            is not in theta: those since the send if INCLUDED, else all since the last merge.
        dropped_tokens: Tokens that no later contribution will count.
    """

    overwritten_steps: int = 0
    dropped_tokens: int = 0


@dataclass(slots=True)
class FragmentLedger:
    """Counters of one fragment of one island.

    `tokens` and `steps` run since the counters last restarted; `version` is that of the anchor;
    `attempt` the attempt that its next due step serves; `local_steps` run since the last merge. Due
    steps up to `sent_until` were sent before the island returned: it passes some of them again and
    sends nothing there. `is_flushed` says that `version` is the flush, `asks_trial` that what is
    sent next is tried first.

    Where islands merge on arrival, `merged_tokens` are those of everybody's contributions up to
    `version`, and `target` is what all ranks stage next; `is_target_gone`: one of them heard that
    the syncer has it no more. `is_void`: the work of what is outstanding is nowhere else any more.

    In scheduled mode an attempt is served by one due step of every island: who is late sends it
    though a later one is announced, is answered EXPIRED at once, and serves the later one at the
    next due step, as the others did. Sent to the announced attempt (PROTOCOL.md, "Deadline and
    expiry"), the contribution of a late island would be one of an earlier due step than everybody
    else's: it would merge that version H inner steps before them, lead them from then on, and have
    a send left over at the end.
    """

    timeline: int
    fragment_id: int
    version: int = 0
    attempt: int = 0
    tokens: int = 0
    steps: int = 0
    local_steps: int = 0
    sent_until: int = 0
    is_flushed: bool = False
    outstanding: Outstanding | None = None
    merged_tokens: int = 0
    target: Target | None = None
    is_target_gone: bool = False
    is_void: bool = False
    asks_trial: bool = False

    def is_sending(self, due_step: int) -> bool:
        """Whether the island has not yet sent what is due after an inner step."""
        return due_step > self.sent_until and not self.is_flushed

    def count(self, num_tokens: int) -> None:
        """Count one inner step of `num_tokens` tokens."""
        self.tokens += num_tokens
        self.steps += 1
        self.local_steps += 1

    def begin_again(self) -> None:
        """Start the counters again, as after a return: earlier work is already in a version."""
        self.tokens = self.steps = self.local_steps = 0
        self.outstanding = None

    def drop_work(self) -> Settled:
        """Forget the work since the last merge, except what is outstanding."""
        tokens, steps = (0, 0) if self.outstanding is None else _weight(self.outstanding)
        dropped = Settled(self.steps - steps, self.tokens - tokens)
        self.is_void = self.outstanding is not None
        self.tokens, self.steps, self.local_steps = tokens, steps, min(steps, self.local_steps)
        return dropped

    def send(self, inner_step: int, *, is_flush: bool, most_steps: int = 0) -> Outstanding:
        """Make a contribution outstanding; each fragment has at most one.

        It weighs at most `most_steps` inner steps (0: any number) and their share of the tokens,
        because no syncer counts more (`Weights`). The rest is counted in the next contributions.
        """
        assert self.outstanding is None, f"fragment {self.fragment_id} has one outstanding"
        key = RoundKey(self.timeline, self.fragment_id, self.version, self.attempt)
        tokens, steps = self.tokens, self.steps
        if 0 < most_steps < steps:
            tokens, steps = -(-tokens * most_steps // steps), most_steps
        self.outstanding = Outstanding(key, inner_step, tokens, steps, is_flush)
        return self.outstanding

    def mix_of(self, verdict: Verdict, local_mix: LocalMix, *, is_flush: bool) -> LocalMix:
        """Return what the merge after an outcome keeps of the local values.

        A flush keeps nothing, nor does a merge that is to keep what was trained since the send
        where what was sent is not included, or the published values were taken meanwhile.
        """
        is_copied = local_mix == "since_send" and (self.is_void or verdict not in SENT)
        return 0.0 if is_flush or is_copied else local_mix

    def settle(
        self,
        verdict: Verdict,
        *,
        attempt: int,
        local_mix: LocalMix,
        merged: Target | None = None,
        most_kept: int = 0,
    ) -> Settled:
        """Apply the outcome of what is outstanding, as `OUTCOMES` says.

        Args:
            verdict: The outcome; ABSENT: a version is merged while nothing is outstanding.
            attempt: After EXPIRED, the attempt last announced; counts only where attempts were
                skipped, which no due step served (`MAX_EXPIRED`).
            local_mix: What the merge keeps (`mix_of`).
            merged: The version that is merged; None: the one after what was sent.
            most_kept: Inner steps since the send that stay counted though a merge with alpha = 0
                replaced them; the rest is dropped. 0: any number.
        """
        sent, self.outstanding = self.outstanding, None
        has_sent = sent is not None
        assert has_sent != (verdict is Verdict.ABSENT), (
            f"{verdict}: fragment {self.fragment_id} has {sent or 'nothing'} outstanding"
        )
        settlement = _SETTLEMENTS[verdict]
        weight_tokens, weight_steps = (0, 0) if sent is None else _weight(sent)
        void = 0
        if self.is_void and verdict in _KEEPING:
            void = weight_tokens
            self.tokens -= weight_tokens
            self.steps -= weight_steps
        self.is_void = False
        if not settlement.merges:
            assert sent is not None
            following = sent.key.attempt + 1
            self.attempt = attempt if attempt - following > MAX_EXPIRED else following
            return Settled(0, void)
        if merged is None:
            assert sent is not None, "a merge without a send names its version"
            merged = Target(sent.key.version + 1, is_flush=sent.is_flush)
        self.version, self.attempt = merged.version, 0
        self.is_flushed, self.merged_tokens = merged.is_flush, merged.merged_tokens
        self.target, self.is_target_gone, self.asks_trial = None, False, merged.asks_trial
        is_included = verdict is Verdict.INCLUDED
        overwritten = self.steps - weight_steps if is_included else self.local_steps
        dropped = void
        self.local_steps = 0
        restart = settlement.counters if local_mix == 0 else settlement.mixed
        match restart:
            case Counters.SEND:
                dropped = 0 if is_included else weight_tokens
                self.tokens -= weight_tokens
                self.steps -= weight_steps
            case Counters.MERGE:
                dropped, self.tokens, self.steps = void + self.tokens, 0, 0
        if restart is not Counters.KEEP or void:  # else what was sent stays counted
            weight_tokens = weight_steps = 0
        tokens, steps = self.tokens - weight_tokens, self.steps - weight_steps
        if local_mix in (0, "since_send") and 0 < most_kept < steps:
            kept = -(-tokens * most_kept // steps)
            dropped += tokens - kept
            self.tokens, self.steps = weight_tokens + kept, weight_steps + most_kept
        return Settled(overwritten if local_mix == 0 else 0, dropped)


def _weight(sent: Outstanding) -> tuple[int, int]:
    return sent.weight_tokens, sent.weight_steps
