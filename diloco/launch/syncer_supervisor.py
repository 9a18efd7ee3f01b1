"""Keeps one syncer of a machine running: adopts the one that runs, or starts one.

Whether a syncer runs is read from the lock on its store, never from a pid: the syncer survives its
coordinator, and the next coordinator watches that lock where it cannot wait for a child.

Source: PROTOCOL.md, "Restart of a syncer".
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Collection

from diloco.errors import ConfigError
from diloco.launch.process.children import spawn
from diloco.launch.process.logs import bound_log, tail
from diloco.launch.process.restarts import RestartBudget
from diloco.state_dir import Held, StateDir, acquire, holder, read_endpoint, stop_syncer, write_pid

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
_FIRST_WAIT_S = 0.2
_MAX_WAIT_S = 5.0
_LONG_LIFE_S = 30.0
#: Exit codes (diloco/errors.py) that another start would only repeat: the run ends with them.
_HOPELESS = frozenset({2, 10, 20, 50})


class SyncerSupervisor:
    """Supervises one syncer of a state directory: the one whose paths `state` has."""

    def __init__(
        self,
        state: StateDir,
        *,
        on_hopeless: Callable[[str, int], None],
        on_ended: Callable[[str], None] = lambda reason: None,
        before_start: Callable[[], Awaitable[object]] | None = None,
        last_codes: Collection[int] = (),
    ) -> None:
        """Assign only.

        Args:
            state: As that syncer sees it.
            on_hopeless: Gets the reason and the exit code where no restart can help.
            on_ended: Gets the reason where it ended by itself and is started again.
            before_start: Awaited before each start.
            last_codes: Exit codes after which it is not started again, besides those.
        """
        self._state = state
        self._on_hopeless = on_hopeless
        self._on_ended = on_ended
        self._before_start = before_start
        self._last_codes = last_codes

    async def run(self) -> int:
        """Keep a syncer alive, until cancelled or until no restart can help; returns the exit code.

        A syncer that was killed (SIGKILL) while it served is replaced at once, as often as that
        happens. One that failed is replaced after 0.2 s, then twice as long each time, up to 5 s;
        one that lived for 30 s starts the count again.
        """
        budget = RestartBudget(math.inf, _FIRST_WAIT_S, _LONG_LIFE_S, _MAX_WAIT_S)
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            if self._before_start is not None:
                await self._before_start()
            try:
                child = self._start()
            except Held:
                pid = await self._watch()
                how, is_killed = f"process {pid} let go of its store", self._was_serving(pid)
            else:
                code = await self._wait(child)
                how = f"exit code {code}"
                is_killed = code == -signal.SIGKILL and self._was_serving(child.pid)
                if code in _HOPELESS:
                    self._on_hopeless(self._reason(), code)
                    return code
                if code in self._last_codes:
                    return code
            if is_killed:
                logger.warning("syncer was killed, starting it again at once: %s", how)
                budget.used = 0  # it had served: whatever failed before it does so no more
                continue
            wait_s = budget.failed(loop.time() - started)
            assert wait_s is not None, "as often as it takes"
            logger.warning("syncer ended, starting it again, wait_s=%.1f: %s", wait_s, how)
            self._on_ended(f"{self._reason()}; it is started again ({how})")
            await asyncio.sleep(wait_s)

    async def stop(self) -> None:
        """Stop the syncer, even one that was adopted; call it when `run` was cancelled."""
        await asyncio.to_thread(stop_syncer, self._state)

    def _reason(self) -> str:
        log = self._state.syncer_log
        return f"{self._state.syncer_name} ended, see {log}; its last word: {tail(log, 1)}"

    def _was_serving(self, pid: int | None) -> bool:
        """Whether this syncer served and left no word of its end, as every orderly end does."""
        try:
            endpoint = read_endpoint(self._state.syncer)
        except ConfigError as error:
            logger.error("%s", error)
            return False
        return endpoint is not None and endpoint.pid == pid and endpoint.address != ""

    async def _watch(self) -> int | None:
        pid = holder(self._state.store_lock)
        logger.info("%s adopted, pid=%s", self._state.syncer_name, pid)
        while holder(self._state.store_lock) is not None:
            await asyncio.sleep(_LOOK_S)
            await asyncio.to_thread(bound_log, self._state.syncer_log)
        return pid

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a syncer that holds its store already; raises Held if another one does."""
        lock = acquire(self._state.store_lock)
        arguments = [str(self._state.root), "--lock-descriptor", str(lock)]
        arguments += ["--name", self._state.syncer_name]
        try:
            command = [sys.executable, "-m", "diloco.launch.syncer", *arguments]
            # Its session is its own: it outlives this process and the terminal.
            child = spawn(command, self._state.syncer_log, inherited=[lock])
            write_pid(lock, child.pid)
        finally:
            os.close(lock)
        logger.info("%s started, pid=%d", self._state.syncer_name, child.pid)
        return child

    async def _wait(self, child: subprocess.Popen[bytes]) -> int:
        while (code := child.poll()) is None:
            await asyncio.sleep(_LOOK_S)
            await asyncio.to_thread(bound_log, self._state.syncer_log)
        return code
