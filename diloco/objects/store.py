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
import itertools
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from diloco.durable import DiskFull
from diloco.errors import ConfigError
from diloco.extras import missing
from diloco.transport.contracts import Buffer

if TYPE_CHECKING:
    from obstore import SignCapableStore
    from obstore.store import ObjectStore as _Store

#: Bytes of one request of a large object, at least: S3 takes 10,000 parts. Requests under way at
#: once.
_PART_BYTES = 16 << 20
_MOST_PARTS = 9_000
_REQUESTS = 16
_PIECES = 8
#: A request that takes longer is broken: of a part (16 MiB at 1.2 Mbit/s), of what one event loop
#: or another may wait for, and of a sign of life.
_BULK_TIMEOUT = timedelta(seconds=120)
_QUICK_TIMEOUT = timedelta(seconds=10)
_PROBE_TIMEOUT = timedelta(seconds=3)
_CONNECT_TIMEOUT = timedelta(seconds=5)
#: A store that answers 500, 503 or not at all is asked again for that long by one call; for a part
#: of a large object, which the others would have to be sent again for, longer.
_RETRIED = timedelta(seconds=5)
_BULK_RETRIED = timedelta(minutes=10)
_MOST_RETRIES = 5
_MOST_BULK_RETRIES = 10


class StoreAway(DiskFull):
    """The object store did not take or give something: it may be tried again, as on a full disk."""

    #: Whether nothing was sent, since the store was away a moment ago.
    is_unsent = False
    is_room = False
    lack = "the object store of run.state does not answer"
    remedy = (
        "see to its name, to the credentials in the environment (AWS_ACCESS_KEY_ID and so on, see "
        "diloco/coordinator/README.md) and to the line to it"
    )


class ObjectLost(ConfigError):
    """An object of a run's state is gone, or holds other bytes than were written."""


class ObjectStore:
    """Objects below one URL; any thread may use it."""

    def __init__(self, url: str, *, environment: Mapping[str, str] | None = None) -> None:
        """Make the client; nothing is reached yet.

        Args:
            url: Of the prefix.
            environment: Variables that count in place of those of this process.

        Raises:
            ConfigError: If the package is missing, or the URL is none that it knows.
        """
        self.url = url
        #: Whether, once the store is away, calls fail at once until a `put` that probes has found
        #: it again: for one whose callers wait for it, and next to one that probes.
        self.fails_fast = False
        self._away: StoreAway | None = None
        config = _config(environment or {})
        self._bulk = _opened(url, config, _BULK_TIMEOUT, _MOST_BULK_RETRIES, _BULK_RETRIED)
        self._quick = _opened(url, config, _QUICK_TIMEOUT, _MOST_RETRIES)
        self._probe = _opened(url, config, _PROBE_TIMEOUT, 1)

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
                obstore.put(self._quick, name, data, mode="create", use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return False
        return True

    def copy(self, source: str, target: str) -> bool:
        """Have the store write an object once more, under another name; false: there is none.

        Raises:
            StoreAway: If the store does not do it.
        """
        import obstore

        with self._reaching(f"copy {source}"):
            try:
                obstore.copy(self._bulk, source, target)
            except FileNotFoundError:
                return False
        return True

    def put(
        self,
        name: str,
        data: Buffer | Path | Iterator[bytes],
        *,
        num_bytes: int = 0,
        probes: bool = False,
    ) -> None:
        """Write an object, in place of what has its name.

        One that `probes` is small, is written also while the store is away, and once at most. How
        many bytes an iterator gives says `num_bytes`.

        Raises:
            StoreAway: If the store does not take it.
        """
        import obstore

        store = self._probe if probes else self._bulk
        with self._reaching(f"write {name}", probes=probes):
            if isinstance(data, Path):
                num_bytes = data.stat().st_size
            elif isinstance(data, bytes | bytearray | memoryview):
                num_bytes = memoryview(data).nbytes
            part = max(_PART_BYTES, -(-num_bytes // _MOST_PARTS))
            obstore.put(store, name, data, chunk_size=part, max_concurrency=_REQUESTS)

    def get(self, name: str) -> bytes | None:
        """Read an object; None if it is not there.

        Raises:
            StoreAway: If the store does not give it.
        """
        import obstore

        with self._reaching(f"read {name}"):
            try:
                return bytes(obstore.get(self._quick, name).bytes())
            except FileNotFoundError:
                return None

    def get_large(self, name: str) -> bytes | None:
        """Read an object of any size; None if it is not there.

        Raises:
            StoreAway: If the store does not give it.
        """
        if (size := self.size(name)) is None:
            return None
        return b"".join(self.read([(name, 0, size)]))

    def get_all(self, names: Sequence[str]) -> list[bytes | None]:
        """Read several objects, some at once."""
        with ThreadPoolExecutor(_REQUESTS, "objects") as pool:
            return list(pool.map(self.get, names))

    def pieces(self, name: str, num_bytes: int) -> Iterator[bytes]:
        """Read the beginning of an object; see `read`."""
        return self.read([(name, 0, num_bytes)])

    def read(
        self, parts: Iterable[tuple[str, int, int]], *, are_whole: bool = False
    ) -> Iterator[bytes]:
        """Read parts of objects (name, start, bytes), piece by piece, one after the other.

        Some pieces are asked for at once, each again by itself where that breaks. It ends before an
        object that is not there, or has fewer bytes; where parts `are_whole` objects, or more.

        Raises:
            StoreAway: If the store does not give one.
        """
        import obstore

        def piece(name: str, begin: int, end: int, needed: int) -> bytes:
            """Read a piece; with the first one of a part comes how much there is."""
            try:
                got = obstore.get(self._bulk, name, options={"range": (begin, end)})
                size = got.meta["size"]
                if not needed or size == needed or (size > needed and not are_whole):
                    return bytes(got.bytes())
            except FileNotFoundError:
                raise
            except Exception:  # such as a part that begins beyond the end
                if not needed or obstore.head(self._quick, name)["size"] >= needed:
                    raise
            raise FileNotFoundError(name)

        left = (
            (name, begin, min(begin + _PART_BYTES, start + size), (start + size) * (begin == start))
            for name, start, size in parts
            for begin in range(start, start + size, _PART_BYTES)
        )
        with (
            self._reaching("read objects"),
            contextlib.suppress(FileNotFoundError),
            ThreadPoolExecutor(_PIECES, "pieces") as pool,
        ):
            asked = deque(pool.submit(piece, *each) for each in itertools.islice(left, _PIECES))
            while asked:
                here = asked.popleft().result()
                asked.extend(pool.submit(piece, *each) for each in itertools.islice(left, 1))
                yield here

    def size(self, name: str) -> int | None:
        """Read how many bytes an object has; None: there is none.

        Raises:
            StoreAway: If the store does not say.
        """
        import obstore

        with self._reaching(f"look at {name}"):
            try:
                return int(obstore.head(self._quick, name)["size"])
            except FileNotFoundError:
                return None

    def names(self, prefix: str) -> list[str]:
        """List objects whose name begins with `prefix`/, ascending.

        Raises:
            StoreAway: If the store does not list them.
        """
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        """List objects whose name begins with `prefix`/, with how many bytes each has.

        Raises:
            StoreAway: If the store does not list them.
        """
        import obstore

        found: dict[str, int] = {}
        with self._reaching(f"list {prefix}"):
            for page in obstore.list(self._quick, prefix):
                found.update((str(each["path"]), int(each["size"])) for each in page)
        return found

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; one that is not there is no error.

        Raises:
            StoreAway: If the store does not do it.
        """
        import obstore

        def delete(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self._quick, name)

        if each := list(names):
            with self._reaching("delete objects"):
                try:
                    obstore.delete(self._quick, each)
                except FileNotFoundError:  # of a store that ends there, and leaves the others
                    with ThreadPoolExecutor(_REQUESTS, "objects") as pool:
                        list(pool.map(delete, each))

    def sign(
        self, names: Sequence[str], method: Literal["GET", "PUT"], valid: timedelta
    ) -> list[str]:
        """Sign addresses at which anyone can read (GET) or write (PUT) objects for so long.

        Raises:
            StoreAway: If the store is asked for it, and does not answer.
        """
        import obstore

        with self._reaching(f"sign addresses of {names[0]}"):
            store = cast("SignCapableStore", self._quick)
            return list(obstore.sign(store, method, names, valid))

    @contextlib.contextmanager
    def _reaching(self, what: str, *, probes: bool = False) -> Iterator[None]:
        away = self._away  # other threads set it
        if self.fails_fast and away is not None and not probes:
            unsent = StoreAway(*away.args)
            unsent.is_unsent = True
            raise unsent
        try:
            yield
        except StoreAway:
            raise
        except Exception as error:  # of as many types as there are stores
            said = f"cannot {what} in {self.url}: {_first(error)}"
            self._away = away = StoreAway(errno.EIO, said)
            raise away from error
        self._away = None


def _opened(
    url: str, config: Any, timeout: timedelta, most_retries: int, retried: timedelta = _RETRIED
) -> _Store:
    try:
        from obstore.store import LocalStore, from_url
    except ImportError as error:
        raise missing(f"run.state = {url}", "obstore", "leave it out") from error
    try:
        if url.startswith("file://"):
            return LocalStore(url.removeprefix("file://"), mkdir=True)
        return from_url(
            url,
            config=config,
            client_options={
                "allow_http": True,  # where an endpoint says so itself
                "connect_timeout": min(_CONNECT_TIMEOUT, timeout),
                "timeout": timeout,
            },
            retry_config={"max_retries": most_retries, "retry_timeout": retried},
        )
    except Exception as error:  # of as many types as there are stores
        raise ConfigError(f"run.state = {url!r} cannot be used: {_first(error)}") from error


def _config(environment: Mapping[str, str]) -> Any:  # obstore's, by the kind of store
    return {name.lower(): value for name, value in environment.items()} or None


def _first(error: Exception) -> str:
    """What an error says, with the server's own words, and without all that some list behind it."""
    text = str(error)
    said = "".join(f" {word}" for word in re.findall(r"<(?:Code|Message)>(.*?)</", text)[:2])
    return f"{type(error).__name__}: {text.splitlines()[0].partition('<?xml')[0]}{said}"[:500]
