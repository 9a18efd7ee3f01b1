"""What the outer loop takes of an accelerator that has no room for outer state, by what it does.

The outer state (anchor, residual, what is outstanding and staged) then lies in host memory. Of a
fragment that is sent, the device has no copy; what is merged is copied there as soon as all ranks
have it staged, during the steps before the merge. Streaming DiLoCo keeps two fragments of
36 there, for 2 % of a model of 100B with its optimizer, where whole outer state would be 66 %:

    8 bytes of outer parameters and momentum / 12 of parameters and Adam's moments      = 66 %
    2 of P fragments of them                                                            = 66 % 2 / P

The same ratio is computed of the measured bytes. They are those of a device made of host memory
(`counted_device`), and so are exact but for what CUDA's allocator rounds up and its kernels take
inside an operation.

Source: Streaming DiLoCo (arXiv 2501.18512), section on memory; papers' anchor 66 % and 2 %.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import diloco
from diloco.bench.outer_loop.counted_device import CountedDevice
from diloco.bench.processes import run_jobs
from diloco.bench.run_values import ISLAND, MODEL_10M, run_values
from diloco.bench.syncer.control_plane import control_plane
from diloco.config.schema import Config
from diloco.report.rows import Column, Report, Requirement, Watch
from diloco.telemetry.events import Event, FragmentMerged
from diloco.trainer.models.model import LlamaShape, parameter_shapes

_NOISE = 1e-3
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
    Column("extra_mib", "extra, MiB", ".3f"),
    Column("fragments", "fragments", ".3f"),
    Column("of_trained", "of 12 B/param.", ".2%"),
)


@dataclass(frozen=True, slots=True)
class MemorySetting:
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
    model: dict[str, int] = field(default_factory=lambda: MODEL_10M)


SETTING = MemorySetting()


def run(watch: Watch, *, setting: MemorySetting = SETTING) -> Report:
    """Synchronise, count and judge.

    Raises:
        DilocoError: If coordinator, syncer or island fail.
    """
    rows: list[dict[str, Any]] = []
    requirements = []
    total = len(setting.local_mixes)
    for done, local_mix in enumerate(setting.local_mixes):
        look = functools.partial(watch, "rows", done, total)
        measured = _measure(setting, local_mix, look)
        rows += figures(local_mix, measured)
        requirements.append(_requirement(setting, local_mix, measured))
    return Report("memory", asdict(setting), _COLUMNS, rows, requirements)


def _measure(setting: MemorySetting, local_mix: float, look: Callable[[], None]) -> MeasuredMemory:
    with (
        tempfile.TemporaryDirectory(prefix="diloco-memory-") as directory,
        control_plane(config_of(setting, local_mix, f"{directory}/run")) as run_file,
    ):
        return run_jobs({"": functools.partial(measure, run_file)}, lambda _: look())[""]


def config_of(setting: MemorySetting, local_mix: float, state_dir: str) -> Config:
    """Write the run of a row."""
    outer = {
        "preset": "streaming",
        "inner_steps_per_round": setting.inner_steps_per_round,
        "num_fragments": setting.num_fragments,
        "overlap_steps": setting.overlap_steps,
        "local_mix": local_mix,
        "uplink_codec": setting.codec,
        "downlink_codec": setting.codec,
    }
    steps = setting.inner_steps
    return Config.model_validate(
        run_values("memory", setting.model, outer, inner_steps=steps, state_dir=state_dir)
    )


def figures(local_mix: float, measured: MeasuredMemory) -> list[dict[str, Any]]:
    """Compute the rows of one run, in the order of `_PHASES`."""
    trained_bytes = TRAINED_BYTES * measured.parameter_bytes / 4
    return [
        {
            "table": f"local_mix = {local_mix:g}, {measured.num_merges} merges",
            "local_mix": local_mix,
            "phase": heading,
            "extra_bytes": (extra := measured.extra_bytes.get(phase, 0)),
            "extra_mib": extra / _MEBI,
            "fragments": extra / measured.largest_fragment_bytes,
            "of_trained": extra / trained_bytes,
            "largest_fragment_bytes": measured.largest_fragment_bytes,
            "largest_tensor_bytes": measured.largest_tensor_bytes,
            "parameter_bytes": measured.parameter_bytes,
        }
        for phase, heading in _PHASES.items()
    ]


def _requirement(setting: MemorySetting, local_mix: float, measured: MeasuredMemory) -> Requirement:
    """Judge the worst moment; a run that merged nothing proves nothing."""
    most = max(measured.extra_bytes.values()) if measured.num_merges else float("nan")
    return Requirement(
        f"local_mix = {local_mix:g}: most extra device memory, in the largest fragment",
        most / measured.largest_fragment_bytes,
        setting.at_most,
        "fragments",
    )


# -- the island, in a process of its own -----------------------------------------------------------


@dataclass(slots=True)
class MeasuredMemory:
    """Bytes on the device beyond the parameters, at most, by what the outer loop did.

    Attributes:
        num_merges: Merges that were looked at.
        largest_fragment_bytes: Of its parameters.
        largest_tensor_bytes: Of the parameters.
        parameter_bytes: Of all of them.
        extra_bytes: At most, by phase; what stays there when a step is over is "flight" where
            fragments are in flight, prefetched ones among them, and else "between".
    """

    num_merges: int = 0
    largest_fragment_bytes: int = 0
    largest_tensor_bytes: int = 0
    parameter_bytes: int = 0
    extra_bytes: dict[str, int] = field(default_factory=dict)

    def extra(self, phase: str, num_bytes: int) -> None:
        """Keep the most of a phase."""
        self.extra_bytes[phase] = max(self.extra_bytes.get(phase, 0), num_bytes)


def measure(run_file: Path) -> MeasuredMemory:
    """Join as the run's only island, and make all its inner steps.

    Args:
        run_file: The run; its island is `ISLAND`.
    """
    config = diloco.load_config(run_file, island=ISLAND)
    device, found = CountedDevice(), MeasuredMemory()
    generator = torch.Generator().manual_seed(config.run.seed)
    shapes = parameter_shapes(LlamaShape.from_config(config.model))
    parameters = {
        name: device.place(torch.randn(shape, generator=generator)).requires_grad_()
        for name, shape in shapes.items()
    }
    merged: list[FragmentMerged] = []

    def hear(event: Event) -> None:
        if isinstance(event, FragmentMerged):
            merged.append(event)

    at_rest = device.live_bytes

    @contextmanager
    def counting(*phases: str) -> Iterator[None]:
        device.reset_peak()
        yield
        for phase in phases or _phases(merged, outer.num_in_flight - in_flight):
            found.extra(phase, device.peak_bytes - at_rest)
        found.extra("flight" if outer.num_in_flight else "between", device.live_bytes - at_rest)
        found.num_merges += len(merged)
        merged.clear()

    in_flight = 0
    with diloco.connect(config) as connection:
        with counting("start"):
            outer = diloco.DiLoCo(parameters, config.outer, transport=connection, on_event=hear)
        for _ in range(config.run.inner_steps):
            _train_(parameters, generator)
            in_flight = outer.num_in_flight
            with counting():
                outer.step(num_tokens=config.island.tokens_per_inner_step)
        with counting("finish"):
            outer.finish()
        with counting("evaluate"), outer.global_parameters():
            pass
        fragments = outer.plan.fragments
    found.largest_fragment_bytes = 4 * max(fragment.numel for fragment in fragments)
    found.largest_tensor_bytes = 4 * max(map(math.prod, shapes.values()))
    found.parameter_bytes = 4 * sum(map(math.prod, shapes.values()))
    return found


def _phases(merged: list[FragmentMerged], more_in_flight: int) -> list[str]:
    """Say what a step did: a merge ends what is in flight, a send begins it."""
    phases = ["merge"] if merged else []
    return [*phases, "send"] if more_in_flight + len(merged) > 0 else phases


@torch.no_grad()
def _train_(parameters: dict[str, Tensor], generator: torch.Generator) -> None:
    for parameter in parameters.values():
        noise = torch.randn(parameter.shape, generator=generator).mul_(_NOISE)
        parameter.add_(noise.to(parameter.device))
