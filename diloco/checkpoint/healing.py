"""An inner optimizer taken from another island, by one that starts without any of its own.

Every rank fetches the lanes that it carries; how the ranks of the donor lay is no matter. Taken is
all of it or nothing: a donor that dies, or gives what is not what it says, leaves the optimizer as
new as it was. The island waits for it for `islands.NAME.heal_wait`, and not longer.

Source: PROTOCOL.md, "State transfer".
"""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import wait
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from diloco.checkpoint.checkpoint_writer import check_all_ranks
from diloco.checkpoint.donor import Donor
from diloco.errors import PayloadRefused
from diloco.io_thread import IoThread
from diloco.island.connection import Connection
from diloco.island.exchange.heal import HealTalk, Lane, NotHealed, Ways, fetch_lanes, find_manifest
from diloco.island.groups import Groups, make_groups
from diloco.island.lanes.shards import LaneShards, canonical_parameters
from diloco.outer.fragments import Plan
from diloco.protocol.rounds.donation import Manifest, read_manifest
from diloco.protos.control_pb2 import Grant
from diloco.refusals import Cause
from diloco.trainer.state import MOMENTS, new_moments_, optimizer_name
from diloco.transport.contracts import Buffer

#: Seconds after which the ranks hear again whether the donor is still at it.
_LOOK_S = 0.5


class Healing:
    """One rank's part; every rank of the island makes the same calls.

    Args:
        io: Where the network runs.
        ways: To the syncers.
        grant: Of this start.
        plan: Of the run.
        talk: Of the leader; not asked of other ranks.
        groups: The island's ranks, which may wait for `at_most_s`.
        at_most_s: Seconds for which the training waits for all of it.
    """

    def __init__(
        self,
        io: IoThread,
        ways: Ways,
        grant: Grant,
        plan: Plan,
        talk: HealTalk,
        groups: Groups,
        *,
        at_most_s: float,
    ) -> None:
        """Assign only."""
        self._io = io
        self._ways = ways
        self._grant = grant
        self._plan = plan
        self._talk = talk
        self._groups = groups
        self._at_most_s = at_most_s
        self._is_given = True

    def take_(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Manifest:
        """Give a new optimizer the moments of a donor; collective.

        Returns:
            Of what was taken.

        Raises:
            NotHealed: On all ranks, if there is none to be had; the optimizer is as it was.
            DilocoError: If the island cannot go on.
        """
        until, problem, tried = time.monotonic() + self._at_most_s, "", ("", 0)
        self._wish(is_wished=True)
        try:
            while True:
                manifest, left_s = self._find(problem, tried, until)
                tried = manifest.donor, manifest.checkpoint
                try:
                    return self._take_(manifest, left_s, model, optimizer)
                except NotHealed as error:  # another donor may have been named meanwhile
                    problem = str(error)
        finally:
            self._wish(is_wished=False)

    def _wish(self, *, is_wished: bool) -> None:
        if self._groups.is_leader:
            self._io.post(lambda: self._talk.wish(is_wished=is_wished))

    def _find(self, problem: str, tried: tuple[str, int], until: float) -> tuple[Manifest, float]:
        """Let the leader find a donation that is not the one that there is a problem with."""

        def find() -> dict[str, Any]:
            left_s = until - time.monotonic()
            if problem and (left_s <= 0 or self._is_named(*tried)):
                return {"problem": problem}
            try:
                manifest = self._io.run(
                    find_manifest(self._ways, self._plan, self._grant, self._talk, left_s)
                )
            except NotHealed as error:
                return {"problem": str(error)}
            return {"manifest": manifest.to_json(), "left_s": until - time.monotonic()}

        said = self._groups.leader_says("could not take an inner optimizer", find)
        if "problem" in said:
            raise NotHealed(said["problem"])
        return read_manifest(said["manifest"], self._plan), said["left_s"]

    def _take_(
        self,
        manifest: Manifest,
        left_s: float,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> Manifest:
        fragments, group = self._plan.fragments, self._groups.shards
        own = LaneShards(self._plan, canonical_parameters(model), group=group)
        lanes = {
            (f.fragment_id, lane_id): f.lanes[lane_id].numel
            for f in fragments
            for lane_id in own.lanes_of(f.fragment_id)
        }
        if (name := optimizer_name(optimizer)) != manifest.inner_optimizer:
            raise NotHealed(
                f"{manifest.donor} gives the state of inner.optimizer.name = "
                f"{manifest.inner_optimizer!r}, here it is {name!r}"
            )
        problem = ""
        found: dict[Lane, dict[str, Tensor]] = {}
        try:
            found = {
                lane: unpacked(payload, lanes[lane])
                for lane, payload in self._fetched(manifest, lanes, left_s).items()
            }
        except (NotHealed, PayloadRefused) as error:
            problem = str(error)
        check_all_ranks(self._groups.start, problem, error=NotHealed)
        tensors = new_moments_(model, optimizer, step=manifest.optimizer_step)
        for moment in MOMENTS:
            shards = LaneShards(self._plan, tensors[moment], group=group)
            for fragment in fragments:
                p = fragment.fragment_id
                values = {lane_id: found[p, lane_id][moment] for lane_id in shards.lanes_of(p)}
                shards.distribute(p, values, 0.0)
        return manifest

    def _fetched(
        self, manifest: Manifest, lanes: Collection[Lane], left_s: float
    ) -> dict[Lane, Buffer]:
        """Fetch the lanes of this rank; while any rank waits, all hear whether there will be more.

        Raises:
            NotHealed: On this rank alone, see `fetch_lanes`.
        """
        self._is_given = True
        fetching = self._io.begin(
            fetch_lanes(
                self._ways, manifest, lanes, at_most_s=left_s, is_given=lambda: self._is_given
            )
        )
        while not self._groups.all_say(bool(wait([fetching], _LOOK_S).done)):
            self._is_given = self._groups.leader_says(
                "could not take an inner optimizer",
                lambda: self._is_named(manifest.donor, manifest.checkpoint),
            )
        return fetching.result()

    def _is_named(self, donor: str, checkpoint: int) -> bool:
        """Whether this is still the donation that the coordinator names; of the leader."""
        answer = self._talk.answer
        return (answer.donor, answer.checkpoint) == (donor, checkpoint)


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


def open_healing(connection: Connection, grant: Grant, plan: Plan) -> Healing | None:
    """Give inner optimizers to other islands from now on; open what takes one, if this one is to.

    Nothing of either without a syncer.
    """
    config = connection.config
    if config.outer.exchange != "syncer":
        return None
    talk = HealTalk(Donor(config.checkpoint_dir, grant, plan, connection.ways).give)
    connection.report_heals(talk)
    if not config.island.heal_optimizer:
        return None
    wait_s = config.island.heal_wait_s
    groups = make_groups(None, patience_s=wait_s, collective_s=config.island.collective_timeout_s)
    return Healing(connection.io, connection.ways, grant, plan, talk, groups, at_most_s=wait_s)
