"""The runs of one link of `diloco bench race`, also made inside an emulated network.

diloco emulate LINK.toml --check -- python -m diloco.bench.training.race_link ORDER DESCRIPTION

Every run is the command that a person would type, so that what is compared is what they would get.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diloco.bench.network.emulating import run_watched
from diloco.errors import IslandFailed

Message = dict[str, Any]  # JSON values


def race_on_link(
    order: Mapping[str, Any],
    directory: Path,
    *,
    on_run: Callable[[str, int], None] = lambda method, number: None,
    on_look: Callable[[], None] = lambda: None,
) -> Message:
    """Train with every method, one after the other.

    Args:
        order: By method `words` (of the command, before the run file), `options` (after it) and
            `toml` (the run file); coordinator.state_dir there is METHOD below `directory`.
        directory: For run files, logs and what runs leave behind.
        on_run: Hears which method begins, and how many have ended.
        on_look: Called often; what it raises ends the run.

    Returns:
        By method: `wall_s`, `utilisation`, `nats_per_byte`, and `bytes_up` and `bytes_down` of the
        island that moved most.

    Raises:
        IslandFailed: If a run failed; says what it printed last.
    """
    found: Message = {}
    for number, (method, run) in enumerate(order.items()):
        on_run(method, number)
        run_file = directory / f"{method}.toml"
        run_file.write_text(run["toml"])
        command = [sys.executable, "-m", "diloco", *run["words"], str(run_file), *run["options"]]
        code, words = run_watched(command, directory / f"{method}.log", on_look)
        if code:
            raise IslandFailed(f"{method}: {' '.join(command)} failed, exit code {code}: {words}")
        summary = json.loads((directory / method / "summary.json").read_text())
        found[method] = (of_baseline if "baseline" in summary else of_run)(summary)
    return found


def of_baseline(summary: Mapping[str, Any]) -> Message:
    """Take the figures out of the summary of `diloco baseline`."""
    islands = summary["islands"].values()
    return {
        "wall_s": summary["wall_s"],
        "utilisation": summary["utilisation"],
        "nats_per_byte": summary["nats_per_byte"],
        "bytes_up": max(island["bytes_up"] for island in islands),
        "bytes_down": max(island["bytes_down"] for island in islands),
    }


def of_run(summary: Mapping[str, Any]) -> Message:
    """Take the figures out of the summary of `diloco local`: of the slowest and worst island."""
    islands = summary["islands"]
    return {
        "wall_s": max(island["wall_s"] for island in islands),
        "utilisation": min(island["utilisation"] for island in islands),
        "nats_per_byte": max(island["published_nats_per_byte"] for island in islands),
        "bytes_up": max(island["bytes_up"] for island in islands),
        "bytes_down": max(island["bytes_down"] for island in islands),
    }


def main(order_path: Path) -> None:
    """Make all runs in this process's network, and write found.json beside the order."""
    found = race_on_link(json.loads(order_path.read_text()), order_path.parent)
    (order_path.parent / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
