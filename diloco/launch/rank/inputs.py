"""Opens text and warm start of a run, before anything is started.

A model of transformers as well, which alone can tell whether a mesh is possible for it.

The ranks open the same again, each for itself; here a mistake is found before any is started.
"""

from __future__ import annotations

from collections.abc import Iterator

from diloco.checkpoint.checkpoints import MANIFEST, found_directory, read_manifest
from diloco.checkpoint.warm_start import find_warm_start, is_hub_model
from diloco.compression.registry import get_codec
from diloco.config.hugging_face import FAMILY as HUGGING_FACE
from diloco.config.schema import Config
from diloco.data.open import open_data
from diloco.data.streams import StreamData
from diloco.data.tokenizer import is_hub_tokenizer
from diloco.outer.combination import get_rule
from diloco.security.security import added_transport
from diloco.trainer.models.families import check_mesh, shape_of


def open_inputs(
    config: Config, *, resume_step: int | None = None, may_download: bool
) -> tuple[str, ...]:
    """Open text and warm start as the ranks will, held-out documents included.

    Args:
        config: The run.
        resume_step: Inner step of the run checkpoint to go on from, whose text it must be; then
            no warm start is looked for. None: a new run.
        may_download: Whether what is on the Hugging Face hub is opened, too.

    Returns:
        What was found, and what was not looked at, one a line.

    Raises:
        ConfigError: As the ranks would, but for what was not looked at.
    """
    check_added(config)
    left_out = () if may_download else tuple(_on_hub(config))
    lines = [f"{setting}: on the hub, not looked at until the run starts" for setting in left_out]
    if any(setting.startswith("data.") for setting in left_out):
        _open_files(config)
    else:
        data = open_data(config)
        data.evaluation(config.evaluation.num_sequences)
        lines.append(f"text: digest {data.digest[:16]}, {data.vocab_size} token ids")
        if resume_step is not None:
            for island in sorted(config.islands):
                path = found_directory(config.checkpoint_dir, island, resume_step)
                if (path / MANIFEST).exists():  # else it is at another site, or in a mirror
                    data.check_content(read_manifest(path)["data"])
    for each in config.islands.values():
        if config.model.family == HUGGING_FACE:
            check_mesh(shape_of(config.model), each.mesh)
    if resume_step is None and not any(setting.startswith("run.") for setting in left_out):
        warm = find_warm_start(config)
        lines += [] if warm is None else [f"warm start: {warm.source}"]
    return tuple(lines)


def check_added(config: Config) -> None:
    """Import what other packages add of codec, merge rule and transport: it takes no text.

    Raises:
        ConfigError: If it cannot be imported, or is not what it must be.
    """
    outer = config.outer
    for name in (outer.uplink_codec, outer.downlink_codec, *outer.codec_by_name):
        get_codec(name.rpartition("=")[2])
    get_rule(outer.merge_rule)
    added_transport(config.transport.kind)


def _on_hub(config: Config) -> Iterator[str]:
    """Name the settings whose values the hub has to give."""
    if is_hub_tokenizer(config.data.tokenizer):
        yield f'data.tokenizer = "{config.data.tokenizer}"'
    for name, source in sorted(config.data.sources.items()):
        if source.hub:
            yield f'data.sources.{name}.hub = "{source.hub}"'
    if is_hub_model(config.run.warm_start):
        yield f'run.warm_start = "{config.run.warm_start}"'


def _open_files(config: Config) -> None:
    """Open those of the sources that are files, and the tokenizer if it is."""
    sources = {name: source for name, source in config.data.sources.items() if source.files}
    is_hub = is_hub_tokenizer(config.data.tokenizer)
    tokenizer = "bytes" if is_hub else config.data.tokenizer
    files = config.data.model_copy(update={"sources": sources, "tokenizer": tokenizer})
    StreamData(files, seed=config.run.seed, num_slots=config.max_islands)
