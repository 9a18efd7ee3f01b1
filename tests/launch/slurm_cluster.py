"""A Slurm cluster of this machine alone: its three daemons, with all their files in a directory."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from tests.waiting import exit_code, run_command, wait_until

DAEMONS = ("munged", "slurmctld", "slurmd")
#: CPUs that the node is said to have, so that jobs of this machine run at the same time.
_CPUS = 8
_CONFIGURATION = """
ClusterName=trial
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
NodeName=localhost NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory_mib} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """A running cluster.

    Attributes:
        environment: What its commands need.
    """

    def __init__(self, root: Path, environment: Mapping[str, str]) -> None:
        self.root = root
        self.environment = environment

    def run(self, *command: str) -> str:
        """Run a command of the cluster to its end; return what it says."""
        ended = run_command(command, 60, self.environment)
        assert ended.returncode == 0, (command, ended.stdout, ended.stderr)
        return ended.stdout

    def job(self, name: str) -> dict[str, str]:
        """Return what the cluster knows of the newest job of a name."""
        blocks = self.run("scontrol", "show", "job").split("\n\n")
        known = [dict(w.split("=", 1) for w in block.split() if "=" in w) for block in blocks]
        jobs = [each for each in known if each.get("JobName") == name]
        return max(jobs, key=lambda each: int(each["JobId"]), default={})


@contextmanager
def slurm_cluster(environment: Mapping[str, str]) -> Iterator[SlurmCluster]:
    """Run a cluster whose jobs get these variables; end it with all its jobs."""
    root = Path(mkdtemp(prefix="slurm-"))  # short: a socket's path has at most 107 bytes
    ports = _free_ports(2)
    (root / "munge.key").write_bytes(os.urandom(128))
    (root / "munge.key").chmod(0o600)
    (root / "slurm.conf").write_text(
        _CONFIGURATION.format(
            root=root,
            user=getpass.getuser(),
            controller_port=ports[0],
            node_port=ports[1],
            cpus=_CPUS,
            memory_mib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20,
        )
    )
    variables = {**environment, "SLURM_CONF": str(root / "slurm.conf")}
    of_munged = {
        name: f"--{name}={root}/munge.{file}"
        for name, file in (("key-file", "key"), ("socket", "sock"), ("seed-file", "seed"))
    }
    files = [f"--pid-file={root}/munged.pid", f"--log-file={root}/munged.log"]
    commands = {
        "munged": ["munged", "--foreground", "--force", *of_munged.values(), *files],
        "slurmctld": ["slurmctld", "-D", "-i"],
        "slurmd": ["slurmd", "-D", "-N", "localhost"],
    }
    daemons = []
    cluster = SlurmCluster(root, variables)
    try:
        for name, command in commands.items():
            with open(root / f"{name}.out", "wb") as output:
                daemons.append(
                    subprocess.Popen(command, env=variables, stdout=output, stderr=output)
                )
            if name == "munged":
                wait_until((root / "munge.sock").exists)

        def is_up() -> bool:
            asked = run_command(["sinfo", "--noheader", "--format=%T"], 60, variables)
            return asked.stdout.split() == ["idle"]

        wait_until(is_up, what=lambda: (root / "slurmctld.out").read_text()[-2000:])
        yield cluster
    finally:
        with suppress(AssertionError):
            cluster.run("scancel", "--user", getpass.getuser())
            wait_until(lambda: not cluster.run("squeue", "--noheader"))
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(daemons):
            with suppress(AssertionError):
                exit_code(daemon, 30)
            daemon.kill()
            daemon.wait()
        shutil.rmtree(root, ignore_errors=True)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
