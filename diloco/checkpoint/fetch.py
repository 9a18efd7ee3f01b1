"""Brings a run's state from its object store into a directory, to read it there.

Source: PROTOCOL.md, "State in an object store".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from diloco.checkpoint.run_checkpoints import open_journal
from diloco.config.classes import fingerprint
from diloco.config.schema import Config
from diloco.durable import DiskFull
from diloco.errors import ConfigError
from diloco.objects.lease import RunState
from diloco.state_dir import Held, StateDir, hold, make_directory
from diloco.transport.units import format_bytes


def fetch_run(config: Config, announce: Callable[[str], None]) -> None:
    """Make `coordinator.state_dir` hold what `run.state` does now; the run may be under way.

    Args:
        config: The run.
        announce: Called with what is done, for people.

    Raises:
        ConfigError: If `run.state` is not set, has no such run or does not answer; if there is no
            room; or if the directory is at work.
    """
    if not config.run.state:
        raise ConfigError("fetch: run.state is not set, so that the run is in no object store")
    state = StateDir(Path(config.coordinator.state_dir).absolute())
    run = RunState(
        config.run.state, config.run.name, fingerprint(config), state, lambda error: None
    )
    syncers = state.of_run(config.own_syncers, sorted(config.syncers))
    make_directory(state.root, "coordinator.state_dir")
    announce(f"fetching the run {config.run.name!r} from {config.run.state} into {state.root}")
    try:
        with hold(state.coordinator_lock):
            num_bytes = run.fetch(syncers)
            with open_journal(state.journal, replica=run.replica):
                pass
    except Held as error:
        raise ConfigError(
            f"coordinator.state_dir = {state.root} is at work ({error}), and has the run: give "
            f"another directory, --set coordinator.state_dir=DIRECTORY"
        ) from error
    except DiskFull as error:
        raise ConfigError(f"fetch: {error.lack}: {error}. {error.remedy}, then again") from error
    announce(
        f"{format_bytes(num_bytes)} fetched. Now: diloco export {state.root}, diloco replay, "
        f"diloco report; a coordinator needs no fetch"
    )
