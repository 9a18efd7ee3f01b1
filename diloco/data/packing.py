"""One slot's share of one source, tokenised and packed into sequences.

Of the documents after the held-out ones, slot s of V has numbers s, s + V, s + 2 V, ...; so slots
share none and leave none out, however files and row groups are cut. Its documents are joined, a
separator after each, and cut every `sequence_length` tokens; a sequence has one token more, the
first of the next, so every token is predicted once.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
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


@dataclass(frozen=True, slots=True)
class _Group:
    """Documents that were tokenised together.

    Attributes:
        start: Position before the first of them.
        check: Digest of the first of them, to be found again on return.
        tokens: All of them with their separators, int32.
    """

    start: dict[str, Any]
    check: str
    tokens: Tokens


class PackedSource:
    """Sequences of a slot's share of one source, in order.

    Attributes:
        num_sequences: Sequences taken since the start.
    """

    def __init__(
        self,
        source: Source,
        share: Share,
        tokenizer: Tokenizer,
        *,
        sequence_length: int,
        repeat: bool,
    ) -> None:
        """Open the source at its start.

        Args:
            source: Documents.
            share: Those that are the slot's.
            tokenizer: Gives ids and the separator.
            sequence_length: Predicted tokens of a sequence; it has one more.
            repeat: Whether to start again at the end.

        Raises:
            ConfigError: If the source cannot be opened.
        """
        self._source = source
        self._reader = source.read()
        self._share = share
        self._tokenizer = tokenizer
        self._sequence_length = sequence_length
        self._repeat = repeat
        self._restart()

    def _restart(self) -> None:
        self.num_sequences = 0
        self._pass = 0
        self._has_text = False  # in this pass
        self._groups: deque[_Group] = deque()
        self._offset = 0  # of the next sequence, in the first group

    def next_sequence(self) -> Tokens:
        """Take the next sequence: ids of shape [sequence_length + 1], int32.

        Raises:
            SourceEndedError: If the source has no further sequence and does not repeat.
            ConfigError: If a document cannot be read, or the slot has no text in all of it.
        """
        parts: list[Tokens] = []
        start, needed = self._offset, self._sequence_length + 1
        for index in itertools.count():
            if index == len(self._groups):
                self._groups.append(self._read_group())
            part = self._groups[index].tokens[start : start + needed]
            parts.append(part)
            start, needed = 0, needed - len(part)
            if not needed:
                break
        sequence = np.concatenate(parts)
        self._offset += self._sequence_length
        while self._offset >= len(self._groups[0].tokens):
            self._offset -= len(self._groups.popleft().tokens)
        self.num_sequences += 1
        return sequence

    def cursor(self) -> dict[str, Any]:
        """Give the position before the next sequence: JSON values."""
        cursor: dict[str, Any] = {"sequences": self.num_sequences, "token": self._offset}
        if self._groups:
            first = self._groups[0]
            return {**cursor, "start": first.start, "check": first.check}
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
                raise ConfigError(f"{self._source.setting}: no position has no check but the start")
            return
        try:
            group = self._read_group()
        except SourceEndedError:
            group = None
        if group is None or group.check != cursor["check"]:
            raise ConfigError(
                f"{self._source.setting}: document {start['document'] + 1} and those after it are "
                "not what the run was trained on, although names and sizes are the same; "
                "put the earlier text back, or start a new run"
            )
        if not 0 <= self._offset < len(group.tokens):
            raise ConfigError(
                f"{self._source.setting}: token {self._offset} of a group of {len(group.tokens)}"
            )
        self._groups.append(group)

    def _position(self) -> dict[str, Any]:
        return {**self._reader.position(), "pass": self._pass}

    def _read_group(self) -> _Group:
        """Read and tokenise the slot's next documents that have text; at least one."""
        start = self._position()
        texts: list[bytes] = []
        size = 0
        while len(texts) < _GROUP_DOCUMENTS and size < _GROUP_BYTES:
            number = self._reader.document
            text = self._reader.read()
            if text is None:
                if texts:
                    break
                self._begin_pass()
                start = self._position()
            elif text and self._share.has(number):
                texts.append(text)
                size += len(text)
        self._has_text = True
        separator = np.array([self._tokenizer.separator], dtype=np.int32)
        parts = [part for tokens in self._tokenizer.encode(texts) for part in (tokens, separator)]
        check = blake3(texts[0]).hexdigest(length=8)
        return _Group(start, check, np.concatenate(parts))

    def _begin_pass(self) -> None:
        """Go back to the start after the last document, if that is wanted and of use."""
        share, setting = self._share, self._source.setting
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
