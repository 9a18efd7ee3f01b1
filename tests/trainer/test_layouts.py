"""Every layout of the table against one rank: values, losses, lanes and collectives."""

import numpy as np
import pytest
from rich.console import Console

from diloco.cli.terminal.fitted_table import print_rows
from diloco.report.rows import Column
from tests.trainer.layout_case import INNER_STEPS
from tests.trainer.layouts import CASES, LARGEST_DIFFERENCES, case_of, names
from tests.trainer.trained_layouts import alone, run_rows

# Float32 sums in another order: 1.8e-5 of a parameter was seen, because AdamW divides a gradient by
# its own size, noise included. In bfloat16 a parameter moves by at most lr = 2e-3 in each of 5
# steps, whatever its gradient, so two runs are at most twice that apart, 2e-2.
PARAMETER_TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
NORM_TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-2}  # relative


#: Of two ranks: what another row below has too, of two ranks or of `PAIRS`.
AGAIN = (
    "bfs-tied", "fsdp-tied", "fsdp-by-block-accumulated", "replicated-by-block", "tp",
    "tp-tied-accumulated",
    "1f1b", "1f1b-experts", "interleaved-zb-tied", "zbv", "dualpipev", "ring",
    "gathered-accumulated", "ulysses-experts-latent", "experts-fsdp", "ep", "full-tp",
    "selective-ep", "bfloat16-replicated", "bfloat16-experts", "bfloat16-ep",
    "zero-2-accumulated", "replicated-accumulated", "fsdp-muon-accumulated", "replicated-muon",
    "gpipe-tied", "ep-muon", "full-ring", "selective-tp", "full-1f1b-tied", "bfloat16-fsdp",
    "bfloat16-ring", "bfloat16-tp",
)  # fmt: skip
FIRST = tuple(name for name in names(2) if name not in AGAIN)
#: Of four ranks: every pair of axes once, with what is most unlike among the rest.
PAIRS = (
    "ring-tp", "ring-fsdp", "gathered-replicated", "replicated-tp", "fsdp-tp",
    "zero-3-tp-accumulated", "experts-hsdp", "ep-fsdp-cp-muon", "full-bfloat16-ep-fsdp",
    "pp-replicated", "pp-fsdp-tied-muon", "interleaved-zb-tp", "zbv-ep", "dualpipev-ep-latent-muon",
)  # fmt: skip
OTHERS = tuple(name for name in names(4) if name not in PAIRS)
#: Models of transformers: one of each kind of parallelism that they have, and the others.
TRANSFORMERS = ("hf-fsdp-tied-accumulated", "hf-replicated-learned-positions", "hf-tp-tied")
TRANSFORMERS_AGAIN = tuple(n for n in names(2, "transformers") if n not in TRANSFORMERS)


@pytest.mark.timeout(250)  # the first of each number of ranks trains all rows of it
@pytest.mark.parametrize("name", [*FIRST, *PAIRS, *TRANSFORMERS])
def test_layout_agrees_with_one_rank(name):
    check(name)


@pytest.mark.slow
@pytest.mark.timeout(250)
@pytest.mark.parametrize("name", [*AGAIN, *OTHERS, *TRANSFORMERS_AGAIN])
def test_other_layout_agrees_with_one_rank(name):
    check(name)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*names(2, "compiler"), *names(4, "compiler")])
def test_compiled_layout_agrees_with_one_rank(name):
    check(name)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [*names(4, "transformers"), *names(8)])
def test_large_layout_agrees_with_one_rank(name):
    check(name)


TABLE = (
    Column("layout", "layout"),
    Column("ranks", "ranks", "d"),
    Column("loss", "last loss, nats", ".4f"),
    Column("difference", "differs by", ".1e"),
    Column("collectives", "collectives a step"),
)


def rows_with(name):
    """Give the rows that are trained together with one."""
    case = case_of(name)
    groups = (FIRST, AGAIN, PAIRS, OTHERS, TRANSFORMERS, TRANSFORMERS_AGAIN)
    together = (rows for rows in groups if name in rows)
    return next(together, tuple(names(case.num_ranks, case.loads)))


def check(name):
    case = case_of(name)
    expected = alone(case)
    everybody = [result[name] for result in run_rows(rows_with(name))]
    first = everybody[0]
    precision = case.compute.precision
    loss_tolerance = LARGEST_DIFFERENCES[precision]

    assert first["initial"] == expected["initial"], "the canonical vectors start as the same bits"
    for ours, reference in zip(first["metrics"], expected["metrics"], strict=True):
        assert ours.loss == pytest.approx(reference.loss, abs=loss_tolerance)
        assert ours.grad_norm == pytest.approx(reference.grad_norm, rel=NORM_TOLERANCES[precision])
        assert ours.learning_rate == reference.learning_rate
        assert ours.num_tokens == reference.num_tokens
        # Which experts are chosen may differ by roundings; how many are, may not.
        counted = {router: sum(load) for router, load in ours.expert_loads.items()}
        assert counted == {router: sum(load) for router, load in reference.expert_loads.items()}
    assert first["evaluations"] == pytest.approx(expected["evaluations"], abs=loss_tolerance)
    assert first["trained"].keys() == expected["trained"].keys()
    for parameter, value in expected["trained"].items():
        difference = np.abs(first["trained"][parameter] - value).max()
        assert difference <= PARAMETER_TOLERANCES[precision], parameter
    for result in everybody:
        assert result["dtypes"] == {"torch.float32"}, "also where they are used in bfloat16"
        assert result["halved"], "what is written through lanes is what all copies hold"
        assert result["evaluations"] == first["evaluations"]
        for ours, theirs in zip(result["metrics"], first["metrics"], strict=True):
            assert (ours.loss, ours.grad_norm) == (theirs.loss, theirs.grad_norm)
        for parameter, value in first["trained"].items():
            np.testing.assert_array_equal(result["trained"][parameter], value)
        if case.collectives is not None:
            assert result["collectives"] == case.collectives


@pytest.mark.slow
@pytest.mark.timeout(900)  # all rows, those of eight ranks too
def test_the_table_of_layouts(capsys):
    rows = []
    for case in sorted(CASES, key=lambda case: case.num_ranks):
        losses, evaluations = told(alone(case))
        ranks = [result[case.name] for result in run_rows(rows_with(case.name))]
        differences = [
            abs(ours - theirs)
            for rank in ranks
            for mine, other in zip(told(rank), (losses, evaluations), strict=True)
            for ours, theirs in zip(mine, other, strict=True)
        ]
        rows.append(
            {
                "layout": f"{case.name}: {case.mesh.shape_text}",
                "ranks": case.num_ranks,
                "precision": case.compute.precision,
                "loss": told(ranks[0])[0][INNER_STEPS - 1],  # values are halved after it
                "difference": max(differences),
                "collectives": ", ".join(
                    f"{n} {name}" for name, n in sorted(ranks[0]["collectives"].items())
                ),
            }
        )
    with capsys.disabled():
        print_rows(Console(width=200), TABLE, rows, "layouts against one rank")
    for row in rows:
        assert row["difference"] <= LARGEST_DIFFERENCES[row["precision"]], row["layout"]


def told(result):
    """Give the losses of inner steps, and those of evaluations."""
    return [metrics.loss for metrics in result["metrics"]], result["evaluations"]


def test_names_are_unique_and_a_run_file_may_say_every_row():
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        island = case.config().island
        assert (island.mesh, island.compute) == (case.mesh, case.compute)


def test_the_compared_runs_learn_clip_and_see_what_is_written():
    for case in CASES:
        expected = alone(case)
        metrics, (_, before, after) = expected["metrics"], expected["evaluations"]

        assert metrics[INNER_STEPS - 1].loss < metrics[0].loss - 0.3
        assert max(m.grad_norm for m in metrics) > 0.5
        assert abs(before - after) > 0.01
