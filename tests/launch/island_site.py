"""Islands without a coordinator, for tests of supervisors: their ranks meet, then wait for it.

Where nothing depends on what ranks do, they are idle ones.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.waiting import wait_until

RUN = """
[run]
name = "alone"
seed = 1
inner_steps = 4

[model]
preset = "tiny"

[data]
sequence_length = 32

[inner.optimizer]
lr = 2e-3

[outer]
preset = "classic"
inner_steps_per_round = 2

[coordinator]
state_dir = "state"

[islands.east]
ranks = 2
mesh = { dp_shard = 2 }
tokens_per_inner_step = 128

[islands.west]
ranks = 1
tokens_per_inner_step = 64
"""
_REAL = ("-m", "diloco")
#: Instead of it, where ranks need only live and die.
IDLE = (str(Path(__file__).with_name("idle_ranks.py")),)
#: Nobody listens there.
NOBODY = "127.0.0.1:9"
START_S = 90.0
END_S = 40.0


@dataclass
class Site:
    """Supervisors started in one directory; what they say goes to files."""

    root: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def output(self) -> Path:
        return self.root / "out"

    def start(
        self,
        island: str,
        *overrides: str,
        options: tuple[str, ...] = (),
        program: tuple[str, ...] = _REAL,
        **environ: str,
    ) -> subprocess.Popen[bytes]:
        arguments = ["island", "run.toml", "--island", island, "--coordinator", NOBODY]
        arguments += ["--output", "out", *options]
        arguments += [text for override in overrides for text in ("--set", override)]
        with open(self.root / f"said-{len(self.processes)}", "wb") as said:
            process = subprocess.Popen(
                [sys.executable, *program, *arguments],
                cwd=self.root,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
                stdout=said,
                stderr=said,
            )
        self.processes.append(process)
        return process

    def said(self, process: subprocess.Popen[bytes]) -> str:
        return (self.root / f"said-{self.processes.index(process)}").read_text()

    def end(self, process: subprocess.Popen[bytes], within_s: float = END_S) -> str:
        """Wait until a supervisor has ended; return what it said."""
        wait_until(lambda: process.poll() is not None, within_s)
        return self.said(process)

    def wait_for_ranks(self, *island_ranks: int, but: frozenset[int] = frozenset()) -> list[int]:
        """Wait until these ranks of east are at work, others than `but`; return their pids."""
        return [self._wait_for_rank(rank, but) for rank in island_ranks]

    def _wait_for_rank(self, island_rank: int, but: frozenset[int]) -> int:
        found: list[int] = []
        events = str(self.output.resolve() / f"events-east-{island_rank}.jsonl")

        def look() -> bool:
            ranks = {pid for process in self.processes for pid in children(process.pid)} - but
            found[:] = [pid for pid in ranks if has_open(pid, events)]
            return bool(found)

        wait_until(look, START_S)
        return found[0]

    def log(self, name: str) -> str:
        return (self.output / name).read_text()


@contextlib.contextmanager
def island_site(root: Path) -> Iterator[Site]:
    """Write the run file; at the end kill whatever is left."""
    (root / "run.toml").write_text(RUN)
    site = Site(root)
    try:
        yield site
    finally:
        for process in site.processes:
            for pid in [*children(process.pid), process.pid] if process.poll() is None else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def children(pid: int) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def has_open(pid: int, path: str) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(descriptor) == path:
                    return True
    return False


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
