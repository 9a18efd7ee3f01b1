"""Finds out which rank an island has lost, and in which collective.

A rank that hangs is seen by the others when a collective reaches its timeout, one that died when
its connections close; neither error says who it was. Those that see it answer a roll call in the
store at which the island met: who does not answer is the culprit, or who answers with an error of
its own. Each writes down its last collectives, as PyTorch's flight recorder has them.

Costs nothing while all is well, but for what the recorder takes: 15 us a collective.

Measured on gloo: `monitored_barrier` needs connections that a timeout has closed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from diloco.config.schema import Config
from diloco.launch.rank.job import Job
from diloco.telemetry.events import RankLost

#: Seconds by which ranks that were left by the same one may answer apart.
ROLL_CALL_S = 5.0
_KEY = "diloco/roll_call/"
#: What a rank answers that only saw another one fail; others answer with their own error.
_LEFT = "left"


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective as the flight recorder names it; `number` counts those of its group."""

    name: str
    group: str
    number: int

    def __str__(self) -> str:
        """Say which it is, for messages."""
        return f"{self.name} number {self.number} of group {self.group}"


def find_loss(
    error: Exception, config: Config, job: Job, output_dir: Path, inner_step: int
) -> tuple[RankLost, str] | None:
    """Find out who is to blame for what ended this rank; every rank that fails calls it.

    Args:
        error: That ended it.
        config: With an island selected.
        job: This rank's place.
        output_dir: Where collectives-ISLAND-RANK.json goes.
        inner_step: Completed inner steps.

    Returns:
        The loss and what to tell of it; None where this rank failed by itself, which the others
        then hear, and where there are no others.
    """
    if job.num_ranks == 1 or not dist.is_initialized():
        return None
    is_left = is_of_collective(error)
    path = output_dir / f"collectives-{config.island_id}-{job.island_rank}.json"
    last = write_collectives(path)
    culprits = call_roll(
        dist.distributed_c10d._get_default_store(),
        island_rank=job.island_rank,
        num_ranks=job.num_ranks,
        own_error="" if is_left else repr(error),
    )
    if not is_left:
        return None
    dump = "" if last is None else str(path)
    event = RankLost(inner_step, tuple(sorted(culprits)), str(last or ""), dump, str(error))
    island = config.island_id
    who = "; ".join(f"rank {rank}: {what}" for rank, what in sorted(culprits.items()))
    where = f", in {last}; the collectives before it are in {dump}" if last else ""
    return event, (
        f"island {island} lost {who or 'a rank, and none says which'} (after inner step "
        f"{inner_step}{where}). A rank that does not come within "
        f"islands.{island}.collective_timeout = {config.island.collective_timeout} hangs or is "
        f"slow: look at its log, its host and its stack (py-spy dump), or set a longer one"
    )


def is_of_collective(error: BaseException) -> bool:
    """Whether an error is a collective's: another rank hangs, or is gone."""
    # gloo raises RuntimeError, with the file of its source in the text.
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )


def call_roll(
    store: Store,
    *,
    island_rank: int,
    num_ranks: int,
    own_error: str = "",
    patience_s: float = ROLL_CALL_S,
) -> dict[int, str]:
    """Answer, and learn who else does; every rank that fails calls it, each for itself.

    Args:
        store: At which the island met.
        island_rank: Of this rank.
        num_ranks: Of the island.
        own_error: What this rank failed of by itself; it then waits for nobody. Empty: another one
            left it.
        patience_s: Seconds for which answers are waited for.

    Returns:
        Culprits by rank, each with what is known of it; empty when all were left by each other, or
        this rank is the culprit. Rank 0 where the store does not answer: it serves it.
    """
    found: dict[int, str] = {}
    thread = threading.Thread(
        target=_ask,
        args=(store, island_rank, num_ranks, own_error or _LEFT, patience_s, found),
        daemon=True,  # a store whose process is stopped holds its callers for ever
    )
    thread.start()
    thread.join(2 * patience_s)
    if not thread.is_alive():
        return dict(found)
    return {0: "it serves the store at which the island met, and that does not answer"}


def _ask(
    store: Store,
    island_rank: int,
    num_ranks: int,
    word: str,
    patience_s: float,
    found: dict[int, str],
) -> None:
    try:
        store.set(f"{_KEY}{island_rank}", word)
        if word != _LEFT:
            return
        others = [rank for rank in range(num_ranks) if rank != island_rank]
        until = time.monotonic() + patience_s
        for rank in others:
            left = max(until - time.monotonic(), 0.001)
            try:
                store.wait([f"{_KEY}{rank}"], timedelta(seconds=left))
                answer = store.get(f"{_KEY}{rank}").decode()
            except dist.DistStoreError:  # nobody has answered in time
                found[rank] = "it neither came nor answered the others' roll call"
            else:
                if answer != _LEFT:
                    found[rank] = f"it failed of {answer}"
    except (RuntimeError, ValueError) as error:
        found[0] = f"it serves the store at which the island met, which is gone: {error}"


def write_collectives(path: Path) -> Collective | None:
    """Write what the flight recorder has, as JSON, and name the last collective it saw begin.

    Returns:
        None, with no file, where nothing is recorded.
    """
    text = torch._C._distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
    dump: Mapping[str, Any] = json.loads(text)
    entries = dump.get("entries")
    if not entries:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dump, indent=1) + "\n")
    # What has not ended yet; the recorder does not always know, and then it is the newest one.
    last = max(entries, key=lambda entry: (not entry["retired"], entry["record_id"]))
    name, description = last["process_group"]
    group = f"{name} ({description})" if description not in ("", "undefined") else name
    return Collective(last["profiling_name"], group, last["collective_seq_id"])
