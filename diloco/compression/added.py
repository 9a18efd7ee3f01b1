"""Holds a codec of another package to what `Codec` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from diloco.compression.base import Codec, check_flat, check_payload, is_finite
from diloco.errors import CodecError

_T = TypeVar("_T")


class AddedCodec:
    """Passes calls on; what goes wrong in them, or comes out of them, is a CodecError.

    A defect of a package is then a payload that is refused, or an attempt that expires with the
    reason, and ends no syncer.
    """

    layout = None  # what lies where is known to its package alone

    def __init__(self, codec: Codec, shown: str) -> None:
        """Read its attributes.

        Args:
            codec: Of the other package.
            shown: Which it is, for messages.
        """
        self.name = codec.name
        self.publishes_values = codec.publishes_values
        self.has_zero = codec.has_zero
        self._codec = codec
        self._shown = shown

    def wire_bytes(self, numel: int) -> int:
        """Pass on; see `Codec.wire_bytes`."""
        size = self._call(self._codec.wire_bytes, numel)
        if not isinstance(size, int) or size < 0:
            raise CodecError(f"the {self._shown} says {size!r} bytes for {numel} values")
        return size

    def encode(self, values: Tensor, key: int = 0) -> Tensor:
        """Pass on, and refuse what is not of `wire_bytes`; see `Codec.encode`."""
        check_flat(self.name, values)
        payload = self._call(self._codec.encode, values, key)
        wire_bytes = self.wire_bytes(values.numel())
        if not _is_flat(payload, torch.uint8, wire_bytes):
            raise CodecError(
                f"the {self._shown} made {_shape(payload)} of {values.numel()} values, and its "
                f"wire_bytes says {wire_bytes}"
            )
        return payload

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Pass on, and refuse what is not flat, float32 and finite; see `Codec.decode`."""
        check_payload(self.name, payload, self.wire_bytes(numel), numel)
        values = self._call(self._codec.decode, payload, numel)
        if not _is_flat(values, torch.float32, numel) or not is_finite(values):
            raise CodecError(
                f"the {self._shown} decoded {_shape(values)}, and {numel} finite values in float32 "
                f"are wanted"
            )
        return values

    def check(self, payload: Tensor, numel: int) -> None:
        """Pass on, then decode: what passes and does not decode would cost all a round.

        See `Codec.check`.
        """
        check_payload(self.name, payload, self.wire_bytes(numel), numel)
        self._call(self._codec.check, payload, numel)
        self.decode(payload, numel)

    def _call(self, function: Callable[..., _T], *arguments: object) -> _T:
        try:
            return function(*arguments)
        except (CodecError, MemoryError, KeyboardInterrupt):
            raise
        except BaseException as error:  # sys.exit(), too
            raise CodecError(f"the {self._shown} raised {type(error).__name__}: {error}") from error


def _is_flat(made: object, dtype: torch.dtype, numel: int) -> bool:
    if not isinstance(made, Tensor):
        return False
    return made.dtype == dtype and made.shape == (numel,) and made.is_contiguous()


def _shape(made: object) -> str:
    if not isinstance(made, Tensor):
        return f"a {type(made).__name__}"
    return f"{made.dtype} {tuple(made.shape)}" + (
        "" if made.is_contiguous() else ", not contiguous"
    )
