"""What the input path costs a rank: from a source to the rows that it takes, by kind of source.

The text is that of the standard library, as JSON lines; the token files are prepared from it. Each
row draws whole batches of an island and keeps the rows of one of its ranks; between its blocks
as many rows are copied from a mapped file without any of this, which is what none can be faster
than. All of it fits into the page cache; no thread makes batches ahead.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from diloco.config.data import DataConfig, SourceConfig
from diloco.data.corpus import TextCorpus
from diloco.data.prepare import prepare
from diloco.data.streams import StreamData
from diloco.extras import require
from diloco.report.rows import Column, Report, Requirement, Watch, matching

_BYTES, _TOKENIZER, _FILES = "text-bytes", "text-tokenizer", "token-files"
_RANKS = (1, 8, 64)
_JUDGED = f"{_FILES}-64"
_SEPARATOR = "<end>"
_COLUMNS = (
    Column("source", "source"),
    Column("ranks", "ranks", "d"),
    Column("tokens_per_s", "tokens/s a core", ",.0f"),
    Column("copied_per_s", "plain copy", ",.0f"),
    Column("ratio", "/copy", ".3f"),
)


@dataclass(frozen=True, slots=True)
class InputSetting:
    """What is drawn and judged.

    Attributes:
        text_bytes: Of the text, and of the part of it that the tokenizer is trained on.
        vocab_size: Of the tokenizer, a byte-level BPE.
        document_bytes: Of a document, about.
        sequence_length: Predicted tokens of a sequence.
        batch_size: Sequences of an island and inner step.
        blocks: Of each row; figures are their medians.
        block_s: CPU seconds of a block, at least.
        least: Tokens a CPU second of token files, of an island of 64 ranks.
    """

    text_bytes: int = 8_000_000
    vocab_size: int = 4096
    document_bytes: int = 4000
    sequence_length: int = 2048
    batch_size: int = 128
    blocks: int = 5
    block_s: float = 0.4
    least: float = 20e6


SETTING = InputSetting()


def run(watch: Watch, rows: Sequence[str] = (), *, setting: InputSetting = SETTING) -> Report:
    """Time every row whose name matches.

    Raises:
        ConfigError: If a pattern matches no row, or a package is missing.
    """
    kinds = {f"{kind}-{n}": (kind, n) for kind in (_BYTES, _TOKENIZER, _FILES) for n in _RANKS}
    wanted = matching(kinds, rows)
    for package in ("datasets", "tokenizers"):
        require("diloco bench data", package)
    with _without_passes(), tempfile.TemporaryDirectory() as directory:
        data, ids = _prepared(Path(directory), setting, watch)
        results = []
        for done, name in enumerate(wanted):
            watch(name, done, len(wanted))
            kind, num_ranks = kinds[name]
            results.append(_measure(data[kind], ids, kind, num_ranks, setting))
    requirements = [
        Requirement(
            f"{name}: tokens a CPU second",
            row["tokens_per_s"],
            setting.least,
            "tokens/s",
            is_at_least=True,
        )
        for name, row in zip(wanted, results, strict=True)
        if name == _JUDGED
    ]
    return Report("data", asdict(setting), _COLUMNS, results, requirements)


@contextlib.contextmanager
def _without_passes() -> Iterator[None]:
    """Do not log that the text begins again: it is short, and gone through hundreds of times."""
    packing = logging.getLogger("diloco.data.packing")
    before = packing.level
    packing.setLevel(logging.ERROR)
    try:
        yield
    finally:
        packing.setLevel(before)


def _prepared(
    directory: Path, setting: InputSetting, watch: Watch
) -> tuple[dict[str, StreamData], np.memmap[Any, Any]]:
    """Write the text, train the tokenizer and make the token files; returns all kinds, and ids."""
    text = TextCorpus.from_stdlib().train[: setting.text_bytes].tobytes()
    size = setting.document_bytes
    documents = [text[at : at + size].decode(errors="ignore") for at in range(0, len(text), size)]
    path = directory / "text.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    tokenizer = _train(documents, directory / "tokenizer.json", setting.vocab_size)

    def config(file: Path, tokenizer: str) -> DataConfig:
        return DataConfig(
            sequence_length=setting.sequence_length,
            held_out_documents=10,
            tokenizer=tokenizer,
            separator="" if tokenizer == "bytes" else _SEPARATOR,
            sources={"text": SourceConfig(files=(str(file),), repeat=True)},
        )

    with_tokenizer = config(path, str(tokenizer))
    file = prepare(with_tokenizer, directory, num_processes=1, show=watch)["text"].path
    configs = {
        _BYTES: config(path, "bytes"),
        _TOKENIZER: with_tokenizer,
        _FILES: config(file, str(tokenizer)),
    }
    data = {kind: StreamData(each, seed=1, num_slots=1) for kind, each in configs.items()}
    return data, np.memmap(file, dtype="<u2", mode="r")


def _train(documents: Sequence[str], path: Path, vocab_size: int) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents[: max(1, len(documents) // 4)], trainer)
    tokenizer.save(str(path))
    return path


def _measure(
    data: StreamData, ids: np.memmap[Any, Any], kind: str, num_ranks: int, setting: InputSetting
) -> dict[str, Any]:
    batches = data.batches(
        slots=(0,), num_slots=1, batch_size=setting.batch_size, dp_coordinate=0, dp_size=num_ranks
    )
    steps = itertools.count()
    length = setting.sequence_length
    rows = np.empty((setting.batch_size // num_ranks, length + 1), dtype=np.int64)
    starts = np.random.default_rng(1).integers(len(ids) - length - 1, size=len(rows)).tolist()

    def copy() -> None:
        for row, start in zip(rows, starts, strict=True):
            row[:] = ids[start : start + length + 1]

    num_tokens = setting.batch_size * length
    batches.batch(next(steps))  # and the first window
    drawn, copied = [], []
    for _ in range(setting.blocks):
        drawn.append(num_tokens / _cpu_s(lambda: batches.batch(next(steps)), setting.block_s))
        copied.append(num_tokens / _cpu_s(copy, setting.block_s / 4))
    return {
        "source": kind,
        "ranks": num_ranks,
        "tokens_per_s": statistics.median(drawn),
        "copied_per_s": statistics.median(copied),
        "ratio": statistics.median(a / b for a, b in zip(drawn, copied, strict=True)),
    }


def _cpu_s(work: Callable[[], object], least_s: float) -> float:
    """Repeat work for so long; returns CPU seconds of the process for one."""
    began = time.process_time()
    number, elapsed = 0, 0.0
    while elapsed < least_s:
        work()
        number, elapsed = number + 1, time.process_time() - began
    return elapsed / number
