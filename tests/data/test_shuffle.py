"""Mixing by weight and shuffling in windows: complete, fixed by the seed, exact from any cursor."""

import json
from collections import Counter

import numpy as np
import pytest

from diloco.data.packing import SourceEndedError
from diloco.data.shuffle import Mixture, WindowShuffle


class CountingSource:
    """Gives [base], [base + 1], ... and ends after `length` sequences."""

    def __init__(self, base=0, length=10_000):
        self.base, self.length, self.num_sequences = base, length, 0

    def next_sequence(self):
        if self.num_sequences == self.length:
            raise SourceEndedError("ended")
        self.num_sequences += 1
        return np.array([self.base + self.num_sequences - 1], dtype=np.int32)

    def cursor(self):
        return {"sequences": self.num_sequences}

    def go_to(self, cursor):
        self.num_sequences = cursor["sequences"] if cursor else 0


def make_shuffle(window, *, length=10_000, seed=1, slot=0):
    sources = {"a": CountingSource(length=length), "b": CountingSource(base=100_000)}
    mixture = Mixture(sources, {"a": 2.0, "b": 1.0})
    return WindowShuffle(mixture, window=window, seed=seed, slot=slot)


def take(shuffle, number):
    return [int(shuffle.take()[0]) for _ in range(number)]


def rest(shuffle):
    taken = []
    while True:
        try:
            taken += take(shuffle, 1)
        except SourceEndedError:
            return taken


@pytest.mark.parametrize(
    "weights",
    [{"a": 1, "b": 1}, {"a": 0.7, "b": 0.2, "c": 0.1}, {"a": 1e-3, "b": 5.0}, {"only": 3.0}],
)
def test_every_prefix_of_a_mixture_has_each_source_near_its_share(weights):
    sources = {name: CountingSource() for name in weights}
    mixture = Mixture(sources, weights)

    for taken in range(1, 500):
        mixture.next_sequence()

        # Error diffusion: with n sources a count is off by less than n.
        for name, weight in weights.items():
            due = taken * weight / sum(weights.values())
            assert abs(sources[name].num_sequences - due) < len(weights)


def test_order_of_the_tables_does_not_matter():
    draws = []
    for names in ("ab", "ba"):
        sources = {name: CountingSource(base=ord(name) * 1000) for name in names}
        mixture = Mixture(sources, dict.fromkeys(names, 1.0))
        draws.append([int(mixture.next_sequence()[0]) for _ in range(20)])

    assert draws[0] == draws[1]


def test_window_of_one_keeps_the_order():
    mixture = Mixture({"a": CountingSource()}, {"a": 1.0})

    assert take(WindowShuffle(mixture, window=1, seed=1, slot=0), 9) == list(range(9))


def test_each_window_has_its_sequences_in_another_order():
    plain = take(make_shuffle(1), 64)
    shuffled = take(make_shuffle(16), 64)

    windows = [shuffled[start : start + 16] for start in range(0, 64, 16)]
    for n, window in enumerate(windows):
        assert Counter(window) == Counter(plain[16 * n : 16 * n + 16])
        assert window != plain[16 * n : 16 * n + 16]
    orders = {tuple(np.argsort(window)) for window in windows}
    assert len(orders) == 4


def test_order_depends_on_seed_and_island_only():
    first = take(make_shuffle(16), 64)

    assert take(make_shuffle(16), 64) == first
    assert take(make_shuffle(16, seed=2), 64) != first
    assert take(make_shuffle(16, slot=1), 64) != first


@pytest.mark.parametrize("window", [1, 5, 16])
@pytest.mark.parametrize("length", [10, 37, 10_000])
def test_goes_on_exactly_from_every_cursor(window, length):
    whole = make_shuffle(window, length=length)
    taken, cursors = [], [whole.cursor()]
    for _ in range(70):
        try:
            taken += take(whole, 1)
        except SourceEndedError:
            break
        cursors.append(whole.cursor())

    again = make_shuffle(window, length=length)
    for n, cursor in enumerate(cursors):
        again.go_to(json.loads(json.dumps(cursor)))
        assert again.cursor() == cursor
        assert take(again, len(taken) - n) == taken[n:], f"cursor {n}"
        if length < 40:
            assert rest(again) == []
    again.go_to(None)
    assert take(again, len(taken)) == taken


@pytest.mark.parametrize("forged", [{"window": 2**62}, {"position": 6}, {"window": 0}])
def test_a_cursor_that_no_shuffle_of_these_sources_has_is_refused(forged):
    whole = make_shuffle(5)
    take(whole, 12)

    with pytest.raises(ValueError, match="does not begin behind 10 sequences"):
        make_shuffle(5).go_to({**whole.cursor(), **forged})


def test_all_that_was_read_is_given_out_before_a_source_ends():
    # a gives 10 of each 15 sequences: its 11th is missing after 15 or 16.
    plain = rest(make_shuffle(1, length=10))
    shuffled = rest(make_shuffle(8, length=10))

    assert 15 <= len(plain) <= 16
    assert sorted(shuffled) == sorted(plain)


def test_one_step_reads_about_what_it_takes():
    source = CountingSource()
    shuffle = WindowShuffle(Mixture({"a": source}, {"a": 1.0}), window=8, seed=1, slot=0)
    shuffle.take()
    read = []
    for _ in range(40):
        before = source.num_sequences
        shuffle.take()
        read.append(source.num_sequences - before)

    assert max(read) <= 2
    assert sum(read) == 40
