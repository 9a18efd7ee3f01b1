"""Where the CPU time of an island's outer loop goes: its own functions, timed where they run."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from diloco.island.exchange import contributions, staging
from diloco.island.lanes.shards import LaneShards

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Phase -> (owner, name) of the function that is it; critical ones run in the training thread.
CRITICAL_PHASES = {
    "collect": (LaneShards, "collect"),
    "distribute": (LaneShards, "distribute"),
}
IO_PHASES = {
    "pseudo-gradient": (contributions, "pseudo_gradient_"),
    "norm": (contributions, "l2_norm"),
    "encode": (contributions, "encode_with_feedback"),
    "decode and add": (staging, "apply_payload"),
    "digest of lanes": (staging, "lane_digest"),
}


class PhaseClock:
    """CPU seconds of every phase so far, by the clock of the thread that ran it."""

    def __init__(self) -> None:
        """Start at zero; `install` begins to count."""
        self._seconds = dict.fromkeys([*CRITICAL_PHASES, *IO_PHASES], 0.0)
        self._lock = threading.Lock()

    def install(self) -> None:
        """Wrap the functions for the rest of this process, which should be the bench's own."""
        for phase, (owner, name) in {**CRITICAL_PHASES, **IO_PHASES}.items():
            setattr(owner, name, self._timed(phase, getattr(owner, name)))

    def read(self) -> dict[str, float]:
        """Return the seconds so far, by phase."""
        with self._lock:
            return dict(self._seconds)

    def _timed(self, phase: str, function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def timed(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time() - began
                with self._lock:
                    self._seconds[phase] += spent

        return timed
