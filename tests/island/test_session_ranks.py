"""`DiLoCo` on islands of two real ranks: FSDP2 and evaluations, checkpoints through DCP."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import diloco
from diloco.config.load import load_config
from tests.distributed import run_ranks
from tests.served_run import ServedRun

COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
)  # fmt: skip
#: Sends after 3 and 6, merges 2 steps later, the rest by the flush; two lanes a fragment, one on
#: each rank.
ROUNDS = {
    "inner_steps": 11,
    "inner_steps_per_round": 6,
    "num_fragments": 2,
    "overlap_steps": 2,
    "codec": "float32",
}
TOKENS = 100
SAVED_AFTER = 4


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(128, 300), nn.Tanh(), nn.Linear(300, 128))


def sharded(seed: int = 1) -> nn.Sequential:
    """Shard a part and the root, which keeps its gathered parameters after a forward."""
    model, mesh = make_model(seed), init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def inputs(inner_step: int) -> torch.Tensor:
    return torch.randn(8, 128, generator=torch.Generator().manual_seed(inner_step))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inner_step: int) -> None:
    (model(inputs(inner_step)) - inputs(inner_step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model: nn.Module) -> list[list[float]]:
    """Unsharded values; collective where they are sharded."""
    tensors = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return [tensor.detach().flatten().tolist() for tensor in tensors]


@contextmanager
def serving(island_rank: int, directory: Path) -> Iterator[tuple[ServedRun | None, str]]:
    """Serve a run from rank 0; gives its address to both."""
    words: list[Any] = [None]
    if island_rank == 0:
        with ServedRun(directory, {"east": "dp_shard = 2"}, **ROUNDS) as served:
            dist.broadcast_object_list([served.address])
            yield served, served.address
            dist.barrier()
    else:
        dist.broadcast_object_list(words)
        yield None, words[0]
        dist.barrier()


def shared_directory() -> Path:
    words = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(words)
    assert words[0] is not None
    return Path(words[0])


# -- FSDP2 ---------------------------------------------------------------------------------------


@contextmanager
def counting(counts: Counter[str]) -> Iterator[None]:
    """Count collectives by name; those that return before they are done apart."""

    def counted(name: str) -> Any:
        real = getattr(dist, name)

        def call(*arguments: Any, **named: Any) -> Any:
            counts[f"{name} started" if named.get("async_op") else name] += 1
            return real(*arguments, **named)

        return call

    with mock.patch.multiple(dist, **{name: counted(name) for name in COLLECTIVES}):
        yield


def train_with_and_without_evaluations(island_rank: int) -> list[Any]:
    ends = []
    for is_evaluating in (False, True):
        model, losses = sharded(), []
        a_step: list[dict[str, int]] = []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        directory = shared_directory()
        with serving(island_rank, directory) as (_, address):
            own = ["model.family=own", "islands.east={ranks=2, tokens_per_inner_step=128}"]
            config = load_config(directory / "run.toml", own, island="east")  # without a mesh
            with diloco.connect(config, address) as connection:
                outer = diloco.DiLoCo(model, config.outer, transport=connection)
                for inner_step in range(outer.inner_steps):
                    train_step(model, optimizer, inner_step)
                    if is_evaluating:
                        with torch.no_grad():  # the root stays unsharded
                            model(inputs(0))
                        with outer.global_parameters(), torch.no_grad():
                            losses.append(float(model(inputs(0)).square().mean()))
                    counts: Counter[str] = Counter()
                    with counting(counts):
                        outer.step(num_tokens=TOKENS)
                    a_step.append(dict(counts))
                outer.finish()
                digests = outer.digests
        ends.append((whole(model), digests, len(set(losses)), a_step))
    return ends


def test_evaluations_between_steps_change_nothing_on_fsdp() -> None:
    for plain, evaluated in run_ranks(train_with_and_without_evaluations, 2):
        assert plain[:2] == evaluated[:2]
        # Version 0, then one value for each of two merges: what is evaluated is what was published.
        assert evaluated[2] == 3
        check_few_collectives(plain[3])


def check_few_collectives(a_step: list[dict[str, int]]) -> None:
    """Insist on what `outer.step` may cost: only a due step and a merge make ranks wait."""
    assert len(a_step) == 11
    quiet = [a_step[inner_step - 1] for inner_step in (1, 2, 9, 10, 11)]
    assert quiet == [{}] * 5, "nothing is due and nothing outstanding"
    for due in (3, 6):
        # The collect waits for all ranks; whether it is tried comes right before, the sum of
        # bytes, tokens and stops right after it.
        assert a_step[due - 1].keys() == {"all_to_all_single", "all_reduce", "all_reduce started"}
        assert a_step[due - 1]["all_reduce"] == 2
        assert a_step[due - 1]["all_reduce started"] == 1
        assert a_step[due] == {"all_reduce started": 1}, "in flight: an agreement, not waited for"
        assert a_step[due + 1].keys() <= {"all_to_all_single", "all_reduce started"}, "merged"


# -- distributed checkpoint ----------------------------------------------------------------------


def save_at_two_ranks_and_load_at_one(island_rank: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    directory = shared_directory()
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    alone = dist.new_group([0])
    with serving(island_rank, directory) as (served, address):
        config = load_config(directory / "run.toml", island="east")
        with diloco.connect(config, address) as connection:
            outer = diloco.DiLoCo(model, config.outer, transport=connection)
            for inner_step in range(outer.inner_steps):
                train_step(model, optimizer, inner_step)
                outer.step(num_tokens=TOKENS)
                if outer.inner_step == SAVED_AFTER:
                    with outer.checkpointing():
                        seen["lanes"] = [n for n in outer.state_dict() if n.startswith("anchor")]
                        state = {"model": model.state_dict(), "outer": outer}
                        dcp.save(state, checkpoint_id=directory / "saved")
            outer.finish()
            seen["uninterrupted"] = whole(model)
        if served is not None:
            served.resume(SAVED_AFTER)
            seen["resumed"] = resume_alone(config, address, directory, alone)
    return seen


def resume_alone(config: Any, address: str, directory: Path, alone: Any) -> list[list[float]]:
    model = make_model(seed=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    with diloco.connect(config, address) as connection:
        outer = diloco.DiLoCo(model, config.outer, transport=connection, group=alone)
        state = {"model": model.state_dict(), "outer": outer}
        dcp.load(state, checkpoint_id=directory / "saved", process_group=alone)
        assert outer.num_in_flight == 1
        for inner_step in range(outer.start_step, outer.inner_steps):
            train_step(model, optimizer, inner_step)
            outer.step(num_tokens=TOKENS)
        outer.finish()
    return whole(model)


def test_state_saved_at_two_ranks_loads_at_one() -> None:
    first, second = run_ranks(save_at_two_ranks_and_load_at_one, 2)

    assert first["lanes"] and second["lanes"]
    assert not set(first["lanes"]) & set(second["lanes"])
    for resumed, uninterrupted in zip(first["resumed"], first["uninterrupted"], strict=True):
        torch.testing.assert_close(
            torch.tensor(resumed), torch.tensor(uninterrupted), rtol=0, atol=1e-6
        )


# -- tokens --------------------------------------------------------------------------------------


def count_tokens_apart(island_rank: int) -> str:
    model, directory = sharded(), shared_directory()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with serving(island_rank, directory) as (_, address):
        config = load_config(directory / "run.toml", island="east")
        try:
            with diloco.connect(config, address) as connection:
                outer = diloco.DiLoCo(model, config.outer, transport=connection)
                for inner_step in range(outer.inner_steps):
                    train_step(model, optimizer, inner_step)
                    outer.step(num_tokens=TOKENS + island_rank)
        except ValueError as error:
            return str(error)
    return ""


def test_ranks_that_count_different_tokens_are_told_so_together() -> None:
    for island_rank, told in enumerate(run_ranks(count_tokens_apart, 2)):
        assert told.startswith("the ranks of this island gave outer.step different num_tokens")
        assert f"up to inner step 3 is {3 * (TOKENS + island_rank)}" in told
