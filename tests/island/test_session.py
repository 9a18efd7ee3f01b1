"""`DiLoCo` besides loops of one's own, on islands of one rank, against a real syncer."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import diloco
from diloco.errors import ConfigError, FingerprintMismatch
from diloco.telemetry.events import Event, FragmentSent, PhaseDone
from tests.served_run import ServedRun

INNER_STEPS = 8
TOKENS = 100


def make_model(seed: int = 1) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inner_step: int) -> None:
    generator = torch.Generator().manual_seed(inner_step)
    inputs = torch.randn(16, 8, generator=generator)
    (model(inputs) - inputs[:, :4]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def is_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedRun]:
    with ServedRun(tmp_path, {"east": ""}, inner_steps=INNER_STEPS) as served:
        yield served


@contextmanager
def joined(
    served: ServedRun, trained: Any, island: str = "east", **options: Any
) -> Iterator[diloco.DiLoCo]:
    config = served.island(island)
    with diloco.connect(config, served.address) as connection:
        yield diloco.DiLoCo(trained, config.outer, transport=connection, **options)


def train(outer: diloco.DiLoCo, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Event]:
    events = []
    for inner_step in range(outer.start_step, outer.inner_steps):
        train_step(model, optimizer, inner_step)
        events += outer.step(num_tokens=TOKENS)
    return events + outer.finish()


def final(served: ServedRun, trained: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    """Train a whole run that was given the same model in some way; returns its end."""
    model = make_model()
    with joined(served, trained(model)) as outer:
        train(outer, model, make_optimizer(model))
    return values(model)


# -- a whole run ---------------------------------------------------------------------------------


def test_a_loop_of_ones_own_trains_to_the_end_and_hears_what_happened(served: ServedRun) -> None:
    model, heard = make_model(), list[Event]()
    optimizer = make_optimizer(model)
    before = values(model)
    with joined(served, model, on_event=heard.append) as outer:
        assert (outer.start_step, outer.inner_steps, outer.resume_step) == (0, INNER_STEPS, None)
        assert (outer.island_slot, outer.versions) == (0, (0, 0))
        events = train(outer, model, optimizer)
        assert repr(outer).startswith(
            "DiLoCo(run='test', island='east', slot=0, finished, inner_step=8 of 8, versions=[3, 2]"
        )
        local = values(model)
        with outer.global_parameters():
            assert is_equal(values(model), local), "the flush was merged"

    phases = [event.phase for event in events if isinstance(event, PhaseDone)]
    assert {"gather", "encode", "send", "fetch", "wait", "merge"} <= {*phases}
    assert phases.count("gather") == phases.count("merge") == 5
    told = [event for event in events if not isinstance(event, PhaseDone)]  # of any thread, those
    kinds = [event.kind for event in told]
    assert kinds.count("fragment_staged") == kinds.count("fragment_merged") == 5
    assert [kind for kind in kinds if kind != "fragment_staged"] == [
        *["fragment_sent", "fragment_merged"] * 3,
        *["fragment_sent"] * 2,
        *["fragment_merged"] * 2,
    ]
    assert told == [event for event in heard if not isinstance(event, PhaseDone)]
    assert not is_equal(before, local)
    (leave,) = served.leaves
    assert (leave.exit_code, leave.reason, leave.is_stopped) == (
        0,
        "finished after inner step 8",
        False,
    )
    report = served.reports["east"]
    assert (report.state, report.inner_step, report.tokens) == ("finished", 8, 8 * TOKENS)
    assert report.tokens_per_s > 0
    assert report.bytes_up > 0


def test_what_is_sent_is_tried_by_the_loss_that_a_loop_gives(served: ServedRun) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    losses = itertools.chain([1.0, 1.1], itertools.cycle([1.1, 1.0]))  # the first trial fails
    with joined(served, model) as outer:
        outer.loss_of = lambda: next(losses)
        for ledger in outer._loop.state.ledgers:
            ledger.asks_trial = True  # as after a version of two opposed islands
        events = train(outer, model, optimizer)

    sent = [event for event in events if isinstance(event, FragmentSent)]
    first, *others = [event.declined for event in sent if event.weight_tokens]
    assert first.startswith("half of its contribution to fragment ")
    assert others and not any(others)


def test_figures_that_come_late_are_asked_for_at_the_next_step_or_before_a_send(
    served: ServedRun,
) -> None:
    model, asked_at = make_model(), dict[int, int]()
    optimizer = make_optimizer(model)
    with joined(served, model) as outer:

        def figures(step: int) -> dict[str, float]:
            asked_at[step] = launched
            return {"loss": 1.0}

        sent = []
        for launched in range(1, outer.inner_steps + 1):
            train_step(model, optimizer, launched)
            outer.log_later(functools.partial(figures, launched))
            events = outer.step(num_tokens=TOKENS)
            phases = [event.phase for event in events if isinstance(event, PhaseDone)]
            sent += [launched] * ("gather" in phases)
        outer.finish()

    assert sent
    last = outer.inner_steps
    assert asked_at == {n: n if n in (*sent, last) else n + 1 for n in range(1, last + 1)}


def test_global_parameters_are_put_back_exactly(served: ServedRun) -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    initial = values(model)
    with joined(served, model) as outer:
        train_step(model, optimizer, 0)
        outer.step(num_tokens=TOKENS)
        local = values(model)
        with outer.global_parameters():
            assert is_equal(values(model), initial)
        assert is_equal(values(model), local)
        for inner_step in range(1, INNER_STEPS):
            train_step(model, optimizer, inner_step)
            outer.step(num_tokens=TOKENS)
        outer.finish()


@pytest.mark.parametrize(
    "trained",
    [
        pytest.param(lambda model: dict(model.named_parameters()), id="named-parameters"),
        pytest.param(lambda model: [Part("0", model[0]), Part("2", model[2])], id="parts"),
        pytest.param(lambda model: (p for p in [model]), id="generator"),
        pytest.param(lambda model: nn.parallel.DataParallel(model), id="wrapped"),
    ],
)
def test_every_way_to_name_the_same_parameters_trains_alike(
    trained: Callable[[nn.Module], Any], tmp_path: Path
) -> None:
    ends = []
    for name, way in (("module", lambda model: model), ("other", trained)):
        with ServedRun(tmp_path / name, {"east": ""}, inner_steps=INNER_STEPS) as served:
            ends.append(final(served, way))

    assert is_equal(*ends)


class Part(nn.Module):
    """A part of a model that keeps the name it has there."""

    def __init__(self, name: str, part: nn.Module) -> None:
        super().__init__()
        self.add_module(name, part)


def test_an_optimizer_may_be_built_before_or_after(tmp_path: Path) -> None:
    ends = []
    for is_before in (True, False):
        model = make_model(seed=2)
        directory = tmp_path / str(is_before)
        with ServedRun(directory, {"east": ""}, inner_steps=INNER_STEPS) as served:
            optimizer = make_optimizer(model) if is_before else None
            with joined(served, model) as outer:
                train(outer, model, optimizer or make_optimizer(model))
        ends.append(values(model))

    assert is_equal(*ends)


def test_values_whose_storage_moved_are_followed(served: ServedRun, tmp_path: Path) -> None:
    def moving(model: nn.Module) -> dict[str, Tensor]:
        with joined(served, model) as outer:
            optimizer = make_optimizer(model)
            for inner_step in range(INNER_STEPS):
                for parameter in model.parameters():  # as module.to(device) does
                    parameter.data = parameter.data.clone()
                train_step(model, optimizer, inner_step)
                outer.step(num_tokens=TOKENS)
            outer.finish()
        return values(model)

    moved = moving(make_model())
    with ServedRun(tmp_path / "still", {"east": ""}, inner_steps=INNER_STEPS) as still:
        assert is_equal(moved, final(still, lambda model: model))


# -- version 0 -----------------------------------------------------------------------------------


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("overwrite_initial", [True, False])
def test_other_initial_values_are_overwritten_with_an_event_or_refused(
    tmp_path: Path, overwrite_initial: bool
) -> None:
    east, west = make_model(seed=1), make_model(seed=2)
    initial = values(east)
    seen: dict[str, Any] = {}

    def run_west() -> None:
        try:
            with joined(served, west, "west", overwrite_initial=overwrite_initial) as outer:
                seen["west"] = values(west)
                seen["events"] = [event.kind for event in train_west(outer)]
        except FingerprintMismatch as error:
            seen["refused"] = str(error)

    def train_west(outer: diloco.DiLoCo) -> list[Event]:
        train_step(west, make_optimizer(west), 0)
        return [*outer.step(num_tokens=TOKENS), *outer.finish()]

    islands = {"east": "", "west": ""}
    with ServedRun(tmp_path, islands, inner_steps=1, inner_steps_per_round=8) as served:
        thread = in_thread(run_west)
        if overwrite_initial:
            with joined(served, east) as outer:
                train(outer, east, make_optimizer(east))
            thread.join()
        else:
            with pytest.raises(Alone), joined(served, east):
                thread.join()
                raise Alone

    if overwrite_initial:
        assert is_equal(seen["west"], initial)
        assert seen["events"][0] == "initial_overwritten"
    else:
        assert "the initial parameters of island 'west' differ from the run's" in seen["refused"]
        assert [leave.exit_code for leave in served.leaves] == [10, 1]


class Alone(Exception):
    """The test ends an island that has nobody to train with."""


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trained", "told"),
    [
        pytest.param(
            lambda: make_model().bfloat16(),
            "parameter '0.bias' is torch.bfloat16; islands need float32 masters: keep the model in "
            "float32 and compute in 16 bits by autocast",
            id="bfloat16",
        ),
        pytest.param(
            lambda: make_model().requires_grad_(False),
            "there is no parameter with requires_grad: nothing to train",
            id="frozen",
        ),
        pytest.param(dict, "there is no parameter with requires_grad", id="empty"),
        pytest.param(
            lambda: [make_model()[0], nn.Linear(3, 3)],
            "two different parameters are called 'weight': give the modules distinct names, by "
            "passing their common parent or a mapping",
            id="duplicate-names",
        ),
        pytest.param(lambda: None, "was given a NoneType: give a module", id="nothing"),
        pytest.param(
            lambda: list(make_model().parameters()),
            r"given a Parameter: .* dict\(model.named_parameters\(\)\)",
            id="parameters-without-names",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_joining(
    served: ServedRun, trained: Callable[[], Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told), joined(served, trained()):
        pass

    assert not served.joins


@pytest.mark.parametrize("num_tokens", [None, 0, -1, 1.5, True, torch.tensor(100)])
def test_a_token_count_that_is_no_weight_is_refused(served: ServedRun, num_tokens: Any) -> None:
    model = make_model()
    told = r"outer.step\(num_tokens=.*pass the tokens of the whole island"
    with pytest.raises(ValueError, match=told), joined(served, model) as outer:
        if num_tokens is None:
            outer.step()
        outer.step(num_tokens=num_tokens)

    assert served.leaves[0].exit_code == 1
    assert "num_tokens" in served.leaves[0].reason


def add(model: nn.Sequential) -> None:
    model.append(nn.Linear(4, 4))


def remove(model: nn.Sequential) -> None:
    model.pop(2)


def freeze(model: nn.Sequential) -> None:
    model[0].bias.requires_grad_(False)


def replace(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.zeros(16, 8))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (add, r"added: \['3.bias', '3.weight'\]"),
        (remove, r"removed or frozen: \['2.bias', '2.weight'\]"),
        (freeze, r"removed or frozen: \['0.bias'\]"),
        (replace, r"replaced: \['0.weight'\]"),
    ],
)
def test_a_changed_set_of_parameters_is_seen_when_a_fragment_is_due(
    served: ServedRun, change: Callable[[nn.Sequential], None], told: str
) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=told), joined(served, model) as outer:
        outer.step(num_tokens=TOKENS)
        change(model)
        outer.step(num_tokens=TOKENS)


def test_another_outer_section_than_the_connections_is_refused(served: ServedRun) -> None:
    config = served.island("east")
    other = config.outer.model_copy(update={"inner_steps_per_round": 30})
    told = r"\(here\) than diloco.connect \(there\): inner_steps_per_round: 30 here, 4 there"
    with (
        diloco.connect(config, served.address) as connection,
        pytest.raises(ConfigError, match=told),
    ):
        diloco.DiLoCo(make_model(), other, transport=connection)


def test_arguments_that_were_mixed_up_are_named(served: ServedRun) -> None:
    config: Any = served.island("east")
    with diloco.connect(config, served.address) as connection:
        with pytest.raises(ConfigError, match=r"transport='127.0.0.1:1'\): give the connection"):
            diloco.DiLoCo(make_model(), config.outer, transport="127.0.0.1:1")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"is a Config: give config.outer"):
            diloco.DiLoCo(make_model(), config, transport=connection)


def test_use_outside_the_context_and_after_the_end_is_refused(served: ServedRun) -> None:
    config, model = served.island("east"), make_model()
    connection = diloco.connect(config, served.address)
    with pytest.raises(ConfigError, match=r"the connection is not open: use diloco.DiLoCo inside"):
        diloco.DiLoCo(model, config.outer, transport=connection)
    with connection:
        outer = diloco.DiLoCo(model, config.outer, transport=connection)
        for _ in range(INNER_STEPS):
            outer.step(num_tokens=TOKENS)
        with pytest.raises(ConfigError, match=r"inner step 9: the run has run.inner_steps = 8"):
            outer.step(num_tokens=TOKENS)
        outer.finish()
        for call in (lambda: outer.step(num_tokens=TOKENS), outer.finish):
            with pytest.raises(ConfigError, match=r"finish.. was called after inner step 8"):
                call()
        with pytest.raises(ConfigError, match=r"one diloco.DiLoCo each"):
            diloco.DiLoCo(model, config.outer, transport=connection)
    with pytest.raises(ConfigError, match="the connection is not open"):
        outer.step(num_tokens=TOKENS)


def test_leaving_without_finish_is_an_error_and_the_coordinator_hears_it(
    served: ServedRun,
) -> None:
    with pytest.raises(ValueError, match=r"after inner step 1 of 8 without outer.finish"):  # noqa: SIM117
        with joined(served, make_model()) as outer:
            outer.step(num_tokens=TOKENS)

    assert served.leaves[0].exit_code == 1
    assert "without outer.finish()" in served.leaves[0].reason


def test_an_error_of_the_loop_reaches_the_coordinator_and_stays_the_same(
    served: ServedRun,
) -> None:
    with pytest.raises(ZeroDivisionError), joined(served, make_model()):
        _ = 1 / 0

    (leave,) = served.leaves
    assert (leave.exit_code, leave.reason) == (1, "ZeroDivisionError('division by zero')")
    assert served.reports["east"].state == "failed"
