"""Two islands of other people's trainers on one GPU: what their tests on CPUs leave out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration import test_torchtitan_run as titan
from tests.integration.test_integrations_readme import (
    ISLANDS,
    PAGE,
    command,
    losses,
    script_below,
    write_text,
)
from tests.test_readme import blocks

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
#: The page's script of Megatron-Core as it is on CPUs -> as it is on a GPU.
_MOVED = {
    '"gloo", 2, torch.float32': '"nccl", 1, torch.bfloat16',
    'position_embedding_type="rope")': 'position_embedding_type="rope").cuda()',
    "dtype=torch.uint8).long()": "dtype=torch.uint8).long().cuda()",
    "torch.arange(32)": 'torch.arange(32, device="cuda")',
    "torch.ones(32, 32, dtype=torch.bool)": 'torch.ones(32, 32, dtype=torch.bool, device="cuda")',
}
_TAIL = """
with torch.no_grad():
    print("held-out loss", loss_of(held_out).item())
"""


def megatron_script() -> str:
    script = script_below("Megatron-Core")
    for there, moved in _MOVED.items():
        assert script.count(there) == 1, there
        script = script.replace(there, moved)
    return script + _TAIL


def test_the_script_of_the_page_is_one_that_a_gpu_can_run() -> None:
    compile(megatron_script(), "megatron.py", "exec")


class TestOnGpu:
    """What a GPU is needed for."""

    pytestmark = on_gpu

    def test_two_islands_of_megatron_in_bfloat16_learn_the_same(self, tmp_path: Path) -> None:
        pytest.importorskip("megatron.core")
        write_text(tmp_path)
        run_file = blocks(PAGE, "toml")[0].replace("inner_steps = 240", "inner_steps = 80")
        run_file = run_file.replace("every_inner_steps = 80", "every_inner_steps = 0")
        (tmp_path / "run.toml").write_text(run_file)
        for island in ISLANDS:
            script = megatron_script().replace("eu-west", island)
            (tmp_path / f"{island}.py").write_text(script)

        found = losses(tmp_path, [command(island, 1) for island in ISLANDS])

        assert abs(found[0] - found[1]) < 1e-3
        assert found[0] < 4.0, "from 5.5 = ln 256"

    @pytest.mark.parametrize("kind", ["scheduled", "decoupled"])
    def test_two_islands_of_torchtitan_train_about_as_well_as_a_plain_run(
        self, tmp_path: Path, kind: str
    ) -> None:
        pytest.importorskip("torchtitan")
        titan.test_two_islands_of_torchtitan_train_about_as_well_as_a_plain_run(tmp_path, kind)
