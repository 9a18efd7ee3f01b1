"""The strata of the code: who may import what, and what pure code may not touch.

Every import counts, inside functions and under TYPE_CHECKING too, unless a test says otherwise.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

ROOT = Path(__file__).resolve().parent.parent

#: A package imports itself and what stands left of it, never what stands right of it. All are
#: packages of `diloco`; the folders of three of them stand next to its own.
STRATA = ("diloco.protos", "diloco.transport", "diloco", "diloco.simulations")

#: Clock, sockets, threads, processes, files' whereabouts, environment: what pure code is given.
OUTSIDE_WORLD = (
    "asyncio", "concurrent", "datetime", "grpc", "multiprocessing", "os", "queue", "sched",
    "secrets", "selectors", "signal", "socket", "socketserver", "sqlite3", "ssl", "subprocess",
    "tempfile", "threading", "time", "torch.distributed", "uuid",
)  # fmt: skip
#: Draws from a hidden global state; pure code hashes counters or is given a generator.
HIDDEN_RANDOMNESS = (
    "numpy.random", "random.choice", "random.gauss", "random.randint", "random.random",
    "random.sample", "random.seed", "random.shuffle", "random.SystemRandom", "random.uniform",
    "torch.bernoulli", "torch.manual_seed", "torch.normal", "torch.rand", "torch.randint",
    "torch.randn", "torch.randperm", "torch.seed",
)  # fmt: skip
IMPURE = OUTSIDE_WORLD + HIDDEN_RANDOMNESS
ENVIRONMENT = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")

#: Reads code where it should read data. What the ranks of one island tell each other over their own
#: process group is one site's, and is pickled by torch.
CODE_AS_DATA = (
    "_pickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "numpy.load", "pickle",
    "pickletools", "shelve", "torch.load", "torch.save", "yaml",
)  # fmt: skip
PICKLING_COLLECTIVES = tuple(
    f"torch.distributed.{name}"
    for name in (
        "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list",
        "scatter_object_list", "send_object_list",
    )
)  # fmt: skip

#: What other systems do not have. Where it is used, `diloco.system` guards it or there is another
#: way; diloco/MACOS.md says what is left out then.
LINUX_ONLY = tuple(
    f"{module}.{name}"
    for module, names in {
        "mmap": ("MAP_POPULATE",),
        "os": (
            "copy_file_range", "eventfd", "fdatasync", "memfd_create", "O_DIRECT", "O_TMPFILE",
            "pidfd_open", "posix_fadvise", "posix_fallocate", "process_cpu_count",
            "sched_getaffinity", "sched_setaffinity", "sched_setscheduler", "sched_param", "setns",
            "splice", "unshare",
        ),
        "resource": ("prlimit",),
        "select": ("epoll",),
        "signal": ("SIGRTMAX", "SIGRTMIN"),
        "socket": (
            "AF_NETLINK", "SO_BINDTODEVICE", "SO_MARK", "SO_PEERCRED", "TCP_CONGESTION", "TCP_INFO",
            "TCP_USER_TIMEOUT",
        ),
        "time": ("CLOCK_BOOTTIME",),
    }.items()
    for name in names
)  # fmt: skip

#: (where, what it may not use, except where). A module stands for all below it.
FORBIDDEN = [
    pytest.param("diloco.transport", ("torch", "torchvision"), (), id="transport-has-no-torch"),
    pytest.param("diloco.outer.fragments", ("torch",), (), id="fragments-has-no-torch"),
    pytest.param("diloco.outer.schedule", ("torch",), (), id="schedule-has-no-torch"),
    *(
        pytest.param(where, IMPURE, (), id=f"{where.removeprefix('diloco.')}-is-pure")
        for where in (
            "diloco.compression",
            "diloco.outer",
            "diloco.simulations.engine",
            "diloco.simulations.runs",
            "diloco.simulations.scenarios",
            "diloco.transport.channels",
            "diloco.transport.shaping.link",
        )
    ),
    *(
        pytest.param(where, (*IMPURE, "torch"), (), id=f"{where.removeprefix('diloco.')}-is-pure")
        for where in (
            "diloco.chaos.evidence",
            "diloco.chaos.judge",
            "diloco.chaos.plan",
            "diloco.chaos.tokens",
            "diloco.checkpoint.placement",
            "diloco.doctor.diagnosis",
            "diloco.launch.engines",
            "diloco.page.access",
            "diloco.page.charts",
            "diloco.page.live_run",
            "diloco.page.network",
            "diloco.page.recorded_run",
            "diloco.page.run_view",
            "diloco.protocol",
        )
    ),
    *(  # numpy's generators are given, seeded
        pytest.param(
            where,
            (*OUTSIDE_WORLD, *HIDDEN_RANDOMNESS[1:], "torch"),
            (),
            id=f"{where.removeprefix('diloco.')}-is-pure",
        )
        for where in ("diloco.simulations.goodput", "diloco.simulations.published")
    ),
    *(
        pytest.param(
            f"diloco.simulations.{folder}",
            IMPURE,
            tuple(f"diloco.simulations.{folder}.{name}" for name in drivers),
            id=f"simulations.{folder}-is-pure",
        )
        for folder, drivers in {
            "emulate": (
                "check",
                "command",
                "emulation",
                "measure",
                "namespaces",
                "realtime",
                "relay",
            ),
            "lab": ("cache", "environment", "run", "sweep", "timeline"),
            "planner": ("measure", "timed_rank"),
        }.items()
    ),
    # DCP's metadata is a pickle; its reader allows the records that it is made of, and no code.
    pytest.param("diloco", CODE_AS_DATA, ("diloco.checkpoint.dcp",), id="unpickles-nothing"),
    pytest.param(
        "diloco",
        PICKLING_COLLECTIVES,
        (
            "diloco.trainer.optimizers.muon",
            "diloco.checkpoint.checkpoint_writer",
            "diloco.island.groups",
            "diloco.island.lanes.parameters",
        ),
        id="peers-are-not-in-process-groups",
    ),
    pytest.param(
        "diloco",
        LINUX_ONLY,
        (
            "diloco.bench.outer_loop.overhead",
            "diloco.bench.syncer.control_plane",
            "diloco.chaos",
            "diloco.checkpoint.host_memory",
            "diloco.doctor",
            "diloco.durable",
            "diloco.simulations.emulate",
            "diloco.system",
            "diloco.launch.rank.affinity",
            "diloco.telemetry.prometheus",
            "diloco.transport.tcp_counters",
        ),
        id="linux-only-calls-have-a-guard",
    ),
    pytest.param(
        "diloco",
        ENVIRONMENT,
        (
            "diloco.baseline.members",
            "diloco.cli",
            "diloco.launch",
            "diloco.security.security",
            "diloco.telemetry.traces",  # which OpenTelemetry's own variables configure
        ),
        id="environment-is-read-in-cli-and-launch",
    ),
]

#: Importing these must not load torch, whatever else they import.
IMPORTED_WITHOUT_TORCH = (
    "diloco.cli",
    "diloco.config",
    "diloco.coordinator",
    "diloco.errors",
    "diloco.checkpoint.checkpoints",
    "diloco.forecast.disk",
    "diloco.checkpoint.host_memory",
    "diloco.launch.island",
    "diloco.launch.local",
    "diloco.outer.fragments",
    "diloco.outer.schedule",
    "diloco.page",
    "diloco.versions.expiries",
    "diloco.versions.frames",
    "diloco.versions.pins",
    "diloco.versions.record",
    "diloco.protocol.rounds.state",
    "diloco.simulations.emulate",
    "diloco.simulations.goodput",
)

VAGUE_NAMES = {"common", "helpers", "misc", "util", "utils"}


@dataclass(frozen=True)
class Use:
    """A dotted name that a file imports or mentions, with aliases resolved."""

    name: str
    line: int
    is_import: bool
    runs_at_import: bool


@dataclass(frozen=True)
class Source:
    """A file of the repository and the module it is."""

    path: Path
    module: str

    @property
    def package(self) -> str:
        is_package = self.path.name == "__init__.py"
        return self.module if is_package else self.module.rpartition(".")[0]


def is_within(name: str, tops: Iterable[str]) -> bool:
    return any(name == top or name.startswith(top + ".") for top in tops)


def stratum(module: str) -> int:
    """The index of the innermost package of `STRATA` that holds a module."""
    return max(
        (level for level, top in enumerate(STRATA) if is_within(module, [top])),
        key=lambda level: len(STRATA[level]),
        default=-1,
    )


@cache
def sources(*, with_tests: bool = False) -> tuple[Source, ...]:
    found = []
    for package in (*STRATA, "tests") if with_tests else STRATA:
        folder = ROOT / package.rpartition(".")[2]
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            module = ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])
            found.append(Source(path, module))
    return tuple(found)


@cache
def modules() -> frozenset[str]:
    return frozenset(source.module for source in sources())


@cache
def uses_of(source: Source) -> tuple[Use, ...]:
    return tuple(read_uses(source.path.read_text(encoding="utf-8"), source.package))


def read_uses(text: str, package: str) -> Iterator[Use]:
    """Yield each import (`from a import b` as a.b) and each dotted mention of an imported name."""
    tree = ast.parse(text)
    runs_at_import = set(executed_at_import(tree))
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            for alias in node.names:
                top = alias.name.partition(".")[0]
                aliases[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, base] if base else anchor)
            names = [f"{base}.{alias.name}" for alias in node.names]
            aliases |= {a.asname or a.name: f"{base}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else ""
            called = function.id if isinstance(function, ast.Name) else called
            if called in ("import_module", "__import__"):
                names = [str(node.args[0].value)]
        for name in names:
            yield Use(name, node.lineno, True, node in runs_at_import)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            if first in aliases:
                yield Use(".".join([aliases[first], *rest]), node.lineno, False, False)


def executed_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when the module is imported: no function bodies, no type checks."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from executed_at_import(child)


def report(rule: str, broken: list[tuple[Source, Use]]) -> str:
    lines = {
        f"  {source.path.relative_to(ROOT)}:{use.line}: {source.module} uses {use.name}"
        for source, use in broken
    }
    return "\n".join([rule, *sorted(lines)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import a.b", {"a.b"}),
        ("def f():\n  from a import b", {"a.b"}),
        ("if TYPE_CHECKING:\n  from a import b as c", {"a.b"}),
        ("from . import x", {"pack.sub.x"}),
        ("from ..y import x", {"pack.y.x"}),
        ("import numpy as np\nnp.random.rand(3)", {"numpy", "numpy.random", "numpy.random.rand"}),
        ("from os import environ as e\ne.get('A')", {"os.environ", "os.environ.get"}),
        ("import_module('a.b')", {"a.b"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reader_sees_every_kind_of_import(text: str, expected: set[str]) -> None:
    assert {use.name for use in read_uses(text, "pack.sub")} == expected


def test_strata_are_never_imported_backwards() -> None:
    broken = []
    for source in sources():
        level = stratum(source.module)
        for use in uses_of(source):
            if not use.is_import:
                continue
            if stratum(use.name) <= level and not is_within(use.name, ["tests"]):
                continue
            in_cli = is_within(source.module, ["diloco.cli"])
            if in_cli and is_within(use.name, ["diloco.simulations"]) and not use.runs_at_import:
                continue  # the one exception: inside command functions
            broken.append((source, use))

    assert not broken, report(f"imports go leftwards only: {' <- '.join(STRATA)}", broken)


@pytest.mark.parametrize(("where", "forbidden", "exempt"), FORBIDDEN)
def test_forbidden_names_are_not_used(
    where: str, forbidden: tuple[str, ...], exempt: tuple[str, ...]
) -> None:
    broken = [
        (source, use)
        for source in sources()
        if is_within(source.module, [where]) and not is_within(source.module, exempt)
        for use in uses_of(source)
        if is_within(use.name, forbidden)
    ]

    assert not broken, report(f"{where} must not use these:", broken)


def test_nothing_is_evaluated() -> None:
    broken = [
        f"{source.module}:{node.lineno}: {node.func.id}"
        for source in sources()
        for node in ast.walk(ast.parse(source.path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("eval", "exec", "compile")
    ]

    assert not broken, "\n".join(broken)


def test_rules_name_modules_that_exist() -> None:
    named = {where for where, *_ in (rule.values for rule in FORBIDDEN)} | {*IMPORTED_WITHOUT_TORCH}

    assert named <= modules()


def test_light_modules_do_not_load_torch() -> None:
    light = [name for name in sorted(modules()) if is_within(name, IMPORTED_WITHOUT_TORCH)]
    light = ["diloco", *(name for name in light if not name.endswith(".__main__"))]
    program = f"""
import importlib, sys, traceback
class Guard:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            traceback.print_stack()
            sys.exit(f"importing {{importing}} loads torch")
sys.meta_path.insert(0, Guard())
for importing in {light!r}:
    importlib.import_module(importing)
assert "torch" not in sys.modules
"""

    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )

    frames = [line for line in result.stderr.splitlines() if "importlib" not in line]
    assert result.returncode == 0, "\n".join(frames)


def test_a_coordinator_starts_without_what_only_some_runs_need() -> None:
    program = """
import sys, diloco.launch.coordinator
print(*{"prometheus_client", "torch"} & {*sys.modules})
"""

    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert not loaded.stdout.split(), "it is to be back within 2 s of a kill, mostly imports"


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for source in sources():
        for use in uses_of(source):
            if use.is_import and use.runs_at_import:
                target = use.name if use.name in modules() else use.name.rpartition(".")[0]
                if target in modules() and target != source.module:
                    graph.setdefault(source.module, set()).add(target)

    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import cycle: {' <- '.join(error.args[1])}")


def test_names_are_said_and_stars_are_not() -> None:
    broken = []
    for source in sources(with_tests=True):
        if VAGUE_NAMES & set(source.module.split(".")):
            broken.append(f"{source.module}: name the concept, not {sorted(VAGUE_NAMES)}")
        broken += [
            f"{source.module}:{use.line}: star import of {use.name}"
            for use in uses_of(source)
            if use.is_import and use.name.endswith(".*")
        ]

    assert not broken, "\n".join(broken)


def test_folders_fit_a_head_and_form_no_circle() -> None:
    """At most 25 modules and 6,000 lines a folder; `diloco/__init__.py` is the public facade."""
    facade = {"diloco", "diloco.__main__"}
    folder_of = {source.module: source.package for source in sources()}
    num_lines: dict[str, int] = {}
    num_modules: dict[str, int] = {}
    graph: dict[str, set[str]] = {}
    for source in sources():
        folder = source.package
        text = source.path.read_text(encoding="utf-8")
        num_lines[folder] = num_lines.get(folder, 0) + text.count("\n")
        num_modules[folder] = num_modules.get(folder, 0) + (source.module != folder)
        for use in uses_of(source):
            target = use.name if use.name in modules() else use.name.rpartition(".")[0]
            if not use.is_import or target not in modules() or {source.module, target} & facade:
                continue
            if folder_of[target] != folder:
                graph.setdefault(folder, set()).add(folder_of[target])

    assert not {name: count for name, count in num_modules.items() if count > 25}
    assert not {name: lines for name, lines in num_lines.items() if lines > 6_000}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"folders import each other: {' <- '.join(error.args[1])}")


def test_every_package_is_installed() -> None:
    """The folders next to `diloco/` are packages of it: links in the tree, copies if installed."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    setuptools = listed["tool"]["setuptools"]
    found = setuptools["packages"]["find"]
    installed = find_namespace_packages(str(ROOT), found["exclude"], found["include"])

    folders = {source.package for source in sources()}
    assert set(installed) == folders | {
        "diloco.configs",
        "diloco.configs.launch",
        "diloco.configs.links",
    }
    assert setuptools["package-data"]["diloco.configs"] == ["**/*.toml", "monitoring/*"]
    assert setuptools["package-data"]["diloco.configs.launch"] == ["*.j2"], "what init writes"
    assert folders <= modules(), "a folder that holds modules has no __init__.py"
