"""Each kind of fault of an object store, as a client of it meets it, and that it is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from diloco.chaos.bucket import NOT_NEEDED, WRITTEN_AGAIN, Bucket, serving_bucket
from diloco.chaos.plan import BUCKET, Kind, Strength, TimedFault
from diloco.objects.store import ObjectStore, StoreAway

LARGE = bytes(range(256)) * 400


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with serving_bucket("state", tmp_path_factory.mktemp("s3") / "log") as bucket:
        yield bucket


@pytest.fixture
def bucket(served: Bucket) -> Iterator[Bucket]:
    yield served
    served.end()


@pytest.fixture
def store(bucket: Bucket, request: pytest.FixtureRequest) -> ObjectStore:
    store = ObjectStore(f"s3://state/{request.node.name}", environment=bucket.environment)
    store.put("syncer/data/there", LARGE)
    return store


def begin(bucket: Bucket, kind: Kind, **strength: object) -> bool:
    values = {"share": 1.0, "delay": "300ms", "bandwidth": "2Mbit/s", **strength}
    strong = Strength.model_validate(values)
    return bucket.begin(TimedFault(0, kind, BUCKET, 0.0, 10.0, 7, strong))


def create(store: ObjectStore) -> object:
    return store.create("log/1", LARGE)


def read(store: ObjectStore) -> object:
    return store.get("syncer/data/there")


@pytest.mark.parametrize(
    ("kind", "refused", "done", "said"),
    [
        (Kind.CUT, [create, read], False, "error sending request"),
        (Kind.ERRORS, [create, read], False, "on purpose"),
        (Kind.READ_ONLY, [create], False, "AccessDenied"),
        (Kind.CLOCK, [create, read], False, "RequestTimeTooSkewed"),
        (Kind.CUT_REQUESTS, [create], False, "error sending request"),
        (Kind.CUT_REPLIES, [create, read], True, "error sending request"),
    ],
    ids=lambda value: value if isinstance(value, Kind) else "",
)
def test_a_request_is_refused_and_what_is_there_stays(
    bucket: Bucket,
    store: ObjectStore,
    kind: Kind,
    refused: list[Callable[[ObjectStore], object]],
    done: bool,
    said: str,
) -> None:
    assert begin(bucket, kind)

    for call in refused:
        with pytest.raises(StoreAway, match=said):
            call(store)
    if read not in refused:
        assert read(store) == LARGE

    assert bucket.num_met >= len(refused)
    bucket.end()
    assert read(store) == LARGE
    assert create(store) is not done, "it was done, though no answer arrived"


def test_a_share_of_the_requests_is_met_and_tried_again(bucket: Bucket, store: ObjectStore) -> None:
    begin(bucket, Kind.ERRORS, share=0.3)

    assert [store.get("syncer/data/there") for _ in range(8)] == [LARGE] * 8

    assert bucket.num_met


@pytest.mark.parametrize("kind", [Kind.DELAY, Kind.THROTTLE])
def test_an_answer_is_late(bucket: Bucket, store: ObjectStore, kind: Kind) -> None:
    begin(bucket, kind)
    began = time.monotonic()

    assert read(store) == LARGE

    # 300 ms; or 819 kbit at 2 Mbit/s: 410 ms
    assert time.monotonic() - began >= 0.3 and bucket.num_met == 1


def test_a_bit_of_what_is_read_is_another(bucket: Bucket, store: ObjectStore) -> None:
    begin(bucket, Kind.CORRUPT)

    there = store.get("syncer/data/there")

    assert there is not None
    assert sum((a ^ b).bit_count() for a, b in zip(there, LARGE, strict=True)) == 1
    assert store.names("syncer/data") == ["syncer/data/there"]
    assert store.size("syncer/data/there") == len(LARGE)
    bucket.end()
    assert read(store) == LARGE


def test_the_newest_object_of_a_chain_is_lost_until_it_is_written_again_or_let_go(
    bucket: Bucket, store: ObjectStore
) -> None:
    store.put("alive/1", b"no data")
    assert begin(bucket, Kind.LOSE_OBJECT)
    assert bucket.lost.endswith("/syncer/data/there") and read(store) is None

    assert not bucket.num_met
    store.put("syncer/data/there", LARGE)
    assert (bucket.num_met, bucket.lost_is) == (1, WRITTEN_AGAIN)

    bucket.end()
    assert begin(bucket, Kind.LOSE_OBJECT)
    store.delete(["syncer/data/there"])
    assert (bucket.num_met, bucket.lost_is) == (1, NOT_NEEDED)
    bucket.end()
    assert not begin(bucket, Kind.LOSE_OBJECT), "no object is known to be there"
