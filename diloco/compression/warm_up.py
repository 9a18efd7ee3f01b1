"""Compile ahead what the lanes of a run will be coded by."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from diloco.compression.blocks import BlockCodec
from diloco.compression.compiled import COMPILE_NUMEL, can_compile
from diloco.compression.lanes import lane_runs
from diloco.outer.fragments import Plan

logger = logging.getLogger(__name__)


def warm_up(plan: Plan, names: Iterable[str], device: str = "cpu") -> None:
    """Compile the formulas of all large lanes of a plan, so that no later call waits for that.

    Takes about 15 s for the first codec and 3 s for each other one; 3 s and 0.5 s where an earlier
    process has left its kernels in inductor's cache; and 110 MiB of memory. Returns at once where
    no lane has COMPILE_NUMEL values of a block codec, no compiler is there, or all is compiled. Any
    thread may call it, but none that others wait for.

    Args:
        plan: Of the run.
        names: Of codecs, as `lane_codec` takes them.
        device: Kind of that on which they are coded.

    Raises:
        ConfigError: If a name names a codec that there is not.
    """
    wanted = {
        codec.name: codec
        for name in names
        for fragment in plan.fragments
        for lane in fragment.lanes
        if lane.numel >= COMPILE_NUMEL
        for codec, numel in lane_runs(name, fragment, lane.lane_id)
        if numel >= COMPILE_NUMEL and isinstance(codec, BlockCodec) and not codec.is_warm(device)
    }
    if not wanted or not can_compile(device):
        return
    for done, name in enumerate(sorted(wanted)):
        logger.info("compiling codec, name=%s number=%d of=%d", name, done + 1, len(wanted))
        if wanted[name].warm_up(device):
            logger.info("codec compiled, name=%s", name)
