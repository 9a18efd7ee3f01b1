"""The stores of a run on this machine, and which fragments each of them has. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from diloco.coordinator.journal import Journal
from diloco.durable import read_json
from diloco.errors import ConfigError, PlanMismatch
from diloco.outer.fragments import Fragment, Plan
from diloco.protocol.run.assignment import FragmentAssignment
from diloco.state_dir import ONLY_SYNCER, StateDir


@dataclass(frozen=True, slots=True)
class StorePart:
    """The fragments that one syncer serves.

    Args:
        state: The run's state directory, as that syncer sees it.
        fragments: Its own, in plan order.
    """

    state: StateDir
    fragments: tuple[Fragment, ...]


def part_of(state: StateDir, plan: Plan) -> StorePart:
    """Read which fragments a syncer serves that has learned the plan: all, if it is the only one.

    Raises:
        ConfigError: If the file that says so is missing or damaged.
    """
    if state.syncer_name == ONLY_SYNCER:
        return StorePart(state, plan.fragments)
    own: object = None
    with contextlib.suppress(ValueError):
        own = read_json(state.fragments)
    there = [fragment.fragment_id for fragment in plan.fragments]
    if isinstance(own, list) and all(p in there for p in own):
        return StorePart(state, tuple(plan.fragments[p] for p in own))
    raise ConfigError(
        f"{state.fragments}, which says which fragments {state.syncer_name} has, is missing or "
        f"damaged. Start the coordinator, which sends it that again: diloco coordinator "
        f"RUN.toml"
    )


def assigned_parts(
    state: StateDir, plan: Plan, assignment: FragmentAssignment
) -> tuple[StorePart, ...]:
    """Give each syncer's part; one whose fragments have all moved has none.

    Raises:
        ConfigError: If nothing says which fragments each of several syncers has.
    """
    parts = tuple(
        StorePart(
            each, tuple(plan.fragments[p] for p in assignment.of(each.syncer_id, plan.to_json()))
        )
        for each in state.syncers
    )
    if not any(part.fragments for part in parts):
        raise ConfigError(
            f"{state.journal}, which says which fragments each of {len(parts)} syncers has, is "
            f"missing or does not say it: bring it back from a copy of that day"
        )
    return parts


def parts_of(state: StateDir, plan: Plan) -> tuple[StorePart, ...]:
    """Do that as the coordinator's journal has it, which is next to the stores of several syncers.

    Raises:
        ConfigError: If nothing says which fragments each of several syncers has.
    """
    assignment = FragmentAssignment({each.syncer_name: 1.0 for each in state.syncers})
    if assignment.num_syncers > 1 and state.journal.is_file():
        journal = Journal(state.journal)
        journal.open()
        try:
            assignment.apply(journal.entries())
        finally:
            journal.close()
    return assigned_parts(state, plan, assignment)


def stored_plan(state: StateDir) -> Plan:
    """Read the plan that one syncer has learned.

    Raises:
        PlanMismatch: If the file is damaged; names it, and what to do.
    """
    try:
        return Plan.from_json(state.plan.read_text(encoding="utf-8"))
    except (PlanMismatch, UnicodeDecodeError) as error:
        raise PlanMismatch(
            f"{state.plan} is damaged: {error}. Remove it (rm {state.plan}) and start the "
            f"coordinator, whose journal has the plan, too: diloco coordinator RUN.toml"
        ) from error


def known_plan(state: StateDir) -> Plan | None:
    """Read the plan of a run from any of its stores; None if none of them has learned it.

    Raises:
        PlanMismatch: If the file is damaged.
    """
    for each in state.syncers:
        if each.plan.is_file():
            return stored_plan(each)
    return None


def read_plan(state: StateDir) -> Plan | None:
    """Read the plan of a run whose stores are all here; None until a syncer has learned it.

    Raises:
        ConfigError: If a store is gone.
        PlanMismatch: If the file is damaged.
    """
    check_stores(state)
    return known_plan(state)


def check_stores(state: StateDir) -> None:
    """Refuse to take what is left of several stores for all of a run.

    Raises:
        ConfigError: If some of them are here and others not.
    """
    holding = state.syncers
    gone = [str(each.store) for each in holding if not each.store.is_dir()]
    if gone and len(gone) < len(holding):
        raise ConfigError(
            f"the run in {state.root} has {len(holding)} syncers, and there is no "
            f"{', no '.join(gone)}: bring it back from a copy; what is lost otherwise: diloco "
            f"repair {state.root}"
        )


def state_by_fragment(state: StateDir, plan: Plan) -> Mapping[int, StateDir]:
    """Tell whose store each fragment is in."""
    return {f.fragment_id: part.state for part in parts_of(state, plan) for f in part.fragments}
