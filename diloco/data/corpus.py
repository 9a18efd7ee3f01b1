"""The built-in corpus, and which of its bytes an island sees at which inner step.

It is the Python standard library's sources, found offline, bytes as tokens. A batch is a pure
function of (seed, slot, slot step, batch size), so the cursor needs nothing but the steps. The slot
step is the inner step of an island that has one slot and always had it.
Nothing is cached on disk.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diloco.data.batches import Evaluation, TextPosition, dp_slice, evaluation_starts
from diloco.data.shuffle import counter_hash
from diloco.data.tokenizer import ByteTokenizer
from diloco.errors import ConfigError
from diloco.protocol.run.slots import SlotPosition, furthest_behind

Bytes: TypeAlias = npt.NDArray[np.uint8]

#: Token ids of a byte corpus are 0 to 255.
BYTE_VOCAB_SIZE = 256
#: Name under which its draws are counted, as of a source of streams.
_SOURCE = "stdlib"
#: Least share of the corpus, in whole documents from its end, that training never sees.
HELD_OUT_FRACTION = 0.03

#: Directories that hold tests, what the user installed, or no sources.
_EXCLUDED_DIRECTORIES = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
#: Files that the distributor or the machine writes: two sites with the same Python differ in them.
_EXCLUDED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


@dataclass(frozen=True, slots=True)
class TextCorpus:
    """Documents, split into what is trained on and what is held out.

    Attributes:
        train: Concatenated bytes of the training documents, shape [n], uint8.
        held_out: Concatenated bytes of the last documents, at least 3 % of all, shape [m], uint8.
        num_documents: Documents in both.
        sha256: Hex digest over every document's length and bytes, in order; islands whose digests
            differ train on different text.
    """

    train: Bytes
    held_out: Bytes
    num_documents: int
    sha256: str

    @classmethod
    def from_documents(cls, documents: Iterable[bytes]) -> TextCorpus:
        """Split documents, in the order given; empty ones do not count.

        Raises:
            ConfigError: If fewer than two documents have bytes: one to train on, one to hold out.
        """
        texts = [text for text in documents if text]
        if len(texts) < 2:
            raise ConfigError(
                f"the corpus has {len(texts)} documents that are not empty; at least 2 are needed, "
                "one to train on and one to hold out for evaluation"
            )
        digest = hashlib.sha256()
        for text in texts:
            digest.update(len(text).to_bytes(8, "little"))
            digest.update(text)
        first_held_out, held_out_bytes = len(texts), 0
        wanted = HELD_OUT_FRACTION * sum(map(len, texts))
        while held_out_bytes < wanted and first_held_out > 1:
            first_held_out -= 1
            held_out_bytes += len(texts[first_held_out])
        return cls(
            train=np.frombuffer(b"".join(texts[:first_held_out]), dtype=np.uint8),
            held_out=np.frombuffer(b"".join(texts[first_held_out:]), dtype=np.uint8),
            num_documents=len(texts),
            sha256=digest.hexdigest(),
        )

    @classmethod
    def from_stdlib(cls) -> TextCorpus:
        """Read the sources of this Python's standard library, without tests, sorted by path.

        The text changes with the Python version, patch releases included; so does the digest, and
        losses are comparable under one digest only.

        Raises:
            ConfigError: If this Python came without its sources.
        """
        root = Path(sysconfig.get_path("stdlib"))
        paths = sorted(_source_paths(root), key=lambda path: path.relative_to(root).as_posix())
        if not paths:
            raise ConfigError(
                f'data.source = "stdlib": no *.py files below {root}; '
                "install Python with the sources of its standard library"
            )
        return cls.from_documents(path.read_bytes() for path in paths)


def _source_paths(root: Path) -> Iterator[Path]:
    """Walk below `root` past what is excluded; site-packages alone can be a minute's walk."""
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _EXCLUDED_DIRECTORIES]
        for name in files:
            if name.endswith(".py") and not name.startswith(_EXCLUDED_PREFIXES):
                yield Path(directory, name)


class TextData:
    """Sequences of one corpus, for training by counter and for evaluation at fixed places."""

    #: Token ids are below this.
    vocab_size = BYTE_VOCAB_SIZE

    def __init__(self, corpus: TextCorpus, *, sequence_length: int, seed: int) -> None:
        """Keep the corpus and the key of the sampling.

        Args:
            corpus: Text; not copied.
            sequence_length: Predicted tokens of a sequence; it has one more, the first input.
            seed: Seed of the run, at least 0.

        Raises:
            ConfigError: If the corpus is shorter than one sequence in either part.
        """
        for part, text in (("training", corpus.train), ("held-out", corpus.held_out)):
            if len(text) <= sequence_length:
                raise ConfigError(
                    f"data.sequence_length = {sequence_length} needs {sequence_length + 1} bytes, "
                    f"the {part} text has {len(text)}; use more text or shorter sequences"
                )
        self.corpus = corpus
        self.sequence_length = sequence_length
        self.digest = corpus.sha256
        self.tokenizer_digest = ByteTokenizer.digest
        self.num_documents = corpus.num_documents
        self._seed = seed

    def content(self) -> dict[str, Any]:
        """Say what the text is: its digest."""
        return {"digest": self.digest}

    def check_content(self, there: Mapping[str, Any]) -> None:
        """Refuse to go on where a run was trained on other text.

        Raises:
            ConfigError: If `there` is not what `content` gives here.
        """
        if "digest" not in there:
            raise ConfigError(
                'the run was trained on streams, not on data.source = "stdlib"; use its [data] '
                "section, or start from its weights alone: diloco export"
            )
        if there["digest"] != self.digest:
            raise ConfigError(
                f"the run was trained on text with digest {there['digest']}, data.source = "
                f'"stdlib" gives {self.digest} here (Python {platform.python_version()}); go on '
                "with the release of Python that it began with, or start a new run from the "
                "weights: diloco export"
            )

    def batch(
        self,
        slot: int,
        slot_step: int,
        batch_size: int,
        *,
        dp_coordinate: int = 0,
        dp_size: int = 1,
    ) -> Tensor:
        """Draw the sequences of one step of a slot, or one coordinate's slice of them.

        Sample i of the batch starts at hash(seed, slot, slot step, i) modulo the number of places.
        So slots share no sample, whatever the batch sizes; a larger batch begins with the smaller
        one; and several slots' batches in order are the data-parallel batch.

        Args:
            slot: Index of the slot, from 0.
            slot_step: Batches drawn from the slot before, from 0.
            batch_size: Sequences of the whole island, a multiple of `dp_size`.
            dp_coordinate: Which contiguous slice of the batch to return.
            dp_size: Number of slices; ranks of one coordinate (tensor parallelism) share it.

        Returns:
            Token ids of shape [batch_size / dp_size, sequence_length + 1], int64, CPU.

        Raises:
            ConfigError: If `dp_size` does not divide `batch_size`.
        """
        rows = dp_slice(batch_size, dp_coordinate, dp_size)
        samples = np.arange(rows.start, rows.stop, dtype=np.uint64)
        places = len(self.corpus.train) - self.sequence_length
        starts = counter_hash(self._seed, slot, slot_step, samples) % np.uint64(places)
        return self._sequences(self.corpus.train, starts.astype(np.int64))

    def batches(
        self,
        *,
        slots: Collection[int],
        num_slots: int,
        batch_size: int,
        dp_coordinate: int,
        dp_size: int,
    ) -> TextBatches:
        """Give one island's batches; `num_slots` does not matter, a slot draws its samples."""
        dp_slice(batch_size, dp_coordinate, dp_size)
        return TextBatches(
            self, slots, batch_size=batch_size, dp_coordinate=dp_coordinate, dp_size=dp_size
        )

    def evaluation(self, num_sequences: int) -> Evaluation:
        """Give fixed, evenly spaced sequences of the held-out text.

        Raises:
            ConfigError: If the held-out text has fewer sequences that do not overlap.
        """
        length = self.sequence_length
        starts = evaluation_starts(len(self.corpus.held_out), length, num_sequences)
        tokens = self._sequences(self.corpus.held_out, starts)
        return Evaluation(tokens, num_bytes=num_sequences * length)

    def _sequences(self, text: Bytes, starts: npt.NDArray[np.int64]) -> Tensor:
        window = np.arange(self.sequence_length + 1, dtype=np.int64)
        return torch.from_numpy(text[starts[:, None] + window].astype(np.int64))


class TextBatches:
    """One island's batches of a corpus: each is of the slot that is furthest behind."""

    def __init__(
        self,
        data: TextData,
        slots: Collection[int],
        *,
        batch_size: int,
        dp_coordinate: int,
        dp_size: int,
    ) -> None:
        """Stand at the start of each slot; other arguments are those of `TextData.batch`."""
        self._data = data
        self._steps = dict.fromkeys(sorted(slots), 0)
        self._batch_size = batch_size
        self._dp_coordinate = dp_coordinate
        self._dp_size = dp_size
        self._position = TextPosition()

    def batch(self, inner_step: int) -> Tensor:
        """Draw the batch of the inner step that follows `inner_step` completed ones."""
        if inner_step != self._position.inner_step:
            self.seek(inner_step)
        slot = furthest_behind(self._steps)
        drawn = self._data.batch(
            slot,
            self._steps[slot],
            self._batch_size,
            dp_coordinate=self._dp_coordinate,
            dp_size=self._dp_size,
        )
        self._steps[slot] += 1
        self._position = self._position.after(inner_step + 1, self._batch_size)
        return drawn

    def positions(self) -> dict[int, SlotPosition]:
        """Give the position of each slot, in slot steps."""
        return {slot: SlotPosition({_SOURCE: steps}) for slot, steps in self._steps.items()}

    def hold(self, claims: Mapping[int, SlotPosition], *, inner_step: int) -> Mapping[int, str]:
        """Draw from these slots alone, each from its position on: any number leads to one."""
        self._steps = {slot: claims[slot].num_drawn for slot in sorted(claims)}
        self._position = TextPosition(inner_step, self._position.samples)
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Give the cursor and the text's digest."""
        slots = {str(slot): steps for slot, steps in self._steps.items()}
        return {**asdict(self._position), **self._data.content(), "slots": slots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a cursor; one of other slots, as of a warm start, gives its inner step only.

        Raises:
            ConfigError: If it was written for other text.
        """
        self._data.check_content(state)
        there = {int(slot): steps for slot, steps in state.get("slots", {}).items()}
        if there.keys() == self._steps.keys():
            self._steps = {slot: there[slot] for slot in self._steps}
        else:
            self.seek(state["inner_step"])
        self._position = TextPosition(state["inner_step"], state["samples"])

    def seek(self, inner_step: int) -> None:
        """Go to where `inner_step` completed steps lead."""
        if inner_step < self._position.inner_step:
            self._steps = dict.fromkeys(self._steps, 0)
            passed = inner_step
        else:
            passed = inner_step - self._position.inner_step
        if len(self._steps) == 1:  # at once, however far it is
            self._steps = {slot: steps + passed for slot, steps in self._steps.items()}
        else:
            for _ in range(passed):
                self._steps[furthest_behind(self._steps)] += 1
        self._position = self._position.after(inner_step, self._batch_size)
