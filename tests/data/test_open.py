"""Opening the text that a run file names, against the model and the islands it names."""

import pytest

from diloco.config.load import load_config
from diloco.data.open import open_data
from diloco.errors import ConfigError
from tests.data.text_files import pieces, write_jsonl, write_tokenizer
from tests.run_files import write_run


@pytest.fixture
def run_file(tmp_path):
    return write_run(tmp_path, {"east": "", "west": ""})


@pytest.fixture
def stream(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", pieces(30))
    return [f'data.sources.web.files="{path}"', "data.held_out_documents=9"]


def test_default_is_the_standard_library(run_file):
    data = open_data(load_config(run_file))

    assert (data.vocab_size, data.sequence_length) == (256, 32)
    assert data.num_documents > 100


def test_table_of_sources_is_streamed(run_file, stream):
    config = load_config(run_file, stream)

    data = open_data(config)

    assert config.data.source == "streams"
    assert (data.num_documents, data.sequence_length) == (0, 32)
    assert len(data.evaluation(8).tokens) == 8


def test_each_island_needs_a_document(run_file, stream):
    config = load_config(run_file, [*stream, "data.held_out_documents=29"])

    with pytest.raises(ConfigError, match=r"30 documents: .* each of 2 islands needs one more"):
        open_data(config)


def test_model_with_fewer_ids_than_the_tokenizer_is_refused_with_the_number(
    run_file, stream, tmp_path
):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    overrides = [*stream, f'data.tokenizer="{tokenizer}"']

    with pytest.raises(ConfigError, match=r"vocab_size = 256 .* 400 token ids; set .* = 400 or"):
        open_data(load_config(run_file, overrides))
    data = open_data(load_config(run_file, [*overrides, "model.vocab_size=400"]))
    assert data.vocab_size == 400
