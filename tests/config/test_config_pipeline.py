"""What schedules ask of micro-batches, against PyTorch's own refusals; tied ends of a V."""

import itertools

import pytest

from diloco.config.model import ModelConfig
from diloco.config.pipeline import (
    V_SCHEDULES,
    micro_batches_problem,
    pipeline_problems,
    stages_problem,
)

SCHEDULES = ("gpipe", "1f1b", "bfs", "interleaved-1f1b", "interleaved-zb", "zbv", "dualpipev")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_numbers_that_a_refusal_names_are_the_nearest_that_fit(schedule):
    for pp, micro_batches in itertools.product(range(2, 6), range(1, 24)):
        problem = micro_batches_problem(schedule, pp, micro_batches)
        if problem is None:
            continue
        fitting = [n for n in range(1, 60) if micro_batches_problem(schedule, pp, n) is None]
        below = [n for n in fitting if n < micro_batches][-1:]
        above = [n for n in fitting if n > micro_batches][:1]

        assert problem.endswith(f"set it to {' or '.join(map(str, below + above))}")


def test_one_rank_of_a_pipeline_has_no_schedule_of_its_own():
    assert stages_problem("1f1b", 1, 1) is None
    assert "leave both out" in stages_problem("gpipe", 1, 1)
    assert "leave both out" in stages_problem("1f1b", 1, 2)


@pytest.mark.parametrize("schedule", V_SCHEDULES)
def test_tied_embeddings_at_both_ends_of_a_v_are_refused(schedule):
    model = ModelConfig(preset="debug", tie_embeddings=True)

    ((path, value, text),) = pipeline_problems(schedule, 2, 2, 4, {"model": model})

    assert (path, value) == ("mesh.schedule", schedule)
    assert 'set schedule = "interleaved-zb", or tie_embeddings = false' in text
