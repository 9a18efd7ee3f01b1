"""What every command shows alike: help pages that flow, and an end when nobody reads on."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from diloco.cli.main import EXAMPLES, app
from diloco.cli.run.configuration import FIRST_KEYS
from diloco.config.classes import explain
from diloco.config.schema import Config
from diloco.errors import ConfigError
from tests.waiting import said_by

WIDTH = 80
DEMO = Path(__file__).resolve().parents[2] / "configs" / "runs" / "demo.toml"


def commands(group: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for command in group.registered_commands:
        assert command.callback is not None
        yield (*path, command.name or command.callback.__name__.replace("_", "-"))
    for below in group.registered_groups:
        assert below.typer_instance is not None
        name = below.name or below.typer_instance.info.name
        yield from commands(below.typer_instance, (*path, str(name)))


@pytest.mark.parametrize("command", list(commands(app)), ids=" ".join)
def test_help_is_wrapped_once(command: tuple[str, ...]) -> None:
    page = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": str(WIDTH)})

    assert page.exit_code == 0, page.output
    lines = page.stdout.partition("\u256d")[0].splitlines()  # before the first box
    # A gap is a word that was read as markup.
    assert not any("  " in line.strip() for line in lines), page.stdout
    for line, below in pairwise(line.strip() for line in lines):
        if line and below and not line.startswith("Usage"):
            first_word = below.split()[0]
            assert len(line) + 1 + len(first_word) > WIDTH - 2, f"room for {first_word!r}: {line}"


def test_every_command_has_an_example_that_can_be_typed() -> None:
    assert {" ".join(command) for command in commands(app)} == EXAMPLES.keys()
    for name, example in EXAMPLES.items():
        program, *words = shlex.split(example)
        group: Any = get_command(app)
        path = name.split()

        for part in path:
            group = group.commands[part]
        group.make_context(name, words[len(path) :])

        assert [program, *words[: len(path)]] == ["diloco", *path]


def test_the_commands_are_in_three_groups() -> None:
    page = CliRunner().invoke(app, ["--help"], env={"COLUMNS": str(WIDTH)}).stdout

    titles = re.findall(r"^\u256d\u2500 (\w+)", page, re.MULTILINE)
    assert titles == ["Options", "Run", "Operate", "Research"]


def test_help_ends_with_the_example() -> None:
    page = CliRunner().invoke(app, ["set", "--help"], env={"COLUMNS": str(WIDTH)}).stdout

    assert page.rstrip().splitlines()[-1].strip() == f"Example: {EXAMPLES['set']}"


def test_keys_are_explained_those_used_first_or_all() -> None:
    first = CliRunner().invoke(app, ["config", "--explain"])
    every = CliRunner().invoke(app, ["config", "--explain", "--all"])

    keys = [line.split()[0] for line in every.stdout.splitlines() if line[0] != " "]
    assert keys == [row.path for row in explain(Config)]
    shown = [line.split()[0] for line in first.stdout.splitlines() if line[0] != " "][:-1]
    assert set(shown) == set(FIRST_KEYS) and len(FIRST_KEYS) == 40


def test_a_reader_that_has_enough_is_no_defect() -> None:
    plan = subprocess.Popen(
        [sys.executable, "-m", "diloco", "plan", str(DEMO)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert plan.stdout is not None
    plan.stdout.close()

    _, said = said_by(plan, 50)

    assert (plan.returncode, said) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("is_begun", [True, False], ids=["at-work", "before-it-begins"])
def test_ctrl_c_ends_a_command_at_once_though_a_thread_of_it_is_at_work(is_begun: bool) -> None:
    hangs = (
        "import sys, threading, time\n"
        "from diloco.cli import main\n"
        "def hang():\n"
        "    threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "    raise KeyboardInterrupt\n"
        f"{'main.app.command()(hang)' if is_begun else 'main.app = hang'}\n"
        "sys.argv = ['diloco', 'hang']\n"
        "main.main()\n"
    )

    ended = subprocess.run(
        [sys.executable, "-c", hangs], capture_output=True, text=True, timeout=60, check=False
    )

    assert (ended.returncode, ended.stderr) == (128 + signal.SIGINT, "interrupted\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sim check --json no/x.json", "--json no/x.json: there is no directory no; mkdir -p no"),
        ("sim goodput --plot no/x.png", "--plot no/x.png: there is no directory no"),
        ("bench race --plot x.jpeg", "--plot x.jpeg: give a path that ends with .png"),
        ("sim trace RUN.toml --out .", "--out .: is a directory; name a file in it"),
        ("sim validate --step-time 0s", "--step-time 0s: '0s' is not a duration: write a number"),
    ],
    ids=["json", "plot", "format", "directory", "no-step"],
)
def test_a_place_or_time_that_cannot_be_is_refused_before_the_work(line: str, said: str) -> None:
    page = CliRunner().invoke(app, line.split())

    assert isinstance(page.exception, ConfigError)
    assert said in str(page.exception)
