"""The ranks of all islands of a baseline on this machine, started together and ended together.

    parent ── order (argument) ──> member         member: serves, then says where
    parent <── {"address", "store"} ── member     one line each
    parent ── all of these ──> member             one line; then standard input is held open
    parent <── result ── member                   the last line

A parent that dies closes its members' standard input, and they end. One member that ends early ends
all: a baseline has no fault tolerance.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.baseline.group import BaselineMember
from diloco.errors import IslandFailed, error_of_exit_code
from diloco.launch.process.children import end_all, how_ended, last_words, spawn

_LOOK_S = 0.05
_END_S = 5.0
_START_S = 120.0


@dataclass(slots=True)
class _Process:
    member: BaselineMember
    process: subprocess.Popen[bytes]
    log: Path
    said: list[dict[str, Any]] = field(default_factory=list)  # JSON values
    listening: threading.Thread | None = None

    def listen(self) -> None:
        """Collect the lines that it says, in a thread of its own."""
        stdout = self.process.stdout
        assert stdout is not None

        def collect() -> None:
            for line in stdout:
                self.said.append(json.loads(line))

        self.listening = threading.Thread(target=collect, daemon=True)
        self.listening.start()


class BaselineProcesses:
    """The processes; use it as a context manager, so that none outlives it."""

    def __init__(self, module: str, log_dir: Path, on_look: Callable[[], None]) -> None:
        """Start nothing yet.

        Args:
            module: Of every member, run with its order as the only argument.
            log_dir: Where ISLAND-RANK.log go.
            on_look: Called many times a second while members are waited for; what it raises ends
                them.
        """
        self._module, self._log_dir, self._on_look = module, log_dir, on_look
        self._processes: list[_Process] = []

    def __enter__(self) -> BaselineProcesses:
        """Start nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the members that still run."""
        end_all([each.process for each in self._processes], _END_S)
        for each in self._processes:
            for pipe in (each.process.stdin, each.process.stdout):
                assert pipe is not None
                if each.listening is not None:
                    each.listening.join(_END_S)
                pipe.close()

    @property
    def pids(self) -> Mapping[BaselineMember, int]:
        """Process of each member."""
        return {each.member: each.process.pid for each in self._processes}

    def start(
        self,
        member: BaselineMember,
        order: Mapping[str, Any],
        *,
        threads: int,
        prefix: Sequence[str] = (),
    ) -> None:
        """Start one member.

        Args:
            member: Who it is.
            order: JSON values that it is started with.
            threads: Of its arithmetic.
            prefix: Words before the command, to enter an island's network.
        """
        log = self._log_dir / f"{member.island}-{member.island_rank}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        log.unlink(missing_ok=True)
        process = spawn(
            [*prefix, sys.executable, "-m", self._module, json.dumps(order)],
            log,
            environment=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._processes.append(_Process(member, process, log))
        self._processes[-1].listen()

    def results(self) -> dict[BaselineMember, dict[str, Any]]:
        """Let members find each other, wait until all have ended, and give what each said last.

        Raises:
            IslandFailed: If one ended early, by name and with the end of its log; with the exit
                code of an error of ours, that error.
        """
        began = time.monotonic()
        self._wait(lambda: all(each.said for each in self._processes), until=began + _START_S)
        places = [
            {"island": each.member.island, "island_rank": each.member.island_rank, **each.said[0]}
            for each in self._processes
        ]
        for each in self._processes:
            stdin = each.process.stdin
            assert stdin is not None
            stdin.write(json.dumps(places).encode() + b"\n")
            stdin.flush()
        self._wait(lambda: all(each.process.poll() == 0 for each in self._processes))
        for each in self._processes:
            assert each.listening is not None
            each.listening.join()
        return {each.member: each.said[-1] for each in self._processes}

    def _wait(self, is_done: Callable[[], bool], until: float = float("inf")) -> None:
        while not is_done():
            self._check_alive()
            if time.monotonic() > until:
                missing = ", ".join(str(e.member) for e in self._processes if not e.said)
                raise IslandFailed(f"{missing} did not start within {_START_S:g} s")
            self._on_look()
            time.sleep(_LOOK_S)
        self._check_alive()

    def _check_alive(self) -> None:
        failed = [each for each in self._processes if each.process.poll()]
        if not failed:
            return
        # A member that was ended by a signal is the cause; the others miss it.
        first = min(failed, key=lambda each: each.process.returncode > 0)
        code = first.process.returncode
        kind = IslandFailed if code < 0 else error_of_exit_code(code)
        raise kind(
            f"{first.member} {how_ended(first.process)}, and the others do not go on without it; "
            f"{last_words(first.log)}"
        )
