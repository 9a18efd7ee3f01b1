"""What a rank takes from its environment."""

import pytest
import torch.distributed as dist

from diloco.errors import ConfigError
from diloco.launch.rank.job import Job, meet

JOB = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_job_is_read_from_the_environment() -> None:
    alone = Job(1, 2, "env://", local_rank=1, num_local_ranks=2)
    spread = Job(1, 2, "env://", local_rank=0, num_local_ranks=1)

    assert Job.from_environment(JOB) == alone
    assert Job.from_environment(JOB | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) == spread


def test_a_rendezvous_of_its_own_needs_no_master() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "9", "LOCAL_WORLD_SIZE": "9"}

    job = Job.from_environment(environ, rendezvous="tcp://x:1", num_hosts=2)

    assert job == Job(3, 4, "tcp://x:1", num_hosts=2, local_rank=1, num_local_ranks=2)


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
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "3"),
    ],
)
def test_wrong_variable_is_refused_by_name(name: str, value: str | None) -> None:
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environ = {key: text for key, text in (JOB | local).items() if key != name}
    if value is not None:
        environ[name] = value

    with pytest.raises(ConfigError, match=name):
        Job.from_environment(environ)


def test_island_of_one_rank_has_a_process_group_only_to_cast_parameters() -> None:
    meet(Job(0, 1, "env://"))
    assert not dist.is_initialized()

    meet(Job(0, 1, "env://"), is_cast=True)
    assert dist.get_world_size() == 1
    dist.destroy_process_group()
