"""The events of rounds, which their syncer writes into its own file.

The records are the truth about versions; these say how long rounds waited, for whom, and what
was aborted. An event that a killed syncer did not write is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from diloco.telemetry.events import Event


@dataclass(frozen=True, slots=True)
class RoundOpened(Event):
    """An attempt at the version after `version` takes contributions of `members`."""

    kind: ClassVar[str] = "round_opened"
    fragment_id: int
    version: int
    attempt: int
    members: tuple[str, ...]
    takes_flush: bool


@dataclass(frozen=True, slots=True)
class RoundClosed(Event):
    """The version after `version` is durable.

    `quorum` contributions were enough. `waited_s` is from the opening to the close, `grace_s` the
    part of it that a quorum waited for stragglers, `commit_s` from the close on. A round is solo
    when one island made the version and others were members. `refused` and `rejected` say why
    islands left the attempt, or what they sent was not counted.
    """

    kind: ClassVar[str] = "round_closed"
    fragment_id: int
    version: int
    attempt: int
    members: tuple[str, ...]
    contributors: tuple[str, ...]
    quorum: int
    waited_s: float
    grace_s: float
    commit_s: float
    is_solo: bool
    is_flush: bool
    refused: Mapping[str, str]
    rejected: Mapping[str, str]
    merged_tokens: int
    digest: str


@dataclass(frozen=True, slots=True)
class FragmentDamaged(Event):
    """A version that was published cannot be read: the fragment is not served any more."""

    kind: ClassVar[str] = "fragment_damaged"
    fragment_id: int
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class FragmentRepaired(Event):
    """A version that was lost was taken back from an island: the fragment is served again."""

    kind: ClassVar[str] = "fragment_repaired"
    fragment_id: int
    version: int
    from_island: str


@dataclass(frozen=True, slots=True)
class RoundExpired(Event):
    """An attempt expired, durably; `missing` are the members that did not come."""

    kind: ClassVar[str] = "round_expired"
    fragment_id: int
    version: int
    attempt: int
    members: tuple[str, ...]
    missing: tuple[str, ...]
    reason: str
