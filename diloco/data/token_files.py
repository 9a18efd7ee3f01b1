"""Files of token ids, mapped and read as they are: Megatron's NAME.bin with NAME.idx, and .npy.

An index, in version 1 of the format of Megatron-LM's MMapIndexedDataset, is a header, the length of
every sequence, the byte at which each begins, and the first sequence of every document, then the
number of all. In a .npy a document ends with the separator. What is not of that form is refused:
by its header, its ends and the sizes of the files when the file is opened, for an index may be of
terabytes of text, and the rest of it as it is read; so is an id that is no token of the tokenizer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap

from diloco.errors import ConfigError

#: Offsets in tokens, or numbers.
Offsets: TypeAlias = npt.NDArray[np.int64]

_MAGIC = b"MMIDIDX\x00\x00"
#: Magic, version, code of the ids' type, number of sequences, number of documents and one.
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
#: Integer types by code; 6 and 7 are floats.
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
#: Types that ids are written in, from the smallest on.
_WRITTEN = (1, 8, 4)
#: What numpy raises, besides a ValueError, at the header of an array that is damaged.
_DAMAGED = (OverflowError, SyntaxError, TokenError, TypeError)
#: Values that are looked at or written at a time.
_BLOCK = 1 << 20


class TokenFile:
    """The token ids of one file.

    Attributes:
        path: The file.
        ids: All of them, mapped, shape [n].
    """

    def __init__(self, path: Path, *, vocab_size: int, separator: int, setting: str) -> None:
        """Map the file, and its index where it has one.

        Args:
            path: NAME.bin, next to NAME.idx, or NAME.npy.
            vocab_size: Ids are below this.
            separator: Ends a document of a .npy.
            setting: Dotted path of the setting, for messages.

        Raises:
            ConfigError: If it cannot be read, is of another form, or was cut.
        """
        self.path = path
        self._vocab_size = vocab_size
        self._separator = separator
        self._setting = setting
        try:
            if path.suffix == ".npy":
                self.ids: npt.NDArray[Any] = _map_array(path)
                self._index: _Index | None = None
            else:
                self._index = _Index(index_of(path))
                self.ids = _map(path, self._index.type, self._index.num_tokens)
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error
        limits = np.iinfo(self.ids.dtype)
        self._is_checked = limits.min < 0 or limits.max >= vocab_size

    def ends(self, document: int, token: int, most: int) -> Offsets:
        """Find where the next documents end.

        Args:
            document: Documents of this file before them.
            token: Token at which the first of them begins.
            most: As many as are found at a time; fewer of a .npy, where they are long.

        Returns:
            The token behind each, shape [at most `most`]; empty at the end of the file.

        Raises:
            ConfigError: If the index is damaged there.
        """
        if self._index is not None:
            try:
                return self._index.ends(document, token, most)
            except ValueError as error:
                raise self._unreadable(error) from error
        num_tokens, block = len(self.ids), _BLOCK
        found = self._separators(token, block)
        while not len(found) and token + block < num_tokens:
            block *= 2
            found = self._separators(token, block)
        ends = token + 1 + found.astype(np.int64)
        last = int(ends[-1]) if len(ends) else token
        if last < num_tokens <= token + block:  # no separator behind the last document
            ends = np.append(ends, num_tokens)
        return ends[:most]

    def copy(self, first: int, out: npt.NDArray[np.integer[Any]]) -> None:
        """Copy the ids from `first` on, as many as `out` has.

        Raises:
            ConfigError: If one of them is no token of the tokenizer.
        """
        ids = self.ids[first : first + len(out)]
        if self._is_checked and (int(ids.max()) >= self._vocab_size or int(ids.min()) < 0):
            at = int(np.flatnonzero((ids >= self._vocab_size) | (ids < 0))[0])
            raise ConfigError(
                f"{self._setting}: {self.path}: token {first + at:,} is {ids[at]}, but those of "
                f"data.tokenizer are 0 to {self._vocab_size - 1}: name the tokenizer that the file "
                "was written with, or write the file again"
            )
        out[:] = ids

    def _unreadable(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self._setting}: {self.path} cannot be read as token ids: {error}; write it again, "
            "or take it out"
        )

    def _separators(self, token: int, block: int) -> npt.NDArray[np.intp]:
        return np.flatnonzero(self.ids[token : token + block] == self._separator)


def index_of(path: Path) -> Path:
    """Give the index of a .bin.

    Raises:
        ValueError: If the file has another name.
    """
    if path.suffix != ".bin":
        raise ValueError("a source names NAME.bin, next to NAME.idx, or NAME.npy, none compressed")
    return path.with_suffix(".idx")


def smallest_type(vocab_size: int) -> np.dtype[Any]:
    """Give the smallest type that ids below `vocab_size` are written in."""
    types = [np.dtype(_TYPES[code]) for code in _WRITTEN]
    return next(each for each in types if vocab_size <= np.iinfo(each).max + 1)


def index_pieces(
    lengths: npt.NDArray[np.int32], id_type: np.dtype[Any]
) -> Iterator[bytes | memoryview]:
    """Write the index of documents of one sequence each; an empty document has none.

    Args:
        lengths: Tokens of each document, separator included.
        id_type: That of the ids.
    """
    code = next(code for code, name in _TYPES.items() if np.dtype(name) == id_type)
    is_full = lengths > 0
    num_sequences = int(np.count_nonzero(is_full))
    yield _HEADER.pack(_MAGIC, _VERSION, code, num_sequences, len(lengths) + 1)
    for block in _blocks(lengths):
        yield block[block > 0].astype("<i4").tobytes()
    at = 0
    for block in _blocks(lengths):
        sizes = block[block > 0].astype("<i8") * id_type.itemsize
        yield (at + np.cumsum(sizes) - sizes).tobytes()
        at += int(sizes.sum())
    yield bytes(8)
    at = 0
    for block in _blocks(is_full):
        counts = np.cumsum(block, dtype="<i8")
        yield (at + counts).tobytes()
        at += int(counts[-1])


class _Index:
    """Where the documents of a .bin end."""

    def __init__(self, path: Path) -> None:
        """Map it, and check all that takes no longer for more documents.

        Raises:
            OSError: If it cannot be read.
            ValueError: Saying what is wrong with it.
        """
        size = path.stat().st_size
        raw = np.memmap(path, dtype=np.uint8, mode="r") if size else np.zeros(0, dtype=np.uint8)
        if size < _HEADER.size:
            raise ValueError(f"{path} has {size} bytes, its header alone {_HEADER.size}")
        magic, version, code, num_sequences, num_ends = _HEADER.unpack_from(raw.data)
        if magic != _MAGIC or version != _VERSION:
            raise ValueError(f"{path} is no index of MMapIndexedDataset, version {_VERSION}")
        if code not in _TYPES:
            raise ValueError(f"{path} says that the ids are of type {code}, which is no integer")
        expected = _HEADER.size + 12 * num_sequences + 8 * num_ends
        if size != expected or not num_ends:
            raise ValueError(
                f"{path} has {size} bytes, and {expected} for its {num_sequences} sequences and "
                f"{num_ends - 1} documents"
            )
        self.type = np.dtype(_TYPES[code])
        self._path = path
        at = _HEADER.size
        self._lengths = np.frombuffer(raw, "<i4", num_sequences, at)
        self._first_bytes = np.frombuffer(raw, "<i8", num_sequences, at + 4 * num_sequences)
        self._sequences = np.frombuffer(raw, "<i8", num_ends, at + 12 * num_sequences)
        last = int(self._sequences[-1])
        if last != num_sequences:
            raise ValueError(f"{path} names no document for sequence {last} of {num_sequences}")
        self.num_tokens = 0
        if num_sequences:
            num_bytes = int(self._first_bytes[-1]) + int(self._lengths[-1]) * self.type.itemsize
            self.num_tokens = num_bytes // self.type.itemsize

    def ends(self, document: int, token: int, most: int) -> Offsets:
        """See `TokenFile.ends`.

        Raises:
            ValueError: If documents there do not follow one another, each of sequences that do.
        """
        bounds = self._sequences[document : document + 1 + most]
        first, last = (int(bounds[0]), int(bounds[-1])) if len(bounds) else (0, 0)
        is_in_order = bool((np.diff(bounds) >= 0).all()) and 0 <= first <= last
        if not is_in_order or last > len(self._lengths) or (not document and first):
            raise ValueError(f"{self._path} names documents that do not follow one another")
        lengths = self._lengths[first:last].astype(np.int64)
        starts = token + np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        told = self._first_bytes[first : last + 1]  # of the sequence behind them, too, if any
        is_told = np.array_equal(starts[: len(told)] * self.type.itemsize, told)
        if not is_told or (lengths < 0).any() or starts[-1] > self.num_tokens:
            raise ValueError(f"{self._path} names sequences that do not follow one another")
        ends: Offsets = starts[bounds[1:] - first]
        return ends


def _blocks(values: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    return (values[at : at + _BLOCK] for at in range(0, len(values), _BLOCK))


def _map(path: Path, id_type: np.dtype[Any], num_tokens: int) -> npt.NDArray[Any]:
    size, expected = path.stat().st_size, num_tokens * id_type.itemsize
    if size != expected:
        raise ValueError(f"it has {size} bytes, and {expected} by its index")
    if not size:
        return np.zeros(0, dtype=id_type)
    return np.asarray(np.memmap(path, dtype=id_type, mode="r"))


def _map_array(path: Path) -> npt.NDArray[Any]:
    try:
        mapped: np.memmap[Any, Any] = open_memmap(path, mode="r")
    except _DAMAGED as error:
        raise ValueError(f"its header is damaged: {error!r:.200}") from error
    size, expected = path.stat().st_size, mapped.offset + mapped.nbytes
    if size != expected:
        raise ValueError(f"it has {size} bytes, and {expected} by its header")
    if mapped.ndim != 1 or mapped.dtype.kind not in "iu":
        raise ValueError(
            f"it is of shape {mapped.shape} and type {mapped.dtype}, not of integers "
            "in one dimension"
        )
    return np.asarray(mapped)
