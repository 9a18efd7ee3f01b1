"""The names that `import diloco` offers, and that nothing else is taken of a user's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import diloco

ROOT = Path(__file__).resolve().parents[1]


def test_every_public_name_is_there() -> None:
    assert {name: getattr(diloco, name).__name__ for name in diloco.__all__} == {
        name: name for name in diloco.__all__
    }
    assert dir(diloco) == sorted(diloco.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'diloco' has no attribute 'Diloco'"):
        _ = diloco.Diloco


def test_folders_of_the_users_own_are_neither_taken_nor_disturbed(tmp_path: Path) -> None:
    for name in ("transport.py", "simulations.py", "protos/__init__.py", "configs/__init__.py"):
        own = tmp_path / name
        own.parent.mkdir(exist_ok=True)
        own.write_text(f"raise AssertionError('{name} is imported, which is the user\\'s')\n")
    modules = [
        "diloco",
        "diloco.configs",
        "diloco.protos.control_pb2",
        "diloco.simulations.engine.clock",
        "diloco.transport.framing",
    ]
    code = f"import {', '.join(modules)}; print(diloco.transport.framing.__name__)"

    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )

    assert (ended.returncode, ended.stdout) == (0, "diloco.transport.framing\n"), ended.stderr
