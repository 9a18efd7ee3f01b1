"""What training and its outer loop take on one CUDA device, each figure with its bar.

    step              the native trainer and plain PyTorch (`plain_loop`), in turns
    idle, flight      steps with an outer loop that has nothing to do, or fragments in flight
    send, merge       what one holds the training thread
    codec             encode and decode on the device
    checkpoint        what launching the copy to host memory holds the training thread
    islands           `diloco local`: two islands on the device, and one with the tokens of both

Coordinator and syncer are real processes on the CPU. A row that fails is one that is missed, and
the others are measured. Bars are goals: they are no figures of any machine.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from diloco.bench.outer_loop import codec, overhead
from diloco.bench.outer_loop.codec import CodecRow
from diloco.bench.outer_loop.memory import TRAINED_BYTES
from diloco.bench.outer_loop.overhead import OverheadSetting
from diloco.bench.processes import run_jobs
from diloco.bench.run_values import ISLAND, NO_OUTER, run_values
from diloco.bench.syncer.control_plane import control_plane
from diloco.bench.training import race
from diloco.bench.training.gpu_island import (
    DeviceKind,
    measure_blocked,
    measure_blocks,
    measure_checkpoint,
    measure_steps,
)
from diloco.bench.training.plain import PlainRow, config_of
from diloco.checkpoint.host_memory import available_bytes
from diloco.compression.compiled import can_compile
from diloco.compression.registry import get_codec
from diloco.config.load import resolved_toml
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.report.rows import Column, Report, Requirement, Watch, matching
from diloco.report.statistics import Interval
from diloco.trainer.flops import flops_per_token, peak_flops
from diloco.trainer.models.families import parameter_shapes, shape_of

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_Look: TypeAlias = Callable[[int, int], None]
_MILLI, _GIGA = 1e3, 1e9

ROWS = ("step", "idle", "flight", "send", "merge", "codec", "checkpoint", "islands")

_COLUMNS = (
    Column("row", "row"),
    Column("figure", "figure"),
    Column("median", "median", ".4g"),
    Column("low", "95 % from", ".4g"),
    Column("high", "to", ".4g"),
    Column("unit", "unit"),
)

#: 125 million parameters; and 669 million, 8.0 GB with their moments.
_SENT = {"dim": 1024, "num_layers": 10, "num_heads": 16, "num_kv_heads": 16, "ffn_dim": 2688}
_SAVED = {"dim": 2048, "num_layers": 13, "num_heads": 16, "num_kv_heads": 16, "ffn_dim": 5632}


@dataclass(frozen=True, slots=True)
class BlockedSetting:
    """How one fragment is sent and merged, between inner steps that only take time."""

    model: Mapping[str, Any] = field(default_factory=lambda: _SENT)
    rounds: int = 5  # the first one is not counted
    inner_steps_per_round: int = 14
    overlap_steps: int = 10
    step_s: float = 0.5


@dataclass(frozen=True, slots=True)
class IslandsSetting:
    """What two islands train on the device, and one with the tokens of both."""

    model: Mapping[str, Any] = field(default_factory=lambda: {"preset": "150M"})
    inner_steps: int = 120
    inner_steps_per_round: int = 20
    num_fragments: int = 4
    overlap_steps: int = 10
    momentum: float = 0.6  # as in `bench race`: 0.9 is of more rounds than these
    sequence_length: int = 512
    sequences: int = 32
    evaluation_sequences: int = 64


@dataclass(frozen=True, slots=True)
class GpuSetting:
    """What is measured.

    Attributes:
        device: Where; a CPU is for tests of the bench itself.
        backend: Of `torch.compile`, for native and plain blocks alike; empty: both run as written.
        step: The model and its blocks.
        step_cycles: Of two blocks; the first one warms up.
        blocks: Of rows idle and flight.
        blocked: Of rows send and merge.
        codec_numel: Values encoded at once.
        saved_model: Of row checkpoint; less of its layers, where they find no room.
        repetitions: Of codecs and checkpoints.
        islands: Of the row of that name.
    """

    device: DeviceKind = "cuda"
    backend: str = "inductor"
    step: PlainRow = PlainRow("150M", 16_384, 1024, 20)  # noqa: RUF009 - frozen
    step_cycles: int = 11
    blocks: OverheadSetting = field(
        default_factory=lambda: OverheadSetting(
            num_cycles=9,
            block_steps=30,
            sequence_length=1024,
            tokens_per_inner_step=16_384,
            model={"preset": "150M"},
        )
    )
    blocked: BlockedSetting = BlockedSetting()
    codec_numel: int = 256 << 20
    saved_model: Mapping[str, Any] = field(default_factory=lambda: _SAVED)
    repetitions: int = 5
    islands: IslandsSetting = IslandsSetting()


SETTING = GpuSetting()


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a row.

    Attributes:
        row: Of `ROWS`.
        what: The figure in words.
        values: One a repetition.
        unit: Of them.
        limit: Bar of their median; None: it is only told.
        is_at_least: Whether more is better.
    """

    row: str
    what: str
    values: Sequence[float]
    unit: str
    limit: float | None = None
    is_at_least: bool = False

    def as_row(self) -> dict[str, Any]:
        """Return it as JSON values."""
        told = {"row": self.row, "figure": self.what, "unit": self.unit}
        return {**told, **Interval.of(self.values).as_dict()}

    def requirement(self) -> Requirement | None:
        """Judge it, if it has a bar."""
        if self.limit is None:
            return None
        return Requirement(
            f"{self.row}: {self.what}",
            Interval.of(self.values).median,
            self.limit,
            self.unit,
            is_at_least=self.is_at_least,
        )


def run(watch: Watch, rows: Sequence[str] = (), *, setting: GpuSetting = SETTING) -> Report:
    """Measure every row whose name matches, and judge.

    Raises:
        ConfigError: If a pattern matches no row, or there is no CUDA device.
    """
    wanted = matching(ROWS, rows)
    if setting.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "diloco bench gpu needs a CUDA device, and PyTorch finds none here "
            f"(torch {torch.__version__}, CUDA {torch.version.cuda}): if there is one, type "
            "nvidia-smi and compare its driver with that; what a training thread waits for is "
            "counted without one by: diloco bench device"
        )
    if setting.backend == "inductor" and not can_compile(setting.device):
        setting = replace(setting, backend="")
    table, found = _described(setting), list[Figure]()
    for names, measure in _MEASURED.items():
        own = [name for name in names if name in wanted]
        if not own:
            continue
        look = functools.partial(watch, " and ".join(own))
        look(0, 1)
        try:
            found += [figure for figure in measure(setting, look) if figure.row in own]
        except Exception as error:  # of one row: a device is there for minutes, the others go on
            logger.exception("%s failed", " and ".join(own))
            text = " ".join(f"failed, {type(error).__name__}: {error}".split())
            found += [Figure(name, text, [1.0], "failures", 0.0) for name in own]
    return Report(
        "gpu",
        {**asdict(setting), "described": table},
        _COLUMNS,
        [{"table": table, **figure.as_row()} for figure in found],
        [judged for figure in found if (judged := figure.requirement()) is not None],
    )


def _described(setting: GpuSetting) -> str:
    name = torch.cuda.get_device_name() if setting.device == "cuda" else "CPU"
    blocks = f"blocks compiled by {setting.backend}" if setting.backend else "blocks not compiled"
    return f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, bfloat16, {blocks}"


def _job(work: Callable[[], _T], look: _Look, total: int) -> _T:
    """Do a row's work in a process of its own."""
    return run_jobs({"": work}, lambda done: look(done, total))[""]


def _island(setting: GpuSetting) -> dict[str, Any]:
    """Say where and how an island computes."""
    compiled = {"compile": True, "compile_backend": setting.backend} if setting.backend else {}
    return {"device": setting.device, "precision": "bfloat16", **compiled}


# -- rows ------------------------------------------------------------------------------------------


def _steps(setting: GpuSetting, look: _Look) -> list[Figure]:
    row, cycles = setting.step, setting.step_cycles
    config = config_of(row, cycles, _island(setting))
    job = functools.partial(
        measure_steps, config, setting.device, block_steps=row.block_steps, num_cycles=cycles
    )
    warming, *timed = _job(job, look, cycles).cycles
    num_tokens = row.block_steps * row.tokens_per_inner_step
    speeds = {
        "native": [num_tokens / cycle.native.wall_s for cycle in timed],
        "plain": [num_tokens / cycle.plain.wall_s for cycle in timed],
    }
    ratios = [ours / plain for ours, plain in zip(*speeds.values(), strict=True)]
    what = "tokens/s of the native trainer over plain PyTorch's"
    found = [
        Figure("step", what, ratios, "x", 0.98, True),
        Figure("step", "losses of the first block differ by", [warming.difference], "nats"),
    ]
    flops = flops_per_token(shape_of(config.model), row.sequence_length)
    peak = peak_flops(torch.device(setting.device))
    for name, speed in speeds.items():
        found.append(Figure("step", name, speed, "tokens/s"))
        if peak:
            found.append(
                Figure("step", f"MFU, {name}", [x * flops / peak for x in speed], "of peak")
            )
    return found


def _blocks(setting: GpuSetting, look: _Look) -> list[Figure]:
    blocks = setting.blocks
    with tempfile.TemporaryDirectory(prefix="diloco-gpu-") as directory:
        config = overhead.config_of(blocks, f"{directory}/run", _island(setting))
        with control_plane(config) as run_file:
            job = functools.partial(
                measure_blocks,
                run_file,
                setting.device,
                block_steps=blocks.block_steps,
                num_cycles=blocks.num_cycles,
            )
            cycles = _job(job, look, blocks.num_cycles)
    per_step = _MILLI / blocks.block_steps
    idle = [cycle.over_plain(cycle.idle_s) for cycle in cycles]
    flying = [cycle.over_plain(cycle.flying_s) for cycle in cycles]
    plain = [per_step * cycle.plain_s for cycle in cycles]
    return [
        Figure("idle", "steps with nothing due over plain ones", idle, "x", 1.01),
        Figure("idle", "plain step", plain, "ms"),
        Figure("flight", "steps with fragments in flight over plain ones", flying, "x", 1.02),
    ]


def _blocked(setting: GpuSetting, look: _Look) -> list[Figure]:
    blocked = setting.blocked
    inner_steps = blocked.rounds * blocked.inner_steps_per_round
    outer = {
        "preset": "streaming",
        "inner_steps_per_round": blocked.inner_steps_per_round,
        "num_fragments": 1,
        "overlap_steps": blocked.overlap_steps,
        "uplink_codec": "int4",
        "downlink_codec": "int4",
    }
    with tempfile.TemporaryDirectory(prefix="diloco-gpu-") as directory:
        values = run_values(
            "gpu-blocked",
            blocked.model,
            outer,
            inner_steps=inner_steps,
            island={"device": setting.device},
            state_dir=f"{directory}/run",
        )
        with control_plane(Config.model_validate(values)) as run_file:
            job = functools.partial(
                measure_blocked, run_file, setting.device, step_s=blocked.step_s
            )
            measured = _job(job, look, inner_steps)
    what = f"training thread held, {measured.num_values / 1e6:.0f}M values, int4"
    return [
        Figure(name, what, [_MILLI * each for each in seconds], "ms", 5.0)
        for name, seconds in measured.seconds.items()
    ]


def _codec(setting: GpuSetting, look: _Look) -> list[Figure]:
    mode = "GPU" if can_compile(setting.device) else "eager"
    row = CodecRow(get_codec("int4"), mode, setting.codec_numel, setting.device)
    told = _job(functools.partial(codec.measure, row, setting.repetitions), look, 1)
    encode, decode, copy = ([told[f"{what}_gb_per_s"]] for what in ("encode", "decode", "copy"))
    return [
        Figure("codec", "int4 encode, GB of float32", encode, "GB/s", 200.0, True),
        Figure("codec", "int4 decode", decode, "GB/s"),
        Figure("codec", "copy of the same values", copy, "GB/s"),
    ]


def _checkpoint(setting: GpuSetting, look: _Look) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="diloco-gpu-") as directory:
        layers, lack = fitting_layers(setting.saved_model, _rooms(setting, directory))
        job = functools.partial(
            measure_checkpoint,
            _saved_config(setting.saved_model, layers, _island(setting)),
            setting.device,
            Path(directory),
            repetitions=setting.repetitions,
        )
        measured = _job(job, look, setting.repetitions)
    state = f"{measured.num_bytes / _GIGA:.2g} GB of state"
    if lack:
        state += f" (no more fits the {lack})"
    return [
        Figure("checkpoint", f"training thread held, {state}", measured.taken_s, "s", 1.0),
        Figure("checkpoint", "until the next update may begin", measured.copied_s, "s"),
        Figure("checkpoint", "written behind training", [measured.saved_s], "s"),
    ]


def _saved_config(model: Mapping[str, Any], layers: int, island: Mapping[str, Any]) -> Config:
    chosen = {**model, "num_layers": layers}
    return Config.model_validate(
        run_values("gpu-checkpoint", chosen, NO_OUTER, island=island, island_id=ISLAND)
    )


def fitting_layers(model: Mapping[str, Any], rooms: Mapping[str, float]) -> tuple[int, str]:
    """Choose how many layers of a model are saved: all, or as many as find room, at least one.

    Args:
        model: Section [model].
        rooms: Bytes of parameters and moments that there is room for, by where.

    Returns:
        Layers, and where there is no room for more; empty: all are there.
    """
    lack = min(rooms, key=lambda place: rooms[place])
    for layers in range(model["num_layers"], 1, -1):
        shapes = parameter_shapes(shape_of(_saved_config(model, layers, {}).model))
        if TRAINED_BYTES * sum(map(math.prod, shapes.values())) <= rooms[lack]:
            return layers, "" if layers == model["num_layers"] else lack
    return 1, lack


def _rooms(setting: GpuSetting, directory: str) -> dict[str, float]:
    """Bytes of state that may be saved here.

    A device also has gradients, a third of that, and what PyTorch keeps; the host keeps the copy.
    """
    host = available_bytes() or math.inf
    is_cuda = setting.device == "cuda"
    device = torch.cuda.mem_get_info()[0] if is_cuda else host / 2
    return {
        "device": device / 1.6,
        "host's memory": (host if is_cuda else host / 2) / 1.2,
        "disk": shutil.disk_usage(directory).free / 1.1,
    }


def _islands(setting: GpuSetting, look: _Look) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="diloco-gpu-") as directory:
        place = Path(directory)
        order = {
            name: {
                "words": ["local"],
                "options": [],
                "toml": resolved_toml(islands_config(setting, name, place / name)),
            }
            for name in (_TWO, _ONE)
        }
        found = race.inside(order, None, place, lambda _, number: look(number, len(order)))
        summary = json.loads((place / _TWO / "summary.json").read_text())
    two, one = found[_TWO], found[_ONE]
    losses = [two["nats_per_byte"]]
    return [
        Figure(
            "islands", "digests equal", [float(summary["are_digests_equal"])], "of 1", 1.0, True
        ),
        # A uniform guess among bytes; NaN is no less.
        Figure("islands", "held-out loss of two", losses, "nats a byte", math.log(256)),
        Figure("islands", "over that of one", [losses[0] / one["nats_per_byte"]], "x"),
        Figure("islands", "wall time of two", [two["wall_s"]], "s"),
        Figure("islands", "wall time of one", [one["wall_s"]], "s"),
    ]


_TWO, _ONE = "two-islands", "data-parallel"


def islands_config(setting: GpuSetting, name: str, state_dir: Path) -> Config:
    """Write a run of two islands; or of one, whose outer step takes over what it has trained."""
    islands, is_one = setting.islands, name == _ONE
    outer: dict[str, Any] = {"inner_steps_per_round": islands.inner_steps_per_round}
    if is_one:
        outer |= {
            "preset": "classic",
            "uplink_codec": "float32",
            "downlink_codec": "float32",
            "optimizer": {"lr": 1.0, "momentum": 0.0, "momentum_ramp_rounds": 0},
        }
    else:
        outer |= {
            "preset": "streaming",
            "num_fragments": islands.num_fragments,
            "overlap_steps": islands.overlap_steps,
            "uplink_codec": "int4",
            "downlink_codec": "int4",
            "optimizer": {"lr": 0.7, "momentum": islands.momentum},
        }
    tokens = islands.sequences * islands.sequence_length
    values = run_values(
        f"gpu-{name}",
        islands.model,
        outer,
        inner_steps=islands.inner_steps,
        sequence_length=islands.sequence_length,
        tokens=2 * tokens if is_one else tokens,
        islands=["both"] if is_one else ["east", "west"],
        island={"device": setting.device, "precision": "bfloat16"},
        state_dir=state_dir,
        inner={
            "optimizer": {"name": "adamw", "lr": 1e-3, "warmup_steps": islands.inner_steps // 10}
        },
        evaluation={"num_sequences": islands.evaluation_sequences},
    )
    return Config.model_validate(values)


#: Rows that one measurement gives.
_MEASURED: Mapping[tuple[str, ...], Callable[[GpuSetting, _Look], list[Figure]]] = {
    ("step",): _steps,
    ("idle", "flight"): _blocks,
    ("send", "merge"): _blocked,
    ("codec",): _codec,
    ("checkpoint",): _checkpoint,
    ("islands",): _islands,
}
