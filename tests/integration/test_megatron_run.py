"""Two islands of Megatron-Core on CPUs, of two ranks each, next to a plain run of one rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.test_integrations_readme import (
    ISLANDS,
    PAGE,
    alone,
    command,
    held_out,
    losses,
    script_below,
    with_ranks,
    write_text,
)
from tests.test_readme import ROOT, blocks

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

_PRELUDE = "from tests import megatron_on_cpu  # noqa: F401\n"
_TAIL = """
with torch.no_grad():
    print("held-out loss", loss_of(held_out).item())
"""
_PLAIN = """
class PlainOuter:
    inner_step = 0

    @property
    def is_over(self):
        return self.inner_step == config.run.inner_steps

    def log(self, **_):
        pass

    def step(self, **_):
        self.inner_step += 1

    def finish(self):
        pass


"""


@pytest.fixture(autouse=True)
def _is_installed() -> None:
    pytest.importorskip("megatron.core")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_islands_of_megatron_train_about_as_well_as_a_plain_run(
    tmp_path: Path, dtype: str
) -> None:
    """In float32 one island is tensor parallel, the other data parallel."""
    write_text(tmp_path)
    run_file = blocks(PAGE, "toml")[0].replace("inner_steps = 240", "inner_steps = 80")
    run_file = with_ranks(run_file, 2).replace("every_inner_steps = 80", "every_inner_steps = 0")
    (tmp_path / "run.toml").write_text(run_file)
    script = _PRELUDE + script_below("Megatron-Core") + _TAIL
    assert 'num_tensor_parallel, dtype = "gloo", 2, torch.float32' in script
    script = script.replace("torch.float32\n", f"torch.{dtype}\n")
    data_parallel = script.replace('"gloo", 2,', '"gloo", 1,')
    of_island = dict(zip(ISLANDS, (script, data_parallel), strict=True))
    if dtype == "bfloat16":  # where islands need equal tensor parallelism
        of_island[ISLANDS[0]] = data_parallel
    for island, text in of_island.items():
        (tmp_path / f"{island}.py").write_text(text.replace("eu-west", island))
    plain = data_parallel.replace("(16,)", "(32,)").replace(" :: 2]", " * 0 :]")
    plain = plain.replace("with diloco.connect(config) as connection:", f"{_PLAIN}if True:")
    made = "MegatronDiLoCo([model], optimizer, config.outer, transport=connection)"
    assert made in plain
    (tmp_path / "plain.py").write_text(plain.replace(made, "PlainOuter()"))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

    found = losses(tmp_path, [command(each, 2) for each in ISLANDS], {"PYTHONPATH": path})
    of_plain = held_out(alone(tmp_path, command("plain", 1), {"PYTHONPATH": path}))

    (tmp_path / "losses").write_text(f"megatron, {dtype}: islands {found}, plain {of_plain}")
    assert abs(found[0] - found[1]) < 1e-3  # the ranks sum in different orders
    assert found[0] < of_plain + 0.4  # 8 outer steps are few
