"""What a syncer keeps for run checkpoints: versions that islands name, or the newest for a cut.

Files are those of `pins`. Whether a checkpoint is complete, the coordinator says.

Source: PROTOCOL.md, "Run checkpoints and pins".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco import durable
from diloco.durable import DiskFull
from diloco.syncer.admission import CallAdmission
from diloco.syncer.service import FragmentService
from diloco.syncer.worker import Worker
from diloco.versions.pins import (
    asked_for,
    forget_pins,
    note_asked,
    pin_directory,
    pinned_steps,
    pinned_version,
)
from diloco.versions.store import FragmentStore, PinRefused

logger = logging.getLogger(__name__)

#: Times as many as are kept: of what an island has asked for.
_REMEMBERED = 4
#: Asks for cuts; and for pins of which it is not written who did. No islands have these names.
_COORDINATOR, _NOBODY = "", "?"


class Pinning:
    """Pins of one syncer, for all its fragments; on its event loop.

    `pinned_cut` is the cut for which a version of every fragment is kept; 0: none since the start.
    """

    def __init__(
        self,
        stores: Sequence[FragmentStore],
        services: Mapping[int, FragmentService],
        admission: CallAdmission,
        worker: Worker,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_change: Callable[[], None],
        on_full: Callable[[], None],
    ) -> None:
        """Assign only.

        Args:
            stores: Of the fragments.
            services: Of the same, by fragment id.
            admission: Has the rules of now.
            worker: Writes.
            spawn: Runs a piece of work next to the handlers; its failure ends the process.
            on_change: Called when a cut is kept.
            on_full: Called when there is no room on the disk for one.
        """
        self._stores = {store.fragment.fragment_id: store for store in stores}
        self._services = services
        self._admission = admission
        self._worker = worker
        self._spawn = spawn
        self._on_change = on_change
        self._on_full = on_full
        #: Island, or the coordinator, -> inner steps, or cuts, of the pins it asks for, in order.
        self._asked: dict[str, tuple[int, ...]] = {}
        self._complete: tuple[int, ...] = ()
        self._fenced: Mapping[str, int] = {}
        self._is_asked = False  # since pins were let go
        self._has_warned = False
        self._pinning_cut = self._delayed_cut = self.pinned_cut = 0

    async def start(self) -> None:
        """Look what is pinned, and who asked for it; before anything is."""
        for step, islands in (await self._worker.run(self._pinned)).items():
            for island in islands or [_NOBODY]:
                self._asked[island] = (*self._asked.get(island, ()), step)

    async def pin(self, island: str, step: int, versions: Mapping[int, int]) -> None:
        """Keep versions, by fragment id, for the run checkpoint of an inner step.

        Durable when it ends.

        Raises:
            DiskFull: If there is no room for them.
            PinRefused: If others are kept for this step, or one is not here, or if checkpoints are
                cuts, for which the coordinator asks.
        """
        if self._admission.rules.min_members is not None:
            raise PinRefused("checkpoints of this run are cuts, which the coordinator asks for")

        def pin() -> None:
            try:
                for p, version in versions.items():
                    self._stores[p].pin(step, version)
                note_asked(self._store_dir, step, island)
            except (DiskFull, PinRefused) as error:
                asked = asked_for(self._store_dir, step)
                made = pin_directory(self._store_dir, step)
                if not asked and made.exists():  # what some fragments have would be in others' way
                    durable.remove_tree(made)
                if isinstance(error, DiskFull):
                    raise
                others = ", ".join(other for other in asked if other != island)
                raise PinRefused(f"{error}, asked for by {others or 'nobody else'}") from error

        self._note(island, step)
        try:
            await self._worker.run(pin)
        except PinRefused:
            if island in self._asked:  # it may have been kicked meanwhile
                self._asked[island] = tuple(s for s in self._asked[island] if s != step)
            raise

    def _note(self, asking: str, step: int) -> None:
        """Note who asks for a pin, before there is one: nothing that is let go meanwhile is it."""
        earlier = [other for other in self._asked.get(asking, ()) if other != step]
        most = _REMEMBERED * self._admission.rules.num_unsure_pins
        self._asked[asking], self._is_asked = (*earlier, step)[-most:], True

    def _pinned(self) -> dict[int, list[str]]:
        return {step: asked_for(self._store_dir, step) for step in pinned_steps(self._store_dir)}

    @property
    def _store_dir(self) -> Path:
        return next(iter(self._stores.values())).store_dir

    # -- cuts ------------------------------------------------------------------------------------

    def keep_cut(self, number: int, versions: Sequence[int]) -> None:
        """Keep the newest version of every fragment for a cut; done when `pinned_cut` says so.

        Does not block, and may be repeated.

        Args:
            number: Of the cut.
            versions: Newest that an island's part of it holds, by fragment id: none older is kept.
        """
        if number not in (self.pinned_cut, self._pinning_cut):
            self._pinning_cut = number
            self._spawn(self._keep_cut(number, dict(enumerate(versions))))

    async def _keep_cut(self, number: int, least: Mapping[int, int]) -> None:
        newest = {p: service.runner.rounds.version for p, service in self._services.items()}
        if damaged := [p for p, service in self._services.items() if service.runner.damage.text]:
            if number != self._delayed_cut:
                logger.warning("cut %d is kept later: fragments %s are damaged", number, damaged)
            self._delayed_cut, self._pinning_cut = number, 0  # the coordinator asks again
            return
        if behind := [p for p, version in newest.items() if version < least.get(p, 0)]:
            logger.error("cut %d not kept, versions lost of fragments %s", number, behind)
            self._pinning_cut = 0  # the coordinator sees it, and asks for less or for another one
            return  # polls tell the islands so

        def pin() -> None:
            for p, version in newest.items():
                store = self._stores[p]
                pinned = pinned_version(store.store_dir, number, p)
                if pinned is None or pinned < least.get(p, 0):
                    store.pin(number, version)

        self._note(_COORDINATOR, number)
        try:
            await self._worker.run(pin)
        except (DiskFull, PinRefused) as error:
            if isinstance(error, DiskFull):
                self._on_full()
            logger.warning("cut %d is kept later: %s", number, error)
            self._pinning_cut = 0  # the coordinator asks again
            return
        self.pinned_cut = number
        self._on_change()

    # -- what is kept no longer ------------------------------------------------------------------

    def keep_checkpoints(self, steps: Sequence[int]) -> None:
        """Record the run checkpoints that are complete: pins that are not needed go."""
        heard = tuple(steps), self._admission.roster.fenced
        if self._is_asked or heard != (self._complete, self._fenced):  # most bring nothing new
            (self._complete, self._fenced), self._is_asked = heard, False
            self._spawn(self._forget(*heard))

    async def _forget(self, complete: tuple[int, ...], fenced: Mapping[str, int]) -> None:
        rules, incarnations = self._admission.rules, self._admission.incarnations
        for island, least in fenced.items():  # who was kicked has asked for nothing
            if incarnations.get(island, 0) < least:
                self._asked.pop(island, None)
        asked = dict(self._asked)
        if rules.min_members is None:  # no cuts, but what a syncer killed while it pinned has left
            asked.pop(_NOBODY, None)
        dropped = await self._worker.run(
            lambda: forget_pins(
                self._store_dir,
                complete=complete,
                num_unsure=rules.num_unsure_pins,
                asked=asked.values(),
            )
        )
        if not dropped or self._has_warned:
            return
        self._has_warned = True
        absent = [i for i in rules.islands if max(asked.get(i, ()), default=-1) < dropped[-1]]
        why = (
            f"islands that did not ask for them: {', '.join(absent)}"
            if absent
            else "every island asked for them, and one does not report that it has its part: look "
            "for checkpoint_failed in the islands' events"
        )
        logger.warning("checkpoints never complete, pins removed, steps=%s: %s", dropped, why)
