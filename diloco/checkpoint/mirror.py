"""Mirrors an island's checkpoints to a second place: any URL that fsspec knows, as a bucket.

    MIRROR/ISLAND/step-000000000120/parts-0001/rank-00000-of-00002.safetensors, ..., plan.json
                                   /manifest.json

The same files as on disk, and as there the manifest is written last: what has none is no
checkpoint. Who takes one back verifies its digests as of any other. Files are copied as they are:
zstandard leaves 0.90 of a checkpoint (float32 with AdamW's moments; level 1, 0.8 GB/s a core).
Imports no torch; fsspec, which is slow, only where a mirror is used.

See fsspec, https://filesystem-spec.readthedocs.io
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.checkpoint.checkpoints import (
    MANIFEST,
    MOST_MANIFEST_BYTES,
    found_directory,
    parse_manifest,
    read_manifest,
    step_of,
    timeline_of,
)
from diloco.durable import make_directory_durably, sync_directory, unlink, write_durably
from diloco.errors import ConfigError
from diloco.telemetry.events import CheckpointMirrored, CheckpointMirrorFailed, Event

logger = logging.getLogger(__name__)

#: Seconds before a copy that has failed is begun once more.
_PAUSES_S = (1.0, 10.0)
#: Seconds for which the end of a run waits for what is being copied.
_LAST_S = 3600.0


class Mirror:
    """The mirrored checkpoints of one island.

    Args:
        url: `checkpoint.mirror`.
        island: Whose.

    Raises:
        ConfigError: If the file system's package is not installed, or it does not take the URL.
    """

    def __init__(self, url: str, island: str) -> None:
        """Make the file system; most of them are not reached yet."""
        import fsspec

        try:
            #: fsspec has no types.
            fs, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise ConfigError(
                f"checkpoint.mirror = {url!r} needs a package that is not here: {error} (pip "
                f"install it next to diloco), or leave the key out"
            ) from error
        except Exception as error:  # of as many types as there are file systems
            raise ConfigError(f"checkpoint.mirror = {url!r} cannot be opened: {error}") from error
        self._fs: Any = fs
        self._root = f"{str(root).rstrip('/')}/{island}"
        self.url = url

    def probe(self) -> None:
        """Write a file there and remove it.

        Raises:
            ConfigError: If that cannot be done.
        """
        probe = f"{self._root}/.probe-{uuid.uuid4().hex}"  # hosts of an island may come at once
        try:
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(probe, b"diloco")
            self._fs.rm_file(probe)
        except Exception as error:  # of as many types as there are file systems
            raise ConfigError(
                f"checkpoint.mirror = {self.url!r}: nothing can be written in {self._root}: "
                f"{error!r}. See to its credentials and name, or leave the key out"
            ) from error

    def steps(self) -> list[int]:
        """Return the inner steps, or cuts, that were copied whole, ascending.

        Raises:
            OSError: If it cannot be reached.
        """
        with_manifest = (n for n, path in self._directories() if self._has(f"{path}/{MANIFEST}"))
        return sorted(with_manifest)

    def check(self, step: int) -> None:
        """Refuse a checkpoint that is not here, or whose manifest is damaged; no more is read.

        Raises:
            ConfigError: Saying so.
            Exception: What the file system raises.
        """
        if (there := dict(self._directories()).get(step)) is None:
            raise ConfigError("it is not there")
        parse_manifest(self._manifest_text(there), f"{there}/{MANIFEST}")

    def _manifest_text(self, there: str) -> bytes:
        """Read the manifest of a directory; nothing where no file can be one, or one so large."""
        path = f"{there}/{MANIFEST}"
        found = self._fs.info(path)
        size = found["size"]  # unknown of what is no file
        is_one = found["type"] == "file" and size is not None and size <= MOST_MANIFEST_BYTES
        return self._fs.cat_file(path) if is_one else b""

    def put(self, path: Path) -> int:
        """Copy a whole checkpoint, its manifest last, in place of what has its name.

        Args:
            path: Its directory on disk.

        Returns:
            Bytes that were copied; 0 if it is there.

        Raises:
            ConfigError: If there is no whole checkpoint in `path`.
            Exception: What the file system raises.
        """
        manifest = read_manifest(path)
        text, there = (path / MANIFEST).read_bytes(), f"{self._root}/{path.name}"
        if self._has(f"{there}/{MANIFEST}") and self._manifest_text(there) == text:
            return 0
        self._remove(there)
        parts = f"{there}/{manifest['parts']}"
        self._fs.makedirs(parts, exist_ok=True)
        for name, expected in manifest["files"].items():
            self._fs.put_file(str(path / manifest["parts"] / name), f"{parts}/{name}")
            if (size := self._fs.size(f"{parts}/{name}")) != expected["bytes"]:
                raise OSError(f"{parts}/{name} has {size} bytes, not {expected['bytes']}")
        self._fs.pipe_file(f"{there}/{MANIFEST}", text)
        return len(text) + sum(int(each["bytes"]) for each in manifest["files"].values())

    def fetch(self, step: int, directory: Path, island: str) -> None:
        """Copy a checkpoint to disk, its manifest last, in place of what is there.

        Args:
            step: Inner step, or cut.
            directory: Of this site's checkpoints.
            island: Whose.

        Raises:
            ConfigError: If it is not there whole, or cannot be read or written.
        """
        try:
            there = dict(self._directories())[step]
            text = self._manifest_text(there)
            manifest = parse_manifest(text, f"{there}/{MANIFEST}")
            path = directory / island / there.rsplit("/", 1)[1]
            unlink(path / MANIFEST)
            shutil.rmtree(path, ignore_errors=True)
            parts = path / manifest["parts"]
            make_directory_durably(parts)
            for name in manifest["files"]:
                source = f"{there}/{manifest['parts']}/{name}"
                self._fs.get_file(source, str(parts / name))
            sync_directory(parts)
            write_durably(path / MANIFEST, [text])
        except Exception as error:  # of as many types as there are file systems
            known = str(error) if isinstance(error, ConfigError) else repr(error)
            known = "it is not there" if isinstance(error, KeyError) else known
            raise ConfigError(
                f"checkpoint {step} of island {island} cannot be taken from checkpoint.mirror = "
                f"{self.url!r}: {known}"
            ) from error
        logger.info("checkpoint %d taken from %s", step, self.url)

    def keep(self, steps: Collection[int], newest: int) -> None:
        """Remove all up to `newest` that are not among `steps`."""
        for step, path in self._directories():
            if step <= newest and step not in steps:
                self._remove(path)

    def abandon_later(self, step: int, timeline: int) -> None:
        """Remove what earlier timelines wrote after inner step `step`: it was abandoned."""
        for later, path in self._directories():
            if later <= step:
                continue
            has_manifest = self._has(f"{path}/{MANIFEST}")
            if not has_manifest or timeline_of(self._manifest_text(path)) < timeline:
                self._remove(path)

    def _directories(self) -> list[tuple[int, str]]:
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        names = (str(path).rstrip("/") for path in paths)
        found = ((step_of(path.rsplit("/", 1)[-1]), path) for path in names)
        return sorted((step, path) for step, path in found if step is not None)

    def _has(self, path: str) -> bool:
        return bool(self._fs.exists(path))

    def _remove(self, path: str) -> None:
        """Remove a checkpoint, its manifest first: what is half removed must not be whole."""
        if self._has(f"{path}/{MANIFEST}"):
            self._fs.rm_file(f"{path}/{MANIFEST}")
        if self._has(path):
            self._fs.rm(path, recursive=True)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A checkpoint to be copied, and those that are kept as well."""

    inner_step: int
    step: int
    kept: tuple[int, ...]


class Mirroring:
    """Copies checkpoints to a mirror in a thread of its own; the island's leader has one.

    The newest is copied next: one that the mirror is too slow for is left out, and told.
    """

    def __init__(
        self, mirror: Mirror, directory: Path, island: str, *, on_event: Callable[[Event], None]
    ) -> None:
        """Assign only."""
        self._mirror = mirror
        self._directory = directory
        self._island = island
        self._on_event = on_event
        self._changed = threading.Condition()
        self._waiting: _Copy | None = None
        self._copying: _Copy | None = None
        self._abandoned: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None

    @property
    def in_use(self) -> tuple[int, ...]:
        """Checkpoints that must stay on disk until they are copied."""
        with self._changed:
            return tuple(each.step for each in (self._copying, self._waiting) if each is not None)

    def abandon_later(self, step: int, timeline: int) -> None:
        """Remove there what a resume has abandoned, before anything is copied."""
        with self._changed:
            self._abandoned = (step, timeline)

    def add(self, inner_step: int, step: int, kept: Collection[int]) -> None:
        """Have a checkpoint copied that is whole on disk; any thread may call it.

        Args:
            inner_step: Completed inner steps.
            step: That, or the cut's number.
            kept: What stays in the mirror as well, of those that are there.
        """
        with self._changed:
            left_out, self._waiting = self._waiting, _Copy(inner_step, step, tuple(kept))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
                self._thread.start()
        if left_out is not None:
            self._failed(left_out, "the one before it was still being copied when the next came")

    def close(self, at_most_s: float = _LAST_S) -> None:
        """Wait for what is to be copied, but not for ever."""
        with self._changed:
            if not self._changed.wait_for(self._is_idle, at_most_s):
                logger.error("checkpoint.mirror: not copied within %g s; going on", at_most_s)

    def _is_idle(self) -> bool:
        return self._waiting is None and self._copying is None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None)
                self._copying, self._waiting = self._waiting, None
                copy = self._copying
            assert copy is not None
            try:
                self._copy(copy)
            finally:
                with self._changed:
                    self._copying = None
                    self._changed.notify_all()

    def _copy(self, copy: _Copy) -> None:
        """Copy, and try again where it fails: networks do."""
        began, problem = time.monotonic(), ""
        for pause_s in (*_PAUSES_S, None):
            try:
                if self._abandoned is not None:
                    self._mirror.abandon_later(*self._abandoned)
                    self._abandoned = None
                path = found_directory(self._directory, self._island, copy.step)
                num_bytes = self._mirror.put(path)
                self._mirror.keep({*copy.kept, copy.step}, copy.step)
            except Exception as error:  # of as many types as there are file systems
                problem = repr(error)
            else:
                seconds = time.monotonic() - began
                event = CheckpointMirrored(copy.inner_step, copy.step, num_bytes, seconds)
                self._on_event(event)
                return
            if pause_s is not None:
                time.sleep(pause_s)
        self._failed(copy, problem)

    def _failed(self, copy: _Copy, reason: str) -> None:
        logger.error("checkpoint %d is not in %s: %s", copy.step, self._mirror.url, reason)
        self._on_event(CheckpointMirrorFailed(copy.inner_step, copy.step, reason))
