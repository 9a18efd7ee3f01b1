"""Packing: which tensors, or which ranges of one, make a fragment.

Owns the patterns of `outer.fragment_pattern`; where things lie in a fragment's vector is the
layout's business (`diloco.outer.fragments`). Imports no torch.

Source: Streaming DiLoCo (arXiv 2501.18512), strided and sequential fragments; Decoupled DiLoCo
(arXiv 2604.21428), balanced by tensor.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from diloco.errors import ConfigError

#: Elements [start, end) of the flattened tensor called name.
Range: TypeAlias = tuple[str, int, int]
#: Name -> shape, in sorted order of names.
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
#: A tensor that is cut between any rows: elements of a row, name, number of rows.
_Divisible: TypeAlias = tuple[int, str, int]

#: The list of a decoder's layers, and what transformers calls it where there is none of that name.
_LAYERS = (re.compile(r"(?:^|\.)layers\.(\d+)\."), re.compile(r"(?:^|\.)(?:h|blocks)\.(\d+)\."))
#: Names of tables of tokens and positions; GPT-2 has the short ones.
_EMBEDDING = re.compile(r"embed|(?:^|\.)w[tp]e\.")


def by_pattern(
    shapes: Shapes, num_fragments: int, pattern: str, embedding_alone: bool
) -> list[list[Range]]:
    """Share the tensors out; with `embedding_alone` the embedding is the last group, uncut.

    Raises:
        ConfigError: If a fragment would be empty, or the pattern is unknown.
    """
    alone = [name for name in shapes if embedding_alone and _is_embedding(name)]
    rest = {name: shape for name, shape in shapes.items() if name not in alone}
    if embedding_alone and not alone:
        raise ConfigError(
            "outer.embedding_alone = true, but no parameter outside the layers has 'embed' in its "
            "name: use outer.fragment_pattern = 'explicit'"
        )
    num_rest = num_fragments - bool(alone)
    pieces, divisible = _whole(rest), list[_Divisible]()
    if pattern == "balanced" and num_rest > 0:
        pieces, divisible = _divided(rest, num_rest)
    num_pieces = len(pieces) + sum(num_rows for _, _, num_rows in divisible)
    if not (1 <= num_rest <= num_pieces or num_rest == len(rest) == 0):
        what = "pieces of tensors, cut along dim 0," if pattern == "balanced" else "tensors"
        besides = " besides the embedding, a fragment of its own" if alone else ""
        raise ConfigError(
            f"outer.num_fragments = {num_fragments} is outside [{1 + bool(alone)}, "
            f"{num_pieces + bool(alone)}]: there are {num_pieces} {what} to share out{besides}"
        )
    if not rest:
        groups = []
    elif pattern == "balanced":
        groups = _balanced(pieces, divisible, num_rest)
    elif pattern in ("strided", "sequential"):
        groups = _by_layer(rest, num_rest, pattern)
    else:
        raise ConfigError(
            f"outer.fragment_pattern = {pattern!r} is unknown: "
            "choose strided, sequential, balanced or explicit"
        )
    return [*groups, _whole({name: shapes[name] for name in alone})] if alone else groups


def _is_embedding(name: str) -> bool:
    return layer_of(name) is None and _EMBEDDING.search(name) is not None


def layer_of(name: str) -> int | None:
    """Return the index of the layer that a tensor is of, by its name; None: it is of none."""
    for pattern in _LAYERS:
        if match := pattern.search(name):
            return int(match[1])
    return None


def _whole(shapes: Shapes) -> list[Range]:
    return [(name, 0, math.prod(shape)) for name, shape in shapes.items()]


def _divided(shapes: Shapes, num_fragments: int) -> tuple[list[Range], list[_Divisible]]:
    """Return what is dealt piece by piece, and the tensors that are divided between any rows.

    A tensor is cut if it is larger than a fragment's equal share, total / P: into its rows where
    these are over a third of the share, at will where they are not.
    """
    total = sum(map(math.prod, shapes.values()))
    pieces: list[Range] = []
    divisible: list[_Divisible] = []
    for name, shape in shapes.items():
        numel, num_rows = math.prod(shape), shape[0] if shape else 1
        row = numel // num_rows
        if numel * num_fragments <= total:
            pieces.append((name, 0, numel))
        elif 3 * row * num_fragments > total:
            pieces += [(name, start, start + row) for start in range(0, numel, row)]
        else:
            divisible.append((row, name, num_rows))
    return pieces, divisible


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Sort ranges and make one of those that follow one another in a tensor."""
    runs: list[Range] = []
    for name, start, end in sorted(ranges):
        if runs and runs[-1][0] == name and runs[-1][2] == start:
            start = runs.pop()[1]
        runs.append((name, start, end))
    return runs


def _balanced(
    pieces: Sequence[Range], divisible: Sequence[_Divisible], num_fragments: int
) -> list[list[Range]]:
    """Give each piece, largest first, to the lightest group (of equals the first), then the rest.

    At most 4/3 of the optimum over all cuts of the large tensors between rows: pieces alone are at
    most 4/3 - 1/(3P) of theirs, and the rest is divided within a row, at most a third of the share.

    Source: Graham 1969, longest processing time first.
    """
    groups: list[list[Range]] = [[] for _ in range(num_fragments)]
    loads = [0] * num_fragments
    for name, start, end in sorted(pieces, key=lambda piece: (piece[1] - piece[2], piece)):
        lightest = loads.index(min(loads))
        groups[lightest].append((name, start, end))
        loads[lightest] += end - start
    rest = sum(row * num_rows for row, _, num_rows in divisible)
    for row, name, num_rows in sorted(divisible, key=lambda each: (-each[0], each[1])):
        taken: Counter[int] = Counter()  # rows by group, in the order of their ranges
        left = num_rows
        while left:
            lightest = loads.index(min(loads))
            room = _level(loads, rest) - loads[lightest]
            count = min(left, -(-room // row))  # over the level: the group takes no more
            taken[lightest] += count
            loads[lightest] += count * row
            rest -= count * row
            left -= count
        start = 0
        for group, count in taken.items():
            groups[group].append((name, start, start + count * row))
            start += count * row
    return groups


def _level(loads: Sequence[int], rest: int) -> int:
    """Level to which `rest` fills the groups up, rounded up; those above it take none."""
    filled = sum(loads)
    for count, highest in zip(range(len(loads), 0, -1), sorted(loads, reverse=True), strict=True):
        if rest + filled >= count * highest:
            break
        filled -= highest
    return -(-(rest + filled) // count)


def _by_layer(shapes: Shapes, num_fragments: int, pattern: str) -> list[list[Range]]:
    layers: dict[float, list[Range]] = {}
    for whole in _whole(shapes):
        layer = layer_of(whole[0])
        outside = -1 if _is_embedding(whole[0]) else math.inf
        layers.setdefault(outside if layer is None else layer, []).append(whole)
    if num_fragments > len(layers):
        raise ConfigError(
            f"outer.num_fragments = {num_fragments} with outer.fragment_pattern = {pattern!r} "
            f"would leave fragments empty: there are {len(layers)} layers (embedding and head "
            "count as one each); use fewer fragments or outer.fragment_pattern = 'balanced'"
        )
    first = -1 if -1 in layers else 0
    groups: list[list[Range]] = [[] for _ in range(num_fragments)]
    for position, index in enumerate(sorted(layers)):
        if pattern == "strided":
            group = (position + first) % num_fragments
        else:
            # The run p is [floor(p U / P), floor((p + 1) U / P)) of U layers.
            group = ((position + 1) * num_fragments - 1) // len(layers)
        groups[group] += layers[index]
    return groups


def with_neighbours(groups: Sequence[list[Range]], buffers: Mapping[str, int]) -> None:
    """Put every buffer into the group of the tensor that is its neighbour by name, in place.

    Args:
        groups: Ranges of all tensors.
        buffers: Name -> number of elements.
    """
    pieces = sorted((name, start, p) for p, group in enumerate(groups) for name, start, _ in group)
    found: list[tuple[int, Range]] = []
    for name, numel in buffers.items():
        # The first of the best, in order of names and then of pieces.
        nearest = max(pieces, key=lambda piece: _num_common_parts(piece[0], name))
        found.append((nearest[2], (name, 0, numel)))
    for p, whole in found:
        groups[p].append(whole)


def _num_common_parts(a: str, b: str) -> int:
    pairs = zip(a.split("."), b.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def as_listed(
    shapes: Shapes, num_fragments: int, explicit: Sequence[Sequence[str]]
) -> list[list[Range]]:
    """Share the tensors out as `explicit` lists their names.

    Raises:
        ConfigError: If a tensor is not listed exactly once, or a list is empty.
    """
    if len(explicit) != num_fragments:
        raise ConfigError(
            f"outer.num_fragments = {num_fragments}, but outer.explicit_fragments lists "
            f"{len(explicit)} fragments: the two must agree"
        )
    empty = [p for p, names in enumerate(explicit) if not names]
    if empty:
        raise ConfigError(f"outer.explicit_fragments: the fragments {empty} are empty: remove them")
    listed = Counter(name for names in explicit for name in names)
    known = set(shapes)
    for problem, names in (
        ("names no trainable parameters of the model", sorted(set(listed) - known)),
        ("misses the parameters", sorted(known - set(listed))),
        ("lists more than once", sorted(name for name, count in listed.items() if count > 1)),
    ):
        if names:
            raise ConfigError(
                f"outer.explicit_fragments {problem}: {names}; every trainable parameter must be "
                "listed exactly once"
            )
    return [_whole({name: shapes[name] for name in names}) for names in explicit]
