"""What `diloco local` finds in a run's state directory: where it stands, what it goes on from.

The choice is that of a coordinator (`diloco.checkpoint.run_checkpoints`), made before anything is
started; the words are those of one machine. Imports no torch, changes nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from diloco.checkpoint.run_checkpoints import (
    check_run,
    check_same_run,
    choose_checkpoint,
    open_journal,
    read_membership,
)
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.protocol.run.membership import Membership
from diloco.state_dir import StateDir, holder


def find_resume_step(
    config: Config, at: int | None, announce: Callable[[str], None], *, start: str
) -> int:
    """Find the newest run checkpoint that is whole, or insist on the one of inner step `at`.

    Args:
        config: The run.
        at: Inner step of the checkpoint asked for; None takes the newest.
        announce: Called with what was found, skipped and taken.
        start: What the user types to start the run, shown with ``--resume --at STEP`` behind it.

    Raises:
        ConfigError: If there is no run, it is under way, it is of another file, it has finished,
            or it has no such checkpoint; says what to type instead.
    """
    state = _state(config)
    if (pid := holder(state.coordinator_lock)) is not None:
        raise ConfigError(
            f"--resume: the run in {state.root} is under way (coordinator: process {pid}). Watch "
            f"it with diloco status; to stop it with a checkpoint: kill -TERM {pid}"
        )
    check_run(state, start=start)
    check_same_run(
        config,
        state,
        f"Go on with the run that is there: diloco local {shlex.quote(str(state.resolved))} "
        f"--resume\nStart this one elsewhere: {start} --set coordinator.state_dir=runs/NAME",
    )
    with open_journal(state.journal) as journal:
        membership = read_membership(config, journal)
    return choose_checkpoint(config, state, membership, at, announce, start=start)


def membership_of(config: Config) -> Membership | None:
    """Read what the run's coordinator has noted, once it has ended; None if it noted nothing.

    Raises:
        ConfigError: If its journal is damaged.
    """
    state = _state(config)
    if not state.journal.exists():
        return None
    with open_journal(state.journal) as journal:
        return read_membership(config, journal)


def _state(config: Config) -> StateDir:
    return StateDir(Path(config.coordinator.state_dir))
