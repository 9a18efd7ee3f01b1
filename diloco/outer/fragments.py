"""Cuts a model into fragments, and lays each fragment out as one flat vector.

    model       all trained parameters, and buffers that islands average
    fragment    parameters (or ranges of them) that are synchronised together, as one flat vector
    lane        a range of that vector, sent as one stream
    block       128 values, which share one quantisation scale

A fragment's vector holds its parameters in sorted order of their names, unsharded and row-major.
Each parameter starts at a block border, and zeros fill the gaps. The vector is cut at block borders
into lanes. This layout, the plan, is the same for every island, however an island distributes its
parameters over ranks.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import blake3

from diloco.bounded_text import read_peer_json
from diloco.errors import ConfigError, PlanMismatch
from diloco.outer.packing import Range, as_listed, by_pattern, joined, with_neighbours

BLOCK_NUMEL = 128
DEFAULT_NUM_LANES = 16
#: A lane carries at least this many bytes of float32, or the fragment has one lane only.
MIN_LANE_BYTES = 65536

FragmentPattern: TypeAlias = Literal["strided", "sequential", "balanced", "explicit"]
_FORMAT = 1
_MOST_DIFFERENCES = 10


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One float32 tensor of the plan: its canonical (untied) name and its unsharded shape.

    A trained parameter, or a buffer that islands average (`is_buffer`): that one travels in
    float32 and takes the plain mean, without outer learning rate and momentum.
    """

    name: str
    shape: tuple[int, ...]
    is_buffer: bool = False

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Entry:
    """Place of a parameter, or of a synchronised buffer, in a fragment's vector.

    Elements [start, end) of the flattened row-major tensor lie at [offset, offset + end - start);
    offset is a multiple of the plan's `block_numel`.
    """

    name: str
    start: int
    end: int
    offset: int
    is_buffer: bool = False


@dataclass(frozen=True, slots=True)
class Lane:
    """Block-aligned range [start, end) of a fragment's vector, in elements."""

    lane_id: int
    start: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements, padding included."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Fragment:
    """Parameters synchronised together, as one flat vector of `padded_numel` float32 values."""

    fragment_id: int
    entries: tuple[Entry, ...]
    padded_numel: int
    lanes: tuple[Lane, ...]

    @property
    def numel(self) -> int:
        """Number of elements of parameters and buffers, padding not counted."""
        return sum(entry.end - entry.start for entry in self.entries)

    @property
    def ends(self) -> tuple[int, ...]:
        """Where the place of each entry ends, padding included."""
        return (*(entry.offset for entry in self.entries[1:]), self.padded_numel)


@dataclass(frozen=True, slots=True)
class Plan:
    """The canonical layout that all islands and the syncer of a run share."""

    tensors: tuple[TensorSpec, ...]
    fragments: tuple[Fragment, ...]
    block_numel: int
    num_lanes: int

    def to_json(self) -> str:
        """Write the manifest: sorted keys, no spaces, so that equal plans are equal bytes."""
        content = {
            "format": _FORMAT,
            "block_numel": self.block_numel,
            "num_lanes": self.num_lanes,
            "tensors": [_spec_content(spec) for spec in self.tensors],
            "fragments": [
                {
                    "fragment_id": fragment.fragment_id,
                    "entries": [[e.name, e.start, e.end, e.offset] for e in fragment.entries],
                    "padded_numel": fragment.padded_numel,
                    "lanes": [[lane.start, lane.end] for lane in fragment.lanes],
                }
                for fragment in self.fragments
            ],
        }
        return _canonical(content)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a manifest from an untrusted peer and check all of it.

        Raises:
            PlanMismatch: If it is malformed, if an element is missing or covered twice, or if
                offsets, padding or lanes are not those of the canonical layout.
        """
        try:
            content = read_peer_json(text)
            plan = _read_plan(content)
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as e:
            raise PlanMismatch(f"plan manifest is malformed: {type(e).__name__}: {e}") from e
        _check_coverage(plan)
        expected = json.loads(plan.to_json())
        for fragment, wanted in zip(content["fragments"], expected["fragments"], strict=True):
            if _canonical(fragment) != _canonical(wanted):
                raise PlanMismatch(
                    f"plan manifest: fragment {_canonical(fragment)} is not laid out as "
                    f"{_canonical(wanted)}"
                )
        if _canonical(content) != plan.to_json():
            raise PlanMismatch(
                f"plan manifest has the keys {sorted(content)} and format "
                f"{content.get('format')!r}, this version reads {sorted(expected)} and {_FORMAT}: "
                "run the same version of diloco everywhere"
            )
        return plan

    def fingerprint(self) -> str:
        """Return the blake3 digest of the manifest, in hex."""
        return blake3.blake3(self.to_json().encode()).hexdigest()


def tensor_difference(here: Plan, there: Plan) -> str:
    """Describe the first tensor, by sorted name, in which two plans differ; empty if none does."""
    ours = {spec.name: list(spec.shape) for spec in here.tensors}
    theirs = {spec.name: list(spec.shape) for spec in there.tensors}
    for name in sorted({*ours, *theirs}):
        if (a := ours.get(name)) != (b := theirs.get(name)):
            return f"{name}: {a or 'absent'} here, {b or 'absent'} there"
    return ""


def plan_difference(ours: str, theirs: str) -> list[str]:
    """Describe the first ten places where two plan manifests differ, with both values.

    Args:
        ours: Result of `Plan.to_json`; its values are written first, as those "here".
        theirs: What the other side says that it is, "there".

    Raises:
        ValueError: If theirs is no JSON that a peer may send.
    """
    differing: list[str] = []

    def walk(path: str, a: object, b: object) -> None:
        if a == b or len(differing) == _MOST_DIFFERENCES:
            return
        if isinstance(a, dict) and isinstance(b, dict):
            for key in sorted({*a, *b}):
                walk(f"{path}.{key}".lstrip("."), a.get(key), b.get(key))
        elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            for index, (left, right) in enumerate(zip(a, b, strict=True)):
                walk(f"{path}[{index}]", left, right)
        else:
            differing.append(f"{path}: {_short(a)} here, {_short(b)} there")

    walk("", json.loads(ours), read_peer_json(theirs))
    return differing


def _spec_content(spec: TensorSpec) -> dict[str, object]:
    # Plans without buffers are the bytes that they were before there were any.
    of_buffer = {"buffer": True} if spec.is_buffer else {}
    return {"name": spec.name, "shape": spec.shape, **of_buffer}


def _short(value: object) -> str:
    text = f"{len(value)} entries" if isinstance(value, list) else json.dumps(value)
    return text if len(text) < 80 else text[:77] + "..."


def make_plan(
    tensors: Iterable[TensorSpec],
    *,
    num_fragments: int,
    pattern: FragmentPattern = "balanced",
    embedding_alone: bool = False,
    explicit: Sequence[Sequence[str]] = (),
    num_lanes: int = DEFAULT_NUM_LANES,
    block_numel: int = BLOCK_NUMEL,
) -> Plan:
    """Cut a model into fragments and lanes.

    A fragment of B blocks and n padded values has max(1, min(num_lanes, B, floor(4 n / 65536)))
    lanes; lane l holds the blocks [floor(l B / L), floor((l + 1) B / L)).

    Args:
        tensors: Every trainable parameter and synchronised buffer once, in any order. A buffer is
            not dealt by the pattern: it goes with the parameter whose name has most leading parts
            in common with its own (the first such in sorted order, and the first piece of that).
        num_fragments: P, from 1 to the number of parameters (balanced: of what they are cut into).
        pattern: How tensors are shared out. The layers of strided and sequential are those that
            `layers.N.` in the names tells (or `h.N.`, `blocks.N.`), in ascending order; tensors
            outside of them count as one more layer before the first (names with "embed", wte, wpe)
            and one after the last (others: norm, head).
            strided: layer i goes to fragment i mod P (the layer of the embedding is i = -1).
            sequential: layers are cut into P runs of equal length, give or take one.
            balanced: tensors by descending size (then name), each to the lightest fragment. Those
            that are larger than the share of a fragment, the P-th part of all elements, are cut
            between indices of their dim 0 and fill the fragments up to the same level.
            explicit: as listed in `explicit`.
        embedding_alone: The tensors outside the layers with "embed" in their name are the last
            fragment, counted in P; the pattern fills the other P - 1.
        explicit: Names by fragment; each tensor exactly once. Only with pattern "explicit".
        num_lanes: Largest number of lanes of a fragment.
        block_numel: Values that share one quantisation scale.

    Raises:
        ConfigError: If the tensors or the options cannot give a plan without empty fragments.
    """
    specs = tuple(sorted(tensors, key=lambda spec: spec.name))
    _check_arguments(specs, num_fragments, num_lanes, block_numel)
    shapes = {spec.name: spec.shape for spec in specs if not spec.is_buffer}
    if pattern == "explicit":
        if embedding_alone:
            raise ConfigError(
                "outer.embedding_alone = true has no meaning with explicit fragments: "
                "give the embedding a list of its own instead"
            )
        groups = as_listed(shapes, num_fragments, explicit)
    elif explicit:
        raise ConfigError(
            f"outer.explicit_fragments lists {len(explicit)} fragments, but "
            f"outer.fragment_pattern = {pattern!r} ignores them: "
            "set outer.fragment_pattern = 'explicit' or remove the lists"
        )
    else:
        groups = by_pattern(shapes, num_fragments, pattern, embedding_alone)
    buffers = {spec.name: spec.numel for spec in specs if spec.is_buffer}
    with_neighbours(groups, buffers)
    fragments = tuple(
        _lay_out(p, joined(group), buffers, block_numel, num_lanes)
        for p, group in enumerate(groups)
    )
    return Plan(specs, fragments, block_numel, num_lanes)


def _check_arguments(
    specs: Sequence[TensorSpec], num_fragments: int, num_lanes: int, block_numel: int
) -> None:
    duplicates = [name for name, count in Counter(s.name for s in specs).items() if count > 1]
    if duplicates:
        raise ConfigError(f"model has several parameters called {duplicates}: names must differ")
    for spec in specs:
        if min(spec.shape, default=1) < 1:
            raise ConfigError(
                f"parameter {spec.name!r} of shape {spec.shape} has no elements: "
                "remove it or freeze it (requires_grad=False)"
            )
    if all(spec.is_buffer for spec in specs):
        raise ConfigError("model has no trainable parameter (requires_grad=True): nothing to train")
    if num_fragments < 1:
        raise ConfigError(f"outer.num_fragments = {num_fragments} must be at least 1")
    for path, value in (("outer.num_lanes", num_lanes), ("block_numel", block_numel)):
        if value < 1:
            raise ConfigError(f"{path} = {value} must be at least 1")


def _lay_out(
    fragment_id: int,
    ranges: Iterable[Range],
    buffers: Container[str],
    block_numel: int,
    num_lanes: int,
) -> Fragment:
    """Place `ranges`, each from a block border on, and cut the vector into lanes."""
    entries = []
    offset = 0
    for name, start, end in ranges:
        entries.append(Entry(name, start, end, offset, name in buffers))
        offset += -(-(end - start) // block_numel) * block_numel
    num_blocks = offset // block_numel
    count = max(1, min(num_lanes, num_blocks, 4 * offset // MIN_LANE_BYTES))
    borders = [lane * num_blocks // count * block_numel for lane in range(count + 1)]
    lanes = tuple(Lane(i, borders[i], borders[i + 1]) for i in range(count))
    return Fragment(fragment_id, tuple(entries), offset, lanes)


def buffer_runs(fragment: Fragment, lane_id: int) -> tuple[tuple[slice, bool], ...]:
    """Cut a lane into runs of buffers and of parameters, padding with what it follows.

    Returns:
        Place in the lane and whether it holds buffers, in order; of a fragment without any, the
        whole lane.
    """
    lane = fragment.lanes[lane_id]
    runs: list[tuple[slice, bool]] = []
    for entry, end in zip(fragment.entries, fragment.ends, strict=True):
        first, last = max(entry.offset, lane.start), min(end, lane.end)
        if first >= last:
            continue
        start = first - lane.start
        if runs and runs[-1][1] == entry.is_buffer:
            start = runs.pop()[0].start
        runs.append((slice(start, last - lane.start), entry.is_buffer))
    return tuple(runs)


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _read_plan(content: Any) -> Plan:
    """Rebuild the plan that parsed JSON of unknown shape (hence Any) lists the ranges of."""
    block_numel, num_lanes = _integers((content["block_numel"], content["num_lanes"]), 1)
    specs = tuple(
        TensorSpec(_string(item["name"]), _integers(item["shape"], 1), "buffer" in item)
        for item in content["tensors"]
    )
    names = [spec.name for spec in specs]
    buffers = {spec.name for spec in specs if spec.is_buffer}
    if names != sorted(set(names)):
        raise ValueError("the names of its tensors are not sorted and distinct")
    fragments = []
    for fragment_id, item in enumerate(content["fragments"]):
        ranges: list[Range] = []
        for name, first, last, _ in item["entries"]:
            start, end = _integers((first, last), 0)
            ranges.append((_string(name), start, end))
        if not ranges or ranges != sorted(ranges):
            raise ValueError(f"the entries of fragment {fragment_id} are empty or not sorted")
        # One lane more than listed is enough to see a difference; a hostile count builds no list.
        limit = min(num_lanes, len(item["lanes"]) + 1)
        fragments.append(_lay_out(fragment_id, ranges, buffers, block_numel, limit))
    return Plan(specs, tuple(fragments), block_numel, num_lanes)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a name")
    return value


def _integers(values: Sequence[Any], least: int) -> tuple[int, ...]:
    if any(type(value) is not int or value < least for value in values):
        raise ValueError(f"{list(values)} must be integers of at least {least}")
    return tuple(values)


def _check_coverage(plan: Plan) -> None:
    """Refuse unless the entries of each tensor, in order, run from 0 to its last element."""
    covered = {spec.name: 0 for spec in plan.tensors}
    entries = [entry for fragment in plan.fragments for entry in fragment.entries]
    for entry in sorted(entries, key=lambda entry: (entry.name, entry.start)):
        if entry.name not in covered:
            raise PlanMismatch(f"plan manifest: an entry names the unknown tensor {entry.name!r}")
        if entry.start != covered[entry.name] or entry.end <= entry.start:
            raise PlanMismatch(
                f"plan manifest: [{entry.start}, {entry.end}) of {entry.name!r} does not follow "
                f"element {covered[entry.name]}: elements are missing or covered twice"
            )
        covered[entry.name] = entry.end
    for spec in plan.tensors:
        if covered[spec.name] != spec.numel:
            raise PlanMismatch(
                f"plan manifest: the fragments hold {covered[spec.name]} elements of "
                f"{spec.name!r}, which has {spec.numel}"
            )
