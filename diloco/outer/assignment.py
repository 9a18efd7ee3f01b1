"""Which syncer serves which fragments of a plan. Pure; imports no torch.

What is decided here is journalled, and read from there ever after: with the first join, and where
an operator moves fragments.

Source: PROTOCOL.md, "Fragments and lanes".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from diloco.errors import ConfigError
from diloco.outer.fragments import Plan


def assign_fragments(plan: Plan, shares: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Spread the fragments of a plan over syncers, by size, in proportion to their shares.

    Each fragment, largest first, goes to the syncer that would then have least by its share (the
    first of equals); while there are no more fragments left than syncers without one, to one of
    these. With equal shares the fullest one has at most 4/3 - 1/(3 N) of what it would in the best
    of all ways.

    Args:
        plan: Of the run.
        shares: Of each syncer, above 0; from 1 to as many as there are fragments.

    Returns:
        Fragments of each syncer, ascending; at least one each.

    Raises:
        ConfigError: If there are more syncers than fragments.

    Source: Graham 1969, longest processing time first.
    """
    if not 1 <= len(shares) <= len(plan.fragments):
        raise ConfigError(
            f"{len(shares)} syncers (coordinator.num_syncers, or the tables of [syncers]) are "
            f"outside [1, {len(plan.fragments)}]: each serves whole fragments, and the plan has "
            f"{len(plan.fragments)} (outer.num_fragments)"
        )
    assigned: list[list[int]] = [[] for _ in shares]
    numels = [0] * len(shares)
    ordered = sorted(plan.fragments, key=lambda f: (-f.padded_numel, f.fragment_id))
    for num_done, fragment in enumerate(ordered):
        idle = [n for n, own in enumerate(assigned) if not own]
        is_scarce = len(ordered) - num_done <= len(idle)
        lightest = min(
            idle if is_scarce else range(len(shares)),
            key=lambda n: (numels[n] + fragment.padded_numel) / shares[n],
        )
        assigned[lightest].append(fragment.fragment_id)
        numels[lightest] += fragment.padded_numel
    return tuple(tuple(sorted(fragment_ids)) for fragment_ids in assigned)


def deal_fragments(
    plan: Plan,
    shares: Sequence[float],
    assigned: Sequence[Collection[int]],
    moving: Collection[int],
    targets: Collection[int],
) -> Mapping[int, int]:
    """Spread some fragments over syncers that keep what they have, by size and share.

    Args:
        plan: Of the run.
        shares: Of each syncer, above 0.
        assigned: Fragments of each, those that move among them.
        moving: Fragments that are dealt, the largest first.
        targets: Syncers that they may go to, by number; at least one.

    Returns:
        Fragment -> syncer: that which would then have least by its share, the first of equals.
    """
    sizes = {f.fragment_id: f.padded_numel for f in plan.fragments}
    numels = {n: sum(sizes[p] for p in assigned[n] if p not in moving) for n in sorted(targets)}
    dealt: dict[int, int] = {}
    for p in sorted(moving, key=lambda p: (-sizes[p], p)):
        dealt[p] = min(numels, key=lambda n: (numels[n] + sizes[p]) / shares[n])
        numels[dealt[p]] += sizes[p]
    return dealt
