"""The loops of diloco/integrations/README.md, run as they stand there by two islands.

Each trains a small model on local text, in a scheduled and a decoupled run, and then a plain run of
the same trainer, without DiLoCo, on as many tokens; the losses on held-out text lie close together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest
from safetensors.torch import load_file

import diloco.integrations
from tests.test_readme import blocks, start
from tests.waiting import said_by

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

PAGE = Path(diloco.integrations.__file__).with_name("README.md")
ISLANDS = ("eu-west", "us-east")
#: What a decoupled run has in place of what the page shows; the test's steps are too short for
#: `grace = "auto"`.
DECOUPLED = {
    'preset = "streaming"': 'preset = "decoupled"\ngrace = "1s"',
    "every_inner_steps = 80": "every_tokens = 81920",
}
#: What a test shortens of what the page shows; as many outer steps.
SHORTER = {
    "inner_steps = 240": "inner_steps = 120",
    "inner_steps_per_round = 10": "inner_steps_per_round = 5",
}
_HELD_OUT = re.compile(r"held-out loss ([\d.]+)")


@dataclass(frozen=True)
class Example:
    """A script of the page.

    Attributes:
        section: Heading above it.
        package: What must be installed.
        tail: Lines after it that print the loss on held-out text.
        plain: What is replaced to make the plain trainer of it, with both islands' tokens.
        by_torchrun: Ranks of each island that torchrun starts; 0: the script is started by itself.
        saves: Whether it saves checkpoints of the run.
    """

    section: str
    package: str
    tail: str
    plain: tuple[tuple[str, str], ...]
    by_torchrun: int = 0
    saves: bool = True


_OWN = (" :: 2]", " * 0 :]")  # the rows of both islands
_NO_CONNECTION = ("with diloco.connect(config) as connection:", "if True:")
_PLAIN_OUTER = ("diloco.DiLoCo(model, config.outer, transport=connection)", "PlainOuter(config)")
_PLAIN_CLASS = '''
class PlainOuter:
    """Counts steps."""

    inner_step, resume_step, is_stopping, checkpoint_due = 0, None, False, False

    def __init__(self, config):
        self.inner_steps = config.run.inner_steps

    @property
    def is_over(self):
        return self.inner_step == self.inner_steps

    def log(self, **_):
        pass

    def step(self, **_):
        self.inner_step += 1

    def finish(self):
        pass
'''

EXAMPLES = {
    "trainer": Example(
        "`transformers.Trainer`",
        "transformers",
        'print("held-out loss", trainer.evaluate()["eval_loss"])',
        (
            _OWN,
            _NO_CONNECTION,
            ("callback = DiLoCoCallback(connection)", "callback = None"),
            ("callbacks=[callback]", "callbacks=[]"),
            ("per_device_train_batch_size=8", "per_device_train_batch_size=16"),
            ("max_steps=config.most_inner_steps", "max_steps=config.run.inner_steps"),
        ),
    ),
    "accelerate": Example(
        "`accelerate`, and any loop of your own",
        "accelerate",
        'print("held-out loss", loss_of(held_out).item())',
        (
            _OWN,
            _NO_CONNECTION,
            _PLAIN_OUTER,
            ("batch_size=8", "batch_size=16"),
            ("\n\ndef loss_of", f"\n{_PLAIN_CLASS}\n\ndef loss_of"),
        ),
    ),
    "torchrun": Example(
        "`torchrun`",
        "torch",
        'print("held-out loss", loss_of(held_out).item())',
        (
            _OWN,
            _NO_CONNECTION,
            _PLAIN_OUTER,
            ("(16,)", "(32,)"),
            ("\n\ndef loss_of", f"\n{_PLAIN_CLASS}\n\ndef loss_of"),
        ),
        by_torchrun=2,
        saves=False,
    ),
    "lightning": Example(
        "Lightning",
        "lightning",
        'print("held-out loss", module.training_step(held_out).item())',
        (
            _OWN,
            _NO_CONNECTION,
            ('callback = DiLoCoCallback(connection, "eu-west")', "callback = None"),
            ("callbacks=[callback]", "callbacks=[]"),
            ("batch_size=8", "batch_size=16"),
        ),
    ),
}


def command(name: str, by_torchrun: int) -> list[str]:
    """Return how a script is started: by itself, or as so many ranks by torchrun."""
    ranks = f"--nproc-per-node={by_torchrun}"
    torchrun = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", ranks]
    return [*(torchrun if by_torchrun else []), f"{name}.py"]


def with_ranks(run_file: str, num_ranks: int) -> str:
    """Return a run file whose islands have so many ranks; how they share a model, a script says."""
    mesh = f"mesh = {{ dp_shard = {num_ranks} }}"
    return run_file.replace("ranks = 1", f"ranks = {num_ranks}\n{mesh}")


def script_below(section: str) -> str:
    """Return the first script of a section of the page."""
    _, _, rest = PAGE.read_text("utf-8").partition(f"\n## {section}\n")
    script = re.search(r"^```python\n(.*?)^```$", rest, re.DOTALL | re.MULTILINE)
    assert script is not None, section
    return script[1]


def script_of(example: Example) -> str:
    """Return the script of the page, with its tail."""
    return f"{script_below(example.section)}{example.tail}\n"


def plain_of(example: Example) -> str:
    """Return the script without DiLoCo."""
    script = script_of(example)
    for old, new in example.plain:
        assert old in script, old
        script = script.replace(old, new)
    return script


def write_text(directory: Path) -> None:
    """Write local text: modules of the standard library."""
    modules = sorted(Path(os.__file__).parent.glob("[a-e]*.py"))
    (directory / "text.txt").write_bytes(b"".join(map(Path.read_bytes, modules)))


def held_out(output: str) -> float:
    """Return the loss that a script has printed."""
    found = _HELD_OUT.search(output)
    assert found is not None, output
    return float(found[1])


def losses(
    directory: Path,
    scripts: Sequence[Sequence[str]],
    env: Mapping[str, str] = MappingProxyType({}),
) -> list[float]:
    """Run a coordinator and islands to their ends; return the losses that islands have printed."""
    coordinator = start(directory, "-m", "diloco", "coordinator", "run.toml")
    processes = [coordinator]
    try:
        assert coordinator.stdout is not None
        line = coordinator.stdout.readline()
        assert "listens on" in line, line + said_by(coordinator, 20)[0]
        processes += [start(directory, *script, env=env) for script in scripts]
        outputs = []
        for process in reversed(processes):
            output, _ = said_by(process, 300)
            assert process.returncode == 0, output
            outputs.append(output)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [held_out(output) for output in outputs[:-1]]


def alone(
    directory: Path, script: Sequence[str], env: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Run a script to its end; return what it has printed."""
    process = start(directory, *script, env=env)
    try:
        output, _ = said_by(process, 300)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output
    return output


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_script_of_the_page_trains_two_islands_as_well_as_a_plain_run(
    tmp_path: Path, name: str
) -> None:
    example = EXAMPLES[name]
    pytest.importorskip(example.package)
    shown, script, found = blocks(PAGE, "toml")[0], script_of(example), {}
    for page, test in SHORTER.items():
        assert page in shown, page
        shown = shown.replace(page, test)
    if example.by_torchrun:
        shown = with_ranks(shown, example.by_torchrun)
    if not example.saves:
        shown = re.sub(r"\[checkpoint\]\n.*\n", "", shown)
    for kind in ("scheduled", "decoupled", "plain"):
        run_file = shown
        if kind == "decoupled":
            for scheduled, decoupled in DECOUPLED.items():
                run_file = run_file.replace(scheduled, decoupled)
        directory = tmp_path / kind
        directory.mkdir()
        write_text(directory)
        (directory / "run.toml").write_text(run_file)
        if kind == "plain":
            (directory / "plain.py").write_text(plain_of(example))
            found[kind] = held_out(alone(directory, command("plain", example.by_torchrun)))
            continue
        for island in ISLANDS:
            (directory / f"{island}.py").write_text(script.replace("eu-west", island))
        commands = [command(island, example.by_torchrun) for island in ISLANDS]
        found[kind], other = losses(directory, commands)
        assert found[kind] == other
        saved = [load_file(directory / island / "model.safetensors") for island in ISLANDS]
        assert all(saved[0][each].equal(saved[1][each]) for each in saved[0])
        if kind == "scheduled" and example.saves:
            checkpoints = [path.name for path in (directory / ISLANDS[0]).glob("checkpoint-*")]
            assert checkpoints == ["checkpoint-80"]

    (tmp_path / "losses").write_text(f"{name}: {found}")
    assert max(found.values()) < found["plain"] + 0.7  # 24 outer steps of 5 are few
