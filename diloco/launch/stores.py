"""The stores of a run on this machine, and which fragments each of them has. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from diloco.durable import read_json
from diloco.errors import ConfigError
from diloco.launch.state_dir import ONLY_SYNCER, StateDir
from diloco.outer.fragments import Fragment, Plan


@dataclass(frozen=True, slots=True)
class Part:
    """What one syncer serves, or one island's peer.

    Args:
        state: The run's state directory, as that syncer sees it.
        fragments: Its own, in plan order.
    """

    state: StateDir
    fragments: tuple[Fragment, ...]


def part_of(state: StateDir, plan: Plan) -> Part:
    """Read which fragments a syncer serves that has learned the plan: all, if it is the only one.

    Raises:
        ConfigError: If the file that says so is missing or damaged.
    """
    if state.syncer_name == ONLY_SYNCER:
        return Part(state, plan.fragments)
    own: object = None
    with contextlib.suppress(ValueError):
        own = read_json(state.fragments)
    if not isinstance(own, list):
        raise ConfigError(
            f"{state.fragments}, which says which fragments {state.syncer_name} has, is missing or "
            f"damaged. Remove it and start the coordinator, which tells that syncer again: diloco "
            f"coordinator RUN.toml"
        )
    return Part(state, tuple(plan.fragments[fragment_id] for fragment_id in own))


def parts_of(state: StateDir, plan: Plan) -> tuple[Part, ...]:
    """Read it of every syncer, or of the island's peer that holds records here."""
    return tuple(part_of(each, plan) for each in state.holding_records)


def read_plan(state: StateDir) -> Plan | None:
    """Read the plan of a run; None until all its syncers have learned it.

    Raises:
        PlanMismatch: If a file of it is damaged.
    """
    if not all(each.plan.is_file() for each in state.holding_records):
        return None
    return Plan.from_json(state.holding_records[0].plan.read_text(encoding="utf-8"))


def state_by_fragment(state: StateDir, plan: Plan) -> Mapping[int, StateDir]:
    """Tell whose store each fragment is in."""
    return {f.fragment_id: part.state for part in parts_of(state, plan) for f in part.fragments}
