"""What is shown while something takes its time: on a terminal it moves, else a line now and then.

Everything is shown on the console that is given, which says whether it is a terminal and whether
it is quiet.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

import typer
from rich.console import Console

from diloco.launch.process.ending import Interrupted, StopRequest, note_signals

_T = TypeVar("_T")

_LINE_EVERY_S = 10.0
_LOOK_S = 1.0

#: Told (what is done, how much of it, of how much; 0: nobody knows).
Show = Callable[[str, int, int], None]


def output(json_target: str = "") -> Console:
    """Standard output for text as it is; nothing goes there where JSON is all that is wanted."""
    return Console(quiet=json_target == "-", markup=False, highlight=False, soft_wrap=True)


def notes(json_target: str = "") -> Console:
    """Standard error, likewise: progress never mixes with what is asked for."""
    quiet = json_target == "-"
    return Console(stderr=True, quiet=quiet, markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def stoppable() -> Iterator[StopRequest]:
    """Note signals; where the work takes one for its end, the command ends with its exit code."""
    try:
        with note_signals() as request:
            yield request
    except Interrupted as interrupted:
        raise typer.Exit(interrupted.exit_code) from None


def answering(work: Callable[[], _T]) -> _T:
    """Do work in a thread, so that Ctrl-C is answered while it is in code that is not Python's."""
    done = Future[_T]()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=run, name="work", daemon=True).start()
    return done.result()


@contextlib.contextmanager
def counting(console: Console) -> Iterator[Show]:
    """Show how much of some work is done: a bar, or lines."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            if done < progress.tasks[0].completed:  # the next work: its rate is another
                progress.reset(task)
            progress.update(task, description=what, completed=done, total=total or None)

        yield show


def _lines(console: Console) -> Show:
    last = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _LINE_EVERY_S:
            last = time.monotonic()
            of_all = f" of {total:,}" if total else ""
            console.print(f"{what}: {done:,}{of_all}", highlight=False, soft_wrap=True)

    return show


@contextlib.contextmanager
def waiting(
    console: Console, what: str | Callable[[], str], *, every_s: float = _LINE_EVERY_S
) -> Iterator[None]:
    """Show that something goes on and how long it has taken, until the block is left.

    Args:
        console: Where.
        what: In words; a function is asked again for every look, in a thread of its own.
        every_s: Seconds between two lines where `console` is no terminal.
    """
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    tell = what if callable(what) else lambda: what
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
            task = progress.add_task("" if callable(what) else what, total=None)
            with _repeating(lambda _: progress.update(task, description=tell()), _LOOK_S):
                yield
        return

    def line(elapsed_s: float) -> None:
        console.print(f"{tell()} ({elapsed_s:.0f} s)", highlight=False, soft_wrap=True)

    with _repeating(line, every_s):
        yield


@contextlib.contextmanager
def _repeating(show: Callable[[float], None], every_s: float) -> Iterator[None]:
    """Call `show` every so often with the seconds since the start, from a thread."""
    began = time.monotonic()
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(every_s):
            # A terminal that was closed shows nothing any more: no reason for the work to fail.
            with contextlib.suppress(OSError):
                show(time.monotonic() - began)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
