"""What the service of a fragment needs of the syncer around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from diloco.protocol.rounds.terms import Lost
from diloco.protocol.rounds.timing import Downtime
from diloco.syncer.disk_full import DiskFullRetry
from diloco.syncer.spool import Spool
from diloco.syncer.worker import Workers
from diloco.telemetry.events import Event
from diloco.telemetry.syncer_meter import SyncerMeter


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a fragment's service needs of its syncer; no hook may block.

    Args:
        workers: Do the work on tensors and files.
        merging: Bounds how many fragments merge at once, or do other work of that size.
        spawn: Runs a piece of work next to the handlers; its failure ends the process.
        on_record: Called with the header of every durable record, also of those found at the start.
        on_change: Called at every change of state of a fragment, with its id.
        on_lost: Called when the run cannot go on.
        on_event: Called with what happens to rounds.
        disk_full: Has work done again while the disk is full.
        meter: Counts what is done, for metrics.
        spool: Keeps what arrived until its round closes.
        unix_clock: Wall clock in seconds, by which a later start knows how long ago a round closed.
        downtime: What this start finds overdue.
    """

    workers: Workers
    merging: asyncio.Semaphore
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    on_record: Callable[[Mapping[str, Any]], None]
    on_change: Callable[[int], None]
    on_lost: Callable[[Lost], None]
    on_event: Callable[[Event], None]
    disk_full: DiskFullRetry
    meter: SyncerMeter
    spool: Spool
    unix_clock: Callable[[], float]
    downtime: Downtime
