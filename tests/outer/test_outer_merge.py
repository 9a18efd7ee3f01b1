import numpy as np
import pytest
import torch

from diloco.outer.merge import merge_


@pytest.mark.parametrize(
    ("local_mix", "expected"),
    [
        pytest.param(0.0, [4.0, -4.0], id="global"),
        pytest.param(0.25, [3.0, -1.0], id="a quarter local"),
        pytest.param(0.5, [2.0, 2.0], id="half"),
        pytest.param(1.0, [0.0, 8.0], id="local"),
    ],
)
def test_local_mix_weighs_the_local_parameters(local_mix: float, expected: list[float]) -> None:
    local = torch.tensor([0.0, 8.0], requires_grad=True)
    anchor = torch.tensor([4.0, -4.0])

    merge_(local, anchor, local_mix)

    assert local.tolist() == expected
    assert anchor.tolist() == [4.0, -4.0]


def test_zero_copies_every_bit() -> None:
    anchor = torch.tensor([-0.0, 1e-42, 3e38, float("inf")])
    local = torch.full((4,), float("nan"))

    merge_(local, anchor, 0.0)

    assert local.view(torch.int32).tolist() == anchor.view(torch.int32).tolist()


def test_one_leaves_every_bit() -> None:
    local = torch.tensor([-0.0, 1e-42, float("inf")])
    before = local.clone()

    merge_(local, torch.full((3,), float("nan")), 1.0)

    assert local.view(torch.int32).tolist() == before.view(torch.int32).tolist()


@pytest.mark.parametrize("local_mix", [0.0, 0.3])
def test_a_strided_view_is_merged_in_its_place(local_mix: float) -> None:
    parameter = torch.arange(24.0).reshape(4, 6)
    untouched = parameter[:, 3:].clone()
    view = parameter[:, :3].t()
    anchor = torch.full((3, 4), 100.0)
    contiguous = view.clone(memory_format=torch.contiguous_format)
    merge_(contiguous, anchor, local_mix)

    merge_(view, anchor, local_mix)

    assert torch.equal(parameter[:, :3], contiguous.t())
    assert torch.equal(parameter[:, 3:], untouched)


def test_products_are_rounded_before_they_are_added() -> None:
    generator = torch.Generator().manual_seed(7)
    local, anchor = torch.randn(2, 10_000, generator=generator)
    expected = local.numpy() * np.float32(0.3) + anchor.numpy() * np.float32(1 - 0.3)

    merge_(local, anchor, 0.3)

    assert np.array_equal(local.numpy(), expected)


@pytest.mark.parametrize("local_mix", [-0.1, 1.1, float("nan")])
def test_a_mix_outside_0_to_1_is_refused(local_mix: float) -> None:
    with pytest.raises(ValueError, match=r"outer\.local_mix = .* outside \[0, 1\]"):
        merge_(torch.zeros(1), torch.zeros(1), local_mix)


@pytest.mark.parametrize(
    "anchor",
    [
        pytest.param(torch.zeros(1), id="broadcast"),
        pytest.param(torch.zeros(2, dtype=torch.float64), id="dtype"),
    ],
)
def test_other_shapes_and_dtypes_are_refused(anchor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="both must be float32 of one shape"):
        merge_(torch.zeros(2), anchor, 0.0)
