"""The page of exit codes has every code that a process of the product ends with, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from diloco.errors import DilocoError

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "diloco" / "TROUBLESHOOTING.md"
#: What ends a process with the code that it is given.
ENDS = {"typer.Exit", "sys.exit", "os._exit", "SystemExit"}
#: Constants that name a code.
NAMES = re.compile(r"EXIT_\w+|_STARTER_DIED|exit_code")
#: Of signals: 128 and their number.
SIGNALS = 128


def all_errors(kind: type[DilocoError]) -> list[type[DilocoError]]:
    return [kind, *(each for below in kind.__subclasses__() for each in all_errors(below))]


def numbers(node: ast.AST) -> set[int]:
    return {
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and type(each.value) is int
    }


def codes_in(tree: ast.Module) -> set[int]:
    """Return the numbers that a module gives to what ends a process, or to the name of a code."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ENDS:
            found |= set().union(*map(numbers, node.args))
        elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(NAMES.fullmatch(ast.unparse(target)) for target in targets):
                found |= numbers(node)
    return found


def codes_of_the_product() -> set[int]:
    found = {kind.exit_code for kind in all_errors(DilocoError)}
    for folder in ("diloco", "simulations"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= codes_in(ast.parse(path.read_text("utf-8")))
    return found


def test_every_exit_code_stands_on_the_page() -> None:
    listed = {int(code) for code in re.findall(r"^## (\d+)", PAGE.read_text("utf-8"), re.M)}

    assert codes_of_the_product() == listed
    assert SIGNALS in listed


def test_every_code_says_what_to_type() -> None:
    sections = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.M)[1:]

    for section in sections:
        code, text = section.split(":", 1)
        assert "`diloco " in text or code == "75", f"nothing to type for {code}"


def test_the_readme_leads_to_the_page() -> None:
    assert "(diloco/TROUBLESHOOTING.md)" in (ROOT / "README.md").read_text("utf-8")
