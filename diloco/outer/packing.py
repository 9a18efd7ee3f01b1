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

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


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
    pieces = _whole(rest)
    if pattern == "balanced" and num_rest > 0:
        share = sum(map(math.prod, rest.values())) / num_rest
        pieces = [piece for name, shape in rest.items() for piece in _cut(name, shape, share)]
    if not (1 <= num_rest <= len(pieces) or num_rest == len(rest) == 0):
        what = "pieces of tensors, cut along dim 0," if pattern == "balanced" else "tensors"
        beside = " beside the embedding, a fragment of its own" if alone else ""
        raise ConfigError(
            f"outer.num_fragments = {num_fragments} is outside [{1 + bool(alone)}, "
            f"{len(pieces) + bool(alone)}]: there are {len(pieces)} {what} to share out{beside}"
        )
    if not rest:
        groups = []
    elif pattern == "balanced":
        groups = _balanced(pieces, num_rest)
    elif pattern in ("strided", "sequential"):
        groups = _by_layer(rest, num_rest, pattern)
    else:
        raise ConfigError(
            f"outer.fragment_pattern = {pattern!r} is unknown: "
            "choose strided, sequential, balanced or explicit"
        )
    return [*groups, _whole({name: shapes[name] for name in alone})] if alone else groups


def _is_embedding(name: str) -> bool:
    return _LAYER.search(name) is None and "embed" in name


def _whole(shapes: Shapes) -> list[Range]:
    return [(name, 0, math.prod(shape)) for name, shape in shapes.items()]


def _cut(name: str, shape: tuple[int, ...], share: float) -> list[Range]:
    """Cut a tensor larger than `share` between rows, as equally as rows allow.

    Into ceil(numel / share) pieces, or into its rows where these are fewer.
    """
    numel, num_rows = math.prod(shape), shape[0] if shape else 1
    count = min(num_rows, math.ceil(numel / share))
    row = numel // num_rows
    borders = [piece * num_rows // count * row for piece in range(count + 1)]
    return [(name, start, end) for start, end in itertools.pairwise(borders)]


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Sort ranges and make one of those that follow one another in a tensor."""
    runs: list[Range] = []
    for name, start, end in sorted(ranges):
        if runs and runs[-1][0] == name and runs[-1][2] == start:
            start = runs.pop()[1]
        runs.append((name, start, end))
    return runs


def _balanced(pieces: Sequence[Range], num_fragments: int) -> list[list[Range]]:
    """Give each piece, largest first, to the lightest group (the first of equals).

    Source: Graham 1969, longest processing time first: at most 4/3 - 1/(3P) of the optimum.
    """
    groups: list[list[Range]] = [[] for _ in range(num_fragments)]
    loads = [0] * num_fragments
    for name, start, end in sorted(pieces, key=lambda piece: (piece[1] - piece[2], piece)):
        lightest = loads.index(min(loads))
        groups[lightest].append((name, start, end))
        loads[lightest] += end - start
    return groups


def _by_layer(shapes: Shapes, num_fragments: int, pattern: str) -> list[list[Range]]:
    layers: dict[float, list[Range]] = {}
    for whole in _whole(shapes):
        match = _LAYER.search(whole[0])
        outside = -1 if _is_embedding(whole[0]) else math.inf
        layers.setdefault(int(match[1]) if match else outside, []).append(whole)
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
