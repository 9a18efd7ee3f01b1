"""Islands of 512 accelerators: their ranks are built as they would be, on the meta device."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from diloco.config.load import load_config
from diloco.config.pipeline import stage_layers
from diloco.trainer.models.families import shape_of
from diloco.trainer.parallel.mesh import make_mesh
from diloco.trainer.parallel.parallelize import parallelize
from diloco.trainer.parallel.pipeline import build_part, parts_of

FOUR_SITES = Path(__file__).resolve().parents[2] / "configs" / "runs" / "four-sites.toml"
META = torch.device("meta")


def local_values(preset: str, island: str, rank: int) -> int:
    """Build one rank of an island, with collectives that go nowhere; counts what it stores."""
    config = load_config(FOUR_SITES, [f"model.preset={preset}"], island=island)
    island_config = config.island
    dist.init_process_group(
        "fake", rank=rank, world_size=island_config.ranks, store=FakeStore()
    )  # fmt: skip
    try:
        is_cast = island_config.compute.is_cast
        made = make_mesh(torch.device("cpu"), island_config.mesh, is_cast=is_cast)
        mesh = dataclasses.replace(made, device=META)
        model = build_part(shape_of(config.model), mesh)
        for part in parts_of(model):
            parallelize(
                part,
                mesh,
                sequence_length=config.data.sequence_length,
                compute=island_config.compute,
            )
        return sum(
            p.to_local().numel() if isinstance(p, DTensor) else p.numel()
            for p in model.parameters()
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("preset", "island", "parameters"),
    [
        ("llama3-70B", "eu", 70_553_706_496),
        ("llama3-405B", "eu", 405_853_388_800),
        ("llama3-405B", "us", 405_853_388_800),
    ],
    ids=["70B-fsdp-tp", "405B-fsdp-tp", "405B-pp-fsdp-tp"],
)
def test_every_rank_of_512_has_its_share(preset, island, parameters):
    first, last = (local_values(preset, island, rank) for rank in (0, 511))

    # Stages at the ends have a layer less and a vocabulary more; along tp norms are whole.
    assert first == pytest.approx(parameters / 512, rel=0.05)
    assert last == pytest.approx(parameters / 512, rel=0.05)


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (126, 16, [7, *[8] * 14, 7]),
        (80, 16, [5] * 16),
        (126, 4, [31, 32, 32, 31]),
        (5, 3, [2, 2, 1]),
        (7, 4, [2, 2, 2, 1]),
        (5, 4, [1, 1, 2, 1]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_stages_at_the_ends_are_the_light_ones(layers, stages, sizes):
    dealt = stage_layers(layers, stages)

    assert [len(stage) for stage in dealt] == sizes
    assert [layer for stage in dealt for layer in stage] == list(range(layers))
