"""Keeps transfers between islands on the disk of a syncer while they are under way.

    transfers/SOURCE-CHECKPOINT/manifest.json
                               3-0.safetensors     lane 0 of fragment 3

The manifest comes first and says what may follow; a lane that is here already is not read once
more, so a source that starts again goes on where it was, as it does after this process did. There
are at most `MOST_TRANSFERS`, each of 8 bytes a parameter: a new one takes the place of one that
nobody has asked for lately, and what is not asked for expires. Rounds go first: where anything at
the syncer finds no room on the disk, all transfers are let go.

Source: PROTOCOL.md, "State transfer".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3

from diloco import durable
from diloco.durable import DiskFull
from diloco.errors import PayloadRefused
from diloco.loop_clock import loop_now
from diloco.outer.fragments import Plan
from diloco.protocol.rounds.transfer_manifest import (
    TransferManifest,
    lane_name,
    most_manifest_bytes,
    read_manifest,
)
from diloco.protos import fragment_pb2 as wire
from diloco.protos.control_pb2 import StateTransfer
from diloco.refusals import Cause
from diloco.syncer.payloads import check_size
from diloco.syncer.spool import Spool
from diloco.syncer.worker import Worker
from diloco.transport.contracts import Buffer, IncomingCall
from diloco.transport.errors import NotYet

logger = logging.getLogger(__name__)

#: Of all sources and checkpoints, at a time.
MOST_TRANSFERS = 2
#: Seconds after its last call for which a transfer is kept.
EXPIRES_S = 600.0
#: Seconds without a call after which another transfer may take its place.
IDLE_S = 30.0
_MANIFEST = "manifest.json"


@dataclass(slots=True)
class _Transfer:
    path: Path
    manifest: TransferManifest
    text: bytes
    touched: float


class TransferStore:
    """Those of one timeline, for the fragments of one syncer; on its event loop."""

    def __init__(
        self,
        directory: Path,
        plan: Plan,
        timeline: int,
        *,
        worker: Worker,
        spool: Spool,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """Assign only; `start` reads the disk.

        Args:
            directory: Of this syncer alone.
            plan: Of the run.
            timeline: Of the run; what is of another is removed.
            worker: Reads and writes; rounds do not wait for it.
            spool: Bounds what arrives at once.
            spawn: Runs a piece of work next to the handlers; its failure ends the process.
        """
        self._directory = directory
        self._plan = plan
        self._timeline = timeline
        self._worker = worker
        self._spool = spool
        self._spawn = spawn
        self._all: dict[Path, _Transfer] = {}
        #: Source, island that takes it, checkpoint.
        self._named: frozenset[tuple[str, str, int]] = frozenset()
        self._placing = asyncio.Lock()
        self._alarm: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Take up what an earlier start of this syncer has left; what is not whole is removed."""
        for path, (manifest, text) in (await self._worker.run(self._left)).items():
            self._all[path] = _Transfer(path, manifest, text, loop_now())
        self._set_alarm()

    def stop(self) -> None:
        """Let no more time pass."""
        if self._alarm is not None:
            self._alarm.cancel()

    def let_go(self) -> None:
        """Remove all of them soon: there is no room on the disk."""
        for transfer in list(self._all.values()):
            self._spawn(self._drop(transfer, "the disk is full"))

    def set_named(self, named: Iterable[StateTransfer]) -> None:
        """Set which transfers the coordinator has named."""
        self._named = frozenset((each.source, each.island, each.checkpoint) for each in named)

    # -- from the source ---------------------------------------------------------------------------

    async def put(self, header: wire.StatePutHeader, call: IncomingCall) -> None:
        """Take the manifest of a transfer, or a lane of it; repeated, it changes nothing.

        Raises:
            PayloadRefused: If it cannot be taken; says why.
            NotYet: If it has to wait until another transfer is not asked for any more, or has not
                been named; nothing of it was read.
        """
        given = header.grant.island, header.checkpoint
        if given not in {(source, checkpoint) for source, _, checkpoint in self._named}:
            raise NotYet(
                f"the coordinator has asked for no transfer of checkpoint {header.checkpoint} from "
                f"{header.grant.island}, or its next word here will be that: call again"
            )
        try:
            await (self._put_manifest if header.is_manifest else self._put_lane)(header, call)
        except DiskFull as error:
            self.let_go()
            raise PayloadRefused(Cause.FULL, f"the syncer's disk is full: {error}") from error

    async def _put_manifest(self, header: wire.StatePutHeader, call: IncomingCall) -> None:
        if call.payload_bytes > (most := most_manifest_bytes(self._plan)):
            raise PayloadRefused(
                Cause.SIZE, f"a manifest of {call.payload_bytes} bytes; {most} are allowed"
            )
        text = bytes(await call.read_payload())
        manifest = await self._worker.run(lambda: self._verified_manifest(header, text))
        path = self._path(header.grant.island, header.checkpoint)
        async with self._placing:  # or two took the place of one
            before = self._all.get(path)
            if before is not None and before.text == text:
                self._touch(before)
                return
            if before is not None:  # of a start that came to another checkpoint of that number
                await self._drop(before, "replaced")
            await self._make_place()
            transfer = self._all[path] = _Transfer(path, manifest, text, loop_now())
            await self._worker.run(lambda: _write(path, _MANIFEST, text))
        self._touch(transfer)
        logger.info(
            "transfer of the inner optimizer, source=%s checkpoint=%d begins",
            manifest.source, manifest.checkpoint,
        )  # fmt: skip

    def _verified_manifest(self, header: wire.StatePutHeader, text: bytes) -> TransferManifest:
        _check_digest(text, header.digest)
        manifest, grant = read_manifest(text, self._plan), header.grant
        said = manifest.run, manifest.timeline, manifest.source, manifest.checkpoint
        if said != (grant.run, grant.timeline, grant.island, header.checkpoint):
            raise PayloadRefused(Cause.KEY, "the manifest is of another transfer than its header")
        return manifest

    async def _put_lane(self, header: wire.StatePutHeader, call: IncomingCall) -> None:
        transfer = self._all.get(self._path(header.grant.island, header.checkpoint))
        if transfer is None:
            raise PayloadRefused(Cause.KEY, "its manifest is not here: it goes first")
        self._touch(transfer)
        given = transfer.manifest.lanes.get(name := lane_name(header.fragment_id, header.lane_id))
        if given is None:
            raise PayloadRefused(Cause.LANE, f"there is no lane {name}")
        if header.digest.hex() != given.blake3:
            raise PayloadRefused(Cause.DIGEST, f"lane {name} has another digest in the manifest")
        check_size(call.payload_bytes, given.num_bytes)
        file = transfer.path / _lane_file(header.fragment_id, header.lane_id)
        if file.exists():
            return
        turn = file, header.grant.incarnation
        async with self._spool.arrival(turn, given.num_bytes, has_asked=call.has_asked):
            payload = await call.read_payload()

            def keep() -> None:
                _check_digest(payload, header.digest)
                if self._all.get(transfer.path) is not transfer:
                    raise PayloadRefused(Cause.KEY, "the transfer was let go meanwhile")
                _write(transfer.path, file.name, payload)

            await self._worker.run(keep)

    async def _make_place(self) -> None:
        if len(self._all) < MOST_TRANSFERS:
            return
        longest = min(self._all.values(), key=lambda transfer: transfer.touched)
        if loop_now() - longest.touched < IDLE_S:
            raise NotYet(f"{MOST_TRANSFERS} transfers are under way already: call again")
        await self._drop(longest, "another one takes its place")

    # -- to the island that has none ---------------------------------------------------------------

    async def get(self, header: wire.StateGetHeader) -> tuple[wire.FetchReply, Buffer]:
        """Return a manifest or a lane, and the reply that goes before it; unknown: not here yet.

        That is said, too, to an island for which the coordinator has named no such transfer.
        """
        transfer = None
        if (header.source, header.grant.island, header.checkpoint) in self._named:
            transfer = self._all.get(self._path(header.source, header.checkpoint))
        payload: Buffer | None = None
        digest = b""
        if transfer is not None:
            self._touch(transfer)
            if header.is_manifest:
                payload, digest = transfer.text, blake3.blake3(transfer.text).digest()
            elif given := transfer.manifest.lanes.get(
                lane_name(header.fragment_id, header.lane_id)
            ):
                file = transfer.path / _lane_file(header.fragment_id, header.lane_id)
                payload = await self._worker.run(lambda: _read(file, given.blake3))
                digest = bytes.fromhex(given.blake3)
        if payload is None:
            return wire.FetchReply(status=wire.FETCH_STATUS_UNKNOWN, message="not here yet"), b""
        return wire.FetchReply(status=wire.FETCH_STATUS_OK, digest=digest), payload

    # -- what expires ------------------------------------------------------------------------------

    def _touch(self, transfer: _Transfer) -> None:
        transfer.touched = loop_now()
        self._set_alarm()

    def _set_alarm(self) -> None:
        self.stop()
        if self._all:
            first = min(transfer.touched for transfer in self._all.values())
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_at(first + EXPIRES_S, self._expire)

    def _expire(self) -> None:
        self._spawn(self._drop_expired())

    async def _drop_expired(self) -> None:
        for transfer in list(self._all.values()):
            if loop_now() - transfer.touched >= EXPIRES_S:
                await self._drop(transfer, "nobody asks for it")
        self._set_alarm()

    async def _drop(self, transfer: _Transfer, why: str) -> None:
        if self._all.get(transfer.path) is not transfer:
            return  # by now the files are another's
        del self._all[transfer.path]
        logger.info("transfer removed, %s: %s", transfer.path.name, why)
        await self._worker.run(lambda: _remove(transfer.path))

    def _left(self) -> dict[Path, tuple[TransferManifest, bytes]]:
        """Read the manifests that are here; runs in the worker."""
        found: dict[Path, tuple[TransferManifest, bytes]] = {}
        for path in self._directory.glob("*"):
            with contextlib.suppress(OSError, PayloadRefused):
                text = (path / _MANIFEST).read_bytes()
                manifest = read_manifest(text, self._plan)
                if manifest.timeline == self._timeline:
                    found[path] = manifest, text
        for path in set(self._directory.glob("*")) - found.keys():
            durable.remove_tree(path)
        return found

    def _path(self, source: str, checkpoint: int) -> Path:
        # Not by its name: a caller's word is no part of a path.
        return self._directory / f"{blake3.blake3(source.encode()).hexdigest()[:16]}-{checkpoint}"


def _lane_file(fragment_id: int, lane_id: int) -> str:
    return f"{fragment_id}-{lane_id}.safetensors"


def _write(directory: Path, name: str, data: Buffer) -> None:
    with durable.raising_disk_full():
        durable.make_directory(directory)
    durable.write_durably(directory / name, [data])


def _remove(path: Path) -> None:
    if path.exists():  # else its manifest found no room
        durable.remove_tree(path)


def _read(file: Path, digest: str) -> Buffer | None:
    """Return a lane; None: it is not here, or not what was written, and then it is removed.

    It is the file itself, in no memory of this process, however many replies send it; what is
    removed meanwhile takes its room until the last of them is done with.
    """
    with contextlib.suppress(ValueError):  # an empty file is not mapped
        try:
            with file.open("rb") as opened:
                content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            return None
        if blake3.blake3(content).hexdigest() == digest:
            return memoryview(content)
    logger.warning("a lane of a transfer is damaged, and removed: %s", file)
    durable.unlink(file)
    return None


def _check_digest(payload: Buffer, digest: bytes) -> None:
    if blake3.blake3(payload).digest() != digest:
        raise PayloadRefused(Cause.DIGEST, "the payload does not match the digest in its header")
