"""Why coordinator and syncer refuse what a peer says: the causes by which it is counted.

A cause names the field or the property that is wrong, so that metrics and the status have few rows
whatever peers send; the words next to it, which carry the values, go to the caller and the log.
"""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """What is wrong with a refused call."""

    # Of a call: who speaks.
    GRANT = "grant"  # not signed for this run and role, or expired
    TIMELINE = "timeline"
    INCARNATION = "incarnation"  # a newer start of the island has joined
    # Of a contribution, or of what a member reports of a round.
    KEY = "key"  # a fragment, version or attempt that is not open
    LANE = "lane"
    WEIGHT = "weight"
    CODEC = "codec"
    SIZE = "size"
    DIGEST = "digest"
    CONTENT = "content"  # a payload that no encoder makes: NaN, infinity, codes of no level
    OUTLIER = "outlier"  # it is not of this training (`outer.guard`)
    CONFLICT = "conflict"  # another contribution, or version, than was sent or published before
    PIN = "pin"
    # Of a join.
    PROTOCOL_VERSION = "protocol_version"
    RUN = "run"
    ISLAND = "island"
    IDENTITY = "identity"
    PLAN = "plan"
    TOKENIZER = "tokenizer"
    TEXT = "text"
    START_STEP = "start_step"
    STOPPED = "stopped"  # the run is over for this island
    FULL = "full"  # as many islands as the run can have are there
    KICKED = "kicked"  # the island was taken out
    BOUNDS = (
        "bounds"  # a number or text that cannot be in this run (diloco/protocol/run/peer_bounds.py)
    )
    # Of a message: it has a field that cannot be, or more than this run can have.
    FRAME = "frame"
