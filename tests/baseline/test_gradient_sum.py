"""When the gradient hook starts to reduce, and what it leaves in place; one member, no links."""

import torch
from torch import nn

from diloco.baseline.gradients import GradientSum


class Recorder:
    """A reduction over one member, which notes what was known when each chunk became ready."""

    chunk_numel = 64

    def __init__(self, parameters):
        self._parameters, self.seen = parameters, []

    def begin(self, values):
        self.values = values

    def ready(self, chunk):
        with_gradient = sum(parameter.grad is not None for parameter in self._parameters)
        self.seen.append((chunk, with_gradient))

    def finish(self):
        pass


def make():
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    parameters = list(model.parameters())
    recorder = Recorder(parameters)
    return model, parameters, recorder, GradientSum(parameters, recorder, weight=0.5)


def test_a_chunk_is_reduced_before_the_gradients_below_it_are_known():
    model, _, recorder, hook = make()

    hook.begin()
    model(torch.ones(2, 8)).square().sum().backward()

    # Layers of 64 values are chunks of their own; the last layer's gradient comes first.
    assert recorder.seen == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


def test_earlier_micro_batches_are_waited_for_and_counted():
    model, parameters, recorder, hook = make()
    inputs = torch.arange(32.0).view(4, 8) / 32

    model(inputs[:2]).square().sum().backward()
    assert recorder.seen == []
    hook.begin()
    model(inputs[2:]).square().sum().backward()
    hook.finish()

    taken = [parameter.grad.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    for part in (inputs[:2], inputs[2:]):
        model(part).square().sum().backward()
    for parameter, grad in zip(parameters, taken, strict=True):
        assert torch.equal(grad, 0.5 * parameter.grad)


def test_a_parameter_without_a_gradient_gives_zeros_and_holds_nobody_up():
    model, parameters, recorder, hook = make()
    inputs = torch.ones(2, 8)

    for used in (model, model[:3]):  # the second time two layers are left out
        for parameter in parameters:
            parameter.grad = None
        hook.begin()
        used(inputs).square().sum().backward()
        hook.finish()

    assert [chunk for chunk, _ in recorder.seen] == [0, 1, 2, 3, 4] * 2
    assert not parameters[4].grad.any() and not parameters[3].grad.any()
    assert parameters[0].grad.any()
