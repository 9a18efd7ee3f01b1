"""Tokenizers: ids, the bytes they stand for, where they are found, and which are equal."""

import json
from pathlib import Path

import numpy as np
import pytest

from diloco.data.tokenizer import open_tokenizer
from diloco.errors import ConfigError
from tests.data.text_files import pieces, write_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


TEXTS = [*pieces(40), "<|endoftext|> is text here", "é", "🜚東"]


def test_bytes_are_their_own_ids_and_the_separator_is_in_no_text():
    tokenizer = open_tokenizer("bytes", "")

    (tokens,) = tokenizer.encode(["aé".encode()])
    same, num_bytes = tokenizer.encode_measured("aé".encode())

    assert tokens.tolist() == same.tolist() == [97, 0xC3, 0xA9]
    assert num_bytes.tolist() == [1, 1, 1]
    assert (tokenizer.vocab_size, tokenizer.separator) == (256, 255)
    assert b"\xff" not in "".join(map(chr, range(0xD800))).encode()


def test_trained_tokenizer_gives_the_packages_ids_and_all_bytes(directory):
    from tokenizers import Tokenizer

    tokenizer = open_tokenizer(str(directory), "")
    reference = Tokenizer.from_file(str(directory / "tokenizer.json"))

    for text, tokens in zip(TEXTS, tokenizer.encode([t.encode() for t in TEXTS]), strict=True):
        same, num_bytes = tokenizer.encode_measured(text.encode())
        assert tokens.dtype == num_bytes.dtype == np.int32
        assert tokens.tolist() == same.tolist()
        assert num_bytes.sum() == len(text.encode())
        assert (num_bytes >= 0).all()
        assert reference.decode(tokens.tolist(), skip_special_tokens=False) == text
    assert (tokenizer.vocab_size, tokenizer.separator) == (400, 0)


def test_bytes_of_a_token_are_those_of_its_text(directory):
    tokenizer = open_tokenizer(str(directory), "")
    text = "import os, sys"

    tokens, num_bytes = tokenizer.encode_measured(text.encode())

    from tokenizers import Tokenizer

    reference = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert len(tokens) > 3
    assert num_bytes.tolist() == [len(reference.decode([token])) for token in tokens]


def test_text_cannot_forge_a_separator(directory):
    tokenizer = open_tokenizer(str(directory), "")

    for text in ("<|endoftext|>", "a<|endoftext|>b"):
        (tokens,) = tokenizer.encode([text.encode()])
        assert tokenizer.separator not in tokens


def test_truncation_and_padding_of_the_file_are_switched_off(directory, tmp_path):
    from tokenizers import Tokenizer

    changed = Tokenizer.from_file(str(directory / "tokenizer.json"))
    changed.enable_truncation(4)
    changed.enable_padding(length=8)
    changed.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json"), "<|endoftext|>")

    texts = [text.encode() for text in TEXTS]
    expected = open_tokenizer(str(directory), "").encode(texts)
    for tokens, other in zip(tokenizer.encode(texts), expected, strict=True):
        assert tokens.tolist() == other.tolist()


def test_digest_is_that_of_the_tokenizer_not_of_its_place(directory, tmp_path):
    copy = tmp_path / "copy.json"
    copy.write_text((directory / "tokenizer.json").read_text())
    here = open_tokenizer(str(directory), "").digest

    assert open_tokenizer(str(copy), "<|endoftext|>").digest == here
    assert open_tokenizer(str(copy), "<|pad|>").digest != here
    copy.write_text(copy.read_text() + "\n")
    assert open_tokenizer(str(copy), "<|endoftext|>").digest != here


@pytest.mark.parametrize("eos", ["<|pad|>", {"content": "<|pad|>", "special": True}])
def test_separator_is_the_eos_token_of_the_directory(eos, directory, tmp_path):
    (tmp_path / "tokenizer.json").write_text((directory / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))

    assert open_tokenizer(str(tmp_path), "").separator == 1
    assert open_tokenizer(str(tmp_path / "tokenizer.json"), "").separator == 1
    assert open_tokenizer(str(tmp_path), "<|endoftext|>").separator == 0


def test_hub_name_is_downloaded(directory, monkeypatch):
    asked = []

    def download(name, filename):
        asked.append((name, filename))
        return str(directory / filename)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)

    tokenizer = open_tokenizer("owner/name", "")

    assert asked == [("owner/name", "tokenizer.json"), ("owner/name", "tokenizer_config.json")]
    assert tokenizer.digest == open_tokenizer(str(directory), "").digest


def test_hub_without_that_tokenizer_is_refused(monkeypatch):
    def download(name, filename):
        raise FileNotFoundError("404")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)

    with pytest.raises(ConfigError, match=r'"owner/name": no such file .* hub gives no .*: 404'):
        open_tokenizer("owner/name", "")


def test_what_is_no_tokenizer_is_refused_with_the_remedy(tmp_path, directory):
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    lone = tmp_path / "lone.json"
    lone.write_text((directory / "tokenizer.json").read_text())
    (tmp_path / "empty").mkdir()

    for name, separator, answer in [
        ("absent/tokenizer.json", "", f"no such file or directory below {Path.cwd()}; give"),
        (str(tmp_path / "empty"), "", "save_pretrained"),
        (str(broken), "", "broken.json is not a tokenizer.json"),
        (str(lone), "", 'name its eos_token; set data.separator .* "<|endoftext|>", "<|pad|>"'),
        (str(directory), "<eos>", 'has no token "<eos>"; set data.separator'),
    ]:
        with pytest.raises(ConfigError, match=answer.replace("|", r"\|")):
            open_tokenizer(name, separator)
