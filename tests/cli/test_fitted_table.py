from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from diloco.bench.outer_loop.codec import _COLUMNS as CODEC
from diloco.bench.syncer.syncer import _COLUMNS as SYNCER
from diloco.bench.training.plain import _COLUMNS as PLAIN
from diloco.bench.training.race import _COLUMNS as RACE
from diloco.cli.terminal.fitted_table import print_rows
from diloco.report.rows import Column

WORDS = st.lists(st.text("abcxyz", min_size=1, max_size=12), min_size=1, max_size=4).map(" ".join)


def shown(columns: list[Column], rows: list[dict[str, Any]], width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    print_rows(console, columns, rows, "a title")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@settings(max_examples=30)
@given(st.data())
def test_no_word_is_torn_and_no_line_is_too_long(data: st.DataObject) -> None:
    texts = data.draw(st.lists(WORDS, min_size=1, max_size=2))
    figures = data.draw(st.lists(WORDS, max_size=15))
    columns = [Column(f"t{i}", text) for i, text in enumerate(texts)]
    columns += [Column(f"f{i}", text, ".1f") for i, text in enumerate(figures)]
    value = {True: st.floats(0, 1e6), False: WORDS}
    row = st.fixed_dictionaries({c.key: value[bool(c.form)] for c in columns})
    rows = data.draw(st.lists(row, min_size=1, max_size=3))

    width = data.draw(st.sampled_from((60, 80, 200)))

    page = shown(columns, rows, width)

    words = page.split()
    assert all(len(line) <= width for line in page.splitlines())
    for column in columns:
        for text in (column.heading, *(column.cell(row) for row in rows)):
            assert set(text.split()) <= set(words)


def test_what_does_not_fit_besides_stands_below_under_the_same_names() -> None:
    columns = [Column("row", "row"), *(Column(f"f{i}", f"figure-{i}", "d") for i in range(4))]

    page = shown(columns, [{"row": "one", **{f"f{i}": i for i in range(4)}}], width=30)

    lines = [line.split() for line in page.splitlines()]
    assert lines == [
        ["a", "title"],
        ["row", "figure-0", "figure-1"],
        ["one", "0", "1"],
        ["row", "figure-2", "figure-3"],
        ["one", "2", "3"],
    ]


def test_a_column_without_any_figure_is_left_out_and_a_zero_is_one() -> None:
    columns = [Column("row", "row"), Column("none", "none", ".1f"), Column("zero", "zero", ".1f")]

    page = shown(columns, [{"row": "[bold]one", "none": None, "zero": 0.0}])

    assert "none" not in page
    assert "0.0" in page
    assert "[bold]one" in page


@pytest.mark.parametrize(
    ("columns", "texts", "tables"),
    [
        pytest.param(RACE, {"method": "diloco-float32"}, 1, id="race"),
        pytest.param(PLAIN, {"model": "debug"}, 1, id="plain"),
        pytest.param(CODEC, {"codec": "top-k-32", "mode": "compiled"}, 2, id="codec"),
        pytest.param(SYNCER, {}, 2, id="syncer"),
    ],
)
def test_tables_of_benches_fit_80_columns(
    columns: tuple[Column, ...], texts: dict[str, str], tables: int
) -> None:
    figures = {c.key: 1234 if c.form.startswith(",") else 1 for c in columns if c.form}
    row = {c.key: figures.get(c.key, texts.get(c.key, "64MiB")) for c in columns}

    page = shown(list(columns), [row])

    words = page.split()
    assert all(set(c.heading.split()) <= set(words) for c in columns)
    assert words.count(columns[0].heading) == tables
