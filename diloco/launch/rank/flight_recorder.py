"""Says in which collectives a rank waits, as the flight recorders of PyTorch have it.

There is one recorder for gloo and one for NCCL. Which groups have something pending they say
without asking a device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diloco.island.groups import NCCL_LATER_S

_NCCL = "nccl"


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that a rank has begun.

    Args:
        recorder: "gloo" or "nccl".
        record: Its number in that recorder.
        group_number: Of its group in that recorder.
        name: Such as "gloo:all_reduce".
        group: Its group's name and description.
        number: Counts the collectives of its group.
        timeout_s: After which its backend gives it up.
    """

    recorder: str
    record: int
    group_number: str
    name: str
    group: str
    number: int
    timeout_s: float

    def __str__(self) -> str:
        """Say which it is, for messages."""
        return f"{self.name} number {self.number} of group {self.group}"


class FlightRecorders:
    """The recorders of this process."""

    def __init__(self, *, has_nccl: bool) -> None:
        """Find them; `has_nccl` says whether this process has groups of NCCL."""
        own: Any = torch._C._distributed_c10d  # PyTorch has no types for it
        self._dumps: dict[str, Callable[..., str]] = {"gloo": own._dump_fr_trace_json}
        if has_nccl:
            self._dumps[_NCCL] = own._dump_nccl_trace_json

    def completed(self) -> dict[tuple[str, str], int]:
        """Of each group (recorder, number) that has something pending: the last one completed."""
        found = {}
        for recorder, dump in self._dumps.items():
            for group, status in json.loads(dump(False))["pg_status"].items():
                completed = int(status["last_completed_collective"])
                if completed != int(status["last_enqueued_collective"]):
                    found[recorder, group] = completed
        return found

    def pending(self) -> list[Collective]:
        """Return the collectives that have begun and not ended, oldest first.

        NCCL's recorder asks the device: it may not answer where that hangs.
        """
        return [
            collective
            for recorder, dump in self._dumps.items()
            for collective in pending_entries(recorder, json.loads(dump()).get("entries", ()))
        ]

    def write(self, path: Path) -> None:
        """Write all that is recorded, as JSON by recorder."""
        found = {recorder: json.loads(dump()) for recorder, dump in self._dumps.items()}
        path.write_text(json.dumps(found, indent=1) + "\n")


class PendingCollectives:
    """Finds what has been pending for too long; pure but for what it is given.

    A collective counts as pending from when its group stands still: none of that group ended.
    What stands still for half the limit is looked at one by one: a group whose collectives were
    not seen to end in order seems to have one pending until the next.

    Attributes:
        since: Of each collective pending for half the limit: when its group was first seen so.
    """

    def __init__(self, limit_s: float) -> None:
        """Begin with nothing pending; `limit_s` is `islands.NAME.collective_timeout`."""
        self._limit_s = limit_s
        self._still: dict[tuple[tuple[str, str], int], float] = {}
        self._noted: dict[Collective, float] = {}
        self.since: dict[Collective, float] = {}

    def look(
        self,
        now: float,
        completed: Mapping[tuple[str, str], int],
        pending: Callable[[], Collection[Collective]],
    ) -> None:
        """Take what the recorders say.

        Args:
            now: Monotonic seconds.
            completed: See `FlightRecorders.completed`.
            pending: See `FlightRecorders.pending`; called where a group stands still.
        """
        self._still = {each: self._still.get(each, now) for each in completed.items()}
        still = {
            group: at for (group, _), at in self._still.items() if now - at >= self._limit_s / 2
        }
        self.since = {
            each: still[each.recorder, each.group_number]
            for each in (pending() if still else ())
            if (each.recorder, each.group_number) in still
        }
        self._noted = {each: self._noted.get(each, now) for each in self.since}

    def is_due(self, now: float) -> bool:
        """Whether one has been pending for the limit, in a group without a longer one of its own.

        A group that has one waits for other islands (that of the start); gloo ends such a wait.
        """
        for each, noted in self._noted.items():
            longest_s = self._limit_s + (NCCL_LATER_S if each.recorder == _NCCL else 0.0)
            is_over = now - self.since[each] >= self._limit_s and now - noted >= self._limit_s / 2
            if is_over and each.timeout_s <= longest_s:
                return True
        return False


def pending_entries(recorder: str, entries: Iterable[Mapping[str, Any]]) -> list[Collective]:
    """Return the collectives of a recorder that have not ended; those of a group end in order.

    What NCCL does in a batch has entries that are never retired, and after them one of the batch.

    Args:
        recorder: Its name.
        entries: As it writes them.
    """
    pending, over = [], set()
    for entry in sorted(entries, key=lambda entry: -entry["record_id"]):
        if entry["retired"]:
            over.add(entry["pg_id"])
        elif entry["pg_id"] not in over:
            pending.append(_collective(recorder, entry))
    return pending[::-1]


def _collective(recorder: str, entry: Mapping[str, Any]) -> Collective:
    name, description = entry["process_group"]
    return Collective(
        recorder,
        entry["record_id"],
        str(entry["pg_id"]),
        entry["profiling_name"],
        f"{name} ({description})" if description not in ("", "undefined") else name,
        entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
        entry["timeout_ms"] / 1000,
    )
