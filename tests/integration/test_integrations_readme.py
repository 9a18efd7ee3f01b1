"""The loops of diloco/integrations/README.md, run as they stand there by two islands.

Each trains a small model on local text, in a scheduled and a decoupled run, and then a plain run of
the same trainer, without DiLoCo, on as many tokens; the losses on held-out text lie close together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
_HELD_OUT = re.compile(r"held-out loss ([\d.]+)")


@dataclass(frozen=True)
class Example:
    """A script of the page.

    Attributes:
        section: Heading above it.
        package: What must be installed.
        tail: Lines after it that print the loss on held-out text.
        plain: What is replaced to make the plain trainer of it, with both islands' tokens.
    """

    section: str
    package: str
    tail: str
    plain: tuple[tuple[str, str], ...]


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

    def step(self, **_):
        self.inner_step += 1

    def finish(self):
        Path("eu-west").mkdir()
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
    "lightning": Example(
        "Lightning",
        "lightning",
        'print("held-out loss", module.training_step(held_out).item())',
        (
            _OWN,
            _NO_CONNECTION,
            ('callback = DiLoCoCallback(connection, "eu-west")', "Path('eu-west').mkdir()"),
            ("callbacks=[callback]", "callbacks=[]"),
            ("batch_size=8", "batch_size=16"),
        ),
    ),
}


def script_of(example: Example) -> str:
    """Return the script of the page, with its tail."""
    _, _, rest = PAGE.read_text("utf-8").partition(f"\n## {example.section}\n")
    script = re.search(r"^```python\n(.*?)^```$", rest, re.DOTALL | re.MULTILINE)
    assert script is not None, example.section
    return f"{script[1]}{example.tail}\n"


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


def losses(directory: Path, scripts: Sequence[Sequence[str]]) -> list[float]:
    """Run a coordinator and islands to their ends; return the losses that islands have printed."""
    coordinator = start(directory, "-m", "diloco", "coordinator", "run.toml")
    processes = [coordinator]
    try:
        assert coordinator.stdout is not None
        line = coordinator.stdout.readline()
        assert "listens on" in line, line + said_by(coordinator, 20)[0]
        processes += [start(directory, *script) for script in scripts]
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


@pytest.mark.parametrize("kind", ["scheduled", "decoupled"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_script_of_the_page_trains_two_islands_as_well_as_a_plain_run(
    tmp_path: Path, name: str, kind: str, record_property: Callable[[str, object], None]
) -> None:
    example = EXAMPLES[name]
    pytest.importorskip(example.package)
    write_text(tmp_path)
    run_file, script = blocks(PAGE, "toml")[0], script_of(example)
    if kind == "decoupled":
        for scheduled, decoupled in DECOUPLED.items():
            run_file = run_file.replace(scheduled, decoupled)
    (tmp_path / "run.toml").write_text(run_file)
    for island in ISLANDS:
        (tmp_path / f"{island}.py").write_text(script.replace("eu-west", island))
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in ("run.toml", "text.txt"):
        (plain / file).symlink_to(tmp_path / file)
    (plain / "plain.py").write_text(plain_of(example))

    found = losses(tmp_path, [[f"{island}.py"] for island in ISLANDS])
    process = start(plain, "plain.py")
    try:
        output, _ = said_by(process, 300)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output

    saved = [load_file(tmp_path / island / "model.safetensors") for island in ISLANDS]
    assert all(saved[0][each].equal(saved[1][each]) for each in saved[0])
    of_plain = held_out(output)
    record_property("losses", f"{name}, {kind}: islands {found}, plain {of_plain}")
    assert found[0] == found[1]
    assert found[0] < of_plain + 0.4  # 24 outer steps are few
    if kind == "scheduled":
        for island in ISLANDS:
            checkpoints = sorted(path.name for path in (tmp_path / island).glob("checkpoint-*"))
            assert checkpoints == ["checkpoint-160", "checkpoint-80"]
