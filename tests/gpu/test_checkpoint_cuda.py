"""Copies of the training state on a real side stream: training goes on, they hold their step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco.checkpoint.checkpoint_writer import CheckpointWriter
from diloco.checkpoint.checkpoints import Checkpoint
from diloco.checkpoint.state_copy import StateCopier
from diloco.trainer.state import kept_tensors, training_tensors
from tests.checkpoint.small_checkpoint import ISLAND, Trained, make_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
#: Cycles of a device that has nothing else to do for about a second.
LONG = 2_000_000_000


def trained_there() -> Trained:
    trained = Trained(num_steps=0)
    trained.model.cuda()
    trained.optimizer = make_optimizer(trained.model)
    step(trained)
    return trained


def step(trained: Trained) -> None:
    gradients(trained)
    trained.optimizer.step()
    trained.optimizer.zero_grad()


def gradients(trained: Trained) -> None:
    inputs = torch.ones(8, 128, device="cuda")
    (trained.model(inputs) - 0.5).square().mean().backward()


def test_training_goes_on_during_a_slow_copy_which_has_the_values_of_its_step(
    tmp_path: Path,
) -> None:
    trained = trained_there()
    copier = StateCopier(trained.optimizer)
    writer = CheckpointWriter(tmp_path, ISLAND, trained.plan(), group=None)
    kept = kept_tensors(trained.model, trained.optimizer)
    for number in (1, 2):  # the first one pins, which waits for the device
        expected = {
            section: {name: values.detach().cpu().clone() for name, values in tensors.items()}
            for section, tensors in training_tensors(trained.model, trained.optimizer).items()
        }
        is_slow = number == 2
        if is_slow:
            copier._stream.submit(lambda: torch.cuda._sleep(LONG))
        part = writer.take(kept, {}, copier=copier, group=None)
        done = copier._stream._done
        assert done is not None
        assert not (is_slow and done.query()), "the training thread has waited for the copy"

        gradients(trained)
        torch.cuda.current_stream().synchronize()
        assert not (is_slow and done.query()), "forward and backward have waited for the copy"
        trained.optimizer.step()
        assert not (is_slow and done.query()), "the host has waited before the update"
        trained.optimizer.zero_grad()
        step(trained)
        writer.save(number, part, about={}, cut=0)

        checkpoint = Checkpoint.open(tmp_path, ISLAND, number)
        for section, tensors in expected.items():
            for name, values in tensors.items():
                assert torch.equal(checkpoint.read(section, name), values), (section, name)
        assert checkpoint.manifest["optimizer_step"] == 2 * number - 1


def test_what_is_let_go_of_during_its_copy_is_nobody_elses_before_its_end() -> None:
    copier, target = StateCopier(trained_there().optimizer), torch.zeros(1 << 20)
    copier.pin(target, "copies for this test")
    copier._stream.submit(lambda: torch.cuda._sleep(LONG // 10))
    copied = copier.copy([(torch.ones(1 << 20, device="cuda"), target)])

    torch.full((1 << 20,), 2.0, device="cuda")
    copied.wait("a copy")

    assert torch.equal(target, torch.ones(1 << 20))


def test_what_was_pinned_is_copied_to_without_waiting_and_may_be_pinned_again() -> None:
    trained = trained_there()
    copier = StateCopier(trained.optimizer)
    for _ in range(2):
        memory = torch.empty(1 << 20)
        copier.pin(memory, "copies for this test")
        assert memory.is_pinned()
        del memory


def test_memory_that_cuda_does_not_pin_is_told_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained = trained_there()
    copier, memory = StateCopier(trained.optimizer), torch.empty(1 << 20)
    copier.pin(memory, "copies for this test")

    copier.pin(memory, "copies for this test")  # twice is refused

    assert "training waits for copies for this test: CUDA does not pin the" in caplog.text
    step(trained)
    torch.cuda.synchronize()
