"""Who takes part in a run: a pure machine over joins and departures.

It accepts or refuses joins, grants incarnations, fixes the plan with the first join and knows who
has left. Whatever it must never forget comes back as `entries`: key-value pairs that the caller
writes durably, then applies, then answers; a write that fails has changed nothing.

Source: protocol.md sections 4 (version 0), 8 and 10.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from diloco.errors import PlanMismatch
from diloco.outer.fragments import Plan


class JoinVerdict(StrEnum):
    """Answer to a join."""

    ACCEPTED = "accepted"
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    PLAN_MISMATCH = "plan_mismatch"
    UNKNOWN_ISLAND = "unknown_island"
    WRONG_RUN = "wrong_run"


@dataclass(frozen=True, slots=True)
class Joined:
    """Outcome of a join: verdict, granted incarnation, and what to write and apply first."""

    verdict: JoinVerdict
    message: str = ""
    incarnation: int = 0
    entries: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Member:
    """What is known of one configured island.

    Args:
        slot: Its island slot.
        incarnations: Incarnation of each start, by start id; numbered from 1 as they joined.
        exit_code: How the newest start ended; None while it is at work.
    """

    slot: int
    incarnations: Mapping[str, int] = field(default_factory=dict)
    exit_code: int | None = None

    @property
    def incarnation(self) -> int:
        """Incarnation of the newest start; 0 before the first."""
        return len(self.incarnations)


@dataclass(slots=True)
class Membership:
    """Islands of one run.

    Args:
        run: Name of the run.
        islands: Configured island ids, sorted; the index is the island slot.
        identity_json: Identity class of the coordinator's configuration.
        identity_difference: Names the dotted keys in which two identity documents differ.
    """

    run: str
    islands: tuple[str, ...]
    identity_json: str
    identity_difference: Callable[[str, str], list[str]]
    plan_json: str = ""
    corpus_sha256: str = ""
    members: dict[str, Member] = field(init=False)
    fatal_reason: str = ""
    fatal_exit_code: int = 0

    def __post_init__(self) -> None:
        """Give every configured island its slot."""
        self.members = {island: Member(slot) for slot, island in enumerate(self.islands)}

    def apply(self, entries: Iterable[tuple[str, str]]) -> None:
        """Take over what is durable: after a write, and after a restart all of it."""
        for key, value in entries:
            kind, _, island = key.partition("/")
            if kind == "plan":
                self.plan_json = value
            elif kind == "corpus":
                self.corpus_sha256 = value
            elif kind == "island" and island in self.members:
                self.members[island] = Member(self.members[island].slot, **json.loads(value))

    def join(
        self,
        *,
        run: str,
        island: str,
        identity_json: str,
        plan_json: str,
        corpus_sha256: str,
        start_id: str,
    ) -> Joined:
        """Accept or refuse one start of an island; the first one fixes the plan and the text.

        A repeated join of one start gets the same incarnation, even when a later start has fenced
        it; another start of the island gets the next one, which fences the earlier.
        """
        if run != self.run:
            return Joined(JoinVerdict.WRONG_RUN, f"this is run {self.run!r}, you asked for {run!r}")
        member = self.members.get(island)
        if member is None:
            names = ", ".join(self.islands)
            return Joined(
                JoinVerdict.UNKNOWN_ISLAND,
                f"island {island!r} is not in the coordinator's configuration, which has {names}",
            )
        if differing := self.identity_difference(self.identity_json, identity_json):
            return Joined(
                JoinVerdict.FINGERPRINT_MISMATCH,
                f"the configuration of island {island!r} (there) differs from the run's (here):\n  "
                + "\n  ".join(differing),
            )
        try:
            Plan.from_json(plan_json)
        except PlanMismatch as error:
            message = f"island {island!r} sent no usable plan: {error}"
            return Joined(JoinVerdict.PLAN_MISMATCH, message)
        if self.plan_json and plan_json != self.plan_json:
            return Joined(
                JoinVerdict.PLAN_MISMATCH,
                f"the plan of island {island!r} (there) differs from the run's (here):\n  "
                + "\n  ".join(_plan_difference(self.plan_json, plan_json)),
            )
        if self.plan_json and corpus_sha256 != self.corpus_sha256:
            return Joined(
                JoinVerdict.FINGERPRINT_MISMATCH,
                f"the text of island {island!r} has sha256 {corpus_sha256} (there), the run's has "
                f'{self.corpus_sha256} (here): data.source = "stdlib" needs the same release of '
                f"Python on every island",
            )
        if start_id in member.incarnations:
            return Joined(JoinVerdict.ACCEPTED, incarnation=member.incarnations[start_id])
        incarnation = member.incarnation + 1
        incarnations = {**member.incarnations, start_id: incarnation}
        entries = [] if self.plan_json else [("plan", plan_json), ("corpus", corpus_sha256)]
        entries.append(_island_entry(island, incarnations, exit_code=None))
        return Joined(JoinVerdict.ACCEPTED, incarnation=incarnation, entries=tuple(entries))

    def is_current(self, island: str, incarnation: int) -> bool:
        """Whether this is the newest start of a known island."""
        member = self.members.get(island)
        return member is not None and member.incarnation == incarnation

    def left(self, island: str, incarnation: int, exit_code: int) -> tuple[tuple[str, str], ...]:
        """Note how a start of an island ended: entries; none for the word of an earlier start."""
        if not self.is_current(island, incarnation):
            return ()
        incarnations = self.members[island].incarnations
        return (_island_entry(island, incarnations, exit_code=exit_code),)

    def failed(self, reason: str, exit_code: int) -> None:
        """Note that the run must stop; the first reason stays."""
        if not self.fatal_reason:
            self.fatal_reason, self.fatal_exit_code = reason, exit_code

    @property
    def is_finished(self) -> bool:
        """Whether every island has left without an error."""
        return all(member.exit_code == 0 for member in self.members.values())

    @property
    def is_deserted(self) -> bool:
        """Whether no island is left that joined."""
        return all(m.exit_code is not None for m in self.members.values() if m.incarnation)


def _island_entry(
    island: str, incarnations: Mapping[str, int], *, exit_code: int | None
) -> tuple[str, str]:
    saved = {"incarnations": dict(incarnations), "exit_code": exit_code}
    return f"island/{island}", json.dumps(saved)


def _plan_difference(ours: str, theirs: str) -> list[str]:
    """Name the first places where two plan manifests differ, with both values."""
    differing: list[str] = []

    def walk(path: str, a: object, b: object) -> None:
        if isinstance(a, dict) and isinstance(b, dict):
            for key in sorted({*a, *b}):
                walk(f"{path}.{key}".lstrip("."), a.get(key), b.get(key))
        elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            for index, (left, right) in enumerate(zip(a, b, strict=True)):
                walk(f"{path}[{index}]", left, right)
        elif a != b:
            differing.append(f"{path}: {_short(a)} here, {_short(b)} there")

    walk("", json.loads(ours), json.loads(theirs))
    return differing[:10]


def _short(value: object) -> str:
    text = f"{len(value)} entries" if isinstance(value, list) else json.dumps(value)
    return text if len(text) < 80 else text[:77] + "..."
