"""A codec of another package: its defects are CodecErrors, and end no syncer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diloco.compression.added import AddedCodec
from diloco.errors import CodecError
from diloco.protocol.rounds.terms import OutcomeKind
from diloco.transport.calls.loopback import run_virtual
from tests.own_parts import install
from tests.raw_island import NUMEL, founded
from tests.virtual_run import Setting

SOURCE = """
import torch

class Plain:
    name, publishes_values, has_zero = "plain", False, True

    def wire_bytes(self, numel): return 4 * numel
    def encode(self, values, key=0): return values.clone().view(torch.uint8)
    def decode(self, payload, numel): return payload.clone().view(torch.float32)
    def check(self, payload, numel): pass

class Failing(Plain):
    name = "failing"
    def decode(self, payload, numel):
        values = super().decode(payload, numel)
        return {}["never written"] if values[0] == 13 else values

PLAIN, FAILING = Plain(), Failing()
"""


class Plain:
    """Four bytes a value; what a test replaces is wrong."""

    name, publishes_values, has_zero = "plain", False, True

    def wire_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, values: Tensor, key: int = 0) -> Tensor:
        return values.clone().view(torch.uint8)

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        return payload.clone().view(torch.float32)

    def check(self, payload: Tensor, numel: int) -> None:
        pass


def failing(*_: object) -> Tensor:
    raise KeyError("never written")


@pytest.mark.parametrize(
    ("method", "instead", "words"),
    [
        ("encode", failing, "the plain of acme 1.0 raised KeyError: 'never written'"),
        ("encode", lambda values, key: torch.zeros(3, dtype=torch.uint8), "its wire_bytes says 16"),
        ("encode", lambda values, key: values, "made torch.float32 (4,) of 4 values"),
        ("encode", lambda values, key: None, "made a NoneType of 4 values"),
        ("encode", lambda v, key: torch.zeros(32, dtype=torch.uint8)[::2], "not contiguous"),
        ("decode", failing, "raised KeyError"),
        ("decode", lambda payload, numel: [0.0] * numel, "decoded a list"),
        ("decode", lambda payload, numel: torch.zeros(5), "decoded torch.float32 (5,), and 4"),
        ("decode", lambda payload, numel: torch.full((4,), torch.inf), "finite values in float32"),
        ("check", failing, "raised KeyError"),
        ("check", lambda payload, numel: sys.exit(3), "raised SystemExit: 3"),
        ("wire_bytes", failing, "raised KeyError"),
        ("wire_bytes", lambda numel: "16", "says '16' bytes for 4 values"),
    ],
)
def test_what_is_wrong_in_it_is_a_codec_error_that_names_it(
    method: str, instead: Callable[..., Tensor], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Plain()
    codec = AddedCodec(plain, "plain of acme 1.0")
    payload = codec.encode(torch.ones(4))
    codec.check(payload, 4)
    assert torch.equal(codec.decode(payload, 4), torch.ones(4))
    monkeypatch.setattr(plain, method, instead)

    with pytest.raises(CodecError) as raised:
        codec.check(codec.encode(torch.ones(4)), 4)
        codec.decode(payload, 4)

    assert words in str(raised.value)


def scenario(link: str, path: Path, patch: pytest.MonkeyPatch, *said: float) -> list[object]:
    """How the contributions of two islands end where a codec does not decode 13."""
    (path / "acme_codecs.py").write_text(SOURCE)
    points = {"plain": "acme_codecs:PLAIN", "failing": "acme_codecs:FAILING"}
    install(path / "acme", "acme", "1.0", {"diloco.codecs": points})
    patch.syspath_prepend(path)
    patch.syspath_prepend(path / "acme")
    codecs = {"uplink_codec": "plain", "downlink_codec": "plain", f"{link}_codec": "failing"}
    setting = Setting({"w": [0.0] * NUMEL}, lambda *_: None, path / "run", inner_steps=8, **codecs)

    async def play() -> list[object]:
        _, islands = await founded(setting)
        for island, value in zip(islands, said, strict=True):
            await island.submit(value=value)
            await island.submit(lane_id=1, value=value)
        await asyncio.sleep(10.0)
        return [await island.end() for island in islands]

    return run_virtual(play())


def test_a_payload_that_an_added_codec_does_not_decode_costs_the_round_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = scenario("uplink", tmp_path, monkeypatch, 13.0, 1.0)

    assert ends == [OutcomeKind.REFUSED, OutcomeKind.INCLUDED]


def test_a_syncer_whose_codec_fails_in_a_merge_lets_the_attempt_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = scenario("downlink", tmp_path, monkeypatch, -13.0, -13.0)

    assert ends == [OutcomeKind.EXPIRED] * 2
