"""Reads the documents of one source in order, from any position, through `datasets` streaming.

The stream stays as `datasets` gives it: a mapped, filtered or shuffled one loses examples when it
resumes (datasets 4.7: up to 249 of 1,000, without an error), so decoding, filtering and shuffling
are done here and by the callers. JSON lines are read as lines and decoded one by one: the package's
JSON reader fixes the columns by the first lines it sees and fails at a key that comes later.
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.config.data import SourceConfig
from diloco.data.files import Kind, TextFile, check_command, find_files, kind_of, parts_of
from diloco.errors import ConfigError
from diloco.extras import require

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

#: Rows that are decoded at a time; the default refuses a file whose first row group is empty.
_PARQUET_ROWS = 1024
_COMMIT = re.compile(r"^[0-9a-f]{40}$")


@dataclass(frozen=True, slots=True)
class Source:
    """One stream of documents, which can be read any number of times.

    Attributes:
        setting: Dotted path of its table.
        field: Key of a record that is the document.
        parts: What it is made of.
        files: Files that have bytes; empty for the hub.
        origins: What its documents are taken from, to be compared with another source's; each
            begins with a name for people.
        is_json_lines: Whether a row is a line that is yet to be decoded.
        load: Opens the stream at its start.
    """

    setting: str
    field: str
    parts: tuple[TextFile, ...]
    files: tuple[Path, ...]
    origins: tuple[tuple[str, ...], ...]
    is_json_lines: bool
    load: Callable[[], datasets.IterableDataset]

    def read(self) -> DocumentReader:
        """Open the stream at its start.

        Raises:
            ConfigError: If it cannot be opened.
        """
        origin = f" {self.files[0]}" if self.files else ""
        try:
            return DocumentReader(self, self.load())
        except _unreadable() as error:
            look = f": {check_command(self.files[0])}" if self.files else ""
            raise ConfigError(
                f"{self.setting}: cannot open{origin}: {_told(error)}; see what is wrong there"
                f"{look}"
            ) from error


class DocumentReader:
    """Reads one stream from a position to its end, as often as it is sent back.

    Attributes:
        document: Documents read since the start, those before the position included.
    """

    def __init__(self, source: Source, dataset: datasets.IterableDataset) -> None:
        """Stand at the start of a stream that has just been opened."""
        self._source = source
        self._dataset = dataset
        self._start: dict[str, Any] = dataset.state_dict()
        self._has_seen_null = False
        self.go_to(None)

    def position(self) -> dict[str, Any]:
        """Give the position before the next document: JSON values."""
        return {"document": self.document, "stream": self._resumed or self._dataset.state_dict()}

    def go_to(self, position: Mapping[str, Any] | None) -> None:
        """Go to a position, or to the start."""
        self.document = position["document"] if position else 0
        # Until it is read from, the stream tells where it was before.
        self._resumed: dict[str, Any] | None = position["stream"] if position else self._start
        self._dataset.load_state_dict(self._resumed)
        self._rows: Iterator[Mapping[str, Any]] = iter(self._dataset)

    def read(self) -> bytes | None:
        """Read the next document: UTF-8, empty where a record has no text; None at the end.

        Raises:
            ConfigError: If it cannot be decoded, or has no text field.
        """
        self._resumed = None
        try:
            row = next(self._rows, None)
            text = None if row is None else self._text(row)
        except _unreadable() as error:
            if isinstance(error, OSError) and not self._source.files:
                raise  # the network's, not the user's: a restart may help
            raise ConfigError(
                f"{self._place()} cannot be decoded: {_told(error)}; {self._remedy()}"
            ) from error
        self.document += text is not None
        return text

    def _text(self, row: Mapping[str, Any]) -> bytes:
        record: Any = row
        if self._source.is_json_lines:
            if not row["text"].strip():
                return b""
            record = json.loads(row["text"])
            if not isinstance(record, dict):
                raise ConfigError(
                    f"{self._place()} is a JSON {type(record).__name__}, no object: write every "
                    f'document as {{"{self._source.field}": "..."}}'
                )
        field = self._source.field
        if field not in record:
            found = ", ".join(map(str, record)) or "none"
            raise ConfigError(
                f'{self._place()} has no field "{field}"; fields found: {found}; set '
                f"{self._source.setting}.field to the one that holds the text"
            )
        value = record[field]
        if value is None:
            if not self._has_seen_null:
                logger.warning("%s is null and passed over, others may follow", self._place())
            self._has_seen_null = True
            return b""
        if not isinstance(value, str):
            raise ConfigError(
                f'{self._place()}: field "{field}" is no text but {type(value).__name__}; set '
                f"{self._source.setting}.field to the one that holds the text"
            )
        return value.encode()

    def _place(self) -> str:
        """Name the document that is being read, and its file as far as the stream tells."""
        file = f" ({path})" if (path := self._file()) is not None else ""
        return f"{self._source.setting}: document {self.document + 1}{file}"

    def _file(self) -> Path | None:
        """The file that is being read; None where the stream does not tell."""
        state = self._dataset.state_dict()
        while "examples_iterable" in state:
            state = state["examples_iterable"]
        files = self._source.files
        index = state.get("shard_idx", len(files))
        return files[index] if index < len(files) else None

    def _remedy(self) -> str:
        """Say how to find what cannot be decoded, and what to do then."""
        setting, path = self._source.setting, self._file()
        if not self._source.files:
            return f"choose another {setting}.revision, or leave the source out"
        look = f"; this shows where: {check_command(path)}" if path is not None else ""
        return f"fix the file or take it out of {setting}.files{look}"


def open_source(name: str, config: SourceConfig) -> Source:
    """Find a source and what it is made of; no document is read.

    Raises:
        ConfigError: If it cannot be found or read, is empty, or has no such column.
    """
    setting = f"data.sources.{name}"
    require(setting, "datasets")
    import datasets

    datasets.disable_progress_bars()
    return _open_hub(setting, config) if config.hub else _open_files(setting, config)


def _open_files(setting: str, config: SourceConfig) -> Source:
    found = find_files(config.files, f"{setting}.files")
    kind = kind_of(found, f"{setting}.files")
    parts = parts_of(found, f"{setting}.files")
    files = [path for path, part in zip(found, parts, strict=True) if part.num_bytes]
    if not files:
        raise ConfigError(
            f"{setting}.files: {found[0]} is empty, and so are all {len(found)} files of this "
            "source; give files with text"
        )
    if kind == "parquet":
        _check_column(files[0], config.field, setting)

    def load() -> datasets.IterableDataset:
        return _stream_of(kind, files, config)

    return Source(
        setting=setting,
        field=config.field,
        parts=tuple(parts),
        files=tuple(files),
        origins=tuple((str(path.resolve()), config.field) for path in files),
        is_json_lines=kind == "JSON lines",
        load=load,
    )


def _stream_of(kind: Kind, files: Sequence[Path], config: SourceConfig) -> datasets.IterableDataset:
    """Open files of a kind; not with `load_dataset`, which tells the hub about it each time."""
    from datasets import IterableDataset

    # The package takes a path for a glob of its own.
    paths = [re.sub(r"([*?[])", r"[\1]", str(path.resolve())) for path in files]
    if kind == "parquet":
        return IterableDataset.from_parquet(paths, columns=[config.field], batch_size=_PARQUET_ROWS)
    if kind == "JSON":
        return IterableDataset.from_json(paths)
    unit = "line" if kind == "JSON lines" else config.document
    return IterableDataset.from_text(paths, sample_by="document" if unit == "file" else unit)


def _check_column(path: Path, field: str, setting: str) -> None:
    """Refuse a table without the column, before it is asked for that column only."""
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(path).names
    except _unreadable() as error:
        raise ConfigError(
            f"{setting}: {path} cannot be decoded: {_told(error)}; fix the file or take it out "
            f"of {setting}.files; this shows what is wrong: {check_command(path)}"
        ) from error
    if field not in names:
        raise ConfigError(
            f'{setting}: {path} has no field "{field}"; fields found: {", ".join(names)}; set '
            f"{setting}.field to the one that holds the text"
        )


def _open_hub(setting: str, config: SourceConfig) -> Source:
    import datasets
    from huggingface_hub import HfApi

    commit: str | None = config.revision
    if not _COMMIT.match(config.revision):
        try:
            commit = HfApi().dataset_info(config.hub, revision=config.revision).sha
        except Exception as error:  # the hub's HTTP library, so its errors, changes by release
            raise ConfigError(
                f'{setting}.hub: cannot find data set "{config.hub}", revision '
                f'"{config.revision}", on the Hugging Face hub: {_told(error)}; look at '
                f"https://huggingface.co/datasets/{config.hub}, and type: hf auth login, if it is "
                "not public"
            ) from error

    def load() -> datasets.IterableDataset:
        return datasets.load_dataset(
            config.hub,
            config.subset or None,
            split=config.split,
            revision=commit,
            streaming=True,
        )

    return Source(
        setting=setting,
        field=config.field,
        parts=(TextFile(config.hub, 0, commit or ""),),
        files=(),
        origins=((config.hub, config.subset, config.split, config.field),),
        is_json_lines=False,
        load=load,
    )


def _unreadable() -> tuple[type[Exception], ...]:
    """List what the readers of the several formats raise at bytes they cannot make sense of."""
    import pyarrow
    from datasets.exceptions import DatasetsError

    return (
        *(ValueError, TypeError, OSError, EOFError, zlib.error),
        *(pyarrow.ArrowException, DatasetsError),
    )


def _told(error: Exception) -> str:
    """Give an error's kind and first line."""
    return f"{type(error).__name__} {error}".strip().splitlines()[0]
