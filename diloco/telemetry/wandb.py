"""Weights & Biases: one run an island, all islands of a run in one group.

Every row carries both axes, `inner_step` (the default of all charts) and `n_tokens_seen`; wandb's
own step only counts rows, so a start that repeats lost inner steps goes on in the same run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError
from diloco.extras import import_for
from diloco.telemetry.events import Event
from diloco.telemetry.metrics import INNER_STEP_AXIS, TOKENS_AXIS, Metrics


@dataclass(frozen=True, slots=True)
class WandbRun:
    """Which run of wandb an island's metrics go to.

    Args:
        mode: "offline" or "online".
        project: Empty: as wandb decides.
        group: Name of the run of all islands.
        name: Of the island.
        run_id: wandb's own id; a later start with the same one goes on in the same run.
        directory: Where wandb keeps its files, in `wandb/`; must be there.
        config: What the run is, shown with its charts; JSON values.
    """

    mode: str
    project: str
    group: str
    name: str
    run_id: str
    directory: Path
    config: Mapping[str, Any] = field(default_factory=dict)


class WandbSink:
    """One island's metrics in Weights & Biases; for one thread at a time."""

    def __init__(self, run: WandbRun) -> None:
        """Assign only."""
        self._wanted = run
        self._metrics = Metrics()
        # The package and its Run; imported when it is wanted, hence `Any`.
        self._wandb: Any = None
        self._run: Any = None

    def open(self) -> None:
        """Start or continue the run.

        Raises:
            ConfigError: If wandb is not installed or refuses.
        """
        wanted, setting = self._wanted, f'telemetry.wandb.mode = "{self._wanted.mode}"'
        self._wandb = wandb = import_for(setting, "wandb", "turn the setting off")
        try:
            self._run = wandb.init(
                mode=wanted.mode,
                project=wanted.project or None,
                group=wanted.group,
                name=wanted.name,
                id=wanted.run_id,
                resume="allow",
                # A run that this process has open for itself is neither continued nor ended.
                reinit="create_new",
                dir=str(wanted.directory),
                config=dict(wanted.config),
                # Our output stays ours: nothing is printed, and nothing of it is captured.
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"{setting}: wandb cannot start: {error}. Type `wandb login`, or set "
                f'telemetry.wandb.mode = "offline" and type `wandb sync` later'
            ) from error
        self._run.define_metric(INNER_STEP_AXIS)
        self._run.define_metric("*", step_metric=INNER_STEP_AXIS)

    def add_context(self, context: Mapping[str, Any]) -> None:
        """Show the context among the run's settings."""
        self._run.config.update(dict(context), allow_val_change=True)

    def write(self, event: Event) -> None:
        """Log an event's scalars."""
        row = self._metrics.row(event)
        if row is None:
            return
        axes = {INNER_STEP_AXIS: row.inner_step, TOKENS_AXIS: row.tokens}
        self._run.log({**axes, **row.scalars})

    def close(self) -> None:
        """Upload or write what is left of this run.

        `finish` returns while wandb's own process still writes: offline, a file was found without
        its rows after it. A rank ends at once after this, so that process is waited for, unless
        another run of this process is open: anyone who opened that one waits for both.
        """
        self._run.finish()
        if self._wandb.run is None:
            self._wandb.teardown()
