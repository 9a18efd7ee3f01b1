import numpy as np
import pytest
import torch

from diloco.compression.base import from_bytes, to_bytes


def test_bytes_of_a_payload_are_its_memory() -> None:
    payload = torch.tensor([1, 2, 255], dtype=torch.uint8)

    view = to_bytes(payload)
    payload[0] = 7

    assert isinstance(view, memoryview)
    assert (view.format, view.nbytes) == ("B", 3)
    assert view.tobytes() == b"\x07\x02\xff"


@pytest.mark.parametrize(
    "buffer",
    [
        pytest.param(b"\x01\x02\xff", id="bytes"),
        pytest.param(bytearray(b"\x01\x02\xff"), id="bytearray"),
        pytest.param(memoryview(b"\x00\x01\x02\xff")[1:], id="memoryview"),
    ],
)
def test_received_bytes_are_viewed_in_place(buffer: bytes) -> None:
    address = np.frombuffer(buffer, dtype=np.uint8).ctypes.data

    payload = from_bytes(buffer)

    assert payload.dtype == torch.uint8
    assert payload.tolist() == [1, 2, 255]
    assert payload.data_ptr() == address


def test_no_bytes_are_an_empty_payload() -> None:
    assert from_bytes(b"").shape == (0,)
    assert to_bytes(torch.empty(0, dtype=torch.uint8)).tobytes() == b""
