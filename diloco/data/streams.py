"""Text of streams: an island's batches with their cursor, and the held-out documents.

Source: PROTOCOL.md, "Shares of the text".
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, astuple
from functools import cached_property
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from diloco.config.classes import identity_difference, identity_json
from diloco.config.data import DataConfig, SourceConfig
from diloco.data.batches import Evaluation, TextPosition, dp_slice, evaluation_starts
from diloco.data.documents import Source, open_source
from diloco.data.files import TextFile, find_files, first_difference, kind_of
from diloco.data.packing import (
    DocumentGroups,
    PackedSequence,
    PackedSource,
    Share,
    SourceEndedError,
    TextGroups,
    too_few_documents,
)
from diloco.data.shuffle import Mixture, WindowShuffle
from diloco.data.token_source import TokenGroups, TokenSource, open_token_source
from diloco.data.tokenizer import Tokenizer, Tokens, open_tokenizer
from diloco.errors import ConfigError
from diloco.protocol.run.slots import SlotPosition, furthest_behind

logger = logging.getLogger(__name__)

#: Slots, all of an island's, whose positions the text does not lead to: it is other text. One alone
#: may be what its last holder said wrongly.
_LEAST_OF_OTHER_TEXT = 2
#: Characters of a position that are shown.
_MOST_SHOWN = 300


class StreamData:
    """Documents of several sources; the first of each are held out.

    Attributes:
        sequence_length: Predicted tokens of a sequence.
        vocab_size: Token ids are below this.
        digest: Over tokenizer, configuration and content of the sources.
    """

    #: Streams are not counted.
    num_documents = 0

    def __init__(self, config: DataConfig, *, seed: int, num_slots: int) -> None:
        """Open tokenizer and sources, and read the held-out documents.

        Args:
            config: With at least one source.
            seed: Seed of the run.
            num_slots: Slots that need at least one document of each source.

        Raises:
            ConfigError: If anything cannot be found or read, or a source has too few documents.
        """
        self._config = config
        self._seed = seed
        self._tokenizer: Tokenizer = open_tokenizer(config.tokenizer, config.separator)
        self._sources = {
            name: _open(name, config.sources[name], self._tokenizer)
            for name in sorted(config.sources)
        }
        self.sequence_length = config.sequence_length
        self.vocab_size = self._tokenizer.vocab_size
        self.tokenizer_digest = self._tokenizer.digest
        self.recipe = _recipe(config, seed, self._tokenizer)
        self.parts = {name: source.parts for name, source in self._sources.items()}
        _check_one_source_each(self._sources)
        content = self.content()
        described = json.dumps([content["recipe"], content["parts"]])
        self.digest = blake3(described.encode()).hexdigest()
        self._held_out = [
            document
            for source in self._sources.values()
            for document in _held_out(source, config.held_out_documents, num_slots)
        ]

    def content(self) -> dict[str, Any]:
        """Say what the text is: how it is cut, and what each source is made of; JSON values."""
        return self._content

    @cached_property
    def _content(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "parts": {
                name: [list(astuple(part)) for part in parts] for name, parts in self.parts.items()
            },
        }

    def check_content(self, there: Mapping[str, Any]) -> None:
        """Refuse to go on where a run was trained on other text; names what has changed.

        Raises:
            ConfigError: If `there` is not what `content` gives here.
        """
        if "recipe" not in there:
            raise ConfigError(
                'the run was trained on data.source = "stdlib", not on streams; use its [data] '
                "section, or start from its weights alone: diloco export"
            )
        if differing := identity_difference(self.recipe, there["recipe"]):
            raise ConfigError(
                "the run's text (there) was cut in another way than [data] says (here):\n  "
                + "\n  ".join(differing)
                + "\nUndo the change, or start a new run from the weights: diloco export"
            )
        for name, parts in self.parts.items():
            theirs = [TextFile(*part) for part in there["parts"][name]]
            if difference := first_difference(parts, theirs):
                is_hub = bool(self._config.sources[name].hub)
                pinned = f'set data.sources.{name}.revision = "{theirs[0].digest}"'
                raise ConfigError(
                    f"data.sources.{name} is not what the run was trained on: {difference}; "
                    f"{pinned if is_hub else 'put it back'}, or start a new run from the weights: "
                    "diloco export"
                )

    def evaluation(self, num_sequences: int) -> Evaluation:
        """Give evenly spaced sequences of the held-out documents of all sources, in a row.

        A separator stands for no byte.

        Raises:
            ConfigError: If the held-out text has fewer sequences that do not overlap.
        """
        tokens, num_bytes = self._held_out_tokens
        length = self.sequence_length
        remedy = ", or raise data.held_out_documents"
        starts = evaluation_starts(len(tokens), length, num_sequences, remedy)
        rows = starts[:, None] + np.arange(length + 1, dtype=np.int64)
        return Evaluation(
            torch.from_numpy(tokens[rows].astype(np.int64)),
            num_bytes=int(num_bytes[rows[:, 1:]].sum(dtype=np.int64)),
        )

    def batches(
        self,
        *,
        slots: Collection[int],
        num_slots: int,
        batch_size: int,
        dp_coordinate: int,
        dp_size: int,
    ) -> StreamBatches:
        """Give an island's batches, of which this rank takes one coordinate's slice.

        Raises:
            ConfigError: If `dp_size` does not divide `batch_size`, or a source cannot be opened.
        """
        rows = dp_slice(batch_size, dp_coordinate, dp_size)
        return StreamBatches(self, slots, num_slots=num_slots, batch_size=batch_size, rows=rows)

    def text_of(self, slot: int, num_slots: int) -> WindowShuffle:
        """Open the sequences of one slot, at their start.

        Raises:
            ConfigError: If a source cannot be opened.
        """
        config = self._config
        share = Share(config.held_out_documents, slot, num_slots)
        packed = {
            name: PackedSource(
                _groups(source, share, self._tokenizer),
                sequence_length=self.sequence_length,
                repeat=config.sources[name].repeat,
            )
            for name, source in self._sources.items()
        }
        weights = {name: config.sources[name].weight for name in packed}
        return WindowShuffle(
            Mixture(packed, weights), window=config.shuffle_window, seed=self._seed, slot=slot
        )

    @cached_property
    def _held_out_tokens(self) -> tuple[Tokens, Tokens]:
        """Ids of the held-out documents, and the bytes that each stands for."""
        ids: list[Tokens] = []
        num_bytes: list[Tokens] = []
        num_spread = 0
        for document in self._held_out:
            if isinstance(document, bytes):
                tokens, widths = self._tokenizer.encode_measured(document)
                ids += [tokens, np.array([self._tokenizer.separator], dtype=np.int32)]
                num_bytes += [widths, np.zeros(1, dtype=np.int32)]
            else:
                widths, is_exact = _measured(document, self._tokenizer)
                ids.append(document)
                num_bytes.append(widths)
                num_spread += not is_exact
        if num_spread:
            logger.warning(
                "of %d of %d held-out documents of token files data.tokenizer makes other ids: "
                "bytes are counted by document, and spread evenly over its tokens",
                num_spread, len(self._held_out),
            )  # fmt: skip
        if not ids:
            return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32)
        return np.concatenate(ids), np.concatenate(num_bytes)


class StreamBatches:
    """One island's batches of its slots: each sequence is of the slot that is furthest behind."""

    def __init__(
        self,
        data: StreamData,
        slots: Collection[int],
        *,
        num_slots: int,
        batch_size: int,
        rows: slice,
    ) -> None:
        """Stand at the start.

        Args:
            data: Opens the slots, and checks cursors.
            slots: Those that the island draws from.
            num_slots: Slots of the run.
            batch_size: Sequences of the whole island and inner step.
            rows: Those that this rank takes.
        """
        self._data = data
        self._num_slots = num_slots
        self._texts = {slot: data.text_of(slot, num_slots) for slot in sorted(slots)}
        self._ended: set[int] = set()
        self._batch_size = batch_size
        self._rows = rows
        self._position = TextPosition()

    def batch(self, inner_step: int) -> Tensor:
        """Give the batch of the inner step that follows `inner_step` completed ones.

        Raises:
            ConfigError: If the text of all slots has ended, or a document cannot be read.
        """
        if inner_step != self._position.inner_step:
            self.seek(inner_step)
        sequences = [self._take() for _ in range(self._batch_size)][self._rows]
        rows = np.empty((len(sequences), self._data.sequence_length + 1), dtype=np.int64)
        for row, sequence in zip(rows, sequences, strict=True):
            sequence.copy(row)
        self._position = self._position.after(inner_step + 1, self._batch_size)
        return torch.from_numpy(rows)

    def seek(self, inner_step: int) -> None:
        """Go to where `inner_step` completed steps lead, by reading all that lies between."""
        if inner_step < self._position.inner_step:
            for text in self._texts.values():
                text.go_to(None)
            self._ended.clear()
            self._position = TextPosition()
        target = self._position.after(inner_step, self._batch_size)
        num_sequences = target.samples - self._position.samples
        if num_sequences:
            logger.info("passing over text, num_sequences=%d", num_sequences)
        for _ in range(num_sequences):
            self._take()
        self._position = target

    def positions(self) -> dict[int, SlotPosition]:
        """Give the position of each slot, before its next sequence."""
        return {
            slot: SlotPosition(dict(text.drawn), text.cursor())
            for slot, text in self._texts.items()
        }

    def hold(self, claims: Mapping[int, SlotPosition], *, inner_step: int) -> Mapping[int, str]:
        """Draw from these slots alone, each from its position on.

        One that the text does not lead to may be another island's error, and is no reason to end:
        its slot is drawn from the start. That of several slots each is one means other text here.

        Returns:
            Slots that are drawn from the start, and why.

        Raises:
            ConfigError: If the text cannot be read, or leads to no position of two or more.
        """
        held, self._texts = self._texts, {}
        problems = dict[int, str]()
        for slot, claim in sorted(claims.items()):
            text = held.get(slot) or self._data.text_of(slot, self._num_slots)
            if text.cursor() != claim.cursor and (problem := _take_up(text, claim)):
                problems[slot] = problem
            self._texts[slot] = text
        if len(problems) == len(claims) >= _LEAST_OF_OTHER_TEXT:
            raise ConfigError(
                f"the text here leads to no position of slots {', '.join(map(str, problems))}: "
                f"put back the text that the run was trained on; the first one: "
                f"{next(iter(problems.values()))}"
            )
        self._ended.clear()
        self._position = TextPosition(inner_step, self._position.samples)
        return problems

    def state_dict(self) -> dict[str, Any]:
        """Give the cursor, and what it holds for: configuration, sources and split."""
        return {
            **asdict(self._position),
            **self._data.content(),
            "num_slots": self._num_slots,
            "slots": {str(slot): text.cursor() for slot, text in self._texts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a cursor; one of another split, as of a warm start, gives its inner step only.

        Raises:
            ConfigError: If the sources, or how they are cut, have changed since.
        """
        self._data.check_content(state)
        there = {int(slot): cursor for slot, cursor in state.get("slots", {}).items()}
        if (there.keys(), state.get("num_slots")) != (self._texts.keys(), self._num_slots):
            logger.warning(
                "the checkpoint's text was split among other islands, going to its inner step: "
                "slots=%s of %d checkpoint=%s of %s",
                sorted(self._texts), self._num_slots, sorted(there), state.get("num_slots"),
            )  # fmt: skip
            self.seek(state["inner_step"])
            return
        for slot, cursor in there.items():
            self._texts[slot].go_to(cursor)
        self._ended.clear()
        self._position = TextPosition(state["inner_step"], state["samples"])

    def _take(self) -> PackedSequence:
        while True:
            left = {
                slot: text.num_drawn
                for slot, text in self._texts.items()
                if slot not in self._ended
            }
            slot = furthest_behind(left)
            try:
                return self._texts[slot].take()
            except SourceEndedError as end:
                if len(left) == 1:
                    raise ConfigError(
                        f"after inner step {self._position.inner_step}: {end}"
                    ) from None
                logger.warning("slot ended, others go on: %s", end)
                self._ended.add(slot)


def _take_up(text: WindowShuffle, claim: SlotPosition) -> str:
    """Go to the position that an earlier holder of a slot told, or to the start and say why."""
    try:
        text.go_to(claim.cursor or None)
        if not claim.cursor or (text.cursor(), text.drawn) == (claim.cursor, claim.drawn):
            return ""
        problem = f"it leads to {text.drawn}, not to {dict(claim.drawn)}"
    except (
        ArithmeticError, AttributeError, ConfigError, LookupError, RuntimeError, SourceEndedError,
        TypeError, ValueError,
    ) as error:  # fmt: skip
        problem = repr(error)
    text.go_to(None)
    return f"position {str(claim.cursor)[:_MOST_SHOWN]}: {problem}"


def _recipe(config: DataConfig, seed: int, tokenizer: Tokenizer) -> str:
    """Give what decides how the sources are cut: canonical JSON of dotted key to value."""
    values = {f"data.{key}": value for key, value in json.loads(identity_json(config)).items()}
    values |= {"data.tokenizer": tokenizer.digest, "run.seed": seed}
    return json.dumps(values, sort_keys=True)


def _open(name: str, config: SourceConfig, tokenizer: Tokenizer) -> Source | TokenSource:
    """Open a source of text, or of token files."""
    setting = f"data.sources.{name}.files"
    files = find_files(config.files, setting)
    if files and kind_of(files, setting) == "tokens":
        return open_token_source(setting, files, tokenizer)
    return open_source(name, config)


def _groups(source: Source | TokenSource, share: Share, tokenizer: Tokenizer) -> DocumentGroups:
    if isinstance(source, TokenSource):
        return TokenGroups(source, share)
    return TextGroups(source, share, tokenizer)


def _measured(ids: Tokens, tokenizer: Tokenizer) -> tuple[Tokens, bool]:
    """Give the bytes that a document's ids stand for, and whether all are known."""
    num_bytes, is_exact = np.zeros_like(ids), True
    ends = [*np.flatnonzero(ids == tokenizer.separator).tolist(), len(ids)]
    start = 0
    for end in ends:
        if end > start:
            num_bytes[start:end], is_known = tokenizer.measure(ids[start:end])
            is_exact &= is_known
        start = end + 1
    return num_bytes, is_exact


def _check_one_source_each(sources: Mapping[str, Source | TokenSource]) -> None:
    """Refuse a text that two sources have: it would be trained on twice, and be held out once.

    Raises:
        ConfigError: Naming the text and both sources.
    """
    seen: dict[tuple[str, ...], str] = {}
    for name, source in sources.items():
        for origin in source.origins:
            if (other := seen.setdefault(origin, name)) != name:
                raise ConfigError(
                    f"{origin[0]} is in data.sources.{other} and in data.sources.{name}: name it "
                    f"in one of them; to train on it more often set that one's weight, and repeat"
                )


def _held_out(
    source: Source | TokenSource, num_held_out: int, num_slots: int
) -> Iterator[bytes | Tokens]:
    """Read the first documents and make sure that each slot has one after them."""
    if isinstance(source, TokenSource):
        yield from source.held_out(num_held_out, num_slots)
        return
    reader = source.read()
    while reader.document < num_held_out + num_slots:
        is_held_out = reader.document < num_held_out
        text = reader.read()
        if text is None:
            raise too_few_documents(source.setting, reader.document, num_held_out, num_slots)
        if text and is_held_out:
            yield text
