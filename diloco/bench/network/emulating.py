"""Networks for one measurement alone, links between two islands, commands run to their end.

What is measured in an emulated network is a function `inside(orders, emulated, place)` of a module:

    diloco emulate LINK.toml --check -- \
        python -m diloco.bench.network.emulating MODULE ORDERS DESCRIPTION
"""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.errors import ConfigError, IslandFailed
from diloco.launch.process.emulated import Emulated

_MISSED_CHECK = 1
_LAST_WORDS = 2000
_LOOK_S = 0.1


#: Of a bench on links between two.
ISLANDS = ("east", "west")


@dataclass(frozen=True, slots=True)
class LinkRow:
    """A link between two islands, the same both ways.

    Attributes:
        name: What --rows chooses by.
        bandwidth: Such as "100Mbit/s".
        rtt_ms: Round trip.
        is_judged: Whether figures on it have bars that those on others have not.
        loss: Share of packets that the network loses.
    """

    name: str
    bandwidth: str
    rtt_ms: float
    is_judged: bool = False
    loss: float = 0.0

    @property
    def toml(self) -> str:
        """Write the file of the emulated network."""
        return network_toml(self.bandwidth, self.rtt_ms / 2, ISLANDS, loss=self.loss, is_mesh=True)


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A link of every island of a star, the same both ways.

    Attributes:
        bandwidth: As a file of an emulated network has it.
        rtt_ms: Round trip.
        loss: Share of the packets that are lost, each way.
        congestion_control: Of every route.
        islands: How many send at once.
    """

    bandwidth: str
    rtt_ms: float
    loss: float = 0.0
    congestion_control: str = "cubic"
    islands: int = 1

    @property
    def text(self) -> str:
        """Say it in some words."""
        parts = [self.bandwidth, f"{self.rtt_ms:g} ms"]
        parts += [f"{self.loss:.1%} loss"] if self.loss else []
        parts += [self.congestion_control]
        parts += [f"{self.islands} islands"] if self.islands > 1 else []
        return ", ".join(parts)

    @property
    def toml(self) -> str:
        """Write the file of the emulated network."""
        sites = [f"site-{n}" for n in range(self.islands)]
        return network_toml(
            self.bandwidth,
            self.rtt_ms / 2,
            sites,
            loss=self.loss,
            congestion_control=self.congestion_control,
        )


def network_toml(
    bandwidth: str,
    delay_ms: float,
    islands: Sequence[str],
    *,
    loss: float = 0.0,
    congestion_control: str = "cubic",
    is_mesh: bool = False,
) -> str:
    """Write the file of an emulated network: long fat paths need buffers and no idle start.

    Args:
        bandwidth: Of every link, each way.
        delay_ms: Of a link, one way.
        islands: Their names.
        loss: Share of the packets that a link loses, each way.
        congestion_control: Of every route.
        is_mesh: Whether links join the islands, the first of which has the coordinator; else each
            has one to a core that has it.
    """
    way = f'{{ bandwidth = "{bandwidth}", delay = "{delay_ms:g}ms", loss = {loss:g} }}'
    place = f'"mesh"\ncoordinator_at = "{islands[0]}"\nlink = "measured"' if is_mesh else '"star"'
    link = "" if is_mesh else 'link = "measured"\n'
    sites = "".join(f"[islands.{island}]\n{link}" for island in islands)
    return (
        f'topology = {place}\n[tcp]\ncongestion_control = "{congestion_control}"\n'
        f'max_buffer = "64MiB"\nslow_start_after_idle = false\n'
        f'[links.measured]\nsource = "diloco bench"\nup = {way}\ndown = {way}\n{sites}'
    )


def measure_inside(
    what: str,
    toml: str,
    module: str,
    orders: Any,
    place: Path,
    on_look: Callable[[], None],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Call the function `inside` of a module in a network, checked against its specification.

    Args:
        what: The network in words, for errors.
        toml: Its file.
        module: Whose `inside` gets the orders, the network, and `place` for files.
        orders: JSON values for it.
        place: An empty directory.
        on_look: Called often; what it raises takes the network down.

    Returns:
        What was found, and the emulation's record. A link that is not as specified carries no
        measurement: what was found is empty then.

    Raises:
        ConfigError: If networks cannot be emulated here.
        IslandFailed: If the module failed.
    """
    wan_file, orders_file = place / "link.toml", place / "orders.json"
    wan_file.write_text(toml)
    orders_file.write_text(json.dumps(orders))
    inside = f'exec {sys.executable} -m {__name__} {module} {orders_file} "$DILOCO_EMULATION"'
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
    """Say in a word whether the network was as specified; None: nobody looked."""
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


def main(module: str, orders_file: Path, description: Path) -> None:
    """Measure in this process's network, and write found.json next to the orders."""
    emulated = Emulated(json.loads(description.read_text()))
    orders, place = json.loads(orders_file.read_text()), orders_file.parent
    found = importlib.import_module(module).inside(orders, emulated, place)
    (place / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
