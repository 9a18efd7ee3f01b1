"""Recounts where every token of an island went, from its events and the run's audit log.

For one fragment an island counts the tokens of its inner steps; a contribution carries them away,
a late one or a crash loses them. Recounted here by the table of PROTOCOL.md, "A contribution",
without asking the island's own ledger:

    trained = included + dropped + lost at crashes + left at the end
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco.protocol.island.ledger import LocalMix

Event = Mapping[str, Any]  # JSON values, as a sink wrote them
#: Fragment and version -> header, as the coordinator indexed it.
Headers = Mapping[tuple[int, int], Mapping[str, Any]]

#: Order of what happens after one inner step: a return to published values, merges of earlier
#: sends, sends, merges of these.
_STEP, _RETURN, _EARLIER_OUTCOME, _SEND, _OWN_OUTCOME = range(5)


@dataclass(frozen=True, slots=True)
class Send:
    """A contribution or a decline, with its outcome; None: the island did not live to see it."""

    event: Event
    outcome: Event | None

    @property
    def verdict(self) -> str:
        """Outcome in a word."""
        if self.outcome is None:
            return "unknown"
        return "expired" if self.outcome["kind"] == "round_expired" else self.outcome["outcome"]

    @property
    def text(self) -> str:
        """Name it."""
        e = self.event
        return (
            f"{e['island']} start {e['incarnation']} fragment {e['fragment_id']} version "
            f"{e['version']} attempt {e['attempt']}"
        )


@dataclass(slots=True)
class TokenAccount:
    """Tokens of one island for one fragment, over all its starts."""

    trained: int = 0
    included: int = 0
    dropped: int = 0
    lost: int = 0
    left: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Tokens that are nowhere; negative: counted twice."""
        return self.trained - self.included - self.dropped - self.lost - self.left


def starts_of(events: Sequence[Event]) -> dict[int, list[Event]]:
    """The leader's events of each start that trained, by incarnation."""
    starts: dict[int, list[Event]] = {}
    for event in events:
        if event["island_rank"] == 0 and "incarnation" in event:
            starts.setdefault(event["incarnation"], []).append(event)
    return dict(sorted(starts.items()))


def sends_of(start: Sequence[Event], fragment_id: int) -> list[Send]:
    """Pair what one start sent of a fragment with what became of it.

    An outcome says when what it ends was sent; an expiry names its key.
    """
    sent = [e for e in _of(start, fragment_id) if e["kind"] == "fragment_sent"]
    outcomes = [e for e in _of(start, fragment_id) if e["kind"] != "fragment_sent"]
    found: dict[int, Event] = {}
    for outcome in outcomes:
        for index, event in enumerate(sent):
            if index not in found and outcome.get("outcome") != "absent" and _ends(outcome, event):
                found[index] = outcome
                break
    return [Send(event, found.get(index)) for index, event in enumerate(sent)]


def catches_up(start: Sequence[Event], fragment_id: int) -> list[Event]:
    """Merges of a version while nothing was outstanding."""
    paired = {id(send.outcome) for send in sends_of(start, fragment_id)}
    return [
        e for e in _of(start, fragment_id) if e["kind"] == "fragment_merged" and id(e) not in paired
    ]


def account(
    island: str,
    fragment_id: int,
    events: Sequence[Event],
    headers: Headers,
    *,
    local_mix: LocalMix,
    most_steps: int = 0,
) -> TokenAccount:
    """Recount one fragment of one island.

    Args:
        island: Its name.
        fragment_id: Which fragment.
        events: All events of the island.
        headers: Of the run.
        local_mix: What merges keep of local values.
        most_steps: Inner steps that one contribution counts; what was trained beyond them waits for
            the next one. 0: any number.
    """
    total = TokenAccount()
    for incarnation, start in starts_of(events).items():
        counted = _counted(headers, fragment_id, island, incarnation)
        total.included += sum(counted.values())
        _recount(total, start, fragment_id, counted, local_mix=local_mix, most_steps=most_steps)
    if total.missing:
        total.problems.append(
            f"{island} fragment {fragment_id}: {total.trained} tokens trained, {total.included} "
            f"included, {total.dropped} dropped, {total.lost} lost, {total.left} left: "
            f"{total.missing} missing"
        )
    return total


def _recount(
    total: TokenAccount,
    start: Sequence[Event],
    fragment_id: int,
    counted: Mapping[tuple[int, int], int],
    *,
    local_mix: LocalMix,
    most_steps: int,
) -> None:
    """Follow the counter of one start; `counted` is what the audit log counts of it, by key."""
    tokens = outstanding = void = 0
    is_told = set()
    for what, event in _in_order(start, fragment_id):
        if what == "step":
            tokens += event["num_tokens"]
            total.trained += event["num_tokens"]
        elif what == "returned":
            total.dropped += tokens - outstanding
            tokens = void = outstanding
        elif what == "send":
            outstanding = event["weight_tokens"]
            is_told.add((event["version"], event["attempt"]))
            is_part = 0 < most_steps == event["weight_steps"] and outstanding < tokens
            if outstanding != tokens and not (event["declined"] or is_part):
                total.problems.append(
                    f"{Send(event, None).text}: sent {event['weight_tokens']} tokens after inner "
                    f"step {event['inner_step']}, its events make it {tokens}"
                )
                tokens = event["weight_tokens"]
        elif what in ("declined", "refused"):  # kept, but for what the merge let go
            total.dropped += event["dropped_tokens"]
            tokens -= event["dropped_tokens"]
        elif what == "expired":  # kept, unless it was given up meanwhile
            total.dropped += void
            tokens -= void
        elif what == "included":
            tokens -= event["weight_tokens"] + event["dropped_tokens"]
            total.dropped += event["dropped_tokens"]
        elif what == "not_included" and local_mix not in (0, "since_send"):
            tokens -= event["weight_tokens"]
            total.dropped += event["weight_tokens"]
        elif what in ("absent", "not_included") and local_mix in (0, "since_send"):
            total.dropped += tokens
            tokens = 0
        elif what == "unknown":  # the audit log knows
            tokens -= counted.get((event["version"], event["attempt"]), 0)
        if what not in ("step", "returned", "send"):
            outstanding = void = 0
    # Killed after its contribution had left and before it could tell.
    untold = {key: weight for key, weight in counted.items() if key not in is_told}
    tokens -= sum(untold.values())
    has_ended = any(event["kind"] == "island_ended" for event in start)
    for version, attempt in untold:
        if has_ended or (version, attempt) < max(is_told, default=(0, 0)):
            total.problems.append(
                f"{start[0]['island']} start {start[0]['incarnation']} fragment {fragment_id} "
                f"version {version} attempt {attempt}: counted, and never sent"
            )
    if has_ended:
        total.left += tokens
    else:
        total.lost += tokens
    if has_ended and tokens < 0:
        total.problems.append(
            f"{start[0]['island']} start {start[0]['incarnation']} fragment {fragment_id}: "
            f"{-tokens} tokens more are counted than were trained"
        )


def _in_order(start: Sequence[Event], fragment_id: int) -> Iterator[tuple[str, Event]]:
    """Yield steps, sends and outcomes as they happened; an outcome comes with its send's event.

    Events of one inner step are written by two threads, so their order in the file says nothing.
    """
    placed: list[tuple[int, int, int, str, Event]] = []

    def place(inner_step: int, order: int, what: str, event: Event) -> None:
        placed.append((inner_step, order, len(placed), what, event))

    for event in start:
        if event["kind"] == "inner_step":
            place(event["inner_step"], _STEP, "step", event)
        elif event["kind"] == "published_taken":
            place(event["inner_step"], _RETURN, "returned", event)
    last = max((event.get("inner_step", 0) for event in start), default=0)
    for send in sends_of(start, fragment_id):
        step = send.event["inner_step"]
        place(step, _SEND, "send", send.event)
        if send.outcome is None:
            place(last + 1, _OWN_OUTCOME, "unknown", send.event)
            continue
        is_own = send.outcome["inner_step"] == step
        order = _OWN_OUTCOME if is_own else _EARLIER_OUTCOME
        ended = {**send.event, "dropped_tokens": send.outcome.get("dropped_tokens", 0)}
        place(send.outcome["inner_step"], order, send.verdict, ended)
    for event in catches_up(start, fragment_id):
        place(event["inner_step"], _EARLIER_OUTCOME, "absent", event)
    for *_, what, event in sorted(placed, key=lambda each: each[:3]):
        yield what, event


def _counted(
    headers: Headers, fragment_id: int, island: str, incarnation: int
) -> dict[tuple[int, int], int]:
    """What the audit log counts of one start: (base version, attempt) -> tokens."""
    return {
        (version - 1, header["attempt"]): c["weight_tokens"]
        for (fragment, version), header in headers.items()
        if fragment == fragment_id
        for c in header["contributors"]
        if (c["island"], c["incarnation"]) == (island, incarnation)
    }


def _of(start: Sequence[Event], fragment_id: int) -> list[Event]:
    kinds = ("fragment_sent", "fragment_merged", "round_expired")
    mine = [e for e in start if e["kind"] in kinds and e["fragment_id"] == fragment_id]
    return sorted(mine, key=lambda event: event["inner_step"])


def _ends(outcome: Event, sent: Event) -> bool:
    if outcome["kind"] == "round_expired":
        return (outcome["version"], outcome["attempt"]) == (sent["version"], sent["attempt"])
    sent_at = outcome["inner_step"] - outcome["staleness_steps"]
    return bool(sent_at == sent["inner_step"] and outcome["version"] > sent["version"])
