"""Where events go: one JSON object a line, whole lines only.

A line has the event's own values and, before them, when it was written (`unix_s`) and by whom.
Numbers that are not finite become null, which JSON has no other word for.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from diloco.telemetry.events import Event


class JsonlSink:
    """A file to which events are appended; `open` and `close` bracket its life.

    Events may come from several threads. A line is flushed as soon as it is written, so that what
    happened before a process was killed is there.
    """

    def __init__(
        self, path: Path, context: Mapping[str, Any], unix_clock: Callable[[], float]
    ) -> None:
        """Assign only. `context` is repeated in every line: island, rank."""
        self.path = path
        self._context = dict(context)
        self._unix_clock = unix_clock
        self._lock = threading.Lock()
        self._file: TextIO | None = None

    def open(self) -> None:
        """Open the file for appending; its directory is made when it is missing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, event: Event) -> None:
        """Append one event; after `close` it is dropped."""
        values = {"unix_s": self._unix_clock(), **self._context, **event.as_dict()}
        line = json.dumps({name: _json_value(value) for name, value in values.items()})
        with self._lock:
            if self._file is not None:
                self._file.write(line + "\n")
                self._file.flush()

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            file.close()


def _json_value(value: Any) -> Any:
    is_undefined = isinstance(value, float) and not math.isfinite(value)
    return None if is_undefined else value
