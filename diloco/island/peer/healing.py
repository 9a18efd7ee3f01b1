"""A fragment's committed version, taken from the peer of another island that has it.

Source: PROTOCOL.md, "Peers in doubt".
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from diloco.compression.lanes import lane_codec
from diloco.island.peer.calls import PeerCalls
from diloco.island.peer.replica import SECTIONS, Replica, state_digest
from diloco.protos import allreduce_pb2 as wire
from diloco.syncer.worker import Worker
from diloco.transport.contracts import Buffer
from diloco.versions.record import STATE_SECTIONS

logger = logging.getLogger(__name__)


class PeerHealing:
    """Takes versions of one fragment from other peers."""

    def __init__(self, replica: Replica, calls: PeerCalls, worker: Worker) -> None:
        """Assign only."""
        self._replica = replica
        self._calls = calls
        self._worker = worker

    async def is_taken_from(self, island: str, committed: wire.RecordReply) -> bool:
        """Try to take the committed version from the peer of an island; durable when it is."""
        header = json.loads(committed.record_json or "{}")
        if not header:
            return False
        sections: dict[str, Buffer] = {}
        for name, lane_id, num_bytes in self._wanted(header):
            payload, refusal = await self._calls.pull_once(
                island,
                "allreduce.state",
                wire.StateHeader(
                    fragment_id=self._replica.fragment.fragment_id,
                    lane_id=lane_id,
                    state_digest=committed.state_digest,
                    section=name,
                ),
                num_bytes=num_bytes,
            )
            if refusal:
                logger.debug("not healed, island=%s: %s", island, refusal)
                return False
            sections[f"{name}/{lane_id}"] = payload
        record = self._replica.healed(header, sections)
        if await self._worker.run(lambda: state_digest(record)) != committed.state_digest:
            logger.warning("state of another digest than was committed, island=%s", island)
            return False
        await self._replica.take(record, self._worker)
        p = self._replica.fragment.fragment_id
        logger.info("healed, fragment=%d from=%s", p, island)
        return True

    def _wanted(self, header: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
        """Name what a version is made of: section, lane id, bytes."""
        fragment = self._replica.fragment
        for lane in fragment.lanes:
            codec = lane_codec(header["payload_codec"], fragment, lane.lane_id)
            for name in SECTIONS if header["version"] else STATE_SECTIONS:
                is_payload = name == "payload"
                num_bytes = codec.wire_bytes(lane.numel) if is_payload else 4 * lane.numel
                yield name, lane.lane_id, num_bytes
