"""Writes manifest-ISLAND.json, next to the events: what a start of an island trains with.

The next start says by it what of the text has changed.
"""

from __future__ import annotations

import json
import logging
import platform
from pathlib import Path

import torch

from diloco.config.classes import fingerprint
from diloco.config.schema import Config
from diloco.data.batches import Data
from diloco.durable import DiskFull, write_durably
from diloco.errors import ConfigError, FingerprintMismatch
from diloco.island.session import DiLoCo
from diloco.protos.control_pb2 import Grant

logger = logging.getLogger(__name__)


def write_manifest(
    output_dir: Path, config: Config, outer: DiLoCo, grant: Grant, data: Data
) -> None:
    """Write down what this start of the island, which holds `grant`, trains with."""
    manifest = {
        "run": config.run.name,
        "island": config.island_id,
        "island_slot": outer.island_slot,
        "incarnation": grant.incarnation,
        "timeline": grant.timeline,
        "start_step": outer.start_step,
        "config_fingerprint": fingerprint(config),
        "plan_fingerprint": outer.plan.fingerprint(),
        "corpus_sha256": data.digest,
        "corpus_documents": data.num_documents,
        "text": data.content(),
        "threads": config.island.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    text = json.dumps(manifest, indent=2) + "\n"
    try:
        write_durably(_path(output_dir, config), [text.encode()])
    except DiskFull as error:
        logger.error("the manifest of this start is not written, and training goes on: %s", error)


def check_earlier_text(output_dir: Path, config: Config, data: Data) -> None:
    """Say what has changed since this island's last start, if the text has.

    Raises:
        FingerprintMismatch: Naming the source and its part, before and now.
    """
    try:
        before = json.loads(_path(output_dir, config).read_text())
        content = before["text"] if before["run"] == config.run.name else data.content()
    except (OSError, ValueError, KeyError):
        return  # it never trained here: nothing to compare with
    try:
        data.check_content(content)
    except ConfigError as changed:
        raise FingerprintMismatch(str(changed)) from changed


def _path(output_dir: Path, config: Config) -> Path:
    return output_dir / f"manifest-{config.island_id}.json"
