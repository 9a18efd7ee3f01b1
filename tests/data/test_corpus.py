"""Text: which bytes an island sees at a step, what it never sees, and the digest of all of it."""

import json
import time

import numpy as np
import pytest
import torch

from diloco.data.corpus import TextCorpus, TextData
from diloco.errors import ConfigError
from tests.trainer.small_island import small_corpus

LENGTH = 16


def numbered_text(num_bytes):
    """Bytes in which every window of 3 or more is unique up to 64 kB, so a row shows its start."""
    numbers = np.arange(num_bytes // 2 + 1, dtype=">u2")
    return numbers.tobytes()[:num_bytes]


def make_data(seed=5, num_bytes=20_000):
    corpus = TextCorpus.from_documents([numbered_text(num_bytes), b"#" * (num_bytes // 20)])
    return TextData(corpus, sequence_length=LENGTH, seed=seed)


def test_batch_is_the_same_in_every_process_and_run():
    batch = make_data().batch(1, 7, 4)

    assert batch.dtype == torch.int64
    assert batch.shape == (4, LENGTH + 1)
    assert torch.equal(batch, make_data().batch(1, 7, 4))
    assert batch[:, :4].tolist() == [
        [2, 133, 2, 134],
        [188, 22, 189, 22],
        [10, 95, 10, 96],
        [21, 199, 21, 200],
    ]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: make_data(seed=6).batch(1, 7, 4), id="seed"),
        pytest.param(lambda: make_data().batch(0, 7, 4), id="island-slot"),
        pytest.param(lambda: make_data().batch(1, 8, 4), id="inner-step"),
        pytest.param(lambda: make_data().batch(7, 1, 4), id="slot-and-step-swapped"),
    ],
)
def test_batch_depends_on(other):
    rows = {tuple(row) for row in make_data().batch(1, 7, 4).tolist()}

    assert rows.isdisjoint(map(tuple, other().tolist()))


def test_batch_rows_are_consecutive_bytes_of_the_training_text():
    data = make_data()
    text = data.corpus.train.tobytes()

    for row in data.batch(0, 0, 64).tolist():
        assert bytes(row) in text


@pytest.mark.parametrize("dp_size", [2, 3, 12])
def test_coordinates_take_contiguous_slices_of_the_island_batch(dp_size):
    data = make_data()
    slices = [data.batch(0, 3, 12, dp_coordinate=c, dp_size=dp_size) for c in range(dp_size)]

    assert torch.equal(torch.cat(slices), data.batch(0, 3, 12))


def test_islands_of_unequal_batch_share_no_sample_and_larger_batches_extend_smaller_ones():
    data = make_data(num_bytes=60_000)
    small, large = data.batch(0, 3, 4), data.batch(1, 3, 12)
    rows = [tuple(row) for row in torch.cat([small, large]).tolist()]

    assert len(set(rows)) == 16
    assert torch.equal(data.batch(0, 3, 12)[:4], small)


def test_samples_are_spread_evenly():
    data = make_data()
    places = len(data.corpus.train) - LENGTH
    text = data.corpus.train.tobytes()
    rows = [row for step in range(40) for row in data.batch(0, step, 50).tolist()]
    starts = np.array([text.index(bytes(row)) for row in rows])

    # 2,000 uniform draws: a tenth of the places gets 200 +- 13.4, so 60 is 4.5 standard deviations.
    counts, _ = np.histogram(starts, bins=10, range=(0, places))
    assert np.abs(counts - 200).max() < 60
    assert starts.max() < places


def test_held_out_documents_are_never_sampled():
    data = make_data()

    batches = torch.cat([data.batch(slot, step, 50) for slot in range(4) for step in range(20)])

    assert (data.evaluation(20).tokens == ord("#")).all()
    assert not (batches == ord("#")).all(dim=1).any()


@pytest.mark.parametrize(
    ("sizes", "held_out"),
    [
        pytest.param([500, 10, 0, 10, 6], 16, id="last-documents-until-3-percent"),
        pytest.param([100, 100], 100, id="whole-documents-only"),
        pytest.param([1, 1000], 1000, id="first-document-is-always-trained-on"),
    ],
)
def test_split_is_by_document(sizes, held_out):
    corpus = TextCorpus.from_documents(bytes([n]) * size for n, size in enumerate(sizes))

    assert len(corpus.held_out) == held_out
    assert len(corpus.train) == sum(sizes) - held_out


def test_digest_is_that_of_lengths_and_bytes():
    corpus = TextCorpus.from_documents([b"import this\n", b"", b"pass\n"])

    # printf '\x0c\0\0\0\0\0\0\0import this\n\x05\0\0\0\0\0\0\0pass\n' | sha256sum
    assert corpus.sha256 == "1e8b936fabc4500cb1156508ef9d098514aab0c1fc0b80584714853d7614742b"
    assert corpus.num_documents == 2
    assert corpus.sha256 != TextCorpus.from_documents([b"import this\npass", b"\n"]).sha256


def test_evaluation_is_fixed_evenly_spread_and_does_not_overlap():
    data = TextData(small_corpus(), sequence_length=LENGTH, seed=1)
    text = data.corpus.held_out
    most = (len(text) - 1) // LENGTH
    sequences = data.evaluation(most).tokens

    assert torch.equal(
        sequences, TextData(small_corpus(), sequence_length=LENGTH, seed=2).evaluation(most).tokens
    )
    assert bytes(sequences[0].tolist()) == text[: LENGTH + 1].tobytes()
    assert bytes(sequences[-1].tolist()) == text[-LENGTH - 1 :].tobytes()
    assert data.evaluation(1).tokens.shape == (1, LENGTH + 1)


@pytest.mark.parametrize("num_sequences", [0, 10_000])
def test_impossible_evaluation_is_refused(num_sequences):
    with pytest.raises(ConfigError, match=rf"num_sequences = {num_sequences}: .* use 1 to 62"):
        make_data().evaluation(num_sequences)


@pytest.mark.parametrize("documents", [[], [b""], [b"one"], [b"", b"one", b""]])
def test_empty_corpus_is_refused(documents):
    with pytest.raises(ConfigError, match="at least 2 are needed"):
        TextCorpus.from_documents(documents)


@pytest.mark.parametrize(
    ("train", "held_out", "part"),
    [(LENGTH, 50, "training"), (50, LENGTH, "held-out")],
)
def test_too_short_corpus_is_refused(train, held_out, part):
    corpus = TextCorpus.from_documents([b"a" * train, b"b" * held_out])

    with pytest.raises(ConfigError, match=f"needs 17 bytes, the {part} text has 16"):
        TextData(corpus, sequence_length=LENGTH, seed=0)


def test_corpus_of_one_sequence_has_one_place():
    corpus = TextCorpus.from_documents([b"a" * (LENGTH + 1), b"b" * (LENGTH + 1)])
    data = TextData(corpus, sequence_length=LENGTH, seed=0)

    assert (data.batch(0, 0, 3) == ord("a")).all()
    assert (data.evaluation(1).tokens == ord("b")).all()


def test_indivisible_batch_is_refused():
    with pytest.raises(ConfigError, match=r"a batch of 10 sequences .* among 4"):
        make_data().batch(0, 0, 10, dp_size=4)


def test_stdlib_is_large_stable_and_quick_to_read():
    started = time.process_time()
    corpus = TextCorpus.from_stdlib()
    duration_s = time.process_time() - started

    assert duration_s < 2
    assert corpus.sha256 == TextCorpus.from_stdlib().sha256
    assert 5e6 < len(corpus.train) < 50e6
    assert 0.03 <= len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out)) < 0.06
    text = corpus.train.tobytes()
    assert b"class TextIOWrapper" in text
    assert b"class MinidomTest(unittest.TestCase)" not in text


def test_stdlib_skips_tests_installed_packages_and_what_a_machine_writes(tmp_path, monkeypatch):
    for name, text in {
        "b.py": b"2" * 90,
        "a/z.py": b"1" * 10,
        "test/t.py": b"no",
        "a/tests/t.py": b"no",
        "site-packages/p.py": b"no",
        "_sysconfigdata__linux.py": b"no",
        "sitecustomize.py": b"no",
        "c.txt": b"no",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))

    corpus = TextCorpus.from_stdlib()

    assert (corpus.train.tobytes(), corpus.held_out.tobytes()) == (b"1" * 10, b"2" * 90)


def test_stdlib_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))

    with pytest.raises(ConfigError, match=r"no \*.py files below"):
        TextCorpus.from_stdlib()


def test_batches_are_the_islands_samples_and_the_ranks_slice():
    data = make_data()
    batches = data.batches(slots=(1,), num_slots=3, batch_size=12, dp_coordinate=2, dp_size=4)

    for step in (0, 1, 5):
        assert torch.equal(batches.batch(step), data.batch(1, step, 12)[6:9])


def open_batches(data, batch_size=4):
    return data.batches(slots=(0,), num_slots=1, batch_size=batch_size, dp_coordinate=0, dp_size=1)


def test_cursor_counts_steps_and_samples_over_a_change_of_batch():
    batches = open_batches(make_data())
    for step in range(3):
        batches.batch(step)
    state = json.loads(json.dumps(batches.state_dict()))

    larger = open_batches(make_data(), batch_size=10)
    larger.load_state_dict(state)
    larger.batch(3)

    assert (state["inner_step"], state["samples"]) == (3, 12)
    assert {**state, "inner_step": 4, "samples": 22, "slots": {"0": 4}} == larger.state_dict()
    larger.seek(6)
    assert larger.state_dict()["samples"] == 42
    larger.seek(2)
    assert larger.state_dict()["samples"] == 20


def test_cursor_of_other_text_is_refused():
    state = open_batches(make_data()).state_dict()
    other = open_batches(make_data(num_bytes=30_000))

    with pytest.raises(ConfigError, match="the release of Python that it began with"):
        other.load_state_dict(state)
    with pytest.raises(ConfigError, match="trained on streams"):
        other.load_state_dict({"inner_step": 3, "samples": 12})


def test_indivisible_batches_are_refused():
    with pytest.raises(ConfigError, match=r"a batch of 10 sequences .* among 4"):
        make_data().batches(slots=(0,), num_slots=1, batch_size=10, dp_coordinate=0, dp_size=4)


def test_evaluation_has_a_byte_a_token():
    assert make_data().evaluation(20).num_bytes == 20 * LENGTH
