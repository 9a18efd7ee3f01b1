"""The section [data]: tables of sources, what they may hold, and what has no effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diloco.config.classes import identity_difference, identity_json, policy_json
from diloco.config.load import load_config, resolved_toml, with_policy
from diloco.config.schema import Config
from diloco.errors import ConfigError
from tests.run_files import write_run

STREAMS = """
[data]
sequence_length = 32
tokenizer = "tokenizers/mine"
held_out_documents = 9

[data.sources.web]
hub = "owner/name"
subset = "small"
weight = 3

[data.sources.code]
files = ["code/*.py", "more.txt"]
document = "file"
repeat = true
"""


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = write_run(tmp_path, {"east": ""})
    path.write_text(path.read_text().replace("[data]\nsequence_length = 32\n", text))
    return load_config(path, overrides)


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


def test_tables_make_streams_and_survive_being_resolved(tmp_path: Path) -> None:
    config = load(tmp_path, STREAMS)
    (tmp_path / "resolved.toml").write_text(resolved_toml(config))

    assert config.data.source == "streams"
    assert list(config.data.sources) == ["web", "code"]
    assert config.data.sources["code"].files == ("code/*.py", "more.txt")
    assert config.data.sources["web"].weight == 3.0
    assert load_config(tmp_path / "resolved.toml") == config


def test_one_file_needs_no_array(tmp_path: Path) -> None:
    config = load(tmp_path, '[data]\nsequence_length = 8\nsources.a.files = "a.txt"\n')

    assert config.data.sources["a"].files == ("a.txt",)


def test_text_and_its_cutting_are_identity_and_places_are_local(tmp_path: Path) -> None:
    config = load(tmp_path, STREAMS)
    local = load(
        tmp_path,
        STREAMS,
        'data.sources.code.files="elsewhere/*.py"',
        "data.sources.code.repeat=false",
        "data.sources.web.revision=v2",
        'data.tokenizer="/mnt/tokenizer.json"',
    )
    changed = load(
        tmp_path,
        STREAMS,
        "data.sources.web.weight=2",
        "data.sources.web.field=body",
        "data.held_out_documents=10",
        "data.shuffle_window=5",
        "data.sources.new.files=x.txt",
    )

    assert identity_json(local) == identity_json(config)
    assert json.loads(policy_json(local)) == json.loads(policy_json(config))
    lines = identity_difference(identity_json(config), identity_json(changed))
    assert {line.split(":")[0] for line in lines} >= {
        "data.sources",
        "data.sources.web.weight",
        "data.sources.web.field",
        "data.held_out_documents",
        "data.shuffle_window",
    }


def test_policy_travels_past_the_tables(tmp_path: Path) -> None:
    config = load(tmp_path, STREAMS)

    taken = with_policy(config, policy_json(load(tmp_path, STREAMS, "run.inner_steps=99")))

    assert taken.run.inner_steps == 99
    assert taken.data == config.data


FILES = '[data]\nsequence_length = 8\n[data.sources.a]\nfiles = "a.txt"\n'
HUB = '[data]\nsequence_length = 8\n[data.sources.a]\nhub = "owner/name"\n'
STDLIB = "[data]\nsequence_length = 8\n"
REFUSALS: dict[str, tuple[str, str, list[str]]] = {
    "nothing": (FILES.replace('files = "a.txt"', ""), "", ['give files = "PATH or GLOB" or hub']),
    "both": (FILES, "data.sources.a.hub=b", ["data.sources.a.hub", "give files or hub, not both"]),
    "no-table": (STDLIB + 'source = "streams"\n', "", ["needs a table [data.sources.NAME]"]),
    "stdlib-too": (FILES, "data.source=stdlib", ["data.sources", "remove one of the two"]),
    "hub-split": (FILES, "data.sources.a.split=test", ["a.split", "needs hub, and it is"]),
    "revision": (FILES, "data.sources.a.revision=v1", ["a.revision", "needs hub, and it is"]),
    "document": (HUB, "data.sources.a.document=line", ["a.document", "needs files, and it is"]),
    "unit": (FILES, "data.sources.a.document=word", ['"paragraph" or "line" or "file"']),
    "weight": (FILES, "data.sources.a.weight=0", ["data.sources.a.weight: 0:", "> 0"]),
    "name": (STDLIB + '[data.sources."a.b"]\nfiles = "x"\n', "", ["a.b", "must match"]),
    "key": (FILES + "url = 1\n", "", ["data.sources.a.url", "known here: files, hub"]),
    "number": (FILES, "data.sources.a.files=5", ["data.sources.a.files: 5: must be an array"]),
    "numbers": (FILES, "data.sources.a.files=[5]", ["data.sources.a.files.0: 5: must be a string"]),
    "window": (
        STDLIB,
        "data.shuffle_window=7",
        ["data.shuffle_window: 7: needs", 'source = "streams", and it is'],
    ),
    "held-out": (STDLIB, "data.held_out_documents=7", ["held_out_documents: 7: needs source"]),
    "tokenizer": (STDLIB, "data.tokenizer=gpt2", ["data.tokenizer", "needs source"]),
    "separator": (FILES, 'data.separator="</s>"', ["data.separator", 'data.tokenizer = "bytes"']),
}


@pytest.mark.parametrize(("text", "override", "parts"), REFUSALS.values(), ids=REFUSALS)
def test_wrong_table_is_refused_by_path_and_remedy(
    text: str, override: str, parts: list[Any], tmp_path: Path
) -> None:
    message = refusal(tmp_path, text, *([override] if override else []))

    assert all(part in message for part in parts), message
