"""A whole run without a syncer in one process: real decider, peers, exchanges and outer loops.

The network is loopback and the clock virtual. Decider and islands can be killed and started again;
what is durable (journal, records) stays in the setting's directory.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from diloco.coordinator.decided_rounds import DeciderRules
from diloco.coordinator.decider import Decider
from diloco.coordinator.journal import Journal
from diloco.island.peer.calls import PeerCalls
from diloco.island.peer.peer import Peer, PeerRules
from diloco.protocol.run.membership import Membership
from diloco.protos.control_pb2 import FragmentStatus
from diloco.syncer.worker import Worker
from diloco.transport.calls.loopback import LoopbackNetwork
from diloco.transport.contracts import Handlers, Server, Transport
from diloco.transport.retry import RetryPolicy
from diloco.versions.pins import restore
from tests.virtual_run import RUN, InlineWorker, Setting, VirtualIsland, grant


@dataclass
class AllReduceIsland:
    """One start of an island: its peer, the server of it, and what trains."""

    island: VirtualIsland
    peer: Peer
    server: Server

    async def kill(self) -> None:
        """End without a word, with all that was not durable."""
        await self.server.stop(0)
        await self.peer.stop()
        await self.island.drop()


@dataclass
class AllReduceRun:
    """The network, the decider with its journal, and the islands by name."""

    setting: Setting
    worker: Worker = field(default_factory=InlineWorker)
    intercept: Callable[[str, Handlers], Handlers] = lambda name, handlers: handlers
    #: Puts an island's link around its way to the peer of another one.
    shape: Callable[[str, Transport], Transport] = lambda name, way: way

    def __post_init__(self) -> None:
        self.network = LoopbackNetwork()
        self.lost: list[tuple[str, int]] = []
        self.refused: list[tuple[str, str]] = []
        self.statuses: list[FragmentStatus] = []
        self.num_starts = 0
        self.num_deciders = 0

    async def start_decider(self) -> None:
        """Start a decider on what the journal holds."""
        self.num_deciders += 1
        setting = self.setting
        self.journal = Journal(setting.directory / "journal.sqlite")
        self.journal.open()
        self.membership = Membership(
            RUN,
            tuple(sorted(setting.islands)),
            "{}",
            lambda here, there: [],
            setting.inner_steps,
            2,
        )
        self.membership.apply(self.journal.entries().items())
        self.decider = Decider(
            membership=self.membership,
            journal=self.journal,
            secret=b"secret",
            rules=DeciderRules(
                setting.round_deadline_s, setting.downlink_codec, 4, setting.weights
            ),
            decider_id=f"decider {self.num_deciders}",
            is_granted=lambda held: self.membership.is_current(
                held.island, held.incarnation, held.timeline
            ),
            on_status=self.statuses.append,
            on_lost=lambda reason, code: self.lost.append((reason, code)),
            on_refused=lambda island, cause: self.refused.append((island, cause)),
        )
        handlers = self.intercept("decider", self.decider.handlers)
        self.decider_server = self.network.server("decider", handlers)
        await self.decider_server.start()

    async def kill_decider(self) -> None:
        await self.decider_server.stop(0)
        self.decider.stop()
        self.journal.close()

    async def start(self, name: str) -> AllReduceIsland:
        """Join and start the peer of a new start of an island."""
        self.num_starts += 1
        plan = self.setting.plan()
        joined = self.membership.join(
            run=RUN, island=name, identity_json="{}", plan_json=plan.to_json(), corpus_sha256="",
            tokenizer_digest="", start_step=0, start_id=str(self.num_starts),
        )  # fmt: skip
        self.journal.write(joined.entries)
        self.membership.apply(joined.entries)
        timeline = self.membership.timeline
        held = grant(name, joined.incarnation, timeline)
        calls = PeerCalls(
            self.network.connect("decider"),
            held,
            lambda address: self.shape(name, self.network.connect(address)),
            rpc_deadline_s=60.0,
            policy=RetryPolicy(max_wait_s=1.0, budget_s=600.0),
            rng=random.Random(self.num_starts),
        )
        peer = Peer(
            plan,
            self.setting.directory / "peers" / name,
            PeerRules(self.setting.publication(), 4, 4, 600.0),
            calls=calls,
            grant=held,
            worker=self.worker,
            verifier=self.worker,
        )
        await peer.start()
        address = f"peer {name} {joined.incarnation}"
        server = self.network.server(address, self.intercept(name, peer.handlers))
        await server.start()
        peer.serve(address)
        connect: Callable[[], Transport] = lambda: self.network.connect(address)  # noqa: E731
        island = VirtualIsland(
            name, self.setting, connect(), connect(), joined.incarnation, timeline
        )
        return AllReduceIsland(island, peer, server)

    async def resume(self, step: int) -> None:
        """Go on from a run checkpoint in a new timeline; nobody may be at work."""
        timeline, plan = self.membership.timeline, self.setting.plan()
        for store in sorted((self.setting.directory / "peers").iterdir()):
            restore(store, plan, step=step, abandoned_timeline=timeline)
        self.journal.open()
        self.journal.write(self.membership.resumed(step))
        self.journal.close()
        await self.start_decider()

    async def run(self) -> dict[str, VirtualIsland]:
        """Run every island to its end; returns them by name."""
        await self.start_decider()
        started = [await self.start(name) for name in self.setting.islands]
        await asyncio.gather(*(each.island.run() for each in started))
        await self.end(started)
        return {each.island.name: each.island for each in started}

    async def end(self, started: Sequence[AllReduceIsland]) -> None:
        for each in started:
            await each.kill()
        await self.kill_decider()
