"""Takes an inner optimizer from another island at a start without any, and sends it to others.

Every rank fetches the lanes that it carries, whatever the layout of the source's ranks. All of it
is taken or nothing: if the source dies, or sends what its manifest does not say, the optimizer
stays new. The island waits for `islands.NAME.heal_wait`, and not longer.

Source: PROTOCOL.md, "State transfer".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import blake3
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from diloco.checkpoint.checkpoint_writer import check_all_ranks
from diloco.checkpoint.checkpoints import Checkpoint
from diloco.errors import PayloadRefused
from diloco.io_thread import IoThread
from diloco.island.connection import Connection
from diloco.island.exchange.state_transfer import (
    LaneKey,
    NotTransferred,
    SyncerRoutes,
    TransferReports,
    fetch_lanes,
    find_manifest,
    give,
    lanes_of,
)
from diloco.island.groups import Groups, make_groups
from diloco.island.lanes.parameters import canonical_parameters
from diloco.island.lanes.shards import LaneShards
from diloco.outer.fragments import Plan
from diloco.protocol.rounds.transfer_manifest import (
    LaneDigest,
    TransferManifest,
    lane_name,
    read_manifest,
)
from diloco.protos.control_pb2 import Grant
from diloco.refusals import Cause
from diloco.trainer.state import INNER_OPTIMIZER, MOMENTS, new_moments_, optimizer_name
from diloco.transport.contracts import Buffer

#: Seconds after which the ranks learn again whether the source still sends.
_LOOK_S = 0.5


class StateReceiver:
    """One rank's part; every rank of the island makes the same calls.

    Args:
        io: Where the network runs.
        routes: To the syncers.
        grant: Of this start.
        plan: Of the run.
        reports: Of the leader; not asked of other ranks.
        groups: The island's ranks, which may wait for `at_most_s`.
        at_most_s: Seconds for which the training waits for all of it.
        carrier_hosts: Hosts whose ranks fetch it; 0: all.
    """

    def __init__(
        self,
        io: IoThread,
        routes: SyncerRoutes,
        grant: Grant,
        plan: Plan,
        reports: TransferReports,
        groups: Groups,
        *,
        at_most_s: float,
        carrier_hosts: int,
    ) -> None:
        """Assign only."""
        self._carrier_hosts = carrier_hosts
        self._io = io
        self._routes = routes
        self._grant = grant
        self._plan = plan
        self._reports = reports
        self._groups = groups
        self._at_most_s = at_most_s
        self._is_given = True

    def take_(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> TransferManifest:
        """Give a new optimizer the moments of a source; collective.

        Returns:
            Of what was taken.

        Raises:
            NotTransferred: On all ranks, if there is none to be had; the optimizer is as it was.
            DilocoError: If the island cannot go on.
        """
        until, problem, tried = time.monotonic() + self._at_most_s, "", ("", 0)
        self._request(is_requested=True)
        try:
            while True:
                manifest, left_s = self._find(problem, tried, until)
                tried = manifest.source, manifest.checkpoint
                try:
                    return self._take_(manifest, left_s, model, optimizer)
                except NotTransferred as error:  # another source may have been named meanwhile
                    problem = str(error)
        finally:
            self._request(is_requested=False)

    def _request(self, *, is_requested: bool) -> None:
        if self._groups.is_leader:
            self._io.post(lambda: self._reports.request(is_requested=is_requested))

    def _find(
        self, problem: str, tried: tuple[str, int], until: float
    ) -> tuple[TransferManifest, float]:
        """Let the leader find a transfer that is not the one that there is a problem with."""

        def find() -> dict[str, Any]:
            left_s = until - time.monotonic()
            if problem and (left_s <= 0 or self._is_named(*tried)):
                return {"problem": problem}
            try:
                manifest = self._io.run(
                    find_manifest(self._routes, self._plan, self._grant, self._reports, left_s)
                )
            except NotTransferred as error:
                return {"problem": str(error)}
            return {"manifest": manifest.to_json(), "left_s": until - time.monotonic()}

        said = self._groups.leader_says("could not take an inner optimizer", find)
        if "problem" in said:
            raise NotTransferred(said["problem"])
        return read_manifest(said["manifest"], self._plan), said["left_s"]

    def _take_(
        self,
        manifest: TransferManifest,
        left_s: float,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> TransferManifest:
        fragments, group = self._plan.fragments, self._groups.shards
        hosts = self._carrier_hosts
        own = LaneShards(self._plan, canonical_parameters(model), group=group, carrier_hosts=hosts)
        lanes = {
            (f.fragment_id, lane_id): f.lanes[lane_id].numel
            for f in fragments
            for lane_id in own.lanes_of(f.fragment_id)
        }
        if (name := optimizer_name(optimizer)) != manifest.inner_optimizer:
            raise NotTransferred(
                f"{manifest.source} gives the state of inner.optimizer.name = "
                f"{manifest.inner_optimizer!r}, here it is {name!r}"
            )
        problem = ""
        found: dict[LaneKey, dict[str, Tensor]] = {}
        try:
            found = {
                lane: unpacked(payload, lanes[lane])
                for lane, payload in self._fetched(manifest, lanes, left_s).items()
            }
        except (NotTransferred, PayloadRefused) as error:
            problem = str(error)
        check_all_ranks(self._groups.start, problem, error=NotTransferred)
        tensors = new_moments_(model, optimizer, step=manifest.optimizer_step)
        for moment in MOMENTS:
            shards = LaneShards(self._plan, tensors[moment], group=group, carrier_hosts=hosts)
            for fragment in fragments:
                p = fragment.fragment_id
                values = {lane_id: found[p, lane_id][moment] for lane_id in shards.lanes_of(p)}
                shards.distribute(p, values, 0.0)
        return manifest

    def _fetched(
        self, manifest: TransferManifest, lanes: Collection[LaneKey], left_s: float
    ) -> dict[LaneKey, Buffer]:
        """Fetch the lanes of this rank; while any rank waits, all learn whether more will come.

        Raises:
            NotTransferred: On this rank alone, see `fetch_lanes`.
        """
        self._is_given = True
        fetching = self._io.begin(
            fetch_lanes(
                self._routes, manifest, lanes, at_most_s=left_s, is_given=lambda: self._is_given
            )
        )
        while not self._groups.all_say(bool(wait([fetching], _LOOK_S).done)):
            self._is_given = self._groups.leader_says(
                "could not take an inner optimizer",
                lambda: self._is_named(manifest.source, manifest.checkpoint),
            )
        return fetching.result()

    def _is_named(self, source: str, checkpoint: int) -> bool:
        """Whether this is still the transfer that the coordinator names; of the leader."""
        answer = self._reports.answer
        return (answer.source, answer.checkpoint) == (source, checkpoint)


class StateSource:
    """Sends the inner optimizer of a checkpoint of this island; on the leader of one start.

    Read from the checkpoint's files: training holds nothing for it, and goes on.

    Args:
        directory: Of this site's checkpoints.
        grant: Of the start.
        plan: Of the run.
        routes: To the syncers.
    """

    def __init__(self, directory: Path, grant: Grant, plan: Plan, routes: SyncerRoutes) -> None:
        """Assign only."""
        self._directory = directory
        self._grant = grant
        self._plan = plan
        self._routes = routes

    async def give(self, number: int) -> None:
        """Put the inner optimizer of a checkpoint, an inner step or a cut, at the syncers.

        Raises:
            NotTransferred: If the checkpoint is of another plan, or a syncer refuses it.
            ConfigError: If the checkpoint is not there, or damaged.
            DilocoError: If a syncer cannot be reached.
        """
        checkpoint = await asyncio.to_thread(
            Checkpoint.open, self._directory, self._grant.island, number
        )
        if checkpoint.plan != self._plan:
            raise NotTransferred(f"the checkpoint of {number} is of another plan than the run")

        def lane_bytes(lane: LaneKey) -> bytes:
            moments = {moment: checkpoint.lane(moment, *lane) for moment in MOMENTS}
            return safetensors.torch.save(moments)

        manifest = await asyncio.to_thread(
            lambda: TransferManifest(
                run=self._grant.run,
                timeline=self._grant.timeline,
                source=self._grant.island,
                checkpoint=number,
                inner_step=checkpoint.inner_step,
                inner_optimizer=str(checkpoint.manifest[INNER_OPTIMIZER]),
                optimizer_step=int(checkpoint.manifest["optimizer_step"]),
                versions=tuple(checkpoint.manifest["versions"]),
                plan=self._plan.fingerprint(),
                lanes={lane_name(*n): _lane_digest(lane_bytes(n)) for n in lanes_of(self._plan)},
            )
        )
        await give(self._routes, self._plan, manifest, lane_bytes)


def unpacked(payload: Buffer, numel: int) -> dict[str, Tensor]:
    """Read the moments of one lane, which a peer wrote.

    Args:
        payload: Safetensors.
        numel: Of the lane.

    Returns:
        Moment -> [numel], float32, CPU.

    Raises:
        PayloadRefused: If it is anything else, or no moments of AdamW.
    """
    try:
        found = safetensors.torch.load(bytes(payload))
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise PayloadRefused(Cause.CONTENT, f"a lane is no safetensors: {error}") from error
    shapes = {name: (list(values.shape), values.dtype) for name, values in found.items()}
    if shapes != dict.fromkeys(MOMENTS, ([numel], torch.float32)):
        raise PayloadRefused(Cause.CONTENT, f"a lane of moments {shapes}, not of {numel} values")
    if not all(bool(torch.isfinite(values).all()) for values in found.values()):
        raise PayloadRefused(Cause.CONTENT, "a lane of moments has values that are not finite")
    if bool((found["exp_avg_sq"] < 0).any()):
        raise PayloadRefused(Cause.CONTENT, "a lane of second moments has negative values")
    return found


def open_state_transfer(connection: Connection, grant: Grant, plan: Plan) -> StateReceiver | None:
    """Give inner optimizers to other islands from now on; open what takes one, if this is to."""
    config = connection.config
    reports = TransferReports(
        StateSource(config.checkpoint_dir, grant, plan, connection.routes).give
    )
    connection.reports.transfer = reports
    if not config.island.heal_optimizer:
        return None
    wait_s = config.island.heal_wait.seconds
    groups = make_groups(
        None, patience_s=wait_s, collective_s=config.island.collective_timeout.seconds
    )
    return StateReceiver(
        connection.io,
        connection.routes,
        grant,
        plan,
        reports,
        groups,
        at_most_s=wait_s,
        carrier_hosts=config.island.carrier_hosts,
    )


def _lane_digest(data: bytes) -> LaneDigest:
    return LaneDigest(len(data), blake3.blake3(data).hexdigest())
