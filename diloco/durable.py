"""The one place of durable file calls: files that are old or new after a crash, never in between.

Temporary file, fsync, rename, fsync of the directory: once a function here says durable and has
returned, the file survives a kill and a power loss; before that, what was there before does. The
calls of which that is made are here too, so that a test can record them all and lose any of them
that was not synced; who keeps durable truth makes no such call of its own.

Where a run's state lies in an object store, a `Replica` gets to know of them, and what it has not
taken is not durable: see `diloco.objects`.

Source: PROTOCOL.md, "Commit point" and "Durable before answered".
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import blake3

from diloco.transport.contracts import Buffer

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(OSError):
    """A write found no room (no space, over a quota, over a limit on files): it may be repeated.

    `lack` says in words what is not there, `remedy` what to do; `is_room` whether room on this disk
    would help.
    """

    lack = "the disk is full"
    remedy = "make some room"
    is_room = True


class Replica(Protocol):
    """Keeps a second copy of files, and takes what is to be durable before it is."""

    def renaming(self, source: Path, target: Path) -> None:
        """Called before `rename`; raises DiskFull where that must not be."""

    def linked(self, source: Path, target: Path) -> None:
        """Called after `link`."""

    def removed(self, path: Path) -> None:
        """Called after `unlink` and `remove_tree`."""

    def synced(self, directory: Path) -> None:
        """Called after `sync_directory`; raises DiskFull where what was done is not durable."""


#: Of this process; None: there is one copy.
_replica: Replica | None = None


def replicate(replica: Replica | None) -> None:
    """Have a replica take what becomes durable from here on; None: none any more."""
    global _replica
    _replica = replica


@contextlib.contextmanager
def raising_disk_full() -> Iterator[None]:
    """Raise `DiskFull` for an OSError that says that there is no room."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL and not isinstance(error, DiskFull):
            raise DiskFull(*error.args) from error
        raise


def write_durably(path: Path, pieces: Iterable[Buffer], *, mode: int = 0o644) -> None:
    """Replace `path` by the concatenation of `pieces`; `mode` is narrowed by the umask.

    Raises:
        DiskFull: If there is no room; what was there before is.
        OSError: If the disk fails.
    """
    temporary = path.with_name(path.name + ".tmp")
    descriptor = create(temporary, mode=mode)
    try:
        at = 0
        for piece in pieces:
            at += write_at(descriptor, at, piece)
        name_durably(descriptor, temporary, path)
    except OSError:
        unlink(temporary)  # a full disk gets its room back
        raise
    finally:
        close(descriptor)


def name_durably(descriptor: int, temporary: Path, path: Path) -> None:
    """Give a file that was written its name, once all of it is durable, here and in the replica.

    Raises:
        DiskFull: If there is no room; it has not got its name.
    """
    if _replica is None:
        sync(descriptor)
    else:  # at once: neither waits for the other
        with ThreadPoolExecutor(1, "sync") as pool:
            syncing = pool.submit(sync, descriptor)
            _replica.renaming(temporary, path)
            syncing.result()
    _replace(temporary, path)
    sync_directory(path.parent)


def digest_of(path: Path) -> str:
    """Return the blake3 of what a small file holds, in hex; empty: there is no such file."""
    try:
        return blake3.blake3(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def write_json(path: Path, value: object) -> None:
    """Replace `path` by `value` as JSON, durably."""
    write_durably(path, [json.dumps(value, sort_keys=True).encode()])


def read_text(path: Path) -> str:
    """Return what a file holds; of a pipe, which has no end, that it is no regular file.

    Raises:
        ValueError: If it is none, or not UTF-8.
        OSError: If it cannot be read; a directory, too.
    """
    if not (path.is_file() or path.is_dir()) and os.path.lexists(path):
        raise ValueError(f"{path} is damaged, it is no regular file")
    return path.read_text(encoding="utf-8")


def read_json(path: Path) -> Any | None:
    """Return what `write_json` wrote, hence any JSON value; None if there is no such file.

    Raises:
        ValueError: If the file is not JSON: it was not written here.
    """
    try:
        text = read_text(path)
    except FileNotFoundError:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, it does not hold JSON: {error}") from error


def write_checked_json(path: Path, value: object) -> None:
    """Replace `path` by a line with the blake3 of the rest, and `value` as JSON, durably."""
    body = json.dumps(value, sort_keys=True).encode()
    write_durably(path, [blake3.blake3(body).hexdigest().encode(), b"\n", body])


def read_checked_json(path: Path) -> Any:
    """Return what `write_checked_json` wrote.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it does not hold what was written.
    """
    checksum, _, body = path.read_bytes().partition(b"\n")
    if blake3.blake3(body).hexdigest().encode() != checksum:
        raise ValueError(f"{path} is damaged, it is not what its checksum is of")
    return json.loads(body)


def make_directory_durably(path: Path) -> None:
    """Make a directory and its parents so that a power loss does not take it, files and all."""
    if not path.parent.is_dir():
        make_directory_durably(path.parent)
    make_directory(path)
    sync_directory(path.parent)


# -- of which it is made: nothing here is durable before it was synced -----------------------------


def create(path: Path, *, mode: int = 0o644) -> int:
    """Make an empty file, in place of what a killed writer left; returns its descriptor."""
    unlink(path)
    with raising_disk_full():
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)


def go_on(path: Path, *, mode: int = 0o644) -> int:
    """Open a file to be written further, or make it; returns its descriptor."""
    with raising_disk_full():
        return os.open(path, os.O_RDWR | os.O_CREAT, mode)


def reserve(descriptor: int, num_bytes: int) -> None:
    """Take room for what will be written; until then it reads as zeros.

    Where a file system or the system (macOS) cannot promise room, the writes find out.
    """
    with raising_disk_full():
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, num_bytes)
        else:
            os.ftruncate(descriptor, num_bytes)


def write_at(descriptor: int, start: int, data: Buffer) -> int:
    """Write all of `data` at an offset; returns its bytes."""
    view = memoryview(data).cast("B")
    num_bytes = len(view)
    with raising_disk_full():
        while view:
            written = os.pwrite(descriptor, view, start)
            start, view = start + written, view[written:]
    return num_bytes


def read_at(descriptor: int, start: int, num_bytes: int) -> bytearray:
    """Read so many bytes at an offset, or to the end; a single call gives 2 GiB at most."""
    data = bytearray()
    while piece := os.pread(descriptor, num_bytes - len(data), start + len(data)):
        data += piece
    return data


def sync(descriptor: int) -> None:
    """Make what was written to a file durable, and how long it is; its name is the directory's."""
    with raising_disk_full():
        os.fsync(descriptor)


def close(descriptor: int) -> None:
    """Let go of a descriptor."""
    os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and its parents; those that are there stay as they are."""
    if not path.parent.is_dir():
        make_directory(path.parent)
    try:
        with raising_disk_full():
            os.mkdir(path)
    except FileExistsError:
        if not path.is_dir():
            raise


def rename(source: Path, target: Path) -> None:
    """Give a file or directory another name, in place of what has it.

    Raises:
        DiskFull: If there is no room for the name, here or in the replica: nothing has changed.
    """
    if _replica is not None:
        _replica.renaming(source, target)
    _replace(source, target)


def _replace(source: Path, target: Path) -> None:
    with raising_disk_full():
        os.replace(source, target)


def link(source: Path, target: Path) -> None:
    """Give a file one more name.

    Raises:
        FileExistsError: If something has it.
    """
    with raising_disk_full():
        os.link(source, target)
    if _replica is not None:
        _replica.linked(source, target)


def unlink(path: Path) -> None:
    """Take a name away; no such name is no error."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    if _replica is not None:
        _replica.removed(path)


def remove_tree(path: Path) -> None:
    """Take a directory and all that is in it away; only for what nothing durable needs."""
    shutil.rmtree(path)
    if _replica is not None:
        _replica.removed(path)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable: what was renamed there stays renamed."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with raising_disk_full():
            os.fsync(directory)
    finally:
        os.close(directory)
    if _replica is not None:
        _replica.synced(path)
