"""Makes batches ahead of the inner step that wants them, in a thread of its own.

All else is as if nothing was ahead: a cursor is that of the batch that was taken last, and what
cannot be read is an error at the inner step that needs it. What goes elsewhere (`hold`, `seek`,
`load_state_dict`) first goes back to that cursor.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco.data.batches import Batches
from diloco.protocol.run.slots import SlotPosition

#: Batches that are ready or being made.
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class _Cursor:
    state: dict[str, Any]
    positions: dict[int, SlotPosition]


class PrefetchedBatches:
    """Another's batches, made ahead."""

    def __init__(self, batches: Batches, device: torch.device) -> None:
        """Keep the batches; nothing is drawn before the first is wanted.

        Args:
            batches: Used by nobody else from here on.
            device: To which they go; for CUDA they are put into pinned memory.
        """
        self._batches = batches
        self._is_pinned = device.type == "cuda"
        # In memory that is pinned by way of that device, and not of the first one.
        begin = functools.partial(torch.cuda.set_device, device) if self._is_pinned else None
        self._thread = ThreadPoolExecutor(1, "batches", begin)
        self._ahead: deque[tuple[int, Future[tuple[Tensor, _Cursor]]]] = deque()
        self._has_failed = False
        self._note()

    def batch(self, inner_step: int) -> Tensor:
        """Give the batch of the inner step that follows `inner_step` completed ones.

        Raises:
            ConfigError: If the text has ended or cannot be read.
        """
        if self._ahead and self._ahead[0][0] != inner_step:
            self._go_back()
        while len(self._ahead) <= _AHEAD:
            step = inner_step + len(self._ahead)
            self._ahead.append((step, self._thread.submit(self._draw, step)))
        tokens, self._taken = self._ahead[0][1].result()  # one that failed stays in front
        self._ahead.popleft()
        return tokens

    def state_dict(self) -> dict[str, Any]:
        """Give the cursor behind the batch that was taken last."""
        return self._taken.state

    def positions(self) -> dict[int, SlotPosition]:
        """Give how far each slot has been drawn by the batches that were taken."""
        return self._taken.positions

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a cursor.

        Raises:
            ConfigError: If the text or how it is cut has changed since.
        """
        self._go_back()
        self._batches.load_state_dict(state)
        self._note()

    def seek(self, inner_step: int) -> None:
        """Go to where `inner_step` completed steps of this batch size lead, forward or back."""
        self._go_back()
        self._batches.seek(inner_step)
        self._note()

    def hold(self, claims: Mapping[int, SlotPosition], *, inner_step: int) -> Mapping[int, str]:
        """Draw from these slots alone, each from its position on.

        Raises:
            ConfigError: If a position is of other text.
        """
        self._go_back()
        problems = self._batches.hold(claims, inner_step=inner_step)
        self._note()
        return problems

    def close(self) -> None:
        """End the thread once the batch that it makes is made; a second time: nothing."""
        self._thread.shutdown(cancel_futures=True)

    def _draw(self, inner_step: int) -> tuple[Tensor, _Cursor]:
        """Make a batch, in the thread; none behind one that failed."""
        if self._has_failed:
            raise CancelledError
        self._has_failed = True
        tokens = self._batches.batch(inner_step)
        if self._is_pinned:
            tokens = tokens.pin_memory()
        cursor = _Cursor(self._batches.state_dict(), self._batches.positions())
        self._has_failed = False
        return tokens, cursor

    def _go_back(self) -> None:
        """Have the batches where the one taken last has left them."""
        if not self._ahead:
            return
        for _, made in self._ahead:
            if not made.cancel():
                made.exception()  # waits for the one being made
        self._batches.load_state_dict(self._taken.state)
        self._ahead.clear()
        self._has_failed = False

    def _note(self) -> None:
        self._taken = _Cursor(self._batches.state_dict(), self._batches.positions())
