"""All pages of the repository: their links, commands, options, keys and paths exist.

The loops that README.md and diloco/island/README.md show are run as they stand there by two islands
against a coordinator.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import diloco
from diloco.cli.main import app
from diloco.config.classes import explain
from diloco.config.schema import Config
from diloco.extensions import KINDS
from tests.waiting import said_by

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
TOP = ("configs", "diloco", "protos", "simulations", "tests", "transport")
PAGES = sorted([*ROOT.glob("*.md"), *(page for top in TOP for page in (ROOT / top).rglob("*.md"))])
LOOPS = {README: "own-loop.toml", ROOT / "diloco" / "island" / "README.md": "run.toml"}
ISLANDS = ("eu-west", "us-east")
TRACED = "\n[telemetry]\nprofile = { num_steps = 2, start_step = 5 }\n"
SESSION = ROOT / "diloco" / "island" / "session.py"
#: What looks like a key of a run file: a method of the wire, names in certificates, torchtitan's.
OTHER_NAMES = frozenset(
    {"transport.issue", "coordinator.diloco", "syncer.diloco", "checkpoint.interval"}
)


def each_page() -> list[object]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES]


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"(?ms)^```.*?^```$", "", page.read_text("utf-8"))


def spans(page: Path) -> list[str]:
    """Return what a page has between backticks, on one line each."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def anchors(page: Path) -> set[str]:
    """Return the names by which a link may point into a page."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", each_page())
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(target)

    assert not broken


@cache
def command_line() -> Any:
    return typer.main.get_command(app)


def options_of(command: Any) -> set[str]:
    """Return the options of a command; `diloco lab FILE` takes those of `diloco lab run FILE`."""
    default = getattr(command, "commands", {}).get("run")
    return ({"--help"} if default is None else options_of(default)) | {
        name
        for parameter in command.get_params(command.context_class(command))
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("-")
    }


@cache
def all_options() -> set[str]:
    waiting, found = [command_line()], set()
    for command in waiting:
        found |= options_of(command)
        waiting += getattr(command, "commands", {}).values()
    return found


def unknown_in(words: list[str]) -> list[str]:
    """Return what of a command line after `diloco` does not exist.

    A word may list alternatives, as in `pause|unpause`.
    """
    commands = [command_line()]
    while words and all(hasattr(command, "commands") for command in commands):
        if not re.fullmatch(r"[a-z][a-z|-]*", words[0]):
            break
        names = words[0].split("|")
        known = {name: command.commands[name] for command in commands for name in command.commands}
        if unknown := [name for name in names if name not in known]:
            return unknown
        commands = [known[name] for name in names]
        words = words[1:]
    given = {option for word in words for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", word)}
    return sorted(given - set[str]().union(*(options_of(command) for command in commands)))


@pytest.mark.parametrize("page", each_page())
def test_commands_and_options_exist(page: Path) -> None:
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    unknown = []
    for text in [*spans(page), *lines]:
        command = re.match(r"(?:sudo )?diloco ([^#]*)", text)
        if command:  # what follows `--` is another command
            inner = re.split(r" -- |`", command[1])
            unknown += [(text, wrong) for wrong in unknown_in(inner[0].split())]
        elif text.startswith("--") and "." not in text.split()[0]:
            option = re.split(r"[ =]", text)[0]
            unknown += [(text, option)] if option not in all_options() else []

    assert not unknown


@cache
def keys() -> set[str]:
    """Return every key of a run file and every section above one."""
    paths = [row.path for row in explain(Config)]
    return {path.rsplit(".", depth)[0] for path in paths for depth in range(path.count(".") + 1)}


@pytest.mark.parametrize("page", each_page())
def test_keys_exist(page: Path) -> None:
    sections = {key.split(".")[0] for key in keys() if "." in key}
    unknown = []
    for span in spans(page):
        key = re.split(r" ?= ?|\[|\(|:", span)[0]
        if not re.fullmatch(r"[a-z]+(\.\w+)+", key) or key.split(".")[0] not in sections:
            continue
        is_of_the_loop = key.startswith("outer.") and key.split(".")[1] in names_in(SESSION)
        is_file = key.endswith((".toml", ".pem", ".json"))
        if not is_of_the_loop and not is_file and key not in keys() | OTHER_NAMES:
            unknown.append(key)

    assert not unknown


def exists(path: str, page: Path) -> bool:
    """Say whether a path, or the pattern of one, is there: from the root, the page or tests."""
    bare = path.rstrip("/").split("::")[0]
    return any(any(folder.glob(bare)) for folder in (ROOT, page.parent, ROOT / "tests"))


@cache
def names_in(module: Path) -> set[str]:
    tree = ast.parse(module.read_text("utf-8"))
    found = ("name", "id", "attr")
    return {
        str(getattr(node, kind)) for node in ast.walk(tree) for kind in found if hasattr(node, kind)
    }


@pytest.mark.parametrize("page", each_page())
def test_paths_and_modules_exist(page: Path) -> None:
    missing = []
    for span in spans(page):
        if re.fullmatch(rf"(?:{'|'.join(TOP)})/[\w./*-]*(?:::\w+)?", span):
            missing += [] if exists(span, page) else [span]
        if re.fullmatch(r"(?:\w+/)*test_\w+\.py::\w+", span):
            path, name = span.removeprefix("tests/").split("::")
            found = ROOT / "tests" / path
            missing += [] if found.exists() and name in names_in(found) else [span]
        if re.fullmatch(r"diloco(?:\.\w+)+", span) and span not in KINDS:
            missing += [] if importable(span) else [span]

    assert not missing


def importable(dotted: str) -> bool:
    """Say whether a module of the project is there, or one that defines the last name."""
    above, _, name = dotted.rpartition(".")
    if above == "diloco" and hasattr(diloco, name):
        return True
    parent = find_spec(above)
    if parent is None or (parent.submodule_search_locations and find_spec(dotted)):
        return parent is not None
    return parent.origin is not None and name in names_in(Path(parent.origin))


def test_the_readme_is_short() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 150


def test_the_files_to_read_first_are_there() -> None:
    page = ROOT / "diloco" / "README.md"
    section = page.read_text("utf-8").split("\n## Read this first\n")[1].split("\n## ")[0]
    entries = re.findall(r"^\d+\. .+$", section, re.M)

    assert len(entries) == 14
    for entry in entries:
        files = re.findall(r"\[([^\]]+\.py)\]\(([^)]+)\)", entry)
        assert files
        assert all(name == path and (page.parent / path).is_file() for name, path in files)


def start(
    directory: Path, *arguments: str, env: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def check_recorded(directory: Path) -> None:
    """Check what a run leaves whose loops are the users': the same as `diloco local` does."""
    result = CliRunner().invoke(app, ["report", LOOPS[README]])
    assert result.exit_code == 0, result.output
    state = directory / "runs" / "own-loop"
    summary = json.loads((state / "summary.json").read_text())
    assert (summary["are_digests_equal"], summary["are_versions_recomputed"]) == (True, True)
    assert [(i["island"], i["num_steps"]) for i in summary["islands"]] == [(i, 60) for i in ISLANDS]
    assert sorted(path.name for path in (state / "plots").iterdir()) == ["loss.png", "timeline.png"]
    for island in ISLANDS:
        assert (state / "telemetry" / "traces" / f"{island}-0-steps-6-7.json.gz").exists()
        lines = (state / "telemetry" / f"events-{island}-0.jsonl").read_text().splitlines()
        told = [event for event in map(json.loads, lines) if event["kind"] == "inner_step"]
        assert all(0 < event["loss"] < 3 for event in told)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", LOOPS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_loop_of_a_page_trains(
    tmp_path: Path, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file, (script,) = LOOPS[page], blocks(page, "python")
    shown = blocks(page, "toml") or [
        (ROOT / "configs" / "examples" / "2-own-loop" / run_file).read_text()
    ]
    (tmp_path / run_file).write_text(shown[0] + TRACED)
    assert 'island="eu-west"' in script
    for island in ISLANDS:
        (tmp_path / f"{island}.py").write_text(script.replace("eu-west", island))

    coordinator = start(tmp_path, "-m", "diloco", "coordinator", run_file)
    processes = [coordinator]
    try:
        assert coordinator.stdout is not None
        assert "listens on" in coordinator.stdout.readline()
        processes += [start(tmp_path, f"{island}.py") for island in ISLANDS]
        for process in reversed(processes):
            output, _ = said_by(process, 120)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.communicate()

    east, west = (torch.load(tmp_path / f"{island}-model.pt") for island in ISLANDS)
    assert all(torch.equal(east[name], west[name]) for name in east)
    kept = ["20", "40"] if "checkpoint_due" in script else []
    for island in ISLANDS:
        found = sorted(path.stem for path in tmp_path.glob(f"{island}-[0-9]*.pt"))
        assert found == [f"{island}-{step}" for step in kept]
    if page == README:
        monkeypatch.chdir(tmp_path)
        check_recorded(tmp_path)
