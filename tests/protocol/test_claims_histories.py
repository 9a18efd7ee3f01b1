"""Text shared out among islands that join, leave, die, freeze and are not heard: nothing is lost.

Neither is it where a run goes back to a cut, whatever became of the slots meanwhile.
The coordinator's machine and the islands' part in it run against each other; every single draw is
written down by the islands' text itself.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import reject, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diloco.island.groups import Groups
from diloco.launch.rank.text_share import TextShare
from diloco.protocol.run.claims import Claims
from diloco.protocol.run.slots import Holding, SlotPosition, account, furthest_behind
from diloco.report.summary_text import TextSummary
from diloco.telemetry.events import AlarmRaised, SlotDrawn, TextUntold

NUM_SLOTS = 5
CONFIGURED = ("a", "b")
ISLANDS = st.sampled_from(["a", "b", "c", "d"])
BOUND = 8


class CountedText:
    """Text of one start that writes down every draw; a draw is of source "x" or "y" in turn."""

    def __init__(self, run):
        self.run, self.slots, self.has_part = run, {}, False

    def draw(self):
        slot = furthest_behind({slot: at.num_drawn for slot, at in self.slots.items()})
        number = self.slots[slot].num_drawn
        self.run.log[slot, number] += 1
        self.run.after_part[slot, number] += self.has_part
        self.slots[slot] = position(number + 1)

    def positions(self):
        return dict(self.slots)

    def hold(self, claims, *, inner_step):
        for at in claims.values():
            assert at == position(at.num_drawn)
        self.slots = dict(claims)
        return {}


def position(number):
    if not number:
        return SlotPosition()
    drawn = {"x": (number + 1) // 2, "y": number // 2}
    return SlotPosition(drawn, {"at": number})


class Start:
    """One start of an island."""

    def __init__(self, run, name):
        self.name, self.timeline, self.events = name, run.timeline, []
        self.text = CountedText(run)
        self.share = TextShare(
            self.text,
            groups=Groups(),
            most_untold=BOUND,
            draws_per_step=1,
            on_event=self.events.append,
            on_due=lambda: None,
            check=lambda: run.pump(self),
            patience_s=60.0 if run.is_answering else 0.0,
        )

    def holdings(self):
        last = {(e.slot, e.grant): e for e in self.events if isinstance(e, SlotDrawn)}
        return [Holding(self.timeline, e.slot, e.begun, e.drawn) for e in last.values()]


@dataclass
class Cut:
    """A run checkpoint: what was told when it was named, who owes a part, and the parts."""

    told: dict[str, Any]
    owing: set[str]
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)


class Run:
    """A coordinator and its islands, without a network."""

    def __init__(self):
        self.log = Counter()
        self.after_part = Counter()  # draws of those that had their part of the newest cut
        self.timeline = self.num_abandoned = 0
        self.cut = None
        self.is_answering = True
        self.entries = {}
        self.claims = Claims(NUM_SLOTS, CONFIGURED)
        self.starts = {}  # at work, frozen ones included
        self.ended = []
        self.live = set()
        self.joined = set()
        self.num_losses = 0
        self.waiting = []

    def keep(self, entries):
        self.entries.update(entries)
        self.claims.apply(entries)

    def share_out(self):
        self.keep(self.claims.shared_out(self.live, set(CONFIGURED) - self.joined))

    def restart_coordinator(self):
        self.claims = Claims(NUM_SLOTS, CONFIGURED)
        self.claims.apply(self.entries.items())

    def join(self, name):
        if name in self.starts:
            self.ended.append(self.starts.pop(name))
            self.num_losses += 1
        self.live.add(name)
        self.joined.add(name)
        self.share_out()
        start = Start(self, name)
        self.starts[name] = start
        start.share.take_up(self.claims.of(name), inner_step=0)
        self.waiting.clear()

    def end(self, name, *, is_graceful):
        start = self.starts[name]
        if is_graceful:
            start.share.close(1)
            self.report(start)
        else:
            self.num_losses += 1
        self.ended.append(self.starts.pop(name))
        self.live.discard(name)
        self.share_out()

    def freeze(self, name):
        self.live.discard(name)
        self.num_losses += 1
        self.share_out()

    def draw(self, start):
        start.text.draw()
        start.share.settle(1)
        self.waiting.clear()

    def report(self, start, *, is_heard=True, is_answered=True):
        said = start.share.say()
        if not is_heard:
            return
        if start.name not in self.live:
            self.live.add(start.name)
            self.share_out()
        revision, slots = self.claims.read_word(said)
        self.keep(self.claims.told(start.name, slots))
        if is_answered:
            news = self.claims.of(start.name) if self.claims.revision > revision else ""
            start.share.hear(news)

    def pump(self, waiting):
        """While one start waits for text the others go on, and wait no less."""
        if not self.is_answering:
            return
        if waiting.share._is_full:  # it waits for an answer alone, and for nobody
            self.report(waiting)
            return
        self.waiting.append(waiting)
        if len(self.waiting) >= 20:
            # Anyone who waits further down this stack cannot take up what would let this one go on.
            assert any(start.share._news for start in self.waiting), "nobody lets go"
            reject()
        for start in list(self.starts.values()):
            if start.name in self.live:
                if start not in self.waiting:
                    start.share.settle(1)
                self.report(start)
        self.report(waiting)

    def name_cut(self):
        self.cut = Cut(self.claims.positions, {n for n in self.live if n in self.starts})
        self.after_part.clear()
        for start in self.starts.values():
            start.text.has_part = False

    def take_part(self, name):
        start = self.starts[name]
        at = start.text.positions().items()
        self.cut.owing.discard(name)
        self.cut.parts[name] = {str(slot): position.as_json() for slot, position in at}
        start.text.has_part = True

    def resume(self):
        cut, before = self.cut, self.log.copy()
        self.keep(self.claims.restored(cut.told, list(cut.parts.values())))
        for slot, position in cut.told.items():
            back = SlotPosition.from_json(self.claims.slots[int(slot)].position).num_drawn
            in_parts = [part[slot] for part in cut.parts.values() if slot in part]
            known = {SlotPosition.from_json(p).num_drawn for p in in_parts or [position]}
            assert back == min(known)
            for number in range(back):
                drawn = self.log[int(slot), number] - self.after_part[int(slot), number]
                assert drawn > 0, "in no weights that the run goes back to"
            for key in [key for key in self.log if key[0] == int(slot) and key[1] >= back]:
                del self.log[key]
        self.num_abandoned += before.total() - self.log.total()
        self.ended += self.starts.values()
        self.starts.clear()
        self.live.clear()
        self.joined.clear()
        self.cut = None
        self.timeline += 1

    def finish(self):
        for name in CONFIGURED if self.timeline else ():
            if name not in self.live:
                self.join(name)  # a slot that nobody takes up says nothing of a resume
        for name in sorted(self.live):
            self.report(self.starts[name])
            self.starts[name].share.settle(1)
        for start in [*self.starts.values(), *self.ended]:
            start.share.close(1)

    def accounts(self):
        starts = [*self.starts.values(), *self.ended]
        return account(holding for start in starts for holding in start.holdings())

    def counts(self):
        """Draws, repeated ones, and skipped ones."""
        reached = Counter()
        for slot, number in self.log:
            reached[slot] = max(reached[slot], number + 1)
        return (
            self.log.total(),
            self.log.total() - len(self.log),
            reached.total() - len(self.log),
        )


class Histories(RuleBasedStateMachine):
    """Everything that may happen to islands, in any order."""

    def __init__(self):
        super().__init__()
        self.run = Run()

    @rule(name=ISLANDS)
    def join(self, name):
        self.run.join(name)

    def _some(self, data):
        return data.draw(st.sampled_from(sorted(self.run.starts)))

    @precondition(lambda self: self.run.starts)
    @rule(data=st.data(), number=st.integers(1, 12))
    def draw(self, data, number):
        start = self.run.starts[self._some(data)]
        for _ in range(number):
            self.run.draw(start)

    @precondition(lambda self: self.run.starts)
    @rule(data=st.data(), is_heard=st.booleans(), is_answered=st.booleans())
    def report(self, data, is_heard, is_answered):
        start = self.run.starts[self._some(data)]
        self.run.report(start, is_heard=is_heard, is_answered=is_answered)

    @precondition(lambda self: self.run.starts)
    @rule(data=st.data(), is_graceful=st.booleans())
    def end(self, data, is_graceful):
        self.run.end(self._some(data), is_graceful=is_graceful)

    @precondition(lambda self: self.run.live)
    @rule(data=st.data())
    def freeze(self, data):
        self.run.freeze(data.draw(st.sampled_from(sorted(self.run.live))))

    @precondition(lambda self: self.run.live and self.run.cut is None)
    @rule()
    def name_cut(self):
        self.run.name_cut()

    @precondition(lambda self: self.run.cut and self.run.cut.owing & self.run.starts.keys())
    @rule(data=st.data())
    def take_part(self, data):
        owing = sorted(self.run.cut.owing & self.run.starts.keys())
        self.run.take_part(data.draw(st.sampled_from(owing)))

    @precondition(lambda self: self.run.cut and self.run.cut.parts)
    @rule()
    def resume(self):
        self.run.resume()

    @rule()
    def restart_coordinator(self):
        self.run.restart_coordinator()

    @invariant()
    def nothing_is_skipped_and_a_loss_repeats_no_more_than_the_bound(self):
        _, repeated, skipped = self.run.counts()
        assert skipped == 0
        assert repeated <= BOUND * self.run.num_losses

    @invariant()
    def every_slot_has_one_holder_and_the_live_are_served_alike(self):
        claims, live = self.run.claims, self.run.live
        again = Claims(NUM_SLOTS, CONFIGURED)
        again.apply(self.run.entries.items())
        assert again.slots == claims.slots
        if live:
            loads = Counter(dict.fromkeys(live, 0))
            loads.update(slot.destined for slot in claims.slots if slot.destined in live)
            assert max(loads.values()) - min(loads.values()) <= 1
            absent = set(CONFIGURED) - self.run.joined
            assert all(slot.destined in live | absent for slot in claims.slots)
            assert not claims.shared_out(live, absent)

    def teardown(self):
        run = self.run
        run.finish()
        accounts = run.accounts()
        sums = (
            sum(found.trained for found in accounts.values()),
            sum(found.repeated for found in accounts.values()),
            sum(found.skipped for found in accounts.values()),
        )
        assert sums == run.counts()
        assert sum(found.abandoned for found in accounts.values()) == run.num_abandoned


Histories.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestHistories = Histories.TestCase


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestManyHistories(Histories.TestCase):
    """The same, for long."""

    settings = settings(max_examples=1000, stateful_step_count=60, deadline=None)


def test_joins_and_leaves_in_peace_repeat_nothing():
    run = Run()
    for name in "abcd":
        run.join(name)
        for start in run.starts.values():
            for _ in range(7):
                run.draw(start)
    for name in "bda":
        run.end(name, is_graceful=True)
        for start in run.starts.values():
            run.report(start)
            for _ in range(7):
                run.draw(start)

    trained, repeated, skipped = run.counts()
    assert (trained, repeated, skipped) == (7 * (1 + 2 + 3 + 4 + 3 + 2 + 1), 0, 0)
    assert {slot.holder for slot in run.claims.slots} == {"c"}


def test_an_island_that_dies_is_repeated_from_where_it_had_told():
    run = Run()
    run.join("a")
    run.join("b")
    for _ in range(4):
        run.draw(run.starts["a"])
    run.report(run.starts["a"])
    for _ in range(3):
        run.draw(run.starts["a"])
    run.end("a", is_graceful=False)
    run.report(run.starts["b"])
    for _ in range(40):
        run.draw(run.starts["b"])

    assert run.counts() == (47, 3, 0)


def untold(run, start):
    drawn = sum(at.num_drawn for at in start.text.positions().values())
    known = run.claims.positions
    return drawn - sum(
        SlotPosition.from_json(known[str(slot)]).num_drawn for slot in start.text.positions()
    )


def test_an_island_waits_rather_than_draw_more_than_the_bound_untold():
    run = Run()
    run.join("a")
    start, most = run.starts["a"], 0
    for _ in range(5 * BOUND):
        run.draw(start)  # nobody reports but anyone who waits
        most = max(most, untold(run, start))

    assert most == BOUND - 1, "the next step may draw that one"
    assert max(e.untold for e in start.events) <= BOUND


def test_an_island_goes_on_beyond_the_bound_where_nobody_answers_and_says_so(caplog):
    run = Run()
    run.is_answering = False
    run.join("a")
    start = run.starts["a"]
    for _ in range(3 * BOUND):
        run.draw(start)

    assert untold(run, start) == 3 * BOUND
    passed = [event for event in start.events if isinstance(event, TextUntold)]
    assert passed == [TextUntold(1, BOUND, BOUND)]
    warnings = [line for line in caplog.messages if "beyond data.handover_samples" in line]
    assert len(warnings) == 1 and f"untold={BOUND} bound={BOUND}" in warnings[0]
    assert max(e.untold for e in start.events if isinstance(e, SlotDrawn)) == 3 * BOUND

    run.is_answering = True  # it is back
    start.share._patience_s = 60.0
    run.report(start)
    assert untold(run, start) == 0
    for _ in range(3 * BOUND):
        run.draw(start)
        assert untold(run, start) <= BOUND


def test_half_of_the_bound_is_told_at_once():
    run, calls = Run(), []
    run.join("a")
    start = run.starts["a"]
    start.share._on_due = lambda: calls.append(start.text.slots and untold(run, start))
    for _ in range(7):
        run.draw(start)
    assert calls == [BOUND // 2], "once, until it was answered"
    run.report(start)
    assert untold(run, start) <= 3
    for _ in range(5):
        run.draw(start)
    assert len(calls) == 2


def test_a_slot_in_no_part_goes_back_to_where_it_was_known_when_the_cut_was_named():
    run = Run()
    run.join("a")
    run.join("b")
    for start in run.starts.values():
        for _ in range(8):
            run.draw(start)
        run.report(start)
    drawn_by_a, drawn_by_b = (set(run.starts[name].text.slots) for name in "ab")
    told = run.claims.positions
    run.name_cut()
    for start in run.starts.values():
        for _ in range(9):
            run.draw(start)
    run.take_part("a")
    run.end("b", is_graceful=True)  # it dies owing its part, or says that it cannot write one
    run.report(run.starts["a"])
    for _ in range(40):
        run.draw(run.starts["a"])
    run.report(run.starts["a"])
    part = run.cut.parts["a"]

    run.resume()

    back = run.claims.positions
    assert {slot: back[str(slot)] for slot in drawn_by_a} == {int(s): p for s, p in part.items()}
    assert all(back[str(slot)] == told[str(slot)] for slot in drawn_by_b)
    run.finish()
    text = TextSummary(run.accounts(), "samples", 0, 0, BOUND).as_text()
    assert "x: 13 trained, 0 of them again, 0 skipped, 26 given up by resumes in addition" in text


def test_a_slot_in_two_parts_goes_on_from_the_earlier():
    claims = Claims(1, ["a"])
    parts = [{"0": position(40).as_json()}, {"0": position(10).as_json()}]

    for each in (parts, parts[::-1]):
        claims.apply(claims.restored(claims.positions, each))
        assert claims.positions == {"0": position(10).as_json()}


def test_a_frozen_island_is_told_what_it_lost_before_it_is_given_some_back():
    run = Run()
    run.join("a")
    run.join("b")
    run.freeze("a")
    assert {slot.holder for slot in run.claims.slots} == {"b"}
    thawed = run.starts["a"]
    for _ in range(2):
        run.draw(thawed)

    run.report(thawed)
    thawed.share.settle(1)  # waits until b has let go

    held = {number: slot.holder for number, slot in enumerate(run.claims.slots)}
    assert sorted(held.values()) in (["a", "a", "b", "b", "b"], ["a", "a", "a", "b", "b"])
    assert set(thawed.text.slots) == {number for number, name in held.items() if name == "a"}


@pytest.mark.parametrize(
    "word",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"revision": 0}',
        '{"revision": "0", "slots": {}}',
        '{"revision": 0, "slots": {"5": {}}}',
        json.dumps({"revision": 0, "slots": {"x": {}}}),
        *(
            json.dumps({"revision": 0, "slots": {slot: word}})
            for slot, word in [
                ("5", {"grant": 0, "is_final": False, "position": {"drawn": {}, "cursor": {}}}),
                ("-1", {"grant": 0, "is_final": False, "position": {"drawn": {}, "cursor": {}}}),
                ("0", {"grant": "", "is_final": False, "position": {"drawn": {}, "cursor": {}}}),
                ("0", {"grant": 0, "is_final": 1, "position": {"drawn": {}, "cursor": {}}}),
                ("0", {"grant": 0, "is_final": True, "position": {"drawn": {"x": -1}}}),
            ]
        ),
    ],
    ids=lambda word: word[:60],
)
def test_what_no_island_says_is_refused(word):
    with pytest.raises(ValueError):
        Claims(NUM_SLOTS, CONFIGURED).read_word(word)


def test_a_slot_that_is_drawn_from_the_start_again_is_an_alarm():
    events = []
    share = TextShare(
        SimpleNamespace(hold=lambda claims, inner_step: {1: "it leads nowhere"}, positions=dict),
        groups=Groups(),
        most_untold=BOUND,
        draws_per_step=1,
        on_event=events.append,
        on_due=lambda: None,
        check=lambda: None,
    )
    slot = {"grant": 1, "position": position(3).as_json()}

    share.take_up(json.dumps({"revision": 0, "slots": {"1": slot}, "owed": {}}), inner_step=0)

    (alarm,) = [e for e in events if isinstance(e, AlarmRaised)]
    assert alarm.alarm == "text_repeats"
    assert "slots 1 of the text" in alarm.text and "it leads nowhere" in alarm.text
