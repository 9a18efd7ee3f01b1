"""Models in the format of `torch.distributed.checkpoint` (DCP): reading any, writing torchtitan's.

    DIR/.metadata         what is there, a pickle
    DIR/__0_0.distcp      tensors

Layout and number of the ranks that wrote one do not matter. The metadata is read by an unpickler
that makes nothing but the records it is made of, so a directory from anywhere runs no code; the
tensors are loaded as weights only.

See torch.distributed.checkpoint of PyTorch 2.13; torchtitan, `checkpoint.initial_load_path`.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from diloco.errors import ConfigError

METADATA = ".metadata"
_RECORDS = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *(
        (_RECORDS, name)
        for name in (
            "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "BytesStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
}  # fmt: skip
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class DcpDirectory:
    """The tensors of a DCP directory, by the names that were saved.

    Attributes:
        shapes: Name -> shape, of what are tensors.
    """

    def __init__(self, directory: Path) -> None:
        """Read what is there.

        Raises:
            ConfigError: If that is not DCP's, or names files outside the directory.
        """
        self._directory = directory
        self._reader = _Reader(directory)
        self._tensors = {
            name: about
            for name, about in self._reader.metadata.state_dict_metadata.items()
            if isinstance(about, TensorStorageMetadata)
        }
        self.shapes = {name: tuple(about.size) for name, about in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """Read one tensor whole, as float32, from all files that have parts of it.

        Raises:
            ConfigError: If it cannot be read, is not of a floating type that weights have, or not
                finite.
        """
        about = self._tensors[name]
        if (dtype := about.properties.dtype) not in _DTYPES:
            raise ConfigError(
                f"{name} in {self._directory} is of type {dtype}: weights must be float32, "
                "bfloat16 or float16; save the model in one of these"
            )
        values = torch.empty(about.size, dtype=torch.float32)
        try:
            with _alone():
                load({name: values}, storage_reader=self._reader, no_dist=True)
        except Exception as error:  # of many types, CheckpointException for most
            raise ConfigError(
                f"{name} in {self._directory} cannot be read: {error}; copy the directory again"
            ) from error
        if not values.isfinite().all():
            raise ConfigError(f"{name} holds values that are not finite: the model is broken")
        return values


def write_dcp(
    directory: Path, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
) -> None:
    """Write a model to a new directory, one tensor at a time, a file each.

    Args:
        directory: Empty, or to be made.
        shapes: Name -> shape of every tensor; float32.
        read: Gives a tensor by name.

    Raises:
        OSError: If the disk fails.
    """
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    writer = FileSystemWriter(directory, single_file_per_rank=False)
    with _alone():
        save(state, storage_writer=writer, planner=_Planner(read), no_dist=True)


class _Planner(DefaultSavePlanner):
    """Reads a tensor when it is written, so that one is in memory at a time."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        """Assign only."""
        super().__init__(flatten_state_dict=False)
        self._read = read

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the values of what is to be written."""
        return self._read(write_item.index.fqn).contiguous()


class _Unpickler(pickle.Unpickler):
    """Makes DCP's records, and nothing else whatever the pickle asks for."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what is allowed."""
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no such metadata has")


class _Reader(FileSystemReader):
    """Reads the metadata once, by the careful unpickler."""

    def __init__(self, directory: Path) -> None:
        """Read it."""
        super().__init__(directory)
        path = directory / METADATA
        try:
            with path.open("rb") as file:
                self.metadata: Metadata = _Unpickler(file).load()
            files = {info.relative_path for info in self.metadata.storage_data.values()}
        except Exception as error:  # a pickle that is damaged raises anything
            raise ConfigError(
                f"{path} is not the metadata of torch.distributed.checkpoint: {error}; copy the "
                "directory again"
            ) from error
        if outside := sorted(name for name in files if Path(name).name != name):
            raise ConfigError(
                f"{path} names files outside {directory}: {outside[0]}; do not use it"
            )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what was read."""
        return self.metadata


@contextmanager
def _alone() -> Iterator[None]:
    """Say nothing of that this process reads or writes alone: it is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
