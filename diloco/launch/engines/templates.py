"""The templates of configs/launch, and the files that they become. Pure, but for the templates."""

from __future__ import annotations

import functools
import json
import shlex
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from diloco.errors import FINAL_EXIT_CODES


@dataclass(frozen=True, slots=True)
class Written:
    """A file of a run: where it goes below a directory, what is in it, of which job, if one."""

    path: str
    text: str
    is_script: bool = False
    job: str = ""


def render(template: str, **values: Any) -> str:
    """Fill a template; what it is given are values of several types, hence `Any`."""
    return (
        _templates()
        .get_template(f"{template}.j2")
        .render(
            final_codes=sorted(FINAL_EXIT_CODES),
            asked_to_end=[129, 130, 143],  # 128 + SIGHUP, SIGINT, SIGTERM
            **values,
        )
    )


def bare_host(host: str) -> str:
    """Leave out the user of USER@HOST."""
    return host.rpartition("@")[2]


@functools.cache
def _templates() -> Environment:
    """Give the templates, each compiled once: a run may have units for thousands of hosts."""
    environment = Environment(
        loader=FileSystemLoader(str(files("diloco").joinpath("configs", "launch"))),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{##",  # ${#list} is bash's
        comment_end_string="##}",
    )
    # JSON's escapes are those of TOML and of YAML.
    environment.filters |= {"json": _json, "bare_host": bare_host, "quoted": shlex.quote}
    return environment


def _json(value: object) -> str:
    """Write a value as JSON; tuples are arrays."""
    return json.dumps(value, ensure_ascii=False)
