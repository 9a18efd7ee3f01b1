"""The names that `import diloco` offers."""

from __future__ import annotations

import pytest

import diloco


def test_every_public_name_is_there() -> None:
    assert {name: getattr(diloco, name).__name__ for name in diloco.__all__} == {
        name: name for name in diloco.__all__
    }
    assert dir(diloco) == sorted(diloco.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'diloco' has no attribute 'Diloco'"):
        _ = diloco.Diloco
