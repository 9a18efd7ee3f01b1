"""A disk that loses power: every call of `diloco.durable` recorded, every state it may leave built.

What a call did is on the disk for certain once it was synced: bytes and length of a file by a sync
of the file, names by a sync of their directory. Of what was not, a crash leaves the first few
calls and drops the rest, for each file and each directory on its own; the first dropped write may
be there up to a border of sectors, and any single write may be lost while later ones are there.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from diloco import durable

SECTOR = 512


@dataclass(frozen=True)
class Change:
    """One call: of bytes if `inode` is set, of names otherwise."""

    kind: str
    inode: int = -1
    at: int = 0
    data: bytes = b""
    source: str = ""
    target: str = ""

    @property
    def directory(self) -> str:
        """Where the name is that it changes."""
        return os.path.dirname(self.target)


class RecordedDisk:
    """Stands for `os` in `diloco.durable`: does what it is asked below `root`, and records it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.changes: list[Change] = []
        self._inodes: dict[str, int] = {}
        self._open: dict[int, int | str] = {}
        self._fresh = itertools.count()
        self._patch = monkeypatch

    def __enter__(self) -> RecordedDisk:
        self._patch.setattr(durable, "os", self)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.setattr(durable, "os", os)

    def __getattr__(self, name: str) -> Any:
        assert name.startswith("O_") or name in ("fstat",), f"os.{name} is not recorded"
        return getattr(os, name)

    def _name(self, path: Path | str) -> str:
        return "" if Path(path) == self.root else str(Path(path).relative_to(self.root))

    def _note(self, kind: str, **change: Any) -> None:
        self.changes.append(Change(kind, **change))

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        is_new = not os.path.exists(path)
        descriptor = os.open(path, flags, mode)
        name = self._name(path)
        if flags & os.O_DIRECTORY:
            self._open[descriptor] = name
            return descriptor
        if is_new:
            self._inodes[name] = next(self._fresh)
            self._note("create", target=name, at=self._inodes[name])
        self._open[descriptor] = self._inodes[name]
        return descriptor

    def close(self, descriptor: int) -> None:
        del self._open[descriptor]
        os.close(descriptor)

    def pwrite(self, descriptor: int, data: memoryview, at: int) -> int:
        self._note("write", inode=self._open[descriptor], at=at, data=bytes(data))
        return os.pwrite(descriptor, data, at)

    def posix_fallocate(self, descriptor: int, at: int, num_bytes: int) -> None:
        self._note("grow", inode=self._open[descriptor], at=at + num_bytes)
        os.posix_fallocate(descriptor, at, num_bytes)

    def fsync(self, descriptor: int) -> None:
        opened = self._open[descriptor]
        if isinstance(opened, str):
            self._note("sync_directory", target=os.path.join(opened, "*"))
        else:
            self._note("sync", inode=opened)

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)
        self._note("mkdir", target=self._name(path))

    def unlink(self, path: Path) -> None:
        os.unlink(path)
        del self._inodes[self._name(path)]
        self._note("unlink", target=self._name(path))

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target)
        self._inodes[self._name(target)] = self._inodes[self._name(source)]
        self._note("link", source=self._name(source), target=self._name(target))

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)
        assert os.path.dirname(self._name(source)) == os.path.dirname(self._name(target))
        self._inodes[self._name(target)] = self._inodes.pop(self._name(source))
        self._note("rename", source=self._name(source), target=self._name(target))


@dataclass
class _Certain:
    """What survives any crash after a number of calls, and what each part may have beyond it."""

    names: dict[str, int] = field(default_factory=dict)
    bytes_of: dict[int, bytes] = field(default_factory=lambda: defaultdict(bytes))
    open_writes: dict[int, list[Change]] = field(default_factory=lambda: defaultdict(list))
    open_names: dict[str, list[Change]] = field(default_factory=lambda: defaultdict(list))


DIRECTORY = -1


def crash_states(changes: list[Change], num_done: int) -> Iterator[dict[str, bytes | None]]:
    """Build what may be on the disk if the power goes after so many calls: path -> bytes.

    None: a directory. One state may come several times.
    """
    certain = _Certain()
    for change in changes[:num_done]:
        if change.kind == "sync":
            content = certain.bytes_of[change.inode]
            for write in certain.open_writes.pop(change.inode, ()):
                content = _written(content, write)
            certain.bytes_of[change.inode] = content
        elif change.kind == "sync_directory":
            for named in certain.open_names.pop(change.directory, ()):
                _rename(certain.names, named)
        elif change.inode >= 0:
            certain.open_writes[change.inode].append(change)
        else:
            certain.open_names[change.directory].append(change)
    directories = [list(_first_few(names)) for names in certain.open_names.values()]
    files = [
        [(inode, content) for content in _contents(certain.bytes_of[inode], writes)]
        for inode, writes in certain.open_writes.items()
    ]
    for named in itertools.product(*directories):
        names = dict(certain.names)
        # Names of a directory inside another that was lost are lost with it.
        for change in sorted(itertools.chain(*named), key=changes.index):
            _rename(names, change)
        for contents in itertools.product(*files):
            bytes_of = {**certain.bytes_of, **dict(contents)}
            yield {
                name: None if inode == DIRECTORY else bytes_of.get(inode, b"")
                for name, inode in names.items()
                if _has_parents(name, names)
            }


def _first_few(changes: list[Change]) -> Iterator[list[Change]]:
    for number in range(len(changes) + 1):
        yield changes[:number]


def _contents(content: bytes, writes: list[Change]) -> Iterator[bytes]:
    """Every file that may be left of `content` and writes after it."""
    whole = content
    yield whole
    for write in writes:
        first = SECTOR - write.at % SECTOR
        for size in range(first, len(write.data), SECTOR):
            yield _written(whole, Change("write", at=write.at, data=write.data[:size]))
        whole = _written(whole, write)
        yield whole
    for lost in range(len(writes) - 1):
        left = content
        for number, write in enumerate(writes):
            left = left if number == lost else _written(left, write)
        yield left


def _written(content: bytes, change: Change) -> bytes:
    if change.kind == "grow":
        return content.ljust(change.at, b"\0")
    end = change.at + len(change.data)
    content = content.ljust(end, b"\0")
    return content[: change.at] + change.data + content[end:]


def _rename(names: dict[str, int], change: Change) -> None:
    match change.kind:
        case "create":
            names[change.target] = change.at
        case "mkdir":
            names[change.target] = DIRECTORY
        case "unlink":
            names.pop(change.target, None)
        case "link":
            if change.source in names:
                names[change.target] = names[change.source]
        case "rename":
            if change.source in names:
                names[change.target] = names.pop(change.source)


def _has_parents(name: str, names: dict[str, int]) -> bool:
    parent = os.path.dirname(name)
    return not parent or (names.get(parent) == DIRECTORY and _has_parents(parent, names))


def lay_out(state: dict[str, bytes | None], root: Path) -> None:
    """Write a state below a new directory."""
    root.mkdir()
    for name, content in sorted(state.items()):
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)
