import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.errors import ConfigError, PlanMismatch
from diloco.outer.fragments import (
    BLOCK_NUMEL,
    Entry,
    Fragment,
    Lane,
    Plan,
    TensorSpec,
    make_plan,
)
from diloco.outer.packing import layer_of


def specs(**shapes: tuple[int, ...]) -> list[TensorSpec]:
    return [TensorSpec(name, shape) for name, shape in shapes.items()]


#: Five layers, an embedding before and a norm and a head after them.
MODEL = [
    TensorSpec("tok_embeddings.weight", (256, 64)),
    *(TensorSpec(f"layers.{i}.w", (64, 64)) for i in range(5)),
    *(TensorSpec(f"layers.{i}.norm", (64,)) for i in range(5)),
    TensorSpec("norm.weight", (64,)),
    TensorSpec("output.weight", (256, 64)),
]


def names(plan: Plan) -> list[list[str]]:
    return [[entry.name for entry in fragment.entries] for fragment in plan.fragments]


def layer(index: int) -> list[str]:
    return [f"layers.{index}.norm", f"layers.{index}.w"]


def test_each_tensor_starts_at_a_block_border_in_sorted_name_order() -> None:
    plan = make_plan(specs(b=(128,), a=(3, 5), c=(129,), d=()), num_fragments=1)

    assert plan.fragments == (
        Fragment(
            fragment_id=0,
            entries=(
                Entry("a", 0, 15, 0),
                Entry("b", 0, 128, 128),
                Entry("c", 0, 129, 256),
                Entry("d", 0, 1, 512),
            ),
            padded_numel=640,
            lanes=(Lane(0, 0, 640),),
        ),
    )
    assert plan.fragments[0].numel == 15 + 128 + 129 + 1
    assert [spec.name for spec in plan.tensors] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("num_blocks", "num_lanes", "borders"),
    [
        # A lane of 65,536 bytes is 128 blocks of 512 bytes.
        pytest.param(1, 16, [0, 1], id="one block"),
        pytest.param(255, 16, [0, 255], id="just too small for two"),
        pytest.param(256, 16, [0, 128, 256], id="two"),
        pytest.param(400, 16, [0, 133, 266, 400], id="uneven thirds"),
        pytest.param(1000, 4, [0, 250, 500, 750, 1000], id="limited by num_lanes"),
        pytest.param(1001, 4, [0, 250, 500, 750, 1001], id="limited, uneven"),
        pytest.param(1000, 1, [0, 1000], id="one lane"),
    ],
)
def test_lanes_cut_a_fragment_at_block_borders(
    num_blocks: int, num_lanes: int, borders: list[int]
) -> None:
    plan = make_plan(specs(a=(num_blocks * 128,)), num_fragments=1, num_lanes=num_lanes)

    lanes = plan.fragments[0].lanes

    assert [lane.lane_id for lane in lanes] == list(range(len(borders) - 1))
    assert [lane.start for lane in lanes] == [128 * border for border in borders[:-1]]
    assert [lane.end for lane in lanes] == [128 * border for border in borders[1:]]


def test_lanes_never_outnumber_blocks() -> None:
    plan = make_plan(specs(a=(40_000,)), num_fragments=1, block_numel=20_000)

    assert [lane.numel for lane in plan.fragments[0].lanes] == [20_000, 20_000]


@pytest.mark.parametrize(
    ("num_fragments", "expected"),
    [
        pytest.param(
            2,
            [
                [*layer(0), *layer(2), *layer(4)],
                [*layer(1), *layer(3), "norm.weight", "output.weight", "tok_embeddings.weight"],
            ],
            id="two",
        ),
        pytest.param(
            7,
            [
                *(layer(i) for i in range(5)),
                ["norm.weight", "output.weight"],
                ["tok_embeddings.weight"],
            ],
            id="one a layer",
        ),
    ],
)
def test_strided_takes_every_pth_layer(num_fragments: int, expected: list[list[str]]) -> None:
    assert names(make_plan(MODEL, num_fragments=num_fragments, pattern="strided")) == expected


@pytest.mark.parametrize(
    ("num_fragments", "expected"),
    [
        pytest.param(
            3,
            [
                [*layer(0), "tok_embeddings.weight"],
                [*layer(1), *layer(2)],
                [*layer(3), *layer(4), "norm.weight", "output.weight"],
            ],
            id="three",
        ),
        pytest.param(
            7,
            [
                ["tok_embeddings.weight"],
                *(layer(i) for i in range(5)),
                ["norm.weight", "output.weight"],
            ],
            id="one a layer",
        ),
    ],
)
def test_sequential_takes_runs_of_layers(num_fragments: int, expected: list[list[str]]) -> None:
    assert names(make_plan(MODEL, num_fragments=num_fragments, pattern="sequential")) == expected


def test_layers_are_ordered_by_number_not_by_name() -> None:
    model = [TensorSpec(f"layers.{i}.w", (128,)) for i in (10, 9, 2)]

    assert names(make_plan(model, num_fragments=3, pattern="sequential")) == [
        ["layers.2.w"],
        ["layers.9.w"],
        ["layers.10.w"],
    ]


def test_balanced_gives_the_largest_tensor_left_to_the_lightest_fragment() -> None:
    model = specs(a=(30,), b=(70,), c=(60,), d=(50,), e=(30,))

    # b 70 | c 60; d 50 to c: 110; a 30 to b: 100 (a before e by name); e 30 to b: 130.
    assert names(make_plan(model, num_fragments=2)) == [["a", "b", "e"], ["c", "d"]]


@pytest.mark.parametrize("pattern", ["strided", "sequential", "balanced"])
def test_the_embedding_alone_is_the_last_fragment(pattern: str) -> None:
    plan = make_plan(
        MODEL,
        num_fragments=3,
        pattern=pattern,  # type: ignore[arg-type]
        embedding_alone=True,
    )

    assert len(plan.fragments) == 3
    assert names(plan)[2] == ["tok_embeddings.weight"]


def test_strided_without_its_embedding_still_takes_every_pth_layer() -> None:
    plan = make_plan(MODEL, num_fragments=7, pattern="strided", embedding_alone=True)

    assert names(plan) == [
        *(layer(i) for i in range(5)),
        ["norm.weight", "output.weight"],
        ["tok_embeddings.weight"],
    ]


def test_a_model_of_an_embedding_alone_is_one_fragment() -> None:
    plan = make_plan(specs(embed=(4, 4)), num_fragments=1, embedding_alone=True)

    assert names(plan) == [["embed"]]


def test_explicit_fragments_are_taken_as_listed() -> None:
    plan = make_plan(
        specs(a=(1,), b=(1,), c=(1,)),
        num_fragments=2,
        pattern="explicit",
        explicit=[["c"], ["b", "a"]],
    )

    assert names(plan) == [["c"], ["a", "b"]]


AB = specs(a=(1,), b=(1,))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        pytest.param(AB, {"num_fragments": 3}, r"outer\.num_fragments = 3 .*\[1, 2\]", id="P > n"),
        pytest.param(AB, {"num_fragments": 0}, r"outer\.num_fragments = 0 ", id="P = 0"),
        pytest.param([], {"num_fragments": 1}, "no trainable parameter", id="no tensors"),
        pytest.param(AB + AB[:1], {"num_fragments": 1}, r"\['a'\]", id="duplicate name"),
        pytest.param(specs(a=(2, 0)), {"num_fragments": 1}, r"'a' of shape \(2, 0\)", id="empty"),
        pytest.param(AB, {"num_fragments": 1, "num_lanes": 0}, r"outer\.num_lanes = 0", id="lanes"),
        pytest.param(AB, {"num_fragments": 1, "block_numel": 0}, "block_numel = 0", id="blocks"),
        pytest.param(
            AB,
            {"num_fragments": 1, "pattern": "random"},
            r"outer\.fragment_pattern = 'random'",
            id="pattern",
        ),
        pytest.param(
            MODEL,
            {"num_fragments": 8, "pattern": "strided"},
            r"outer\.num_fragments = 8 .*'strided'.* 7 layers .*balanced",
            id="more fragments than layers",
        ),
        pytest.param(
            MODEL,
            {"num_fragments": 1, "embedding_alone": True},
            r"outer\.num_fragments = 1 is outside \[2, 13\]: .* besides the embedding",
            id="no fragment left besides the embedding",
        ),
        pytest.param(
            AB,
            {"num_fragments": 2, "embedding_alone": True},
            r"outer\.embedding_alone = true, but no parameter",
            id="no embedding",
        ),
        pytest.param(
            AB, {"num_fragments": 1, "explicit": [["a", "b"]]}, "ignores them", id="unused lists"
        ),
    ],
)
def test_make_plan_refuses(model: list[TensorSpec], options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(model, **options)


@pytest.mark.parametrize(
    ("explicit", "options", "message"),
    [
        pytest.param([["a"], ["b", "a"]], {}, r"lists more than once: \['a'\]", id="duplicate"),
        pytest.param([["a", "a"], ["b"]], {}, r"lists more than once: \['a'\]", id="twice in one"),
        pytest.param([["a"], ["a"]], {}, r"misses the parameters: \['b'\]", id="missing"),
        pytest.param([["a"], ["b", "x"]], {}, r"no trainable parameters.*\['x'\]", id="unknown"),
        pytest.param([["a", "b"], []], {}, r"fragments \[1\] are empty", id="empty"),
        pytest.param([["a", "b"]], {}, "num_fragments = 2, but .* lists 1", id="another P"),
        pytest.param([["a"], ["b"]], {"embedding_alone": True}, "no meaning", id="embedding"),
    ],
)
def test_explicit_fragments_refuse(explicit: list[list[str]], options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(AB, num_fragments=2, pattern="explicit", explicit=explicit, **options)


def test_the_manifest_is_canonical() -> None:
    plan = make_plan(specs(b=(2, 3), a=()), num_fragments=1)

    assert plan.to_json() == (
        '{"block_numel":128,"format":1,"fragments":[{"entries":[["a",0,1,0],["b",0,6,128]],'
        '"fragment_id":0,"lanes":[[0,256]],"padded_numel":256}],"num_lanes":16,'
        '"tensors":[{"name":"a","shape":[]},{"name":"b","shape":[2,3]}]}'
    )
    assert plan == make_plan(specs(a=(), b=(2, 3)), num_fragments=1)
    assert Plan.from_json(plan.to_json()) == plan
    assert len(plan.fingerprint()) == 64
    assert plan.fingerprint() != make_plan(specs(b=(3, 2), a=()), num_fragments=1).fingerprint()


def test_a_manifest_may_cut_a_tensor() -> None:
    content = json.loads(make_plan(specs(a=(200,)), num_fragments=1).to_json())
    first = content["fragments"][0]
    second = {**first, "fragment_id": 1, "entries": [["a", 128, 200, 0]]}
    content["fragments"] = [{**first, "entries": [["a", 0, 128, 0]]}, second]
    for fragment in content["fragments"]:
        fragment |= {"padded_numel": 128, "lanes": [[0, 128]]}

    plan = Plan.from_json(json.dumps(content))

    assert [fragment.numel for fragment in plan.fragments] == [128, 72]


def _set(path: list, value: object):
    def edit(content: dict) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return edit


def _hostile(content: dict) -> None:
    content["num_lanes"] = content["tensors"][2]["shape"][0] = 10**30
    content["fragments"][1]["entries"][0][2] = 10**30


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        pytest.param(_set(["format"], 2), "format 2, this version reads", id="format"),
        pytest.param(_set(["extra"], 1), r"keys .*'extra'", id="extra key"),
        pytest.param(lambda c: c.pop("tensors"), "malformed: KeyError: 'tensors'", id="no tensors"),
        pytest.param(_set(["num_lanes"], 0), "must be integers of at least 1", id="num_lanes"),
        pytest.param(_hostile, "not laid out", id="a lane list that no memory holds"),
        pytest.param(_set(["num_lanes"], True), "must be integers", id="boolean"),
        pytest.param(_set(["block_numel"], 64), "not laid out", id="block_numel"),
        pytest.param(_set(["tensors", 0, "shape"], [2.0]), "must be integers", id="float shape"),
        pytest.param(_set(["tensors", 0, "shape"], [0]), "at least 1", id="no elements"),
        pytest.param(_set(["tensors", 0, "shape"], [99]), "hold 200000 .* which has 99", id="more"),
        pytest.param(_set(["tensors", 0, "name"], 3), "3 is not a name", id="name"),
        pytest.param(_set(["tensors", 0, "name"], "z"), "not sorted", id="unsorted tensors"),
        pytest.param(_set(["tensors", 1, "name"], "a"), "not sorted and distinct", id="same name"),
        pytest.param(_set(["fragments", 1, "entries"], []), "fragment 1 are empty", id="empty"),
        pytest.param(
            _set(["fragments", 1, "entries", 0, 0], "x"), "unknown tensor 'x'", id="unknown tensor"
        ),
        pytest.param(
            _set(["fragments", 1, "entries", 0, 1], 1), r"\[1, 6\) of 'c' does not follow", id="gap"
        ),
        pytest.param(
            _set(["fragments", 1, "entries", 0, 2], 5), "hold 5 elements of 'c', .* 6", id="short"
        ),
        pytest.param(
            _set(["fragments", 1, "entries", 0], ["a", 0, 200_000, 0]),
            "does not follow",
            id="twice",
        ),
        pytest.param(
            _set(["fragments", 0, "entries"], [["b", 0, 9, 0], ["a", 0, 200_000, 128]]),
            "not sorted",
            id="unsorted entries",
        ),
        pytest.param(_set(["fragments", 0, "entries", 1, 3], 7), "not laid out", id="offset"),
        pytest.param(_set(["fragments", 0, "fragment_id"], 1), "not laid out", id="fragment_id"),
        pytest.param(_set(["fragments", 0, "padded_numel"], 7), "not laid out", id="padded_numel"),
        pytest.param(_set(["fragments", 0, "lanes", 0, 1], 256), "not laid out", id="lane border"),
        pytest.param(_set(["fragments", 0, "lanes"], []), "not laid out", id="no lanes"),
        pytest.param(_set(["fragments", 0, "lanes"], 3), "malformed", id="lanes not a list"),
    ],
)
def test_from_json_refuses(edit, message: str) -> None:
    model = specs(a=(200_000,), b=(9,), c=(6,))
    plan = make_plan(model, num_fragments=2, pattern="explicit", explicit=[["a", "b"], ["c"]])
    content = json.loads(plan.to_json())
    edit(content)

    with pytest.raises(PlanMismatch, match=message):
        Plan.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "[" * 100_000, '{"format":1}'])
def test_from_json_refuses_what_is_no_manifest(text: str) -> None:
    with pytest.raises(PlanMismatch, match="malformed"):
        Plan.from_json(text)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[TensorSpec], int]:
    shapes = draw(st.lists(st.lists(st.integers(1, 400), max_size=3), min_size=1, max_size=12))
    prefixes = st.sampled_from(["layers.0.", "layers.1.", "layers.12.", "embed.", "norm."])
    model = [TensorSpec(f"{draw(prefixes)}{i}", tuple(s)) for i, s in enumerate(shapes)]
    return model, draw(st.integers(1, len(model)))


@given(models(), st.sampled_from(["strided", "sequential", "balanced"]), st.booleans())
def test_every_element_lies_in_one_fragment_and_one_lane(
    drawn: tuple[list[TensorSpec], int], pattern: str, embedding_alone: bool
) -> None:
    model, num_fragments = drawn
    try:
        plan = make_plan(
            model,
            num_fragments=num_fragments,
            pattern=pattern,  # type: ignore[arg-type]
            embedding_alone=embedding_alone,
        )
    except ConfigError:
        return

    entries = [entry for fragment in plan.fragments for entry in fragment.entries]
    share = sum(spec.numel for spec in model) / num_fragments
    for spec in model:
        ranges = sorted((e.start, e.end) for e in entries if e.name == spec.name)
        assert (ranges[0][0], ranges[-1][1]) == (0, spec.numel)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        row = spec.numel // spec.shape[0] if spec.shape else 1
        assert all(start % row == 0 for start, _ in ranges)
        is_cut = pattern == "balanced" and (spec.numel > share or embedding_alone)
        assert len(ranges) == 1 or is_cut
    assert len(plan.fragments) == num_fragments
    for fragment in plan.fragments:
        ends = [
            0,
            *(
                math.ceil((e.offset + e.end - e.start) / BLOCK_NUMEL) * 128
                for e in fragment.entries
            ),
        ]
        assert [entry.offset for entry in fragment.entries] == ends[:-1]
        assert fragment.padded_numel == ends[-1] > 0
        borders = [lane.start for lane in fragment.lanes] + [fragment.padded_numel]
        assert [lane.end for lane in fragment.lanes] == borders[1:]
        assert borders[0] == 0
        assert all(lane.numel > 0 and lane.start % 128 == 0 for lane in fragment.lanes)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_tensor_larger_than_its_share_is_cut_between_rows() -> None:
    model = specs(a=(10, 7), b=(20,), c=(10,))

    plan = make_plan(model, num_fragments=4)

    # Shares of 25: 4 rows of 7 are just over one, then what is left levels the others.
    assert [[(e.name, e.start, e.end) for e in f.entries] for f in plan.fragments] == [
        [("b", 0, 20)],
        [("a", 56, 70), ("c", 0, 10)],
        [("a", 0, 28)],
        [("a", 28, 56)],
    ]
    assert Plan.from_json(plan.to_json()) == plan


def test_more_fragments_than_tensors_are_pieces_down_to_rows() -> None:
    model = specs(a=(4, 30), b=(2,))

    assert [f.numel for f in make_plan(model, num_fragments=4).fragments] == [32, 30, 30, 30]
    assert [f.numel for f in make_plan(model, num_fragments=5).fragments] == [30] * 4 + [2]
    assert names(make_plan(specs(a=(6, 2)), num_fragments=6)) == [["a"]] * 6


def test_pieces_that_meet_in_a_fragment_are_one_range() -> None:
    # Share 14.5: b, with 13, is put whole; a's rows go to the other.
    plan = make_plan(specs(a=(8, 2), b=(13, 1)), num_fragments=2)

    assert [f.entries for f in plan.fragments] == [
        (Entry("b", 0, 13, 0),),
        (Entry("a", 0, 16, 0),),
    ]


def test_only_the_balanced_pattern_cuts_and_never_an_embedding_alone() -> None:
    plan = make_plan(MODEL, num_fragments=4, embedding_alone=True)

    # 12 tensors of 37,248 values besides the embedding: a share of 12,416, and a head of 16,384.
    cut = [e.name for f in plan.fragments for e in f.entries if e.start]
    assert set(cut) == {"output.weight"}
    assert plan.fragments[3].entries == (Entry("tok_embeddings.weight", 0, 16384, 0),)
    for pattern in ("strided", "sequential"):
        whole = make_plan(MODEL, num_fragments=7, pattern=pattern)  # type: ignore[arg-type]
        assert not any(e.start for f in whole.fragments for e in f.entries)


def test_a_plan_without_a_large_tensor_is_what_it_always_was() -> None:
    model = specs(a=(30,), b=(20, 2), c=(3, 9), d=(33,), e=(7,))

    assert make_plan(model, num_fragments=2).to_json() == (
        '{"block_numel":128,"format":1,"fragments":['
        '{"entries":[["b",0,40,0],["c",0,27,128]],'
        '"fragment_id":0,"lanes":[[0,256]],"padded_numel":256},'
        '{"entries":[["a",0,30,0],["d",0,33,128],["e",0,7,256]],'
        '"fragment_id":1,"lanes":[[0,384]],"padded_numel":384}],"num_lanes":16,'
        '"tensors":[{"name":"a","shape":[30]},{"name":"b","shape":[20,2]},'
        '{"name":"c","shape":[3,9]},{"name":"d","shape":[33]},{"name":"e","shape":[7]}]}'
    )


@pytest.mark.parametrize("num_fragments", [3, 5, 7, 19])
@pytest.mark.parametrize("num_large", [1, 2])
def test_where_rows_are_small_every_fragment_has_its_share(
    num_large: int, num_fragments: int
) -> None:
    rows, row = 32_000, 128
    large = {f"large{i}": (rows, row) for i in range(num_large)}
    plan = make_plan(specs(norm=(row,), **large), num_fragments=num_fragments)

    share = (num_large * rows + 1) * row / num_fragments
    assert all(abs(fragment.numel - share) <= row for fragment in plan.fragments)
    assert sum(len(f.entries) for f in plan.fragments) <= 1 + num_large + num_fragments


def test_tensors_that_stay_whole_are_dealt_before_large_ones_are_cut() -> None:
    # A share is 100: whole ones of 75 besides a fragment of the large one's own would take 150.
    plan = make_plan(specs(a=(75,), b=(75,), c=(75,), d=(75,), e=(101,)), num_fragments=4)

    assert sorted(f.numel for f in plan.fragments) == [100, 100, 100, 101]


def test_a_share_that_no_float_holds_is_cut_exactly() -> None:
    # 1004 / (1004 / 7) > 7 in floats.
    fragments = make_plan(specs(a=(1004,)), num_fragments=7).fragments

    assert sorted(f.numel for f in fragments) == [143, 143, 143, 143, 144, 144, 144]
    assert all(len(f.entries) == 1 for f in fragments)


def _optimum(sizes: list[int], num_groups: int) -> int:
    """Least largest sum over all ways to share `sizes` out."""
    reached = {(0,) * num_groups}
    for size in sizes:
        reached = {
            tuple(sorted((*loads[:i], loads[i] + size, *loads[i + 1 :])))
            for loads in reached
            for i in range(num_groups)
        }
    return min(max(loads) for loads in reached)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6),
    st.integers(1, 4),
)
def test_balanced_is_within_a_third_of_the_optimum_over_all_cuts_between_rows(
    shapes: list[tuple[int, int]], num_fragments: int
) -> None:
    model = [TensorSpec(f"t{i}", shape) for i, shape in enumerate(shapes)]
    total = sum(spec.numel for spec in model)
    sizes = []  # of what no plan cuts: tensors up to the share, rows of larger ones
    for rows, row in shapes:
        is_large = rows * row * num_fragments > total
        sizes += [row] * rows if is_large else [rows * row]
    if len(sizes) < num_fragments:
        with pytest.raises(ConfigError, match="pieces of tensors, cut along dim 0"):
            make_plan(model, num_fragments=num_fragments)
        return
    # A bound from below: the share, and the optimum of the large ones among them alone.
    large = [size for size in sizes if 3 * size * num_fragments > total]
    optimum = max(total / num_fragments, _optimum(large, num_fragments))

    plan = make_plan(model, num_fragments=num_fragments)

    assert max(fragment.numel for fragment in plan.fragments) <= optimum * 4 / 3


def test_layers_are_found_by_their_lists_names_and_those_called_layers_come_first() -> None:
    found = {
        "layers.3.w": 3, "model.layers.4.mlp.w": 4, "transformer.h.5.w": 5, "blocks.6.w": 6,
        "blocks.1.layers.2.w": 2, "layers.w": None, "graph.7.w": None,
    }  # fmt: skip

    assert {name: layer_of(name) for name in found} == found
