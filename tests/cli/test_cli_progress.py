"""What moves while something takes its time: on a terminal, and in a log."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import threading

import pytest
from rich.console import Console

from diloco.cli.terminal import progress
from diloco.cli.terminal.progress import answering, counting, waiting
from tests.waiting import wait_until


def console(*, is_terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=is_terminal, width=200), file


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "log"])
def test_waiting_says_again_and_again_what_it_waits_for(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LOOK_S", 0.01)
    shown, file = console(is_terminal=is_terminal)
    looks: list[int] = []

    def tell() -> str:
        looks.append(len(looks))
        return f"look {len(looks)}"

    with waiting(shown, tell, every_s=0.01):
        wait_until(lambda: "look 3" in file.getvalue())

    assert len(looks) >= 3
    assert ("look 1 (0 s)\n" in file.getvalue()) != is_terminal


def test_ctrl_c_is_answered_while_work_is_in_code_that_is_not_pythons() -> None:
    ended: list[bytes] = []
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))

    def work() -> None:
        ended.append(hashlib.pbkdf2_hmac("sha256", b"", b"", 5_000_000))  # seconds

    timer.start()
    with pytest.raises(KeyboardInterrupt):
        answering(work)

    assert not ended
    assert answering(lambda: 3) == 3
    with pytest.raises(ValueError, match="told"):
        answering(lambda: int("told"))


def test_what_is_over_at_once_leaves_nothing_in_a_log() -> None:
    shown, file = console(is_terminal=False)

    with waiting(shown, "thinking"), counting(shown) as show:
        show("reading", 1, 2)

    assert file.getvalue() == ""


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "log"])
def test_counting_shows_how_much_is_done(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    shown, file = console(is_terminal=is_terminal)

    with counting(shown) as show:
        for what in ("reading", "writing"):
            show(what, 500, 2000)
            wait_until(lambda what=what: what in file.getvalue())  # type: ignore[misc]

    expected = "25%" if is_terminal else "reading: 500 of 2,000\nwriting: 500 of 2,000\n"
    assert expected in file.getvalue()
