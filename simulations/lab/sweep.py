"""Runs points of laboratories, several at once, and finds what was found before.

Every point is kept when it is done, by the process that made it: when some are killed, a second
start goes on with the points that are missing.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.sharedctypes
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.simulations.lab.cache import Cache
from diloco.simulations.lab.point import LabPoint
from diloco.simulations.lab.run import Result, run_point, write_start
from diloco.simulations.lab.timeline import LabTimeline

_LOOK_S = 0.5

#: Told (what is done, planned inner steps done, of how many).
Show = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Finished:
    """Results of points, in the order of these, and how many of them were found and not trained."""

    results: list[Result]
    num_cached: int


def run_points(
    points: Sequence[LabPoint],
    cache: Cache,
    *,
    num_processes: int,
    show: Show = lambda what, done, total: None,
    timeline: LabTimeline | None = None,
) -> Finished:
    """Give every point's result, of the cache or trained now.

    Args:
        points: Points of equal fingerprints are trained once.
        cache: Where results are and go.
        num_processes: Spawned at once; 1 trains here.
        show: Hears how many points and planned inner steps are done, of those that are missing;
            the last of a point's when the point is done, for it may make more than planned.
        timeline: Of the only point, which is trained for it even if its result is there.
    """
    cache.prepare()
    missing: dict[str, LabPoint] = {}
    for point in points:
        if timeline is not None or cache.result(point) is None:
            missing.setdefault(point.fingerprint(), point)
    num_cached = len({point.fingerprint() for point in points}) - len(missing)
    starts = _missing_starts(missing.values(), cache)
    total = sum(map(_num_steps, missing.values())) + sum(p.lab.warm_steps for p in starts)

    def show_done(num_points: int, num_steps: int) -> None:
        of_points = f"{num_points} of {len(missing)} points, " if len(missing) != 1 else ""
        show(f"{of_points}inner steps", num_steps, total)

    if num_processes > 1 and len(missing) + len(starts) > 1:
        _train_in_processes(list(missing.values()), starts, cache, num_processes, show_done)
    else:
        _train_here(list(missing.values()), starts, cache, show_done, timeline)
    results = []
    for point in points:
        result = cache.result(point)
        assert result is not None, "it was kept when it was done"
        results.append(result)
    return Finished(results, num_cached)


def _missing_starts(points: Iterable[LabPoint], cache: Cache) -> list[LabPoint]:
    """Give one point for each state after warm steps that is not there yet."""
    starts: dict[Any, LabPoint] = {}
    for point in points:
        path = cache.start(point)
        if path is not None and not path.exists():
            starts.setdefault(path, point)
    return list(starts.values())


def _num_steps(point: LabPoint) -> int:
    """Count the inner steps of a point, of all islands: what progress is measured in."""
    steps = point.config.run.inner_steps - point.lab.warm_steps
    return steps * (1 if point.lab.method == "data_parallel" else len(point.config.islands))


class _Planned:
    """Counts the inner steps of one point as planned, however many it makes."""

    def __init__(self, num_steps: int, count: Callable[[int], None]) -> None:
        """Have `num_steps` to count."""
        self._left, self._count = num_steps, count

    def step(self) -> None:
        """Count an inner step, but not the last one of the plan."""
        if self._left > 1:
            self._left -= 1
            self._count(1)

    def end(self) -> None:
        """Count what is left."""
        self._count(self._left)


def _train(
    cache: Cache, point: LabPoint, count: Callable[[int], None], timeline: LabTimeline | None = None
) -> None:
    planned = _Planned(_num_steps(point), count)
    cache.keep(point, run_point(point, cache.start(point), planned.step, timeline))
    planned.end()


def _write_start(cache: Cache, point: LabPoint, count: Callable[[int], None]) -> None:
    planned = _Planned(point.lab.warm_steps, count)
    cache.keep_start(point, lambda path: write_start(point, path, planned.step))
    planned.end()


def _train_here(
    points: Sequence[LabPoint],
    starts: Sequence[LabPoint],
    cache: Cache,
    show_done: Callable[[int, int], None],
    timeline: LabTimeline | None,
) -> None:
    num_points = num_steps = 0

    def count(more: int) -> None:
        nonlocal num_steps
        num_steps += more
        show_done(num_points, num_steps)

    for point in starts:
        _write_start(cache, point, count)
    for point in points:
        _train(cache, point, count, timeline)
        num_points += 1
    show_done(num_points, num_steps)


# -- several processes -----------------------------------------------------------------------------

_done: multiprocessing.sharedctypes.Synchronized[int] | None = None


def prepare_process(done: multiprocessing.sharedctypes.Synchronized[int]) -> None:
    """Set up a spawned process: the counter of steps, and an end once its parent is no more."""
    global _done
    _done = done
    logging.getLogger().setLevel(logging.ERROR)  # what is lost on purpose is no news
    parent = multiprocessing.parent_process()
    assert parent is not None, "spawned"

    def watch() -> None:
        parent.join()
        os._exit(1)  # nothing is lost: what is done was kept

    threading.Thread(target=watch, daemon=True).start()


def _count(more: int) -> None:
    assert _done is not None, "prepared"
    with _done.get_lock():
        _done.value += more


def train_in_process(cache: Cache, point: LabPoint) -> None:
    """Train and keep a point, in a process of the pool."""
    _train(cache, point, _count)


def write_start_in_process(cache: Cache, point: LabPoint) -> None:
    """Train and keep warm steps, in a process of the pool."""
    _write_start(cache, point, _count)


def _train_in_processes(
    points: Sequence[LabPoint],
    starts: Sequence[LabPoint],
    cache: Cache,
    num_processes: int,
    show_done: Callable[[int, int], None],
) -> None:
    """Give every point to a process, the longest first; those that wait for a start come after.

    One that fails keeps no other one from being finished, and is raised at the end.
    """
    context = multiprocessing.get_context("spawn")
    done = context.Value("q", 0)
    num_points = 0
    waiting: dict[Path | None, list[LabPoint]] = {}
    for point in sorted(points, key=_num_steps, reverse=True):
        waiting.setdefault(cache.start(point), []).append(point)
    errors: list[BaseException] = []
    with ProcessPoolExecutor(num_processes, context, prepare_process, (done,)) as pool:
        try:
            founding = {
                pool.submit(write_start_in_process, cache, point): cache.start(point)
                for point in starts
            }
            ready = [path for path in waiting if path not in founding.values()]
            training: set[Future[None]] = set()
            while founding or training or ready:
                for path in ready:
                    for point in waiting[path]:
                        training.add(pool.submit(train_in_process, cache, point))
                wait([*founding, *training], _LOOK_S, FIRST_COMPLETED)
                ended = [future for future in (*founding, *training) if future.done()]
                num_points += sum(future in training for future in ended)
                show_done(num_points, done.value)
                whole = [future for future in ended if future.exception() is None]
                errors += [e for e in (future.exception() for future in ended) if e is not None]
                ready = [founding[future] for future in whole if future in founding]
                for future in ended:
                    founding.pop(future, None)
                    training.discard(future)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if errors:
        raise errors[0]
