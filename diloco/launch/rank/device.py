"""Chooses the device of a rank, and the backends that its process groups need for it."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from diloco.config.compute import FLOAT8, Precision
from diloco.config.mesh import MeshConfig
from diloco.errors import ConfigError
from diloco.extras import require
from diloco.launch.rank.job import Job

logger = logging.getLogger(__name__)


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
    if asked == "auto":
        what = f"this host has {num_devices} CUDA devices for {job.num_local_ranks} ranks"
        if has_one_each:
            logger.info("islands.%s.device = auto: %s, and each takes one", island, what)
        else:
            # Also where no device is found: a driver that is broken looks the same.
            logger.warning(
                'islands.%s.device = auto: %s, so it trains on CPUs; set it to "cuda" to end in '
                'place of that, or to "cpu"', island, what,
            )  # fmt: skip
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


def check_precision(precision: Precision, device: torch.device, *, island: str) -> None:
    """Refuse matrix products in 8 bits where the device has none, before the ranks meet.

    Args:
        precision: `islands.NAME.precision`.
        device: From `rank_device`.
        island: Name of the island, for messages.

    Raises:
        ConfigError: Saying what the device has, and the nearest setting that it can do.
    """
    if precision not in FLOAT8:
        return
    name, capability = "the CPU", (0, 0)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = torch.cuda.get_device_capability(device)
    problem = capability_problem(precision, name, capability)
    setting = f'islands.{island}.precision = "{precision}"'
    if problem:
        raise ConfigError(f"{setting}: {problem}")
    require(setting, "torchao", 'set it to "bfloat16"')


def check_async_tp(mesh: MeshConfig, device: torch.device, job: Job, *, island: str) -> None:
    """Refuse to hide collectives of tensor parallelism where devices do not share memory.

    Args:
        mesh: `islands.NAME.mesh`.
        device: From `rank_device`.
        job: This rank's place.
        island: Name of the island, for messages.

    Raises:
        ConfigError: Saying what is missing.
    """
    if not mesh.async_tp:
        return
    problem = ""
    first = job.local_rank - job.local_rank % mesh.tp
    if device.type != "cuda":
        problem = f"needs CUDA devices, and this rank computes on the {device.type}"
    elif job.num_local_ranks % mesh.tp:
        problem = (
            f"needs the tp = {mesh.tp} ranks that share matrices on one host, and this one has "
            f"{job.num_local_ranks}"
        )
    else:
        peers = [peer for peer in range(first, first + mesh.tp) if peer != job.local_rank]
        apart = [p for p in peers if not torch.cuda.can_device_access_peer(job.local_rank, p)]
        if apart:
            problem = f"needs devices that reach each other's memory: {device} and {apart} do not"
    if problem:
        raise ConfigError(f"islands.{island}.mesh.async_tp = true: {problem}; set it to false")


def capability_problem(precision: Precision, name: str, capability: tuple[int, int]) -> str:
    """Say why a device cannot multiply in 8 bits, and what it can do; empty: it can.

    Args:
        precision: A key of `FLOAT8`.
        name: Of the device.
        capability: Compute capability of CUDA; (0, 0): there is none.
    """
    needed = FLOAT8[precision]
    if capability >= needed.capability:
        return ""
    has = f"has {capability[0]}.{capability[1]}" if capability > (0, 0) else "has none"
    other = FLOAT8.get(needed.nearest)
    nearest = "bfloat16" if other and capability < other.capability else needed.nearest
    return (
        f"needs compute capability {needed.capability[0]}.{needed.capability[1]} "
        f'({needed.generation}), and {name} {has}; set it to "{nearest}"'
    )


def backend_of(device: torch.device) -> str:
    """Name the backends of the default process group: gloo, and nccl for what lies on CUDA."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
