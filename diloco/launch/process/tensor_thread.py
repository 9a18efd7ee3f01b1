"""The threads of a syncer that touch the tensors and files of its rounds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from diloco.syncer.worker import Workers

_T = TypeVar("_T")

#: That verify what arrives: more are no quicker than a link is.
_MOST_CHECKING = 4
#: That read older versions from the disk.
_NUM_READING = 2


class TensorThread:
    """Does its work piece by piece, in order; `with` ends it after its last work.

    Of more than one such thread each takes the next piece.
    """

    def __init__(self, name: str = "tensors", num_threads: int = 1) -> None:
        """Start each with its first work."""
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    def __enter__(self) -> TensorThread:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it after its last work."""
        self._executor.shutdown(wait=True)

    async def run(self, work: Callable[[], _T]) -> _T:
        """Return what `work()` returns, or raise what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


@contextlib.contextmanager
def syncer_workers(num_threads: int) -> Iterator[Workers]:
    """Give a syncer its threads, and end each after its last work; `num_threads` merge lanes."""
    with ThreadPoolExecutor(num_threads, "lanes") as lanes, contextlib.ExitStack() as opened:

        def thread(name: str, num: int = 1) -> TensorThread:
            return opened.enter_context(TensorThread(name, num))

        yield Workers(
            of_fragment=lambda: thread("fragment"),
            notes=thread("notes"),
            checks=thread("checks", min(num_threads, _MOST_CHECKING)),
            reads=thread("reads", _NUM_READING),
            pins=thread("pins"),
            transfers=thread("transfers"),
            lanes=lanes,
        )
