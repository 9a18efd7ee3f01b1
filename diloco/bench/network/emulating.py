"""Commands that a bench runs to their end, and networks emulated for one measurement alone."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError, IslandFailed

_MISSED_CHECK = 1
_LAST_WORDS = 2000
_LOOK_S = 0.1


def measure_inside(
    what: str,
    toml: str,
    module: str,
    orders: Any,
    place: Path,
    on_look: Callable[[], None],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a module in a network, checked against its specification first.

    Args:
        what: The network in words, for errors.
        toml: Its file.
        module: Run as ``python -m MODULE ORDERS DESCRIPTION``; writes found.json beside ORDERS.
        orders: JSON values for it.
        place: An empty directory.
        on_look: Called often; what it raises takes the network down.

    Returns:
        What was found, and the emulation's record. A link that is not as told carries no
        measurement: what was found is empty then.

    Raises:
        ConfigError: If networks cannot be emulated here.
        IslandFailed: If the module failed.
    """
    wan_file, orders_file = place / "link.toml", place / "orders.json"
    wan_file.write_text(toml)
    orders_file.write_text(json.dumps(orders))
    inside = f'exec {sys.executable} -m {module} {orders_file} "$DILOCO_EMULATION"'
    command = [sys.executable, "-m", "diloco", "emulate", str(wan_file), "--check"]
    command += ["--json", str(place / "record.json"), "--", "sh", "-c", inside]
    code, words = run_watched(command, place / "words.log", on_look)
    if not (place / "record.json").exists():
        raise ConfigError(f"diloco emulate failed, exit code {code}: {words}")
    record = json.loads((place / "record.json").read_text())
    if code == _MISSED_CHECK and "command" not in record:
        return {}, record
    if code:
        raise IslandFailed(f"measuring {what} failed, exit code {code}: {words}")
    return json.loads((place / "found.json").read_text()), record


def check_text(check: Sequence[dict[str, Any]] | None) -> str:
    """Say in a word whether the network was as told; None: nobody looked."""
    if check is None:
        return "-"
    missed = [f"{f['link']} {f['way']} {f['figure']}" for f in check if not f["is_met"]]
    return f"MISSED: {', '.join(missed)}" if missed else f"{len(check)} ok"


def run_watched(
    command: Sequence[str],
    log: Path,
    on_look: Callable[[], None],
    *,
    directory: Path | None = None,
) -> tuple[int, str]:
    """Run a command to its end; whatever ends us before ends it, in order, too.

    Args:
        command: Program and arguments.
        log: Where all that it prints goes.
        on_look: Called often; what it raises ends the command.
        directory: That it runs in; None: this process's.

    Returns:
        Its exit code, and the last of what it printed.
    """
    with log.open("wb") as words:
        process = subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT, cwd=directory)
        try:
            while process.poll() is None:
                on_look()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    return process.returncode, log.read_text(errors="replace")[-_LAST_WORDS:]
