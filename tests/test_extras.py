"""What is installed by need: the extras, their bounds, and what goes without them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from typer.testing import CliRunner

import diloco
from diloco.cli import main as command_line
from diloco.errors import ConfigError
from diloco.extras import EXTRA_OF, import_for, missing, require

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / "configs" / "runs" / "two-islands.toml"
#: Modules that are nothing without an optional package.
MADE_OF_ONE = (
    "diloco.bench.outer_loop.codec",
    "diloco.integrations.hugging_face",
    "diloco.integrations.lightning",
    "diloco.integrations.megatron",
    "diloco.integrations.torchtitan",
    "diloco.page.server",
    "diloco.simulations",
    "diloco.telemetry.prometheus",
    "diloco.transport.bucket.client",
    "diloco.watch.screen",
)
#: Packages that are imported by another name than they are installed by.
IMPORTED_AS = {
    "megatron-core": "megatron",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
}
#: Of extras, with packages that those bring.
BROUGHT_ALONG = ("pandas", "pyarrow", "scipy", "yaml")

WITHOUT = """
import importlib, pkgutil, sys
sys.modules |= dict.fromkeys({absent!r})
import diloco
for module in pkgutil.walk_packages(diloco.__path__, "diloco."):
    if not module.name.startswith({exempt!r}):
        importlib.import_module(module.name)
print({{*sys.modules}} >= {{"torch", "diloco.launch.rank.main", "diloco.launch.syncer"}})
"""


def project() -> dict[str, Any]:
    """Return pyproject's table; `Any`, as TOML has it."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def extras() -> dict[str, list[Requirement]]:
    return {
        name: [Requirement(text) for text in texts]
        for name, texts in project()["optional-dependencies"].items()
    }


def pins(file: str) -> dict[str, str]:
    lines = [line for line in (ROOT / file).read_text().splitlines() if "==" in line]
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}


def test_each_optional_package_is_in_the_extra_that_its_message_names() -> None:
    declared = {
        IMPORTED_AS.get(requirement.name, requirement.name.replace("-", "_")): extra
        for extra, requirements in extras().items()
        if extra not in ("all", "dev")
        for requirement in requirements
    }

    assert declared == EXTRA_OF


def test_all_is_all() -> None:
    (everything,) = extras()["all"]

    assert everything.extras == extras().keys() - {"all", "dev"}


def test_lower_bounds_are_the_versions_that_are_tested() -> None:
    needed = [Requirement(text) for text in project()["dependencies"]]
    needed += [each for name in extras().keys() - {"all", "dev"} for each in extras()[name]]
    bounds = {
        canonicalize_name(each.name): [
            (one.operator, Version(one.version)) for one in each.specifier
        ]
        for each in needed
    }

    tested = pins("constraints-lowest.txt")

    assert bounds == {name: [(">=", Version(version))] for name, version in tested.items()}


def test_what_is_installed_for_development_is_within_the_bounds() -> None:
    installed = pins("constraints.txt")
    needed = [Requirement(text) for text in project()["dependencies"]]
    needed += [each for one in extras().values() for each in one if each.name != "diloco"]

    outside = [
        str(each)
        for each in needed
        if not each.specifier.contains(installed[canonicalize_name(each.name)])
    ]

    assert not outside


def test_everything_but_simulations_is_imported_without_optional_packages() -> None:
    absent = (*EXTRA_OF, *BROUGHT_ALONG)
    program = WITHOUT.format(absent=absent, exempt=MADE_OF_ONE)

    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )

    assert (ended.stdout, ended.returncode) == ("True\n", 0), ended.stderr


def test_a_missing_package_is_refused_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "wandb.sdk"):
        monkeypatch.setitem(sys.modules, name, None)
    wanted = (
        'telemetry.wandb.mode = "online" needs the package wandb, which is not installed: type '
        "pip install 'diloco[wandb]', or turn it off"
    )

    with pytest.raises(ConfigError) as required:
        require('telemetry.wandb.mode = "online"', "wandb", "turn it off")
    with pytest.raises(ConfigError) as imported:
        import_for('telemetry.wandb.mode = "online"', "wandb.sdk", "turn it off")

    assert str(required.value) == str(imported.value) == wanted


def test_a_package_that_an_optional_one_lacks_is_named_itself() -> None:
    assert str(missing("x = 1", "sentry_sdk.hub")).endswith("type pip install 'sentry_sdk'")


def refuses(
    command: str, absent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str]:
    """Return exit code and message of a command line without a package."""
    for name in [name for name in sys.modules if name.startswith("diloco.simulations")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, absent, None)
    monkeypatch.setattr(sys, "argv", ["diloco", *command.split()])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    return ended.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "absent", "what", "extra"),
    [
        ("sim utilization --rtt 10ms", "simpy", "diloco sim utilization --rtt 10ms", "sim"),
        (f"plan {RUN} --plot a.png", "matplotlib", "--plot a.png", "plots"),
    ],
    ids=["simulation", "picture"],
)
def test_a_command_that_needs_a_missing_package_says_what_to_type(
    command: str,
    absent: str,
    what: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, said = refuses(command, absent, monkeypatch, capsys)

    assert (code, said) == (
        2,
        f"error: {what} needs the package {absent}, which is not installed: type pip install "
        f"'diloco[{extra}]'\n",
    )


def test_without_simulations_a_plan_shows_what_follows_from_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "simpy", None)
    code, said = refuses(f"plan {RUN} --step-time 1s", "simpy", monkeypatch, capsys)
    assert code == 2
    assert "error: --step-time needs the package simpy" in said
    assert "or leave it out: all that follows from the file is shown" in said

    monkeypatch.setattr(sys, "argv", ["diloco", "plan", str(RUN)])
    with pytest.raises(SystemExit) as ended:
        command_line.main()

    shown = capsys.readouterr().out
    assert not ended.value.code
    assert "lanes" in shown and "pip install 'diloco[sim]'" in shown


def test_what_is_missing_and_no_extra_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking() -> None:
        raise ModuleNotFoundError("No module named 'nowhere'", name="nowhere")

    monkeypatch.setattr(command_line, "app", lacking)

    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        command_line.main()


def test_the_names_are_those_of_packages() -> None:
    """Development has all extras; a name that cannot be imported would never be found missing."""
    assert [name for name in EXTRA_OF if find_spec(name) is None] == []


def test_the_release_says_one_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text()

    assert f"\nversion: {diloco.__version__}\n" in citation
    assert f"\n## [{diloco.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_version_is_shown_without_torch() -> None:
    program = (
        "import sys; from diloco.cli.main import app; app(['--version'], standalone_mode=False)"
    )
    heavy = {"grpc", "numpy", "pydantic", "torch"}

    shown = subprocess.run(
        [sys.executable, "-c", f"{program}; print({heavy} & {{*sys.modules}})"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )

    first, *loaded = shown.stdout.splitlines()
    assert first.startswith(f"diloco {diloco.__version__} (Python "), shown.stderr
    assert loaded == ["set()"], "commands import what they need when they run"


def test_a_shell_completes_commands() -> None:
    asked = {"_DILOCO_COMPLETE": "complete_bash", "COMP_WORDS": "diloco st", "COMP_CWORD": "1"}

    said = CliRunner().invoke(command_line.app, env=asked, prog_name="diloco").stdout

    assert said.split() == ["status", "stop"]
