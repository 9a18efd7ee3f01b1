"""Finds codecs by name: those of diloco, and those that other packages add."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from inspect import get_annotations
from types import MappingProxyType

import torch

from diloco.compression.added import AddedCodec
from diloco.compression.base import Codec
from diloco.compression.blocks import BlockCodec
from diloco.compression.floats import FloatCodec
from diloco.compression.levels import E2M1, E3M0, INT2, INT4, INT8
from diloco.compression.sparse import TopKCodec
from diloco.errors import CodecError, ConfigError
from diloco.extensions import Extension, extension, load

_ATTRIBUTES = (*get_annotations(Codec), "wire_bytes", "encode", "decode", "check")
_SOME_VALUES = 4096
_ALL: tuple[Codec, ...] = (
    FloatCodec("float32", torch.float32),
    FloatCodec("float16", torch.float16),
    FloatCodec("bfloat16", torch.bfloat16),
    BlockCodec("int8", INT8),
    BlockCodec("int4", INT4),
    BlockCodec("e2m1", E2M1),
    BlockCodec("e3m0", E3M0),
    BlockCodec("int2", INT2),
    BlockCodec("int4-stochastic", INT4, is_stochastic=True),
    BlockCodec("e2m1-stochastic", E2M1, is_stochastic=True),
    BlockCodec("e3m0-stochastic", E3M0, is_stochastic=True),
    TopKCodec("topk64", 64),
    TopKCodec("topk128", 128),
)

#: Codecs by the name that configurations and message headers use.
CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec for codec in _ALL})


def get_codec(name: str) -> Codec:
    """Return the codec called `name`.

    Raises:
        ConfigError: If there is none of that name (the message lists those there are), or more than
            one, or if it is no `Codec`.
    """
    added = extension("diloco.codecs", name, CODECS)
    return CODECS[name] if added is None else _added(added)


@functools.cache
def _added(found: Extension) -> Codec:
    codec = load(found)
    lacking = [attribute for attribute in _ATTRIBUTES if not hasattr(codec, attribute)]
    if lacking or codec.name != found.name:
        raise ConfigError(
            f"the {found} cannot be used: "
            + (
                f"it has no {', '.join(lacking)} (diloco.compression.base.Codec says what one is)"
                if lacking
                else f"it calls itself {codec.name!r}: both names must be the same"
            )
        )
    added = AddedCodec(codec, str(found))
    try:
        added.wire_bytes(_SOME_VALUES)
    except CodecError as error:
        raise ConfigError(f"the {found} cannot be used: {error}") from error
    return added
