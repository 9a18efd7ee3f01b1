"""Keeps the page of a run served next to its coordinator: a child process, so that it delays none.

Its socket is bound by the parent and kept: a page that is started again has the same address. It
ends with its parent, also with one that is killed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from diloco.config.network import OWN_TRANSPORTS
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.launch.process.children import end_all, last_words, spawn
from diloco.launch.process.logs import bound_log
from diloco.launch.process.restarts import RestartBudget

logger = logging.getLogger(__name__)

_FIRST_WAIT_S, _LONG_LIFE_S = 0.5, 30.0
_END_S = 2.0
_LINE_BYTES = 4096
#: What variables with credentials of the object store begin with: a page needs none.
_STORES = ("AWS_", "AZURE_", "GOOGLE_")


class PageProcess:
    """One page; `look` is to be called a few times a second and never waits.

    Args:
        config: The run.
        options: Of `diloco page`, as words, checked.
        listening: Where browsers reach it, bound; this object's from now on.
        announce: Called with the page's address, and with why there is none any more.
    """

    def __init__(
        self,
        config: Config,
        options: Sequence[str],
        listening: socket.socket,
        announce: Callable[[str], None],
    ) -> None:
        """Assign only."""
        self._config = config
        self._options = options
        self._listening = listening
        self._announce = announce
        self._log = Path(config.coordinator.state_dir) / "page.log"
        self._budget = RestartBudget(math.inf, _FIRST_WAIT_S, _LONG_LIFE_S)
        self._child: subprocess.Popen[bytes] | None = None
        self._said, self._has_announced = b"", False
        self._began = self._start_at = 0.0

    def look(self, address: str) -> None:
        """Start the page of the coordinator at `address`, or again where it has ended.

        Whatever fails here is logged: the run goes on.
        """
        try:
            self._look(address)
        except Exception:  # such as an output of the parent that nobody reads any more
            logger.exception("the run goes on, its page was not looked after")

    def _look(self, address: str) -> None:
        now = time.monotonic()
        if self._child is None:
            if now >= self._start_at:
                self._began = now
                try:
                    self._start(address)
                except OSError as error:  # no room for a process or its log: the run goes on
                    self._failed(f"it cannot be started: {error}")
            return
        bound_log(self._log)
        if not self._has_announced:
            self._read_address(self._child)
        if (code := self._child.poll()) is None:
            return
        self._drop(self._child)
        if code == ConfigError.exit_code:  # another start would only repeat it
            self._start_at = math.inf
            self._listening.close()
            command = shlex.join(["diloco", "page", *self._words(address)])
            self._announce(
                f"there is no page, the run goes on without; {last_words(self._log)}\nOnce the "
                f"cause is removed: {command}"
            )
            return
        self._failed(f"exit code {code}, see {self._log}")

    def close(self) -> None:
        """End it."""
        if self._child is not None:
            end_all([self._child], _END_S)
            self._drop(self._child)
        self._listening.close()

    def _drop(self, child: subprocess.Popen[bytes]) -> None:
        for pipe in filter(None, (child.stdin, child.stdout)):
            pipe.close()
        self._child = None

    def _failed(self, how: str) -> None:
        now = time.monotonic()
        wait_s = self._budget.failed(now - self._began)
        assert wait_s is not None, "as often as it takes"
        self._start_at = now + wait_s
        logger.warning("page ended, starting it again, wait_s=%g: %s", wait_s, how)

    def _words(self, address: str) -> list[str]:
        transport = self._config.transport
        own = transport.kind in OWN_TRANSPORTS
        words = [address if own else f"{transport.kind}://{address}"]
        words += [f"--certs={transport.certs}"] if transport.certs else []
        words += [f"--tokens={transport.tokens}"] if transport.tokens else []
        words += ["--insecure"] if transport.insecure else []
        return [*words, *self._options]

    def _start(self, address: str) -> None:
        number = self._listening.fileno()
        words = [*self._words(address), f"--descriptor={number}"]
        self._child = spawn(
            [sys.executable, "-m", "diloco", "page", *words],
            self._log,
            environment={k: v for k, v in os.environ.items() if not k.startswith(_STORES)},
            stdin=subprocess.PIPE,  # whose end tells it that this process is gone
            stdout=subprocess.PIPE,  # the log may be full
            inherited=[number],
        )
        self._said = b""
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)

    def _read_address(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        with contextlib.suppress(BlockingIOError):
            self._said += os.read(child.stdout.fileno(), _LINE_BYTES)
        line, end, _ = self._said.partition(b"\n")
        if end:
            self._has_announced = True
            self._announce(line.decode(errors="replace"))
