"""The objects of payloads in a run's object store: those of one start of a syncer.

    payloads/SYNCER/EPOCH/NAME    `transport.bucket.server` names them

A start removes what earlier ones have left, and nothing else: one that was taken over and goes on
does not reach what its successor wrote.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Literal

from diloco.objects.store import ObjectStore
from diloco.transport.bucket.server import VALID_S, ObjectCalls
from diloco.transport.contracts import Buffer, Handlers


@contextlib.contextmanager
def payloads_by(url: str, syncer: str, epoch: int) -> Iterator[Callable[[Handlers], Handlers]]:
    """Give what serves payloads by the store at a URL while this lasts.

    Args:
        url: Of the run's object store.
        syncer: Name of the syncer.
        epoch: Of this start.
    """
    calls = ObjectCalls(PayloadShelf(ObjectStore(url), syncer, epoch))
    try:
        yield calls.around
    finally:
        calls.close()


class PayloadShelf:
    """A `transport.bucket.server.Shelf`; any thread may use it."""

    def __init__(self, store: ObjectStore, syncer: str, epoch: int) -> None:
        """Assign only."""
        self._store = store
        self._all, self._own = f"payloads/{syncer}", f"payloads/{syncer}/{epoch:016d}"

    def put_url(self, name: str) -> str:
        """Sign an address at which an object can be written."""
        return self._signed("PUT", name)

    def get_url(self, name: str) -> str:
        """Sign an address at which an object can be read."""
        return self._signed("GET", name)

    def _signed(self, method: Literal["GET", "PUT"], name: str) -> str:
        return self._store.sign(f"{self._own}/{name}", method, timedelta(seconds=VALID_S))

    def write(self, name: str, payload: Buffer) -> None:
        """Write an object."""
        self._store.put(f"{self._own}/{name}", payload)

    def read(self, name: str, num_bytes: int) -> Iterator[bytes]:
        """Read an object, piece by piece; nothing of one that has not so many bytes."""
        return self._store.pieces(f"{self._own}/{name}", num_bytes)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects."""
        self._store.delete(f"{self._own}/{name}" for name in names)

    def clear(self) -> None:
        """Remove what earlier starts have left.

        Raises:
            StoreAway: If the store does not answer.
        """
        self._store.delete(name for name in self._store.names(self._all) if name < self._own)
