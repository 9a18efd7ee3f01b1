import pytest

from diloco.compression.registry import CODECS, get_codec
from diloco.config.outer import OWN_CODECS
from diloco.errors import ConfigError


def test_codecs_are_found_by_name() -> None:
    assert tuple(CODECS) == OWN_CODECS
    assert all(get_codec(name).name == name for name in CODECS)


def test_only_float32_publishes_values() -> None:
    assert [name for name in CODECS if get_codec(name).publishes_values] == ["float32"]


def test_an_unknown_codec_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="codec 'int3' is unknown: choose one of bfloat16, e2m1,"):
        get_codec("int3")
