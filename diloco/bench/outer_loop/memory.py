"""What the outer loop takes of an accelerator's memory: beyond the parameters, by what it does.

An island's outer state (anchor, residual, what is outstanding and staged) lies in host memory. Of a
fragment that is sent, the device has no copy; what is merged is copied there as soon as all ranks
have it staged, beside the steps before the merge. Streaming DiLoCo keeps two fragments of
36 there, for 2 % of a model of 100B with its optimizer, where whole outer state would be 66 %:

    8 bytes of outer parameters and momentum / 12 of parameters and Adam's moments      = 66 %
    2 of P fragments of them                                                            = 66 % 2 / P

The same ratio is told of the measured bytes. On CUDA they are the allocator's; elsewhere those of
a device made of host memory (`counted_device`), and so are exact but for what CUDA's allocator
rounds up and its kernels take inside an operation.

Source: Streaming DiLoCo (arXiv 2501.18512), section on memory; papers' anchor 66 % and 2 %.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from diloco.bench.outer_loop import memory_island
from diloco.bench.outer_loop.memory_island import ISLAND, Measured
from diloco.bench.syncer.control_plane import control_plane
from diloco.config.schema import Config
from diloco.report.rows import Column, Report, Requirement

#: Bytes a parameter of a training device: float32 parameters and AdamW's two moments.
TRAINED_BYTES = 12
_MEBI = 1 << 20

_PHASES = {
    "start": "entering the run",
    "send": "a send",
    "merge": "a merge",
    "flight": "steps with fragments in flight",
    "between": "steps without",
    "finish": "the flush",
    "evaluate": "published values in place",
}

_COLUMNS = (
    Column("phase", "during"),
    Column("device", "device"),
    Column("extra_mib", "extra, MiB", ".3f"),
    Column("fragments", "fragments", ".3f"),
    Column("of_trained", "of 12 B/param.", ".2%"),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is synchronised, and what is judged.

    Attributes:
        local_mixes: alpha of each row: 0 copies, others add.
        at_most: Extra bytes at any moment, in bytes of the largest fragment's parameters.
    """

    local_mixes: tuple[float, ...] = (0.0, 0.5)
    num_fragments: int = 6
    inner_steps: int = 24
    inner_steps_per_round: int = 12
    overlap_steps: int = 5  # no step both sends and merges; rounds end before, mostly
    codec: str = "int4"
    at_most: float = 2 * 1.05
    model: dict[str, int] = field(
        default_factory=lambda: {  # 9,933,696 parameters
            "dim": 384,
            "num_layers": 6,
            "num_heads": 6,
            "num_kv_heads": 3,
            "ffn_dim": 1024,
        }
    )


SETTING = Setting()


def run_memory(setting: Setting, *, on_progress: Callable[[int], None]) -> Report:
    """Synchronise, count and judge.

    Args:
        setting: What is synchronised.
        on_progress: Hears how many rows are done.

    Raises:
        DilocoError: If coordinator, syncer or island fail.
    """
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    requirements = []
    for done, local_mix in enumerate(setting.local_mixes):
        on_progress(done)
        measured = _measure(setting, local_mix)
        rows += figures(local_mix, measured)
        requirements.append(_requirement(setting, local_mix, measured))
    return Report(
        bench="memory",
        setting=asdict(setting),
        columns=_COLUMNS,
        rows=rows,
        requirements=requirements,
        wall_s=time.monotonic() - began,
    )


def _measure(setting: Setting, local_mix: float) -> Measured:
    with (
        tempfile.TemporaryDirectory(prefix="diloco-memory-") as directory,
        control_plane(config_of(setting, local_mix, f"{directory}/run")) as run_file,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
    ):
        return pool.submit(memory_island.measure, run_file).result()


def config_of(setting: Setting, local_mix: float, state_dir: str) -> Config:
    """Write the run of a row."""
    return Config.model_validate(
        {
            "run": {"name": "memory", "seed": 1, "inner_steps": setting.inner_steps},
            "model": setting.model,
            "data": {"sequence_length": 32},
            "inner": {"optimizer": {"lr": 1e-3}},
            "outer": {
                "preset": "streaming",
                "inner_steps_per_round": setting.inner_steps_per_round,
                "num_fragments": setting.num_fragments,
                "overlap_steps": setting.overlap_steps,
                "local_mix": local_mix,
                "uplink_codec": setting.codec,
                "downlink_codec": setting.codec,
            },
            "coordinator": {"state_dir": state_dir},
            "islands": {ISLAND: {"ranks": 1, "tokens_per_inner_step": 32}},
        }
    )


def figures(local_mix: float, measured: Measured) -> list[dict[str, Any]]:
    """Compute the rows of one run, in the order of `_PHASES`."""
    trained_bytes = TRAINED_BYTES * measured.parameter_bytes / 4
    return [
        {
            "table": f"local_mix = {local_mix:g}, {measured.num_merges} merges",
            "local_mix": local_mix,
            "phase": told,
            "device": measured.device,
            "extra_bytes": (extra := measured.extra_bytes.get(phase, 0)),
            "extra_mib": extra / _MEBI,
            "fragments": extra / measured.largest_fragment_bytes,
            "of_trained": extra / trained_bytes,
            "largest_fragment_bytes": measured.largest_fragment_bytes,
            "largest_tensor_bytes": measured.largest_tensor_bytes,
            "parameter_bytes": measured.parameter_bytes,
        }
        for phase, told in _PHASES.items()
    ]


def _requirement(setting: Setting, local_mix: float, measured: Measured) -> Requirement:
    """Judge the worst moment; a run that merged nothing proves nothing."""
    most = max(measured.extra_bytes.values()) if measured.num_merges else float("nan")
    return Requirement(
        f"local_mix = {local_mix:g}: most extra device memory, in the largest fragment",
        most / measured.largest_fragment_bytes,
        setting.at_most,
        "fragments",
    )
