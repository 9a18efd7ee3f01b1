"""`DiLoCoCallback` with a real `lightning.Trainer`, against a real syncer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import diloco
from diloco.errors import ConfigError
from diloco.telemetry.events import Event
from tests.served_run import ServedRun

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),  # of lightning
]

INNER_STEPS = 15
#: Sends after 3, 6, 9, 12, merges 2 steps later: one fragment is in flight at 4 and 12.
ROUNDS = {"inner_steps_per_round": 6, "num_fragments": 2, "overlap_steps": 2}
EVERY = ["checkpoint.every_inner_steps=4"]


@pytest.fixture(scope="module")
def lightning() -> Any:
    """The package, imported when a test needs it and not when tests are collected."""
    return pytest.importorskip("lightning")


def make_module(lightning: Any, *, is_automatic: bool = True) -> Any:
    class Reverse(lightning.LightningModule):
        """Learns to reverse a row; notes the rates and what it is validated with."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = is_automatic
            self.net = torch.nn.Linear(8, 8)
            self.rates: list[float] = []
            self.validated: list[Tensor] = []

        def training_step(self, rows: Tensor) -> Tensor:
            self.rates.append(self.optimizers().param_groups[0]["lr"])
            return (self.net(rows) - rows.flip(-1)).square().mean()

        def validation_step(self, rows: Tensor) -> None:
            self.validated.append(self.net.weight.detach().clone())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: 1 - step / (INNER_STEPS + 1)
            )
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    torch.manual_seed(1)
    return Reverse()


class Rows:
    """Batches that go on where they were, as Lightning asks of a loader that resumes."""

    def __init__(self) -> None:
        self.rows = torch.randn(60, 4, 8, generator=torch.Generator().manual_seed(3))
        self.first = self.next = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Tensor]:
        self.first, first = 0, self.first
        for number in range(first, len(self.rows)):
            self.next = number + 1
            yield self.rows[number]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["next"]


def fit(
    lightning: Any,
    served: ServedRun,
    output: Path,
    *,
    module: Any = None,
    ckpt_path: str | None = None,
    on_event: Callable[[Event], None] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    from diloco.integrations.lightning import DiLoCoCallback

    module = module or make_module(lightning)
    chosen: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_steps": INNER_STEPS,
        "accumulate_grad_batches": 2,
        "limit_val_batches": 1,
        "default_root_dir": output,
        **options,
    }
    with diloco.connect(served.island("east"), served.address) as connection:
        callback = DiLoCoCallback(connection, output, on_event=on_event)
        trainer = lightning.Trainer(callbacks=[callback], **chosen)
        trainer.fit(module, Rows(), Rows(), ckpt_path=ckpt_path)
    return callback.outer, module


def test_a_trainer_trains_validates_saves_and_resumes_bit_for_bit(
    lightning: Any, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with ServedRun(tmp_path, {"east": ""}, EVERY, inner_steps=INNER_STEPS, **ROUNDS) as served:
        outer, module = fit(lightning, served, output)
        whole, digests = module.net.weight.detach().clone(), outer.digests
        assert served.reports["east"].inner_step == INNER_STEPS
        assert list(served.reports["east"].checkpoint_steps) == [4, 8, 12]
        assert module.rates[::2] == pytest.approx(
            [1e-2 * (1 - step / (INNER_STEPS + 1)) for step in range(INNER_STEPS)]
        )

        served.resume(4)
        checkpoint = output / "checkpoint-4" / "trainer.ckpt"
        with pytest.raises(ConfigError, match=r'ckpt_path=".*out/checkpoint-4/trainer.ckpt"'):
            fit(lightning, served, output)
        resumed, module = fit(lightning, served, output, ckpt_path=str(checkpoint))

    assert len(module.rates) == 2 * (INNER_STEPS - 4)
    assert resumed.digests == digests
    assert torch.equal(module.net.weight, whole)


def test_a_decoupled_run_ends_by_its_tokens_and_validates_what_is_published(
    lightning: Any, tmp_path: Path
) -> None:
    with ServedRun(
        tmp_path, {"east": ""}, preset="decoupled", inner_steps=INNER_STEPS, **ROUNDS
    ) as served:
        outer, module = fit(lightning, served, tmp_path / "out", limit_train_batches=8)

    assert outer.is_over and served.reports["east"].tokens >= served.config.total_tokens
    rates = module.rates[::2]
    assert rates[0] == 1e-2 and sorted(rates, reverse=True) == rates
    assert rates[-1] < 1e-2 * 4 / INNER_STEPS  # the schedule ends where the run does
    assert len(module.validated) > INNER_STEPS // 4


def test_what_would_train_something_else_is_refused_by_name(lightning: Any, tmp_path: Path) -> None:
    manual = make_module(lightning, is_automatic=False)
    with ServedRun(tmp_path, {"east": ""}, inner_steps=INNER_STEPS, **ROUNDS) as served:
        with pytest.raises(ConfigError, match="automatic_optimization = False"):
            fit(lightning, served, tmp_path / "out", module=manual, accumulate_grad_batches=1)
        with pytest.raises(ConfigError, match=f"set max_steps={INNER_STEPS}"):
            fit(lightning, served, tmp_path / "out", max_steps=3)
