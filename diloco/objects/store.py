"""Reads and writes objects below one URL: s3://BUCKET/PREFIX, gs://, az://, file:///PATH.

Two kinds of writes are made: an object that must not be there yet (`create`), which of two writers
one alone succeeds with, and an object whose name says what is in it (`put`), which may be written
any number of times. Nothing else is asked of a store, so that a directory will do in tests.

What protects the store is its own: credentials come from the environment, as the tools of each
cloud read them (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY, the
metadata service of a machine). They are in no file, message or log of this program.

See obstore, https://developmentseed.org/obstore, and conditional writes (If-None-Match) of S3.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.durable import DiskFull
from diloco.errors import ConfigError
from diloco.extras import missing

if TYPE_CHECKING:
    from obstore.store import ObjectStore as _Store

#: Bytes of one request of a large object; requests under way at once.
_PART_BYTES = 16 << 20
_REQUESTS = 8
#: A request that takes longer is broken: 16 MiB at 1.2 Mbit/s.
_TIMEOUT = timedelta(seconds=120)
_CONNECT_TIMEOUT = timedelta(seconds=5)
#: A store that answers 500, 503 or not at all is asked again for that long by one call.
_RETRIED = timedelta(seconds=5)
_MOST_RETRIES = 5


class StoreAway(DiskFull):
    """The object store did not take or give something: it may be tried again, as on a full disk."""

    lack = "the object store of run.state does not answer"
    remedy = "see to its address, its credentials and the line to it"


class ObjectStore:
    """Objects below one URL; any thread may use it."""

    def __init__(
        self, url: str, *, fails_fast: bool = False, environment: Mapping[str, str] | None = None
    ) -> None:
        """Make the client; nothing is reached yet.

        Args:
            url: Of the prefix.
            fails_fast: Whether, once the store is away, calls fail at once until a `put` that
                probes has found it again: for a caller whose event loop they hold up.
            environment: Variables that count in place of those of this process.

        Raises:
            ConfigError: If the package is missing, or the URL is none that it knows.
        """
        try:
            from obstore.store import LocalStore, from_url
        except ImportError as error:
            raise missing(f"run.state = {url}", "obstore", "leave it out") from error
        self.url = url
        self._fails_fast = fails_fast
        self._away: StoreAway | None = None
        try:
            if url.startswith("file://"):
                self._store: _Store = LocalStore(url.removeprefix("file://"), mkdir=True)
            else:
                self._store = from_url(
                    url,
                    config=_config(environment or {}),
                    client_options={
                        "allow_http": True,  # where an endpoint says so itself
                        "connect_timeout": _CONNECT_TIMEOUT,
                        "timeout": _TIMEOUT,
                    },
                    retry_config={"max_retries": _MOST_RETRIES, "retry_timeout": _RETRIED},
                )
        except Exception as error:  # of as many types as there are stores
            raise ConfigError(f"run.state = {url!r} cannot be used: {_first(error)}") from error

    def create(self, name: str, data: bytes) -> bool:
        """Write an object that is not there; false, and nothing is changed, if it is.

        After a broken answer it may be there: the caller looks.

        Raises:
            StoreAway: If the store does not say.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._reaching(f"create {name}"):
            try:
                obstore.put(self._store, name, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
        return True

    def put(self, name: str, data: bytes | Path, *, probes: bool = False) -> None:
        """Write an object, in place of what has its name; `probes`: also while the store is away.

        Raises:
            StoreAway: If the store does not take it.
        """
        import obstore

        with self._reaching(f"write {name}", probes=probes):
            obstore.put(self._store, name, data, chunk_size=_PART_BYTES, max_concurrency=_REQUESTS)

    def get(self, name: str) -> bytes | None:
        """Read an object; None if it is not there.

        Raises:
            StoreAway: If the store does not give it.
        """
        import obstore

        with self._reaching(f"read {name}"):
            try:
                return bytes(obstore.get(self._store, name).bytes())
            except FileNotFoundError:
                return None

    def get_all(self, names: Sequence[str]) -> list[bytes | None]:
        """Read several objects, some at once."""
        with ThreadPoolExecutor(_REQUESTS, "objects") as pool:
            return list(pool.map(self.get, names))

    def pieces(self, name: str) -> Iterator[bytes]:
        """Read a large object, piece by piece.

        Raises:
            StoreAway: If the store does not give it, or it is not there.
        """
        import obstore

        with self._reaching(f"read {name}"):
            for piece in obstore.get(self._store, name).stream(min_chunk_size=_PART_BYTES):
                yield bytes(piece)

    def names(self, prefix: str) -> list[str]:
        """List objects whose name begins with `prefix`/, ascending.

        Raises:
            StoreAway: If the store does not list them.
        """
        import obstore

        found: list[str] = []
        with self._reaching(f"list {prefix}"):
            for page in obstore.list(self._store, prefix):
                found.extend(str(each["path"]) for each in page)
        return sorted(found)

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; one that is not there is no error.

        Raises:
            StoreAway: If the store does not do it.
        """
        import obstore

        if each := list(names):
            with self._reaching("delete objects"), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, each)

    @contextlib.contextmanager
    def _reaching(self, what: str, *, probes: bool = False) -> Iterator[None]:
        if self._fails_fast and self._away is not None and not probes:
            raise StoreAway(*self._away.args)
        try:
            yield
        except (FileNotFoundError, StoreAway):
            raise
        except Exception as error:  # of as many types as there are stores
            said = f"cannot {what} in {self.url}: {_first(error)}"
            self._away = StoreAway(errno.EIO, said)
            raise self._away from error
        self._away = None


def _config(environment: Mapping[str, str]) -> Any:  # obstore's, by the kind of store
    return {name.lower(): value for name, value in environment.items()} or None


def _first(error: Exception) -> str:
    """What an error says, without the requests and replies that some list behind it."""
    return f"{type(error).__name__}: {str(error).split(os.linesep, 1)[0]}"[:400]
