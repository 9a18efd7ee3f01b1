"""Hashes the parameters of an island as they are, to compare them with what was published.

    digest of a version = blake3(digest of lane 0 | digest of lane 1 | ...)

Belongs to the training thread: every rank makes the same calls, and all have the same answer.

Source: PROTOCOL.md, "Digests".
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from diloco.errors import IslandFailed
from diloco.island.agreement import Agreement
from diloco.island.lanes.shards import LaneShards
from diloco.outer.fragments import Fragment, Plan
from diloco.protocol.island.votes import NOT_MINE, FragmentView
from diloco.versions.value_digest import lane_digest, version_digest

#: The digest of a lane as integers that ranks can compare.
_DIGEST = struct.Struct("<2q")
_NOBODY = (NOT_MINE,) * 2


def stored_digests(plan: Plan, shards: LaneShards, agreement: Agreement) -> tuple[str | None, ...]:
    """Hash the values of every fragment as the ranks store them; collective, once a run.

    Reads each element where it is stored and compares every other copy of it: replicated norms,
    HSDP copies, tied copies.

    Returns:
        By fragment, in plan order, the digest in hex; None where copies of one element differ.
    """
    return tuple(_held_digest(fragment, shards, agreement) for fragment in plan.fragments)


def published_digests(
    plan: Plan,
    shards: LaneShards,
    agreement: Agreement,
    views: Sequence[FragmentView],
    versions: Sequence[int],
) -> tuple[str, ...]:
    """Hash the parameters, which must hold what this island last merged; collective.

    A version is compared with the syncer's word where that is still its newest.

    Args:
        plan: Of the run.
        shards: The parameters.
        agreement: Of the island's ranks.
        views: What this rank's exchange shows of each fragment.
        versions: That the island merged last.

    Raises:
        IslandFailed: On all ranks, if they do not.
    """
    held = stored_digests(plan, shards, agreement)
    is_wrong = [
        digest is None or (view.version == version and view.digest != digest)
        for digest, view, version in zip(held, views, versions, strict=True)
    ]
    # Ranks get news of the syncer at different times: a difference that one found counts for all.
    wrong = [p for p, word in enumerate(agreement.smallest([-w for w in is_wrong])) if word]
    if wrong:
        p = wrong[0]
        found = f"the digest {held[p]}" if held[p] else "copies that differ between its ranks"
        raise IslandFailed(
            f"after the last merge, parameters of this island are not the published ones: "
            f"fragments {wrong}; of fragment {p}, version {versions[p]} was "
            f"published with the digest {views[p].digest or 'unknown'}, the model holds "
            f"{found}. What is published is not touched by this. Start the island again, and "
            f"it takes that: diloco island RUN.toml --island NAME; if this comes again, look "
            f"for code that writes to parameters during outer.finish(), or for bad memory"
        )
    return tuple(digest for digest in held if digest is not None)


def _held_digest(fragment: Fragment, shards: LaneShards, agreement: Agreement) -> str | None:
    lanes = shards.collect(fragment.fragment_id)
    num_differing = shards.num_differing(fragment.fragment_id, lanes)
    own: Mapping[int, tuple[int, ...]] = {
        lane_id: _DIGEST.unpack(lane_digest(values)) for lane_id, values in lanes.items()
    }
    shards.reuse(lanes)
    words = [-num_differing]
    for lane in fragment.lanes:  # each has one carrier, so the smallest word is the carrier's
        words += own.get(lane.lane_id, _NOBODY)
    minus_differing, *found = agreement.smallest(words)
    if minus_differing:
        return None
    digests = [_DIGEST.pack(*found[i : i + 2]) for i in range(0, len(found), 2)]
    return version_digest(digests).hex()
