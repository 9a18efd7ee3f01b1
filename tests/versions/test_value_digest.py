"""Holds the digest of values to the protocol page, and to what it is for: every fault shows."""

from __future__ import annotations

import struct

import blake3
import pytest
import torch
from torch import Tensor

from diloco.compression.compiled import can_compile
from diloco.versions import value_digest
from diloco.versions.value_digest import lane_digest, version_digest

BLOCK = 1 << 16
MASK = (1 << 64) - 1


def split_mix(k: int) -> int:
    """Compute output k of SplitMix64 seeded with 0, in Python's integers."""
    z = (k + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def as_the_page_says(values: Tensor) -> bytes:
    bits = values.view(torch.int32).tolist()
    found = []
    for t in range(2):
        total = len(bits)
        for i, x in enumerate(bits):
            b, j = divmod(i, BLOCK)
            within = split_mix((1 << 41) * t + j) | 1
            across = split_mix((1 << 41) * t + (1 << 40) + b) | 1
            total += across * within * x
        found.append(total & MASK)
    return struct.pack("<2Q", *found)


@pytest.mark.parametrize("numel", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
def test_a_lane_is_digested_as_the_page_says(numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    assert lane_digest(values) == as_the_page_says(values)


def test_it_gives_the_digests_of_the_page() -> None:
    assert lane_digest(torch.ones(1)).hex() == "010080f1b507d910010080391ced6bf9"
    assert lane_digest(torch.arange(100_000.0)).hex() == "a04cb1797b14e50da0d4f328a5d128f9"


# Inductor's own imports use deprecated parts of torch.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.skipif(not can_compile(), reason="no g++")),
    ],
)
def test_compiled_it_gives_the_digests_of_the_page(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(value_digest._sums, backend=backend, fullgraph=True, dynamic=False)
    monkeypatch.setattr(value_digest, "_sums", compiled)

    test_it_gives_the_digests_of_the_page()

    assert counters["aot_autograd"]["ok"] == 2, "a kernel for either"
    torch.compiler.reset()


def test_blocks_beyond_the_first_weights_have_weights_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = torch.randn(9 * 8)
    monkeypatch.setattr("diloco.versions.value_digest._BLOCK", 8)
    digests = {lane_digest(values.roll(8 * k)) for k in range(9)}
    assert len(digests) == 9


def test_every_fault_shows() -> None:
    values = torch.randn(3 * BLOCK)
    damaged = [values.clone() for _ in range(9)]
    damaged[0][7] = -damaged[0][7]  # the bit that moves furthest to the left
    damaged[1].view(torch.int32)[-1] ^= 1
    damaged[2][:2] = damaged[2][:2].flip(0)
    damaged[3] = values.roll(BLOCK)
    damaged[4].neg_()
    damaged[5][BLOCK:] = 0.0
    damaged[6] = torch.cat([values, torch.zeros(1)])
    damaged[7] = values[:-1].clone()
    damaged[8].mul_(2.0)
    digests = {lane_digest(each) for each in [values, *damaged]}
    assert len(digests) == 1 + len(damaged)


def test_signs_that_change_together_do_not_cancel() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(512, generator=generator)
    digests = set()
    for _ in range(2_000):
        signs = torch.randint(0, 2, values.shape, generator=generator) * 2.0 - 1.0
        digests.add(lane_digest(values * signs))
    assert len(digests) == 2_000


def test_the_number_of_threads_changes_nothing() -> None:
    values, before = torch.randn(5 * BLOCK + 3), torch.get_num_threads()
    found = set()
    try:
        for num in (1, 2, 3):
            torch.set_num_threads(num)
            found.add(lane_digest(values))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_a_version_is_blake3_over_its_lanes_in_order() -> None:
    lanes = [b"\x01" * 16, b"\x02" * 16]
    assert version_digest(lanes) == blake3.blake3(b"\x01" * 16 + b"\x02" * 16).digest()
