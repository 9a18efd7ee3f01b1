"""Composition root of an island's peer: store, server, ways out, in the leader's IO thread.

    peers/ISLAND/syncer/   below coordinator.state_dir: the peer's store, laid out as a syncer's is
    peers/ISLAND/          resolved.toml next to it, so that `diloco export` reads it like a run's

One start of an island holds the store at a time. A store of an earlier timeline is taken back to
the checkpoint that the run was resumed from; where that is not known any more, or its pin is not
whole, it is set aside, and the state comes from another island.

Source: PROTOCOL.md, "All-reduce".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from diloco.config.load import resolved_toml
from diloco.config.schema import Config
from diloco.durable import make_directory_durably, sync_directory, write_durably, write_json
from diloco.errors import ConfigError, IslandFailed
from diloco.forecast.build import build_publication_rules
from diloco.island.exchange.retried_calls import retry_policy
from diloco.island.peer.calls import PeerCalls
from diloco.island.peer.peer import Peer, PeerRules
from diloco.island.peer.replica import STAGED
from diloco.launch.process.tensor_thread import TensorThread
from diloco.outer.fragments import Plan
from diloco.protocol.run.peer_bounds import limits_of
from diloco.protos.control_pb2 import JoinReply
from diloco.security.address import listen, local_address, peer_address
from diloco.security.security import Security
from diloco.state_dir import Held, StateDir, Timeline, hold, read_bound, read_timeline
from diloco.transport.contracts import Transport
from diloco.transport.libp2p.address import is_peer_address
from diloco.versions.pins import restore, set_aside
from diloco.versions.record import RecordInvalid

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_DRAIN_S = 0.5
#: Seconds in which an earlier start of the island has let go of the store.
_HELD_S = 20.0
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class RunningPeer:
    """A peer that is served; `address` is for the ranks of its own island."""

    peer: Peer
    address: str
    _opened: contextlib.AsyncExitStack

    @property
    def bytes_up(self) -> int:
        """Bytes that went to other islands."""
        return self.peer.bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes that came from other islands."""
        return self.peer.bytes_down

    async def stop(self) -> None:
        """Serve nobody any more, and let go of the store."""
        await self._opened.aclose()


async def start_peer(
    config: Config,
    plan: Plan,
    reply: JoinReply,
    *,
    security: Security,
    decider: Transport,
    connect: Callable[[str], Transport],
    rng: random.Random,
    complete_checkpoints: Callable[[], Sequence[int] | None],
) -> RunningPeer:
    """Start the peer of the selected island.

    Args:
        config: With the coordinator's policy, and the island selected.
        plan: The run's.
        reply: The coordinator's answer to the join.
        security: What the island shows and asks for.
        decider: The way to the coordinator; the peer's from here on.
        connect: Opens the way to the peer of another island, at its address.
        rng: Draws the waits between repeated calls.
        complete_checkpoints: Inner steps of the run checkpoints that every island has.

    Raises:
        ConfigError: If it cannot listen, or its store is ahead of the run's timeline.
        IslandFailed: If another start of the island holds the store.
    """
    state = StateDir(Path(config.coordinator.state_dir).absolute()).peer(config.island_id)
    calls = _build_calls(config, reply, decider, connect, rng)
    async with contextlib.AsyncExitStack() as opened:
        opened.push_async_callback(calls.close)
        worker = await _open_store(opened, config, state, plan, reply)
        peer = Peer(
            plan,
            state.store,
            PeerRules(
                publication=build_publication_rules(config),
                retained_versions=config.outer.retained_versions,
                num_unsure_pins=config.num_unsure_checkpoints,
                unreachable_s=config.transport.unreachable.seconds,
            ),
            calls=calls,
            grant=reply.grant,
            worker=worker,
            verifier=opened.enter_context(TensorThread("verifier")),
            complete_checkpoints=complete_checkpoints,
        )
        opened.push_async_callback(peer.stop)
        await peer.start()
        server = await listen(
            config.island.peer_listen,
            read_bound(state.bound),
            peer.handlers,
            security=security,
            chunk_bytes=config.transport.chunk.num_bytes,
            limits=limits_of(config),
        )
        opened.push_async_callback(server.stop, _DRAIN_S)
        write_json(state.bound, server.address)
        public = peer_address(server.address, config.island)
        peer.serve(public)
        own = local_address(server.address)
        if own != public and not is_peer_address(public):
            own = f"{own},{public}"  # ranks on other hosts of the island cannot take the first
        logger.info("peer serves, island=%s address=%s", config.island_id, public)
        return RunningPeer(peer, own, opened.pop_all())


def _build_calls(
    config: Config,
    reply: JoinReply,
    decider: Transport,
    connect: Callable[[str], Transport],
    rng: random.Random,
) -> PeerCalls:
    transport = config.transport
    return PeerCalls(
        decider,
        reply.grant,
        connect,
        rpc_deadline_s=transport.rpc_timeout.seconds,
        policy=retry_policy(transport),
        rng=rng,
    )


async def _open_store(
    opened: contextlib.AsyncExitStack, config: Config, state: StateDir, plan: Plan, reply: JoinReply
) -> TensorThread:
    """Hold the store until `opened` is closed, in the run's timeline; returns who works on it."""
    make_directory_durably(state.store)
    await _hold(opened, state)
    worker = opened.enter_context(TensorThread())
    await worker.run(lambda: _take_to_timeline(state, plan, reply))
    write_durably(state.resolved, [resolved_toml(config).encode()])
    write_durably(state.plan, [plan.to_json().encode()])
    return worker


async def _hold(opened: contextlib.AsyncExitStack, state: StateDir) -> None:
    until = asyncio.get_running_loop().time() + _HELD_S
    while True:
        try:
            opened.enter_context(hold(state.store_lock))
            return
        except Held as error:
            if asyncio.get_running_loop().time() > until:
                raise IslandFailed(
                    f"an earlier start of this island does not let go of its records: {error}. "
                    f"End that process"
                ) from error
        await asyncio.sleep(_LOOK_S)


def _take_to_timeline(state: StateDir, plan: Plan, reply: JoinReply) -> None:
    """Take the store of an earlier timeline to the run's; its own file of it is written last.

    Raises:
        ConfigError: If the store is ahead of the run.
    """
    stored, number = read_timeline(state.store_timeline).number, reply.grant.timeline
    if stored == number:
        return
    if stored > number:
        raise ConfigError(
            f"{state.store_timeline} says timeline {stored}, the coordinator's journal says "
            f"{number}: one of them is a copy from another day. Bring the newest journal back; if "
            f"the run is to go on from this one, remove {state.root}: what this island needs comes "
            f"from the others"
        )
    if (staged := state.store / STAGED).exists():
        shutil.rmtree(staged)  # in doubt in the earlier timeline, and abandoned with it
        sync_directory(state.store)
    step, problem = reply.resume_step, "the others have gone on from the resumed checkpoint"
    if reply.is_resumed:
        try:
            restore(state.store, plan, step=step, abandoned_timeline=stored)
            problem = ""
        except RecordInvalid as error:
            problem = str(error)
    if problem:
        if list(state.store.glob("fragment-*")):
            logger.warning(
                "store of timeline %d set aside, the state comes from another island: %s",
                stored, problem,
            )  # fmt: skip
        set_aside(state.store, plan, step=step, abandoned_timeline=stored)
    Timeline(number, step).write(state.store_timeline)
