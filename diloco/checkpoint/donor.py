"""The inner optimizer of a checkpoint of this island, given to one that has none.

Read from the files of the checkpoint, so that training holds nothing for it and goes on; a leader
that starts again gives the rest of it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import blake3
import safetensors.torch

from diloco.checkpoint.checkpoints import Checkpoint
from diloco.island.exchange.heal import Lane, NotHealed, Ways, give, lanes_of
from diloco.outer.fragments import Plan
from diloco.protocol.rounds.donation import LaneGiven, Manifest, lane_name
from diloco.protos.control_pb2 import Grant
from diloco.trainer.state import INNER_OPTIMIZER, MOMENTS


class Donor:
    """Gives for one start of an island; on its leader.

    Args:
        directory: Of this site's checkpoints.
        grant: Of the start.
        plan: Of the run.
        ways: To the syncers.
    """

    def __init__(self, directory: Path, grant: Grant, plan: Plan, ways: Ways) -> None:
        """Assign only."""
        self._directory = directory
        self._grant = grant
        self._plan = plan
        self._ways = ways

    async def give(self, number: int) -> None:
        """Put the inner optimizer of a checkpoint, an inner step or a cut, at the syncers.

        Raises:
            NotHealed: If the checkpoint is of another plan, or a syncer refuses it.
            ConfigError: If the checkpoint is not there, or damaged.
            DilocoError: If a syncer cannot be reached.
        """
        checkpoint = await asyncio.to_thread(
            Checkpoint.open, self._directory, self._grant.island, number
        )
        if checkpoint.plan != self._plan:
            raise NotHealed(f"the checkpoint of {number} is of another plan than the run")

        def lane_bytes(lane: Lane) -> bytes:
            moments = {moment: checkpoint.lane(moment, *lane) for moment in MOMENTS}
            return safetensors.torch.save(moments)

        manifest = await asyncio.to_thread(
            lambda: Manifest(
                run=self._grant.run,
                timeline=self._grant.timeline,
                donor=self._grant.island,
                checkpoint=number,
                inner_step=checkpoint.inner_step,
                inner_optimizer=str(checkpoint.manifest[INNER_OPTIMIZER]),
                optimizer_step=int(checkpoint.manifest["optimizer_step"]),
                versions=tuple(checkpoint.manifest["versions"]),
                plan=self._plan.fingerprint(),
                lanes={lane_name(*n): _given(lane_bytes(n)) for n in lanes_of(self._plan)},
            )
        )
        await give(self._ways, self._plan, manifest, lane_bytes)


def _given(data: bytes) -> LaneGiven:
    return LaneGiven(len(data), blake3.blake3(data).hexdigest())
