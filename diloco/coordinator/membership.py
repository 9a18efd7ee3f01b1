"""Who takes part in a run: a pure machine over joins and reports.

It accepts or refuses joins, grants incarnations, fixes the plan with the first join, and keeps
what islands and syncers last reported. Whatever it must never forget comes back as `entries`:
key-value pairs that the caller writes durably before it answers.

Source: protocol.md sections 4 (version 0), 8 and 10.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class JoinVerdict(StrEnum):
    """Answer to a join."""

    ACCEPTED = "accepted"
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    PLAN_MISMATCH = "plan_mismatch"
    UNKNOWN_ISLAND = "unknown_island"
    WRONG_RUN = "wrong_run"


@dataclass(frozen=True, slots=True)
class Joined:
    """Outcome of a join: the verdict, the granted incarnation, and what to write first."""

    verdict: JoinVerdict
    message: str = ""
    incarnation: int = 0
    entries: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Member:
    """What is known of one configured island."""

    slot: int
    incarnation: int = 0
    start_id: str = ""
    exit_code: int | None = None
    exit_reason: str = ""


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
    members: dict[str, Member] = field(init=False)
    fatal_reason: str = ""
    fatal_exit_code: int = 0

    def __post_init__(self) -> None:
        """Give every configured island its slot."""
        self.members = {island: Member(slot) for slot, island in enumerate(self.islands)}

    def restore(self, entries: Mapping[str, str]) -> None:
        """Take back what was written durably before a restart."""
        self.plan_json = entries.get("plan", "")
        for island, member in self.members.items():
            if text := entries.get(f"island/{island}"):
                saved = json.loads(text)
                member.incarnation, member.start_id = saved["incarnation"], saved["start_id"]

    def join(
        self, *, run: str, island: str, identity_json: str, plan_json: str, start_id: str
    ) -> Joined:
        """Accept or refuse one start of an island.

        A repeated join of the same start gets the same incarnation; another start of the island
        gets the next one, which fences the earlier.
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
                f"the configuration of island {island!r} differs from the run's (run, island):\n  "
                + "\n  ".join(differing),
            )
        if self.plan_json and plan_json != self.plan_json:
            return Joined(
                JoinVerdict.PLAN_MISMATCH,
                f"the plan of island {island!r} differs from the run's (run, island):\n  "
                + "\n  ".join(_plan_difference(self.plan_json, plan_json)),
            )
        if start_id == member.start_id:
            return Joined(JoinVerdict.ACCEPTED, incarnation=member.incarnation)
        entries: list[tuple[str, str]] = []
        if not self.plan_json:
            self.plan_json = plan_json
            entries.append(("plan", plan_json))
        member.incarnation += 1
        member.start_id = start_id
        member.exit_code, member.exit_reason = None, ""
        saved = {"incarnation": member.incarnation, "start_id": start_id}
        entries.append((f"island/{island}", json.dumps(saved)))
        return Joined(JoinVerdict.ACCEPTED, incarnation=member.incarnation, entries=tuple(entries))

    def is_current(self, island: str, incarnation: int) -> bool:
        """Whether this is the newest start of a known island."""
        member = self.members.get(island)
        return member is not None and member.incarnation == incarnation

    def left(self, island: str, incarnation: int, exit_code: int, reason: str) -> None:
        """Note how a start of an island ended; words of earlier starts are ignored."""
        if self.is_current(island, incarnation):
            self.members[island].exit_code = exit_code
            self.members[island].exit_reason = reason

    def failed(self, reason: str, exit_code: int) -> None:
        """Note that the run must stop; the first reason stays."""
        if not self.fatal_reason:
            self.fatal_reason, self.fatal_exit_code = reason, exit_code

    @property
    def is_finished(self) -> bool:
        """Whether every island has left without an error."""
        return all(member.exit_code == 0 for member in self.members.values())


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
            differing.append(f"{path}: {_short(a)}, {_short(b)}")

    walk("", json.loads(ours), json.loads(theirs))
    return differing[:10]


def _short(value: object) -> str:
    text = f"{len(value)} entries" if isinstance(value, list) else json.dumps(value)
    return text if len(text) < 80 else text[:77] + "..."
