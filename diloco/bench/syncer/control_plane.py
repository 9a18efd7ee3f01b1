"""A real coordinator and its real syncer beside a bench, as processes of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from diloco.config.load import resolved_toml
from diloco.config.schema import Config
from diloco.errors import CoordinatorUnavailable
from diloco.launch.process.logs import tail
from diloco.state_dir import StateDir, read_endpoint, stop_syncer

_START_S = 60.0
_END_S = 20.0
_LOOK_S = 0.1


@contextlib.contextmanager
def control_plane(config: Config, *, cpu: int | None = None) -> Iterator[Path]:
    """Coordinate a run while the context lasts; nothing outlives it.

    Args:
        config: The run; its `coordinator.state_dir` does not exist yet.
        cpu: CPU to which coordinator and syncer are bound; None: any.

    Yields:
        The run file, as islands are to read it.

    Raises:
        CoordinatorUnavailable: If no coordinator answers in time; says what its log does.
    """
    state = StateDir(Path(config.coordinator.state_dir))
    state.create()
    run_file = state.root / "bench.toml"
    run_file.write_text(resolved_toml(config), encoding="utf-8")
    log = state.root / "coordinator.log"
    command = [sys.executable, "-m", "diloco", "coordinator", str(run_file)]
    with open(log, "ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        if cpu is not None:
            os.sched_setaffinity(process.pid, {cpu})  # before its first thread: all inherit it
        _wait_for_address(process, state, log)
        yield run_file
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)  # it ends by itself once the islands have finished
    finally:
        process.kill()
        process.wait()
        stop_syncer(state)


def _wait_for_address(process: subprocess.Popen[bytes], state: StateDir, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while (endpoint := read_endpoint(state.coordinator)) is None or not endpoint.address:
        if process.poll() is not None or time.monotonic() > deadline:
            raise CoordinatorUnavailable(
                f"the bench's coordinator did not start (exit code {process.returncode}); its "
                f"log says:\n{tail(log)}"
            )
        time.sleep(_LOOK_S)
