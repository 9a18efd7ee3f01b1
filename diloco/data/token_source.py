"""A source of token files: which of its documents are held out, and which a slot draws.

Documents are found by their ends, a chunk at a time; no id is read before a sequence is copied.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from diloco.data.files import TextFile, parts_of
from diloco.data.packing import DocumentGroup, Share, check_counts, too_few_documents
from diloco.data.token_files import Offsets, TokenFile, index_of
from diloco.data.tokenizer import Tokenizer, Tokens
from diloco.errors import ConfigError

logger = logging.getLogger(__name__)

#: Documents of a slot that make a group, and the first tokens of it that are its check.
_GROUP_DOCUMENTS = 256
_CHECK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class _Place:
    """The position before a document: its file, and what of that lies before it."""

    file: int = 0
    document: int = 0
    token: int = 0


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Token files, one after the other.

    Attributes:
        setting: Dotted path of its table.
        parts: What it is made of, indexes included.
        origins: As those of `diloco.data.documents.Source`.
        files: At least one.
        tokenizer: That of the run.
    """

    setting: str
    parts: tuple[TextFile, ...]
    origins: tuple[tuple[str, ...], ...]
    files: tuple[TokenFile, ...]
    tokenizer: Tokenizer

    def chunk(self, place: _Place, most: int) -> tuple[TokenFile, Offsets, Offsets, _Place] | None:
        """Find the next documents, all of one file.

        Returns:
            Their file, the token at which each begins, that behind each, and the position behind
            them all; None at the end.
        """
        while place.file < len(self.files):
            file = self.files[place.file]
            ends = file.ends(place.document, place.token, most)
            if len(ends):
                starts = np.concatenate([np.array([place.token]), ends[:-1]])
                behind = _Place(place.file, place.document + len(ends), int(ends[-1]))
                return file, starts, ends, behind
            place = _Place(place.file + 1)
        return None

    def held_out(self, num_held_out: int, num_slots: int) -> Iterator[Tokens]:
        """Read the first documents, and make sure that each slot has one after them.

        Raises:
            ConfigError: If there are too few, or one has an id that is no token.
        """
        place, number, needed = _Place(), 0, num_held_out + num_slots
        is_warned = False
        while number < needed:
            chunk = self.chunk(place, needed - number)
            if chunk is None:
                raise too_few_documents(self.setting, number, num_held_out, num_slots)
            file, starts, ends, place = chunk
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                if end > start and not is_warned and file.ids[end - 1] != self.tokenizer.separator:
                    is_warned = True
                    logger.warning(
                        "%s: document %d of %s does not end with the separator, %d: documents are "
                        "taken as they are, and this one runs into the next",
                        self.setting, number + 1, file.path, self.tokenizer.separator,
                    )  # fmt: skip
                if end > start and number < num_held_out:
                    tokens = np.empty(end - start, dtype=np.int32)
                    file.copy(start, tokens)
                    yield tokens
                number += 1


@dataclass(frozen=True, slots=True)
class _TokenGroup:
    """Runs of adjacent tokens of one file."""

    file: TokenFile
    starts: Offsets
    offsets: Offsets  # of each run in the group, and of its end
    check: str

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    def copy(self, first: int, out: npt.NDArray[np.int64]) -> None:
        run, at = int(np.searchsorted(self.offsets, first, side="right")) - 1, 0
        while at < len(out):
            num_tokens = min(len(out) - at, int(self.offsets[run + 1]) - first)
            start = int(self.starts[run]) + first - int(self.offsets[run])
            self.file.copy(start, out[at : at + num_tokens])
            run, at, first = run + 1, at + num_tokens, first + num_tokens


class TokenGroups:
    """Documents of a share of token files."""

    def __init__(self, source: TokenSource, share: Share) -> None:
        """Stand at the start."""
        self.setting = source.setting
        self.share = share
        self._source = source
        self.go_to(None)

    @property
    def document(self) -> int:
        """Documents passed since the start."""
        return self._document

    def position(self) -> dict[str, Any]:
        """Give the position before the next document: JSON values."""
        return {"document": self._document, "stream": asdict(self._place)}

    def go_to(self, position: Mapping[str, Any] | None) -> None:
        """Go to a position, or to the start.

        Raises:
            ValueError: If it is none.
        """
        self._document = position["document"] if position else 0
        stream = position["stream"] if position else asdict(_Place())
        self._place = _Place(*check_counts(stream["file"], stream["document"], stream["token"]))

    def read(self) -> DocumentGroup | None:
        """Find the share's next documents that have tokens; None at the end."""
        most = _GROUP_DOCUMENTS * self.share.num_slots
        while (chunk := self._source.chunk(self._place, most)) is not None:
            file, starts, ends, self._place = chunk
            is_own = self.share.has_each(self._document, len(ends)) & (ends > starts)
            self._document += len(ends)
            if is_own.any():
                return _group(file, starts[is_own], ends[is_own])
        return None


def _group(file: TokenFile, starts: Offsets, ends: Offsets) -> _TokenGroup:
    """Join documents that are adjacent in the file."""
    is_apart = starts[1:] != ends[:-1]
    starts = starts[np.concatenate([np.array([True]), is_apart])]
    ends = ends[np.concatenate([is_apart, np.array([True])])]
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(ends - starts)])
    first = file.ids[starts[0] : min(int(ends[0]), int(starts[0]) + _CHECK_TOKENS)]
    check = blake3(first.astype("<i8").tobytes()).hexdigest(length=8)
    return _TokenGroup(file, starts, offsets, check)


def open_token_source(setting: str, files: Sequence[Path], tokenizer: Tokenizer) -> TokenSource:
    """Open the token files of a source.

    Raises:
        ConfigError: If one cannot be read, is of another form, has no token, or was prepared with
            another tokenizer.
    """
    opened = []
    for path in files:
        _check_tokenizer(path, tokenizer, setting)
        opened.append(
            TokenFile(
                path,
                vocab_size=tokenizer.vocab_size,
                separator=tokenizer.separator,
                setting=setting,
            )
        )
    if not any(len(file.ids) for file in opened):
        raise ConfigError(f"{setting}: {files[0]} has no token, nor has any file of this source")
    indexes = [index_of(path) for path in files if path.suffix == ".bin"]
    return TokenSource(
        setting=setting.removesuffix(".files"),
        parts=tuple(parts_of([*files, *indexes], setting)),
        origins=tuple((str(path.resolve()),) for path in files),
        files=tuple(opened),
        tokenizer=tokenizer,
    )


def record_of(path: Path) -> Path:
    """Give the file in which `diloco data prepare` says what a .bin was made of."""
    return path.with_suffix(".prepared.json")


def _check_tokenizer(path: Path, tokenizer: Tokenizer, setting: str) -> None:
    """Refuse what was prepared with another tokenizer; other programs' files do not say.

    Raises:
        ConfigError: Naming both.
    """
    record = record_of(path)
    try:
        digest = json.loads(record.read_text())["tokenizer"]
    except FileNotFoundError:
        return
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{setting}: {record} does not say with which tokenizer {path.name} was prepared: "
            f"{error}; prepare it again: diloco data prepare"
        ) from error
    if digest != tokenizer.digest:
        raise ConfigError(
            f"{setting}: {path} was prepared with tokenizer {str(digest)[:16]}, data.tokenizer and "
            f"data.separator are {tokenizer.digest[:16]}: name that tokenizer, or prepare it again"
        )
