"""Defines what a codec is, and the checks that all codecs make.

A codec turns a flat float32 vector into bytes, and back. The number of bytes depends on the number
of values only. A codec keeps no state between calls and no reference to its arguments. All numbers
on the wire are little-endian, as on every supported host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from diloco.errors import CodecError
from diloco.transport.contracts import Buffer

_FLAT = torch.contiguous_format


@dataclass(frozen=True, slots=True)
class Layout:
    """Where groups of values lie in a payload, so that some can be decoded without the others.

    Attributes:
        group_numel: Values that are encoded together; the last group may have fewer.
        section_bytes: Of each section of the payload, bytes of a group: a section holds those of
            all groups, in order.
    """

    group_numel: int
    section_bytes: tuple[int, ...]

    def wire_bytes(self, numel: int) -> int:
        """Return the bytes of all groups that `numel` values begin."""
        return -(-numel // self.group_numel) * sum(self.section_bytes)

    def part(self, numel: int, place: slice) -> tuple[slice, list[slice]]:
        """Find the groups that hold the values of `place`, start < end, among `numel`.

        Returns:
            The values of these groups, and the parts of the payload that, joined, are a payload of
            these values.
        """
        first, last = place.start // self.group_numel, -(-place.stop // self.group_numel)
        parts, at = [], 0
        for size in self.section_bytes:
            parts.append(slice(at + first * size, at + last * size))
            at += -(-numel // self.group_numel) * size
        return slice(first * self.group_numel, min(last * self.group_numel, numel)), parts


class Codec(Protocol):
    """Encodes and decodes flat float32 vectors; gives the same bytes on every device.

    Attributes:
        name: Its name in the configuration and in message headers.
        publishes_values: Whether a syncer publishes parameters themselves with it (float32 only)
            or the difference to what was published before.
        has_zero: Whether a zero comes back as zero, whatever its neighbours are; false for int2
            and top-k.
    """

    name: str
    publishes_values: bool
    has_zero: bool

    @property
    def layout(self) -> Layout | None:
        """Of its payloads; None: they are decoded whole, as are those of another package's."""

    def wire_bytes(self, numel: int) -> int:
        """Return the size in bytes of `numel` >= 0 encoded values, everything included."""

    def encode(self, values: Tensor, key: int = 0) -> Tensor:
        """Encode `values`.

        Args:
            values: Shape [numel], float32, any device; unchanged, and never aliased.
            key: 64 bits from which stochastic rounding draws (`rounding_key`); other codecs ignore
                it. Equal values and equal keys give equal bytes.

        Returns:
            Tensor of shape [wire_bytes(numel)], uint8, same device, freshly allocated.

        Raises:
            CodecError: If a value is NaN or infinite, or larger than the codec can send, or the
                tensor is not flat float32.
        """

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Decode a payload; refuse one that `encode` never gives.

        Args:
            payload: Shape [wire_bytes(numel)], uint8, any device; unchanged, and never aliased.
            numel: Number of values to return.

        Returns:
            Tensor of shape [numel], float32, finite, same device, freshly allocated.

        Raises:
            CodecError: If the payload has another size, or cannot be decoded to finite values.
        """

    def check(self, payload: Tensor, numel: int) -> None:
        """Refuse exactly what `decode` refuses, at a fraction of its time and memory.

        Raises:
            CodecError: As `decode` does.
        """


def to_bytes(values: Tensor) -> memoryview:
    """View a flat, contiguous tensor as bytes; what is not on the CPU is copied there first.

    From CUDA into pinned memory, which PyTorch gives to a later copy once nobody reads these bytes
    any more; only the stream of the calling thread is waited for.
    """
    here = values.to("cpu", non_blocking=True)
    if values.is_cuda:
        torch.cuda.current_stream(values.device).synchronize()
    return here.view(torch.uint8).numpy().data


def from_bytes(buffer: Buffer) -> Tensor:
    """View bytes as a flat uint8 CPU tensor, without copying.

    The tensor keeps the buffer alive. It must not be written to, since the buffer may be of
    immutable bytes (hence DLPack: `torch.frombuffer` warns of these).
    """
    return from_dlpack(np.frombuffer(buffer, dtype=np.uint8))


def check_flat(name: str, values: Tensor) -> None:
    """Refuse to encode what is not a flat float32 vector.

    Raises:
        CodecError: Naming the codec, the dtype and the shape.
    """
    if values.dtype != torch.float32 or values.dim() != 1:
        raise CodecError(
            f"{name} encodes flat float32 vectors, not {values.dtype} {tuple(values.shape)}"
        )


def check_payload(name: str, payload: Tensor, wire_bytes: int, numel: int) -> None:
    """Refuse to decode a payload of another size than `numel` values have.

    Raises:
        CodecError: Naming the codec and both sizes.
    """
    if payload.dtype != torch.uint8 or payload.shape != (wire_bytes,):
        raise CodecError(
            f"{name} payload of {numel} values must be {wire_bytes} bytes, got {payload.dtype} "
            f"{tuple(payload.shape)}"
        )


def is_finite(values: Tensor) -> bool:
    """Return whether no value is NaN or infinite, in one pass without allocations.

    NaN passes through both ends; `values.isfinite().all()` takes twenty times as long.
    """
    return not values.numel() or all(end.isfinite() for end in values.aminmax())


def values_of(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """View flat bytes as values of `dtype`; copy them first if they are not aligned."""
    size = dtype.itemsize
    is_aligned = payload.storage_offset() % size == 0 and payload.data_ptr() % size == 0
    is_readable = is_aligned and payload.is_contiguous()
    return (payload if is_readable else payload.clone(memory_format=_FLAT)).view(dtype)


def check_finite(name: str, values: Tensor) -> None:
    """Refuse a flat vector that holds NaN or infinity.

    Raises:
        CodecError: Naming the codec, and the first such value with its index.
    """
    if not is_finite(values):
        index = int(values.isfinite().logical_not().nonzero()[0])
        raise CodecError(
            f"{name} met {values[index].item()} at element {index} of {values.numel()}: "
            "only finite values can be sent"
        )
