"""What an island owes and is owed for one fragment: counters, outstanding contribution, outcome.

Pure bookkeeping in integers, equal on every rank of the island. The table of protocol.md section
5 is `settle`; tensors (anchor, residual, payload) follow its verdict elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from diloco.rounds.terms import RoundKey

#: Expired attempts of one version in a run that goes on, at most: three in a row end it. Larger
#: numbers come from a syncer whose record of expiries was damaged, and count nothing.
MAX_EXPIRED = 2


class Verdict(StrEnum):
    """How an outstanding contribution ended, as the island leader saw it."""

    INCLUDED = "included"
    NOT_INCLUDED = "not_included"
    REFUSED = "refused"
    DECLINED = "declined"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A contribution whose outcome is not known yet."""

    key: RoundKey
    sent_at_inner_step: int
    weight_tokens: int
    weight_steps: int
    is_flush: bool


@dataclass(slots=True)
class FragmentLedger:
    """Counters of one fragment of one island.

    `tokens` and `steps` run since the counters last restarted; `version` is that of the anchor;
    `attempt` the attempt that its next due step serves; `local_steps` run since the last merge. Due
    steps up to `sent_until` were sent before the island returned: it passes some of them again and
    sends nothing there. `is_flushed` says that `version` is the flush.

    An attempt is served by one due step of every island: who is late sends it though a later one is
    announced, is answered EXPIRED at once, and serves the later one at the next due step, as the
    others did. Sent to the announced attempt (protocol.md section 4), the contribution of a late
    island would be one of an earlier due step than everybody else's: it would merge that version H
    inner steps before them, lead them from then on, and have a send left over at the end.
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

    def is_sending(self, due_step: int) -> bool:
        """Whether the island still owes what is due after an inner step."""
        return due_step > self.sent_until and not self.is_flushed

    def count(self, num_tokens: int) -> None:
        """Count one inner step of `num_tokens` tokens."""
        self.tokens += num_tokens
        self.steps += 1
        self.local_steps += 1

    def send(self, inner_step: int, *, is_flush: bool) -> Outstanding:
        """Make a contribution outstanding; at most one a fragment."""
        assert self.outstanding is None, f"fragment {self.fragment_id} has one outstanding"
        key = RoundKey(self.timeline, self.fragment_id, self.version, self.attempt)
        self.outstanding = Outstanding(key, inner_step, self.tokens, self.steps, is_flush)
        return self.outstanding

    def settle(self, verdict: Verdict, *, attempt: int, local_mix: float) -> int:
        """Apply the outcome of what is outstanding.

        | verdict              | version | counters                                             |
        | INCLUDED             | + 1     | restart from the send                                |
        | NOT_INCLUDED (drop)  | + 1     | restart from the merge; from the send if local_mix > 0 |
        | REFUSED, DECLINED    | + 1     | keep                                                 |
        | EXPIRED              | same    | keep                                                 |

        Args:
            verdict: The outcome.
            attempt: After EXPIRED, the attempt last announced; counts only where attempts were
                skipped, which no due step served (`MAX_EXPIRED`).
            local_mix: alpha of the merge.

        Returns:
            Inner steps whose local effect an alpha = 0 merge replaced and theta does not have:
            those since the send when INCLUDED, else all since the last merge; else 0.
        """
        sent = self.outstanding
        assert sent is not None, f"fragment {self.fragment_id} has nothing outstanding"
        self.outstanding = None
        if verdict is Verdict.EXPIRED:
            following = sent.key.attempt + 1
            self.attempt = attempt if attempt - following > MAX_EXPIRED else following
            return 0
        self.version, self.attempt = sent.key.version + 1, 0
        self.is_flushed = sent.is_flush
        steps_since_send = self.steps - sent.weight_steps
        overwritten = steps_since_send if verdict is Verdict.INCLUDED else self.local_steps
        self.local_steps = 0
        if verdict is Verdict.INCLUDED or (verdict is Verdict.NOT_INCLUDED and local_mix > 0):
            self.tokens -= sent.weight_tokens
            self.steps = steps_since_send
        elif verdict is Verdict.NOT_INCLUDED:
            self.tokens = self.steps = 0
        return overwritten if local_mix == 0 else 0
