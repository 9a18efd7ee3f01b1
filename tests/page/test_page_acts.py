"""Acts of the page: previewed, confirmed once, by whom they were shown; as the commands do."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.errors import ConfigError
from diloco.page.acts import ACTS, PREVIEW_S, Previews, preview_of
from diloco.page.sources import LOOK_S
from diloco.protos.control_pb2 import IslandStatus, OperateReply, OperateRequest, StatusReply
from diloco.transport.contracts import IncomingCall, Reply
from tests.guarded_server import serving
from tests.page.page_client import Answer, ask

TOKEN = "t" * 40
ADDRESS = "127.0.0.1:29400"
FORMS = {
    "pause": {},
    "unpause": {},
    "set": {"key": "outer.grace", "value": "10 s"},
    "drain": {"island": "eu-west"},
    "kick": {"island": "eu-west", "reason": "it's broken; $(reboot)", "undo": "on"},
    "repair": {"fragment": "3", "island": "eu-west"},
    "move": {"fragments": "3,4", "to": "us"},
    "backup": {"directory": "/backups/my run"},
    "stop": {"now": "on"},
}


@pytest.mark.parametrize("command", FORMS)
def test_an_act_is_what_its_command_does(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, Mapping[str, str]]] = []

    def send(address: str, name: str, arguments: Mapping[str, str], *_: object) -> None:
        assert address == ADDRESS
        sent.append((name, arguments))

    def repair(address: str, fragment: int, island: str, *_: object) -> None:
        send(address, "repair", {"fragment": str(fragment), "island": island})

    monkeypatch.setattr("diloco.cli.operate.operate.send_operation", send)
    monkeypatch.setattr("diloco.cli.operate.repair.repair_from_island", repair)
    preview = preview_of({"command": command} | FORMS[command], 0, "demo", ADDRESS)

    done = CliRunner().invoke(app, shlex.split(preview.line)[1:])

    assert done.exit_code == 0, done.output
    assert sent == [(command, preview.arguments)]


def test_every_act_has_a_form_here() -> None:
    assert [act.command for act in ACTS] == list(FORMS)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"command": "revoke"}, "no such act"),
        ({}, "no such act"),
        ({"command": "drain"}, "drain needs: island"),
        ({"command": "set", "key": "a\nb", "value": "1"}, "Key: at most 300 characters"),
        ({"command": "set", "key": "a" * 301, "value": "1"}, "Key: at most 300 characters"),
    ],
)
def test_what_is_no_form_is_refused(form: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        preview_of(form, 0, "demo", ADDRESS)


def test_a_preview_is_confirmed_once_by_whom_it_was_shown_and_in_time() -> None:
    previews, drain = Previews(), {"command": "drain", "island": "eu"}
    preview = preview_of(drain, 0, "demo", ADDRESS)
    previews.keep("n", preview, "me", 0.0)
    for drawn, number, session, typed, now in (
        ("m", 0, "me", "eu", 1.0),
        ("n", 1, "me", "eu", 1.0),
        ("n", 0, "you", "eu", 1.0),
        ("n", 0, "me", "us", 1.0),
        ("n", 0, "me", "", 1.0),
        ("n", 0, "me", "eu", PREVIEW_S + 1),
    ):
        with pytest.raises(ConfigError):
            previews.take(drawn, number, session, typed, now)
    assert previews.take("n", 0, "me", " eu ", 1.0) is preview
    with pytest.raises(ConfigError, match="already"):
        previews.take("n", 0, "me", "eu", 1.0)


def test_previews_that_nobody_confirms_take_bounded_room() -> None:
    previews = Previews()
    preview = preview_of({"command": "pause"}, 0, "demo", ADDRESS)
    for number in range(1000):
        previews.keep(str(number), preview, "me", 0.0)
    with pytest.raises(ConfigError):
        previews.take("0", 0, "me", "", 1.0)
    assert previews.take("999", 0, "me", "", 1.0) is preview


class Operated:
    """A coordinator that does what it is told, and refuses to drain."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, dict[str, str]]] = []
        self.run = "demo"

    async def status(self, _: IncomingCall) -> Reply:
        islands = [IslandStatus(island="eu-west", incarnation=1, lease="active")]
        reply = StatusReply(run=self.run, state="running", islands=islands)
        return Reply(reply.SerializeToString())

    async def operate(self, call: IncomingCall) -> Reply:
        request = OperateRequest.FromString(call.header)
        self.commands.append((request.command, dict(request.arguments)))
        if request.command == "drain":
            reply = OperateReply(message="a scheduled run has no drain <b>")
        else:
            reply = OperateReply(is_done=True, message=f"{request.command}: done")
        return Reply(reply.SerializeToString())


@contextlib.contextmanager
def acting(directory: Path, *more: str) -> Iterator[tuple[str, Operated]]:
    """Give the address of a page with acts, and the coordinator behind it."""
    token = directory / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    operated = Operated()
    handlers = {"control.status": operated.status, "control.operate": operated.operate}
    with serving(handlers) as address:
        words = ["diloco", "page", address, "--token-file", str(token), *more]
        process = subprocess.Popen(
            [sys.executable, "-m", *words], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            yield process.stdout.readline().removeprefix("page: ").strip(), operated
        finally:
            process.terminate()
            process.communicate(timeout=30)


def posted(url: str, path: str, form: Mapping[str, str], **headers: str) -> Answer:
    own = {"Content-Type": "application/x-www-form-urlencoded", **headers}
    return ask(url, path, "POST", urlencode(form), **own)


def test_a_signed_in_operator_sees_what_follows_and_does_it(tmp_path: Path) -> None:
    with acting(tmp_path, "--acts") as (url, operated):
        origin = url.rstrip("/")
        login = posted(url, "/login?to=/run/0/acts", {"token": TOKEN}, Origin=origin)
        own: dict[str, Any] = {
            "Origin": origin, "Cookie": login.headers["set-cookie"].partition(";")[0],
        }  # fmt: skip
        shown = ask(url, "/run/0/acts", **own)
        assert "<option>eu-west</option>" in shown.text
        assert 'aria-current="page">Acts' in shown.text
        kick = {"command": "kick", "island": "eu-west", "reason": "<i>"}
        preview = posted(url, "/run/0/acts", kick, **own)
        drawn = re.search(r'name="drawn" value="([\w-]+)"', preview.text)
        assert drawn is not None
        assert "--reason &#39;&lt;i&gt;&#39;" in preview.text
        confirmed = {"drawn": drawn[1], "typed": "eu-west"}

        others = [
            posted(url, "/run/0/acts/done", confirmed, **{**own, "Origin": "http://evil.example"}),
            posted(url, "/run/0/acts/done", confirmed, **{**own, "Origin": "null"}),
            posted(url, "/run/0/acts/done", confirmed, Cookie=own["Cookie"]),
            posted(url, "/run/0/acts/done", confirmed, Origin=origin, Accept="text/html"),
            posted(url, "/run/0/acts/done", confirmed | {"typed": "eu"}, **own),
            ask(url, "/run/0/acts/done", **own),
        ]
        assert [each.status for each in others] == [403, 403, 403, 303, 400, 405]
        assert operated.commands == []

        done = posted(url, "/run/0/acts/done", confirmed, **own)
        again = posted(url, "/run/0/acts/done", confirmed, **own)
        refused = posted(url, "/run/0/acts", {"command": "drain", "island": "eu-west"}, **own)
        drawn = re.search(r'name="drawn" value="([\w-]+)"', refused.text)
        assert drawn is not None
        refused = posted(url, "/run/0/acts/done", {"drawn": drawn[1], "typed": "eu-west"}, **own)
        preview = posted(url, "/run/0/acts", {"command": "pause"}, **own)
        drawn = re.search(r'name="drawn" value="([\w-]+)"', preview.text)
        assert drawn is not None
        operated.run = "other"
        time.sleep(LOOK_S)
        other = posted(url, "/run/0/acts/done", {"drawn": drawn[1]}, **own)

    assert other.status == 409 and "run other has the address now, not demo" in other.text
    assert (done.status, again.status, refused.status) == (200, 400, 409)
    assert "kick: done" in done.text
    assert "a scheduled run has no drain &lt;b&gt;" in refused.text
    assert operated.commands == [
        ("kick", {"island": "eu-west", "reason": "<i>"}),
        ("drain", {"island": "eu-west"}),
    ]


def test_a_page_without_acts_has_none(tmp_path: Path) -> None:
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    with acting(tmp_path) as (url, operated):
        assert "Acts" not in ask(url, "/run/0/overview", **bearer).text
        assert ask(url, "/run/0/acts", **bearer).status == 404
        assert posted(url, "/run/0/acts", {"command": "pause"}, **bearer).status == 404
        assert posted(url, "/run/0/acts/done", {"drawn": "x"}, **bearer).status == 404
    assert operated.commands == []
