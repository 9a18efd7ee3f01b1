"""Streams, events and compiled blocks of a CUDA device: what a CPU has none of, or others."""

from __future__ import annotations

import pytest
import torch

from diloco.compression.compiled import can_compile
from diloco.config.compute import Compute
from diloco.config.mesh import MeshConfig
from diloco.device_thread import DeviceThread
from diloco.trainer.parallel.mesh import make_mesh
from tests.trainer.small_island import make_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = torch.device("cuda", 0)
#: Cycles of a device that has nothing else to do for about a second.
LONG = 2_000_000_000


def test_a_device_thread_begins_when_what_was_launched_before_is_there() -> None:
    values = torch.zeros(1 << 20, device=DEVICE)

    torch.cuda._sleep(LONG // 10)
    values.add_(1)
    copied = DeviceThread("copies").submit(DEVICE, values.clone).result()

    assert torch.equal(copied.cpu(), torch.ones(1 << 20))


def test_training_goes_on_next_to_a_device_thread() -> None:
    values, thread = torch.zeros(8, device=DEVICE), DeviceThread("long work")
    thread.submit(DEVICE, values.add, 1).result()  # makes thread and stream

    work = thread.submit(DEVICE, torch.cuda._sleep, LONG)
    values.add_(1)
    torch.cuda.current_stream().synchronize()

    assert not work.done()
    work.result()
    assert values.tolist() == [1.0] * 8


def test_figures_of_a_step_wait_for_nothing_that_was_launched_later() -> None:
    trainer = make_trainer(make_mesh(DEVICE, MeshConfig()))
    trainer.inner_step(0).read()

    launched = trainer.inner_step(1)
    torch.cuda._sleep(LONG)
    metrics = launched.read()

    assert not torch.cuda.current_stream().query(), "the device has waited for the figures"
    assert not launched.is_known and metrics.inner_step == 2
    assert metrics.duration_s > 0 and metrics.loss < 6.0  # from 5.5 = ln 256


@pytest.mark.skipif(not can_compile("cuda"), reason="no triton")
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")  # of the compiler, on what the device could do besides
def test_compiled_blocks_train_as_those_that_are_not() -> None:
    mesh = make_mesh(DEVICE, MeshConfig())
    compiled = make_trainer(mesh, compute=Compute(compile_backend="inductor"))
    expected = make_trainer(mesh)

    for step in range(4):
        # Fused kernels sum in another order.
        assert compiled.inner_step(step).read().loss == pytest.approx(
            expected.inner_step(step).read().loss, abs=1e-4
        )
