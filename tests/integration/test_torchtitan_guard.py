"""What the torchtitan adapter refuses before it imports torchtitan: all that needs no GPU."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

import diloco.integrations
import diloco.sync.session  # what the adapter imports of ours is there already
from diloco.errors import ConfigError

MODULE = "diloco.integrations.torchtitan"
PAGE = Path(diloco.integrations.__file__).with_name("README.md")


def install(directory: Path, version: str) -> None:
    """Lay down what says that a version is installed."""
    info = directory / f"torchtitan-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torchtitan\nVersion: {version}\n")


def refused(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(ConfigError, match=said):
        importlib.import_module(MODULE)


def test_without_torchtitan_the_command_that_gets_it_is_named(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(PAGE.parents[2])])

    refused(monkeypatch, "which is not installed: pip install torchtitan==0.3.0")


def test_another_version_is_refused_by_number(monkeypatch, tmp_path):
    install(tmp_path, "0.2.2")
    monkeypatch.syspath_prepend(tmp_path)

    refused(monkeypatch, r"is for torchtitan 0\.3\.0, and 0\.2\.2 is installed")


def test_a_machine_without_gpu_is_refused(monkeypatch, tmp_path):
    install(tmp_path, "0.3.0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    refused(monkeypatch, "needs a GPU, and torch finds none: on CPUs use diloco island")


def test_the_loop_of_the_page_has_ten_lines_at_most():
    *_, script = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)

    compile(script, str(PAGE), "exec")
    assert "DiLoCoTrainer(config, connection)" in script
    assert len([line for line in script.splitlines() if line]) <= 10
