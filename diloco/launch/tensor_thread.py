"""The one thread of a syncer or a peer that touches the tensors and files of its rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


class TensorThread:
    """Does its work piece by piece, in order; `with` ends it after its last work."""

    def __init__(self) -> None:
        """Start it with its first work."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tensors")

    def __enter__(self) -> TensorThread:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it after its last work."""
        self._executor.shutdown(wait=True)

    async def run(self, work: Callable[[], _T]) -> _T:
        """Return what `work()` returns, or raise what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
