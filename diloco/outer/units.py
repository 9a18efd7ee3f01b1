"""Units: the parts of a fragment that a merge rule treats each on its own.

A unit is a tensor, the piece of a cut tensor that lies in the fragment, or one expert of a tensor
that holds several. Imports no torch.

Source: Decoupled DiLoCo (arXiv 2604.21428): radial-directional averaging is by tensor, embeddings
take the plain mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco.outer.fragments import Entry, Plan, TensorSpec
from diloco.outer.patterns import matches


@dataclass(frozen=True, slots=True)
class Unit:
    """The part of a fragment's vector from the unit before to `end`.

    Padding belongs to the unit before it. `is_plain`: it takes the plain mean whatever the rule.
    `is_buffer`: that, and it is neither clipped nor judged: no pseudo-gradient is in it. `name` is
    that of its tensor, for people.
    """

    end: int
    is_plain: bool
    is_buffer: bool = False
    name: str = field(default="", compare=False)


def merge_units(
    plan: Plan, fragment_id: int, *, plain_mean: Sequence[str] = (), experts: Sequence[str] = ()
) -> tuple[Unit, ...]:
    """Cut a fragment into units, in the order of its vector.

    Args:
        plan: Of the run.
        fragment_id: Of the fragment.
        plain_mean: Patterns (* and ?) of names of tensors that take the plain mean.
        experts: Patterns of names of tensors in which each index of dim 0 is a unit, where they
            have three or more dims.
    """
    fragment = plan.fragments[fragment_id]
    specs = {spec.name: spec for spec in plan.tensors}
    units: list[Unit] = []
    for entry, end in zip(fragment.entries, fragment.ends, strict=True):
        is_plain = entry.is_buffer or _is_any(entry.name, plain_mean)
        spec = specs[entry.name]
        if not is_plain and len(spec.shape) >= 3 and _is_any(entry.name, experts):
            units += [Unit(border, False, name=entry.name) for border in _rows(entry, spec)]
        units.append(Unit(end, is_plain, entry.is_buffer, entry.name))
    return tuple(units)


def _is_any(name: str, patterns: Sequence[str]) -> bool:
    return any(matches(name, pattern) for pattern in patterns)


def _rows(entry: Entry, spec: TensorSpec) -> range:
    """Return where rows of dim 0 end inside an entry, in the fragment's vector; not its last."""
    row = spec.numel // spec.shape[0]
    first = (entry.start // row + 1) * row
    origin = entry.offset - entry.start
    return range(origin + first, origin + entry.end, row)
