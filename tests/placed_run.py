"""Runs whose syncers have machines of their own: real processes, a directory each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from diloco.bench.network.s3_server import BUCKET, S3Server, free_port
from diloco.chaos.bucket import Bucket
from diloco.checkpoint.fetch import fetch_run
from diloco.checkpoint.published import read_published
from diloco.config.load import load_config
from diloco.durable import read_json
from diloco.state_dir import StateDir, holder
from tests.run_files import write_run

ISLANDS = ("east", "west")
SYNCERS = ("eu", "us")


class PlacedRun:
    """A coordinator, two islands, two syncers, each process in a directory of its own."""

    def __init__(
        self, directory: Path, server: S3Server | Bucket, steps: int, **model: Any
    ) -> None:
        self.directory, self.server = directory, server
        port = free_port()
        islands = dict.fromkeys(ISLANDS, "")
        self.run_file = write_run(directory, islands, inner_steps=steps, **model)
        content = self.run_file.read_text()
        content = content.replace(
            'name = "test"', f'name = "test"\nstate = "s3://{BUCKET}/{directory.name}"'
        )
        content = content.replace(
            "[coordinator]",
            f'[coordinator]\naddress = "127.0.0.1:{port}"\nlisten = "127.0.0.1:{port}"',
        )
        content += "".join(f"\n[syncers.{name}]\n" for name in SYNCERS)
        self.run_file.write_text(content)
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, where: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command of the run on the machine `where`."""
        command = [sys.executable, "-m", "diloco", "--log-level", "info", arguments[0]]
        command += [str(self.run_file), *arguments[1:]]
        command += ["--set", f"coordinator.state_dir={self.directory / where}"]
        with (self.directory / f"{where}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **self.server.environment}
            )
        self.started.append(process)
        return process

    def start_all(self, *options: str) -> dict[str, subprocess.Popen[bytes]]:
        started = {"coordinator": self.start("control", "coordinator", *options)}
        started |= {n: self.start(n, "syncer", "--name", n, *options) for n in SYNCERS}
        started |= {n: self.start(n, "island", "--island", n, *options) for n in ISLANDS}
        return started

    def syncer(self, where: str, name: str) -> StateDir:
        return StateDir(self.directory / where).placed(name, SYNCERS.index(name))

    def num_versions(self, where: str, name: str) -> int:
        files = self.syncer(where, name).store.glob("fragment-*/v*.*")
        return max((int(path.name[1:13]) for path in files), default=0)

    def served(self, name: str, where: str = "") -> list[int]:
        """Fragments that a syncer names as its own; none before its first start has."""
        return list(read_json(self.syncer(where or name, name).fragments) or ())

    def num_starts(self, where: str = "control") -> list[int]:
        """How often each island has started, as the journal has it."""
        with contextlib.closing(
            sqlite3.connect(self.directory / where / "journal.sqlite")
        ) as there:
            rows = there.execute("SELECT value FROM entries WHERE key LIKE 'island/%'").fetchall()
        return [max(json.loads(value)["incarnations"].values()) for (value,) in rows]

    def has_checkpoint(self) -> bool:
        journal = self.directory / "control" / "journal.sqlite"
        if not journal.exists():
            return False
        with contextlib.closing(sqlite3.connect(journal)) as there:
            try:
                rows = there.execute("SELECT value FROM entries WHERE key = 'checkpoint'")
                return bool(rows.fetchall())
            except sqlite3.OperationalError:  # it is being made
                return False

    def pids(self, where: str, name: str) -> list[int]:
        state = self.syncer(where, name)
        locks = (state.coordinator_lock, state.store_lock)
        return [pid for lock in locks if (pid := holder(lock)) is not None]

    def signal(self, where: str, name: str, number: int) -> None:
        for pid in self.pids(where, name):
            os.kill(pid, number)

    def said(self) -> str:
        logs = sorted(self.directory.rglob("*.log"))
        return "\n".join(f"== {log}\n{log.read_text()[-2500:]}" for log in logs)

    def published(self) -> list[tuple[int, str]]:
        """Version and digest of each fragment, as the object store has them."""
        place = f"coordinator.state_dir={self.directory / 'copy'}"
        fetch_run(load_config(self.run_file, [place]), lambda line: None)
        there = read_published(StateDir(self.directory / "copy"))
        return [(each.version, each.digest) for each in there.fragments]

    def end(self) -> None:
        for where in (*SYNCERS, "other"):
            for name in SYNCERS:
                self.signal(where, name, signal.SIGCONT)
                self.signal(where, name, signal.SIGKILL)
        for process in self.started:
            process.kill()
            process.wait()
