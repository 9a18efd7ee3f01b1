"""A transport to a peer that may be somewhere else the next time: who knows where is asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from diloco.transport.contracts import Buffer, Reply, Transport
from diloco.transport.errors import ConnectError, PeerReset, TransportClosed, TransportError
from diloco.transport.transfer import Transfer

#: Seconds between two questions where the peer is: at first, and at most.
_AGAIN_S, _MOST_S = 1.0, 10.0


class FollowingTransport:
    """Calls one peer; once a call breaks it asks where the peer is, and calls there from then on.

    The call that broke fails all the same: its repetition reaches the peer.
    """

    def __init__(
        self,
        address: str,
        open_at: Callable[[str], Transport],
        find: Callable[[], Awaitable[str]],
    ) -> None:
        """Open the transport to where the peer is now.

        Args:
            address: As `open_at` takes it; empty: it is not known yet.
            open_at: Makes a transport.
            find: Says where the peer is; empty: nobody knows. What it raises is no answer.
        """
        self._address = address
        self._open_at = open_at
        self._find = find
        self._inner = open_at(address) if address else None
        self._looking: asyncio.Task[None] | None = None
        self._looked_at, self._again_s = float("-inf"), _AGAIN_S
        self._is_closed = False

    @property
    def peer(self) -> str:
        """Address of the peer."""
        return self._inner.peer if self._inner is not None else "nowhere yet"

    async def call(
        self,
        method: str,
        header: bytes,
        payload: Buffer = b"",
        *,
        deadline_s: float,
        max_reply_bytes: int = 0,
        transfer: Transfer | None = None,
    ) -> Reply:
        """Call `method`; see `contracts.Transport`."""
        inner = self._inner
        if inner is None:
            self._look()
            raise ConnectError("nobody knows where it is", peer=self.peer, method=method)
        try:
            reply = await inner.call(
                method,
                header,
                payload,
                deadline_s=deadline_s,
                max_reply_bytes=max_reply_bytes,
                transfer=transfer,
            )
        except TransportClosed as error:
            if self._is_closed:
                raise
            moved = f"{error}: the peer has moved to {self.peer}"
            raise PeerReset(moved, peer=self.peer, method=method) from error
        except TransportError as error:
            if error.is_retryable and inner is self._inner:
                self._look()
            raise
        self._again_s = _AGAIN_S
        return reply

    def _look(self) -> None:
        """Ask where the peer is, unless that is being done, or was a moment ago."""
        loop = asyncio.get_running_loop()
        if self._looking is None and loop.time() >= self._looked_at + self._again_s:
            self._looking = loop.create_task(self._follow())

    async def _follow(self) -> None:
        try:
            address = await self._find()
        except Exception:  # of as many types as can be asked: then nobody knows
            address = ""
        finally:
            self._looking = None
            self._looked_at = asyncio.get_running_loop().time()
            self._again_s = min(2 * self._again_s, _MOST_S)
        if address and address != self._address and not self._is_closed:
            left, self._address, self._inner = self._inner, address, self._open_at(address)
            if left is not None:
                await left.close()

    async def close(self) -> None:
        """Close the transport; calls in flight raise `TransportClosed`."""
        self._is_closed = True
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking
        if self._inner is not None:
            await self._inner.close()
