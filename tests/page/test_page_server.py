"""`diloco page` as a process, asked over real connections."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.errors import ConfigError
from diloco.page.access import Access, own_page
from diloco.page.rendering import VIEWS
from diloco.protos.control_pb2 import (
    Alarm,
    AlarmStatus,
    FragmentStatus,
    HeldOut,
    IslandStatus,
    RefusalCount,
    ReportRequest,
    StatusReply,
    SyncerStatus,
)
from diloco.transport.contracts import IncomingCall, Reply
from tests.guarded_server import serving
from tests.page.page_client import Answer, ask, connect
from tests.page.recorded_page_run import HOSTILE_NAME, HOSTILE_TEXT, write_state

TOKEN = "0123456789abcdef" * 2
STATUS = StatusReply(
    run="live",
    state="running",
    total_tokens=4096,
    away=[HOSTILE_TEXT],
    alarms=[AlarmStatus(alarm=Alarm(kind=HOSTILE_NAME, text=HOSTILE_TEXT), reporter=HOSTILE_NAME)],
    fragments=[
        FragmentStatus(fragment_id=0, phase=HOSTILE_NAME, version=3, contributors=[HOSTILE_NAME]),
        FragmentStatus(fragment_id=1, damage=HOSTILE_TEXT, digest=HOSTILE_TEXT, rounds=2),
    ],
    syncers=[SyncerStatus(name=HOSTILE_NAME, address=HOSTILE_TEXT, fragment_ids=[0, 1, 2])],
    refusals=[RefusalCount(service="syncer", island=HOSTILE_NAME, cause="stale", count=2)],
    islands=[
        IslandStatus(
            island=HOSTILE_NAME,
            incarnation=1,
            lease="active",
            last_report=ReportRequest(
                state="training",
                inner_step=3,
                message=HOSTILE_TEXT,
                held_out=[HeldOut(checkpoint=2, nats_per_byte=1.25)],
            ),
        )
    ],
)


class Pages(NamedTuple):
    """Addresses: of two recorded runs, of a live one, of one over TLS; and its certificate."""

    recorded: str
    live: str
    secured: str
    certificate: Path
    num_asked: list[int]

    def connect(self, url: str) -> http.client.HTTPConnection:
        return connect(url, self.certificate)

    def ask(
        self, url: str, path: str, method: str = "GET", body: str = "", **headers: str
    ) -> Answer:
        return ask(url, path, method, body, self.certificate, **headers)


def self_signed(directory: Path) -> tuple[Path, Path]:
    """Make a certificate for localhost, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "page")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = directory / "page.pem", directory / "page.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths


def token_file(directory: Path) -> Path:
    path = directory / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """All pages of these tests, which end by Ctrl-C without a word, though somebody looks."""
    directory = tmp_path_factory.mktemp("pages")
    runs = [str(write_state(directory / name, lr)) for name, lr in (("a", "0.7"), ("b", "0.9"))]
    certificate, key = self_signed(directory)
    num_asked: list[int] = []

    async def status(_: IncomingCall) -> Reply:
        num_asked.append(1)
        return Reply(STATUS.SerializeToString())

    with serving({"control.status": status}) as coordinator:
        secured = ["--listen", "0.0.0.0:0", "--certificate", str(certificate), "--key", str(key)]
        secured += ["--token-file", str(token_file(directory))]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "diloco", "page", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for arguments in (runs, [coordinator], [runs[0], *secured])
        ]
        try:
            urls = []
            for process in processes:
                assert process.stdout is not None and process.stderr is not None
                line = process.stdout.readline()
                assert line.startswith("page: http"), line or process.stderr.read()
                urls.append(line.removeprefix("page: ").strip())
            pages = Pages(*urls, certificate, num_asked)
            yield pages
            watching = [pages.connect(url) for url in urls[:2]]
            for connection in watching:
                connection.request("GET", "/run/0/islands/live")
                connection.getresponse().readline()
        finally:
            for process in processes:
                process.send_signal(signal.SIGINT)
            ends = [(process.communicate(timeout=30), process.returncode) for process in processes]
    for connection in watching:
        connection.close()
    assert ends == [(("", "interrupted\n"), 130)] * 3


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_readable_without_scripts_and_harmless(pages: Pages, view: str) -> None:
    for url in (pages.recorded, pages.live):
        page = pages.ask(url, f"/run/0/{view}")

        assert page.status == 200
        assert "<h1>" in page.text and 'id="state"' in page.text
        for raw in ("<img", "alert(1)>", "<script>", "<b>bold", "style=", "onclick", "http://www"):
            assert raw not in page.text, (url, raw)
        csp = page.headers["content-security-policy"]
        assert "default-src 'none'" in csp and "unsafe" not in csp
        assert "frame-ancestors 'none'" in csp
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["referrer-policy"] == "same-origin"
        assert page.headers["cache-control"] == "no-store"
        assert "server" not in page.headers


def test_hostile_texts_are_shown_as_they_are(pages: Pages) -> None:
    islands = pages.ask(pages.live, "/run/0/islands").text
    overview = pages.ask(pages.recorded, "/run/0/overview").text

    fragments = pages.ask(pages.live, "/run/0/fragments").text
    assert fragments.count("no report yet") == 1 and 'class="tone bad">&#34;' in fragments
    assert "&lt;img src=x onerror=alert(1)&gt;" in islands
    assert "&lt;script&gt;alert(2)&lt;/script&gt;&amp;amp;" in islands
    assert re.search(r"<pre[^>]*>diloco kick HOST:PORT east</pre>", overview)


def test_runs_are_shown_next_to_each_other_with_what_differs(pages: Pages) -> None:
    first = pages.ask(pages.recorded, "/")
    page = pages.ask(pages.recorded, first.headers["location"]).text

    assert first.headers["location"] == "/compare"
    assert page.count("<polyline") >= 4 and "<title>1: recorded, west</title>" in page
    differ = page[page.index('id="differing"') :]
    assert "outer.lr" in differ and "0.9" in differ and "run.inner_steps" not in differ


def test_events_are_filtered_by_the_address(pages: Pages) -> None:
    alarms = pages.ask(pages.recorded, "/run/0/events?kind=alarm").text
    of_east = pages.ask(pages.recorded, "/run/0/events?kind=fragment_sent&island=east").text
    strange = pages.ask(pages.recorded, "/run/0/events?page=-1&kind=%3Cb%3E&minutes=1e9")

    assert alarms.count("<td>alarm</td>") == 1 and "fragment_sent</td>" not in alarms
    assert of_east.count("<td>fragment_sent</td>") == 1
    assert strange.status == 200 and "<b>" not in strange.text


def test_a_live_page_gets_what_changed_and_asks_the_coordinator_once_for_all(pages: Pages) -> None:
    connections = [pages.connect(pages.live) for _ in range(3)]
    before = len(pages.num_asked)
    for connection in connections:
        connection.request("GET", "/run/0/islands/live")
    replies = [connection.getresponse() for connection in connections]
    told = [[reply.readline().decode() for _ in range(3)] for reply in replies]
    for connection in connections:
        connection.close()

    assert replies[0].getheader("content-type") == "text/event-stream; charset=utf-8"
    for first, blank, second in told:
        sections = json.loads(first.removeprefix("data: "))
        assert sections.keys() == {"state", "islands"} and "<img" not in first
        assert blank == "\n"
        assert "islands" not in json.loads(second.removeprefix("data: ")), "it did not change"
    assert 1 <= len(pages.num_asked) - before <= 4, "one for all, about once a second"


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/run/0/overview", "GET", {"Host": "evil.example"}, 421),
        ("/run/0/overview", "GET", {"Host": "evil.example:80"}, 421),
        ("/run/0/overview", "GET", {"Host": "localhost:1"}, 200),
        ("/logout", "POST", {"Origin": "https://evil.example"}, 403),
        ("/logout", "POST", {"Origin": "null"}, 403),
        ("/logout", "POST", {"Origin": "http://["}, 403),
        ("/run/0/overview", "POST", {}, 405),
        ("/run/7/overview", "GET", {}, 404),
        ("/run/0/nothing", "GET", {}, 404),
        (f"/run/{'9' * 5000}/overview", "GET", {}, 404),
        ("/asset/..%2fserver.py", "GET", {}, 404),
        ("/asset/server.py", "GET", {}, 404),
        ("/asset/live.js", "GET", {}, 200),
        ("/asset/page.css", "GET", {}, 200),
    ],
)
def test_calls_from_elsewhere_and_to_nowhere_are_refused(
    pages: Pages, path: str, method: str, headers: dict[str, str], status: int
) -> None:
    answer = pages.ask(pages.recorded, path, method, **headers)

    assert answer.status == status
    assert "content-security-policy" in answer.headers


def test_a_page_beyond_loopback_asks_for_its_token(pages: Pages) -> None:
    url, path = pages.secured, "/run/0/overview"
    torn = pages.connect(url)
    torn.request("POST", "/login", "token=", {"Content-Length": "100"})
    torn.close()
    asked = pages.ask(url, path, Accept="text/html")
    refused = pages.ask(url, f"{path}/live")
    wrong = pages.ask(url, path, Authorization=f"Bearer {TOKEN[:-1]}x")
    bearer = pages.ask(url, path, Authorization=f"Bearer {TOKEN}")
    signed_in = pages.ask(url, asked.headers["location"], "POST", f"token={TOKEN}")
    cookie = signed_in.headers["set-cookie"]
    name, _, value = cookie.partition(";")[0].partition("=")
    shown = pages.ask(url, path, Cookie=f"{name}={value}")
    pages.ask(url, "/logout", "POST", Cookie=f"{name}={value}")
    after = pages.ask(url, path, Cookie=f"{name}={value}")

    assert asked.status == 303 and asked.headers["location"].startswith("/login?to=")
    assert (refused.status, wrong.status, bearer.status, shown.status) == (401, 401, 200, 200)
    assert (signed_in.status, signed_in.headers["location"]) == (303, path)
    assert name.startswith("__Host-") and TOKEN not in cookie
    assert {"httponly", "secure", "samesite=strict", "path=/"} <= set(cookie.lower().split("; "))
    assert after.status == 401


def test_tokens_cannot_be_guessed_and_sessions_end() -> None:
    access = Access(TOKEN, ["*.site.example"])
    waits = [access.wrong_token("10.0.0.9", float(second)) for second in range(20)]

    assert waits[:3] == [0.0, 0.25, 0.5] and waits[-1] == 4.0
    assert access.wrong_token("10.0.0.8", 20.0) == 0.0
    assert access.wrong_token("10.0.0.9", 90.0) == 0.0
    assert access.is_token(TOKEN) and not access.is_token("guess")
    access.sign_in("drawn", 0.0)
    assert access.is_allowed({}, "drawn", 1.0)
    assert not access.is_allowed({}, "drawn", 13 * 3600.0)
    assert not access.is_allowed({}, "", 1.0)
    assert access.is_host("a.site.example:8443") and not access.is_host("site.example.evil")
    assert Access().is_allowed({}, "", 0.0)


def test_wrong_tokens_lock_out_nobody_who_has_the_right_one(pages: Pages) -> None:
    """Behind a proxy all callers have one address."""
    url, path = pages.secured, "/run/0/overview"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        guesses = [
            pool.submit(pages.ask, url, path, Authorization=f"Bearer {n}{TOKEN[1:]}")
            for n in "ghijklm"
        ]
        time.sleep(0.2)
        began = time.monotonic()
        right = pages.ask(url, path, Authorization=f"Bearer {TOKEN}")
        taken_s = time.monotonic() - began
        still = sum(not guess.done() for guess in guesses)

    assert (right.status, {guess.result().status for guess in guesses}) == (200, {401})
    assert still, f"wrong ones wait longer than the {taken_s:.2f} s of the right one"


def test_asking_for_the_head_of_a_stream_holds_no_place(pages: Pages) -> None:
    for _ in range(110):
        answer = pages.ask(pages.recorded, "/run/0/overview/live", "HEAD")
        assert (answer.status, answer.text) == (200, "")


@pytest.mark.slow
def test_a_caller_that_trickles_is_let_go(pages: Pages) -> None:
    parts = urlsplit(pages.recorded)
    whole = b"GET /asset/icon.svg HTTP/1.1\r\nHost: localhost\r\n\r\n"
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        callers = []
        for start in (b"", whole[:20], whole + whole[:20]):
            caller = socket.create_connection((parts.hostname, parts.port), timeout=30)
            callers.append(stack.enter_context(caller))
            caller.sendall(start)
        watching = pages.connect(pages.recorded)
        watching.request("GET", "/run/0/islands/live")
        stream = watching.getresponse()
        for caller in callers:
            while caller.recv(4096):
                pass
        taken_s = time.monotonic() - began
        while time.monotonic() < began + 12:
            assert stream.readline(), "who looks is not let go"
        watching.close()

    assert taken_s < 15


def test_callers_that_say_nothing_keep_nobody_out(pages: Pages) -> None:
    parts = urlsplit(pages.recorded)
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            caller = socket.create_connection((parts.hostname, parts.port), timeout=30)
            stack.enter_context(caller).sendall(b"GET /asset")
        assert pages.ask(pages.recorded, "/asset/icon.svg").status == 200


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recorded", "secured"])
def test_a_caller_that_reads_nothing_is_let_go(pages: Pages, name: str) -> None:
    many = b"GET /asset/page.css HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000
    connection = pages.connect(getattr(pages, name))
    connection.connect()
    assert connection.sock is not None
    connection.sock.sendall(many)

    with pytest.raises(OSError, match=r"reset|pipe|EOF"), connection.sock:
        for _ in range(60):
            time.sleep(1.0)
            connection.sock.sendall(b"GET")


@pytest.mark.parametrize(
    ("path", "leads_to"),
    [
        ("/run/0/events?kind=a&page=2", "/run/0/events?kind=a&page=2"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("https://evil.example/", "/"),
        ("/run/0/overview/../../x", "/"),
    ],
)
def test_a_login_leads_to_pages_of_this_server_only(path: str, leads_to: str) -> None:
    assert own_page(path) == leads_to


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--listen", "0.0.0.0:0"], "give --certificate and --key and --token-file, too"),
        (["--certificate", "x.pem"], "--certificate and --key belong together"),
        (["--listen", "nowhere"], "must be HOST:PORT"),
        (["--token-file", "missing"], "--token-file missing: cannot be read"),
        (["--token-file", "open"], "type chmod 600 open"),
        (["--token-file", "short"], "holds 3 characters"),
    ],
    ids=["exposed", "half", "address", "no-token", "open-token", "short-token"],
)
def test_what_would_not_be_safe_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, mode in (("open", 0o644), ("short", 0o600)):
        Path(name).write_text("abc")
        Path(name).chmod(mode)

    result = CliRunner().invoke(app, ["page", str(write_state(tmp_path / "s")), *options])

    assert isinstance(result.exception, ConfigError), result.output
    assert said in str(result.exception)


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["page", str(tmp_path)])

    assert isinstance(result.exception, ConfigError)
    assert "there is no run in" in str(result.exception)
