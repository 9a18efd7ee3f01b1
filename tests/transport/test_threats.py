"""The table of threats in transport/README.md is complete: each line has tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
README = TESTS.parent / "transport" / "README.md"


def threats() -> list[list[str]]:
    section = README.read_text(encoding="utf-8").split("\n## Threats\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_there_are_threats() -> None:
    assert len(threats()) > 20


@pytest.mark.parametrize("row", threats(), ids=lambda row: f"{row[0]}-{row[1]}"[:60])
def test_each_threat_has_a_defence_and_tests_that_exist(row: list[str]) -> None:
    _, what, defence, named = row

    assert what
    assert defence
    tests = re.findall(r"`([^`]+)`", named)
    assert tests
    for test in tests:
        path, name = test.split("::")
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        assert name in functions, f"{test} is named in {README} and does not exist"
