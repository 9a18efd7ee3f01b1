"""Files of a source: found by path or glob, told apart by kind, and known by a bounded digest.

The digest of a file covers its size and three short pieces, so that hashing terabytes costs no more
than opening the files; a change of the same size between the pieces is not seen.
"""

from __future__ import annotations

import glob
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from blake3 import blake3

from diloco.errors import ConfigError

Kind: TypeAlias = Literal["tokens", "parquet", "JSON lines", "JSON", "text"]

#: Bytes hashed at the start, in the middle and at the end of a file.
_PIECE_BYTES = 16 << 10
#: Suffix -> what unpacks it.
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}
_KINDS: dict[str, Kind] = {
    ".bin": "tokens",
    ".idx": "tokens",
    ".npy": "tokens",
    ".parquet": "parquet",
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON",
}


@dataclass(frozen=True, slots=True)
class TextFile:
    """One thing that a source is made of: a file, or the whole of a hub's data set.

    Attributes:
        name: Name without directory, which sites choose.
        num_bytes: Size; 0 for a hub's data set.
        digest: Of the content, or the commit of the hub's data set.
    """

    name: str
    num_bytes: int
    digest: str


def find_files(patterns: Sequence[str], setting: str) -> list[Path]:
    """Find files in the order of their patterns, sorted within one, each once.

    Args:
        patterns: Paths or globs (with **), relative to the working directory.
        setting: Dotted path of the setting, for messages.

    Raises:
        ConfigError: If a pattern matches no file.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        matches = [path] if path.exists() else map(Path, glob.glob(str(path), recursive=True))
        files = [match for match in sorted(matches) if match.is_file()]
        if not files and path.is_dir():
            raise ConfigError(
                f'{setting}: "{pattern}" is a directory; name its files, such as '
                f'"{path / "**" / "*.jsonl"}"'
            )
        if not files:
            raise ConfigError(
                f'{setting}: "{pattern}" matches no file; paths count from {Path.cwd()}, where '
                f"the command was typed; try: ls {pattern}"
            )
        found.update(dict.fromkeys(files))
    return list(found)


def kind_of(files: Sequence[Path], setting: str) -> Kind:
    """Tell the kind of a source's files by their names.

    Raises:
        ConfigError: If they are of several kinds.
    """
    first = _kind(files[0])
    for path in files:
        if _kind(path) != first:
            raise ConfigError(
                f"{setting}: {files[0]} is {first} and {path} is {_kind(path)}; give each kind a "
                "source of its own, they are mixed by weight"
            )
    return first


def _kind(path: Path) -> Kind:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return _KINDS.get(suffixes[-1], "text") if suffixes else "text"


def check_command(path: Path) -> str:
    """What to type to see where a file is not of the kind that its name says."""
    file = shlex.quote(str(path))
    program = _COMPRESSIONS.get(path.suffix.lower())
    unpack, file = (f"{program} -dc {file} | ", "-") if program else ("", file)
    match _kind(path):
        case "parquet":
            look = "import sys, pyarrow.parquet as p; p.read_table(sys.argv[1])"
            return f"python -c {shlex.quote(look)} {file}"
        case "JSON lines":
            return f"{unpack}python -m json.tool --json-lines {file} > /dev/null"
        case "JSON":
            return f"{unpack}python -m json.tool {file} > /dev/null"
    return f"{unpack}iconv -f UTF-8 -t UTF-8 {file} > /dev/null"


def unpacked_bytes(files: Sequence[Path]) -> int:
    """Add up the sizes of files of text; 0 where there are none, or one is packed."""
    is_plain = all(
        path.suffix.lower() not in _COMPRESSIONS and _kind(path) != "parquet" for path in files
    )
    return sum(path.stat().st_size for path in files) if is_plain else 0


def parts_of(files: Sequence[Path], setting: str) -> list[TextFile]:
    """Describe files by name, size and content.

    Raises:
        ConfigError: If one cannot be read.
    """
    try:
        return [_part(path) for path in files]
    except OSError as error:
        raise ConfigError(
            f"{setting}: cannot read {error.filename}: {error.strerror}; try: ls -l "
            f"{error.filename}"
        ) from error


def _part(path: Path) -> TextFile:
    digest = blake3()
    with path.open("rb") as file:
        num_bytes = file.seek(0, 2)
        digest.update(num_bytes.to_bytes(8, "little"))
        for start in (0, (num_bytes - _PIECE_BYTES) // 2, num_bytes - _PIECE_BYTES):
            file.seek(max(0, start))
            digest.update(file.read(_PIECE_BYTES))
    return TextFile(path.name, num_bytes, digest.hexdigest())


def first_difference(here: Sequence[TextFile], there: Sequence[TextFile]) -> str:
    """Name the first part that differs from the checkpoint's; empty if none does.

    Args:
        here: What a source is made of now.
        there: What it was made of when the checkpoint was written.
    """
    for index, (ours, theirs) in enumerate(zip(here, there, strict=False)):
        if ours != theirs:
            return (
                f"part {index + 1} was {_described(theirs)} and is {_described(ours)}: it has "
                f"{', '.join(_differing(ours, theirs))}"
            )
    return "".join(_surplus(here, there))


def _described(part: TextFile) -> str:
    return f"{part.name} ({part.num_bytes} bytes, {part.digest[:12]})"


def _differing(ours: TextFile, theirs: TextFile) -> Iterator[str]:
    if ours.name != theirs.name:
        yield "another name"
    if ours.num_bytes != theirs.num_bytes:
        yield "another size"
    if ours.digest != theirs.digest:
        yield "other content"


def _surplus(here: Sequence[TextFile], there: Sequence[TextFile]) -> Iterator[str]:
    """Name the first part that only one side has; nothing when both have equally many."""
    if len(here) > len(there):
        yield f"{_described(here[len(there)])} was not there"
    elif len(here) < len(there):
        yield f"{_described(there[len(here)])} is gone"
