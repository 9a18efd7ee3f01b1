"""Rebuilds the entries of a lost journal from the files of a run: pure.

Records name the islands that contributed and how far each had come; the store names the starts that
its syncer accepted, the timeline, and the last orders; pins name run checkpoints. Not known are the
text's digest and the first inner step, which the next join fixes again, who was kicked or revoked,
and how far the slots of the text were drawn since the newest cut of which parts are here: that is
drawn again.

No earlier start counts any more: each island gets an incarnation that is beyond all that are known,
and beyond any that a counter from 1 on could have reached.

Source: PROTOCOL.md, "Lost journal".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.protocol.run.admission import Entries
from diloco.protocol.run.assignment import ASSIGNED
from diloco.protocol.run.claims import Claims
from diloco.protocol.run.cuts import Cut, Part, cut_entry
from diloco.protocol.run.members import Member, member_entry
from diloco.protocol.run.slots import SlotPosition

#: Start id of what is remembered of the starts before.
BEFORE = "before-the-journal-was-lost"


@dataclass(frozen=True, slots=True)
class Remains:
    """What is left of a run without its journal.

    Args:
        plan_json: The run's plan.
        islands: Configured islands, sorted.
        is_elastic: Whether islands come and go.
        assigned: Fragments of each of several syncers; empty: there is one.
        headers: Of all versions that are known, in any order.
        incarnations: Island -> highest incarnation that a syncer has accepted.
        fenced: Island -> least incarnation that counted.
        timeline: Counter of resumes.
        resume_step: Checkpoint that the timeline began from.
        pins: Run checkpoints of which the syncers' parts are whole.
        parts: Run checkpoint -> island -> its part, of those that are on this machine.
        policy: What operators had set, by dotted key.
        policy_revision: Counter of these settings.
        generation: Counter of changes of who takes part, as far as is known.
        is_paused: Whether the run was paused.
        unix_s: Now, by the wall clock.
        num_slots: That the text is divided into, where islands come and go.
    """

    plan_json: str
    islands: tuple[str, ...]
    is_elastic: bool
    headers: tuple[Mapping[str, Any], ...]
    unix_s: float
    assigned: tuple[tuple[int, ...], ...] = ()
    incarnations: Mapping[str, int] = field(default_factory=dict)
    fenced: Mapping[str, int] = field(default_factory=dict)
    timeline: int = 0
    resume_step: int = 0
    pins: tuple[int, ...] = ()
    parts: Mapping[int, Mapping[str, Part]] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    policy_revision: int = 0
    generation: int = 0
    is_paused: bool = False
    num_slots: int = 0

    @property
    def known_incarnations(self) -> dict[str, int]:
        """Island -> highest incarnation that anything here names."""
        known: dict[str, int] = dict.fromkeys(self.islands, 0)
        known |= dict.fromkeys({*self.incarnations, *self.fenced}, 0)
        for header in self.headers:
            for each in header["contributors"]:
                known[each["island"]] = max(known.get(each["island"], 0), each["incarnation"])
            for island, last in header["last_included"].items():
                known[island] = max(known.get(island, 0), last[0])
        return {
            island: max(number, self.incarnations.get(island, 0), self.fenced.get(island, 0))
            for island, number in known.items()
        }

    @property
    def first_incarnation(self) -> int:
        """Least incarnation that is granted from now on: of any island."""
        return max(int(self.unix_s), *(n + 1 for n in self.known_incarnations.values()))

    @property
    def inner_steps(self) -> dict[str, int]:
        """Island -> inner step that it is known to have made in this timeline."""
        steps: dict[str, int] = {}
        for header in self.headers:
            if header["timeline"] == self.timeline:
                for each in header["contributors"]:
                    island = each["island"]
                    steps[island] = max(steps.get(island, 0), each["sent_at_inner_step"])
        return steps

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Run checkpoints that can be resumed, ascending: parts of islands are here, too.

        Scheduled: of every island. Of those elsewhere the islands say so again when they have
        joined.
        """
        needed = set() if self.is_elastic else set(self.islands)
        return tuple(
            step
            for step in sorted(self.pins)
            if (here := self.parts.get(step, {})) and needed <= here.keys()
        )


def entries_of(remains: Remains) -> Entries:
    """Give the entries of a journal that a coordinator can go on with."""
    known, first = remains.known_incarnations, remains.first_incarnation
    guests = sorted(known.keys() - set(remains.islands))
    before = Member(0, {BEFORE: first - 1}, timeline=-1, fenced_below=first)
    timeline = {"timeline": remains.timeline, "resume_step": remains.resume_step}
    return (
        ("plan", remains.plan_json),
        *(((ASSIGNED, json.dumps(remains.assigned)),) if remains.assigned else ()),
        ("guests", json.dumps(guests)),
        *(member_entry(island, before) for island in sorted(known)),
        *_positions(remains.timeline, remains.inner_steps),
        ("timeline", json.dumps(timeline)),
        ("generation", str(remains.generation + 1)),
        ("paused", json.dumps(remains.is_paused)),
        ("checkpoint", json.dumps(remains.checkpoints)),
        *_policy(remains.policy, remains.policy_revision),
        *(_cuts(remains) if remains.is_elastic else ()),
        *(_claims(remains) if remains.is_elastic else ()),
    )


def _positions(timeline: int, inner_steps: Mapping[str, int]) -> Iterable[tuple[str, str]]:
    for island, inner_step in sorted(inner_steps.items()):
        value = {"timeline": timeline, "inner_step": inner_step}
        yield f"position/{island}", json.dumps(value)


def _policy(policy: Mapping[str, Any], revision: int) -> Iterable[tuple[str, str]]:
    """Give one revision to each key, and the newest to the last, so that they go on from there."""
    first = max(revision, len(policy)) - len(policy) + 1
    for number, (key, value) in enumerate(sorted(policy.items()), start=first):
        yield f"policy/{number}", json.dumps({"key": key, "value": value})


def _cuts(remains: Remains) -> Iterable[tuple[str, str]]:
    """Give the cuts that have parts here; of the newest its number, so that it is never reused."""
    complete = set(remains.checkpoints)
    numbers = {*complete, remains.resume_step, *remains.pins[-1:]} - {0}
    tokens = max((h.get("merged_tokens", 0) for h in remains.headers), default=0)
    told = {str(slot): SlotPosition().as_json() for slot in range(remains.num_slots)}
    for number in sorted(numbers):
        parts = remains.parts[number] if number in complete else {}
        yield from cut_entry(
            Cut(number, remains.timeline, tokens, told, False, (), parts, bool(parts))
        )


def _claims(remains: Remains) -> Entries:
    """Let each slot of the text go on from where the newest part of a cut has it."""
    told = {str(slot): SlotPosition().as_json() for slot in range(remains.num_slots)}
    for step in remains.checkpoints:
        for part in remains.parts[step].values():
            told |= part.text
    return Claims(remains.num_slots, remains.islands).restored(told, ())
