"""What happened when, of a simulated or a real run: spans of time by island, lane and fragment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

#: compute: inner steps; gather: a fragment's values out of the ranks; encode: into bytes; send:
#: over the link towards who merges; fetch: a version over the link towards an island; decode: out
#: of bytes; wait: training stands still for an outcome; merge: contributions into a version at a
#: syncer, or a version into an island's parameters.
SpanKind: TypeAlias = Literal[
    "compute", "gather", "encode", "send", "fetch", "decode", "wait", "merge"
]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Attributes:
        island: Who did it; a syncer's own work bears the syncer's name.
        lane: Of the fragment; None: of all its lanes, or of no fragment.
        fragment: What it was about; None: of no fragment, such as compute.
        kind: What it was.
        begin_s: Seconds since the run began.
        end_s: Seconds since the run began, at least `begin_s`.
    """

    island: str
    lane: int | None
    fragment: int | None
    kind: SpanKind
    begin_s: float
    end_s: float
