"""What Linux alone has: another way, or a refusal that says so, where it is missing."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco import durable, system
from diloco.bench.outer_loop import overhead
from diloco.bench.syncer import syncer
from diloco.chaos.plan import load_plan
from diloco.chaos.report import run_plan
from diloco.checkpoint.host_memory import HostMemory
from diloco.errors import ConfigError
from diloco.launch.process.ending import StopRequest
from diloco.telemetry.prometheus import MetricsServer
from diloco.telemetry.protection import Protection

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("memfd_create", "posix_fallocate", "sched_getaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")


@pytest.mark.usefixtures("on_macos")
def test_cpus_are_counted_where_a_process_cannot_ask_for_its_own() -> None:
    assert system.usable_cpus() == os.cpu_count()


@pytest.mark.usefixtures("on_macos")
def test_room_is_taken_where_the_system_cannot_promise_it(tmp_path: Path) -> None:
    descriptor = durable.create(tmp_path / "record")

    durable.reserve(descriptor, 5000)
    durable.write_at(descriptor, 4990, b"x" * 10)

    os.close(descriptor)
    assert (tmp_path / "record").read_bytes() == bytes(4990) + b"x" * 10


def test_what_a_call_gives_only_in_part_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = durable.create(tmp_path / "record")
    durable.write_at(descriptor, 0, b"0123456789")
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda file, num, start: real(file, min(num, 3), start))

    assert durable.read_at(descriptor, 1, 8) == b"12345678"
    assert durable.read_at(descriptor, 7, 100) == b"789", "there is no more"
    os.close(descriptor)


def keep_in_memory() -> None:
    with HostMemory("east", [0]):
        pass


def serve_over_tls() -> None:
    server = MetricsServer(
        "localhost:0",
        list,
        setting="telemetry.prometheus",
        protection=Protection(certificate=lambda: b""),
    )
    asyncio.run(server.start(is_restart=True))


def do_damage() -> None:
    plan = load_plan(ROOT / "configs" / "chaos" / "quick.toml")
    run_plan(plan, Path("nowhere"), StopRequest())


@pytest.mark.usefixtures("on_macos")
@pytest.mark.parametrize(
    ("work", "message"),
    [
        (
            keep_in_memory,
            "islands.east.memory_checkpoint_steps needs Linux, and this is darwin: set it to 0",
        ),
        (serve_over_tls, "telemetry.prometheus = localhost:0 over TLS"),
        (lambda: overhead.run(lambda *_: None), "diloco bench overhead"),
        (lambda: syncer.run(lambda *_: None), "diloco bench syncer"),
        (do_damage, "diloco chaos"),
    ],
    ids=["memory-copies", "metrics-over-tls", "bench-overhead", "bench-syncer", "chaos"],
)
def test_what_only_linux_can_do_is_refused(work: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        work()

    assert " needs Linux, and this is darwin: " in str(refused.value)


@pytest.mark.usefixtures("on_macos")
def test_an_island_without_copies_in_memory_starts() -> None:
    with HostMemory("east", []):
        pass


def test_linux_is_refused_nothing() -> None:
    system.require_linux("anything", "")
