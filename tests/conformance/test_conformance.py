"""`diloco conformance`: byte vectors, the report of rows that pass, fail or cannot be made here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from diloco.compression.registry import CODECS
from diloco.conformance import check
from diloco.conformance.codecs import KEY, NUMEL, ByteVector, byte_vectors, values
from diloco.conformance.golden import golden_traces
from diloco.conformance.processes import NotConforming, codec_differences

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_gives_the_golden_bytes(name: str) -> None:
    payload = CODECS[name].encode(values(), KEY)

    found = ByteVector.of(payload, CODECS[name].decode(payload, NUMEL))

    assert not byte_vectors()[name].difference(found)


def test_the_file_has_every_codec() -> None:
    assert byte_vectors().keys() == CODECS.keys()


def test_a_codec_that_differs_is_named_with_both_beginnings() -> None:
    right = byte_vectors()
    found = {name: [asdict(vector), asdict(vector)] for name, vector in right.items()}
    wrong = replace(right["int8"], head="00ff", payload="0123")
    found["int8"][1] = asdict(wrong)

    (difference,) = codec_differences({**found, "int2": [asdict(right["int2"])] * 2})
    assert difference.startswith(
        "int8, as it came back: its payload begins with 00ff (4810 bytes), not "
        f"{right['int8'].head} (4810 bytes)"
    )
    assert codec_differences({**found, "int8": "CodecError: no"}) == ["int8: CodecError: no"]


def test_a_row_that_fails_is_named_and_one_that_is_not_here_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def differs() -> str:
        raise NotConforming(f"figures in {Path.home()}/x")

    monkeypatch.setattr(check, "golden_traces", lambda: golden_traces()[:1])
    monkeypatch.setattr(check, "_missing", lambda transport, device: f"no {device}")
    report = check.run(lambda *_: None, differs, transports=("grpc",))

    assert [(r["check"], r["transport"], r["device"], r["result"]) for r in report.rows] == [
        ("golden traces", "in memory", "cpu", "pass"),
        ("published numbers", "-", "cpu", "fail"),
        ("all", "grpc", "cpu", "not here"),
        ("all", "grpc", "cuda", "not here"),
    ]
    assert [r["said"] for r in report.rows[1:]] == ["figures in HOME/x", "no cpu", "no cuda"]
    (missed,) = report.missed
    assert missed.what == "checks that fail: published numbers (-, cpu)"


BROKEN = """
import diloco.compression.registry as registry
from diloco.compression.blocks import BlockCodec

right = BlockCodec.encode

def encode(self, values, key=0):
    payload = right(self, values, key)
    if self.name == "int4":
        payload[7] ^= 1
    return payload

BlockCodec.encode = encode
"""


def run_command(directory: Path, **environment: str) -> tuple[int, dict[str, object], str]:
    """Run the command; returns its exit code, its JSON and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "diloco", "conformance", "--json", "found.json"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": f"{directory}:{ROOT}", **environment},
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    return done.returncode, json.loads((directory / "found.json").read_text()), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_is_well_on_this_machine_and_the_file_names_no_host(tmp_path: Path) -> None:
    code, found, said = run_command(tmp_path)

    assert code == 0, said
    rows = found["rows"]
    assert isinstance(rows, list)
    here = {(row["check"], row["transport"], row["result"]) for row in rows}
    assert ("SIGKILL, stop, resume", "grpc", "pass") in here
    assert ("codecs' bytes", "mtls", "pass") in here
    text = (tmp_path / "found.json").read_text()
    assert os.uname().nodename not in text and str(Path.home()) not in text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_codec_broken_in_every_process_fails_its_rows(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)

    code, found, said = run_command(tmp_path)

    assert code == 1
    rows = found["rows"]
    assert isinstance(rows, list)
    failed = [row for row in rows if row["result"] == "fail"]
    assert {row["check"] for row in failed} == {"codecs' bytes"}, said
    assert all(row["said"].startswith("int4, as it sent: ") for row in failed)
