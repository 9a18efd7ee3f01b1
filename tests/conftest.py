"""Put the repository root on the path, so that tests (and the ranks they spawn) find each other.

Spawned processes inherit ``sys.path``; with it ``from tests.distributed import run_ranks`` works
from every test file, whichever way pytest was started.
"""

import gc
import os
import signal
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout
from hypothesis import settings

_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

# Started by nohup, or in the background of a script, tests would pass on that these are ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run besides each other: more threads would wait for each other in turns, spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where it is set, each process that a test starts would compile the whole product once more, and
# each of ours every test file.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# An example takes the time that a loaded machine gives it.
settings.register_profile("diloco", deadline=None)
settings.load_profile("diloco")

_LEAST_TIMER_S = 1.0
#: Folders with files of whole runs and of many ranks.
_LONGEST = ("trainer", "integration", "faults", "launch", "island")


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Count the timeout of a test in what the machine grants, as every wait of the tests does."""
    from tests.waiting import Patience  # found by the path above

    patience, is_over = Patience(settings.timeout), threading.Event()

    def watch() -> None:
        left_s = settings.timeout
        while not is_over.wait(max(left_s, _LEAST_TIMER_S)):
            if (left_s := patience.left_s()) <= 0:
                pytest_timeout.timeout_timer(item, settings)  # ends the process
                return

    thread = threading.Thread(target=watch, name="timeout of a test", daemon=True)

    def cancel() -> None:
        is_over.set()
        thread.join()

    item.cancel_timeout = cancel  # type: ignore[attr-defined]  # called by the plugin
    thread.start()
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep modules and tests, which live to the end, out of every later garbage collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that no core waits at the end for a file of minutes."""

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return _LONGEST.index(folder) if folder in _LONGEST else len(_LONGEST)

    items.sort(key=place)


def pytest_xdist_auto_num_workers() -> int:
    """Start a worker more than there are cores: much of what tests do is waiting for processes."""
    return (os.cpu_count() or 1) + 1
