"""What a coordinator goes on with: the configuration and the timeline, claimed on its disk.

Source: PROTOCOL.md, "Coordinator away" and "Resume".
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from diloco.checkpoint.run_checkpoints import RESUME
from diloco.config.classes import fingerprint, identity_difference, policy_json
from diloco.config.load import load_config, resolved_toml, with_settings
from diloco.config.schema import Config
from diloco.durable import write_durably
from diloco.errors import ConfigError
from diloco.protocol.run.membership import Membership
from diloco.state_dir import StateDir, Timeline, holder, read_timeline

logger = logging.getLogger(__name__)


def with_operator_settings(
    config: Config, membership: Membership, announce: Callable[[str], None]
) -> Config:
    """Give the configuration with what an operator has set while the run was under way.

    Raises:
        ConfigError: If that does not fit the file any more.
    """
    policy = json.loads(policy_json(config))
    changed = {
        key: value for key, value in membership.settings.policy.items() if policy[key] != value
    }
    for key, value in sorted(changed.items()):
        announce(
            f"{key} = {json.dumps(value)}, as an operator has set it; the file says "
            f"{json.dumps(policy[key])} (diloco set HOST:PORT {key}=VALUE changes it)"
        )
    return with_settings(config, json.dumps(changed))


def claim(config: Config, policy: str, state: StateDir, membership: Membership) -> None:
    """Record the configuration; processes that go on keep the policy that they have.

    `policy` is that of the file, without what an operator has set.
    """
    if state.resolved.exists() and is_served(state, membership):
        before = with_operator_settings(load_config(state.resolved), membership, lambda line: None)
        _check_same_policy(config, before, state, membership)
    write_durably(state.resolved, [resolved_toml(config).encode()])
    write_durably(state.fingerprint, [fingerprint(config).encode()])
    write_durably(state.policy, [policy.encode()])


def _check_same_policy(
    config: Config, before: Config, state: StateDir, membership: Membership
) -> None:
    differing = identity_difference(policy_json(config), policy_json(before))
    if config.outer.is_on_arrival and config.total_tokens != before.total_tokens:
        differing.append(
            f"tokens of the run, run.inner_steps times islands.*.tokens_per_inner_step: "
            f"{config.total_tokens} here, {before.total_tokens} there"
        )
    if differing and config.syncers and membership.has_been_joined:
        # Who is at work there has the policy that it was given, which nobody here knows.
        raise ConfigError(
            f"the islands of the run {before.run.name!r} have begun under another policy than "
            f"this file's (here), and come to the same results under one alone:\n  "
            + "\n  ".join(differing)
            + f"\nUndo the change, or end all islands and resume a checkpoint with it: {RESUME}"
        )
    pids = [pid for each in state.own_syncers if (pid := holder(each.store_lock)) is not None]
    if differing and pids:
        raise ConfigError(
            f"the run {before.run.name!r} is under way (syncer: process "
            f"{', '.join(map(str, pids))}) under another policy than this file's (here):\n  "
            + "\n  ".join(differing)
            + "\nUndo the change, or end that process before you start again"
        )


def is_served(state: StateDir, membership: Membership) -> bool:
    """Whether the timeline that the last start served is the journal's."""
    try:
        return read_timeline(state.timeline) == timeline_of(membership)
    except ConfigError as error:
        logger.error("it is written again, as the journal has it: %s", error)
        return False


def timeline_of(membership: Membership) -> Timeline:
    """Give the timeline that the journal has."""
    return Timeline(membership.timeline, membership.resume_step)
