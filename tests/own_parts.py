"""The package of lesson 8, as an installer leaves it: its folder and its metadata on a path."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

LESSON = Path(__file__).resolve().parents[1] / "configs" / "examples" / "8-own-parts"


def install(folder: Path, name: str, version: str, points: Mapping[str, Mapping[str, str]]) -> Path:
    """Write the metadata of a distribution with these entry points; returns what to import from."""
    folder.mkdir(parents=True, exist_ok=True)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line
        for group, named in points.items()
        for line in (f"[{group}]", *(f"{key} = {value}" for key, value in named.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def install_lesson(folder: Path) -> tuple[Path, Path]:
    """Install what the lesson's pyproject.toml says; returns the two folders of the path."""
    project = tomllib.loads((LESSON / "pyproject.toml").read_text("utf-8"))["project"]
    return (
        install(folder, project["name"], project["version"], project["entry-points"]),
        LESSON,
    )
