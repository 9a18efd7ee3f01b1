"""`diloco data prepare`: whole or continued, and nothing of anybody else's overwritten."""

import os
import resource
import signal
import subprocess
import sys
import time
import tomllib
from itertools import count
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.data import prepare as module
from diloco.data.prepare import prepare
from diloco.errors import ConfigError
from tests.data.text_files import data_config, pieces, write_jsonl, write_stdlib, write_tokenizer

DEMO = Path(__file__).resolve().parents[2] / "configs" / "runs" / "demo.toml"


def quiet(*_):
    pass


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def config(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["", *pieces(200)])
    return data_config({"a": {"files": str(path)}}, tokenizer=str(write_tokenizer(tmp_path / "t")))


def test_what_was_interrupted_anywhere_goes_on_and_ends_with_the_same_bytes(
    config, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "_JOB_DOCUMENTS", 16)
    prepare(config, tmp_path / "whole", num_processes=1, show=quiet)
    out, starts = tmp_path / "out", count(1)
    shown = []

    def interrupt(_, done, total):
        shown.append((done, total))
        if len(shown) == 3:
            raise KeyboardInterrupt

    while not (out / "a.bin").exists():
        shown.clear()
        next(starts)
        try:
            prepare(config, out, num_processes=1, show=interrupt, sync_bytes=1000)
        except KeyboardInterrupt:
            for part in out.glob("*.part"):  # a write that was under way
                with part.open("ab") as file:
                    file.write(b"torn" * 99)

    assert next(starts) > 4
    assert shown[-1][0] == sum(len(text.encode()) for text in pieces(200)) < shown[-1][1]
    assert files_of(out) == files_of(tmp_path / "whole")
    assert files_of(out).keys() == {"a.bin", "a.idx", "a.prepared.json"}
    again = prepare(config, out, num_processes=1, show=interrupt)
    assert again == {"a": module.Prepared(out / "a.bin", 201, os.stat(out / "a.bin").st_size // 2)}


def test_a_file_that_was_cut_or_has_lost_its_index_is_written_again(config, tmp_path):
    out = tmp_path / "out"
    prepare(config, out, num_processes=1, show=quiet)
    whole = files_of(out)

    for damage in (lambda: os.truncate(out / "a.bin", 100), (out / "a.idx").unlink):
        damage()
        prepare(config, out, num_processes=1, show=quiet)
        assert files_of(out) == whole


def test_a_full_disk_is_named_and_the_next_start_goes_on(config, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(ConfigError, match=r"sources\.a: the disk is full below .* goes on"):
            prepare(config, tmp_path / "out", num_processes=1, show=quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    prepare(config, tmp_path / "out", num_processes=1, show=quiet)

    prepare(config, tmp_path / "whole", num_processes=1, show=quiet)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_files_of_other_text_or_another_tokenizer_stay(config, tmp_path):
    out = tmp_path / "out"
    prepare(config, out, num_processes=1, show=quiet)
    before = files_of(out)
    as_bytes = config.model_copy(update={"tokenizer": "bytes"})

    with pytest.raises(ConfigError, match="was not made of this text with this tokenizer"):
        prepare(as_bytes, out, num_processes=1, show=quiet)
    assert files_of(out) == before

    with pytest.raises(ConfigError, match=r"cannot write below .* choose another --out"):
        prepare(config, out / "a.bin", num_processes=1, show=quiet)

    named = data_config({"a": {"files": str(out / "a.bin")}})
    with pytest.raises(ConfigError, match="is a token file: there is nothing to do"):
        prepare(named, out, num_processes=1, show=quiet)


def test_the_command_prints_what_goes_into_the_run_file(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", pieces(20))
    sources = f'{{web = {{files = "{path}", weight = 3.0, repeat = true}}}}'
    out = tmp_path / "out"
    words = ["data", "prepare", str(DEMO), "--out", str(out), "--processes", "1"]

    page = CliRunner().invoke(
        app, [*words, "--set", "data.source=streams", "--set", f"data.sources={sources}"]
    )

    assert page.exit_code == 0, page.output
    expected = {"files": str(out / "web.bin"), "weight": 3.0, "repeat": True}
    assert tomllib.loads(page.stdout) == {"data": {"sources": {"web": expected}}}
    assert "web.bin: 20 documents" in page.stderr
    without = CliRunner().invoke(app, words)
    assert "has no table [data.sources.NAME]" in str(without.exception)


@pytest.mark.slow
def test_a_killed_command_leaves_no_process_and_goes_on(tmp_path):
    path = write_stdlib(tmp_path / "a.jsonl")
    path.write_bytes(path.read_bytes() * 12)
    tokenizer = write_tokenizer(tmp_path / "t")
    words = [sys.executable, "-m", "diloco", "data", "prepare", str(DEMO), "--processes", "2"]
    words += ["--set", "data.source=streams", "--set", f'data.sources={{a = {{files = "{path}"}}}}']
    words += ["--set", f"data.tokenizer={tokenizer}"]
    subprocess.run([*words, "--out", str(tmp_path / "whole")], check=True)
    out, num_killed = tmp_path / "out", 0

    while not (out / "a.bin").exists():
        command = subprocess.Popen([*words, "--out", str(out)], start_new_session=True)
        until = time.monotonic() + 2 + num_killed
        while command.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        if command.poll() is None:
            command.send_signal(signal.SIGKILL)
            num_killed += 1
        command.wait()
        for _ in range(200):
            try:
                os.killpg(command.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.05)
        else:
            pytest.fail("a process outlived the command")

    assert num_killed
    assert files_of(out) == files_of(tmp_path / "whole")
