"""The bench of codecs: its rows, what it judges, and what it leaves as it was."""

from __future__ import annotations

import json
import math

import pytest
import torch

from diloco.bench import codec as bench
from diloco.bench.codec import SETTING, Setting, run_codec
from diloco.compression import compiled as compiling
from diloco.compression.registry import CODECS
from diloco.errors import ConfigError


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small vectors, and formulas that are taken for compiled ones."""
    monkeypatch.setattr(bench, "COMPILE_NUMEL", 1 << 14)
    monkeypatch.setattr(compiling, "COMPILE_NUMEL", 1 << 14)
    monkeypatch.setattr(compiling, "compiled", lambda formula: formula)
    for module in (bench, compiling):
        monkeypatch.setattr(module, "can_compile", lambda: True)


def setting(bar: float = 1e-9) -> Setting:
    return Setting(1 << 14, 1, {"int4": (bar, bar), "e2m1": (bar, bar)})


def test_every_codec_has_its_rows_and_figures() -> None:
    heard: list[tuple[int, int]] = []
    num_threads = torch.get_num_threads()

    report = run_codec(setting(), [], lambda done, total: heard.append((done, total)))

    rows = {(row["codec"], row["mode"]): row for row in report.rows}
    assert len(rows) == len(report.rows)
    assert {name for name, mode in rows if mode == "eager"} == set(CODECS)
    assert {name for name, mode in rows if mode == "compiled"} == {
        name for name in CODECS if name.startswith(("int", "e2", "e3"))
    }
    assert rows["int4", "compiled"]["bytes_per_value"] == 66 / 128
    assert rows["float32", "eager"]["relative_error"] == 0
    assert 0.08 < rows["int4", "eager"]["relative_error"] < 0.13
    assert all(math.isfinite(row[c.key]) for row in report.rows for c in report.columns[2:])
    assert heard == [(done, len(rows)) for done in range(len(rows) + 1)]
    assert torch.get_num_threads() == num_threads
    assert json.dumps(report.as_dict())


@pytest.mark.parametrize(("bar", "is_met"), [(1e-9, True), (1e9, False)])
def test_compiled_int4_and_e2m1_are_judged(bar: float, is_met: bool) -> None:
    report = run_codec(setting(bar), ["int4", "e2m1"], lambda done, total: None)

    assert [r.what for r in report.requirements] == [
        "int4 encode, compiled",
        "int4 decode, compiled",
        "e2m1 encode, compiled",
        "e2m1 decode, compiled",
    ]
    assert all(r.is_met == is_met and r.is_at_least for r in report.requirements)


def test_codecs_that_were_not_asked_for_are_not_judged() -> None:
    report = run_codec(setting(), ["int8", "float32"], lambda done, total: None)

    assert [row["codec"] for row in report.rows] == ["int8", "int8", "float32"]
    assert not report.requirements


def test_without_a_compiler_the_bars_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "can_compile", lambda: False)

    report = run_codec(setting(), ["int4"], lambda done, total: None)

    assert [row["mode"] for row in report.rows] == ["eager"]
    assert len(report.missed) == 2


def test_an_unknown_codec_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(ConfigError, match="codec 'int3' is unknown"):
        run_codec(setting(), ["int4", "int3"], lambda done, total: None)


def test_the_bars_are_those_that_were_asked_for() -> None:
    assert SETTING.bars == {"int4": (3.0, 1.6), "e2m1": (1.0, 1.0)}
    assert SETTING.numel == 4 << 20
