"""What schedules of a pipeline ask of stages, layers and micro-batches. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

from diloco.config.fields import Problem

Schedule: TypeAlias = Literal[
    "gpipe", "1f1b", "bfs", "interleaved-1f1b", "interleaved-zb", "zbv", "dualpipev"
]
DEFAULT_SCHEDULE: Schedule = "1f1b"
#: Stages s and 2 pp - 1 - s are on one rank; of all other schedules s and s + pp, s + 2 pp, ...
V_SCHEDULES = ("zbv", "dualpipev")
_ONE_STAGE = ("gpipe", "1f1b")
_ROUNDS = ("interleaved-1f1b", "interleaved-zb")


def stages_problem(schedule: Schedule, pp: int, stages_per_rank: int) -> str | None:
    """Say why a schedule cannot have so many stages a rank, and what it can; None if it can."""
    shown = f'schedule = "{schedule}" with stages_per_rank = {stages_per_rank}'
    if pp == 1:
        if schedule == DEFAULT_SCHEDULE and stages_per_rank == 1:
            return None
        return f"{shown} is for pp above 1, and pp = 1: leave both out"
    if schedule in _ONE_STAGE and stages_per_rank != 1:
        return f'{shown}: it has one stage a rank; set stages_per_rank = 1 or schedule = "bfs"'
    if schedule in V_SCHEDULES and stages_per_rank != 2:
        return f"{shown}: it has two stages a rank; set stages_per_rank = 2"
    if schedule not in _ONE_STAGE and stages_per_rank < 2:
        return f'{shown}: it has several stages a rank; set 2 or more, or schedule = "1f1b"'
    return None


def pipeline_problems(
    schedule: Schedule, pp: int, stages_per_rank: int, micro_batches: int, data: Mapping[str, Any]
) -> Iterator[Problem]:
    """Check what a pipeline owes to micro-batches, and to the sections that were valid.

    Args:
        schedule: Of a mesh that `stages_problem` accepts.
        pp: Ranks of the pipeline; with 1 there is nothing to check.
        stages_per_rank: Stages of each.
        micro_batches: Of a rank and inner step.
        data: Sections of the run file by name.
    """
    if pp == 1:
        return
    if problem := micro_batches_problem(schedule, pp, micro_batches):
        yield "micro_batches", micro_batches, problem
    if "model" not in data:
        return
    model = data["model"]
    if model.family != "llama":
        return
    stages = pp * stages_per_rank
    if stages > model.num_layers:
        most = model.num_layers // pp
        yield (
            "mesh.pp",
            pp,
            f"pp x stages_per_rank = {stages} stages must be at most model.num_layers = "
            f"{model.num_layers}: set "
            + (f"stages_per_rank = {most}" if most else f"pp to {model.num_layers} or less"),
        )
    if model.tie_embeddings and schedule in V_SCHEDULES:
        yield (
            "mesh.schedule",
            schedule,
            "first and last stage are on one rank, which cannot tie them yet, and "
            'model.tie_embeddings = true; set schedule = "interleaved-zb", or tie_embeddings = '
            "false",
        )


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """Deal neighbouring layers to stages, evenly or with one more for some before the last one.

    Ends are light: the first stage has the embedding as well, the last one the head and its loss.
    So 126 layers in 16 stages are 7, then 14 times 8, then 7.

    Args:
        num_layers: At least `num_stages`.
        num_stages: Of the whole pipeline.

    Source: Llama 3 (arXiv 2407.21783), section 3.3.2: a layer less in the first and last stage.
    """
    size, more = divmod(num_layers, num_stages)
    sizes = [
        size + (num_stages - 1 - more <= stage < num_stages - 1) for stage in range(num_stages)
    ]
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def micro_batches_problem(schedule: Schedule, pp: int, micro_batches: int) -> str | None:
    """Say why a schedule cannot run so many micro-batches, and how many it can; None if it can."""
    if _fits(schedule, pp, micro_batches):
        return None
    below = next((n for n in range(micro_batches, 0, -1) if _fits(schedule, pp, n)), None)
    above = next(n for n in range(micro_batches, 2 * micro_batches + 2 * pp + 1)
                 if _fits(schedule, pp, n))  # fmt: skip
    least = {"1f1b": pp, "dualpipev": 2 * pp}.get(schedule)
    rule = (
        f"at least {least}"
        if least is not None
        else f"a multiple of its number of rounds, micro_batches / pp = {micro_batches // pp}"
    )
    choices = " or ".join(str(n) for n in (below, above) if n is not None)
    return f'schedule = "{schedule}" with pp = {pp} needs {rule}; set it to {choices}'


def _fits(schedule: Schedule, pp: int, micro_batches: int) -> bool:
    if schedule == "1f1b":
        return micro_batches >= pp
    if schedule == "dualpipev":
        return micro_batches >= 2 * pp
    if schedule in _ROUNDS:
        return micro_batches % max(1, micro_batches // pp) == 0
    return True
