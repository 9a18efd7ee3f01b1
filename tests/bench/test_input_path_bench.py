"""The bench of the input path: a small one has all its rows, and its bar."""

from dataclasses import replace

import pytest

from diloco.bench.training.input_path import SETTING, InputSetting, run
from diloco.errors import ConfigError

SMALL = InputSetting(
    text_bytes=300_000, vocab_size=300, sequence_length=64, batch_size=64, blocks=1, block_s=0.01
)


def test_every_source_is_timed_next_to_a_plain_copy_and_token_files_have_a_bar():
    report = run(lambda *_: None, ["text-*-8", "token-*"], setting=replace(SMALL, least=1e15))

    assert [(row["source"], row["ranks"]) for row in report.rows] == [
        ("text-bytes", 8),
        ("text-tokenizer", 8),
        ("token-files", 1),
        ("token-files", 8),
        ("token-files", 64),
    ]
    assert all(row["ratio"] > 0 for row in report.rows)
    (missed,) = report.missed
    assert missed.what == "token-files-64: tokens a CPU second"
    assert missed.figure == report.rows[-1]["tokens_per_s"]


def test_an_unknown_row_of_the_input_path_is_refused():
    with pytest.raises(ConfigError, match="--rows x matches no row; rows are text-bytes-1"):
        run(lambda *_: None, ["x"], setting=SETTING)
