"""Small real files: pieces of the standard library's sources as text, JSON and Parquet."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from diloco.config.data import DataConfig
from diloco.data.streams import StreamData

SEED = 7
LENGTH = 32
#: Of the hub's one data set.
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@cache
def pieces(number: int) -> tuple[str, ...]:
    """Real paragraphs of code of 20 to 400 characters, all different, some not ASCII."""
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, None] = {"naïve café — 東京 🜚 piece of text that is not ASCII": None}
    for path in sorted(root.glob("*.py")):
        for piece in path.read_text(encoding="utf-8").split("\n\n"):
            if 20 <= len(piece.strip()) <= 400:
                found[piece.strip("\n")] = None
        if len(found) >= number:
            break
    return tuple(list(found)[:number])


def write_jsonl(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": n, field: t}) + "\n" for n, t in enumerate(texts)))
    return path


def write_stdlib(path: Path) -> Path:
    """Write modules of the standard library as JSON lines, a document each."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    return write_jsonl(path, [source.read_text() for source in sources])


def write_parquet(path: Path, texts: Sequence[str], row_group: int = 7) -> Path:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table(
        {"id": list(range(len(texts))), "text": pyarrow.array(texts, pyarrow.string())}
    )
    pyarrow.parquet.write_table(table, path, row_group_size=row_group)
    return path


def write_tokenizer(directory: Path, eos: str = "<|endoftext|>") -> Path:
    """Train a byte-level BPE of 400 ids and save it as `transformers` does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces(200), trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    if eos:
        (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return directory


def data_config(sources: dict[str, dict[str, Any]], **settings: Any) -> DataConfig:
    defaults = {"sequence_length": LENGTH, "held_out_documents": 5, "shuffle_window": 4}
    return DataConfig.model_validate({**defaults, "sources": sources, **settings})


def open_streams(
    sources: dict[str, dict[str, Any]], *, num_slots: int = 1, seed: int = SEED, **settings: Any
) -> StreamData:
    return StreamData(data_config(sources, **settings), seed=seed, num_slots=num_slots)
