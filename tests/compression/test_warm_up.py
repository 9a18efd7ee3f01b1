"""Compiling ahead what a plan's lanes need: which codecs, when not, and that it is enough."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo.utils

from diloco.compression import compiled as compiling
from diloco.compression import warm_up as warming
from diloco.compression.blocks import BlockCodec
from diloco.compression.compiled import COMPILE_NUMEL, can_compile, chosen
from diloco.compression.lanes import lane_codec
from diloco.compression.warm_up import warm_up
from diloco.outer.fragments import TensorSpec, make_plan

LARGE = make_plan(
    [
        TensorSpec("a.weight", (1400, 1024)),
        TensorSpec("b.norm", (300,)),
        TensorSpec("c.weight", (700, 1024)),
    ],
    num_fragments=1,
    num_lanes=2,
)
SMALL = make_plan([TensorSpec("a.weight", (1000, 1024))], num_fragments=1, num_lanes=16)


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the codecs that are compiled, which none really is."""
    names: list[str] = []
    monkeypatch.setattr(compiling, "_prepared", {})
    monkeypatch.setattr(warming, "can_compile", lambda _: True)
    monkeypatch.setattr(BlockCodec, "warm_up", lambda codec, device: names.append(codec.name))
    return names


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["int4", "int4"], ["int4"]),
        (["int4", "e2m1-stochastic"], ["e2m1-stochastic", "int4"]),
        (["float32", "topk64"], []),
        (["topk64 a.*=int8", "float16 b.*=int4"], ["int8"]),
    ],
)
def test_each_block_codec_of_a_large_lane_is_compiled_once(
    names: list[str], expected: list[str], warmed: list[str]
) -> None:
    warm_up(LARGE, names)

    assert warmed == expected


def test_nothing_is_compiled_for_small_lanes_nor_without_a_compiler(
    warmed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up(SMALL, ["int4"])
    monkeypatch.setattr(warming, "can_compile", lambda _: False)
    warm_up(LARGE, ["int4"])

    assert not warmed


# Inductor's own imports use deprecated parts of torch.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.timeout(180)
@pytest.mark.skipif(not can_compile(), reason="no C++ compiler or no Python headers")
def test_a_warm_lane_is_coded_without_compiling_in_whatever_thread_and_in_many_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def graphs() -> int:
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def code() -> None:
        torch.set_num_threads(num_threads + 1)
        for lane in LARGE.fragments[0].lanes:
            codec = lane_codec("int4 *norm=float32", LARGE.fragments[0], lane.lane_id)
            values = torch.randn(lane.numel + 1)[1:]
            payload = codec.encode(values)
            codec.decode(payload, lane.numel)
            codec.decode(torch.cat((payload[:1], payload))[1:], lane.numel)
            done.append(codec.name)

    def code_often(_: int) -> None:
        quantise = next(formula for formula, _ in compiling._prepared)
        blocks = torch.ones(512, 128)
        for _ in range(1000):
            chosen(quantise, blocks, COMPILE_NUMEL)(blocks, None)

    monkeypatch.setattr(compiling, "_prepared", {})
    done: list[str] = []
    num_threads, switch_interval = torch.get_num_threads(), sys.getswitchinterval()
    warm_up(LARGE, ["int4 *norm=float32"])
    assert (compiled := graphs()) > 0
    thread = threading.Thread(target=code)
    try:
        thread.start()
        thread.join()
        with torch.device("meta"), torch.set_grad_enabled(True):
            int4 = lane_codec("int4", SMALL.fragments[0], 0)
            int4.encode(torch.zeros(1 << 20, device="cpu"))
        sys.setswitchinterval(1e-6)
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(code_often, range(6)))
    finally:
        sys.setswitchinterval(switch_interval)
        torch.set_num_threads(num_threads)

    assert len(done) == 2
    assert graphs() == compiled
