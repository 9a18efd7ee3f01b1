"""diloco/PROTOCOL.md: its tests exist, its tables are the code's, what cites it cites a heading.

And each `Source:` line names such a heading, or a paper of the list in diloco/README.md.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from diloco.protocol.diagrams import diagrams

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "diloco" / "PROTOCOL.md").read_text(encoding="utf-8")
#: Heading -> text below it, code fences aside.
SECTIONS: dict[str, str] = dict(
    re.findall(
        r"^##+ (?:[\d.]+ )?(.+)\n((?:(?!##).*\n)*)", re.sub(r"(?ms)^```.*?^```", "", PAGE), re.M
    )
)
RULES = re.findall(r"^### [\d.]+ (.+)$", PAGE, re.M)
FOLDERS = ("diloco", "transport", "protos", "simulations", "tests", "configs")
#: `PROTOCOL.md, "Opening"`, with more headings after commas or `and`, over the ends of lines.
CITATION = re.compile(r'PROTOCOL\.md((?:,? (?:and )?"[^"]+")+)')


@cache
def functions_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@cache
def sources() -> dict[str, str]:
    """Text of each file that may cite the page, with one space for what parts its words."""
    files = [
        path
        for folder in FOLDERS
        for suffix in ("py", "proto", "md", "toml")
        for path in (ROOT / folder).rglob(f"*.{suffix}")
        if path != Path(__file__)
    ]
    return {
        str(path.relative_to(ROOT)): re.sub(r"\s+(?:(?:#|//) )?", " ", path.read_text("utf-8"))
        for path in [*files, ROOT / "README.md"]
    }


def test_the_state_tables_are_those_of_the_code() -> None:
    shown = PAGE.split("<!-- begin -->\n")[1].split("<!-- end -->")[0]

    assert shown == diagrams() + "\n", "print them again: python -m diloco.protocol.diagrams"


def test_headings_are_unique_and_the_page_is_short() -> None:
    headings = re.findall(r"^##+ (?:[\d.]+ )?(.+)$", PAGE, re.M)

    assert len(headings) == len(set(headings))
    assert len(RULES) > 50
    assert len(PAGE.splitlines()) <= 400


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_names_tests_that_exist(rule: str) -> None:
    tests = re.findall(r"`(tests/[^`]+)::([^`]+)`", SECTIONS[rule])

    assert tests
    missing = [f"{path}::{name}" for path, name in tests if name not in functions_in(path)]
    assert not missing


def test_each_citation_of_the_page_is_of_a_heading() -> None:
    cited = {
        (path, heading)
        for path, text in sources().items()
        for titles in CITATION.findall(text)
        for heading in re.findall(r'"([^"]+)"', titles)
    }

    assert len(cited) > 100
    unknown = sorted((path, title) for path, title in cited if title not in SECTIONS)
    assert not unknown


def test_no_file_names_a_page_that_is_not_in_the_repository() -> None:
    pages = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")}
    pages |= {path.name for path in ROOT.glob("*.md")}
    pages |= {path.stem for path in (ROOT / "configs").rglob("*.md.j2")}

    missing = sorted(
        (path, page)
        for path, text in sources().items()
        for page in re.findall(r"[\w-]+\.md\b", text)
        if page not in pages
    )
    assert not missing


PAPERS = (ROOT / "diloco" / "README.md").read_text("utf-8").split("\n## Papers\n")[1]
ARXIV = re.compile(r"\b\d{4}\.\d{5}\b")
#: The papers of the outer loop itself, of which a source says the place: equation, table, subject.
FAMILY = ("2311.08105", "2501.18512", "2604.21428", "2503.09799")
#: First authors of the papers that have no number.
AUTHORS = (
    "Bertsekas",
    "Brooker",
    "Conover",
    "GEMINI",
    "Graham",
    "Mathis",
    "Mudholkar",
    "Patarasuk",
    "Seide",
    "Steele",
    "Stone",
    "Turner",
)


def cited_sources() -> list[tuple[str, str]]:
    """Find the path and the text of each `Source:` paragraph of code."""
    return [
        (str(path.relative_to(ROOT)), " ".join(text.split()))
        for folder in ("diloco", "transport", "protos", "simulations")
        for path in (ROOT / folder).rglob("*.py")
        for text in re.findall(
            r'Source: ((?:(?!\n\s*\n|"""|\n\s+\w+:\n).)+)', path.read_text("utf-8"), re.DOTALL
        )
    ]


def test_each_source_is_a_heading_of_the_page_or_a_paper_of_the_list() -> None:
    listed = set(ARXIV.findall(PAPERS))
    sources = cited_sources()

    assert len(sources) > 100
    assert all(author in PAPERS for author in AUTHORS)
    nowhere = [
        (path, text)
        for path, text in sources
        if 'PROTOCOL.md, "' not in text
        and not ARXIV.search(text)
        and not any(author in text for author in AUTHORS)
    ]
    assert not nowhere
    unlisted = [(path, text) for path, text in sources if set(ARXIV.findall(text)) - listed]
    assert not unlisted


def test_a_source_says_where_in_a_paper_of_the_outer_loop() -> None:
    placed = {number: re.compile(rf"arXiv {number}(?:\)[:,]|,)? \w") for number in FAMILY}
    vague = [
        (path, text)
        for path, text in cited_sources()
        for number in ARXIV.findall(text)
        if number in FAMILY and not placed[number].search(text)
    ]

    assert not vague


def test_each_paper_that_files_name_is_in_the_list_and_each_of_the_list_is_named() -> None:
    named = {
        number
        for path, text in sources().items()
        if path != str(Path("diloco") / "README.md") and not path.startswith("tests")
        for number in ARXIV.findall(text)
    }
    listed = ARXIV.findall(PAPERS)

    assert len(listed) == len(set(listed))
    assert named == set(listed)
