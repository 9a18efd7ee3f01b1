"""Streams as an island trains on them: shared out, packed, shuffled, resumed; and held-out text."""

import json

import numpy as np
import pytest
import torch

from diloco.data.batches import Batches
from diloco.errors import ConfigError
from tests.data.text_files import (
    COMMIT,
    LENGTH,
    open_streams,
    pieces,
    write_jsonl,
    write_parquet,
    write_tokenizer,
)

HELD_OUT = 5
SEPARATOR = 255
BATCH = 6


def open_batches(data, *, slot=0, num_islands=1, batch_size=BATCH, coordinate=0, size=1) -> Batches:
    return data.batches(
        slots=(slot,),
        num_slots=num_islands,
        batch_size=batch_size,
        dp_coordinate=coordinate,
        dp_size=size,
    )


def all_batches(batches, first=0):
    """Every batch until a source ends."""
    found = []
    with pytest.raises(ConfigError, match="ended"):
        while True:
            found.append(batches.batch(first + len(found)))
    return found


def texts_of(batches, *, separator=SEPARATOR):
    """Documents that a source's unshuffled sequences are made of, the last one perhaps cut."""
    rows = torch.cat(all_batches(batches))
    stream = [*rows[:, :-1].flatten().tolist(), int(rows[-1, -1])]
    documents = bytes(stream).split(bytes([separator]))
    return [document.decode(errors="ignore") for document in documents]


@pytest.fixture
def table(tmp_path):
    """Three files with row groups of 7 and 120 documents of real text."""
    for n, (start, stop) in enumerate([(0, 50), (50, 52), (52, 120)]):
        write_parquet(tmp_path / f"{n}.parquet", pieces(120)[start:stop])
    return str(tmp_path / "*.parquet")


@pytest.fixture
def lines(tmp_path):
    return str(write_jsonl(tmp_path / "lines.jsonl", pieces(200)[120:]))


def test_sequences_are_the_documents_in_order_with_separators_each_token_predicted_once(table):
    data = open_streams({"web": {"files": table}}, shuffle_window=1)
    expected = (
        "\N{REPLACEMENT CHARACTER}".join(pieces(120)[HELD_OUT:]) + "\N{REPLACEMENT CHARACTER}"
    )
    stream = expected.encode().replace("\N{REPLACEMENT CHARACTER}".encode(), b"\xff")

    rows = torch.cat(all_batches(open_batches(data, batch_size=1)))

    assert rows.dtype == torch.int64
    assert len(rows) == (len(stream) - 1) // LENGTH
    for n, row in enumerate(rows.tolist()):
        assert bytes(row) == stream[n * LENGTH : n * LENGTH + LENGTH + 1]


@pytest.mark.parametrize("num_islands", [1, 2, 3])
def test_islands_share_no_document_and_leave_none_out(num_islands, table):
    data = open_streams({"web": {"files": table}}, num_slots=num_islands, shuffle_window=1)

    shares = [
        texts_of(open_batches(data, slot=slot, num_islands=num_islands, batch_size=1))
        for slot in range(num_islands)
    ]

    trained = pieces(120)[HELD_OUT:]
    for slot, share in enumerate(shares):
        expected = trained[slot::num_islands]
        # What is left after the last whole sequence is less than one sequence long.
        whole = [text for text in share if text in expected]
        assert whole == list(expected[: len(whole)])
        missing = "".join(expected[len(whole) :])
        assert len(missing.encode()) <= LENGTH + max(len(text.encode()) for text in expected)
        assert set(share[:-1]) <= set(expected)


def test_ranks_take_contiguous_slices_of_the_islands_batch(table):
    data = open_streams({"web": {"files": table}})
    whole = open_batches(data)
    parts = [open_batches(data, coordinate=c, size=3) for c in range(3)]

    for step in range(5):
        assert torch.equal(whole.batch(step), torch.cat([part.batch(step) for part in parts]))
    assert all(part.state_dict() == whole.state_dict() for part in parts)


def test_indivisible_batch_is_refused(table):
    data = open_streams({"web": {"files": table}})

    with pytest.raises(ConfigError, match="a batch of 6 sequences cannot be divided among 4"):
        open_batches(data, size=4)


@pytest.mark.parametrize("tokenizer", ["bytes", "trained"])
def test_resumes_bit_for_bit_at_every_step_over_files_row_groups_and_passes(
    tokenizer, table, lines, tmp_path
):
    sources = {
        "table": {"files": table, "weight": 3.0, "repeat": True},
        "lines": {"files": lines, "repeat": True},
    }
    name = "bytes" if tokenizer == "bytes" else str(write_tokenizer(tmp_path / "tokenizer"))

    def start():
        data = open_streams(sources, num_slots=2, shuffle_window=16, tokenizer=name)
        return open_batches(data, slot=1, num_islands=2)

    whole = start()
    batches, states = [], []
    for step in range(150 if tokenizer == "bytes" else 75):
        states.append(json.dumps(whole.state_dict()))
        batches.append(whole.batch(step))
    assert json.loads(states[-1])["slots"]["1"]["sources"]["table"]["start"]["pass"] >= 1

    resumed = start()
    for step, state in enumerate(states):
        resumed.load_state_dict(json.loads(state))
        assert json.dumps(resumed.state_dict()) == state
        for later in range(step, min(step + 4, len(batches))):
            assert torch.equal(resumed.batch(later), batches[later]), f"{later} from {step}"
    fresh = start()
    fresh.load_state_dict(json.loads(states[40]))
    for step in range(40, len(batches)):
        assert torch.equal(fresh.batch(step), batches[step])


def test_another_batch_size_goes_on_with_the_next_sample(table):
    data = open_streams({"web": {"files": table}})
    large, small = open_batches(data), open_batches(data, batch_size=2)
    rows = torch.cat([large.batch(step) for step in range(9)])

    large = open_batches(data)
    for step in range(4):
        large.batch(step)
    small.load_state_dict(large.state_dict())
    after = torch.cat([small.batch(step) for step in range(4, 10)])

    assert torch.equal(after, rows[4 * BATCH : 4 * BATCH + 12])
    state = small.state_dict()
    assert (state["inner_step"], state["samples"]) == (10, 4 * BATCH + 12)


def test_seek_leads_where_the_steps_lead_forward_and_back(table):
    data = open_streams({"web": {"files": table}})
    whole = open_batches(data)
    batches = [whole.batch(step) for step in range(12)]
    other = open_batches(data)

    for step in (7, 3, 0, 11, 11):
        other.seek(step)
        assert torch.equal(other.batch(step), batches[step])
    other.seek(2)
    assert torch.equal(other.batch(5), batches[5])


def test_weights_are_shares_of_the_tokens(tmp_path):
    sources = {}
    for name, weight in (("a", 3.0), ("b", 1.0)):
        path = write_jsonl(tmp_path / f"{name}.jsonl", [name * 50] * 400)
        sources[name] = {"files": str(path), "weight": weight}
    batches = open_batches(open_streams(sources, shuffle_window=8))

    rows = torch.cat([batches.batch(step) for step in range(20)])

    is_a = (rows == ord("a")).any(dim=1)
    assert int(is_a.sum()) == 0.75 * len(rows)
    assert not ((rows == ord("b")).any(dim=1) & is_a).any()


def test_held_out_documents_are_in_the_evaluation_and_in_no_batch(tmp_path):
    texts = ["H" * 100] * HELD_OUT + ["t" * 100] * 100
    source = {"files": str(write_jsonl(tmp_path / "a.jsonl", texts)), "repeat": True}
    data = open_streams({"web": source}, num_slots=2)

    evaluation = data.evaluation(12)
    batches = [open_batches(data, slot=slot, num_islands=2) for slot in (0, 1)]

    assert evaluation.tokens.shape == (12, LENGTH + 1)
    assert set(evaluation.tokens.unique().tolist()) == {ord("H"), SEPARATOR}
    for step in range(60):  # more than two passes
        assert not any((island.batch(step) == ord("H")).any() for island in batches)


def test_evaluation_counts_bytes_of_text_with_any_tokenizer(table, tmp_path):
    by_bytes = open_streams({"web": {"files": table}}, held_out_documents=20)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    by_tokens = open_streams(
        {"web": {"files": table}}, held_out_documents=20, tokenizer=str(tokenizer)
    )
    num_bytes = sum(len(text.encode()) for text in pieces(20))

    for data, bytes_a_token in ((by_bytes, 1.0), (by_tokens, 1.6)):
        available = _available(data)
        # All that can be had but the rest of the last sequence, spread over the documents.
        evaluation = data.evaluation(available)
        assert num_bytes - evaluation.num_bytes < 3 * LENGTH * bytes_a_token
        assert evaluation.num_bytes >= bytes_a_token * 0.95 * available * LENGTH
        once = data.evaluation(available)
        assert torch.equal(once.tokens, evaluation.tokens)
    assert by_tokens.vocab_size == 400


def _available(data):
    with pytest.raises(ConfigError, match=r"or raise data\.held_out_documents") as caught:
        data.evaluation(10**6)
    return int(str(caught.value).split("use 1 to ")[1].split(",")[0])


def test_evaluation_is_the_same_on_all_islands_and_seeds(table):
    first = open_streams({"web": {"files": table}}, num_slots=2)
    other = open_streams({"web": {"files": table}}, num_slots=3, seed=99)

    assert torch.equal(first.evaluation(7).tokens, other.evaluation(7).tokens)


def test_digest_is_that_of_text_and_tokenizer_wherever_they_are(tmp_path):
    digests = []
    for number, directory in enumerate(("here", "there", "changed")):
        (tmp_path / directory).mkdir()
        path = tmp_path / directory / "a.jsonl"
        write_jsonl(path, [*pieces(20), "x" if number == 2 else "y"])
        digests.append(open_streams({"web": {"files": str(path)}}).digest)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    files = str(tmp_path / "here" / "a.jsonl")
    digests.append(open_streams({"web": {"files": files}}, tokenizer=str(tokenizer)).digest)

    assert digests[0] == digests[1]
    assert len({digests[0], digests[2], digests[3]}) == 3


def test_empty_documents_leave_no_trace(tmp_path):
    texts = ["", "x" * 40] * 10
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    data = open_streams({"web": {"files": str(path)}}, held_out_documents=4, shuffle_window=1)

    rows = torch.cat(all_batches(open_batches(data, batch_size=1)))

    stream = rows[:, :-1].flatten().numpy()
    ends = np.flatnonzero(stream == SEPARATOR)
    assert (np.diff(ends) == 41).all()


# -- refusals ----------------------------------------------------------------------------------


def test_end_of_a_source_is_refused_with_the_remedy(table):
    data = open_streams({"web": {"files": table}}, num_slots=2)
    batches = open_batches(data, slot=1, num_islands=2)
    found = []

    with pytest.raises(ConfigError) as caught:
        for step in range(10_000):
            found.append(batches.batch(step))

    message = str(caught.value)
    assert message.startswith(f"after inner step {len(found)}: data.sources.web ended: slot 1 of 2")
    assert "was trained on once, its part of 120 documents" in message
    assert "set data.sources.web.repeat = true" in message
    assert "lower run.inner_steps" in message


def test_repeated_source_begins_again_with_the_same_documents(table, caplog):
    data = open_streams({"web": {"files": table, "repeat": True}}, shuffle_window=1)
    trained = [text.encode() for text in pieces(120)[HELD_OUT:]]
    one_pass = b"\xff".join(trained) + b"\xff"

    batches = open_batches(data, batch_size=1)
    num_rows = 2 * len(one_pass) // LENGTH
    rows = torch.cat([batches.batch(step) for step in range(num_rows)])

    stream = bytes(rows[:, :-1].flatten().tolist())
    assert stream == (2 * one_pass)[: len(stream)]
    assert "source starts again, setting=data.sources.web pass=2" in caplog.text


@pytest.mark.parametrize(
    ("texts", "num_islands", "answer"),
    [
        ([], 1, "web is empty: it has no document"),
        (["x"] * 5, 1, "web has 5 documents: data.held_out_documents = 5 are held out, and each"),
        (["x"] * 7, 3, "each of 3 islands needs one more; add text or lower"),
    ],
    ids=["none", "all-held-out", "fewer-than-islands"],
)
def test_too_few_documents_are_refused_at_the_start(texts, num_islands, answer, tmp_path):
    path = write_parquet(tmp_path / "a.parquet", texts)

    with pytest.raises(ConfigError, match=answer):
        open_streams({"web": {"files": str(path)}}, num_slots=num_islands)


@pytest.mark.parametrize("repeat", [False, True])
def test_share_without_text_is_refused(repeat, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["x"] * 5 + ["", "x" * 99] * 9)
    source = {"files": str(path), "repeat": repeat}
    batches = open_batches(open_streams({"web": source}, num_slots=2), slot=0, num_islands=2)

    with pytest.raises(ConfigError, match=r"23 documents, the first 5 .* no text for slot 0"):
        batches.batch(0)


def state_after(data, steps=3):
    batches = open_batches(data)
    for step in range(steps):
        batches.batch(step)
    return json.loads(json.dumps(batches.state_dict()))


def refusal(data, state):
    with pytest.raises(ConfigError) as caught:
        open_batches(data).load_state_dict(state)
    return str(caught.value)


def test_changed_file_is_named_on_resume(table, lines, tmp_path):
    sources = {"lines": {"files": lines}, "table": {"files": table}}
    state = state_after(open_streams(sources))
    write_parquet(tmp_path / "1.parquet", pieces(123)[120:])
    write_parquet(tmp_path / "2.parquet", pieces(3))

    message = refusal(open_streams(sources), state)

    assert "data.sources.table is not what the run was trained on: part 2" in message
    assert "1.parquet (" in message
    assert "other content" in message
    assert "put it back" in message


@pytest.mark.parametrize("is_added", [True, False], ids=["added", "removed"])
def test_other_number_of_files_is_named_on_resume(is_added, table, tmp_path):
    sources = {"table": {"files": table}}
    state = state_after(open_streams(sources))
    if is_added:
        write_parquet(tmp_path / "3.parquet", pieces(3))
    else:
        (tmp_path / "2.parquet").unlink()

    message = refusal(open_streams(sources), state)

    assert ("3.parquet" in message and "was not there" in message) == is_added
    assert ("2.parquet" in message and "is gone" in message) != is_added


def test_change_that_the_digest_does_not_see_is_found_at_the_cursor(tmp_path):
    texts = [f"{n:03}" + "x" * 997 for n in range(400)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    data = open_streams({"web": {"files": str(path)}})
    state = state_after(data, steps=400)  # 400 x 6 x 32 bytes: near document 80
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"07', b'"57').replace(b'"08', b'"58'))

    changed = open_streams({"web": {"files": str(path)}})

    assert changed.digest == data.digest
    assert "not what the run was trained on, although names and sizes" in refusal(changed, state)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"shuffle_window": 8}, "data.shuffle_window: 8 here, 4 there"),
        ({"sequence_length": 16}, "data.sequence_length: 16 here, 32 there"),
        ({"held_out_documents": 6}, "data.held_out_documents: 6 here, 5 there"),
        ({"seed": 8}, "run.seed: 8 here, 7 there"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_text_cut_in_another_way_is_refused_on_resume_with_both_values(settings, line, table):
    sources = {"web": {"files": table}}
    state = state_after(open_streams(sources))

    assert line in refusal(open_streams(sources, **settings), state)


def test_other_tokenizer_is_refused_on_resume(table, tmp_path):
    sources = {"web": {"files": table}}
    state = state_after(open_streams(sources))
    tokenizer = write_tokenizer(tmp_path / "tokenizer")

    message = refusal(open_streams(sources, tokenizer=str(tokenizer)), state)

    assert 'data.tokenizer: "' in message
    assert '"bytes" there' in message


def test_repeat_may_be_set_when_a_run_goes_on(table):
    batches = open_batches(open_streams({"web": {"files": table}}))
    found = all_batches(batches)
    again = open_streams({"web": {"files": table, "repeat": True}})
    whole = open_batches(again)
    expected = [whole.batch(step) for step in range(len(found) + 3)]
    assert all(torch.equal(a, b) for a, b in zip(expected[:-8], found, strict=False))

    batches = open_batches(open_streams({"web": {"files": table}}))
    for step in range(len(found) - 5):
        batches.batch(step)
    resumed = open_batches(again)
    resumed.load_state_dict(batches.state_dict())

    for step in range(len(found) - 5, len(found) + 3):
        assert torch.equal(resumed.batch(step), expected[step])


def test_cursor_of_another_split_gives_its_inner_step(table, caplog):
    data = open_streams({"web": {"files": table}}, num_slots=2)
    alone = open_batches(data)
    for step in range(5):
        alone.batch(step)
    expected = open_batches(data, slot=1, num_islands=2, batch_size=3)
    rows = [expected.batch(step) for step in range(7)]

    split = open_batches(data, slot=1, num_islands=2, batch_size=3)
    split.load_state_dict(alone.state_dict())

    assert torch.equal(split.batch(5), rows[5])
    assert "split among other islands" in caplog.text


def test_hub_data_set_that_moved_on_is_refused_with_the_revision_to_set(hub):
    sources = {"web": {"hub": "owner/name"}}
    data = open_streams(sources)
    state = state_after(data)
    expected = open_batches(data)
    batches = [expected.batch(step) for step in range(4)]
    hub.commit = "f" * 40

    message = refusal(open_streams(sources), state)

    assert "owner/name" in message
    assert f'set data.sources.web.revision = "{COMMIT}"' in message
    resumed = open_batches(open_streams({"web": {"hub": "owner/name", "revision": COMMIT}}))
    resumed.load_state_dict(state)
    assert torch.equal(resumed.batch(3), batches[3])


def test_cursor_of_the_standard_library_is_refused(table):
    message = refusal(open_streams({"web": {"files": table}}), {"inner_step": 1, "digest": "x"})

    assert 'trained on data.source = "stdlib"' in message


def test_a_file_in_two_sources_is_refused_with_both_names(table, lines, tmp_path):
    one, other = str(tmp_path / "1.parquet"), {"files": lines}

    with pytest.raises(ConfigError) as caught:
        open_streams({"all": {"files": table}, "lines": other, "one": {"files": one}})

    assert f"{one} is in data.sources.all and in data.sources.one" in str(caught.value)


def test_a_file_may_be_in_two_sources_with_another_field_each(tmp_path):
    records = [{"title": f"title {n}", "body": f"body {n}"} for n in range(20)]
    path = tmp_path / "both.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))

    data = open_streams({name: {"files": str(path), "field": name} for name in ("title", "body")})

    assert data.parts["title"] == data.parts["body"]
