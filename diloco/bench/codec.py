"""What codecs cost: speed beside a copy of the same values, error, bytes on the wire.

Encode and decode run on one thread, on normal values whose size differs from block to block, and
are timed in CPU seconds, so that other load on the machine does less harm; the best of several
repetitions counts, copies in between. Just below the size from which production compiles they run
eagerly, from it on compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco.bench.report import Column, Report, Requirement
from diloco.compression.base import Codec
from diloco.compression.blocks import BLOCK_NUMEL, BlockCodec
from diloco.compression.compiled import COMPILE_NUMEL, can_compile
from diloco.compression.registry import CODECS, get_codec


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured.

    Attributes:
        numel: Values encoded at once, COMPILE_NUMEL or more.
        repetitions: Of which the fastest counts.
        bars: Codec -> GB/s of compiled encode and decode, at least.
    """

    numel: int
    repetitions: int
    bars: dict[str, tuple[float, float]]


#: The bars of issue 4; copies took 6.1 to 6.5 GB/s on the machine they are from (measured.md B3).
SETTING = Setting(COMPILE_NUMEL, 7, {"int4": (3.0, 1.6), "e2m1": (1.0, 1.0)})

_COLUMNS = (
    Column("codec", "codec"),
    Column("mode", ""),
    Column("bytes_per_value", "B/value", ".3f"),
    Column("relative_error", "error", ".4f"),
    Column("encode_gb_per_s", "encode", ".2f"),
    Column("encode_of_copy", "/copy", ".2f"),
    Column("decode_gb_per_s", "decode", ".2f"),
    Column("decode_of_copy", "/copy", ".2f"),
)


def run_codec(
    setting: Setting, names: Sequence[str], on_progress: Callable[[int, int], None]
) -> Report:
    """Measure codecs, all or those named; `on_progress` hears of rows done and of rows in all.

    Raises:
        ConfigError: If there is no codec of a name.
    """
    began = time.monotonic()
    codecs = [get_codec(name) for name in names or CODECS]
    wanted = [(codec, mode) for codec in codecs for mode in _modes(codec)]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    try:
        for codec, mode in wanted:
            on_progress(len(rows), len(wanted))
            rows.append(_measure(codec, mode, setting))
        on_progress(len(rows), len(wanted))
    finally:
        torch.set_num_threads(num_threads)
    requirements = [
        Requirement(f"{name} {what}, compiled", _figure(rows, name, what), bar, "GB/s", True)
        for name, bars in setting.bars.items()
        if get_codec(name) in codecs
        for what, bar in zip(("encode", "decode"), bars, strict=True)
    ]
    described = {"numel": setting.numel, "repetitions": setting.repetitions, "threads": 1}
    return Report("codec", described, _COLUMNS, rows, requirements, time.monotonic() - began)


def _modes(codec: Codec) -> tuple[str, ...]:
    """Say how a codec can run here: a formula of blocks is compiled, if a compiler is there."""
    return ("eager", "compiled") if isinstance(codec, BlockCodec) and can_compile() else ("eager",)


def _figure(rows: Sequence[dict[str, Any]], name: str, what: str) -> float:
    """Find a compiled figure; NaN, which misses every bar, where there is no compiler."""
    found = (row for row in rows if (row["codec"], row["mode"]) == (name, "compiled"))
    return float(next(found, {}).get(f"{what}_gb_per_s", float("nan")))


def _measure(codec: Codec, mode: str, setting: Setting) -> dict[str, Any]:
    """Give one row: JSON values, hence `Any`."""
    values = _values(setting.numel if mode == "compiled" else COMPILE_NUMEL - BLOCK_NUMEL)
    numel, copy = len(values), torch.empty_like(values)
    first = time.monotonic()
    payload = codec.encode(values)
    decoded = codec.decode(payload, numel)
    first_s = time.monotonic() - first
    seconds: dict[str, list[float]] = {"copy": [], "encode": [], "decode": []}
    for _ in range(setting.repetitions):
        seconds["copy"].append(_cpu_s(lambda: copy.copy_(values)))
        seconds["encode"].append(_cpu_s(lambda: codec.encode(values)))
        seconds["decode"].append(_cpu_s(lambda: codec.decode(payload, numel)))
    speed = {what: 4e-9 * numel / min(times) for what, times in seconds.items()}
    return {
        "codec": codec.name,
        "mode": mode,
        "bytes_per_value": len(payload) / numel,
        "relative_error": ((decoded - values).norm() / values.norm()).item(),
        "copy_gb_per_s": speed["copy"],
        "encode_gb_per_s": speed["encode"],
        "encode_of_copy": speed["encode"] / speed["copy"],
        "decode_gb_per_s": speed["decode"],
        "decode_of_copy": speed["decode"] / speed["copy"],
        "first_s": first_s,
    }


def _values(numel: int) -> Tensor:
    """Draw seeded pseudo-gradients: normal in a block, sizes spread over some powers of two."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randn(-(-numel // BLOCK_NUMEL), BLOCK_NUMEL, generator=generator)
    sizes = 1e-3 * torch.randn(len(blocks), 1, generator=generator).exp2()
    return (blocks * sizes).flatten()[:numel]


def _cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds that this thread spends on `work`."""
    began = time.thread_time()
    work()
    return time.thread_time() - began
