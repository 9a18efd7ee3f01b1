"""Error feedback: what quantisation lost of one pseudo-gradient is added to the next.

Source: 1-bit SGD (Seide et al. 2014); SparseLoCo and MuLoCo use it between islands.
"""

from __future__ import annotations

from torch import Tensor

from diloco.compression.base import Codec


def encode_with_feedback(
    codec: Codec, values: Tensor, residual: Tensor | None, key: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Encode x = values + residual and return what was lost: x - decode(encode(x)).

    Args:
        codec: How to encode.
        values: Shape [numel], float32; unchanged.
        residual: What was lost before, same shape, zeros at first; unchanged, since it is needed
            again if the contribution is not included. None switches error feedback off.
        key: See `Codec.encode`.

    Returns:
        The payload, and the residual for the next call, freshly allocated; None when it is off.

    Raises:
        CodecError: If x is not a flat float32 vector of finite values.
    """
    if residual is None:
        return codec.encode(values, key), None
    x = values + residual
    payload = codec.encode(x, key)
    return payload, x.sub_(codec.decode(payload, x.numel()))
