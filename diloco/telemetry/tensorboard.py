"""TensorBoard: one directory an island; the step of every scalar is the inner step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.extras import import_for
from diloco.telemetry.events import Event
from diloco.telemetry.metrics import TOKENS_AXIS, Metrics

if TYPE_CHECKING:  # seconds of imports, for those who want it
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """Event files of one island; for one thread at a time."""

    def __init__(self, directory: Path) -> None:
        """Assign only; `directory` is made when it is missing."""
        self._directory = directory
        self._metrics = Metrics()
        self._writer: SummaryWriter | None = None

    def open(self) -> None:
        """Insist on the package.

        Raises:
            ConfigError: If TensorBoard is not installed.
        """
        setting = "telemetry.tensorboard = true"
        import_for(setting, "torch.utils.tensorboard", "turn the setting off")

    def add_context(self, context: Mapping[str, Any]) -> None:
        """Drop it: TensorBoard knows scalars only."""

    def write(self, event: Event) -> None:
        """Add an event's scalars; the first one hides what earlier starts wrote after it."""
        from torch.utils.tensorboard import SummaryWriter

        row = self._metrics.row(event)
        if row is None:
            return
        if self._writer is None:
            self._writer = SummaryWriter(str(self._directory), purge_step=row.inner_step)
        for name, value in {**row.scalars, TOKENS_AXIS: row.tokens}.items():
            self._writer.add_scalar(name, value, row.inner_step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
