"""Files that are old or new after a crash, never in between.

Temporary file, fsync, rename, fsync of the directory: once a function here has returned, the file
survives a kill and a power loss; before that, what was there before does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transport.contracts import Buffer


def write_durably(path: Path, pieces: Iterable[Buffer], *, mode: int = 0o644) -> None:
    """Replace `path` by the concatenation of `pieces`; `mode` is narrowed by the umask."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # of a writer that was killed; it may have another mode
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable: what was renamed there stays renamed."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def make_directory_durably(path: Path) -> None:
    """Make a directory and its parents so that a power loss does not take it, files and all."""
    if not path.parent.is_dir():
        make_directory_durably(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def write_json(path: Path, value: object) -> None:
    """Replace `path` by `value` as JSON."""
    write_durably(path, [json.dumps(value, sort_keys=True).encode()])


def read_json(path: Path) -> Any | None:
    """Return what `write_json` wrote, hence any JSON value; None if there is no such file.

    Raises:
        ValueError: If the file is not JSON: it was not written here.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is damaged, it does not hold JSON: {error}") from error
