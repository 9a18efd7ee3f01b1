"""How contributions are combined: coefficients of a linear combination, out of inner products.

Every merge rule gives merged = sum_m c_m v_m, with one coefficient c_m a contribution and *unit*
(`diloco.outer.units`: a tensor, a piece of one, an expert). What the coefficients depend on, norms
and angles, is in the matrices of inner products G[m, n] = <v_m, v_n> of the units; those are
computed elsewhere, in float64, and their last bits are the hardware's. Coefficients are therefore
rounded to float32 and kept with the version that they made: anyone who recomputes it reads them.

Another package may add a rule, by an entry point of the group `diloco.merge_rules` that names a
`Coefficients`.

Pure: lists of floats in the order of sorted island ids, no tensors.
"""

from __future__ import annotations

import math
import statistics
import struct
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Literal, TypeAlias, cast

from diloco.errors import AggregationError
from diloco.extensions import extension, load
from diloco.outer.units import Unit

#: Inner products of the contributions in one unit.
Gram: TypeAlias = Sequence[Sequence[float]]

#: Of a unit's inner products and the weights, finite and >= 0: a coefficient for each contribution.
Coefficients: TypeAlias = Callable[[Gram, Sequence[float]], Sequence[float]]

#: Fewer do not tell which of them is the odd one.
MIN_JUDGED = 3
#: Next to the largest norm of its unit a smaller one is zero: its direction would be amplified
#: beyond what a float32 coefficient holds.
_LEAST_NORM = 2.0**-60
#: Directions whose weighted mean is shorter cancel, and are not brought to full length: float64
#: inner products of any hardware, some 1e-13 apart, give the same coefficients within 1e-6 then.
_LEAST_MEAN_DIRECTION = 2.0**-10


@dataclass(frozen=True, slots=True)
class MergeRule:
    """How the contributions of a round are weighted and combined.

    Attributes:
        name: mean, radial_directional (see `coefficients_of`), or the name of an added rule.
        weighting: tokens, or tokens_times_rate (tokens * tokens / steps).
        clip_norm_ratio: A contribution with a norm beyond this times the median is scaled down to
            it; 0: none is.
        plain_mean: Patterns (* and ?) of the tensors that take the plain mean whatever the rule.
        experts: Patterns of tensors of three or more dims that hold one expert an index of dim 0.
        guard: Whether contributions that are not of this training are left out (`outer.guard`).

    Source: Decoupled DiLoCo (arXiv 2604.21428): weights, radial-directional averaging.
    """

    name: str = "mean"
    weighting: Literal["tokens", "tokens_times_rate"] = "tokens"
    clip_norm_ratio: float = 0.0
    plain_mean: tuple[str, ...] = ("*embed*",)
    experts: tuple[str, ...] = ("*experts*",)
    guard: bool = True

    def is_by_unit(self, *, is_flush: bool) -> bool:
        """Whether coefficients depend on a unit's inner products; a flush is the plain mean."""
        return self.name != "mean" and not is_flush

    def needs_norms(self, *, is_flush: bool) -> bool:
        """Whether the coefficients of a round depend on values: two passes over contributions."""
        clips = self.clip_norm_ratio > 0 and not is_flush
        return clips or self.is_by_unit(is_flush=is_flush)

    def weight(self, tokens: int, steps: int, *, is_flush: bool) -> float:
        """Return a contribution's weight: its tokens, times tokens a step where the rate counts.

        A flush goes by tokens alone: it averages work, it does not judge it.
        """
        if is_flush or self.weighting == "tokens":
            return float(tokens)
        return tokens * (tokens / max(1, steps))


@dataclass(frozen=True, slots=True)
class Combination:
    """Coefficients by range of a fragment's vector, or of a part of it.

    Attributes:
        ends: Ends of the ranges, ascending; the first begins at 0.
        coefficients: Of each range, one for each contribution.
    """

    ends: tuple[int, ...]
    coefficients: tuple[tuple[float, ...], ...]

    def within(self, start: int, end: int) -> tuple[tuple[slice, tuple[float, ...]], ...]:
        """Return what lies in [start, end): places counted from `start`, and coefficients."""
        starts = (0, *self.ends)
        return tuple(
            (slice(max(first, start) - start, min(last, end) - start), coefficients)
            for first, last, coefficients in zip(starts, self.ends, self.coefficients, strict=False)
            if first < end and last > start
        )

    def distance(self, other: Combination) -> float:
        """Return the largest |c - c'| / max(1, |c'|) of any range and contribution."""
        return max(
            abs(mine - theirs) / max(1.0, abs(theirs))
            for end in {*self.ends, *other.ends}
            for mine, theirs in zip(self._until(end), other._until(end), strict=True)
        )

    def _until(self, end: int) -> tuple[float, ...]:
        """Return the coefficients of what ends there."""
        return self.coefficients[bisect_left(self.ends, end)]

    def to_json(self) -> dict[str, Any]:
        """Write it for a record's header; a coefficient is 8 hex digits, float32, little-endian."""
        return {
            "ends": list(self.ends),
            "coefficients": [struct.pack(f"<{len(c)}f", *c).hex() for c in self.coefficients],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Combination:
        """Read what `to_json` wrote."""
        rows = [bytes.fromhex(row) for row in content["coefficients"]]
        return cls(
            tuple(content["ends"]),
            tuple(struct.unpack(f"<{len(row) // 4}f", row) for row in rows),
        )


def shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Return w_m / sum(w); all zero where the sum is.

    Raises:
        AggregationError: If a weight is negative or not finite.
    """
    for index, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight >= 0):
            raise AggregationError(f"weight {index} is {weight}: must be finite and >= 0")
    # fsum is exact, and the same in every version of Python; sum is not.
    total = math.fsum(weights)
    return tuple(weight / total if total else 0.0 for weight in weights)


def mean_of(weights: Sequence[float], numel: int) -> Combination:
    """Give all of a vector its weighted mean: c_m = w_m / sum(w).

    Raises:
        AggregationError: If a weight is negative or not finite.
    """
    return Combination((numel,), (tuple(map(_float32, shares(weights))),))


def combine(
    grams: Sequence[Gram],
    units: Sequence[Unit],
    weights: Sequence[float],
    rule: MergeRule,
    *,
    is_flush: bool,
) -> Combination:
    """Decide with which coefficients contributions are merged.

    norm_m = |v_m| over the whole fragment, buffers aside. With at least three contributions of a
    weight over 0,

        s_m     min(1, clip_norm_ratio * median(norms) / norm_m)

    where a median of zero clips nobody. Then, unit by unit, the rule's coefficients of s_m v_m
    (`coefficients_of`), times s_m; of buffers the mean of v_m. Nothing is clipped in a flush, and
    its rule is the mean.

    Args:
        grams: Inner products by unit.
        units: Cover the fragment's vector.
        weights: One for each contribution, finite and >= 0.
        rule: What is asked for.
        is_flush: Whether all are contributions to a flush.

    Raises:
        AggregationError: If a weight is negative or not finite, or a coefficient is not finite.
        ConfigError: If there is no such rule.
    """
    shares(weights)  # refuses impossible weights
    judged = [gram for gram, unit in zip(grams, units, strict=True) if not unit.is_buffer]
    norms = [math.sqrt(math.fsum(gram[m][m] for gram in judged)) for m in range(len(weights))]
    scales = [1.0] * len(weights)
    if not is_flush:
        scales = _clips(norms, weights, rule.clip_norm_ratio)
    of_rule = get_rule(rule.name if rule.is_by_unit(is_flush=is_flush) else "mean")
    rows = []
    for gram, unit in zip(grams, units, strict=True):
        scaled = [
            [product * s * t for product, t in zip(products, scales, strict=True)]
            for products, s in zip(gram, scales, strict=True)
        ]
        row = shares(weights) if unit.is_plain else of_rule(scaled, weights)
        if len(row) != len(weights) or not all(map(math.isfinite, row)):
            raise AggregationError(
                f"merge rule {rule.name!r} gave {unit.name or 'a unit'} the coefficients "
                f"{list(row)} for {len(weights)} contributions: each needs one finite number"
            )
        clips = [1.0] * len(weights) if unit.is_buffer else scales
        rows.append(tuple(_float32(c * s) for c, s in zip(row, clips, strict=True)))
    return _joined([unit.end for unit in units], rows)


def coefficients_of(gram: Gram, weights: Sequence[float], *, is_radial: bool) -> list[float]:
    """Return the coefficients of one unit, in float64.

    mean                 c_m = w_m / W                                              W = sum w_m
    radial_directional   merged = R phi(u),   phi(x) = x / |x|, phi(0) = 0
                         R = sum_m w_m |v_m| / W,   u = sum_m (w_m / W) phi(v_m)
                         so, with a_m = w_m / (W |v_m|),   c_m = R a_m / sqrt(a' G a)

    The mean of M orthogonal contributions is shorter than they are by sqrt(M); this one is not. A
    v_m of less than 2^-60 of the longest has no direction. Where the directions cancel, |u| below
    2^-10, merged is R u / 2^-10: it goes to zero with them, and no rounding is made a direction.
    Without weights it is zero.

    Source: Decoupled DiLoCo (arXiv 2604.21428), radial-directional averaging.
    """
    of_all = shares(weights)
    if not is_radial:
        return list(of_all)
    norms = [math.sqrt(gram[m][m]) for m in range(len(weights))]
    least = _LEAST_NORM * max(norms)
    scaled = [w / n if n > least else 0.0 for w, n in zip(of_all, norms, strict=True)]
    squared = math.fsum(
        a * gram[m][n] * b for m, a in enumerate(scaled) for n, b in enumerate(scaled)
    )
    length = math.sqrt(max(squared, _LEAST_MEAN_DIRECTION**2))
    radius = math.fsum(w * n for w, n in zip(of_all, norms, strict=True))
    return [radius * a / length for a in scaled]


_RULES: Mapping[str, Coefficients] = {
    "mean": partial(coefficients_of, is_radial=False),
    "radial_directional": partial(coefficients_of, is_radial=True),
}


def get_rule(name: str) -> Coefficients:
    """Return the merge rule called `name`.

    Raises:
        ConfigError: If there is none of that name, or more than one.
    """
    added = extension("diloco.merge_rules", name, _RULES)
    return _RULES[name] if added is None else cast(Coefficients, load(added))


def _clips(norms: Sequence[float], weights: Sequence[float], ratio: float) -> list[float]:
    most = ratio * _median(norms, weights)
    return [most / norm if 0 < most < norm else 1.0 for norm in norms]


def _median(norms: Sequence[float], weights: Sequence[float]) -> float:
    """Return the median norm of contributions with a weight; 0 of fewer than `MIN_JUDGED`."""
    of_weight = [norm for norm, weight in zip(norms, weights, strict=True) if weight > 0]
    return statistics.median(of_weight) if len(of_weight) >= MIN_JUDGED else 0.0


def _joined(ends: Sequence[int], rows: Sequence[tuple[float, ...]]) -> Combination:
    """Make one range of neighbours with the same coefficients."""
    runs = [list(run) for _, run in groupby(zip(ends, rows, strict=True), key=lambda each: each[1])]
    return Combination(tuple(run[-1][0] for run in runs), tuple(run[0][1] for run in runs))


def _float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
