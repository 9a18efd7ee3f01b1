"""Tokenises sources of text into NAME.bin and NAME.idx: their documents in order, each once.

Ids and lengths are appended to two part files. How far both are durable, and where the source goes
on, is written next to them now and then; a start that finds this cuts the part files back to it and
goes on there. What is written depends on text and tokenizer only: not on processes, nor on kills.
"""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from diloco.config.data import DataConfig, SourceConfig
from diloco.data.documents import DocumentReader, open_source
from diloco.data.files import find_files, kind_of, unpacked_bytes
from diloco.data.token_files import TokenFile, index_pieces, smallest_type
from diloco.data.token_source import record_of
from diloco.data.tokenizer import Tokenizer, open_tokenizer
from diloco.durable import (
    DiskFull,
    close,
    make_directory_durably,
    name_durably,
    raising_disk_full,
    read_json,
    sync,
    unlink,
    write_at,
    write_durably,
    write_json,
)
from diloco.errors import ConfigError

logger = logging.getLogger(__name__)

#: Told (what, bytes of text done, of how many; 0: unknown). What it raises ends the work.
Show: TypeAlias = Callable[[str, int, int], None]
#: Lengths of documents, and their ids one after the other.
_Encoded: TypeAlias = tuple[list[int], bytes]

#: A job of a process ends with whichever of these is reached first.
_JOB_DOCUMENTS = 512
_JOB_BYTES = 1 << 20
#: Bytes of ids between two points at which a start goes on.
_SYNC_BYTES = 64 << 20
#: Bytes of a length.
_LENGTH = np.dtype("<i4").itemsize


@dataclass(frozen=True, slots=True)
class Prepared:
    """What was made of a source.

    Attributes:
        path: NAME.bin.
        num_documents: Documents, empty ones included.
        num_tokens: Tokens, separators included.
    """

    path: Path
    num_documents: int
    num_tokens: int


def prepare(
    config: DataConfig,
    directory: Path,
    *,
    num_processes: int,
    show: Show,
    sync_bytes: int = _SYNC_BYTES,
) -> dict[str, Prepared]:
    """Tokenise all sources, or what is left of them; returns by name what was made.

    Args:
        config: Of the run.
        directory: Made when missing.
        num_processes: That tokenise.
        show: See `Show`.
        sync_bytes: Bytes of ids between two points at which a later start goes on.

    Raises:
        ConfigError: If a source cannot be read or is no text, the directory has files of another
            source, there is no room, or a process was killed.
    """
    tokenizer = open_tokenizer(config.tokenizer, config.separator)
    with ProcessPoolExecutor(
        num_processes,
        multiprocessing.get_context("spawn"),
        _begin,
        (config.tokenizer, config.separator),
    ) as pool:
        try:
            made = {}
            for name in sorted(config.sources):
                jobs = _Jobs(pool, 2 * num_processes)
                made[name] = _prepare(config, name, directory, tokenizer, jobs, show, sync_bytes)
            return made
        except BrokenProcessPool as error:
            raise ConfigError(
                f"{directory}: a process that tokenised was ended, perhaps for its memory; use "
                f"fewer than --processes {num_processes} and type the same command again, it goes "
                "on where it was"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _prepare(
    config: DataConfig,
    name: str,
    directory: Path,
    tokenizer: Tokenizer,
    jobs: _Jobs,
    show: Show,
    sync_bytes: int,
) -> Prepared:
    setting, wanted = f"data.sources.{name}", config.sources[name]
    files = find_files(wanted.files, f"{setting}.files")
    if files and kind_of(files, f"{setting}.files") == "tokens":
        raise ConfigError(f"{setting}.files: {files[0]} is a token file: there is nothing to do")
    source = open_source(name, wanted)
    parts = [list(astuple(part)) for part in source.parts]
    about = _about(wanted, parts, tokenizer)
    try:
        make_directory_durably(directory)
        with _Output(directory / f"{name}.bin", about, tokenizer) as output:
            if not output.is_complete:
                reader = source.read()
                reader.go_to(output.position)
                total = unpacked_bytes(source.files)
                for position, num_bytes, encoded in jobs.encode(reader):
                    output.append(encoded, num_bytes)
                    if output.num_unsynced >= sync_bytes:
                        output.sync(position)
                    show(f"{name}, {output.num_tokens:,} tokens", output.num_text_bytes, total)
                output.complete(reader.position())
            return Prepared(output.path, output.num_documents, output.num_tokens)
    except DiskFull as error:
        raise ConfigError(
            f"{setting}: {error.lack} below {directory}: {error}; {error.remedy} and type the same "
            "command again, it goes on where it was"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{setting}: cannot write below {directory}: {error}; choose another --out"
        ) from error


def _about(source: SourceConfig, parts: list[list[Any]], tokenizer: Tokenizer) -> dict[str, Any]:
    """Say what the files are made of: JSON values."""
    return {
        "tokenizer": tokenizer.digest,
        "parts": parts,
        "field": source.field,
        "document": source.document,
        "subset": source.subset,
        "split": source.split,
    }


class _Output:
    """The files of one source, while they are written."""

    def __init__(self, path: Path, about: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        self.path = path
        self._about = about
        self._tokenizer = tokenizer
        self._type = smallest_type(tokenizer.vocab_size)
        self._part = path.with_suffix(".bin.part")
        self._lengths_part = path.with_suffix(".lengths.part")
        self._progress = path.with_suffix(".progress.json")
        self.position: dict[str, Any] | None = None
        self.num_documents = self.num_tokens = self.num_text_bytes = self.num_unsynced = 0
        self.is_complete = False

    def __enter__(self) -> _Output:
        """Go to where an earlier start came, and cut what lies behind that."""
        record = _read(record_of(self.path))
        if self.path.exists():
            if record is None or not self._is_own(record):
                raise ConfigError(
                    f"{self.path} is there already, and was not made of this text with this "
                    "tokenizer; choose another --out, or remove it"
                )
            self.is_complete = self._is_whole()
        progress = _read(self._progress)
        if progress is not None and not self._is_own(progress):
            raise ConfigError(
                f"{self._part} was begun with other text or another tokenizer; choose another "
                f"--out, or remove it: rm {self._progress}"
            )
        if record is not None and self.is_complete:
            self.num_documents, self.num_tokens = record["documents"], record["tokens"]
            self._clear()
            return self
        if progress is not None:
            self.position = progress["position"]
            self.num_documents, self.num_tokens = progress["documents"], progress["tokens"]
            self.num_text_bytes = progress["text_bytes"]
        self._ids = self._open(self._part, self.num_tokens * self._type.itemsize)
        self._lengths = self._open(self._lengths_part, self.num_documents * _LENGTH)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the part files where they are, for another start."""
        if not self.is_complete:
            close(self._ids)
            close(self._lengths)

    def append(self, encoded: _Encoded, num_text_bytes: int) -> None:
        """Write documents behind the others."""
        lengths, ids = encoded
        write_at(self._ids, self.num_tokens * self._type.itemsize, ids)
        at = self.num_documents * _LENGTH
        write_at(self._lengths, at, np.array(lengths, dtype="<i4").tobytes())
        self.num_documents += len(lengths)
        self.num_tokens += sum(lengths)
        self.num_text_bytes += num_text_bytes
        self.num_unsynced += len(ids)

    def sync(self, position: Mapping[str, Any]) -> None:
        """Let a later start go on at a position of the source, behind all that was written."""
        sync(self._ids)
        sync(self._lengths)
        counts = {"documents": self.num_documents, "tokens": self.num_tokens}
        progress = {"text_bytes": self.num_text_bytes, "position": position}
        write_json(self._progress, {**self._about, **counts, **progress})
        self.num_unsynced = 0

    def complete(self, position: Mapping[str, Any]) -> None:
        """Write the index, and give the ids their name last: what has it is whole."""
        self.sync(position)
        lengths = np.fromfile(self._lengths_part, dtype="<i4")
        write_durably(self.path.with_suffix(".idx"), index_pieces(lengths, self._type))
        counts = {"documents": self.num_documents, "tokens": self.num_tokens}
        write_json(record_of(self.path), {**self._about, **counts})
        name_durably(self._ids, self._part, self.path)
        close(self._ids)
        close(self._lengths)
        self.is_complete = True
        self._clear()

    def _clear(self) -> None:
        for path in (self._part, self._lengths_part, self._progress):
            unlink(path)

    def _is_whole(self) -> bool:
        """Whether a rank can read what is there; a file may have been cut, or its index removed."""
        size, separator = self._tokenizer.vocab_size, self._tokenizer.separator
        try:
            TokenFile(self.path, vocab_size=size, separator=separator, setting="--out")
        except ConfigError as error:
            logger.warning("it is written again: %s", error)
            return False
        return True

    def _is_own(self, there: Mapping[str, Any]) -> bool:
        return all(there.get(key) == value for key, value in self._about.items())

    def _open(self, path: Path, num_bytes: int) -> int:
        with raising_disk_full():
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            close(descriptor)
            raise ConfigError(f"{path} is being written by another process: wait for it") from error
        if os.fstat(descriptor).st_size < num_bytes:
            raise ConfigError(
                f"{path} is shorter than {self._progress} says, {num_bytes} bytes: begin again: "
                f"rm {self._progress}"
            )
        os.ftruncate(descriptor, num_bytes)
        return descriptor


def _read(path: Path) -> dict[str, Any] | None:
    try:
        read: dict[str, Any] | None = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot go on: {error}; remove it: rm {path}") from error
    return read


# -- the processes that tokenise -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Jobs:
    """What processes have to do, at most so many jobs at a time."""

    pool: ProcessPoolExecutor
    most: int

    def encode(self, reader: DocumentReader) -> Iterator[tuple[dict[str, Any], int, _Encoded]]:
        """Tokenise what is left; yields of each job the position behind it and bytes of text."""
        jobs: deque[tuple[dict[str, Any], int, Future[_Encoded]]] = deque()
        while True:
            texts = _next_texts(reader)
            if texts:
                made = self.pool.submit(_encode, texts)
                jobs.append((reader.position(), sum(map(len, texts)), made))
            if len(jobs) > (self.most if texts else 0):
                position, num_bytes, made = jobs.popleft()
                yield position, num_bytes, made.result()
            elif not texts:
                return


def _next_texts(reader: DocumentReader) -> list[bytes]:
    texts: list[bytes] = []
    size = 0
    while len(texts) < _JOB_DOCUMENTS and size < _JOB_BYTES:
        text = reader.read()
        if text is None:
            break
        texts.append(text)
        size += len(text)
    return texts


#: Of this process.
_tokenizer: Tokenizer | None = None


def _begin(name: str, separator: str) -> None:
    """Open the tokenizer, and end with the process that started this one, however that ends."""
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the starter
    starter = multiprocessing.parent_process()
    assert starter is not None, "a process of a pool was started by another"

    def wait() -> None:
        starter.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
    _tokenizer = open_tokenizer(name, separator)


def _encode(texts: list[bytes]) -> _Encoded:
    """Give each document's ids with a separator; an empty one has none."""
    assert _tokenizer is not None, "the process has begun"
    full = [text for text in texts if text]
    encoded = iter(_tokenizer.encode(full) if full else [])
    lengths, parts = [], []
    separator = np.array([_tokenizer.separator], dtype=np.int32)
    for text in texts:
        if text:
            parts += [next(encoded), separator]
        lengths.append(len(parts[-2]) + 1 if text else 0)
    ids = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
    return lengths, ids.astype(smallest_type(_tokenizer.vocab_size)).tobytes()
