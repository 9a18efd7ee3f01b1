"""Where a rank computes, on a host with too few devices; on one with enough: tests/gpu."""

import re

import pytest
import torch

from diloco.config.mesh import MeshConfig
from diloco.errors import ConfigError
from diloco.launch.rank.device import (
    backend_of,
    capability_problem,
    check_async_tp,
    check_precision,
    rank_device,
)
from diloco.launch.rank.job import Job

#: More ranks than any host has devices.
CROWDED = Job(70, 100, "", local_rank=70, num_local_ranks=100)


@pytest.mark.parametrize("asked", ["auto", "cpu"])
def test_ranks_without_a_device_each_compute_on_the_processor(asked: str, caplog) -> None:
    device = rank_device(asked, CROWDED, island="east")

    assert ("trains on CPUs; set it to" in caplog.text) == (asked == "auto")
    assert device == torch.device("cpu")
    assert backend_of(device) == "gloo"


def test_cuda_that_is_not_there_is_refused_by_name() -> None:
    message = (
        r'islands.east.device = "cuda": this host has \d+ CUDA devices for 100 ranks; set '
        r'islands.east.device = "cpu"'
    )

    with pytest.raises(ConfigError, match=message):
        rank_device("cuda", CROWDED, island="east")


@pytest.mark.parametrize(
    ("precision", "capability", "words"),
    [
        ("float8-rowwise", (8, 9), ""),
        ("float8-tensorwise", (8, 0), r'needs .* 8.9 \(Ada .*A100 has 8.0; set .*"bfloat16"'),
        ("mxfp8", (10, 0), ""),
        ("mxfp8", (9, 0), r'10.0 \(Blackwell\), and A100 has 9.0; set it to "float8-rowwise"'),
        ("mxfp8", (8, 0), 'set it to "bfloat16"'),
    ],
    ids=["enough", "too-old", "blackwell", "hopper", "ampere"],
)
def test_what_a_device_lacks_is_said_with_what_it_can_do(precision, capability, words) -> None:
    problem = capability_problem(precision, "A100", capability)

    assert bool(problem) == bool(words)
    assert re.search(words, problem)


def test_float8_on_a_processor_is_refused_by_name() -> None:
    check_precision("bfloat16", torch.device("cpu"), island="east")

    message = (
        'islands.east.precision = "mxfp8": needs compute capability 10.0 .*the CPU has none; set'
    )
    with pytest.raises(ConfigError, match=message):
        check_precision("mxfp8", torch.device("cpu"), island="east")


def test_collectives_are_not_hidden_without_devices_that_share_memory() -> None:
    cpu, cuda, pair = torch.device("cpu"), torch.device("cuda"), Job(0, 3, "", num_local_ranks=3)
    check_async_tp(MeshConfig(tp=2), cpu, pair, island="east")

    with pytest.raises(
        ConfigError, match=r"east.mesh.async_tp = true: .*on the cpu; set it to fal"
    ):
        check_async_tp(MeshConfig(tp=2, async_tp=True), cpu, pair, island="east")
    with pytest.raises(ConfigError, match=r"tp = 2 ranks .*on one host, and this one has 3; set"):
        check_async_tp(MeshConfig(tp=2, async_tp=True), cuda, pair, island="east")
