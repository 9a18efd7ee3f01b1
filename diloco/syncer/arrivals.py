"""Reads and verifies the lanes that arrive for one fragment; keeps those of version 0.

Source: PROTOCOL.md, "Digests" and "Identity of a contribution".
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from diloco.compression.lanes import lane_codec
from diloco.errors import PayloadRefused
from diloco.outer.fragments import Fragment
from diloco.refusals import Cause
from diloco.syncer.payloads import check_size, verify_payload
from diloco.syncer.spool import Spool
from diloco.syncer.worker import Worker
from diloco.transport.contracts import Buffer, IncomingCall

_T = TypeVar("_T")


class LaneReader:
    """Reads lanes of a fragment."""

    def __init__(self, fragment: Fragment, spool: Spool, worker: Worker) -> None:
        """Assign only; `spool` says whose turn it is, `worker` verifies."""
        self._fragment, self._spool, self._worker = fragment, spool, worker

    async def read(
        self,
        name: Hashable,
        codec_name: str,
        lane_id: int,
        digest: bytes,
        call: IncomingCall,
        keep: Callable[[Buffer], _T],
        on_arrived: Callable[[], None] = lambda: None,
    ) -> _T:
        """Receive a lane, when it is its turn; its `name` is for the spool.

        `on_arrived` is called when all of it is here, and before it is verified.

        Returns:
            What `keep`, in the worker, makes of it once it is verified.

        Raises:
            PayloadRefused: If it cannot be counted; says why.
        """
        numel = self._fragment.lanes[lane_id].numel
        codec = lane_codec(codec_name, self._fragment, lane_id)
        wire_bytes = codec.wire_bytes(numel)
        check_size(call.payload_bytes, wire_bytes)
        async with self._spool.arrival(name, wire_bytes, has_asked=call.has_asked):
            payload = await call.read_payload()
            on_arrived()

            def check() -> _T:
                verify_payload(payload, digest, codec, numel)
                return keep(payload)

            return await self._worker.run(check)


class InitialLanes:
    """The initial parameters of a fragment, as one start of one island sends them lane by lane."""

    def __init__(self, fragment: Fragment) -> None:
        """Begin without any."""
        self._fragment = fragment
        self._sender = "", 0
        self.lanes: dict[int, Buffer] = {}

    @property
    def bytes_of_lanes(self) -> list[int]:
        """Bytes of each lane, in float32."""
        return [4 * lane.numel for lane in self._fragment.lanes]

    @property
    def is_whole(self) -> bool:
        """Whether every lane is here."""
        return len(self.lanes) == len(self._fragment.lanes)

    def check(self, lane_id: int) -> None:
        """Check that there is such a lane.

        Raises:
            PayloadRefused: If there is not.
        """
        if lane_id >= (num_lanes := len(self._fragment.lanes)):
            raise PayloadRefused(
                Cause.LANE, f"there is no lane {lane_id}, the fragment has {num_lanes}"
            )

    def take(self, sender: tuple[str, int], lane_id: int, payload: Buffer) -> None:
        """Keep a lane; those of another island or start count no more."""
        if sender != self._sender:
            self._sender, self.lanes = sender, {}
        self.lanes[lane_id] = payload
