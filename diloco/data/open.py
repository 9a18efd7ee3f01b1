"""Opens the text that a run file names: the one place that chooses between its kinds."""

from __future__ import annotations

from diloco.config.schema import Config
from diloco.data.batches import Data
from diloco.data.corpus import TextCorpus, TextData
from diloco.data.streams import StreamData
from diloco.errors import ConfigError


def open_data(config: Config) -> Data:
    """Open the run's text; what can be wrong with it without reading all of it is found here.

    Args:
        config: `data`, `model.vocab_size`, `run.seed` and the most islands are read.

    Raises:
        ConfigError: If the text cannot be found or read, is too short, or has more token ids than
            the model.
    """
    seed, length = config.run.seed, config.data.sequence_length
    data: Data
    if config.data.source == "stdlib":
        data = TextData(TextCorpus.from_stdlib(), sequence_length=length, seed=seed)
    else:
        data = StreamData(config.data, seed=seed, num_slots=config.max_islands)
    if config.model.vocab_size < data.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {config.model.vocab_size} is less than the text's "
            f"{data.vocab_size} token ids; set model.vocab_size = {data.vocab_size} or more"
        )
    return data
