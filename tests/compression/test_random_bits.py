import numpy as np
import torch

from diloco.compression.random_bits import key_tensor, rounding_key, uniform

CPU = torch.device("cpu")


def drawn(key: int, rows: int = 1000) -> torch.Tensor:
    return uniform(key_tensor(key, CPU), rows, 128)


def lowbias32(state: np.ndarray) -> np.ndarray:
    """Wellons' function as published."""
    state = (state ^ (state >> np.uint32(16))) * np.uint32(0x7FEB352D)
    state = (state ^ (state >> np.uint32(15))) * np.uint32(0x846CA68B)
    return state ^ (state >> np.uint32(16))


def test_bits_are_the_published_hash_of_index_and_key() -> None:
    key = 0x89ABCDEF_F1234567

    index = np.arange(128_000, dtype=np.uint32)
    hashed = lowbias32(lowbias32(index + np.uint32(0xF1234567)) ^ np.uint32(0x89ABCDEF))

    expected = ((hashed & np.uint32(0xFFFF)) + 0.5) / 2**16
    assert np.array_equal(drawn(key).flatten().numpy().astype(float), expected)


def test_they_are_uniform_and_keys_are_independent() -> None:
    a, b = drawn(1).double().flatten(), drawn(2).double().flatten()

    assert 0 < a.min() < a.max() < 1
    # Five standard deviations of n = 128,000 draws: 0.289 / sqrt(n) of a mean, 1 / sqrt(n) of a
    # correlation; sqrt(n p) of a count in one of 64 bins.
    assert abs(a.mean().item() - 0.5) < 5 * 0.289 / 128_000**0.5
    counts = torch.histc(a, 64, 0, 1)
    assert (counts - 2000).abs().max() < 5 * 2000**0.5
    for other in (b, a.roll(1), a.roll(128)):
        correlation = torch.corrcoef(torch.stack((a, other)))[0, 1].item()
        assert abs(correlation) < 5 / 128_000**0.5


def test_a_key_tells_every_counter_apart() -> None:
    counters = (1234, 0, 1, 2, 3, 0, "east")
    keys = {rounding_key(*counters)}
    for i, value in enumerate(counters):
        other = f"{value}-2" if isinstance(value, str) else value + 1
        keys.add(rounding_key(*counters[:i], other, *counters[i + 1 :]))

    assert len(keys) == 8
    assert rounding_key(1, 11) != rounding_key(11, 1)
    assert all(0 <= key < 1 << 64 for key in keys)
