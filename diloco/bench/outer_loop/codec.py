"""What codecs cost: speed against a copy of the same values, error, bytes on the wire.

Encode and decode run on one thread, on normal values whose size differs from block to block, and
are timed in CPU seconds, so that other load on the machine does less harm; the best of several
repetitions counts, copies in between. Formulas run as in a run: eagerly at first, and from their
`warm_up` on compiled. On a GPU, if there is one, the clock is that on the wall.

Chunks of payloads are packed with zstd where that pays (`diloco.transport.shaping.packing`). What
it makes of payloads (level 1: higher ones find no more) is measured on a real pseudo-gradient, that
of an island of 0.87M parameters after H inner steps, with what it costs, and the rate of a link
below which it pays, in seconds of both ends; and what crosses a slow line and a fast one then
(`codec_wire`):

    ratio r = coded / compressed; rate = 8 (1 - 1/r) / (1/c + 1/d)    c, d: bytes a CPU second

int4 has r = 1.08 (30 steps from scratch) to 1.18, c = 0.9, d = 1.2 GB/s: below 300 to 650 Mbit/s.
E3M0 has 1.15; bfloat16 (1.27) and int2 (1.42) gain more; E2M1 (1.06), int8 (at most 1.06) and top-k
(1.00 to 1.04) next to nothing. A syncer unpacks what islands on such links send, 0.4 ns a parameter
and island, next to some 5 (`bench syncer`).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import zstandard
from torch import Tensor

from diloco.bench.device_clock import device_s
from diloco.bench.outer_loop import codec_wire
from diloco.bench.outer_loop.byte_model import ByteTask, pseudo_gradient
from diloco.bench.outer_loop.codec_wire import WireSetting
from diloco.compression.base import Codec, to_bytes
from diloco.compression.blocks import BLOCK_NUMEL, BlockCodec
from diloco.compression.compiled import can_compile
from diloco.compression.registry import CODECS, get_codec
from diloco.report.rows import Column, Report, Requirement, Watch, matching

#: Codec -> GB/s of compiled encode and decode, at least.
Bars = Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class CodecSetting:
    """What is measured.

    Attributes:
        lane_numel: Values of a lane as runs have them, COMPILE_NUMEL or more.
        numel: Values encoded at once of which compiled formulas are measured, too.
        gpu_numel: The same on a GPU.
        repetitions: Of which the fastest counts.
        bars: What compiled formulas must reach on one CPU, at both sizes.
        stretch: What is hoped for.
        gpu_codecs: What is measured on a GPU.
        gpu_share: What they must reach there, as a share of copying.
        first: Inner steps of the island before the round whose pseudo-gradient zstd is tried on.
        inner_steps: Of that round.
        wire: What is sent of it over connections.
        wire_codecs: Whose payloads are.
    """

    lane_numel: int
    numel: int
    gpu_numel: int
    repetitions: int
    bars: Bars
    stretch: Bars
    gpu_codecs: Sequence[str]
    gpu_share: float
    first: int = 60
    inner_steps: int = 60
    wire: WireSetting = WireSetting()  # noqa: RUF009 - frozen
    wire_codecs: Sequence[str] = ("float32", "bfloat16", "int4", "e3m0", "int2")


#: Required; copies took 6.1 to 6.5 GB/s on the machine they are from.
SETTING = CodecSetting(
    lane_numel=1536 << 10,  # one of 16 of a fragment of 25 million parameters
    numel=4 << 20,
    gpu_numel=256 << 20,
    repetitions=7,
    bars={"int4": (3.0, 1.6), "e2m1": (1.0, 1.0)},
    stretch={"int4": (3.0, 2.5), "e2m1": (1.5, 1.5)},
    gpu_codecs=("int8", "int4", "e2m1", "e3m0"),
    gpu_share=0.5,
)

_COLUMNS = (
    Column("codec", "codec"),
    Column("mode", ""),
    Column("numel", "values", ","),
    Column("bytes_per_value", "B/value", ".3f"),
    Column("relative_error", "error", ".4f"),
    Column("encode_gb_per_s", "encode", ".2f"),
    Column("encode_of_copy", "/copy", ".2f"),
    Column("decode_gb_per_s", "decode", ".2f"),
    Column("decode_of_copy", "/copy", ".2f"),
    Column("zstd_ratio", "zstd", ".3f"),
    Column("zstd_gb_per_s", "pack", ".2f"),
    Column("unzstd_gb_per_s", "unpack", ".2f"),
    Column("zstd_below_mbps", "pays below Mbit/s", ",.0f"),
    Column("wire_ratio", "on a slow wire", ".3f"),
    Column("wire_speedup", "faster", ".3f"),
    Column("loopback_slowdown", "on loopback", ".3f"),
)
_ZSTD_LEVEL = 1
#: Payloads that zstd makes so much smaller must be faster on a slow line, by the share saved.
_SHRINKING = 1.1
#: CPU seconds of a payload on a fast line by those of one that nothing shrinks, at most.
_SLOWDOWN = 1.03
#: Coded bytes at least that zstd is timed on.
_ZSTD_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class CodecRow:
    """A row: a codec, how it is run (which column "mode" says), and on how much."""

    codec: Codec
    mode: str
    numel: int
    device: str = "cpu"


def run(watch: Watch, rows: Sequence[str] = (), *, setting: CodecSetting = SETTING) -> Report:
    """Measure codecs: all, or those whose names match.

    Call it in a process that has not warmed codecs up yet.

    Raises:
        ConfigError: If a pattern matches no codec.
    """
    names = matching(CODECS, rows, what="codec")
    wanted = [row for name in names for row in _rows(get_codec(name), setting)]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results: list[dict[str, Any]] = []
    try:
        delta = pseudo_gradient(ByteTask(), 1, first=setting.first, inner_steps=setting.inner_steps)
        for row in wanted:
            watch("codecs", len(results), len(wanted))
            # A codec's rows have the same bytes: one try is enough.
            tried: dict[str, Any] = {}
            if row.mode == "eager":
                coded = bytes(to_bytes(row.codec.encode(delta)))
                tried = _zstd(coded)
                if row.codec.name in setting.wire_codecs:
                    tried |= asyncio.run(codec_wire.measure(coded, setting.wire))
            results.append({**measure(row, setting.repetitions), **tried})
    finally:
        torch.set_num_threads(num_threads)
    described = {
        "lane_numel": setting.lane_numel,
        "numel": setting.numel,
        "gpu_numel": setting.gpu_numel if torch.cuda.is_available() else None,
        "repetitions": setting.repetitions,
        "first": setting.first,
        "inner_steps": setting.inner_steps,
        "threads": 1,
    }
    return Report("codec", described, _COLUMNS, results, _requirements(results, setting, names))


def _rows(codec: Codec, setting: CodecSetting) -> list[CodecRow]:
    """List a codec's rows, eager ones first: a formula of blocks is compiled, if it can be here."""
    rows = [CodecRow(codec, "eager", setting.lane_numel)]
    if isinstance(codec, BlockCodec) and can_compile():
        sizes = (setting.lane_numel, setting.numel)
        rows += [CodecRow(codec, "compiled", numel) for numel in sizes]
    if torch.cuda.is_available() and codec.name in setting.gpu_codecs and can_compile("cuda"):
        rows.append(CodecRow(codec, "GPU", setting.gpu_numel, "cuda"))
    return rows


def _requirements(
    rows: Sequence[dict[str, Any]], setting: CodecSetting, names: Sequence[str]
) -> list[Requirement]:
    """Judge what was measured; a row that is not there for want of a compiler is a miss."""
    judged = [
        Requirement(
            f"{name} {what}, compiled, {numel:,} values",
            _figure(rows, name, "compiled", numel, f"{what}_gb_per_s"),
            bar,
            "GB/s",
            is_at_least=True,
            is_stretch=is_stretch,
        )
        for bars, is_stretch in ((setting.bars, False), (setting.stretch, True))
        for name in bars
        if name in names
        for numel in (setting.lane_numel, setting.numel)
        for what, bar in zip(("encode", "decode"), bars[name], strict=True)
        if not is_stretch or bar > setting.bars[name][what == "decode"]
    ]
    if torch.cuda.is_available():
        judged += [
            Requirement(
                f"{name} {what}, GPU",
                _figure(rows, name, "GPU", setting.gpu_numel, f"{what}_of_copy"),
                setting.gpu_share,
                "of a copy",
                is_at_least=True,
            )
            for name in setting.gpu_codecs
            if name in names
            for what in ("encode", "decode")
        ]
    for row in (row for row in rows if row.get("wire_ratio")):
        name, ratio = row["codec"], row["zstd_ratio"]
        if ratio >= _SHRINKING:
            figure, limit = row["wire_speedup"], 2 - 1 / ratio
            judged.append(Requirement(f"{name}, slow wire", figure, limit, "x", is_at_least=True))
        figure = row["loopback_slowdown"]
        judged.append(Requirement(f"{name}, loopback", figure, _SLOWDOWN, "x"))
    return judged


def _figure(rows: Sequence[dict[str, Any]], name: str, mode: str, numel: int, key: str) -> float:
    """Find a figure; NaN, which misses every bar, where there is no such row."""
    found = (r for r in rows if (r["codec"], r["mode"], r["numel"]) == (name, mode, numel))
    return float(next(found, {}).get(key, float("nan")))


def measure(wanted: CodecRow, repetitions: int) -> dict[str, Any]:
    """Give one row: JSON values, hence `Any`."""
    codec, numel, seconds_of = wanted.codec, wanted.numel, _CLOCKS[wanted.device]
    values = _values(numel).to(wanted.device)
    copy = torch.empty_like(values)
    first = time.monotonic()
    if wanted.mode != "eager":
        assert isinstance(codec, BlockCodec)
        codec.warm_up(wanted.device)
    payload = codec.encode(values)
    decoded = codec.decode(payload, numel)
    first_s = time.monotonic() - first
    seconds: dict[str, list[float]] = {"copy": [], "encode": [], "decode": []}
    for _ in range(repetitions):
        seconds["copy"].append(seconds_of(lambda: copy.copy_(values)))
        seconds["encode"].append(seconds_of(lambda: codec.encode(values)))
        seconds["decode"].append(seconds_of(lambda: codec.decode(payload, numel)))
    speed = {what: 4e-9 * numel / min(times) for what, times in seconds.items()}
    return {
        "codec": codec.name,
        "mode": wanted.mode,
        "numel": numel,
        "bytes_per_value": len(payload) / numel,
        "relative_error": ((decoded - values).norm() / values.norm()).item(),
        "copy_gb_per_s": speed["copy"],
        "encode_gb_per_s": speed["encode"],
        "encode_of_copy": speed["encode"] / speed["copy"],
        "decode_gb_per_s": speed["decode"],
        "decode_of_copy": speed["decode"] / speed["copy"],
        "first_s": first_s,
    }


def _zstd(payload: bytes) -> dict[str, float]:
    """Compress a coded pseudo-gradient, and say where that pays."""
    packer = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
    unpacker = zstandard.ZstdDecompressor()
    packed = packer.compress(payload)
    assert unpacker.decompress(packed) == payload
    times = -(-_ZSTD_BYTES // len(payload))
    pack_s = _cpu_s(lambda: [packer.compress(payload) for _ in range(times)])
    unpack_s = _cpu_s(lambda: [unpacker.decompress(packed) for _ in range(times)])
    saved = max(0, len(payload) - len(packed))
    return {
        "zstd_ratio": len(payload) / len(packed),
        "zstd_gb_per_s": 1e-9 * times * len(payload) / pack_s,
        "unzstd_gb_per_s": 1e-9 * times * len(payload) / unpack_s,
        "zstd_below_mbps": 1e-6 * 8 * times * saved / (pack_s + unpack_s),
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


_CLOCKS: Mapping[str, Callable[[Callable[[], object]], float]] = {
    "cpu": _cpu_s,
    "cuda": functools.partial(device_s, torch.device("cuda")),
}
