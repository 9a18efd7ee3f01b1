"""What is read back of the small files that a process writes durably, whatever they are by then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diloco.durable import read_json, write_json
from diloco.errors import ConfigError
from diloco.state_dir import Timeline, read_timeline


def test_json_comes_back_and_what_is_not_there_is_none(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": [1]})

    assert read_json(tmp_path / "a.json") == {"b": [1]}
    assert read_json(tmp_path / "none.json") is None


@pytest.mark.parametrize("what", ["text", "deep", "pipe", "link"])
def test_what_was_not_written_here_is_damaged(tmp_path: Path, what: str) -> None:
    path = tmp_path / "a.json"
    match what:
        case "text":
            path.write_text("{")
        case "deep":
            path.write_text("[" * 200_000)
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to(path)

    with pytest.raises(ValueError, match=r"a\.json is damaged"):
        read_json(path)


@pytest.mark.parametrize("number", ["[[]]", "-1", str(10**30), "true", '"1"'])
def test_a_timeline_is_a_number(tmp_path: Path, number: str) -> None:
    path = tmp_path / "timeline.json"
    assert read_timeline(path) == Timeline()
    path.write_text(f'{{"timeline": {number}, "resume_step": 3}}')

    with pytest.raises(ConfigError, match="says how often the run was resumed, is damaged"):
        read_timeline(path)
