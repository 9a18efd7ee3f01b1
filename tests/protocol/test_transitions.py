"""The table of moves, and diloco/FAILURES.md names tests that exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.protocol.diagrams import diagrams
from diloco.protocol.island.ledger import OUTCOMES, Verdict
from diloco.protocol.rounds.terms import Phase
from diloco.protocol.rounds.transitions import TRANSITIONS, RoundEvent, after

TESTS = Path(__file__).resolve().parents[1]
README = TESTS.parent / "diloco" / "FAILURES.md"


def rows(section: str) -> list[list[str]]:
    text = README.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_command_prints_the_diagrams() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "diloco.protocol.diagrams"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert printed.stdout == diagrams() + "\n"


def test_every_phase_event_and_outcome_is_in_a_table() -> None:
    assert {t.before for t in TRANSITIONS} | {t.after for t in TRANSITIONS} == set(Phase)
    assert {t.event for t in TRANSITIONS} == set(RoundEvent)
    assert {o.verdict for o in OUTCOMES} == set(Verdict)
    assert after(Phase.LOST, RoundEvent.OPENED) is None
    assert len({(t.before, t.event) for t in TRANSITIONS}) == len(TRANSITIONS)


def test_there_are_failures() -> None:
    assert len(rows("What fails")) > 25


@pytest.mark.parametrize(
    "row", rows("What fails"), ids=lambda row: re.sub(r"\W+", "-", row[0])[:60]
)
def test_each_row_names_tests_that_exist(row: list[str]) -> None:
    assert all(row)
    tests = re.findall(r"`([^`]+)`", row[-1])
    assert tests
    for test in tests:
        path, name = test.split("::")
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        assert name in functions, f"{test} is named in {README} and does not exist"
