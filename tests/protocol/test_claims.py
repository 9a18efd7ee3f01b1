"""Slots of the text: drawn in turn, handed over exactly, and added up without a gap."""

import json
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.data.corpus import TextCorpus, TextData
from diloco.errors import ConfigError
from diloco.protocol.run.slots import Account, Holding, SlotPosition, account, furthest_behind
from tests.data.text_files import open_streams, pieces, write_jsonl, write_parquet

SPANS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 20), st.sampled_from("ab")),
    min_size=1,
    max_size=12,
)


def holding(slot, begun, number, source="a", timeline=0):
    return Holding(timeline, slot, {source: begun}, {source: begun + number})


@pytest.mark.parametrize(
    ("holdings", "expected"),
    [
        pytest.param([holding(0, 0, 9), holding(0, 9, 3)], Account(12, 0, 0), id="exact"),
        pytest.param([holding(0, 0, 9), holding(0, 6, 6)], Account(15, 3, 0), id="repeats"),
        pytest.param([holding(0, 0, 9), holding(0, 12, 3)], Account(12, 0, 3), id="skips"),
        pytest.param([holding(0, 0, 9), holding(1, 0, 9)], Account(18, 0, 0), id="other-slot"),
        pytest.param([holding(0, 100, 9)], Account(9, 0, 0), id="begins-later"),
        pytest.param(
            [holding(0, 0, 9), holding(0, 2, 4), holding(0, 3, 3)], Account(16, 7, 0), id="thrice"
        ),
        pytest.param([holding(0, 5, 0), holding(0, 0, 2)], Account(2, 0, 3), id="took-and-died"),
        pytest.param(
            [holding(0, 0, 9), holding(0, 6, 4, timeline=1)], Account(10, 0, 0, 3), id="resumed"
        ),
        pytest.param(
            [holding(0, 0, 9), holding(0, 9, 3), holding(0, 4, 2, timeline=1)],
            Account(6, 0, 0, 8),
            id="resumed-before-another-took-it",
        ),
        pytest.param(
            [holding(0, 0, 9), holding(0, 7, 5, timeline=1), holding(0, 3, 1, timeline=2)],
            Account(4, 0, 0, 11),
            id="resumed-twice-further-back",
        ),
        pytest.param(
            [holding(0, 0, 9), holding(0, 12, 5, timeline=1)], Account(14, 0, 3), id="resumed-ahead"
        ),
        pytest.param(
            [holding(0, 0, 9), holding(1, 2, 5, timeline=1)], Account(14, 0, 0), id="not-taken-up"
        ),
    ],
)
def test_draws_add_up(holdings, expected):
    assert account(holdings) == {"a": expected}


def test_nobody_drew_nothing():
    assert account([]) == {}


@given(SPANS)
def test_account_is_that_of_every_single_draw(spans):
    drawn = {source: Counter() for _, _, _, source in spans}
    reached, begun_at = {}, {}
    for slot, begun, number, source in spans:
        drawn[source].update((slot, draw) for draw in range(begun, begun + number))
        key = source, slot
        reached[key] = max(reached.get(key, 0), begun + number)
        begun_at[key] = min(begun_at.get(key, begun), begun)

    accounts = account(holding(*span) for span in spans)

    assert accounts.keys() == drawn.keys()
    for source, counts in drawn.items():
        whole = sum(reached[key] - begun_at[key] for key in reached if key[0] == source)
        assert accounts[source] == Account(
            trained=counts.total(),
            repeated=counts.total() - len(counts),
            skipped=whole - len(counts),
        )
        found = accounts[source]
        assert found.trained - found.repeated + found.skipped == whole


def test_slot_furthest_behind_is_drawn_next():
    assert furthest_behind({3: 5, 1: 4, 2: 4}) == 1


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        {"drawn": {}},
        {"drawn": [], "cursor": {}},
        {"drawn": {"a": -1}, "cursor": {}},
        {"drawn": {"a": True}, "cursor": {}},
        {"drawn": {"a": 1.0}, "cursor": {}},
        {"drawn": {"a": 2**63}, "cursor": {}},
        {"drawn": {"a": 2**62, "b": 2**62}, "cursor": {}},
        {"drawn": {}, "cursor": 1},
        {"drawn": {}, "cursor": {}, "more": 1},
    ],
    ids=repr,
)
def test_what_is_no_position_is_refused(values):
    with pytest.raises(ValueError, match=r"position|drawn"):
        SlotPosition.from_json(values)


def test_position_survives_json():
    position = SlotPosition({"a": 3, "b": 0}, {"window": 1})

    assert SlotPosition.from_json(json.loads(json.dumps(position.as_json()))) == position
    assert (position.num_drawn, SlotPosition().num_drawn) == (3, 0)


# -- streams -----------------------------------------------------------------------------------

NUM_SLOTS = 4


@pytest.fixture
def streams(tmp_path):
    write_parquet(tmp_path / "1.parquet", pieces(90)[:60])
    lines = write_jsonl(tmp_path / "lines.jsonl", pieces(90)[60:])
    sources = {
        "table": {"files": str(tmp_path / "1.parquet"), "weight": 2.0},
        "lines": {"files": str(lines)},
    }
    return open_streams(sources, num_slots=NUM_SLOTS, held_out_documents=2, shuffle_window=8)


def open_slots(data, slots, batch_size=3):
    return data.batches(
        slots=slots, num_slots=NUM_SLOTS, batch_size=batch_size, dp_coordinate=0, dp_size=1
    )


def sequences(batches, first=0):
    """All that is left, a sequence each, as tuples."""
    found, step = [], first
    while True:
        try:
            found += map(tuple, batches.batch(step).tolist())
        except ConfigError as error:
            assert "ended" in str(error)
            return found
        step += 1


@pytest.fixture
def whole(streams):
    """Slot -> its sequences in order."""
    return {slot: sequences(open_slots(streams, [slot], 1)) for slot in range(NUM_SLOTS)}


def test_several_slots_are_drawn_in_turn_until_all_have_ended(streams, whole):
    found = sequences(open_slots(streams, [2, 0], 1))

    shortest = min(len(whole[0]), len(whole[2]))
    assert found[: 2 * shortest : 2] == whole[0][:shortest]
    assert found[1 : 2 * shortest : 2] == whole[2][:shortest]
    assert Counter(found) == Counter(whole[0] + whole[2])


def test_several_slots_go_on_exactly_from_every_cursor(streams):
    batches = open_slots(streams, [1, 3])
    states, drawn = [], []
    for step in range(8):
        states.append(json.loads(json.dumps(batches.state_dict())))
        drawn.append(batches.batch(step))
    again = open_slots(streams, [1, 3])

    for step, state in enumerate(states):
        again.load_state_dict(state)
        for later in range(step, 8):
            assert torch.equal(again.batch(later), drawn[later])
    again.seek(5)
    assert torch.equal(again.batch(5), drawn[5])


def test_slots_change_hands_without_a_sequence_lost_or_repeated(streams, whole):
    first, second = open_slots(streams, [0, 1]), open_slots(streams, [2])
    found = []
    for step in range(4):
        found += [*first.batch(step).tolist(), *second.batch(step).tolist()]

    # Slot 1 goes to the second island, a third joins with slot 3.
    told = {slot: _told(position) for slot, position in first.positions().items()}
    second.hold({**second.positions(), 1: told[1]}, inner_step=40)
    first.hold({0: told[0]}, inner_step=4)
    third = open_slots(streams, [3])
    for step in range(3):
        found += [*first.batch(4 + step).tolist(), *third.batch(step).tolist()]
        found += second.batch(40 + step).tolist()
    # The first leaves.
    third.hold({**third.positions(), **first.positions()}, inner_step=3)

    rest = [tuple(row) for row in found]
    rest += _rest(streams, second.positions()) + _rest(streams, third.positions())
    assert Counter(rest) == Counter(row for rows in whole.values() for row in rows)


def test_positions_count_by_source_what_was_drawn(streams, whole):
    batches = open_slots(streams, [0, 1], 1)
    for step in range(10):
        batches.batch(step)
        positions = batches.positions()
        assert sum(position.num_drawn for position in positions.values()) == step + 1
    again = open_slots(streams, [0, 1], 1)
    again.hold({slot: _told(at) for slot, at in positions.items()}, inner_step=10)

    assert again.positions() == positions
    assert all(set(position.drawn) == {"lines", "table"} for position in positions.values())
    assert torch.equal(again.batch(10), batches.batch(10))


def _lies():
    """What a slot's last holder may tell that its text does not lead to."""

    def lie(*path, value):
        def change(position):
            there = position
            for key in path[:-1]:
                there = there[key]
            there[path[-1]] = value

        return pytest.param(change, id=f"{'.'.join(path)}={value}")

    source = "cursor", "sources", "lines"
    yield lie("cursor", value={"window": 1})
    yield lie("cursor", "window", value="1")
    yield lie("cursor", "position", value=-1)
    yield lie("drawn", "lines", value=2**40)
    for key, value in {"token": 2**60, "check": "00", "start": {}, "sequences": None}.items():
        yield lie(*source, key, value=value)
    yield lie(*source, "check", value="")
    yield lie(*source, "token", value=0.0)
    yield lie("cursor", "window", value=-5)
    for value in ("x", [], True):
        yield lie(*source, "start", "pass", value=value)
    yield lie(*source, "start", "stream", value={"examples_iterable": 1})


@pytest.mark.parametrize("lie", list(_lies()))
def test_a_position_that_its_text_does_not_lead_to_ends_no_heir(streams, whole, lie):
    holder, heir = open_slots(streams, [0]), open_slots(streams, [1], 1)
    for step in range(4):
        holder.batch(step)
    told = json.loads(json.dumps(holder.positions()[0].as_json()))
    lie(told)

    problems = heir.hold({0: SlotPosition.from_json(told)}, inner_step=7)

    assert sequences(heir, first=7) == whole[0]
    assert problems[0].startswith("position {")


def test_text_that_leads_to_no_position_of_an_islands_slots_is_refused(streams):
    holder, heir = open_slots(streams, [0, 1]), open_slots(streams, [], 1)
    for step in range(4):
        holder.batch(step)
    told = json.loads(json.dumps({s: p.as_json() for s, p in holder.positions().items()}))
    for each in told.values():
        each["cursor"]["sources"]["lines"]["check"] = "00"
    claims = {int(slot): SlotPosition.from_json(each) for slot, each in told.items()}

    with pytest.raises(ConfigError, match=r"no position of slots 0, 1: put back the text"):
        heir.hold(claims, inner_step=7)
    assert not heir.hold({0: claims[0], 1: holder.positions()[1]}, inner_step=7).keys() - {0}


def _told(position):
    return SlotPosition.from_json(json.loads(json.dumps(position.as_json())))


def _rest(data, positions):
    """What is left of slots: one by one, for batches are cut where the last slot ends."""
    found = []
    for slot, position in positions.items():
        alone = open_slots(data, [], 1)
        alone.hold({slot: position}, inner_step=7)
        found += sequences(alone, first=7)
    return found


# -- the standard library's slot steps ---------------------------------------------------------


def test_slot_steps_are_drawn_once_who_draws_them():
    data = TextData(
        TextCorpus.from_documents([bytes(range(256)) * 99, b"#" * 999]), sequence_length=8, seed=3
    )

    def open_steps(slots):
        return data.batches(slots=slots, num_slots=3, batch_size=2, dp_coordinate=0, dp_size=1)

    first, second = open_steps([0, 1]), open_steps([2])
    drawn = [first.batch(step) for step in range(5)]  # 0 1 0 1 0
    second.batch(0)
    second.hold({**second.positions(), 1: _told(first.positions()[1])}, inner_step=1)
    drawn += [second.batch(step) for step in range(1, 4)]  # 2 1 2

    expected = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (2, 1), (1, 2), (2, 2)]
    assert all(
        torch.equal(batch, data.batch(slot, step, 2))
        for batch, (slot, step) in zip(drawn, expected, strict=True)
    )
    assert second.positions() == {1: SlotPosition({"stdlib": 3}), 2: SlotPosition({"stdlib": 3})}
    first.seek(3)
    assert torch.equal(first.batch(3), drawn[3])
    alone = open_steps([1])
    alone.load_state_dict(json.loads(json.dumps(first.state_dict())))  # of other slots
    assert torch.equal(alone.batch(4), data.batch(1, 4, 2))
