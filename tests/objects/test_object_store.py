"""What an object store says when it cannot be used, and that it never says what is secret."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from diloco.bench.network.s3_server import BUCKET, S3Server, free_port, s3_server
from diloco.errors import ConfigError
from diloco.objects.store import ObjectStore, StoreAway


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


def test_objects_are_created_once_listed_read_and_removed(server: S3Server) -> None:
    store = ObjectStore(f"s3://{BUCKET}/a", environment=server.environment)
    other = ObjectStore(f"s3://{BUCKET}/b", environment=server.environment)

    assert store.create("log/1", b"one") and not store.create("log/1", b"two")
    store.put("data/x", bytes(100_000))
    store.put("data/x", b"again")

    assert store.names("log") == ["log/1"] and other.names("log") == []
    assert store.get_all(["log/1", "log/2", "data/x"]) == [b"one", None, b"again"]
    assert b"".join(store.pieces("data/x", 5)) == b"again"
    large = bytes(range(256)) * (40 << 12)
    store.put("data/large", large)
    assert b"".join(store.pieces("data/large", len(large))) == large
    store.delete(["log/1", "log/7"])
    assert store.names("log") == []
    assert list(store.pieces("data/y", 7)) == list(store.pieces("data/x", 6)) == []
    assert list(store.read([("data/x", 9, 3)])) == []  # it begins beyond the end
    assert list(store.read([("data/x", 0, 4)])) == [b"agai"]
    whole = [("data/x", 0, 5), ("data/x", 0, 4), ("data/x", 0, 5)]
    assert list(store.read(whole, are_whole=True)) == [b"again"]


def test_an_object_that_is_gone_keeps_no_other_from_being_removed(tmp_path: Path) -> None:
    store, names = ObjectStore(f"file://{tmp_path}"), [f"log/{n}" for n in range(40)]
    for name in names:
        store.put(name, b"one")
    store.delete([names[3]])

    store.delete(names)

    assert store.names("log") == []


@pytest.mark.parametrize(
    ("bucket", "environment", "told"),
    [
        ("none", {}, "NoSuchBucket The specified bucket does not exist"),
        (BUCKET, {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}, "error sending request"),
    ],
    ids=["no bucket", "no server"],
)
def test_what_cannot_be_used_is_said_in_a_line(
    server: S3Server, bucket: str, environment: Mapping[str, str], told: str
) -> None:
    store = ObjectStore(f"s3://{bucket}/x", environment={**server.environment, **environment})

    for attempt in (
        lambda: store.create("log/1", b""),
        lambda: store.put("data/1", b""),
        lambda: store.names("log"),
    ):
        with pytest.raises(StoreAway) as found:
            attempt()
        said = str(found.value)
        assert told in said and "\n" not in said and len(said) < 700
        assert "not-a-secret" not in said
    assert "AWS_ACCESS_KEY_ID" in found.value.remedy


def test_a_url_of_nothing_is_refused_before_anything_is_reached() -> None:
    with pytest.raises(ConfigError, match=r"run.state = 'az://c/x' cannot be used.*Account"):
        ObjectStore("az://c/x")


def test_one_that_fails_fast_is_probed_by_the_one_that_may_wait(server: S3Server) -> None:
    away = {**server.environment, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}"}
    store = ObjectStore(f"s3://{BUCKET}/c", environment=away)
    store.fails_fast = True
    back = ObjectStore(f"s3://{BUCKET}/c", environment=server.environment)
    with pytest.raises(StoreAway):
        store.put("x", b"")
    store._bulk, store._probe = back._bulk, back._probe

    with pytest.raises(StoreAway):
        store.put("x", b"")
    store.put("alive", b"", probes=True)

    store.put("x", b"")
