"""The page in Chromium: of a run that was trained here, and of a live one whose state changes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from diloco.bench.network.s3_server import free_port
from diloco.page.rendering import VIEWS
from diloco.protos.control_pb2 import IslandStatus, ReportRequest, StatusReply
from diloco.state_dir import StateDir, stop_syncers
from diloco.transport.contracts import IncomingCall, Reply
from tests.guarded_server import serving
from tests.page.recorded_page_run import of_island, write
from tests.page.test_page_acts import TOKEN, acting
from tests.run_files import run_to_end, write_run
from tests.waiting import wait_until

CHROMIUM = shutil.which("chromium")
#: Where pictures of the views are kept; without it they are not.
PICTURES = os.environ.get("PAGE_PICTURES", "")
LOOKS = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}},
    "narrow": {"color_scheme": "light", "viewport": {"width": 380, "height": 760}},
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


@contextlib.contextmanager
def page_of(*arguments: str) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "diloco", "page", *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("page: ").strip()
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the page of two runs that were trained here."""
    roots = []
    for name, codec in (("a", "int4"), ("b", "float32")):
        directory = tmp_path_factory.mktemp(name)
        run_file = write_run(directory, {"east": "", "west": ""}, inner_steps=24, codec=codec)
        run_to_end(run_file)
        roots.append(str(directory / "state"))
    with page_of(*roots) as url:
        yield url


class Seen:
    """A page of a browser, and what its console said."""

    def __init__(self, browser: Any, look: str) -> None:
        self.context = browser.new_context(**LOOKS[look])
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.said.append(str(error)))

    def _note(self, message: Any) -> None:
        if not message.text.startswith("Autofocus"):  # a test that types at once is faster
            self.said.append(message.text)

    def faults(self) -> list[str]:
        """Serious findings of axe-core on accessibility."""
        found = Axe().run(self.page).response["violations"]
        return [f"{f['id']}: {f['help']}" for f in found if f["impact"] in ("serious", "critical")]

    def picture(self, name: str) -> None:
        if PICTURES:
            self.page.screenshot(path=str(Path(PICTURES) / f"{name}.png"), full_page=True)


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("view", [*VIEWS, "compare"])
def test_each_view_is_whole_and_breaks_no_policy(
    browser: Any, recorded: str, view: str, look: str
) -> None:
    seen = Seen(browser, look)
    path = view if view == "compare" else f"run/0/{view}"

    seen.page.goto(recorded + path)
    seen.page.get_by_text("live", exact=True).wait_for()

    seen.picture(f"{view}-{look}")
    faults = seen.faults()
    wide, room = seen.page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    seen.context.close()
    assert seen.said == [] and faults == []
    assert wide <= room, "the page itself does not scroll sideways"


def test_more_tabs_than_a_browser_has_connections_are_all_served(
    browser: Any, recorded: str
) -> None:
    """Without a window every tab is taken to be seen, hence these say themselves what they are."""
    context = browser.new_context()
    context.add_init_script("Object.defineProperty(document, 'hidden', {get: () => !window.seen})")
    tabs = [context.new_page() for _ in range(8)]
    for tab in tabs:
        tab.goto(f"{recorded}run/0/islands", timeout=10_000)

    tabs[7].evaluate("window.seen = true; document.dispatchEvent(new Event('visibilitychange'))")

    tabs[7].get_by_text("live", exact=True).wait_for()
    assert [tab.locator("#link").inner_text() for tab in tabs[:7]] == ["Pause updates"] * 7
    context.close()


def test_a_live_page_changes_in_place_and_says_when_the_coordinator_is_gone(browser: Any) -> None:
    report = ReportRequest(state="training", inner_step=3, loss_nats=2.5, tokens=384)
    island = IslandStatus(island="east", incarnation=1, lease="active", last_report=report)
    status = StatusReply(run="live", state="running", islands=[island])

    async def answer(_: IncomingCall) -> Reply:
        return Reply(status.SerializeToString())

    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(contextlib.ExitStack())
        url = stack.enter_context(
            page_of(coordinator.enter_context(serving({"control.status": answer})))
        )
        seen = Seen(browser, "light")
        seen.page.goto(f"{url}run/0/islands")
        region = seen.page.get_by_role("region", name="Islands")
        region.focus()
        seen.page.get_by_text("training").wait_for()

        status.islands[0].last_report.state = "failed"
        status.islands[0].last_report.message = "<b>out of memory</b>"
        seen.page.get_by_text("<b>out of memory</b>").wait_for()
        has_focus = region.evaluate("element => element === document.activeElement")
        coordinator.close()
        seen.page.get_by_role("alert").wait_for()
        seen.picture("coordinator-gone")
        seen.page.get_by_role("button", name="Pause updates").press("Enter")
        seen.page.get_by_text("paused", exact=True).wait_for()
        seen.context.close()

    assert has_focus, "what is patched keeps the focus"
    assert seen.said == []


def test_a_coordinator_that_starts_again_and_an_island_that_dies_are_seen_on_an_open_page(
    browser: Any, tmp_path: Path
) -> None:
    run_file = write_run(tmp_path, {"east": "", "west": ""}, inner_steps=100_000)
    address = f"127.0.0.1:{free_port()}"
    where = [f"--set=coordinator.{key}={address}" for key in ("listen", "address")]

    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "diloco", *arguments, str(run_file), *where]
            with (tmp_path / "log").open("ab") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            stack.callback(kill, process)
            return process

        def kill(process: subprocess.Popen[bytes]) -> None:
            with contextlib.suppress(ProcessLookupError):  # it was killed before
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

        coordinator = start("coordinator")
        wait_until(lambda: "listens on" in (tmp_path / "log").read_text())
        islands = [start("island", "--island", name) for name in ("east", "west")]
        url = stack.enter_context(page_of(address))
        seen = Seen(browser, "light")
        seen.page.goto(f"{url}run/0/overview")
        seen.page.get_by_text("2 of 2 islands train").wait_for(timeout=90_000)

        kill(coordinator)
        seen.page.get_by_role("alert").wait_for()
        start("coordinator")
        seen.page.get_by_role("alert").wait_for(state="detached", timeout=60_000)
        seen.page.get_by_text("2 of 2 islands train").wait_for(timeout=60_000)

        kill(islands[1])
        seen.page.get_by_text("1 of 2 islands train; west does not").wait_for(timeout=60_000)
        seen.picture("island-dead")
        seen.context.close()

    assert seen.said == []


def test_two_hundred_islands_and_ten_thousand_events_are_shown(
    browser: Any, tmp_path: Path
) -> None:
    for number in range(200):
        name = f"island-{number:03d}"
        write(tmp_path / f"telemetry/events-{name}-0.jsonl", name, of_island(50))
    with page_of(str(tmp_path)) as url:
        seen = Seen(browser, "narrow")
        seen.page.goto(f"{url}run/0/islands")
        seen.page.get_by_text("island-199").first.wait_for()
        assert seen.faults() == []
        seen.page.goto(f"{url}run/0/events?island=island-150")
        seen.page.get_by_role("cell", name="island-150").first.wait_for()
        seen.context.close()

    assert seen.said == []


@pytest.mark.parametrize("look", LOOKS)
def test_an_operator_signs_in_and_kicks_an_island(browser: Any, tmp_path: Path, look: str) -> None:
    with acting(tmp_path, "--acts") as (url, operated):
        seen = Seen(browser, look)
        seen.page.goto(f"{url}run/0/acts")
        seen.page.get_by_label("Token").fill(TOKEN)
        seen.page.get_by_role("button", name="Sign in").click()
        form = seen.page.get_by_role("form", name="kick")
        form.get_by_label("Island").select_option("eu-west")
        form.get_by_label("Why").fill("disk broken")
        seen.picture(f"acts-{look}")
        faults = seen.faults()
        form.get_by_role("button", name="Preview").click()
        seen.page.get_by_text("--reason 'disk broken'").wait_for()
        assert operated.commands == []
        seen.page.get_by_label("Type eu-west to confirm it").fill("eu-west")
        seen.picture(f"preview-{look}")
        faults += seen.faults()
        seen.page.get_by_role("button", name="Do it").click()
        seen.page.get_by_text("kick: done").wait_for()
        seen.page.get_by_role("button", name="Sign out").click()
        seen.page.get_by_role("heading", name="Sign in").wait_for()
        seen.context.close()

    assert seen.said == [] and faults == []
    assert operated.commands == [("kick", {"island": "eu-west", "reason": "disk broken"})]


def test_an_operator_finds_a_slow_link_and_mends_it_with_the_page_alone(
    browser: Any, tmp_path: Path
) -> None:
    """As `diloco/coordinator/README.md`, "A slow link, found and mended", has it in words."""
    run_file = write_run(
        tmp_path, {"near": "", "far": ""}, inner_steps=1_000_000, codec="float32",
        inner_steps_per_round=20, overlap_steps=15,
    )  # fmt: skip
    token, log = tmp_path / "token", tmp_path / "log"
    token.write_text(TOKEN)
    token.chmod(0o600)

    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> None:
            command = [sys.executable, "-m", "diloco", *arguments]
            with log.open("ab") as output:
                process = subprocess.Popen(command, stdout=output, stderr=output)
            stack.callback(process.wait)
            stack.callback(process.kill)

        def said(word: str) -> str:
            lines = log.read_text().splitlines()
            return next((line.rpartition(" ")[2] for line in lines if word in line), "")

        def island(name: str, *more: str) -> None:
            start("island", str(run_file), "--island", name, "--coordinator", address, *more)

        stack.callback(stop_syncers, StateDir(tmp_path / "state"))
        start("coordinator", str(run_file), "--page-options", f"--acts --token-file {token}")
        url, address = wait_until(lambda: said("page: http")), said("listens on")
        island("near")
        island("far", "--set", "transport.rate=2Mbit/s")
        seen = Seen(browser, "light")
        stack.callback(seen.context.close)
        page = seen.page
        page.set_default_timeout(90_000)

        def row(view: str, name: str) -> Any:
            page.goto(f"{url}run/0/{view}")
            return page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=name))

        def tokens_per_s(name: str) -> float:
            text = row("islands", name).locator("td").nth(7).inner_text()
            return float(text.replace(",", ""))

        def act(form: str, fill: Any, typed: str = "") -> None:
            page.goto(f"{url}run/0/acts")
            fill(page.get_by_role("form", name=form))
            page.get_by_role("form", name=form).get_by_role("button", name="Preview").click()
            if typed:
                page.get_by_label(f"Type {typed} to confirm it").fill(typed)
            page.get_by_role("button", name="Do it").click()
            page.locator("p.tone.good[role=status]").wait_for()

        def kicked(form: Any) -> None:
            form.get_by_label("Island").select_option("far")
            form.get_by_label("Why").fill("its link is full")

        def let_in(form: Any) -> None:
            form.get_by_label("Island").select_option("far")
            form.get_by_label("Let it join again").check()

        page.goto(f"{url}run/0/overview")
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_text("2 of 2 islands train").wait_for()
        row("network", "far").get_by_text("full", exact=True).wait_for()
        seen.picture("slow-link")
        before = tokens_per_s("near")

        act("kick", kicked, typed="far")
        wait_until(lambda: tokens_per_s("near") > 2 * before, every_s=2.0)
        row("islands", "far").get_by_text("kicked").first.wait_for()

        act("kick", let_in)
        island("far")  # its site has seen to the line, and starts it
        page.goto(f"{url}run/0/overview")
        page.get_by_text("2 of 2 islands train").wait_for()
        row("network", "far").get_by_text("in order").wait_for()
        wait_until(lambda: tokens_per_s("far") > 2 * before, every_s=2.0)
        seen.picture("slow-link-mended")

    assert seen.said == []
