"""Which device a rank computes on, and which backends its process groups need for it."""

from __future__ import annotations

from typing import Literal

import torch

from diloco.errors import ConfigError
from diloco.launch.job import Job


def rank_device(asked: Literal["auto", "cpu", "cuda"], job: Job, *, island: str) -> torch.device:
    """Choose the device of a rank, and make it the current one.

    Ranks of a host take its CUDA devices in turn, one each: neither FSDP2 nor NCCL can share one
    between two ranks. Ranks of several islands may share one.

    Args:
        asked: `islands.NAME.device`. "auto" is CUDA where every rank of this host has a device.
        job: This rank's place.
        island: Name of the island, for messages.

    Raises:
        ConfigError: If CUDA was asked for and this host has not a device for each of its ranks.
    """
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_one_each = num_devices >= job.num_local_ranks
    if asked == "cpu" or (asked == "auto" and not has_one_each):
        return torch.device("cpu")
    if not has_one_each:
        remedy = f'set islands.{island}.device = "cpu"'
        if num_devices:
            remedy += (
                ", start fewer ranks on a host, or, under a launcher that spreads them over hosts, "
                "set LOCAL_RANK and LOCAL_WORLD_SIZE"
            )
        raise ConfigError(
            f'islands.{island}.device = "cuda": this host has {num_devices} CUDA devices for '
            f"{job.num_local_ranks} ranks; {remedy}"
        )
    device = torch.device("cuda", job.local_rank)
    torch.cuda.set_device(device)
    return device


def backend_of(device: torch.device) -> str:
    """Name the backends of the default process group: gloo, and nccl for what lies on CUDA."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
