"""Moves fragments from and to one start of a syncer, as the coordinator says.

What moves here is copied while the other syncer serves it; once little is lacking the coordinator
hears that, and tells the other one to let go of it. Neither start serves other fragments than it
began with: this one ends once it has let go of some, or taken some, for the next one. So that there
are few of these, what is copied at the same time becomes ready at the same time.

Source: PROTOCOL.md, "Moves of fragments".
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from diloco.bounded_text import MOST_REASON, bounded_text
from diloco.checkpoint.stores import part_of
from diloco.config.schema import Config
from diloco.durable import DiskFull
from diloco.errors import ConfigError
from diloco.launch.process.disk_full_retry import retry_disk_full_async
from diloco.loop_clock import loop_now
from diloco.objects.moved_fragment import (
    CopyStopped,
    FragmentCopy,
    forget,
    forget_copy,
    has_not_let_go,
    let_go,
    serve,
    stored_fragments,
    take_back,
    withdraw,
    withdrawn,
)
from diloco.objects.store import ObjectStore
from diloco.outer.fragments import Plan
from diloco.protocol.run.alarms import Alarm, AlarmKind
from diloco.protos import control_pb2 as wire
from diloco.state_dir import StateDir, Timeline
from diloco.syncer.reporter import Reporter

logger = logging.getLogger(__name__)

#: Seconds between looks at a move, and at most after one that failed. A look lists the log of the
#: other syncer's chain, and reads what is new there.
_LOOK_S, _MOST_WAIT_S = 2.0, 300.0

_T = TypeVar("_T")


@dataclass(slots=True)
class _Coming:
    """A fragment that moves here: what was told of it last, and what is in the way of it."""

    told: wire.FragmentSource
    copy: FragmentCopy
    task: asyncio.Task[None]
    waits: str = ""

    @property
    def is_ready(self) -> bool:
        """Whether little is lacking."""
        return self.copy.is_ready and not self.waits

    @property
    def is_behind(self) -> bool:
        """Whether much is lacking that nothing is in the way of."""
        return not (self.copy.is_ready or self.waits or self.copy.is_stopped)

    @property
    def is_finishing(self) -> bool:
        """Whether it is taken in a moment."""
        is_under_way = not (self.task.done() or self.told.is_held)
        return self.is_ready and self.copy.is_let_go and is_under_way


class SyncerMoves:
    """The fragments that a start lets go of, and those that it takes for the next one to serve."""

    def __init__(
        self, config: Config, state: StateDir, plan: Plan, timeline: Timeline, reporter: Reporter
    ) -> None:
        """Begin with none; the reporter tells the coordinator how they stand."""
        self._config, self._state, self._plan = config, state, plan
        self._timeline, self._reporter = timeline, reporter
        self._own = {fragment.fragment_id for fragment in part_of(state, plan).fragments}
        self._coming: dict[int, _Coming] = {}
        self._copying = asyncio.Lock()  # of what is not ready: one after the other
        self._withdrawn: dict[int, int] = {}
        self.let_go_of = set[int]()
        self.taken = set[int]()
        reporter.moves = self.words

    async def due(self) -> None:
        """Return once the next start is to serve other fragments than this one does."""
        if not self._config.syncers:
            await asyncio.Event().wait()
        store = ObjectStore(self._config.run.state)
        self._withdrawn = withdrawn(self._state)
        with contextlib.suppress(DiskFull):  # a later start does it
            await asyncio.to_thread(has_not_let_go, self._state, self._own)
        try:
            while not (self.let_go_of or self.taken):
                await asyncio.sleep(_LOOK_S)
                if (told := self._reporter.assigned) is not None:
                    self.let_go_of = self._own.difference(told.fragment_ids)
                    await self._look(store, told)
            while self.taken and any(each.is_finishing for each in self._coming.values()):
                await asyncio.sleep(_LOOK_S)  # one start serves all of them
            # A start that called the other syncer before it let go is in a later answer to this.
            told = self._reporter.assigned
            while self.taken and self._reporter.assigned is told:
                await asyncio.sleep(_LOOK_S)
        finally:
            for coming in self._coming.values():
                coming.copy.stop()
                coming.task.cancel()

    async def _look(self, store: ObjectStore, told: wire.SyncerHelloReply) -> None:
        """Begin and end copies, and remove what is not needed here."""
        await self._withdraw(told)
        takes = {
            each.fragment_id: each
            for each in told.takes
            if each.fragment_id not in self._own | self.taken  # the coordinator is to find it here
            and each.number > self._withdrawn.get(each.fragment_id, 0)
        }
        for p, coming in [*self._coming.items()]:
            if coming.task.done():
                del self._coming[p]
                coming.task.result()
            elif p in takes and takes[p].syncer == coming.told.syncer:
                coming.told = takes[p]
            else:
                coming.copy.stop()
        for p in () if self.let_go_of else takes.keys() - self._coming.keys():
            copy = FragmentCopy(store, self._state, self._plan.fragments[p], takes[p].syncer)
            self._coming[p] = coming = _Coming(takes[p], copy, asyncio.create_task(self._take(p)))
        unneeded = stored_fragments(self._state.store).intersection(told.elsewhere) - self._own
        copied = stored_fragments(self._state.moved) - self._coming.keys() - takes.keys()
        for remove, p in (*((forget, p) for p in unneeded), *((forget_copy, p) for p in copied)):
            with contextlib.suppress(DiskFull, FileNotFoundError):  # a pin may go meanwhile
                await asyncio.to_thread(remove, self._state, p)

    async def _withdraw(self, told: wire.SyncerHelloReply) -> None:
        """Take nothing any more that goes to another syncer now, durably."""
        moves = {each.fragment_id: each.number for each in told.withdrawn}
        self.taken.difference_update(moves)
        for p in moves.keys() & self._coming.keys():
            self._coming[p].copy.stop()
        try:
            await asyncio.to_thread(withdraw, self._state, moves)
        except DiskFull as error:  # the coordinator says it again
            for p in moves:
                self._alarm(p, f"fragment {p} cannot be left to another syncer yet: {error}")
        else:
            for p in moves:
                self._reporter.alarms.clear(AlarmKind.STATE_AWAY, fragment_id=p)
            self._withdrawn = withdrawn(self._state)

    async def _take(self, p: int) -> None:
        """Copy a fragment, and take it once it was let go of; what is in the way is said."""
        coming, wait_s = self._coming[p], _LOOK_S
        while not coming.copy.is_stopped:
            try:
                if await self._is_here(p, coming):
                    if not coming.copy.is_stopped:
                        self.taken.add(p)
                    return
                coming.waits, wait_s = "", _LOOK_S
                self._reporter.alarms.clear(AlarmKind.STATE_AWAY, fragment_id=p)
            except CopyStopped:
                return
            except (ConfigError, DiskFull) as error:
                wait_s = min(2 * wait_s, _MOST_WAIT_S)
                coming.waits, coming.copy.is_ready = str(error), False
                source = coming.told.syncer
                self._alarm(p, f"fragment {p} cannot be taken from {source} yet: {error}")
            await asyncio.sleep(wait_s)

    def _alarm(self, p: int, text: str) -> None:
        logger.error("%s", text)
        alarm = Alarm(AlarmKind.STATE_AWAY, bounded_text(text), fragment_id=p)
        self._reporter.alarms.raise_(alarm, loop_now())

    async def _is_here(self, p: int, coming: _Coming) -> bool:
        """Copy a fragment; whether the next start can serve it."""
        if coming.told.syncer == self._state.syncer_name:  # it is to stay after all
            coming.copy.is_ready = True  # all of it is here: others need not wait for it
            if coming.told.is_held:
                return False
            fragment = self._plan.fragments[p]
            await _in_thread(functools.partial(take_back, self._state, fragment, self._timeline))
            return True
        copy = coming.copy
        if copy.is_ready:
            is_let_go = await _in_thread(copy.copy)
        else:
            async with self._copying:
                while not (is_let_go := await _in_thread(copy.copy)) and not copy.is_ready:
                    pass
        if is_let_go and not coming.told.is_held:
            await _in_thread(functools.partial(copy.take, self._timeline))
            return True
        return False

    def words(self) -> list[wire.FragmentMove]:
        """Say how the moves stand of which the coordinator's last answer tells."""
        if (told := self._reporter.assigned) is None:
            return []
        done = (w for w in told.withdrawn if self._withdrawn.get(w.fragment_id, 0) >= w.number)
        return [
            *map(self._word, told.takes),
            *(
                wire.FragmentMove(
                    fragment_id=each.fragment_id,
                    number=each.number,
                    stage=wire.MOVE_STAGE_WITHDRAWN,
                )
                for each in done
            ),
        ]

    def _word(self, told: wire.FragmentSource) -> wire.FragmentMove:
        p, stage = told.fragment_id, wire.MOVE_STAGE_COPYING
        word = wire.FragmentMove(fragment_id=p, number=told.number)
        coming = self._coming.get(p)
        if coming is not None and coming.told.syncer == told.syncer:  # not of another's chain
            # Together: each time that fragments are let go of, or taken, a syncer starts again.
            if coming.is_ready and not any(each.is_behind for each in self._coming.values()):
                stage = wire.MOVE_STAGE_READY
            word.total_bytes = coming.copy.total_bytes
            word.copied_bytes = min(coming.copy.copied_bytes, word.total_bytes)
            word.waits = bounded_text(coming.waits, MOST_REASON)
        if p in self._own:
            stage = wire.MOVE_STAGE_SERVED
        elif p in self.taken:
            stage = wire.MOVE_STAGE_TAKEN
        word.stage = stage
        return word

    async def settle(self, given_up: asyncio.Event) -> None:
        """Have the next start serve the others; nothing of this one writes any more."""
        if (told := self._reporter.assigned) is None:
            return
        # Its last word may have had the answer that one is to stay here: that was a while ago.
        self.let_go_of.difference_update(told.fragment_ids)
        granted = dict(zip(told.islands, told.incarnations, strict=True))

        def settle() -> None:
            if self.let_go_of:
                let_go(self._state, self.let_go_of)
            if self.taken:
                serve(self._state, self.taken, granted)

        await retry_disk_full_async("the fragments of this syncer", settle, given_up=given_up)


async def _in_thread(work: Callable[[], _T]) -> _T:
    """Do work of hours in a thread for which no end of this process waits."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def say(result: _T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except BaseException as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(say, result, failed)

    threading.Thread(target=run, daemon=True, name="move").start()
    return await done
