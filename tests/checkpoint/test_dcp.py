"""Models that come and go in the format of torch.distributed.checkpoint, as torchtitan has them."""

from __future__ import annotations

import io
import os
import pickle
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from diloco.checkpoint.dcp import METADATA, DcpDirectory
from diloco.checkpoint.export import export_run
from diloco.errors import ConfigError
from diloco.trainer.models.hugging_face import stored_tensors
from diloco.trainer.models.model import LlamaShape, parameter_shapes
from diloco.trainer.models.rope import apply_rope, rope_table
from diloco.trainer.models.torchtitan import to_torchtitan, torchtitan_names
from tests.distributed import run_ranks
from tests.launch.stored_run import store_run, tiny_run
from tests.launch.warm_run import WarmRun


@pytest.fixture
def run(tmp_path: Path) -> WarmRun:
    return WarmRun(tmp_path)


def save(directory: Path, state: Mapping[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(dict(state), checkpoint_id=directory, no_dist=True)
    return directory


def under(names: Mapping[str, str], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {names[name]: value for name, value in parameters.items()}


def test_rows_in_torchtitans_order_rotate_to_the_same_scores() -> None:
    shape = LlamaShape(16, 32, 1, num_heads=4, num_kv_heads=2, ffn_dim=8)
    torch.manual_seed(1)
    q, k, x = torch.randn(32, 32), torch.randn(16, 32), torch.randn(1, 6, 32)
    positions, half = torch.arange(6), shape.head_dim // 2
    cos, sin = rope_table(positions, shape.head_dim, shape.rope_theta, shape.rope_scaling)

    def ours(weight: Tensor) -> Tensor:
        return apply_rope((x @ weight.T).unflatten(-1, (-1, shape.head_dim)), cos, sin)

    def theirs(weight: Tensor) -> Tensor:  # neighbours as complex numbers
        heads = (x @ weight.T).unflatten(-1, (-1, half, 2))
        angles = positions[:, None] * shape.rope_theta ** (-torch.arange(half) / half)
        turned = torch.view_as_complex(heads) * torch.polar(torch.ones(6, half), angles)[:, None]
        return torch.view_as_real(turned).flatten(-2)

    q_titan = to_torchtitan(shape, "layers.0.attention.q.weight", q)
    k_titan = to_torchtitan(shape, "layers.0.attention.k.weight", k)
    expected = torch.einsum("bshe,btke->bhkst", ours(q), ours(k))
    found = torch.einsum("bshe,btke->bhkst", theirs(q_titan), theirs(k_titan))

    # Sums of 8 float32 products of values around 32: some 1e-5 of rounding.
    assert torch.allclose(found, expected, rtol=0, atol=1e-3)
    assert not torch.allclose(q_titan, q)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_goes_out_under_torchtitans_names_and_comes_back_to_the_bit(
    tmp_path: Path, tied: bool
) -> None:
    run = WarmRun(tmp_path, tied=tied)
    state = store_run(tiny_run(tmp_path / "old", tied=tied), run.parameters)

    made = export_run(state, tmp_path / "out", layout="dcp")

    run.assert_holds(run.find(tmp_path / "out"))
    saved = DcpDirectory(tmp_path / "out")
    names = torchtitan_names(run.shape)
    assert saved.shapes == under(names, parameter_shapes(run.shape))
    assert {METADATA, "diloco.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert set(made.files) == {path.name for path in (tmp_path / "out").iterdir()} - {"diloco.json"}
    # As torchtitan loads it: into tensors of the model, whatever names DCP gives its files.
    target = {names[name]: torch.zeros(size) for name, size in parameter_shapes(run.shape).items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(target, checkpoint_id=tmp_path / "out", no_dist=True)
    up = "layers.1.feed_forward.up.weight"
    assert torch.equal(target[names[up]], run.parameters[up])


@pytest.mark.parametrize("naming", ["ours", "hugging-face", "torchtitan-besides-its-optimizer"])
def test_what_others_saved_is_found_by_name(run: WarmRun, tmp_path: Path, naming: str) -> None:
    if naming == "ours":
        saved: dict[str, Any] = {"model": run.parameters}
    elif naming == "hugging-face":
        names = {name: part.name for name, (part,) in stored_tensors(run.shape).items()}
        saved = under(names, run.parameters)
    else:
        turned = {n: to_torchtitan(run.shape, n, value) for n, value in run.parameters.items()}
        saved = under(torchtitan_names(run.shape), turned)
        saved |= {"optimizer.state.x.exp_avg": torch.ones(3), "train_state": {"step": 7}}

    run.assert_holds(run.find(save(tmp_path / "saved" / "step-10", saved)))


def save_sharded(island_rank: int, directory: Path, parameters: dict[str, Tensor]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in parameters.items()}
    dcp.save(state, checkpoint_id=directory)
    dist.barrier()


def test_what_two_ranks_saved_in_shards_is_read_whole(run: WarmRun) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        run_ranks(save_sharded, 2, Path(temporary) / "saved", run.parameters)

        run.assert_holds(run.find(Path(temporary) / "saved"))


def test_another_model_is_refused_by_its_first_tensor(run: WarmRun, tmp_path: Path) -> None:
    changed = {**run.parameters, "layers.1.ffn_norm.weight": torch.zeros(5)}
    broken = {**run.parameters, "norm.weight": torch.full((32,), torch.nan)}
    integers = {**run.parameters, "norm.weight": torch.ones(32, dtype=torch.int64)}

    refusal = run.refusal(save(tmp_path / "shape", changed))
    assert "layers.1.ffn_norm.weight is (5,), must be (32,)" in refusal
    with pytest.raises(ConfigError, match=r"norm\.weight holds values that are not finite"):
        run.find(save(tmp_path / "nan", broken)).read("model", "norm.weight")
    with pytest.raises(ConfigError, match=r"norm\.weight in .* is of type torch\.int64"):
        run.find(save(tmp_path / "integers", integers)).read("model", "norm.weight")


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("owned",)


def test_metadata_that_would_run_code_is_refused_and_runs_none(
    run: WarmRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = save(tmp_path / "saved", run.parameters)
    stream = io.BytesIO()
    pickle.dump(Evil(), stream)
    metadata = (directory / METADATA).read_bytes()
    for content, told in [
        (stream.getvalue(), r"it asks for posix\.mkdir"),
        (metadata[:-20], "is not the metadata"),
        (metadata.replace(b"__0_0.distcp", b"../0.distcp/"), "names files outside"),
    ]:
        (directory / METADATA).write_bytes(content)
        with pytest.raises(ConfigError, match=told):
            run.find(directory)
    assert not (tmp_path / "owned").exists()
