"""One slot's share of one source, packed into sequences.

Of the documents after the held-out ones, slot s of V has numbers s, s + V, s + 2 V, ...; so slots
share none and leave none out, however files and row groups are cut. Its documents are joined, a
separator after each, and cut every `sequence_length` tokens; a sequence has one token more, the
first of the next, so every token is predicted once. A sequence says where its tokens are; they
are copied where they are wanted.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from diloco.data.documents import Source
from diloco.data.tokenizer import Tokenizer, Tokens
from diloco.errors import ConfigError

logger = logging.getLogger(__name__)

#: Documents that are tokenised together end with whichever of these is reached first.
_GROUP_DOCUMENTS = 32
_GROUP_BYTES = 8 << 10


def check_counts(*counts: object) -> tuple[int, ...]:
    """Return what must be whole numbers from 0 on: a cursor may be another island's word.

    Raises:
        ValueError: If they are not.
    """
    found = tuple(n for n in counts if type(n) is int and 0 <= n < 2**63)
    if len(found) < len(counts):
        raise ValueError(f"a cursor's numbers are whole, from 0 on: {counts!r:.100}")
    return found


class SourceEndedError(Exception):
    """A source that does not repeat has no further sequence; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Share:
    """The documents of a source that belong to a slot.

    Attributes:
        held_out: First documents, which nobody trains on.
        slot: Index of the slot.
        num_slots: Slots among which the others are divided.
    """

    held_out: int
    slot: int
    num_slots: int

    def has(self, document: int) -> bool:
        """Say whether the document of that number, from 0, is the slot's."""
        number = document - self.held_out
        return number >= 0 and number % self.num_slots == self.slot

    def has_each(self, first: int, num_documents: int) -> npt.NDArray[np.bool_]:
        """Say it of so many documents from `first` on."""
        numbers = np.arange(first - self.held_out, first - self.held_out + num_documents)
        is_own: npt.NDArray[np.bool_] = (numbers >= 0) & (numbers % self.num_slots == self.slot)
        return is_own


def too_few_documents(
    setting: str, num_documents: int, num_held_out: int, num_slots: int
) -> ConfigError:
    """Say that a source has not one document for each slot behind those held out."""
    if not num_documents:
        return ConfigError(f"{setting} is empty: it has no document")
    return ConfigError(
        f"{setting} has {num_documents} documents: data.held_out_documents = {num_held_out} are "
        f"held out, and each of {num_slots} islands needs one more; add text or lower "
        "data.held_out_documents"
    )


class DocumentGroup(Protocol):
    """Documents of a share that were read together, a separator after each.

    Attributes:
        num_tokens: At least one.
        check: Digest of what is in front, to be found again on return.
    """

    @property
    def num_tokens(self) -> int:
        """See above."""
        ...

    @property
    def check(self) -> str:
        """See above."""
        ...

    def copy(self, first: int, out: npt.NDArray[np.int64]) -> None:
        """Copy the tokens from `first` on, as many as `out` has.

        Raises:
            ConfigError: If one is no token of the tokenizer.
        """
        ...


class DocumentGroups(Protocol):
    """The documents of a share, in groups; where one ends depends on nothing but its beginning.

    Attributes:
        setting: Dotted path of the source's table.
        share: Which documents these are.
        document: Documents of the source passed since its start, those of others included.
    """

    setting: str
    share: Share

    @property
    def document(self) -> int:
        """See above."""
        ...

    def position(self) -> dict[str, Any]:
        """Give the position before the next group, its document included: JSON values."""
        ...

    def go_to(self, position: Mapping[str, Any] | None) -> None:
        """Go to a position, or to the start."""
        ...

    def read(self) -> DocumentGroup | None:
        """Read the next group; None at the end of the source.

        Raises:
            ConfigError: If a document cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class _TextGroup:
    tokens: Tokens
    check: str

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def copy(self, first: int, out: npt.NDArray[np.int64]) -> None:
        out[:] = self.tokens[first : first + len(out)]


class TextGroups:
    """Documents of a source of text, tokenised."""

    def __init__(self, source: Source, share: Share, tokenizer: Tokenizer) -> None:
        """Open the source at its start.

        Raises:
            ConfigError: If it cannot be opened.
        """
        self.setting = source.setting
        self.share = share
        self._reader = source.read()
        self._tokenizer = tokenizer

    @property
    def document(self) -> int:
        """Documents passed since the start."""
        return self._reader.document

    def position(self) -> dict[str, Any]:
        """Give the position before the next document: JSON values."""
        return self._reader.position()

    def go_to(self, position: Mapping[str, Any] | None) -> None:
        """Go to a position, or to the start."""
        self._reader.go_to(position)

    def read(self) -> DocumentGroup | None:
        """Read and tokenise the next documents that have text; at least one.

        Raises:
            ConfigError: If one cannot be read.
        """
        texts: list[bytes] = []
        size = 0
        while len(texts) < _GROUP_DOCUMENTS and size < _GROUP_BYTES:
            number = self._reader.document
            text = self._reader.read()
            if text is None:
                break
            if text and self.share.has(number):
                texts.append(text)
                size += len(text)
        if not texts:
            return None
        separator = np.array([self._tokenizer.separator], dtype=np.int32)
        parts = [part for tokens in self._tokenizer.encode(texts) for part in (tokens, separator)]
        return _TextGroup(np.concatenate(parts), blake3(texts[0]).hexdigest(length=8))


class PackedSequence:
    """Where the tokens of a sequence are."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[tuple[DocumentGroup, int, int]]) -> None:
        """Keep (group, first token in it, number of tokens), in order."""
        self._parts = parts

    def copy(self, out: npt.NDArray[np.int64]) -> None:
        """Copy the tokens to `out`, of shape [sequence_length + 1].

        Raises:
            ConfigError: If one is no token of the tokenizer.
        """
        at = 0
        for group, first, num_tokens in self._parts:
            group.copy(first, out[at : at + num_tokens])
            at += num_tokens


class PackedSource:
    """Sequences of a slot's share of one source, in order.

    Attributes:
        num_sequences: Sequences taken since the start.
    """

    def __init__(self, groups: DocumentGroups, *, sequence_length: int, repeat: bool) -> None:
        """Stand at the start.

        Args:
            groups: Documents of the slot, at their start.
            sequence_length: Predicted tokens of a sequence; it has one more.
            repeat: Whether to start again at the end.
        """
        self._reader = groups
        self._sequence_length = sequence_length
        self._repeat = repeat
        self._restart()

    def _restart(self) -> None:
        self.num_sequences = 0
        self._pass = 0
        self._has_text = False  # in this pass
        #: With the position before each.
        self._groups: deque[tuple[dict[str, Any], DocumentGroup]] = deque()
        self._offset = 0  # of the next sequence, in the first group

    def next_sequence(self) -> PackedSequence:
        """Take the next sequence.

        Raises:
            SourceEndedError: If the source has no further sequence and does not repeat.
            ConfigError: If a document cannot be read, or the slot has no text in all of it.
        """
        parts: list[tuple[DocumentGroup, int, int]] = []
        start, needed = self._offset, self._sequence_length + 1
        for index in itertools.count():
            if index == len(self._groups):
                self._groups.append(self._read_group())
            group = self._groups[index][1]
            num_tokens = min(needed, group.num_tokens - start)
            parts.append((group, start, num_tokens))
            start, needed = 0, needed - num_tokens
            if not needed:
                break
        self._offset += self._sequence_length
        while self._offset >= self._groups[0][1].num_tokens:
            self._offset -= self._groups.popleft()[1].num_tokens
        self.num_sequences += 1
        return PackedSequence(parts)

    def cursor(self) -> dict[str, Any]:
        """Give the position before the next sequence: JSON values."""
        cursor: dict[str, Any] = {"sequences": self.num_sequences, "token": self._offset}
        if self._groups:
            start, first = self._groups[0]
            return {**cursor, "start": start, "check": first.check}
        return {**cursor, "start": self._position(), "check": ""}

    def go_to(self, cursor: Mapping[str, Any] | None) -> None:
        """Go to a cursor, or to the start.

        Raises:
            ConfigError: If the documents there are not those of the cursor.
        """
        self._restart()
        if cursor is None:
            self._reader.go_to(None)
            return
        start = cursor["start"]
        self.num_sequences, self._offset, self._pass, _ = check_counts(
            cursor["sequences"], cursor["token"], start["pass"], start["document"]
        )
        self._reader.go_to(start)
        if not cursor["check"]:
            if self._offset or self.num_sequences:
                raise ConfigError(f"{self._reader.setting}: no position has no check but the start")
            return
        try:
            before, group = self._read_group()
        except SourceEndedError:
            group = None
        if group is None or group.check != cursor["check"]:
            raise ConfigError(
                f"{self._reader.setting}: document {start['document'] + 1} and those after it are "
                "not what the run was trained on, although names and sizes are the same; "
                "put the earlier text back, or start a new run"
            )
        if not 0 <= self._offset < group.num_tokens:
            raise ConfigError(
                f"{self._reader.setting}: token {self._offset} of a group of {group.num_tokens}"
            )
        self._groups.append((before, group))

    def _position(self) -> dict[str, Any]:
        return {**self._reader.position(), "pass": self._pass}

    def _read_group(self) -> tuple[dict[str, Any], DocumentGroup]:
        """Read the slot's next documents that have text, and the position before them."""
        start = self._position()
        group = self._reader.read()
        while group is None:
            self._begin_pass()
            start = self._position()
            group = self._reader.read()
        self._has_text = True
        return start, group

    def _begin_pass(self) -> None:
        """Go back to the start after the last document, if that is wanted and of use."""
        share, setting = self._reader.share, self._reader.setting
        slot = f"slot {share.slot} of {share.num_slots}"
        num_documents = self._reader.document
        if not self._has_text:
            raise ConfigError(
                f"{setting}: {num_documents} documents, the first {share.held_out} of them held "
                f"out, have no text for {slot}; add text or lower data.held_out_documents"
            )
        if not self._repeat:
            raise SourceEndedError(
                f"{setting} ended: {slot} was trained on once, its part of {num_documents} "
                f"documents; set {setting}.repeat = true to go through them again, add text, or "
                "lower run.inner_steps"
            )
        self._pass += 1
        self._has_text = False
        logger.warning("source starts again, setting=%s pass=%d", setting, self._pass + 1)
        self._reader.go_to(None)
