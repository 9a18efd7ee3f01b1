import pytest
import torch

from diloco.outer.pseudo_gradient import largest_change, pseudo_gradient_


def test_it_points_from_local_to_anchor() -> None:
    anchor = torch.tensor([1.0, 2.0, -3.0])
    local = torch.tensor([0.5, 4.0, -3.0])

    delta = pseudo_gradient_(local, anchor)

    assert delta.tolist() == [0.5, -2.0, 0.0]
    assert delta is local
    assert anchor.tolist() == [1.0, 2.0, -3.0]


@pytest.mark.parametrize(
    ("anchor", "local"),
    [
        pytest.param(torch.zeros(2), torch.zeros(1), id="broadcast"),
        pytest.param(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), id="dtype"),
        pytest.param(torch.zeros(2).double(), torch.zeros(2).double(), id="both float64"),
    ],
)
def test_other_shapes_and_dtypes_are_refused(anchor: torch.Tensor, local: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="both must be float32 of one shape"):
        pseudo_gradient_(local, anchor)


@pytest.mark.parametrize("numel", [0, 1, 300_001])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_largest_change_is_found_wherever_it_is(numel: int, sign: float) -> None:
    before = torch.linspace(-1.0, 1.0, numel)
    after = before.clone()
    if numel:
        after[-1] += sign

    assert largest_change(before, after) == pytest.approx(float(numel > 0))
