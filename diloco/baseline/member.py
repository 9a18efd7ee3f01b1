"""One rank of a baseline: the trainer of an island's rank, and gradients or parameters in common.

    python -m diloco.baseline.member ORDER      (JSON; see `diloco.baseline.members`)

Every rank holds the whole model and takes its slice of its island's batch: data parallel, whatever
the island's mesh is called.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3

from diloco.baseline.gradients import GradientSum, ParameterMean
from diloco.baseline.group import NCCL, TRANSPORT
from diloco.baseline.site import BaselineSite, Channel, GroupSite, SiteOrder, run_member
from diloco.config.load import load_config
from diloco.config.mesh import MeshConfig
from diloco.config.schema import Config
from diloco.data.open import open_data
from diloco.data.prefetch import PrefetchedBatches
from diloco.forecast.build import link_profile
from diloco.security.security import Security
from diloco.trainer.models.families import build_model, initialise_, shape_of
from diloco.trainer.parallel.mesh import IslandMesh
from diloco.trainer.parallel.parallelize import parallelize
from diloco.trainer.trainer import InnerTrainer
from diloco.transport.identity import Role

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Method:
    """The method by which a baseline keeps its members equal; JSON values.

    Attributes:
        average_every: Inner steps from one average of the parameters to the next; 0: gradients are
            summed over all members in every inner step.
        parallel_steps: First inner steps in which they are all the same, where parameters are
            averaged later.
    """

    average_every: int = 0
    parallel_steps: int = 0


class _Member:
    """The parts of one rank."""

    def __init__(
        self, config: Config, site: BaselineSite | GroupSite, method: Method, device: torch.device
    ) -> None:
        """Build everything; nothing of it is collective."""
        self._config, self._site, self._method = config, site, method
        place, island = site.place, config.island
        torch.set_num_threads(island.threads)
        torch.set_num_interop_threads(1)
        mesh = IslandMesh(device, MeshConfig())
        data = open_data(config)
        model = build_model(shape_of(config.model))
        parallelize(
            model, mesh, sequence_length=config.data.sequence_length, compute=island.compute
        )
        initialise_(model, config.run.seed)
        batch_size = island.tokens_per_inner_step // data.sequence_length
        tokens = {name: each.tokens_per_inner_step for name, each in config.islands.items()}
        of_all = tokens[place.own.island] / sum(tokens.values()) / place.num_ranks
        (chunk_bytes,) = site.order.chunks_bytes
        self._everywhere = site.reduction(chunk_bytes)
        self._hook: GradientSum | None = None
        self._mean: ParameterMean | None = None
        parameters = list(model.parameters())
        if method.average_every:
            self._inside = site.reduction(chunk_bytes, only_inside=True)
            self._hook = GradientSum(parameters, self._inside, weight=1 / place.num_ranks)
            self._mean = ParameterMean(parameters, self._everywhere, weight=of_all)
        else:
            self._hook = GradientSum(parameters, self._everywhere, weight=of_all)
        self._of_all = of_all
        self._batches = PrefetchedBatches(
            data.batches(
                slots=(sorted(config.islands).index(place.own.island),),
                num_slots=config.max_islands,
                batch_size=batch_size,
                dp_coordinate=place.own.island_rank,
                dp_size=place.num_ranks,
            ),
            device,
        )
        self._trainer = InnerTrainer(
            model,
            mesh=mesh,
            batches=self._batches,
            evaluation=data.evaluation(config.evaluation.num_sequences),
            config=config.inner,
            batch_size=batch_size // place.num_ranks,
            micro_batches=island.micro_batches,
            inner_steps=config.run.inner_steps,
            clock=time.monotonic,
            gradient_hook=self._hook,
        )

    def train(self) -> dict[str, Any]:
        """Make all inner steps; returns what this rank has to say, JSON values."""
        losses, norms, step_s, averaging_s = [], [], [], 0.0
        logger.info(
            "training begins, %s of %d", self._site.place.own, len(self._site.place.members)
        )
        began = time.monotonic()
        for step in range(self._config.run.inner_steps):
            self._choose(step)
            metrics = self._trainer.inner_step(step).read()
            losses.append(metrics.loss)
            norms.append(metrics.grad_norm)
            step_s.append(metrics.duration_s)
            averaging = time.monotonic()
            if self._is_averaged_after(step + 1):
                assert self._mean is not None
                self._mean.average()
            averaging_s += time.monotonic() - averaging
        wall_s = time.monotonic() - began
        self._batches.close()
        return {
            "losses": losses,
            "grad_norms": norms,
            "step_s": step_s,
            "wall_s": wall_s,
            "waited_s": averaging_s + (self._hook.exposed_s if self._hook else 0.0),
            "bytes_up": self._site.bytes_up,
            "bytes_down": self._site.bytes_down,
            "digest": self._digest(),
            "nats_per_byte": self._evaluated(),
        }

    def _choose(self, step: int) -> None:
        """Sum gradients over whom this inner step asks for."""
        if self._mean is None or self._hook is None:
            return
        if step < self._method.parallel_steps:
            self._hook.over(self._everywhere, self._of_all)
        else:
            self._hook.over(self._inside, 1 / self._site.place.num_ranks)

    def _is_averaged_after(self, inner_step: int) -> bool:
        """Every so many steps since they differ, and at the end."""
        apart = inner_step - self._method.parallel_steps
        if self._mean is None or apart <= 0:
            return False
        return apart % self._method.average_every == 0 or inner_step == self._config.run.inner_steps

    def _digest(self) -> str:
        hasher = blake3()
        for parameter in self._trainer.model.parameters():
            values = parameter.detach().cpu().contiguous()
            hasher.update(values.view(torch.uint8).numpy().data)
        return hasher.hexdigest()

    def _evaluated(self) -> float | None:
        """Loss on the held-out text: the first member's, as all hold the same parameters."""
        place = self._site.place
        return self._trainer.evaluate() if place.own == place.members[0] else None


def _device_of(order: SiteOrder, hop: str) -> torch.device:
    """Give every member a CUDA device of its own, in their order, where they meet over NCCL."""
    if hop != NCCL:
        return torch.device("cpu")
    device = torch.device("cuda", order.place.members.index(order.place.own))
    torch.cuda.set_device(device)
    return device


def _open_site(
    config: Config, order: SiteOrder, channel: Channel, hop: str, device: torch.device
) -> BaselineSite | GroupSite:
    if hop != TRANSPORT:
        return GroupSite(order, channel, device)
    return BaselineSite(
        order,
        Security.of(config, Role.ISLAND, config.island_id),
        link_profile(config),
        channel,
        channels=config.transport.num_channels,
    )


def train(order: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Train as one member; returns what it has to say."""
    config = load_config(order["config"], island=order["site"]["island"])
    site_order, hop = SiteOrder(**order["site"]), order["hop"]
    device = _device_of(site_order, hop)
    site = _open_site(config, site_order, channel, hop, device)
    result = _Member(config, site, Method(**order["method"]), device).train()
    site.close()
    return result


if __name__ == "__main__":
    run_member(train, logging.INFO)
