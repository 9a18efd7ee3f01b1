"""The objects of payloads in a run's object store: those of one start of a syncer.

    payloads/SYNCER/EPOCH/NAME    `transport.bucket.server` names them
    SYNCER/data/OPENING-NAME      contributions, for the files that they will be in (`replica`)

A start removes what earlier ones have left, and nothing else: one that was taken over and goes on
does not reach what its successor wrote.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Literal

from diloco.objects.replica import Replica
from diloco.objects.store import ObjectStore
from diloco.transport.bucket.server import VALID_S, ObjectCalls, PayloadLacking, joined
from diloco.transport.contracts import Buffer, Handlers
from diloco.transport.errors import ChecksumMismatch


@contextlib.contextmanager
def payloads_by(url: str, replica: Replica, epoch: int) -> Iterator[Callable[[Handlers], Handlers]]:
    """Give what serves payloads by the store at a URL while this lasts.

    Args:
        url: Of the run's object store.
        replica: Of the syncer's own.
        epoch: Of this start.
    """
    calls = ObjectCalls(PayloadShelf(ObjectStore(url), replica, epoch))
    try:
        yield calls.around
    finally:
        calls.close()


#: Of the calls whose payloads become part of what is durable.
KEPT_METHOD = "fragment.submit"
_COPIES = 16


class PayloadShelf:
    """A `transport.bucket.server.Shelf`; any thread may use it."""

    def __init__(self, store: ObjectStore, replica: Replica, epoch: int) -> None:
        """Assign only."""
        self._store, self._replica = store, replica
        self._all = f"payloads/{replica.name}"
        self._own = f"{self._all}/{epoch:016d}"

    def put_urls(self, names: Sequence[str]) -> list[str]:
        """Sign addresses at which objects can be written."""
        return self._signed("PUT", names)

    def get_url(self, name: str) -> str:
        """Sign an address at which an object can be read."""
        (url,) = self._signed("GET", [name])
        return url

    def _signed(self, method: Literal["GET", "PUT"], names: Sequence[str]) -> list[str]:
        own = [f"{self._own}/{name}" for name in names]
        return self._store.sign(own, method, timedelta(seconds=VALID_S))

    def write(self, name: str, payload: Buffer) -> None:
        """Write an object."""
        self._store.put(f"{self._own}/{name}", payload)

    def take(self, method: str, objects: Mapping[str, int], digest: bytes) -> Buffer:
        """Read the payload of a call.

        A contribution is first copied, by the store, to where nobody else writes: of the copy the
        files of its version are made, and nothing of it travels once more.
        """
        written = {f"{self._own}/{name}": size for name, size in objects.items()}
        num_bytes = sum(objects.values())
        if method != KEPT_METHOD:
            return joined(self._read(written), num_bytes, digest)
        data = f"{self._replica.name}/data"
        known = self._replica.objects_of(digest.hex())  # where it is asked for again
        if known and sum(part.num_bytes for part in known) == num_bytes:
            there = {f"{data}/{part.object_name}": part.num_bytes for part in known}
            with contextlib.suppress(ChecksumMismatch, PayloadLacking):  # it goes just now
                return joined(self._read(there), num_bytes, digest)
        of = f"{self._replica.opening:016d}-{digest.hex()}-{secrets.token_hex(8)}"
        copies = {f"{of}-{n}": size for n, size in enumerate(written.values())}
        there = {f"{data}/{copy}": size for copy, size in copies.items()}
        try:
            with ThreadPoolExecutor(_COPIES, "copies") as pool:
                list(pool.map(self._copy, written, written.values(), there))
            payload = joined(self._read(there), num_bytes, digest)
        except BaseException:
            self._store.delete(there)
            raise
        self._replica.reuse(digest.hex(), copies)
        return payload

    def _copy(self, name: str, num_bytes: int, copy: str) -> None:
        """Have the store copy an object of so many bytes; its caller may have written more."""
        there = self._store.size(name)
        if there != num_bytes or not self._store.copy(name, copy):
            raise PayloadLacking(f"{name} has {there} bytes in place of {num_bytes}")

    def _read(self, objects: Mapping[str, int]) -> Iterator[bytes]:
        whole = ((name, 0, size) for name, size in objects.items())
        return self._store.read(whole, are_whole=True)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects."""
        self._store.delete(f"{self._own}/{name}" for name in names)

    def size(self, name: str) -> int | None:
        """Look how many bytes an object has; None: it is not there."""
        return self._store.size(f"{self._own}/{name}")

    def clear(self) -> None:
        """Remove what earlier starts have left.

        Raises:
            StoreAway: If the store does not answer.
        """
        self._store.delete(name for name in self._store.names(self._all) if name < self._own)
