"""The wire's contract: generated modules are current, and messages keep the rules of the wire."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor

from diloco.protos import baseline_pb2, control_pb2, fragment_pb2, payload_pb2

ROOT = Path(__file__).resolve().parent.parent
PROTOS = sorted(f"diloco/protos/{path.name}" for path in (ROOT / "protos").glob("*.proto"))
FILES = (
    baseline_pb2.DESCRIPTOR,
    control_pb2.DESCRIPTOR,
    fragment_pb2.DESCRIPTOR,
    payload_pb2.DESCRIPTOR,
)


def messages(*suffixes: str, of: tuple[str, ...] = ("control", "fragment")) -> list[object]:
    """All top-level messages whose name ends so, as parameters with ids."""
    return [
        pytest.param(message, id=message.full_name)
        for file in FILES
        if Path(file.name).stem in of
        for message in file.message_types_by_name.values()
        if message.name.endswith(suffixes)
    ]


def test_every_proto_is_tested() -> None:
    assert sorted(file.name for file in FILES) == PROTOS


def test_generated_modules_are_current(tmp_path: Path) -> None:
    options = ["-m", "grpc_tools.protoc", "-I."]
    outputs = ["--python_out", "--pyi_out"]

    subprocess.run(
        [sys.executable, *options, *(f"{option}={tmp_path}" for option in outputs), *PROTOS],
        cwd=ROOT,
        check=True,
    )

    fresh = {path.name: path.read_text("utf-8") for path in (tmp_path / "diloco/protos").iterdir()}
    committed = {path.name: path.read_text("utf-8") for path in (ROOT / "protos").glob("*_pb2.py*")}
    stale = sorted(n for n in fresh | committed if fresh.get(n) != committed.get(n))
    command = " ".join(["python", *options, *(f"{option}=." for option in outputs), *PROTOS])
    assert not stale, f"{stale} differ: with grpcio-tools as in constraints.txt run\n  {command}"


def test_declared_protobuf_is_what_generated_modules_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "protos/control_pb2.py").read_text(encoding="utf-8")
    generated = re.search(r"^# Protobuf Python Version: (\S+)$", text, re.MULTILINE)

    assert generated is not None
    assert f"protobuf>={generated[1]}" in project["dependencies"], (
        "the runtime must not be older than the generated modules"
    )


@pytest.mark.parametrize(
    "enum",
    [pytest.param(e, id=e.full_name) for file in FILES for e in file.enum_types_by_name.values()],
)
def test_enum_starts_at_unspecified(enum: EnumDescriptor) -> None:
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()

    assert enum.values_by_number[0].name == f"{prefix}_UNSPECIFIED"


@pytest.mark.parametrize(
    "message", messages("Request", "Header", "Report", of=("baseline", "control", "fragment"))
)
def test_caller_says_protocol_version_first(message: Descriptor) -> None:
    field = message.fields_by_number.get(1)

    assert field is not None
    assert field.name == "protocol_version"


@pytest.mark.parametrize("message", messages("Request", "Header", of=("fragment",)))
def test_data_message_carries_grant(message: Descriptor) -> None:
    assert "grant" in message.fields_by_name


@pytest.mark.parametrize("message", messages("Reply", "Ack", of=("fragment",)))
def test_syncer_reply_carries_syncer_epoch(message: Descriptor) -> None:
    assert "syncer_epoch" in message.fields_by_name
