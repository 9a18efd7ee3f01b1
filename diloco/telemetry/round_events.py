"""The events of rounds, which their syncer writes into its own file.

The records are the truth about versions; these say how long rounds waited, for whom, and what
was aborted. An event that a killed syncer did not write is missing.
"""

from __future__ import annotations

from collections.abc import Mapping

from diloco.telemetry.events import Event


class RoundOpened(Event, kind="round_opened"):
    """An attempt at the version after `version` takes contributions of `members`."""

    fragment_id: int
    version: int
    attempt: int
    members: tuple[str, ...]
    takes_flush: bool


class RoundClosed(Event, kind="round_closed"):
    """The version after `version` is durable.

    `quorum` contributions were enough. `waited_s` is from the opening to the close, `grace_s` the
    part of it that a quorum waited for stragglers, `commit_s` from the close on. A round is solo
    when one island made the version and others were members. `refused` and `rejected` say why
    islands left the attempt, or what they sent was not counted.
    """

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


class FragmentDamaged(Event, kind="fragment_damaged"):
    """A version that was published cannot be read: the fragment is not served any more."""

    fragment_id: int
    version: int
    reason: str


class FragmentRepaired(Event, kind="fragment_repaired"):
    """A version that was lost was taken back from an island: the fragment is served again."""

    fragment_id: int
    version: int
    from_island: str


class RoundExpired(Event, kind="round_expired"):
    """An attempt expired, durably; `missing` are the members that did not come."""

    fragment_id: int
    version: int
    attempt: int
    members: tuple[str, ...]
    missing: tuple[str, ...]
    reason: str
