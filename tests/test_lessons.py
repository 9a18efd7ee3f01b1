"""The course in configs/examples: each lesson has its files, and does what its page says.

The first block of a lesson's README.md is run as it stands there, in a copy of the folder, and what
is printed is held against expected.txt. There `...` stands for what depends on the machine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from diloco.chaos.plan import load_plan
from diloco.config.load import load_config
from diloco.simulations.lab.config import Flags, load_lab
from tests.own_parts import install_lesson

ROOT = Path(__file__).resolve().parents[1]
COURSE = ROOT / "configs" / "examples"
LESSONS = sorted(page.parent for page in COURSE.glob("*/README.md"))
#: Bytes of a picture, at most.
MOST_PICTURE = 40_000
LIMIT_S = 560
RUN_TABLE = re.compile(r"^(\[run\]|run = \{)", re.MULTILINE)


def block(lesson: Path) -> str:
    found = re.search(r"^```\n(.*?)^```$", (lesson / "README.md").read_text("utf-8"), re.S | re.M)
    assert found, f"{lesson.name} has no commands"
    return found[1]


def test_the_lessons_have_numbers_of_their_own() -> None:
    numbers = [path.name.split("-")[0] for path in LESSONS]

    assert set(numbers) <= set("12345678") and len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.name)
def test_a_lesson_has_its_files(lesson: Path) -> None:
    page = (lesson / "README.md").read_text("utf-8")
    pictures = [*lesson.glob("*.png"), *lesson.glob("*.svg")]

    assert page.startswith(f"# Lesson {lesson.name[0]}: ")
    assert "(expected.txt)" in page and (lesson / "expected.txt").read_text("utf-8").strip()
    assert len(pictures) == 1 and f"]({pictures[0].name})" in page
    assert pictures[0].stat().st_size <= MOST_PICTURE


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.name)
def test_a_lessons_run_files_can_be_loaded(
    lesson: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in install_lesson(tmp_path / "site"):
        monkeypatch.syspath_prepend(folder)
    runs = [path for path in lesson.glob("*.toml") if re.search(RUN_TABLE, path.read_text("utf-8"))]

    assert runs
    for path in runs:
        is_of_transformers = 'family = "hf"' in path.read_text("utf-8")
        assert load_config(path, [f"model.name={tiny_llama(tmp_path)}"] * is_of_transformers)


def test_the_other_files_of_a_lesson_can_be_loaded() -> None:
    kill = load_plan(COURSE / "5-failures" / "kill.toml").config
    lab = load_lab(COURSE / "6-prediction" / "lab.toml", Flags())

    assert [fault.kind for fault in kill.fault] == ["kill", "kill", "kill", "freeze", "cut"]
    assert len(lab.sweep["outer.inner_steps_per_round"]) == 3
    for lesson, run in (("5-failures", kill.run), ("6-prediction", Path(lab.run).name)):
        assert load_config(COURSE / lesson / run)


def tiny_llama(directory: Path) -> Path:
    """Write the config.json of a model, as lesson 3 makes it."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"model_type": "llama", "intermediate_size": 192, "max_position_embeddings": 64}
    (directory / "config.json").write_text(json.dumps({**sizes, **more}))
    return directory


def site(directory: Path) -> dict[str, str]:
    """Make the commands of an installation, with lesson 8's package; returns the environment."""
    commands = directory / "bin"
    commands.mkdir()
    for name, arguments in {"python": "", "diloco": " -m diloco", "pip": " -c pass"}.items():
        command = commands / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n')
        command.chmod(0o755)
    paths = [*map(str, install_lesson(directory / "site")), str(ROOT)]
    return {
        **os.environ,
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "1000",
        "HF_HUB_OFFLINE": "1",
    }


def run_block(lesson: Path, tmp_path: Path) -> str:
    """Run a lesson's commands in a copy of its folder; returns what they printed."""
    folder = tmp_path / "configs" / "examples" / lesson.name
    shutil.copytree(lesson, folder)
    shutil.copytree(ROOT / "configs" / "launch", tmp_path / "configs" / "launch")
    script = f"set -euo pipefail\nshopt -s expand_aliases\n{block(lesson)}"
    (folder / "commands.sh").write_text(script)
    with subprocess.Popen(
        ["bash", "commands.sh"],
        cwd=folder,
        env=site(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=LIMIT_S)
        finally:  # also those that it left in the background
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed
    return printed


def missing_of(expected: str, printed: str) -> list[str]:
    """Return the expected lines, of which `...` is anything, that were not printed."""
    words = " ".join(printed.split())
    missing = []
    for line in filter(None, map(str.strip, expected.splitlines())):
        if line == "...":
            continue
        parts = [re.escape(" ".join(part.split())) for part in line.split("...")]
        if not re.search(r"\s?.{0,400}?\s?".join(parts), words):
            missing.append(line)
    return missing


def test_what_is_missing_is_found() -> None:
    assert missing_of("a ... c\n...\nd", "x a b\n c d") == []
    assert missing_of("a ... c\nd e", "a b d c") == ["d e"]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.name)
def test_a_lesson_does_what_its_page_says(lesson: Path, tmp_path: Path) -> None:
    printed = run_block(lesson, tmp_path)

    expected = (lesson / "expected.txt").read_text("utf-8")
    assert not missing_of(expected, printed), printed
