"""What peers say cannot forge a line of a log, nor command the terminal that shows it."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.launch.process import logs
from diloco.launch.process.logs import LogFormatter, bound_log, tail


def shown(message: str, error: Exception | None = None) -> str:
    info = (type(error), error, None) if error else None
    record = logging.LogRecord("who", logging.INFO, "", 0, "said %s", (message,), info)
    return LogFormatter().format(record)


def test_a_message_cannot_look_like_a_line_of_ours() -> None:
    forged = "2026-01-01 00:00:00,000 WARNING diloco: all is well"

    for text in (shown(f"x\n{forged}"), shown("x", ValueError(f"y\n{forged}"))):
        first, *rest = text.split("\n")
        assert " INFO who: said x" in first
        assert rest
        assert all(line.startswith("    ") for line in rest)


def test_control_characters_are_shown_not_sent() -> None:
    text = shown("a\x1b]0;title\x07b\rc\x9bd\u2028e\tf\u00e9")

    assert text.endswith("said a\\x1b]0;title\\x07b\\x0dc\\x9bd\\x2028e\tf\u00e9")


def test_the_last_lines_of_a_large_log_are_read_without_the_rest(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.seek(1 << 40)  # a sparse file
        file.write(b"\nlast but one\nlast\n")

    assert tail(log, 2) == "last but one\nlast"
    assert tail(tmp_path / "none") == ""


def test_a_log_that_somebody_fills_is_put_aside_and_its_process_writes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_MOST_BYTES", 100)
    log = tmp_path / "syncer.log"
    bound_log(log)
    with log.open("ab", buffering=0) as output:
        output.write(b"x" * 100)
        bound_log(log)
        assert log.stat().st_size == 100
        output.write(b"y")
        bound_log(log)
        output.write(b"news")

    assert log.read_bytes() == b"news"
    assert (tmp_path / "syncer.log.1").read_bytes() == b"x" * 100 + b"y"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["syncer.log", "syncer.log.1"]


def test_what_is_put_aside_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MOST_BYTES", 3)
    log, other = tmp_path / "syncer.log", tmp_path / "other"
    other.write_text("kept")
    (tmp_path / "syncer.log.1").symlink_to(other)
    log.write_text("news")

    bound_log(log)

    assert other.read_text() == "kept" and (tmp_path / "syncer.log.1").read_text() == "news"


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_a_process_bounds_the_file_that_a_shell_gave_it(tmp_path: Path, mode: str) -> None:
    log = tmp_path / "coordinator.log"
    code = (
        "import asyncio, os, sys\n"
        "from diloco.launch.process import logs\n"
        "logs._MOST_BYTES, logs._LOOK_S = 100, 0.01\n"
        "async def main():\n"
        "    task = asyncio.create_task(logs.bound_output())\n"
        "    await asyncio.sleep(0)\n"
        "    os.write(2, b'x' * 101)\n"
        "    while os.fstat(2).st_size:\n"
        "        await asyncio.sleep(0.01)\n"
        "    os.write(2, b'news')\n"
        "    task.cancel()\n"
        "asyncio.run(main())\n"
    )
    with log.open(mode) as output:
        subprocess.run([sys.executable, "-c", code], stderr=output, check=True)

    assert log.read_bytes() == b"news"
    assert (tmp_path / "coordinator.log.1").read_bytes() == b"x" * 101
