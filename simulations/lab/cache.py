"""What a laboratory has found already: one file a point, by fingerprint, whole or not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco.durable import make_directory_durably, read_checked_json, write_checked_json
from diloco.simulations.lab.point import LabPoint


class Cache:
    """A directory of results and of the states that warm points begin with."""

    def __init__(self, directory: Path) -> None:
        """Assign only; `prepare` makes the directory."""
        self.directory = directory

    def prepare(self) -> None:
        """Make the directory where it is missing."""
        make_directory_durably(self.directory)

    def result(self, point: LabPoint) -> dict[str, Any] | None:
        """Return what was found of a point, JSON values; None if nothing was, or it is damaged."""
        try:
            found = read_checked_json(self._path(point))
        except (FileNotFoundError, ValueError):
            return None
        assert isinstance(found, dict), "only results are kept"
        # The same figures may be those of a point that a sweep calls otherwise.
        return {**found, "swept": dict(point.swept)}

    def keep(self, point: LabPoint, result: dict[str, Any]) -> None:
        """Keep a point's result, durably and at once."""
        write_checked_json(self._path(point), result)

    def start(self, point: LabPoint) -> Path | None:
        """Name the file with which a point begins; None if it begins with the seed's values."""
        if not point.lab.warm_steps:
            return None
        return self.directory / f"start-{point.start_fingerprint()}.safetensors"

    def keep_start(self, point: LabPoint, write: Callable[[Path], None]) -> None:
        """Have the file written under another name, and give it its own once it is whole."""
        path = self.start(point)
        assert path is not None, "only warm points have one"
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        write(partial)
        os.replace(partial, path)

    def _path(self, point: LabPoint) -> Path:
        return self.directory / f"{point.fingerprint()}.json"
