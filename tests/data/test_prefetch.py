"""Batches that are made ahead: to all who ask they are those that are not."""

import json
import threading

import pytest
import torch

from diloco.data.corpus import TextCorpus, TextData
from diloco.data.prefetch import PrefetchedBatches
from diloco.errors import ConfigError
from diloco.protocol.run.slots import SlotPosition
from tests.data.test_streams import BATCH, open_batches
from tests.data.text_files import LENGTH, SEED, open_streams, pieces, write_jsonl

CPU = torch.device("cpu")


@pytest.fixture(params=["streams", "stdlib"])
def start(request, tmp_path):
    """Opens one island's batches of two slots, at their start."""
    if request.param == "streams":
        path = str(write_jsonl(tmp_path / "a.jsonl", pieces(120)))
        data = open_streams({"a": {"files": path, "repeat": True}}, num_slots=3, shuffle_window=8)
    else:
        corpus = TextCorpus.from_documents(text.encode() for text in pieces(120))
        data = TextData(corpus, sequence_length=LENGTH, seed=SEED)
    options = {"num_slots": 3, "batch_size": BATCH, "dp_coordinate": 1, "dp_size": 2}
    return lambda: data.batches(slots=(0, 2), **options)


@pytest.fixture
def ahead(start):
    batches = PrefetchedBatches(start(), CPU)
    yield batches
    batches.close()


def cursors(batches):
    positions = {slot: each.as_json() for slot, each in batches.positions().items()}
    return json.dumps([batches.state_dict(), positions])


def test_every_cursor_is_that_of_the_batch_taken_and_leads_to_the_same_batches(start, ahead):
    plain, taken, states = start(), [], []
    for step in range(24):
        states.append(json.dumps(ahead.state_dict()))
        assert cursors(ahead) == cursors(plain)
        taken.append(plain.batch(step))
        assert torch.equal(ahead.batch(step), taken[-1])

    for step, state in enumerate(states):  # killed after each step, and started again
        again = PrefetchedBatches(start(), CPU)
        again.load_state_dict(json.loads(state))
        for later in range(step, min(step + 4, len(taken))):
            assert torch.equal(again.batch(later), taken[later])
        again.close()


def test_whatever_is_asked_between_two_batches_is_answered_as_if_none_was_ahead(start, ahead):
    plain, untouched = start(), SlotPosition({})
    both = (plain, ahead)

    def same(ask):
        answers = [ask(batches) for batches in both]
        assert cursors(plain) == cursors(ahead)
        return answers

    def draw(first, number):
        for step in range(first, first + number):
            a, b = same(lambda batches, step=step: batches.batch(step))
            assert torch.equal(a, b)

    draw(0, 3)
    saved = plain.state_dict()
    given_back = plain.positions()[0]
    draw(3, 4)
    same(lambda batches: batches.hold({2: batches.positions()[2]}, inner_step=7))
    draw(7, 2)
    same(lambda batches: batches.hold({1: untouched, 0: given_back}, inner_step=9))
    draw(9, 2)
    draw(20, 2)  # steps in between are passed over
    same(lambda batches: batches.hold({0: given_back, 2: untouched}, inner_step=22))
    same(lambda batches: batches.load_state_dict(saved))
    draw(3, 3)
    same(lambda batches: batches.seek(2))
    draw(2, 3)
    with pytest.raises(ConfigError, match="the run was trained on"):
        ahead.load_state_dict({"inner_step": 1})
    draw(5, 2)


def test_the_end_of_the_text_is_an_error_at_the_step_that_needs_more(tmp_path):
    path = str(write_jsonl(tmp_path / "a.jsonl", pieces(40)))
    plain, inner = (open_batches(open_streams({"a": {"files": path}})) for _ in range(2))
    ahead, step = PrefetchedBatches(inner, CPU), 0

    with pytest.raises(ConfigError) as expected:
        while True:
            plain.batch(step)
            step += 1
    for each in range(step):
        ahead.batch(each)
    last = json.dumps(ahead.state_dict())
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            ahead.batch(step)
        assert str(caught.value) == str(expected.value)

    assert json.dumps(ahead.state_dict()) == last
    ahead.seek(0)
    plain.seek(0)
    assert torch.equal(ahead.batch(0), plain.batch(0))
    ahead.close()


def test_the_next_batches_are_made_while_nobody_asks_and_the_thread_ends(start):
    made = threading.Semaphore(0)
    inner = start()
    draw = inner.batch

    def counted(step):
        made.release()
        return draw(step)

    inner.batch = counted
    ahead = PrefetchedBatches(inner, CPU)

    ahead.batch(0)

    for _ in range(3):
        assert made.acquire(timeout=30)
    ahead.close()
    assert not any(thread.name.startswith("batches") for thread in threading.enumerate())
