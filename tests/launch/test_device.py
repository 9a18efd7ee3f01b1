"""Where a rank computes, on a host with too few devices; on one with enough: tests/gpu."""

import pytest
import torch

from diloco.errors import ConfigError
from diloco.launch.device import backend_of, rank_device
from diloco.launch.job import Job

#: More ranks than any host has devices.
CROWDED = Job(70, 100, "", local_rank=70, num_local_ranks=100)


@pytest.mark.parametrize("asked", ["auto", "cpu"])
def test_ranks_without_a_device_each_compute_on_the_processor(asked: str) -> None:
    device = rank_device(asked, CROWDED, island="east")

    assert device == torch.device("cpu")
    assert backend_of(device) == "gloo"


def test_cuda_that_is_not_there_is_refused_by_name() -> None:
    message = (
        r'islands.east.device = "cuda": this host has \d+ CUDA devices for 100 ranks; set '
        r'islands.east.device = "cpu"'
    )

    with pytest.raises(ConfigError, match=message):
        rank_device("cuda", CROWDED, island="east")
