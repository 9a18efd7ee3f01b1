"""A run with several syncers on a virtual clock, any of which can be killed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from diloco.island.exchange.exchange import SyncerConnection
from diloco.outer.assignment import assign_fragments
from diloco.transport.calls.loopback import LoopbackNetwork
from tests.virtual_run import Setting, VirtualIsland, VirtualRun

#: Seconds that a killed syncer is away each time.
AWAY_S = 7.0
#: Seconds that a fragment that moves is at no syncer, and until islands are told.
MOVING_S = 2.0


class Stamped(list[Mapping[str, Any]]):
    """Headers of records; `came` gets the time of each."""

    def __init__(self, came: list[tuple[float, Mapping[str, Any]]]) -> None:
        self.came = came

    def append(self, header: Mapping[str, Any]) -> None:
        self.came.append((asyncio.get_running_loop().time(), header))
        super().append(header)


class Several:
    """A run with several syncers, each with a store and incarnations of its own."""

    def __init__(self, setting: Setting, num_syncers: int = 2) -> None:
        self.setting = setting
        self.network = LoopbackNetwork()
        self.parts = [
            VirtualRun(
                replace(setting, directory=setting.directory / f"syncer-{number}", has_others=True),
                name=f"syncer-{number}",
                own=own,
                network=self.network,
            )
            for number, own in enumerate(assign_fragments(setting.plan(), (1.0,) * num_syncers))
        ]
        self.made: list[VirtualIsland] = []
        self.num_looks = 0  # of islands, where fragments are
        #: Number of the part that each fragment is at, as islands that ask are told.
        self.owners = [self.parts.index(self.of(p)) for p in range(setting.num_fragments)]

    @property
    def kept(self) -> VirtualRun:
        """The part that nobody kills."""
        return self.parts[0]

    @property
    def records(self) -> list[Mapping[str, Any]]:
        """Headers of all records."""
        return [header for part in self.parts for header in part.records]

    def of(self, fragment_id: int) -> VirtualRun:
        """Give the part that has a fragment."""
        return next(part for part in self.parts if fragment_id in part.own)

    async def resume(self, step: int) -> None:
        """Take all stores back to a run checkpoint and serve them in a new timeline."""
        for part in self.parts:
            await part.resume(step)

    async def kill(self) -> None:
        """Drop all syncers."""
        for part in self.parts:
            await part.kill_syncer()

    async def start(self) -> None:
        self.came: list[tuple[float, Mapping[str, Any]]] = []
        self.kept.records = Stamped(self.came)
        for part in self.parts:
            await part.start_syncer()

    def island(self, name: str, incarnation: int = 1) -> VirtualIsland:
        connections = [
            SyncerConnection(p.own, self.network.connect(p.name), self.network.connect(p.name))
            for p in self.parts
        ]
        unused, timeline = self.network.connect("nobody"), self.kept.timeline
        island = VirtualIsland(
            name, self.setting, unused, unused, incarnation, timeline, connections=connections
        )

        async def find() -> None:
            self.num_looks += 1
            island.exchange.reassign(self.owners)

        island.exchange._find_syncers = find
        self.made.append(island)
        return island

    async def move(self, fragment_id: int, target: int, *, moving_s: float = MOVING_S) -> None:
        """Move a fragment to another part: let go of, for a while at neither, then taken."""
        source = self.parts[self.owners[fragment_id]]
        await source.kill_syncer()
        source.own = [p for p in source.own if p != fragment_id]
        await source.start_syncer()
        await self._take([fragment_id], source, target, moving_s=moving_s)

    async def lose(self, number: int, target: int) -> None:
        """Kill a part for good, and move what it has to another."""
        source = self.parts[number]
        await source.kill_syncer()
        own, source.own = source.own, []
        await self._take(own, source, target)
        for island in self.made:  # whose calls to it break: each asks where it is
            island.exchange.reassign(self.owners)

    async def _take(
        self,
        fragment_ids: Sequence[int],
        source: VirtualRun,
        target: int,
        *,
        moving_s: float = MOVING_S,
    ) -> None:
        to = self.parts[target]
        await asyncio.sleep(moving_s)
        await to.kill_syncer()
        for p in fragment_ids:
            name = f"fragment-{p:04d}"
            shutil.move(source.setting.directory / name, to.setting.directory / name)
        to.own = sorted([*to.own, *fragment_ids])
        await to.start_syncer()
        await asyncio.sleep(MOVING_S)  # islands are told the old place, and ask again
        for p in fragment_ids:
            self.owners[p] = target

    async def run(
        self, meanwhile: Callable[[Several], Coroutine[Any, Any, None]] | None = None
    ) -> dict[str, VirtualIsland]:
        """Run every island to its end besides something else; returns them by name."""
        await self.start()
        islands = {name: self.island(name) for name in self.setting.islands}
        besides = asyncio.create_task(meanwhile(self)) if meanwhile else None
        await asyncio.gather(*(island.run() for island in islands.values()))
        if besides is not None:
            besides.cancel()
            await asyncio.gather(besides, return_exceptions=True)
        for island in islands.values():
            await island.exchange.stop()
        await self.kill()
        return islands


def killing(every_s: float) -> Callable[[Several], Coroutine[Any, Any, None]]:
    """Kill the syncer that is not kept, again and again, so many seconds after it came back."""

    async def kill(run: Several) -> None:
        while True:
            await asyncio.sleep(every_s)
            await asyncio.shield(killed(run))

    return kill


async def killed(run: Several) -> None:
    await run.parts[1].kill_syncer()
    await asyncio.sleep(AWAY_S)
    await run.parts[1].start_syncer()
