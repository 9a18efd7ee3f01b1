"""The coordinator, or the syncer, of a run as a process that serves at a Unix socket and counts.

`python -m diloco.bench.scale.serving coordinator|syncer STATE_DIR`: the product's own handlers
behind its own access rules, with its journal and its store on the disk; nothing of gRPC.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import time
from pathlib import Path

from diloco.allocator import keep_freed_memory
from diloco.bench.scale.local_socket import CountingServer, SocketTransport
from diloco.checkpoint.run_checkpoints import read_membership
from diloco.config.load import load_config
from diloco.config.schema import Config
from diloco.coordinator.daemon import Coordinator
from diloco.coordinator.grants import is_valid, load_secret, sign
from diloco.coordinator.journal import Journal, repeated_when_full
from diloco.durable import read_json, write_json
from diloco.launch.process.ending import end_with_starter
from diloco.launch.process.logs import log_to
from diloco.protocol.run.peer_bounds import limits_of
from diloco.protocol.run.plan_bytes import unpacked
from diloco.protocol.run.terms import terms_of
from diloco.protos.control_pb2 import ROLE_ISLAND, ROLE_SYNCER, Grant
from diloco.refusals import Cause
from diloco.security.access import guarded
from diloco.security.address import borne_limits
from diloco.state_dir import StateDir
from diloco.system import usable_cpus
from diloco.transport.contracts import Handlers

_WARNING = 30


def socket_of(root: Path, role: str) -> Path:
    """Where the process of a role serves; a path of a Unix socket is short."""
    return root / f"{role}.socket"


def main() -> None:
    """Serve until the process is ended."""
    role, root = sys.argv[1], Path(sys.argv[2])
    end_with_starter()
    log_to(None, _WARNING)
    keep_freed_memory()
    serve = {"coordinator": _coordinate, "syncer": _sync}[role]
    asyncio.run(serve(StateDir(root)))


def _server(handlers: Handlers, config: Config) -> CountingServer:
    run_limits = limits_of(config)
    refusals: list[CountingServer] = []

    def on_refused(island: str, cause: Cause) -> None:
        refusals[0].refusals[f"{cause}"] += 1

    refusals.append(
        CountingServer(guarded(handlers, run_limits, on_refused), borne_limits(run_limits))
    )
    return refusals[0]


async def _coordinate(state: StateDir) -> None:
    config, journal = load_config(state.resolved), Journal(state.journal)
    journal.open()
    coordinator = Coordinator(
        membership=read_membership(config, journal),
        journal=journal,
        secret=load_secret(state.secret),
        terms=terms_of(config),
        unix_clock=time.time,
    )
    server = _server(repeated_when_full(coordinator.handlers), config)
    await server.start(socket_of(state.root, "coordinator"))
    await coordinator.watch()


async def _sync(state: StateDir) -> None:
    import torch

    from diloco.forecast.build import build_syncer_rules
    from diloco.launch.process.ending import first_of
    from diloco.launch.process.tensor_thread import syncer_workers
    from diloco.outer.fragments import Plan
    from diloco.syncer.reporter import Reporter
    from diloco.syncer.syncer import Syncer
    from diloco.versions.store import FragmentStore

    torch.set_num_threads(1)
    config, secret = load_config(state.resolved), load_secret(state.secret)
    reporter = Reporter(
        connect=lambda: SocketTransport(socket_of(state.root, "coordinator")),
        grant=sign(Grant(run=config.run.name, roles=[ROLE_SYNCER]), secret),
        syncer_epoch=1,
        pid=os.getpid(),
    )
    plan = Plan.from_json(unpacked((await reporter.learn_plan()).plan))
    with syncer_workers(usable_cpus()) as workers:
        stores = [
            FragmentStore(
                state.store,
                fragment,
                config.outer.retained_versions,
                is_indexed=functools.partial(reporter.is_indexed, fragment.fragment_id),
                num_threads=usable_cpus(),
            )
            for fragment in plan.fragments
        ]
        syncer = Syncer(
            plan,
            build_syncer_rules(config, timeline=0, merges_at_once=usable_cpus()),
            stores,
            syncer_epoch=1,
            incarnations=_Incarnations(state.incarnations),
            is_granted=lambda grant: is_valid(
                grant, secret, run=config.run.name, role=ROLE_ISLAND, now_unix_s=time.time()
            ),
            workers=workers,
            on_record=reporter.add_record,
            on_change=reporter.changed,
        )
        await syncer.start()
        server = _server(syncer.handlers, config)
        path = socket_of(state.root, "syncer")
        await server.start(path)
        reporting = asyncio.create_task(reporter.run(syncer, str(path)))
        await first_of(syncer.ended.wait(), reporting)
        raise syncer.failure or RuntimeError(str(syncer.fatal))


class _Incarnations:
    """Durable, as in a syncer's own process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[str, int]:
        return {
            str(island): int(number) for island, number in (read_json(self._path) or {}).items()
        }

    def store(self, incarnations: dict[str, int]) -> None:
        write_json(self._path, incarnations)


if __name__ == "__main__":
    main()
