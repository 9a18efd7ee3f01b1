"""Run files for tests with real processes, and what their runs left behind."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco.checkpoint.run_checkpoints import open_journal
from diloco.checkpoint.stores import read_plan, state_by_fragment
from diloco.config.load import load_config
from diloco.coordinator.journal import Journal
from diloco.launch.local import LocalRun
from diloco.outer.fragments import Plan
from diloco.report.summary import read_events
from diloco.state_dir import StateDir
from diloco.versions.store import FragmentStore
from diloco.versions.version import VersionRecord

#: Makes 4 or 5 lanes of every fragment.
FFN_DIM_OF_LANES = 768

_TEMPLATE = """
[run]
name = "test"
seed = 7
inner_steps = {inner_steps}

[model]
preset = "tiny"
ffn_dim = {ffn_dim}
tie_embeddings = {tied}

[data]
sequence_length = 32

[inner.optimizer]
lr = 2e-3
warmup_steps = 2

[outer]
preset = "{preset}"
inner_steps_per_round = {inner_steps_per_round}
num_fragments = {num_fragments}
overlap_steps = {overlap_steps}
uplink_codec = "{codec}"
downlink_codec = "{codec}"
round_deadline = "{round_deadline}"

[coordinator]
state_dir = "{state_dir}"

[transport]
rpc_timeout = "{rpc_timeout}"
unreachable = "120s"

[evaluation]
num_sequences = 8
"""
_ISLAND = """
[islands.{name}]
ranks = {ranks}
mesh = {{ {mesh} }}
tokens_per_inner_step = 128
"""


def write_run(
    directory: Path,
    islands: Mapping[str, str],
    *,
    preset: str = "streaming",
    inner_steps: int = 8,
    inner_steps_per_round: int = 4,
    num_fragments: int = 2,
    overlap_steps: int = 1,
    codec: str = "int4",
    tied: bool = False,
    ffn_dim: int = 96,
    round_deadline: str = "60s",
    rpc_timeout: str = "10s",
) -> Path:
    """Write a run file; `islands` maps a name to its mesh: "", "dp_shard = 2, tp = 2".

    A lane has at least 64 KiB, so a fragment of this model has one; more with a larger `ffn_dim`.
    """
    text = _TEMPLATE.format(
        preset=preset,
        inner_steps=inner_steps,
        inner_steps_per_round=inner_steps_per_round,
        num_fragments=num_fragments,
        overlap_steps=overlap_steps,
        codec=codec,
        tied=str(tied).lower(),
        ffn_dim=ffn_dim,
        round_deadline=round_deadline,
        rpc_timeout=rpc_timeout,
        state_dir=directory / "state",
    )
    for name, mesh in islands.items():
        text += _ISLAND.format(name=name, ranks=_product(mesh), mesh=mesh)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "run.toml"
    path.write_text(text)
    return path


def of_transformers(run_file: Path, model: Path) -> Path:
    """Let a run file train the model of transformers whose config.json is in a directory."""
    start, _, rest = run_file.read_text().partition("[model]\n")
    _, _, end = rest.partition("\n\n")
    run_file.write_text(f'{start}[model]\nfamily = "hf"\nname = "{model}"\n\n{end}')
    return run_file


def _product(mesh: str) -> int:
    return math.prod(int(size) for size in re.findall(r"= (\d+)", mesh))


def with_text(run_file: Path, text: Path) -> Path:
    """Let a run file's islands train on a JSON lines file, of which 4 documents are held out."""
    data = f'held_out_documents = 4\nsources.code.files = "{text}"\n'
    run_file.write_text(run_file.read_text().replace("[data]\n", f"[data]\n{data}"))
    return run_file


class FinishedRun:
    """What a run left behind: records and events."""

    def __init__(self, run: LocalRun) -> None:
        self.state: StateDir = run.state
        plan = read_plan(self.state)
        assert plan is not None
        self.plan: Plan = plan
        stored = state_by_fragment(self.state, plan)
        self.stores = [
            FragmentStore(stored[f.fragment_id].store, f, 4) for f in self.plan.fragments
        ]
        self.events: dict[str, list[dict[str, Any]]] = read_events(
            run.config.telemetry_dir, run.config.islands
        )

    def last_records(self) -> list[VersionRecord]:
        """Return the newest record of every fragment."""
        recovered = [store.recover() for store in self.stores]
        assert None not in recovered
        return [found.record for found in recovered if found is not None]

    def of_kind(self, island: str, kind: str) -> list[dict[str, Any]]:
        """Return one island's events of one kind, of all its ranks."""
        return [event for event in self.events[island] if event["kind"] == kind]

    def losses(self, island: str) -> list[float]:
        """Return the loss of every inner step of an island."""
        return [event["loss"] for event in self.of_kind(island, "inner_step")]

    def ending_digests(self) -> set[tuple[str, ...]]:
        """Return the distinct digests with which ranks of all islands ended."""
        return {
            tuple(event["digests"])
            for island in self.events
            for event in self.of_kind(island, "island_ended")
        }


def run_to_end(run_file: Path, overrides: Sequence[str] = ()) -> FinishedRun:
    """Run everything on this machine and insist on success; on failure show every log."""
    with LocalRun(load_config(run_file, overrides)) as run:
        run.start()
        code = run.wait(lambda: None)
        run.wait_for_coordinator()
    assert code == 0, f"exit code {code}\n{all_logs(run.state.root)}"
    return FinishedRun(run)


def assert_all_ranks_carry_lanes(
    run: FinishedRun, islands: Iterable[str], num_ranks: int = 2
) -> None:
    """Check that each of these islands sent lanes of every fragment from all its ranks."""
    assert all(len(fragment.lanes) >= num_ranks for fragment in run.plan.fragments)
    for island in islands:
        sent = run.of_kind(island, "fragment_sent")
        carried = {(e["fragment_id"], e["island_rank"]) for e in sent if e["lanes_norm"] > 0}
        assert carried == {(f.fragment_id, r) for f in run.plan.fragments for r in range(num_ranks)}


def all_logs(directory: Path) -> str:
    """Return the end of every log below a directory."""
    logs = sorted(directory.rglob("*.log"))
    return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


def indexed_headers(state: StateDir) -> list[dict[str, Any]]:
    """Return the headers of all rounds that the coordinator indexed, in order."""
    with open_journal(state.journal) as journal:
        return [json.loads(header) for header in journal.headers()]


def index(journal: Journal, headers: Iterable[Mapping[str, Any]]) -> None:
    """Index records by their headers, as a coordinator does."""
    for h in headers:
        journal.write((), [(h["timeline"], h["fragment_id"], h["version"], json.dumps(h))])
