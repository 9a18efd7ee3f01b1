import numpy as np
import pytest
import torch

from diloco.errors import ConfigError
from diloco.outer.optimizer import OuterOptimizer, flush_step_


def make(**changes: object) -> OuterOptimizer:
    options: dict = {"name": "nesterov", "lr": 0.5, "momentum": 0.5, "momentum_ramp_rounds": 0}
    return OuterOptimizer(**(options | changes))


@pytest.mark.parametrize(
    ("name", "thetas"),
    [
        # buffer: 8, then 0.5 * 8 - 4 = 0. Exact in float32.
        pytest.param("nesterov", [100 - 0.5 * (8 + 4), 94 - 0.5 * (-4 + 0)], id="nesterov"),
        pytest.param("momentum", [100 - 0.5 * 8, 96 - 0.5 * 0], id="momentum"),
        pytest.param("sgd", [100 - 0.5 * 8, 96 - 0.5 * -4], id="sgd"),
    ],
)
def test_two_outer_steps_by_hand(name: str, thetas: list[float]) -> None:
    optimizer = make(name=name)
    theta, buffer = torch.tensor([100.0]), torch.tensor([0.0])
    seen = []

    for version, delta in enumerate([8.0, -4.0]):
        optimizer.step_(theta, buffer, torch.tensor([delta]), version=version)
        seen.append(theta.item())

    assert seen == thetas
    assert buffer.item() == 0.0


def test_outer_sgd_with_lr_1_takes_the_islands_mean() -> None:
    theta, buffer = torch.tensor([5.0]), torch.tensor([0.0])

    make(name="sgd", lr=1.0).step_(theta, buffer, torch.tensor([2.0]), version=0)

    assert theta.item() == 3.0


@pytest.mark.parametrize(
    ("ramp", "expected"),
    [
        pytest.param(0, [0.8, 0.8, 0.8], id="no ramp"),
        pytest.param(1, [0.0, 0.8, 0.8], id="one round"),
        pytest.param(4, [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 0.8], id="four rounds"),
    ],
)
def test_momentum_grows_with_the_version(ramp: int, expected: list[float]) -> None:
    optimizer = make(momentum=0.8, momentum_ramp_rounds=ramp)

    assert [optimizer.momentum_at(v) for v in range(len(expected))] == expected


def test_momentum_falls_in_the_last_rounds_and_arrives_at_the_last_outer_step() -> None:
    # Of 14 rounds the last is the flush, and floor(14 * 3 / 10) = 4 steps before it fall.
    optimizer = make(momentum=0.75, momentum_ramp_rounds=2, last_momentum=0.25, num_rounds=14)

    momenta = [optimizer.momentum_at(version) for version in range(15)]

    assert momenta == [0.0, 0.375, *[0.75] * 7, 0.625, 0.5, 0.375, 0.25, 0.25, 0.25]
    # A run of fewer rounds than one of them to fall in keeps its momentum.
    assert make(last_momentum=0.25, num_rounds=3).momentum_at(1) == 0.5


def test_the_buffer_takes_in_the_pseudo_gradient_even_without_momentum() -> None:
    optimizer = make(momentum_ramp_rounds=2)
    theta, buffer = torch.tensor([1.0]), torch.tensor([6.0])

    optimizer.step_(theta, buffer, torch.tensor([4.0]), version=0)

    assert buffer.item() == 4.0
    assert theta.item() == 1.0 - 0.5 * 4.0


@pytest.mark.parametrize("name", ["nesterov", "momentum", "sgd"])
def test_it_equals_torch_sgd(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    theta = torch.randn(1000, generator=generator)
    reference = theta.clone().requires_grad_()
    sgd = torch.optim.SGD(
        [reference],
        lr=0.7,
        momentum=0.0 if name == "sgd" else 0.9,
        nesterov=name == "nesterov",
    )
    optimizer = make(name=name, lr=0.7, momentum=0.9)
    buffer = torch.zeros_like(theta)
    largest = 0.0

    for version in range(8):
        delta = torch.randn(1000, generator=generator)
        reference.grad = delta.clone()
        sgd.step()
        optimizer.step_(theta, buffer, delta, version=version)
        largest = max(largest, *(t.abs().max().item() for t in (theta, buffer)))

    # Both round at most five times a step (two products and sums, one product), each time by at
    # most 2^-24 of a number below 4 * largest; an error of the buffer lasts 1 / (1 - 0.9) steps.
    tolerance = 2 * 8 * 5 * 10 * 2.0**-24 * 4 * largest
    assert (theta - reference.detach()).abs().max().item() <= tolerance < 1e-2


def test_every_product_is_rounded_before_it_is_added() -> None:
    generator = torch.Generator().manual_seed(9)
    theta, buffer, delta = torch.randn(3, 10_000, generator=generator)
    lr, mu = np.float32(0.7), np.float32(0.9 * (3 / 5))
    t, b, d = (x.numpy().copy() for x in (theta, buffer, delta))
    b = mu * b + d
    t = t - lr * (d + mu * b)

    make(lr=0.7, momentum=0.9, momentum_ramp_rounds=5).step_(theta, buffer, delta, version=3)

    assert np.array_equal(buffer.numpy(), b)
    assert np.array_equal(theta.numpy(), t)
    assert np.array_equal(delta.numpy(), d)


ADAM = make(name="adam", lr=0.5, momentum=0.0, betas=(0.5, 0.75), eps=1.0)


def test_two_outer_steps_of_adam_by_hand() -> None:
    theta, first, second = torch.tensor([100.0]), torch.tensor([0.0]), torch.tensor([0.0])

    ADAM.step_(theta, first, torch.tensor([8.0]), second, version=0)

    # Moments 4 and 16, corrected 8 and 64: a step of 0.5 * 8 / (8 + 1).
    assert (first.item(), second.item()) == (4.0, 16.0)
    assert theta.item() == pytest.approx(100 - 4 / 9, abs=2.0**-17)

    theta.fill_(100.0)
    ADAM.step_(theta, first, torch.tensor([-4.0]), second, version=1)

    # Moments 2 - 2 = 0 and 12 + 4 = 16: the first, and so the step, is zero.
    assert (first.item(), second.item(), theta.item()) == (0.0, 16.0, 100.0)


def test_it_equals_torch_adam() -> None:
    generator = torch.Generator().manual_seed(6)
    theta = torch.randn(1000, generator=generator)
    reference = theta.clone().requires_grad_()
    adam = torch.optim.Adam([reference], lr=0.3, betas=(0.9, 0.95), eps=0.1)
    optimizer = make(name="adam", lr=0.3, momentum=0.0, betas=(0.9, 0.95), eps=0.1)
    first, second = torch.zeros_like(theta), torch.zeros_like(theta)
    distance = 0.0

    for version in range(8):
        delta = torch.randn(1000, generator=generator)
        reference.grad = delta.clone()
        before = theta.clone()
        adam.step()
        optimizer.step_(theta, first, delta, second, version=version)
        distance += float((theta - before).abs().max())

    # Moments round thrice a step, a step is made of five more roundings, each of 2^-24 of it; what
    # cancels in a first moment is at most eight times what is left of its largest.
    tolerance = 8 * (3 * 8 + 5) * 2.0**-24 * distance + 8 * 2.0**-24 * 8
    assert (theta - reference.detach()).abs().max().item() <= tolerance < 2e-4


def test_every_product_of_adam_is_rounded_before_it_is_added() -> None:
    generator = torch.Generator().manual_seed(9)
    theta, first, delta = torch.randn(3, 10_000, generator=generator)
    second = torch.rand(10_000, generator=generator)
    t, m, d, s = (x.numpy().copy() for x in (theta, first, delta, second))
    f = np.float32
    m = f(0.9) * m + f(1 - 0.9) * d
    s = f(0.95) * s + f(1 - 0.95) * (d * d)
    divisor = np.sqrt(s * f(1 / (1 - 0.95**4))) + f(0.1)
    t = t - m * f(0.3 / (1 - 0.9**4)) / divisor

    make(name="adam", lr=0.3, momentum=0.0).step_(theta, first, delta, second, version=3)

    for values, expected in ((first, m), (second, s), (theta, t)):
        assert np.array_equal(values.numpy(), expected)


def test_a_second_moment_is_of_adam_alone() -> None:
    zeros = torch.zeros(2)

    with pytest.raises(ValueError, match="outer step of adam: second moment is None"):
        ADAM.step_(zeros, zeros, zeros, version=0)
    with pytest.raises(ValueError, match="outer step of nesterov: second moment is"):
        make().step_(zeros, zeros, zeros, zeros, version=0)


def test_the_flush_subtracts_the_mean() -> None:
    theta = torch.tensor([1.0, 2.0])

    flush_step_(theta, torch.tensor([0.25, -1.0]))

    assert theta.tolist() == [0.75, 3.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"name": "rmsprop"}, r"outer\.optimizer\.name = 'rmsprop'", id="name"),
        pytest.param({"lr": 0.0}, r"outer\.optimizer\.lr = 0\.0", id="zero lr"),
        pytest.param({"lr": float("nan")}, r"outer\.optimizer\.lr = nan", id="NaN lr"),
        pytest.param({"lr": float("inf")}, r"outer\.optimizer\.lr = inf", id="infinite lr"),
        pytest.param({"momentum": 1.0}, r"momentum = 1\.0 must be in \[0, 1\)", id="momentum 1"),
        pytest.param({"momentum": -0.1}, r"momentum = -0\.1", id="negative momentum"),
        pytest.param({"momentum": float("nan")}, r"momentum = nan", id="NaN momentum"),
        pytest.param(
            {"last_momentum": 1.0}, r"momentum\[1\] = 1\.0 must be in", id="last momentum"
        ),
        pytest.param({"betas": (0.9, 1.0)}, r"betas\[1\] = 1\.0 must be in", id="beta"),
        pytest.param({"eps": 0.0}, r"eps = 0\.0 must be finite and > 0", id="eps"),
        pytest.param({"momentum_ramp_rounds": -1}, r"momentum_ramp_rounds = -1", id="ramp"),
    ],
)
def test_impossible_constants_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def test_other_shapes_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="all must be float32 of one shape"):
        make().step_(torch.zeros(2), torch.zeros(2), torch.zeros(1), version=0)
    with pytest.raises(ValueError, match="all must be float32 of one shape"):
        flush_step_(torch.zeros(2).double(), torch.zeros(2).double())
