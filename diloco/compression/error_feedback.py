"""Error feedback: what quantisation lost of one pseudo-gradient is added to the next.

    x = Delta + decay * residual_before            what is encoded
    residual_after = x - decode(encode(x))         what is lost of it

The residual is kept as it was lost; it decays when a contribution is made of it, not in between. So
whatever becomes of contributions, it decays once for each that is INCLUDED: one that is not
included, expires, is refused or declined leaves residual_before, of which the next is made, and a
checkpoint that holds both goes on with the same bits.

Source: 1-bit SGD (Seide et al. 2014), decay 1; SparseLoCo (arXiv 2508.15706), decay 0.95.
"""

from __future__ import annotations

from torch import Tensor

from diloco.compression.base import Codec


def encode_with_feedback(
    codec: Codec, values: Tensor, residual: Tensor | None, key: int = 0, decay: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Encode x = values + decay * residual and return what was lost: x - decode(encode(x)).

    Args:
        codec: How to encode.
        values: Shape [numel], float32; unchanged.
        residual: What was lost before, same shape, zeros at first; unchanged, since it is needed
            again if the contribution is not included. None switches error feedback off.
        key: See `Codec.encode`.
        decay: Share of the residual that is added, in (0, 1].

    Returns:
        The payload, and the residual for the next call, freshly allocated; None when it is off.

    Raises:
        CodecError: If x is not a flat float32 vector of finite values.
    """
    if residual is None:
        return codec.encode(values, key), None
    # Two roundings, one after the other: a fused add would give other bits on other devices.
    x = values + residual * decay if decay < 1 else values + residual
    payload = codec.encode(x, key)
    return payload, x.sub_(codec.decode(payload, x.numel()))
