"""What other packages add by entry points: found, listed, refused, checked at the join, used."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.compression.registry import get_codec
from diloco.config.classes import identity_json, policy_json
from diloco.config.load import load_config, with_policy
from diloco.config.schema import Config
from diloco.errors import AggregationError, CodecError, ConfigError
from diloco.extensions import extensions
from diloco.forecast.build import build_publication_rules
from diloco.launch.rank.inputs import open_inputs
from diloco.outer.combination import MergeRule, combine, get_rule
from diloco.outer.units import Unit
from diloco.security.security import Security
from diloco.transport.calls.limits import Limits
from diloco.transport.contracts import IncomingCall, Reply
from diloco.transport.errors import HandlerFailed, MessageTooLarge
from diloco.transport.identity import Role
from tests.own_parts import LESSON, install, install_lesson

ROOT = Path(__file__).resolve().parents[1]
RUN = LESSON / "run.toml"
PLAIN = ("outer.uplink_codec=int4", "outer.merge_rule=mean", "transport.kind=grpc")


@pytest.fixture
def lesson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Install the lesson's package and load its run file."""
    for folder in install_lesson(tmp_path / "site"):
        monkeypatch.syspath_prepend(folder)
    return load_config(RUN)


def other_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, points: dict[str, str]
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path / "other", "other", "2.0", {group: points}))


def test_each_part_has_sixty_lines_at_most() -> None:
    parts = [path for path in (LESSON / "own_parts").glob("*.py") if path.stem != "__init__"]

    assert len(parts) == 3
    assert all(len(path.read_text("utf-8").splitlines()) <= 60 for path in parts)


def test_what_is_installed_is_listed(lesson: Config) -> None:
    shown = CliRunner().invoke(app, ["config", "--explain"])

    assert "added: codec 'sign1' of own-parts 1.0 (own_parts.codec:SIGN1)" in shown.output
    assert "added: merge rule 'agreeing' of own-parts 1.0" in shown.output
    assert "added: transport 'zipped' of own-parts 1.0" in shown.output


def test_what_is_not_installed_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RUN)

    message = str(caught.value)
    assert "3 problems" in message
    assert 'outer.uplink_codec: "sign1": is none of float32, float16' in message
    assert "must be installed at every site (diloco config --explain lists it)" in message


@pytest.mark.parametrize(
    ("group", "name", "owners"),
    [
        ("diloco.codecs", "sign1", "other 2.0 and own-parts 1.0"),
        ("diloco.codecs", "int4", "diloco and other 2.0"),
        ("diloco.merge_rules", "mean", "diloco and other 2.0"),
        ("diloco.transports", "grpc", "diloco and other 2.0"),
    ],
)
def test_a_name_of_two_packages_is_refused(
    lesson: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: str,
    name: str,
    owners: str,
) -> None:
    other_package(tmp_path, monkeypatch, group, {name: "other:THING"})

    with pytest.raises(ConfigError, match=f"{name!r} is added by {owners}, .*: uninstall one"):
        load_config(RUN, PLAIN if name != "sign1" else ())


def test_a_clash_of_names_that_nobody_uses_disturbs_nobody(
    lesson: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_package(tmp_path, monkeypatch, "diloco.codecs", {"int8": "other:THING"})

    assert load_config(RUN) == lesson


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("other:THING", "cannot import the codec 'third' of other 2.0 .*No module named 'other'"),
        ("math:pi", "third.* cannot be used: it has no name, publishes_values, has_zero, wire_by"),
        ("own_parts.codec:SIGN1", "third.* cannot be used: it calls itself 'sign1'"),
    ],
)
def test_what_is_no_codec_is_refused(
    lesson: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, message: str
) -> None:
    other_package(tmp_path, monkeypatch, "diloco.codecs", {"third": point})

    with pytest.raises(ConfigError, match=message):
        get_codec("third")


@pytest.mark.parametrize("group", ["codecs", "merge_rules", "transports"])
def test_what_cannot_be_imported_is_said_before_the_text_is_opened(
    lesson: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    key = {"codecs": "uplink_codec", "merge_rules": "merge_rule", "transports": "kind"}[group]
    other_package(tmp_path, monkeypatch, f"diloco.{group}", {"broken": "other:THING"})
    table = "transport" if key == "kind" else "outer"
    config = load_config(RUN, [f"{table}.{key}=broken"])
    monkeypatch.setattr("diloco.launch.rank.inputs.open_data", lambda _: pytest.fail("opened"))

    with pytest.raises(ConfigError, match=r"cannot import the .* 'broken' of other 2.0"):
        open_inputs(config, may_download=False)


def test_a_joining_island_needs_the_same_packages(
    lesson: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_coordinator = policy_json(lesson)
    here = load_config(RUN, PLAIN)

    assert with_policy(here, of_coordinator).outer.uplink_codec == "sign1"
    newer = json.loads(of_coordinator)
    newer["packages"]["diloco.codecs sign1"] = "own-parts 1.1"
    with pytest.raises(ConfigError) as caught:
        with_policy(here, json.dumps(newer))
    assert (
        "codec 'sign1': the coordinator has it of own-parts 1.1, here it is of own-parts 1.0: "
        "pip install own-parts==1.1"
    ) in str(caught.value)

    monkeypatch.setattr(sys, "path", sys.path[2:])
    assert not extensions("diloco.codecs")
    with pytest.raises(ConfigError, match=r"here it is missing: pip install own-parts==1\.0"):
        with_policy(here, of_coordinator)


def test_a_run_of_dilocos_own_parts_says_nothing_of_packages(lesson: Config) -> None:
    plain = load_config(RUN, PLAIN)

    assert "packages" not in json.loads(policy_json(plain))
    assert "packages" not in json.loads(identity_json(lesson))


def test_certificates_are_not_of_another_packages_transport(lesson: Config) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RUN, ("transport.certs=certs", "coordinator.listen=0.0.0.0:4711"))

    assert 'needs kind = "grpc" or "hivemind", and it is "zipped"' in str(caught.value)
    with pytest.raises(ConfigError, match=r"the transport of another package protects is not"):
        load_config(RUN, ("coordinator.listen=0.0.0.0:4711",))


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 4099])
def test_the_codec_gives_signs_and_one_size(lesson: Config, numel: int) -> None:
    codec = get_codec("sign1")
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1))

    payload = codec.encode(values)

    assert payload.shape == (codec.wire_bytes(numel),)
    decoded = codec.decode(payload, numel)
    assert torch.equal(decoded > 0, values >= 0)
    assert numel == 0 or decoded.abs().sum().item() == pytest.approx(
        values.abs().sum().item(), rel=1e-5
    )
    with pytest.raises(CodecError):
        codec.decode(torch.cat((torch.full((4,), 255, dtype=torch.uint8), payload[4:])), numel)
    with pytest.raises(CodecError, match="only finite values"):
        codec.encode(torch.tensor([float("nan")]))


def test_the_merge_rule_counts_who_agrees(lesson: Config) -> None:
    rule, units = build_publication_rules(lesson).merge, [Unit(4, False), Unit(8, True)]
    # Two that point alike and a third that points against them, all of length 1.
    gram = [[1.0, 1.0, -1.0], [1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]]

    merged = combine([gram, gram], units, [1.0, 1.0, 1.0], rule, is_flush=False)

    assert merged.coefficients[0] == pytest.approx((0.5, 0.5, 0.0))
    assert merged.coefficients[1] == pytest.approx((1 / 3, 1 / 3, 1 / 3)), "left to the mean"
    assert get_rule("agreeing")([[0.0]], [0.0]) == [0.0]
    flushed = combine([gram], units[:1], [1.0, 1.0, 1.0], rule, is_flush=True)
    assert flushed.coefficients[0] == pytest.approx((1 / 3, 1 / 3, 1 / 3))


@pytest.mark.parametrize("gives", ["sum", "zeros_of_one"])
def test_coefficients_that_are_not_one_a_contribution_end_the_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gives: str
) -> None:
    (tmp_path / "wrong_rules.py").write_text(
        "def sum(gram, weights): return [float('nan')] * 2\n"
        "def zeros_of_one(gram, weights): return [0.0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    other_package(tmp_path, monkeypatch, "diloco.merge_rules", {"wrong": f"wrong_rules:{gives}"})

    with pytest.raises(AggregationError, match=r"'wrong' gave a unit .* each needs one finite"):
        combine(
            [[[1.0, 0.0], [0.0, 1.0]]],
            [Unit(4, False)],
            [1.0, 1.0],
            MergeRule("wrong"),
            is_flush=False,
        )


def test_the_transport_carries_calls_both_ways(lesson: Config) -> None:
    async def echo(call: IncomingCall) -> Reply:
        payload = await call.read_payload()
        assert call.is_local and call.payload_bytes == len(payload)
        return Reply(call.header[::-1], bytes(payload) * 2)

    async def fail(call: IncomingCall) -> Reply:
        raise ValueError("not today")

    async def talk() -> tuple[Reply, Reply]:
        security = Security.of(lesson, Role.COORDINATOR)
        handlers = {"echo": echo, "fail": fail}
        server = security.server("127.0.0.1:0", handlers, limits=Limits())
        await server.start()
        transport = security.transport(server.address, Role.COORDINATOR)
        try:
            terms: dict[str, Any] = {"deadline_s": 30.0}
            long = await transport.call(
                "echo", b"ab", b"x" * 100_000, max_reply_bytes=1 << 18, **terms
            )
            empty = await transport.call("echo", b"", **terms)
            with pytest.raises(HandlerFailed, match="not today"):
                await transport.call("fail", b"", **terms)
            with pytest.raises(MessageTooLarge, match="200000 bytes was announced; 10 are allowed"):
                await transport.call("echo", b"", b"x" * 100_000, max_reply_bytes=10, **terms)
        finally:
            await transport.close()
            await server.stop(0.0)
        return long, empty

    long, empty = asyncio.run(talk())

    assert (long.header, bytes(long.payload)) == (b"ba", b"x" * 200_000)
    assert (empty.header, bytes(empty.payload)) == (b"", b"")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_of_another_packages_parts_ends_well(tmp_path: Path) -> None:
    paths = [str(path) for path in (*install_lesson(tmp_path / "site"), ROOT)]

    ended = subprocess.run(
        [sys.executable, "-m", "diloco", "local", str(RUN)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )

    assert ended.returncode == 0, ended.stdout + ended.stderr
    words = " ".join(ended.stdout.split())
    assert "digests equal on every island" in words
    assert "recomputed from the retained contributions: 8 bit-equal" in words
