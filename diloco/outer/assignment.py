"""Which syncer serves which fragments of a plan. Pure; imports no torch.

A fragment's place is decided once in the life of a run: what is decided here is journalled, and
read from there ever after.

Source: PROTOCOL.md, "Fragments and lanes".
"""

from __future__ import annotations

from diloco.errors import ConfigError
from diloco.outer.fragments import Plan


def assign_fragments(plan: Plan, num_syncers: int) -> tuple[tuple[int, ...], ...]:
    """Spread the fragments of a plan over syncers, evenly by size.

    Each fragment, largest first, goes to the syncer that has least so far (the first of equals):
    the fullest one has at most 4/3 - 1/(3 N) of what it would in the best of all ways.

    Args:
        plan: Of the run.
        num_syncers: From 1 to the number of fragments.

    Returns:
        Fragments of each syncer, ascending; at least one each.

    Raises:
        ConfigError: If there are more syncers than fragments.

    Source: Graham 1969, longest processing time first.
    """
    if not 1 <= num_syncers <= len(plan.fragments):
        raise ConfigError(
            f"coordinator.num_syncers = {num_syncers} is outside [1, {len(plan.fragments)}]: each "
            f"syncer serves whole fragments, and the plan has {len(plan.fragments)} "
            f"(outer.num_fragments)"
        )
    assigned: list[list[int]] = [[] for _ in range(num_syncers)]
    numels = [0] * num_syncers
    for fragment in sorted(plan.fragments, key=lambda f: (-f.padded_numel, f.fragment_id)):
        lightest = min(range(num_syncers), key=numels.__getitem__)
        assigned[lightest].append(fragment.fragment_id)
        numels[lightest] += fragment.padded_numel
    return tuple(tuple(sorted(fragment_ids)) for fragment_ids in assigned)
