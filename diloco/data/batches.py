"""The interface of text to training: an island's batches, and held-out sequences for all.

Every rank of an island reads the same text and takes its data-parallel coordinate's slice of each
batch, so the text does not depend on how the island is laid out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from diloco.errors import ConfigError
from diloco.protocol.run.slots import SlotPosition


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Fixed sequences that no island trains on.

    Attributes:
        tokens: Token ids of shape [n, sequence_length + 1], int64, CPU.
        num_bytes: UTF-8 bytes of text that the predicted tokens stand for: the divisor of nats a
            byte.
    """

    tokens: Tensor
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TextPosition:
    """The position up to which an island's batches have been drawn.

    Attributes:
        inner_step: Completed inner steps.
        samples: Sequences consumed, of the whole island: not a multiple of today's batch when the
            island had another one before.
    """

    inner_step: int = 0
    samples: int = 0

    def after(self, inner_step: int, batch_size: int) -> TextPosition:
        """Give the position after `inner_step` steps; an earlier one is counted from the start."""
        if inner_step < self.inner_step:
            return TextPosition(inner_step, inner_step * batch_size)
        passed = (inner_step - self.inner_step) * batch_size
        return TextPosition(inner_step, self.samples + passed)


class Batches(Protocol):
    """One island's batches, of which this rank takes its slice."""

    def batch(self, inner_step: int) -> Tensor:
        """Give the batch of the inner step that follows `inner_step` completed ones.

        Steps only rise from call to call; those left out are passed over.

        Returns:
            Token ids of shape [batch_size / dp_size, sequence_length + 1], int64, CPU.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Give the cursor: JSON values, the same on every rank of the island."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a cursor; what follows is bit for bit what followed it.

        Raises:
            ConfigError: If the text or how it is cut has changed since.
        """
        ...

    def seek(self, inner_step: int) -> None:
        """Go to where `inner_step` completed steps of this batch size lead, forward or back."""
        ...

    def positions(self) -> dict[int, SlotPosition]:
        """Give how far each slot that the island holds has been drawn."""
        ...

    def hold(self, claims: Mapping[int, SlotPosition], *, inner_step: int) -> Mapping[int, str]:
        """Draw from these slots alone, each from its position on; a slot may stay where it is.

        Args:
            claims: Slot -> position at which to go on; at least one.
            inner_step: Completed inner steps, so that the next batch passes nothing over.

        Returns:
            Slots that are drawn from their start, since the text does not lead to the position
            given, and what is wrong with it.

        Raises:
            ConfigError: If a position is of other text.
        """
        ...


class Data(Protocol):
    """The text of a run, as one rank has it.

    Attributes:
        digest: Hex digest; islands whose digests differ train on different text.
        tokenizer_digest: Names the tokenizer; equal for equal ones.
        num_documents: Documents, training and held-out; 0 when a stream was not counted.
        vocab_size: Token ids are below this.
        sequence_length: Predicted tokens of a sequence.
    """

    digest: str
    tokenizer_digest: str
    num_documents: int
    vocab_size: int
    sequence_length: int

    def content(self) -> dict[str, Any]:
        """Say what the text is: JSON values, for `check_content` of a later start."""
        ...

    def check_content(self, there: Mapping[str, Any]) -> None:
        """Refuse to go on where a run was trained on other text; names what has changed.

        Raises:
            ConfigError: If `there` is not what `content` gives here.
        """
        ...

    def evaluation(self, num_sequences: int) -> Evaluation:
        """Give evenly spaced sequences of the held-out text, the same on all islands.

        Raises:
            ConfigError: If the held-out text has fewer sequences that do not overlap.
        """
        ...

    def batches(
        self,
        *,
        slots: Collection[int],
        num_slots: int,
        batch_size: int,
        dp_coordinate: int,
        dp_size: int,
    ) -> Batches:
        """Give an island's batches, of which this rank takes one coordinate's slice.

        Args:
            slots: Those that the island draws from, each from its start; at least one.
            num_slots: Slots among which the text is divided (`diloco.protocol.run.slots`).
            batch_size: Sequences of the whole island, a multiple of `dp_size`.
            dp_coordinate: Which contiguous slice of a batch this rank takes.
            dp_size: Number of slices; ranks of one coordinate (tensor parallelism) share it.

        Raises:
            ConfigError: If `dp_size` does not divide `batch_size`.
        """
        ...


def dp_slice(batch_size: int, dp_coordinate: int, dp_size: int) -> slice:
    """Give the rows of a batch that one coordinate takes.

    Raises:
        ConfigError: If `dp_size` does not divide `batch_size`.
    """
    if batch_size % dp_size:
        raise ConfigError(
            f"a batch of {batch_size} sequences cannot be divided among {dp_size} coordinates; "
            "use a multiple as tokens_per_inner_step / sequence_length"
        )
    size = batch_size // dp_size
    return slice(dp_coordinate * size, (dp_coordinate + 1) * size)


def evaluation_starts(
    num_tokens: int, sequence_length: int, num_sequences: int, remedy: str = ""
) -> npt.NDArray[np.int64]:
    """Space sequences evenly over `num_tokens` held-out tokens: from the first to the last.

    Args:
        num_tokens: Held-out tokens.
        sequence_length: Predicted tokens of a sequence; it has one more.
        num_sequences: Sequences asked for.
        remedy: What else the user can do, appended to the refusal.

    Returns:
        First token of each sequence, shape [num_sequences], int64.

    Raises:
        ConfigError: If fewer sequences fit without overlap.
    """
    available = max(0, (num_tokens - 1) // sequence_length)
    if not 1 <= num_sequences <= available:
        use = f"use 1 to {available}" if available else "none can be used"
        raise ConfigError(
            f"evaluation.num_sequences = {num_sequences}: the held-out text has {available} "
            f"sequences of {sequence_length} tokens; {use}{remedy}"
        )
    last = num_tokens - sequence_length - 1
    return np.arange(num_sequences, dtype=np.int64) * last // max(1, num_sequences - 1)
