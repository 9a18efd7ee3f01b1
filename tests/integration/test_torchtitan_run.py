"""Two islands of torchtitan's trainer on CPUs, with its Llama debug model, next to a plain run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.integration.test_integrations_readme import (
    DECOUPLED,
    ISLANDS,
    alone,
    held_out,
    losses,
    script_below,
)
from tests.test_readme import ROOT

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

INNER_STEPS, ROWS, LENGTH = 48, 4, 64
RUN = f"""
[run]
name = "titan"
seed = 1
inner_steps = {INNER_STEPS}

[model]
family = "own"

[data]
sequence_length = {LENGTH}

[inner.optimizer]
lr = 8e-4

[outer]
preset = "streaming"
inner_steps_per_round = 6
num_fragments = 2

[checkpoint]
every_inner_steps = 80

[coordinator]
state_dir = "runs/titan"
""" + "".join(
    f"""
[islands.{island}]
ranks = 1
tokens_per_inner_step = {ROWS * LENGTH}
"""
    for island in ISLANDS
)
_PRELUDE = "from tests import titan_on_cpu\n"
_TAIL = 'print("held-out loss", titan_on_cpu.held_out_loss(trainer, open("held-out.txt").read()))\n'
PLAIN = """
from torchtitan.config import ConfigManager
from torchtitan.trainer import Trainer

trainer = Trainer(ConfigManager().parse_args())
trainer.train()
trainer.close()
"""


@pytest.fixture(autouse=True)
def _is_installed() -> None:
    pytest.importorskip("torchtitan")


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))


def write_data(directory: Path) -> None:
    """Write text for each island, for a plain run all of it, and what none trains on."""
    modules = [
        path.read_text("utf-8") for path in sorted(Path(os.__file__).parent.glob("[a-e]*.py"))
    ]
    (directory / "held-out.txt").write_text(modules[0][: 65 * 100])
    shares = {ISLANDS[0]: modules[1::2], ISLANDS[1]: modules[2::2], "plain": modules[1:]}
    for name, share in shares.items():
        (directory / f"text-{name}").mkdir()
        lines = (json.dumps({"text": text}) for text in share)
        (directory / f"text-{name}" / "text.jsonl").write_text("\n".join(lines))


def command(name: str, *, rows: int) -> list[str]:
    """Return a script of one rank under torchrun, with torchtitan's options."""
    options = {
        "module": "tests.titan_on_cpu",
        "config": "llama_debug",
        "hf_assets_path": "tokenizer",
        "dump_folder": f"out-{name}",
        "dataloader.dataset_path": f"text-{name}",
        "training.steps": INNER_STEPS,
        "training.seq_len": LENGTH,
        "training.local_batch_size": rows,
        "checkpoint.interval": 80,
    }
    given = [f"--{option}={value}" for option, value in options.items()]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    return [*torchrun, f"{name}.py", *given, "--checkpoint.enable"]


@pytest.mark.parametrize("kind", ["scheduled", "decoupled"])
def test_two_islands_of_torchtitan_train_about_as_well_as_a_plain_run(
    tmp_path: Path, kind: str
) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    write_data(tmp_path)
    run_file = RUN
    if kind == "decoupled":
        for scheduled, decoupled in DECOUPLED.items():
            run_file = run_file.replace(scheduled, decoupled)
    (tmp_path / "run.toml").write_text(run_file)
    script = script_below("torchtitan")
    for island in ISLANDS:
        text = _PRELUDE + script.replace("eu-west", island) + _TAIL
        (tmp_path / f"{island}.py").write_text(text)
    (tmp_path / "plain.py").write_text(_PRELUDE + PLAIN + _TAIL)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {"PYTHONPATH": path, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}

    found = losses(tmp_path, [command(island, rows=ROWS) for island in ISLANDS], env)
    of_plain = held_out(alone(tmp_path, command("plain", rows=2 * ROWS), env))

    (tmp_path / "losses").write_text(f"torchtitan, {kind}: islands {found}, plain {of_plain}")
    assert found[0] == found[1]
    assert found[0] < of_plain + 0.4  # 8 outer steps are few
