"""Text shared out among islands that join, leave, die, freeze and are not heard: nothing is lost.

The coordinator's machine and the islands' part in it run against each other; every single draw is
written down by the islands' text itself.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diloco.coordinator.claims import Claims
from diloco.data.claims import Holding, SlotPosition, account, furthest_behind
from diloco.launch.text_share import TextShare
from diloco.sync.groups import Groups

NUM_SLOTS = 5
CONFIGURED = ("a", "b")
ISLANDS = st.sampled_from(["a", "b", "c", "d"])
BOUND = 8


class CountedText:
    """Text of one start that writes down every draw; a draw is of source "x" or "y" in turn."""

    def __init__(self, log):
        self.log, self.slots = log, {}

    def draw(self):
        slot = furthest_behind({slot: at.num_drawn for slot, at in self.slots.items()})
        number = self.slots[slot].num_drawn
        self.log[slot, number] += 1
        self.slots[slot] = position(number + 1)

    def positions(self):
        return dict(self.slots)

    def hold(self, claims, *, inner_step):
        for at in claims.values():
            assert at == position(at.num_drawn)
        self.slots = dict(claims)


def position(number):
    if not number:
        return SlotPosition()
    drawn = {"x": (number + 1) // 2, "y": number // 2}
    return SlotPosition(drawn, {"at": number})


class Start:
    """One start of an island."""

    def __init__(self, run, name):
        self.name, self.events = name, []
        self.text = CountedText(run.log)
        self.share = TextShare(
            self.text,
            groups=Groups(),
            handover_samples=BOUND,
            samples_per_draw=1,
            on_event=self.events.append,
            check=lambda: run.pump(self),
        )
        self.untold = 0  # an upper bound

    def holdings(self):
        last = {(event.slot, event.grant): event for event in self.events}
        return [Holding(event.slot, event.begun, event.drawn) for event in last.values()]


class Run:
    """A coordinator and its islands, without a network."""

    def __init__(self):
        self.log = Counter()
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
        if start.untold >= BOUND:
            self.report(start)
            start.share.settle(1)
            self.waiting.clear()
        start.text.draw()
        start.untold += 1
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
            if slots:
                start.untold = 0

    def pump(self, waiting):
        """While one start waits for text the others go on, and wait no less."""
        self.waiting.append(waiting)
        assert len(self.waiting) < 20, "nobody lets go"
        for start in list(self.starts.values()):
            if start.name in self.live:
                if start not in self.waiting:
                    start.share.settle(1)
                self.report(start)
        self.report(waiting)

    def finish(self):
        for start in [*self.starts.values(), *self.ended]:
            start.share.close(1)

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
        starts = [*run.starts.values(), *run.ended]
        accounts = account(holding for start in starts for holding in start.holdings())
        sums = (
            sum(found.trained for found in accounts.values()),
            sum(found.repeated for found in accounts.values()),
            sum(found.skipped for found in accounts.values()),
        )
        assert sums == run.counts()


Histories.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestHistories = Histories.TestCase


@pytest.mark.slow
class TestManyHistories(Histories.TestCase):
    """The same, for long."""

    settings = settings(max_examples=3000, stateful_step_count=60, deadline=None)


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
