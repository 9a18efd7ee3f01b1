"""Checks that a joining island shares what all must, and words the refusal.

Source: PROTOCOL.md, "Join", "Version 0" and "Classes of configuration".
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from diloco.bounded_text import read_peer_json
from diloco.errors import PlanMismatch
from diloco.outer.fragments import Plan, plan_difference
from diloco.refusals import Cause

Entries = tuple[tuple[str, str], ...]

#: Bytes of the answer to a first poll, in one header, at most; the rest is for outcomes and names.
_MOST_ANSWER_BYTES = 7 << 17
#: What it says of a fragment and of a lane, whose digest it names.
_FRAGMENT_BYTES, _LANE_BYTES = 160, 34
#: Of a plan.
MOST_LANES = _MOST_ANSWER_BYTES // _LANE_BYTES
_MOST_DIGEST = 256


class JoinVerdict(StrEnum):
    """Answer to a join."""

    ACCEPTED = "accepted"
    BATCH_TOO_LARGE = "batch_too_large"
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    KICKED = "kicked"
    PLAN_MISMATCH = "plan_mismatch"
    RUN_FULL = "run_full"
    RUN_STOPPED = "run_stopped"
    UNKNOWN_ISLAND = "unknown_island"
    WRONG_RUN = "wrong_run"


@dataclass(frozen=True, slots=True)
class Joined:
    """Outcome of a join: verdict, granted incarnation, and what to write and apply in any case.

    A refusal has a message, which names the field and both values, and a cause.
    """

    verdict: JoinVerdict
    message: str = ""
    incarnation: int = 0
    cause: Cause | None = None
    entries: Entries = ()


@dataclass(frozen=True, slots=True)
class Shared:
    """What all islands of a run share, as one side has it.

    Args:
        identity_json: Identity class of its configuration.
        plan_json: Of the plan manifest; empty before the first join.
        corpus_sha256: Of the text.
        tokenizer_digest: Of the tokenizer; empty: not said.
        start_step: Inner step at which a new run starts.
    """

    identity_json: str
    plan_json: str
    corpus_sha256: str
    tokenizer_digest: str
    start_step: int

    def without_names(self) -> Shared:
        """Return it without the islands' names, for runs whose sites need not know each other."""
        return replace(self, identity_json=_without_names(self.identity_json))


def objection(
    here: Shared,
    there: Shared,
    island: str,
    identity_difference: Callable[[str, str], list[str]],
) -> Joined | None:
    """Refuse an island that does not share what the run's islands do; None if it does."""
    if differing := identity_difference(here.identity_json, there.identity_json):
        return Joined(
            JoinVerdict.FINGERPRINT_MISMATCH,
            f"the configuration of island {island!r} (there) differs from the run's (here):\n  "
            + "\n  ".join(differing),
            cause=Cause.IDENTITY,
        )
    num_fragments = num_fragments_of(here.identity_json)
    if refusal := plan_refusal(num_fragments, here.plan_json, there.plan_json):
        message = f"island {island!r} sent {refusal}"
        return Joined(JoinVerdict.PLAN_MISMATCH, message, cause=Cause.PLAN)
    return _data_objection(here, there, island)


def num_fragments_of(identity_json: str) -> int | None:
    """Return how many fragments a configuration wants; None: it says nothing."""
    wanted: int | None = json.loads(identity_json).get("outer.num_fragments")
    return wanted


@lru_cache(maxsize=2)
def plan_refusal(num_fragments: int | None, here: str, there: str) -> str:
    """Say what is wrong with the plan of an island that joins; empty: nothing.

    A large one takes long to read: the caller who has others to answer meanwhile calls this in a
    thread first, and what it found is remembered.

    Args:
        num_fragments: That the run's configuration says; None: it says nothing.
        here: The run's plan; empty before the first join, whose plan is that of all.
        there: The island's.
    """
    if here and there == here:
        return ""
    try:
        if here:
            differing = "\n  ".join(plan_difference(here, there))
            return f"a plan (there) that differs from the run's (here):\n  {differing}"
        plan = Plan.from_json(there)
        if problem := size_problem(plan):
            raise PlanMismatch(problem)
        if num_fragments not in (None, num := len(plan.fragments)):
            raise PlanMismatch(
                f"it has {num} fragments (there), outer.num_fragments = {num_fragments} (here)"
            )
    except (PlanMismatch, ValueError) as error:
        return f"no usable plan: {error}"
    return ""


def size_problem(plan: Plan) -> str:
    """Say that the answer to a first poll would not hold what a plan has; empty: it does."""
    num_fragments, num_lanes = len(plan.fragments), sum(len(f.lanes) for f in plan.fragments)
    num_bytes = num_fragments * _FRAGMENT_BYTES + num_lanes * _LANE_BYTES
    if num_bytes <= _MOST_ANSWER_BYTES:
        return ""
    return (
        f"the plan has {num_fragments} fragments with {num_lanes} lanes in all: a poll would tell "
        f"of them in {num_bytes} bytes, and {_MOST_ANSWER_BYTES} are allowed"
    )


def _data_objection(here: Shared, there: Shared, island: str) -> Joined | None:
    digests = (("text", there.corpus_sha256), ("tokenizer", there.tokenizer_digest))
    for name, digest in digests:
        if len(digest) > _MOST_DIGEST:
            return Joined(
                JoinVerdict.FINGERPRINT_MISMATCH,
                f"the {name} of island {island!r} has a digest of {len(digest)} characters; "
                f"{_MOST_DIGEST} are allowed",
                cause=Cause(name),
            )
    # Before the text, whose digest covers it. None was said: a training loop of somebody's own.
    if here.tokenizer_digest and there.tokenizer_digest != here.tokenizer_digest:
        return Joined(
            JoinVerdict.FINGERPRINT_MISMATCH,
            f"data.tokenizer of island {island!r} has digest {there.tokenizer_digest!r} (there), "
            f"the run's has {here.tokenizer_digest!r} (here): the same tokenizer.json and "
            "data.separator are needed everywhere",
            cause=Cause.TOKENIZER,
        )
    if here.plan_json and there.corpus_sha256 != here.corpus_sha256:
        return Joined(
            JoinVerdict.FINGERPRINT_MISMATCH,
            f"the text of island {island!r} has digest {there.corpus_sha256} (there), the run's "
            f'has {here.corpus_sha256} (here): data.source = "stdlib" needs the same release of '
            "Python on every island, [data.sources] the same files under the same names (or "
            "one commit, set as revision)",
            cause=Cause.TEXT,
        )
    if here.plan_json and there.start_step != here.start_step:
        return Joined(
            JoinVerdict.FINGERPRINT_MISMATCH,
            f"island {island!r} starts at inner step {there.start_step} (there), the run started "
            f"at {here.start_step} (here): run.warm_start must name the same source everywhere",
            cause=Cause.START_STEP,
        )
    return None


def _without_names(identity_json: str) -> str:
    try:
        values = read_peer_json(identity_json)
    except ValueError:
        return identity_json
    if isinstance(values, dict):
        values.pop("islands", None)
    return json.dumps(values, sort_keys=True)
