"""The bench of codecs: its rows, what it judges, and what it leaves as it was."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from diloco.bench.outer_loop import codec as bench
from diloco.bench.outer_loop.byte_model import ByteTask, pseudo_gradient
from diloco.bench.outer_loop.codec import SETTING, CodecSetting, run
from diloco.bench.outer_loop.codec_wire import WireSetting
from diloco.compression import compiled as compiling
from diloco.compression.compiled import COMPILE_NUMEL, can_compile
from diloco.compression.registry import CODECS
from diloco.errors import ConfigError

LANE, LARGE = 1 << 14, 1 << 15


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small vectors, formulas that are taken for compiled ones, and no GPU."""
    monkeypatch.setattr(compiling, "COMPILE_NUMEL", LANE)
    monkeypatch.setattr(compiling, "_prepared", {})
    monkeypatch.setattr(compiling, "compiled", lambda formula: formula)
    monkeypatch.setattr(bench, "can_compile", lambda device="cpu": device == "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "pseudo_gradient", lambda *_, **__: bench._values(LANE))


def setting(bar: float = 1e-9, wire_codecs: Sequence[str] = ()) -> CodecSetting:
    return CodecSetting(
        lane_numel=LANE,
        numel=LARGE,
        gpu_numel=LARGE,
        repetitions=1,
        bars={"int4": (bar, bar), "e2m1": (bar, bar)},
        stretch={"int4": (bar, 1e12)},
        gpu_codecs=["int4"],
        gpu_share=0.5,
        wire=WireSetting(slow_bps=50e6, slow_bytes=4 << 20, fast_bytes=1 << 20, repetitions=1),
        wire_codecs=wire_codecs,
    )


def test_every_codec_has_its_rows_and_figures() -> None:
    heard: list[tuple[str, int, int]] = []
    num_threads = torch.get_num_threads()

    report = run(lambda *told: heard.append(told), setting=setting())

    rows = {(row["codec"], row["mode"], row["numel"]): row for row in report.rows}
    assert len(rows) == len(report.rows)
    assert {(name, numel) for name, mode, numel in rows if mode == "eager"} == {
        (name, LANE) for name in CODECS
    }
    assert {(name, numel) for name, mode, numel in rows if mode == "compiled"} == {
        (name, numel)
        for name in CODECS
        if name.startswith(("int", "e2", "e3"))
        for numel in (LANE, LARGE)
    }
    assert rows["int4", "compiled", LARGE]["bytes_per_value"] == 66 / 128
    assert rows["float32", "eager", LANE]["relative_error"] == 0
    assert 0.08 < rows["int4", "eager", LANE]["relative_error"] < 0.13
    speeds, zstd = report.columns[2:-7], report.columns[-7:-3]
    assert all(math.isfinite(row[c.key]) for row in report.rows for c in speeds)
    for row in report.rows:
        assert all((row.get(c.key) is None) == (row["mode"] != "eager") for c in zstd)
    # Codes of few levels have less than their bits of entropy; floats' exponents, too.
    assert 1.1 < rows["int4", "eager", LANE]["zstd_ratio"] < 1.3
    assert rows["int4", "eager", LANE]["zstd_below_mbps"] > 0
    assert heard == [("codecs", done, len(rows)) for done in range(len(rows))]
    assert torch.get_num_threads() == num_threads
    assert json.dumps(report.as_dict())


@pytest.mark.parametrize(("bar", "is_met"), [(1e-9, True), (1e9, False)])
def test_compiled_int4_and_e2m1_are_judged(bar: float, is_met: bool) -> None:
    report = run(lambda *_: None, ["int4", "e2m1"], setting=setting(bar))

    judged = [r for r in report.requirements if not r.is_stretch]
    assert [r.what for r in judged] == [
        f"{name} {what}, compiled, {numel} values"
        for name in ("int4", "e2m1")
        for numel in ("16,384", "32,768")
        for what in ("encode", "decode")
    ]
    assert all(r.is_met == is_met and r.is_at_least for r in judged)
    assert report.missed == ([] if is_met else judged)
    hoped = [r for r in report.requirements if r.is_stretch]
    assert [(r.limit, r.is_met) for r in hoped] == [(1e12, False)] * 2


def test_codecs_that_were_not_asked_for_are_not_judged() -> None:
    report = run(lambda *_: None, ["int8", "float32"], setting=setting())

    assert [row["codec"] for row in report.rows] == ["float32"] + ["int8"] * 3
    assert not report.requirements


def test_without_a_compiler_the_bars_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "can_compile", lambda device="cpu": False)

    report = run(lambda *_: None, ["int4"], setting=setting())

    assert [row["mode"] for row in report.rows] == ["eager"]
    assert len(report.missed) == 4


def test_zstd_pays_below_the_rate_at_which_it_takes_as_long_as_it_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "_cpu_s", lambda work: work() and 0.25)

    row = bench._zstd(bytes(1 << 22))  # next to nothing packed

    assert row["zstd_gb_per_s"] == row["unzstd_gb_per_s"] == pytest.approx(4 * 2**22 * 1e-9)
    assert row["zstd_below_mbps"] == pytest.approx(8 * 2**22 / 0.5 / 1e6, rel=1e-3)


def test_what_crosses_a_slow_wire_is_what_zstd_leaves_of_it() -> None:
    names = ("int2", "topk64")
    report = run(lambda *_: None, names, setting=setting(wire_codecs=names))

    rows = {row["codec"]: row for row in report.rows if row["mode"] == "eager"}
    for row in rows.values():
        assert row["wire_ratio"] == pytest.approx(row["zstd_ratio"], rel=0.03)
    judged = {r.what: r for r in report.requirements}
    assert list(judged) == ["int2, slow wire", "int2, loopback", "topk64, loopback"]
    assert judged["int2, slow wire"].limit == pytest.approx(2 - 1 / rows["int2"]["zstd_ratio"])


def test_a_pseudo_gradient_is_what_an_island_would_send() -> None:
    task = ByteTask(sequences=2, sequence_length=16)

    delta = pseudo_gradient(task, 1, first=0, inner_steps=1)

    assert delta.dtype == torch.float32 and delta.dim() == 1
    assert delta.numel() % 128 == 0 and delta.isfinite().all()
    assert (delta != 0).float().mean() > 0.5


def test_an_unknown_codec_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(ConfigError, match="--rows int3 matches no codec"):
        run(lambda *_: None, ["int4", "int3"], setting=setting())


def test_the_bars_are_those_that_were_asked_for() -> None:
    assert SETTING.bars == {"int4": (3.0, 1.6), "e2m1": (1.0, 1.0)}
    assert SETTING.stretch == {"int4": (3.0, 2.5), "e2m1": (1.5, 1.5)}
    assert (SETTING.numel, SETTING.gpu_share) == (4 << 20, 0.5)
    assert COMPILE_NUMEL <= SETTING.lane_numel == 1536 << 10


@pytest.mark.gpu
@pytest.mark.skipif(not can_compile("cuda"), reason="no CUDA device, or nothing compiles for it")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_gpu_has_rows_and_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(compiling, "_prepared", {})
    small_gpu = replace(setting(), lane_numel=COMPILE_NUMEL, gpu_numel=2 * COMPILE_NUMEL)

    report = run(lambda *_: None, ["int4"], setting=small_gpu)

    assert [row["mode"] for row in report.rows][-1] == "GPU"
    assert [r.what for r in report.requirements][-2:] == ["int4 encode, GPU", "int4 decode, GPU"]
    assert all(math.isfinite(r.figure) for r in report.requirements[-2:])
