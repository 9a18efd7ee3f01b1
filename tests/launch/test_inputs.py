"""Text and warm start of a run are opened before anything is started; what is wrong is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from diloco.checkpoint.checkpoints import FORMAT, MANIFEST, rank_file, step_directory
from diloco.config.load import load_config
from diloco.data.open import open_data
from diloco.errors import ConfigError
from diloco.launch.rank.inputs import open_inputs
from tests.data.text_files import pieces, write_jsonl, write_tokenizer
from tests.run_files import write_run


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    """A run of two islands on one file of its own."""
    write_run(tmp_path, {"east": "", "west": ""})
    write_jsonl(tmp_path / "text.jsonl", pieces(60))
    return [
        f'data.sources.web.files="{tmp_path}/*.jsonl"',
        "data.source=streams",
        "data.held_out_documents=30",
    ]


def opened(
    directory: Path,
    overrides: Sequence[str],
    *,
    resume_step: int | None = None,
    may_download: bool = True,
) -> tuple[str, ...]:
    config = load_config(directory / "run.toml", overrides)
    return open_inputs(config, resume_step=resume_step, may_download=may_download)


def test_what_is_found_is_told(tmp_path: Path, overrides: list[str]) -> None:
    digest = open_data(load_config(tmp_path / "run.toml", overrides)).digest

    assert opened(tmp_path, overrides) == (f"text: digest {digest[:16]}, 256 token ids",)
    (text,) = opened(tmp_path, [])  # the standard library's
    assert text.endswith("256 token ids")


@pytest.mark.parametrize("may_download", [True, False])
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.sources.web.files=gone.jsonl", '"gone.jsonl" matches no file'),
        ("data.sources.web.field=body", 'no field "body"'),
        ("data.held_out_documents=59", "each of 2 islands needs one more"),
        ("data.tokenizer=./gone", "no such file or directory"),
        ("evaluation.num_sequences=100000", "evaluation.num_sequences = 100000"),
        ("run.warm_start=./gone", "there is no such directory"),
    ],
    ids=["file", "field", "documents", "tokenizer", "evaluation", "warm-start"],
)
def test_what_is_wrong_is_an_error_before_the_start(
    tmp_path: Path, overrides: list[str], override: str, words: str, may_download: bool
) -> None:
    with pytest.raises(ConfigError, match=words):
        opened(tmp_path, [*overrides, override], may_download=may_download)


def test_the_hub_is_not_asked_unless_it_may_be(
    tmp_path: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("asked the network")

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    hub = [
        "data.tokenizer=owner/tokens",
        'data.sources.far.hub="owner/text"',
        "run.warm_start=owner/model",
    ]

    lines = opened(tmp_path, [*overrides, *hub], may_download=False)

    assert [line.partition(":")[0] for line in lines] == [
        'data.tokenizer = "owner/tokens"',
        'data.sources.far.hub = "owner/text"',
        'run.warm_start = "owner/model"',
    ]
    with pytest.raises(ConfigError, match="matches no file"):  # the files next to it are opened
        more = [*hub, 'data.sources.web.files="gone.jsonl"']
        opened(tmp_path, [*overrides, *more], may_download=False)
    write_tokenizer(tmp_path / "tokens", eos="")
    with pytest.raises(ConfigError, match="does not name its eos_token"):
        more = [*hub, f"data.tokenizer={tmp_path / 'tokens'}"]
        opened(tmp_path, [*overrides, *more], may_download=False)


def test_a_resume_needs_the_text_of_its_checkpoint_and_no_warm_start(
    tmp_path: Path, overrides: list[str]
) -> None:
    config = load_config(tmp_path / "run.toml", overrides)
    path = step_directory(config.checkpoint_dir, "west", 8)
    path.mkdir(parents=True)
    files = {name: {"bytes": 0, "blake3": ""} for name in ("plan.json", rank_file(0, 1))}
    manifest = {"format": FORMAT, "files": files, "parts": "parts-0001", "inner_step": 8}
    manifest["data"] = open_data(config).content()
    (path / MANIFEST).write_text(json.dumps(manifest))
    gone = [*overrides, "run.warm_start=./gone"]

    opened(tmp_path, gone, resume_step=8)
    write_jsonl(tmp_path / "text.jsonl", pieces(61))

    with pytest.raises(ConfigError, match=r"data.sources.web is not .* text.jsonl \(") as changed:
        opened(tmp_path, gone, resume_step=8)
    assert "put it back" in str(changed.value)
