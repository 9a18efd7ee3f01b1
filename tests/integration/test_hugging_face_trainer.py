"""`DiLoCoCallback` besides a real `transformers.Trainer`, against a real syncer.

One module for all, since importing transformers takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import diloco
from diloco.errors import ConfigError
from diloco.island.session import DiLoCo
from diloco.telemetry.events import Event, PublishedTaken
from diloco.trainer.optimizers.optimizer import largest_ratio
from tests.served_run import ServedRun

pytestmark = pytest.mark.timeout(300)

INNER_STEPS = 15
#: Sends after 3, 6, 9, 12, merges 2 steps later: one fragment is in flight at 4 and 12.
ROUNDS = {"inner_steps_per_round": 6, "num_fragments": 2, "overlap_steps": 2}
EVERY = ["checkpoint.every_inner_steps=4"]
BATCH, ACCUMULATED, LENGTH = 2, 2, 16


@pytest.fixture(scope="module")
def transformers() -> Any:
    """The package, imported when a test needs it and not when tests are collected."""
    import transformers

    return transformers


def make_trainer(transformers: Any, output: Path, callbacks: list[Any], **options: Any) -> Any:
    """Make a Trainer of a tiny Llama on rows that do not repeat within a run."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=64, num_attention_heads=2, **sizes)
    )
    rows = torch.randint(0, 64, (80, LENGTH), generator=torch.Generator().manual_seed(3))
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    chosen: dict[str, Any] = {
        "output_dir": str(output),
        "max_steps": INNER_STEPS,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATED,
        "include_num_input_tokens_seen": "all",
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        **options,
    }
    arguments = transformers.TrainingArguments(**chosen)
    return transformers.Trainer(
        model, arguments, train_dataset=dataset, eval_dataset=dataset[:4], callbacks=callbacks
    )


def train(
    transformers: Any,
    served: ServedRun,
    output: Path,
    *,
    resume: int | None = None,
    spies: tuple[Any, ...] = (),
    on_event: Callable[[Event], None] | None = None,
    **options: Any,
) -> Any:
    from diloco.integrations.hugging_face import DiLoCoCallback

    with diloco.connect(served.island("east"), served.address) as connection:
        callback = DiLoCoCallback(connection, on_event=on_event)
        trainer = make_trainer(transformers, output, [callback, *spies], **options)
        path = None if resume is None else str(output / f"checkpoint-{resume}")
        trainer.train(resume_from_checkpoint=path)
        trainer.outer = callback.outer
    return trainer


def values(model: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def is_equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def make_spy(transformers: Any, callback: Any) -> Any:
    class Spy(transformers.TrainerCallback):
        """Compares what is evaluated with what is published, and looks that it is put back."""

        evaluated_at: tuple[int, ...] = ()
        num_different = 0

        def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.evaluated = values(kwargs["model"])

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model = kwargs["model"]
            with callback.outer.global_parameters():
                assert is_equal(values(model), self.evaluated)
            self.num_different += not is_equal(values(model), self.evaluated)
            self.evaluated_at += (state.global_step,)

    return Spy()


def test_a_trainer_trains_evaluates_saves_and_resumes_bit_for_bit(
    transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diloco.integrations.hugging_face import DiLoCoCallback

    told: list[dict[str, Any]] = []
    losses: list[float] = []
    step, log = DiLoCo.step, DiLoCo.log
    monkeypatch.setattr(DiLoCo, "step", lambda *a, **k: (told.append(k), step(*a, **k))[1])
    monkeypatch.setattr(DiLoCo, "log", lambda *a, **k: (losses.append(k["loss"]), log(*a, **k))[1])
    first, second = tmp_path / "first", tmp_path / "second"
    with ServedRun(tmp_path, {"east": ""}, EVERY, inner_steps=INNER_STEPS, **ROUNDS) as served:
        with diloco.connect(served.island("east"), served.address) as connection:
            callback = DiLoCoCallback(connection)
            spy = make_spy(transformers, callback)
            trainer = make_trainer(
                transformers, first, [callback, spy], eval_strategy="steps", eval_steps=6,
                logging_steps=1,
            )  # fmt: skip
            trainer.train()
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert losses == pytest.approx([entry["loss"] for entry in logged])
        assert [k["bound"].update for k in told] == pytest.approx(
            [entry["learning_rate"] * largest_ratio(0.9, 0.999) for entry in logged]
        )
        whole, digests = values(trainer.model), callback.outer.digests
        report = served.reports["east"]
        assert report.tokens == INNER_STEPS * BATCH * ACCUMULATED * LENGTH
        assert list(report.checkpoint_steps) == [4, 8, 12]
        assert sorted(path.name for path in first.glob("checkpoint-*")) == [
            *("checkpoint-12", "checkpoint-4", "checkpoint-8")
        ]
        assert spy.evaluated_at == (6, 12, 15) and spy.num_different == 3

        served.resume(4)
        first.rename(second)
        with pytest.raises(ConfigError, match=r'resume_from_checkpoint=".*second/checkpoint-4"'):
            train(transformers, served, second)
        resumed = train(transformers, served, second, resume=4)

    assert resumed.outer.digests == digests
    assert is_equal(values(resumed.model), whole)


def make_flip(transformers: Any) -> Any:
    class Flip(transformers.TrainerCallback):
        """Makes a value of every parameter one that no step makes, as step 9 is due to be sent."""

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 8:
                with torch.no_grad():
                    for parameter in kwargs["model"].parameters():
                        parameter.view(-1)[0] = 50.0

    return Flip()


def test_a_flipped_bit_of_a_parameter_is_not_sent(transformers: Any, tmp_path: Path) -> None:
    events: list[Event] = []
    with ServedRun(tmp_path, {"east": ""}, inner_steps=INNER_STEPS, **ROUNDS) as served:
        flip = make_flip(transformers)
        trainer = train(
            transformers, served, tmp_path / "out", spies=(flip,), on_event=events.append
        )

    (taken,) = [event for event in events if isinstance(event, PublishedTaken)]
    assert (taken.inner_step, taken.mend) == (10, "moments")
    assert max(float(v.abs().max()) for v in values(trainer.model)) < 2


def test_a_graceful_stop_ends_the_training_with_a_checkpoint(
    transformers: Any, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with ServedRun(tmp_path, {"east": ""}, inner_steps=100_000, **ROUNDS) as served:
        served.hold()
        trainer = train(transformers, served, output, max_steps=100_000)

    assert trainer.outer.is_stopping
    stop_step = trainer.state.global_step
    (leave,) = served.leaves
    assert (leave.exit_code, leave.is_stopped) == (0, True)
    assert leave.reason == f"stopped after inner step {stop_step}"
    assert (output / f"checkpoint-{stop_step}" / "diloco-outer-0.safetensors").is_file()


def test_a_decoupled_run_ends_by_its_tokens_and_its_learning_rate_follows_them(
    transformers: Any, tmp_path: Path
) -> None:
    with ServedRun(
        tmp_path, {"east": ""}, preset="decoupled", inner_steps=INNER_STEPS, **ROUNDS
    ) as served:
        options = {"gradient_accumulation_steps": 2 * ACCUMULATED, "logging_steps": 1}
        with pytest.raises(ConfigError, match=r"set max_steps=config\.most_inner_steps"):
            train(transformers, served, tmp_path / "out", max_steps=INNER_STEPS)
        bound = served.island("east").most_inner_steps
        with pytest.raises(ConfigError, match=r"warmup_steps: .* such as warmup_steps=0\.05"):
            train(transformers, served, tmp_path / "out", max_steps=bound, warmup_steps=3)
        # Its steps take next to no time: more of them fit into a round than in any real run.
        most = 100 * bound
        trainer = train(transformers, served, tmp_path / "out", max_steps=most, **options)

    outer, total = trainer.outer, served.config.total_tokens
    assert outer.is_over and 0 < outer.inner_step == trainer.state.global_step < most
    assert served.reports["east"].tokens >= total
    rates = [each["learning_rate"] for each in trainer.state.log_history if "loss" in each]
    assert rates[0] == 1e-2 and sorted(rates, reverse=True) == rates
    assert rates[-1] < 1e-2 * 4 / INNER_STEPS  # the schedule ends where the run does


def test_arguments_that_would_train_save_or_load_something_else_are_refused_by_name(
    transformers: Any, tmp_path: Path
) -> None:
    with ServedRun(tmp_path, {"east": ""}, inner_steps=INNER_STEPS, **ROUNDS) as served:
        with pytest.raises(ConfigError) as refused:
            train(transformers, served, tmp_path / "out", save_strategy="steps", save_total_limit=1)
        with pytest.raises(ConfigError, match=f"set max_steps={INNER_STEPS}"):
            train(transformers, served, tmp_path / "out", max_steps=3)

    # keep = 2, one that may be unsure, one of a stop and one of a resume.
    for part in ('set save_strategy="no"', "save_total_limit=1", "set save_total_limit=5"):
        assert part in str(refused.value)
