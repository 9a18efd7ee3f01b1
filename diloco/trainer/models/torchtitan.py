"""The built-in decoder in torchtitan's words: names of its Llama 3, and the order of rotated rows.

Pure: reads and writes no file and needs no `torchtitan`. Its attention rotates neighbouring values
(2 i, 2 i + 1) of a head, ours and Hugging Face's the halves (i, i + E / 2), so that the rows of
queries and keys, and these alone, are in another order.

See `Llama3StateDictAdapter` of torchtitan, which says the same of Hugging Face's Llama.
"""

from __future__ import annotations

from torch import Tensor

from diloco.errors import ConfigError
from diloco.trainer.models.model import LlamaShape, parameter_shapes

_TOP = {
    "embed.weight": "tok_embeddings.weight",
    "norm.weight": "norm.weight",
    "head.weight": "output.weight",
}
_IN_LAYER = {
    "attention_norm": "attention_norm",
    **{f"attention.{name}": f"attention.w{name}" for name in "qkvo"},
    "ffn_norm": "ffn_norm",
    "feed_forward.gate": "feed_forward.w1",
    "feed_forward.down": "feed_forward.w2",
    "feed_forward.up": "feed_forward.w3",
}


def torchtitan_names(shape: LlamaShape) -> dict[str, str]:
    """Give torchtitan's name of every parameter by its canonical one; a tied head has none.

    Raises:
        ConfigError: If its Llama 3 has no such parameter; names the first.
    """
    return {name: _name(name) for name in parameter_shapes(shape)}


def _name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    layers, index, rest = name.removesuffix(".weight").split(".", 2)
    if rest not in _IN_LAYER:
        raise ConfigError(
            f"torchtitan's Llama 3 has no parameter like {name}: it is another model; take Hugging "
            "Face's layout, which torchtitan reads too"
        )
    return f"{layers}.{index}.{_IN_LAYER[rest]}.weight"


def to_torchtitan(shape: LlamaShape, name: str, values: Tensor) -> Tensor:
    """Return a parameter, by canonical name, with its rows in torchtitan's order."""
    heads = _rotated_heads(shape, name)
    return values if heads == 0 else _swapped(values, (heads, 2, -1))


def from_torchtitan(shape: LlamaShape, name: str, values: Tensor) -> Tensor:
    """Return a parameter, by canonical name, with the rows of torchtitan's in our order."""
    heads = _rotated_heads(shape, name)
    return values if heads == 0 else _swapped(values, (heads, -1, 2))


def _rotated_heads(shape: LlamaShape, name: str) -> int:
    """Return of how many heads the rows are that RoPE rotates; 0: it rotates none."""
    if name.endswith(".attention.q.weight"):
        return shape.num_heads
    return shape.num_kv_heads if name.endswith(".attention.k.weight") else 0


def _swapped(values: Tensor, rows: tuple[int, int, int]) -> Tensor:
    """Exchange the last two of the three indices that a row's number is made of."""
    return values.reshape(*rows, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
