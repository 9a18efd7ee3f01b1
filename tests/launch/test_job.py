"""What a rank takes from its environment."""

import pytest
import torch.distributed as dist

from diloco.errors import ConfigError
from diloco.launch.job import Job, meet

JOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_job_is_read_from_the_environment() -> None:
    assert Job.from_environment(JOB) == Job(1, 2, "env://")


def test_a_rendezvous_of_its_own_needs_no_master() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2"}

    assert Job.from_environment(environ, rendezvous="file:///x") == Job(1, 2, "file:///x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", None),
        ("RANK", "2"),
        ("RANK", "-1"),
        ("RANK", "first"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", None),
        ("MASTER_ADDR", None),
        ("MASTER_PORT", None),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
    ],
)
def test_wrong_variable_is_refused_by_name(name: str, value: str | None) -> None:
    environ = {key: text for key, text in JOB.items() if key != name}
    if value is not None:
        environ[name] = value

    with pytest.raises(ConfigError, match=name):
        Job.from_environment(environ)


def test_island_of_one_rank_has_no_process_group() -> None:
    meet(Job(0, 1, "env://"))

    assert not dist.is_initialized()
