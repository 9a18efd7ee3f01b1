"""Writes the reference: API from docstrings, commands from their help, settings from the schema.

    python docs/reference.py [FOLDER]      # build/docs unless given

The pages need no network and no server: open index.html. A warning is an error: a name that does
not resolve, a setting or a command without a description. `make docs` runs it.
"""

from __future__ import annotations

import html
import importlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pdoc
import pdoc.render
import typer
from typer.testing import CliRunner

import diloco
from diloco.cli.main import app
from diloco.config.classes import FieldRow, explain
from diloco.config.schema import Config

#: What is public: the names of `import diloco`, the places for parts of other packages, and what
#: other trainers call.
MODULES = (
    "diloco",
    "diloco.errors",
    "diloco.compression.base",
    "diloco.outer.combination",
    "diloco.transport.contracts",
    "diloco.transport.errors",
    "diloco.integrations.hugging_face",
)
_STYLE = """
body { font-family: system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
pre { background: #f4f4f4; padding: 0.8rem; overflow-x: auto; font-size: 0.85rem; }
table { border-collapse: collapse; } td, th { padding: 0.3rem 0.6rem; text-align: left;
vertical-align: top; border-bottom: 1px solid #ddd; font-size: 0.9rem; }
code { white-space: nowrap; }
"""


def page(title: str, body: str) -> str:
    """Return a whole page without anything from elsewhere."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>\n{body}\n</body></html>\n"
    )


def write_api(folder: Path) -> None:
    """Write a page for each public module; pdoc warns of what it cannot resolve."""
    names = {name: getattr(diloco, name) for name in diloco.__all__}
    vars(diloco).update(names)  # they are found when first used, and pdoc looks at what is there
    pdoc.render.configure(docformat="google", show_source=False, search=False)
    pdoc.pdoc(*MODULES, output_directory=folder)


def commands(command: Any, path: str = "diloco") -> Iterator[tuple[str, str]]:
    """Yield each command of a tree with its help, groups first; a `click` command is `Any` here.

    Raises:
        ValueError: If one does not say what it does.
    """
    if not command.help:
        raise ValueError(f"{path} does not say what it does: write its docstring")
    arguments = [*path.split()[1:], "--help"]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "100", "TERM": "dumb"})
    if shown.exit_code:
        raise ValueError(f"{path} --help ends with {shown.exit_code}: {shown.output}")
    yield path, shown.output.replace("Usage: root", "Usage: diloco").strip("\n")
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{path} {name}")


def commands_page() -> str:
    """Return the page of all commands."""
    found = list(commands(typer.main.get_command(app)))
    index = "".join(
        f'<li><a href="#{path.replace(" ", "-")}"><code>{path}</code></a></li>' for path, _ in found
    )
    sections = "".join(
        f'<h2 id="{path.replace(" ", "-")}">{path}</h2><pre>{html.escape(text)}</pre>'
        for path, text in found
    )
    return page("Commands", f"<ul>{index}</ul>{sections}")


def settings_page() -> str:
    """Return the page of all keys of a run file.

    Raises:
        ValueError: If a key does not say what it is.
    """
    rows = explain(Config)
    if silent := [row.path for row in rows if not row.description]:
        raise ValueError(f"{', '.join(silent)}: give each a description")
    lines = "".join(map(_settings_line, rows))
    head = "<tr><th>key</th><th>class</th><th>default</th><th>allowed</th><th>meaning</th></tr>"
    classes = (
        "<p>Keys of class <em>identity</em> must be equal at all sites; of <em>policy</em> the "
        "coordinator's file decides; <em>local</em> ones are each site's own. A default of - must "
        "be given, unless a preset gives it.</p>"
    )
    return page("Settings of a run file", f"{classes}<table>{head}{lines}</table>")


def _settings_line(row: FieldRow) -> str:
    cells = [html.escape(text) for text in (row.config_class, row.default, row.allowed)]
    cells.append(html.escape(row.description))
    return f"<tr><td><code>{row.path}</code></td><td>{'</td><td>'.join(cells)}</td></tr>\n"


def write_reference(folder: Path) -> None:
    """Write all pages below a folder, index.html first to be read."""
    for name in MODULES:
        importlib.import_module(name)
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_api(folder)
    modules = "".join(
        f'<li><a href="{name.replace(".", "/")}.html"><code>{name}</code></a></li>'
        for name in MODULES
    )
    (folder / "commands.html").write_text(commands_page(), encoding="utf-8")
    (folder / "settings.html").write_text(settings_page(), encoding="utf-8")
    body = (
        '<ul><li><a href="commands.html">Commands</a></li>'
        '<li><a href="settings.html">Settings of a run file</a></li></ul>'
        f"<h2>Modules</h2><ul>{modules}</ul>"
    )
    (folder / "index.html").write_text(page("diloco: reference", body), encoding="utf-8")


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "build/docs")
    write_reference(target)
    sys.stdout.write(f"reference: {target / 'index.html'}\n")
