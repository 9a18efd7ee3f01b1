"""The guard of a merge: which contributions are not of this training, by size and by direction.

A bit that flips in an island's memory, or an island whose numbers are wrong by a factor, makes
values that are finite and well-formed; what gives them away is their size. Each tensor of a
contribution is compared, by its norm and by its largest value, with what is usual for that tensor:

    usual = max(others, history, typical)
        others    upper median of the other contributions to this round
        history   median over the last 8 rounds; where there are fewer than two others
        typical   what the median tensor has, value by value: less is not told from nothing
    refused   beyond 16 * usual; beyond 32 * usual where there is no other contribution

Work of more inner steps than theirs may be as many times larger. What all islands do at once, as
when a learning rate restarts, is refused of none, since the others do it too. In the first four
rounds half the size of the parameters is not too large either, besides one other contribution (that
one may be the wrong one), and 16 times their size alone, there of more than 16 inner steps as many
times more, up to 64, since a step of the common optimizers moves a value by about a learning rate.
After two attempts in a row of which all members were refused, and without another since, the
history is forgotten, and that holds again: an island that is alone may jump so far, as when its
learning rate restarts, and is refused twice; 4.8e35 always is.

What has the usual size and is wrong, as with flipped signs, shuffled labels or noise, goes another
way than the others, where these agree. With three or more contributions, by cosines of samples:

    r         mean cosine to the others / mean cosine of the others among themselves
    refused   r < 0.15 where the others' is above 0.15

What was made of less than half the usual inner steps is mostly noise by nature, and neither judged
nor compared with.

Of two it cannot be told by directions which is the odd one: both are merged, and their cosine is
compared with that of earlier rounds of two,

    opposed   below 0.15 of the usual cosine, where that is above 0.15; else below -0.3

which in three such rounds in a row is an alarm that names both. After the first of them each tries
what it sends, until a round agrees (`diloco.protocol.island.soundness.Trials`). The outer momentum
is no third: its cosine to what clean islands send falls from 0.8 to between -0.06 and 0.1, and an
island that went wrong soon has it on its side.

Pure: figures of one round and a small state that is in the record of each version; no tensors, no
clock. The arithmetic is over arrays, and linear in tensors and contributions.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from diloco.outer.units import Unit

Floats: TypeAlias = npt.NDArray[np.float64]
Sample: TypeAlias = npt.NDArray[np.float32]

#: What is measured of every unit: axis 1 of all arrays of sizes.
KINDS = ("norm", "largest value")
#: Rounds that a history remembers.
WINDOW = 8
#: Rounds of history below which a contribution may also be as large as the tensor.
_SETTLED = 4
#: How many times the usual size is merged, with others to compare with and without.
_MOST = 16.0
_MOST_ALONE = 32.0
#: How many times as large as the parameters it may be in the first rounds, likewise.
_MOST_OF_OWN = 0.5
_MOST_OF_OWN_ALONE = 16.0
#: Inner steps up to which that holds; work of more may be as many times larger, up to a number.
#: Muon's 512 steps at 0.02 without a warm-up make 500 times what a head begins with.
_STEPS_OF_OWN = 16.0
_MOST_LONGER = 64.0
#: Attempts in a row of which all was refused, from which on history does not tell what is usual.
_MOST_REJECTED = 2
#: Fewer do not tell which of them goes another way; and have no other to be compared with.
_LEAST_DIRECTED = 3
LEAST_COMPARED = 2
#: Cosine below which two go against each other, where too little is known of usual ones; and rounds
#: in a row that are an alarm. In clean runs of two (H = 10, 24, 40: 145 rounds) the cosine was
#: 0.28 at least, and 0.40 of the usual one.
_LEAST_OF_TWO = -0.3
_ROUNDS_OPPOSED = 3
#: Mean cosine among the others above which they agree, and what part of it is merged. In clean runs
#: of 3 and 4 islands the part was 0.40 at least, with flipped signs or shuffled labels below -0.2.
_AGREEMENT = 0.15
_LEAST_OF_AGREEMENT = 0.15
#: Of the usual inner steps, from which a direction counts.
_LEAST_STEPS = 0.5
#: Values of a contribution that are sampled; of all contributions to a merge together; and from how
#: many on a cosine by chance is far below `_AGREEMENT`.
_MOST_SAMPLED = 1 << 16
_MOST_SAMPLED_TOGETHER = 1 << 24
_LEAST_SAMPLED = 1 << 10

_SAMPLE_BYTES = 4

_LENGTH, _LAST = struct.Struct("<I"), struct.Struct("<f")
_MOST_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class History:
    """What the guard knows of the rounds before a version, the oldest first.

    Attributes:
        sizes: Of a usual contribution to each round, float32 of shape [rounds, kinds, units].
        steps: Inner steps that it was made of, float32 of shape [rounds].
        cosines: Of the two contributions to rounds of two that agreed, float32 of shape
            [`WINDOW`]; NaN: there were fewer such rounds.
        cosine: Of the last round of two; NaN: there was none.
        num_opposed: Rounds of two, up to the last one, in which these did not agree.
    """

    sizes: npt.NDArray[np.float32]
    steps: npt.NDArray[np.float32]
    cosines: npt.NDArray[np.float32]
    cosine: float = math.nan
    num_opposed: int = 0

    @classmethod
    def empty(cls, num_units: int) -> History:
        """Give that of version 0."""
        shape = (0, len(KINDS), num_units)
        unknown = np.full(WINDOW, np.nan, np.float32)
        return cls(np.zeros(shape, np.float32), np.zeros(0, np.float32), unknown)

    def __len__(self) -> int:
        """Count the rounds."""
        return len(self.steps)

    def unless_rejected(self, rejected_in_a_row: int) -> History:
        """Give what a round is judged by after so many attempts of which all was refused."""
        is_usual = rejected_in_a_row < _MOST_REJECTED
        return self if is_usual else replace(self, sizes=self.sizes[:0], steps=self.steps[:0])

    @property
    def is_opposed(self) -> bool:
        """Whether two islands go against each other, round by round."""
        return self.num_opposed >= _ROUNDS_OPPOSED

    @property
    def least_cosine(self) -> float:
        """Cosine below which two contributions do not agree."""
        known = self.cosines[~np.isnan(self.cosines)]
        usual = float(np.median(known)) if len(known) >= _SETTLED else 0.0
        return _LEAST_OF_AGREEMENT * usual if usual > _AGREEMENT else _LEAST_OF_TWO

    def after(self, sizes: Floats, steps: Floats, cosine: float = math.nan) -> History:
        """Add a round, and forget the oldest beyond `WINDOW`.

        The usual contribution is the lower median of those that were merged: one that is wrong
        and was not seen moves it little, by itself not at all.

        Args:
            sizes: Of those, shape [contributions, kinds, units]; at least one.
            steps: Of those.
            cosine: Of `cosine_of_two`.
        """
        cosines, num_opposed = self.cosines, self.num_opposed
        if cosine < self.least_cosine:
            num_opposed += 1
        elif not math.isnan(cosine):
            cosines, num_opposed = np.append(cosines[1:], np.float32(cosine)), 0
        middle = (len(sizes) - 1) // 2
        usual = np.sort(sizes, axis=0)[middle].astype(np.float32)
        return History(
            np.concatenate([self.sizes, usual[None]])[-WINDOW:],
            np.append(self.steps, np.float32(np.sort(steps)[middle]))[-WINDOW:],
            cosines,
            self.cosine if math.isnan(cosine) else cosine,
            num_opposed,
        )

    def to_bytes(self) -> bytes:
        """Write it for a record: the same number of bytes for as many rounds and units."""
        head = json.dumps([len(self), self.sizes.shape[2]]).encode()
        of_two = np.append(self.cosines, [self.cosine, self.num_opposed])
        arrays = (self.sizes, self.steps, of_two)
        return b"".join(
            (_LENGTH.pack(len(head)), head, *(a.astype("<f4").tobytes() for a in arrays))
        )

    @classmethod
    def from_bytes(cls, content: bytes, num_units: int) -> History:
        """Read what `to_bytes` wrote; what is of other units or length is an empty one."""
        if not content:
            return cls.empty(num_units)
        start = _LENGTH.size + _LENGTH.unpack_from(content)[0]
        rounds, units = json.loads(content[_LENGTH.size : start])
        values = np.frombuffer(content, "<f4", offset=start).astype(np.float32)
        num = rounds * len(KINDS) * units
        if units != num_units or len(values) != num + rounds + WINDOW + 2:
            return cls.empty(num_units)
        steps, of_two = np.split(values[num:], [rounds])
        sizes = values[:num].reshape(rounds, len(KINDS), units)
        return cls(sizes, steps, of_two[:WINDOW], float(of_two[-2]), int(of_two[-1]))


@dataclass(frozen=True, slots=True)
class Round:
    """The contributions to a round, as the guard sees them.

    Attributes:
        sizes: float64 of shape [contributions, kinds, units].
        steps: Inner steps that each was made of, float64.
        weights: Of each; who has none is judged, and nobody is compared with it.
        own: Sizes of the parameters themselves, float64 of shape [kinds, units].
    """

    sizes: Floats
    steps: Floats
    weights: Sequence[float]
    own: Floats


def refused(
    seen: Round, samples: Sequence[Sample], history: History, units: Sequence[Unit]
) -> dict[int, str]:
    """Say which contributions are not to be merged, and why: none of the rest would be refused.

    Args:
        seen: The round.
        samples: As for `misdirected`; empty: no directions are judged.
        history: Of the rounds before.
        units: Of the fragment.
    """
    found: dict[int, str] = {}
    while staying := [m for m in range(len(seen.weights)) if m not in found]:
        rest = Round(
            seen.sizes[staying], seen.steps[staying], [seen.weights[m] for m in staying], seen.own
        )
        beyond = outsized(rest, history, units) or misdirected(
            [samples[m] for m in staying] if samples else [], rest
        )
        if not beyond:
            break
        found |= {staying[index]: why for index, why in beyond.items()}
    return found


def outsized(seen: Round, history: History, units: Sequence[Unit]) -> dict[int, str]:
    """Say which contributions are too large to be merged, and why; buffers are not judged.

    Args:
        seen: The round.
        history: Of the rounds before.
        units: Of the fragment.
    """
    usual, most = limits(seen, history, units)
    is_beyond = seen.sizes > most
    found = {}
    for m in np.flatnonzero(is_beyond.any(axis=(1, 2))):
        with np.errstate(invalid="ignore"):  # infinite, and so is what the others have
            excess = np.where(is_beyond[m], seen.sizes[m] / most[m], 0.0)
        kind, unit = map(int, np.unravel_index(excess.argmax(), excess.shape))
        found[int(m)] = (
            f"{KINDS[kind]} of {units[unit].name or f'unit {unit}'} is "
            f"{seen.sizes[m, kind, unit]:.4g}: {usual[m, kind, unit]:.4g} is usual, "
            f"{most[m, kind, unit]:.4g} at most is merged"
        )
    return found


def limits(seen: Round, history: History, units: Sequence[Unit]) -> tuple[Floats, Floats]:
    """Say how large contributions to a round usually are, and how large they may be.

    Returns:
        Both of the shape of `seen.sizes`; the second infinite for what is not judged: buffers, and
        everything where nothing is known but zeros.
    """
    ends = np.array([0, *(unit.end for unit in units)])
    scale = np.stack([np.sqrt(np.diff(ends)), np.ones(len(units))])
    is_judged = np.array([not unit.is_buffer for unit in units])
    steps = np.maximum(seen.steps, 1.0)
    is_counted = np.array(seen.weights) > 0
    num_others = (is_counted.sum() - is_counted)[:, None, None]  # of each
    others_steps = _others(steps[:, None, None], is_counted)[:, 0, 0]
    usual = _others(seen.sizes, is_counted) * _longer(steps, others_steps)
    if len(history):
        before = np.median(history.sizes, axis=0) * _longer(steps, np.median(history.steps))
        usual = np.where(num_others < 2, np.maximum(usual, before), usual)
    usual = _at_least_typical(usual, scale, is_judged)
    most = usual * np.where(num_others > 0, _MOST, _MOST_ALONE)
    if is_unsettled(history):
        own = _at_least_typical(seen.own[None], scale, is_judged)
        own = own * np.where(num_others > 0, _MOST_OF_OWN, _MOST_OF_OWN_ALONE)
        longer = np.clip(steps / _STEPS_OF_OWN, 1.0, _MOST_LONGER)[:, None, None]
        own = np.where(num_others > 0, own, own * longer)
        most = np.where(num_others < 2, np.maximum(most, own), most)
    return usual, np.where((most > 0) & is_judged, most, np.inf)


def asks_trial(content: bytes) -> bool:
    """Whether the last round of two did not agree: which of them is wrong, each is to find out.

    Args:
        content: As `History.to_bytes` wrote it; empty: there is no guard.
    """
    return bool(content) and _LAST.unpack_from(content, len(content) - _LAST.size)[0] > 0


def sampling_stride(numel: int, num_contributions: int) -> int:
    """Say how far apart values are sampled: no factor of it is one of usual widths of tensors."""
    most = max(1, min(_MOST_SAMPLED, _MOST_SAMPLED_TOGETHER // num_contributions))
    stride = -(-numel // most)
    while math.gcd(stride, 2 * 3 * 5 * 7) > 1:
        stride += 1
    return stride


def samples_bytes(numel: int, num_contributions: int) -> int:
    """Return the memory of all samples of a merge: 64 MiB at most, and a little for rounding."""
    num_samples = -(-numel // sampling_stride(numel, num_contributions))
    return _SAMPLE_BYTES * num_samples * num_contributions


def cosine_of_two(samples: Sequence[Sample], seen: Round) -> float:
    """Return the cosine of the contributions of a round of two; NaN: of any other.

    Args:
        samples: Of each contribution the same values, buffers aside; empty: nothing is known.
        seen: The round, with their steps and weights.
    """
    lengths = _lengths(samples, seen)
    if not len(samples) == len(lengths) == LEAST_COMPARED:
        return math.nan
    return _product(*(samples[m] / length for m, length in lengths.items()))


def _lengths(samples: Sequence[Sample], seen: Round) -> dict[int, float]:
    """Give the lengths of those of the contributions that have a direction."""
    is_counted = np.array(seen.weights) > 0
    if not samples or not is_counted.any() or len(samples[0]) < _LEAST_SAMPLED:
        return {}
    enough = _LEAST_STEPS * np.median(seen.steps[is_counted])
    return {
        m: length
        for m in np.flatnonzero(is_counted & (seen.steps >= enough)).tolist()
        if 0 < (length := math.sqrt(_product(samples[m], samples[m]))) <= _MOST_FLOAT32
    }


def misdirected(samples: Sequence[Sample], seen: Round) -> dict[int, str]:
    """Say which contributions do not go where the others go together, and why.

    Args: see `cosine_of_two`.
    """
    lengths = _lengths(samples, seen)
    if (num := len(lengths)) < _LEAST_DIRECTED:
        return {}
    total = np.zeros(len(samples[0]))
    for m, length in lengths.items():
        total += samples[m] / length
    found = {}
    for m, length in lengths.items():
        to_all = _product(samples[m] / length, total)
        to_others = (to_all - 1.0) / (num - 1)
        # Cosines of all pairs, without those of this one and of each with itself.
        pairs = _product(total, total) - 2.0 * to_all + 1.0 - (num - 1)
        agreement = pairs / ((num - 1) * (num - 2))
        least = _LEAST_OF_AGREEMENT * agreement
        if agreement > _AGREEMENT and to_others < least:
            found[m] = (
                f"its mean cosine to the other contributions is {to_others:.3f}, theirs to each "
                f"other is {agreement:.3f}: {least:.3f} at least is merged"
            )
    return found


def _product(a: Sample | Floats, b: Sample | Floats) -> float:
    """Multiply in float64, in this thread alone: threads of BLAS cost a hundred times as much."""
    return float(np.einsum("i,i->", a, b, dtype=np.float64))


def is_unsettled(history: History) -> bool:
    """Whether too few rounds are known to go by them alone: sizes of the parameters count too."""
    return len(history) < _SETTLED


def _others(values: Floats, is_counted: npt.NDArray[np.bool_]) -> Floats:
    """Give each row the upper median of the other counted rows; zero where there is none."""
    counted = np.sort(values[is_counted], axis=0)
    num = len(counted)
    if num == 0:
        return np.zeros_like(values)
    of_all = np.broadcast_to(counted[num // 2], values.shape)
    if num == 1:
        return np.where(is_counted[:, None, None], 0.0, of_all)
    at = (num - 1) // 2  # of the others, which follow one later where the row itself is below
    of_others = np.where(values <= counted[at], counted[at + 1], counted[at])
    return np.where(is_counted[:, None, None], of_others, of_all)


def _longer(steps: Floats, usual: Floats | np.floating[Any]) -> Floats:
    """Allow what took more inner steps than usual as many times the size."""
    return np.maximum(1.0, steps / np.maximum(usual, 1.0))[:, None, None]


def _at_least_typical(sizes: Floats, scale: Floats, is_judged: npt.NDArray[np.bool_]) -> Floats:
    """Raise what is smaller, by value, than in the median unit to that."""
    if not is_judged.any():
        return sizes
    typical = np.median((sizes / scale)[:, :, is_judged], axis=2, keepdims=True)
    return np.maximum(sizes, typical * scale)
