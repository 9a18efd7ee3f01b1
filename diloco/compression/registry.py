"""The codecs there are, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from diloco.compression.base import Codec
from diloco.compression.float32 import Float32Codec
from diloco.compression.int4 import Int4Codec
from diloco.errors import ConfigError

_ALL: tuple[Codec, ...] = (Float32Codec(), Int4Codec())

#: Codecs by the name that configurations and message headers use.
CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec for codec in _ALL})


def get_codec(name: str) -> Codec:
    """Return the codec called `name`.

    Raises:
        ConfigError: If there is none of that name; the message lists those there are.
    """
    if name not in CODECS:
        raise ConfigError(f"codec {name!r} is unknown: choose one of {', '.join(sorted(CODECS))}")
    return CODECS[name]
