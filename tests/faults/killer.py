"""Who kills processes of a real run while it goes on."""

from __future__ import annotations

import threading

from diloco.launch.local import LocalRun


class Killer(threading.Thread):
    """Kills processes of a run, so many times, until `is_over`; how is for `run` to say."""

    def __init__(self, run: LocalRun, num_kills: int) -> None:
        super().__init__(daemon=True)
        self.run_ = run
        self.num_kills = num_kills
        self.is_over = threading.Event()

    def let_run(self) -> int:
        """Have the run come to its end besides this; returns its exit code."""
        self.run_.start()
        self.start()
        try:
            code = self.run_.wait(lambda: None)
        finally:
            self.is_over.set()
            self.join()
        self.run_.wait_for_coordinator()
        return code
