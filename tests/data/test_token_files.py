"""Token files: those of the public format and no others, and the same training as on the text."""

import json
import struct
from itertools import accumulate

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from diloco.data.prepare import prepare
from diloco.data.token_files import TokenFile, index_pieces
from diloco.errors import ConfigError
from tests.data.test_streams import all_batches, open_batches
from tests.data.text_files import data_config, open_streams, pieces, write_jsonl, write_tokenizer

SEPARATOR = 255


def write_index(
    path, lengths, documents, *, starts=(), code=8, size=2, magic=b"MMIDIDX\x00\x00", version=1
):
    """Write NAME.idx byte by byte, as the format's description says."""
    starts = starts or [0, *accumulate(length * size for length in lengths)][: len(lengths)]
    path.write_bytes(
        magic
        + struct.pack("<QBQQ", version, code, len(lengths), len(documents))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(lengths)}q", *starts)
        + struct.pack(f"<{len(documents)}q", *documents)
    )


def open_file(path, vocab_size=70_000):
    return TokenFile(path, vocab_size=vocab_size, separator=SEPARATOR, setting="data.sources.a")


def prepared(directory, sources, *, processes=1, **settings):
    """Prepare all sources, and give those to name instead."""
    options = {"num_processes": processes, "show": lambda *_: None}
    made = prepare(data_config(sources, **settings), directory, **options)
    return {name: {**sources[name], "files": str(made[name].path)} for name in sources}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two sources of real text, empty documents among them, and a tokenizer."""
    path = tmp_path_factory.mktemp("texts")
    for name, found in (("a", pieces(150)), ("b", pieces(230)[150:])):
        mixed = [text if n % 9 else "" for n, text in enumerate(found)]
        write_jsonl(path / f"{name}.jsonl", mixed)
    write_tokenizer(path / "tokenizer")
    return path


@pytest.fixture(scope="module")
def by_bytes(texts):
    """Both sources, prepared as bytes."""
    return prepared(texts / "bytes", sources_of(texts, repeat=True))


def sources_of(path, **settings):
    return {
        "a": {"files": str(path / "a.jsonl"), "weight": 2.0, **settings},
        "b": {"files": str(path / "b.jsonl"), **settings},
    }


# -- the same training -----------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["bytes", "trained"])
def test_prepared_files_give_the_batches_and_the_evaluation_of_the_text(
    tokenizer, texts, by_bytes, tmp_path, caplog
):
    sources, name, files = sources_of(texts, repeat=True), "bytes", by_bytes
    if tokenizer == "trained":
        name = str(texts / "tokenizer")
        files = prepared(tmp_path, sources, tokenizer=name, processes=2)
    settings = {"num_slots": 3, "tokenizer": name, "shuffle_window": 8}
    text, tokens = open_streams(sources, **settings), open_streams(files, **settings)

    for slot in range(3):  # several passes, and ranks that take their rows alone
        whole = open_batches(text, slot=slot, num_islands=3)
        ranks = [
            open_batches(tokens, slot=slot, num_islands=3, coordinate=c, size=3) for c in range(3)
        ]
        for step in range(60):
            rows = torch.cat([rank.batch(step) for rank in ranks])
            assert torch.equal(whole.batch(step), rows)
        there, here = whole.positions()[slot], ranks[0].positions()[slot]
        assert here.drawn == there.drawn
        assert here.cursor["sources"]["a"]["start"]["pass"] > 0

    theirs, ours = text.evaluation(9), tokens.evaluation(9)
    assert torch.equal(theirs.tokens, ours.tokens)
    assert theirs.num_bytes == ours.num_bytes
    assert "other ids" not in caplog.text
    assert tokens.digest != text.digest


def test_token_files_resume_bit_for_bit_at_every_step(by_bytes):
    def start():
        data = open_streams(by_bytes, num_slots=2, shuffle_window=16)
        return open_batches(data, slot=1, num_islands=2)

    whole, batches, states = start(), [], []
    for step in range(90):
        states.append(json.dumps(whole.state_dict()))
        batches.append(whole.batch(step))

    resumed = start()
    for step, state in enumerate(states):
        resumed.load_state_dict(json.loads(state))
        assert json.dumps(resumed.state_dict()) == state
        for later in range(step, min(step + 3, len(batches))):
            assert torch.equal(resumed.batch(later), batches[later])


def test_a_run_on_text_is_not_resumed_on_its_prepared_files(texts, by_bytes):
    batches = open_batches(open_streams(sources_of(texts)))
    batches.batch(0)

    with pytest.raises(ConfigError, match=r"a is not what the run was trained on: .* another name"):
        open_batches(open_streams(by_bytes)).load_state_dict(batches.state_dict())


def test_an_array_of_ids_has_a_document_to_each_separator(tmp_path):
    documents = [[n, n + 1, SEPARATOR] for n in range(0, 200, 2)]
    first = [i for document in documents[:70] for i in document]
    np.save(tmp_path / "1.npy", np.array(first, dtype=np.uint16))
    np.save(tmp_path / "2.npy", np.array([i for d in documents[70:] for i in d], dtype=np.int64))
    files = [str(tmp_path / "1.npy"), str(tmp_path / "2.npy")]
    data = open_streams({"a": {"files": files}}, num_slots=2, shuffle_window=1)

    rows = torch.cat(all_batches(open_batches(data, slot=1, num_islands=2, batch_size=1)))

    expected = [i for document in documents[5:][1::2] for i in document]
    stream = rows[:, :-1].flatten().tolist()
    assert stream == expected[: len(stream)]
    assert len(expected) - len(stream) <= 32


# -- the public format -----------------------------------------------------------------------------


def test_an_index_written_by_hand_is_read(tmp_path):
    ids = np.arange(10, dtype="<u2")
    (tmp_path / "a.bin").write_bytes(ids.tobytes())
    write_index(tmp_path / "a.idx", [3, 0, 4, 3], [0, 2, 2, 3, 4])

    file = open_file(tmp_path / "a.bin")

    assert file.ends(0, 0, 99).tolist() == [3, 3, 7, 10]
    assert file.ends(2, 3, 1).tolist() == [7]
    assert not len(file.ends(4, 10, 99))
    assert file.ids.tolist() == ids.tolist()


def test_an_index_is_written_as_by_hand_empty_documents_without_a_sequence(tmp_path):
    write_index(tmp_path / "a.idx", [3, 4, 3], [0, 1, 1, 2, 3, 3])

    written = b"".join(index_pieces(np.array([3, 0, 4, 3, 0], dtype="<i4"), np.dtype("<u2")))

    assert written == (tmp_path / "a.idx").read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what megatron imports, or does not find
def test_what_is_written_is_what_megatron_reads(tmp_path):
    from megatron.core.datasets import indexed_dataset as indexed

    documents = [[1, 2, 3], [], [400, 5], [6]]
    ids = np.array([i for document in documents for i in document], dtype=np.uint16)
    (tmp_path / "a.bin").write_bytes(ids.tobytes())
    lengths = np.array([len(document) for document in documents], dtype=np.int32)
    (tmp_path / "a.idx").write_bytes(b"".join(index_pieces(lengths, ids.dtype)))

    read = indexed.IndexedDataset(str(tmp_path / "a"))

    assert [sequence.tolist() for sequence in read] == [d for d in documents if d]
    assert read.document_indices.tolist() == [0, 1, 1, 2, 3]
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "b.bin"), dtype=np.uint16)
    for document in documents:
        if document:
            builder.add_item(torch.tensor(document))
        builder.end_document()
    builder.finalize(str(tmp_path / "b.idx"))
    for suffix in ("bin", "idx"):
        a, b = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"
        assert a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"magic": b"TNTIDX\x00\x00\x00"}, "a.idx is no index of MMapIndexedDataset, version 1"),
        ({"version": 2}, "a.idx is no index of MMapIndexedDataset, version 1"),
        ({"code": 7}, "ids are of type 7, which is no integer"),
        ({"code": 4}, "it has 20 bytes, and 24 by its index"),
        ({"lengths": [3, 3]}, "it has 20 bytes, and 12 by its index"),
        ({"starts": [0, 8, 14]}, "names sequences that do not follow one another"),
        ({"lengths": [3, -1, 8]}, "names sequences that do not follow one another"),
        ({"documents": [0, 2]}, "names no document for sequence 2 of 3"),
        ({"documents": [0, 2, 1, 3]}, "names documents that do not follow one another"),
        ({"documents": [1, 2, 3]}, "names documents that do not follow one another"),
        ({"documents": []}, "and 70 for its 3 sequences and -1 documents"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_foreign_or_damaged_index_is_refused_by_what_is_wrong(settings, problem, tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(20))
    lengths = settings.pop("lengths", [3, 4, 3])
    documents = settings.pop("documents", [0, *range(1, len(lengths) + 1)])
    write_index(tmp_path / "a.idx", lengths, documents, **settings)

    with pytest.raises(ConfigError) as caught:
        open_file(tmp_path / "a.bin").ends(0, 0, 99)

    assert problem in str(caught.value)


def test_every_torn_file_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(20))
    write_index(tmp_path / "a.idx", [3, 4, 3], [0, 1, 2, 3])
    np.save(tmp_path / "a.npy", np.arange(10, dtype=np.uint16))
    np.save(tmp_path / "table.npy", np.zeros((5, 2), dtype=np.uint16))
    np.save(tmp_path / "float.npy", np.zeros(5))
    array = (tmp_path / "a.npy").read_bytes()
    headers = {b"{'": b"{('", b"<u2": b",<2", b"(10,)": b"(-99,)", b"10,), }  ": b"True,), }"}
    for number, (good, bad) in enumerate(headers.items()):
        (tmp_path / f"header-{number}.npy").write_bytes(array.replace(good, bad, 1))

    for name, opened in (("a.idx", "a.bin"), ("a.bin", "a.bin"), ("a.npy", "a.npy")):
        whole = (tmp_path / name).read_bytes()
        for torn in (*(whole[:size] for size in range(len(whole))), whole + b"x"):
            (tmp_path / name).write_bytes(torn)
            with pytest.raises(ConfigError, match="cannot be read as token ids"):
                open_file(tmp_path / opened)
        (tmp_path / name).write_bytes(whole)
        open_file(tmp_path / opened)
    damaged = [f"header-{number}.npy" for number in range(len(headers))]
    for name in ("table.npy", "float.npy", *damaged, "a.idx", "missing.bin"):
        with pytest.raises(ConfigError, match="cannot be read as token ids"):
            open_file(tmp_path / name)


@pytest.mark.parametrize("wrong", [256, -1])
def test_an_id_that_is_no_token_is_refused_with_its_position(wrong, tmp_path):
    ids = np.tile(np.array([*range(20), SEPARATOR], dtype=np.int32), 60)
    ids[800] = wrong
    np.save(tmp_path / "a.npy", ids)
    batches = open_batches(open_streams({"a": {"files": str(tmp_path / "a.npy")}}))

    with pytest.raises(ConfigError) as caught:
        for step in range(9):
            batches.batch(step)

    assert f"a.npy: token 800 is {wrong}, but those of data.tokenizer are 0 to 255" in str(
        caught.value
    )


def test_files_prepared_with_another_tokenizer_are_refused(texts, by_bytes):
    with pytest.raises(ConfigError, match=r"a\.bin was prepared with tokenizer bytes, data\.tok"):
        open_streams(by_bytes, tokenizer=str(texts / "tokenizer"))


def test_documents_of_other_ids_than_the_tokenizers_are_measured_by_document(
    texts, tmp_path, caplog
):
    tokenizer = str(texts / "tokenizer")
    vocabulary = Tokenizer.from_file(f"{tokenizer}/tokenizer.json").get_vocab()
    # A character at a time, as this tokenizer would not have it.
    ids = [i for word in ("aaaa", "in the") * 30 for i in (*map(vocabulary.get, word), 0)]
    np.save(tmp_path / "a.npy", np.array([i for i in ids if i is not None], dtype=np.uint16))
    files = {"a": {"files": str(tmp_path / "a.npy")}}

    data = open_streams(files, tokenizer=tokenizer, held_out_documents=40)
    evaluation = data.evaluation(5)

    assert "of 20 of 40 held-out documents of token files data.tokenizer makes other ids" in (
        caplog.text
    )
    assert evaluation.num_bytes == int((evaluation.tokens[:, 1:] != 0).sum())
