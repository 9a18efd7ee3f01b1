import pytest
import torch

from diloco.compression.error_feedback import encode_with_feedback
from diloco.compression.registry import get_codec

INT4 = get_codec("int4")


def test_what_was_sent_and_what_is_left_add_up_to_all_pseudo_gradients() -> None:
    generator = torch.Generator().manual_seed(11)
    residual = torch.zeros(1000)
    total, sent = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    largest = 0.0

    for _ in range(20):
        delta = torch.randn(1000, generator=generator)
        payload, after = encode_with_feedback(INT4, delta, residual)
        assert after is not None
        decoded = INT4.decode(payload, 1000)
        total += delta
        sent += decoded
        residual = after
        largest = max(largest, (delta + residual).abs().max().item(), decoded.abs().max().item())

    # Each round rounds one sum and one difference to float32, both below 2 * largest.
    tolerance = 20 * 2 * 2.0**-24 * 2 * largest
    assert (total - sent - residual).abs().max().item() <= tolerance
    assert residual.any()


def test_the_residual_is_what_this_payload_lost() -> None:
    values, residual = torch.randn(2, 300, generator=torch.Generator().manual_seed(2))
    before = values.clone(), residual.clone()

    payload, after = encode_with_feedback(INT4, values, residual)

    assert after is not None
    assert torch.equal(payload, INT4.encode(values + residual))
    assert torch.equal(after, (values + residual) - INT4.decode(payload, 300))
    assert torch.equal(values, before[0])
    assert torch.equal(residual, before[1])


def test_a_codec_that_loses_nothing_leaves_no_residual() -> None:
    values = torch.randn(300, generator=torch.Generator().manual_seed(3))

    _, after = encode_with_feedback(get_codec("float32"), values, torch.zeros(300))

    assert after is not None
    assert not after.any()


@pytest.mark.parametrize("name", ["float32", "int4"])
def test_without_a_residual_it_is_off(name: str) -> None:
    values = torch.randn(300, generator=torch.Generator().manual_seed(4))

    payload, after = encode_with_feedback(get_codec(name), values, None)

    assert after is None
    assert torch.equal(payload, get_codec(name).encode(values))
