"""Files of a source: found in order, told apart by kind, and known by size and content."""

import pytest

from diloco.data.files import TextFile, find_files, first_difference, kind_of, parts_of
from diloco.errors import ConfigError


def names(found):
    return [path.as_posix() for path in found]


@pytest.fixture(autouse=True)
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.jsonl", "b/1.jsonl", "a/deep/3.jsonl", "a/4.JSONL.gz", "a/notes"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["b/*.jsonl"], ["b/1.jsonl", "b/2.jsonl"]),
        (["b/2.jsonl", "b/*"], ["b/2.jsonl", "b/1.jsonl"]),
        (["**/*.jsonl"], ["a/deep/3.jsonl", "b/1.jsonl", "b/2.jsonl"]),
        (["a/*"], ["a/4.JSONL.gz", "a/notes"]),
    ],
    ids=["sorted", "in-order-and-once", "any-depth", "files-only"],
)
def test_files_are_found_in_a_fixed_order(patterns, expected):
    assert names(find_files(patterns, "x")) == expected


@pytest.mark.parametrize(
    ("pattern", "answer"),
    [
        ("c/*.jsonl", r'x\.files: "c/\*\.jsonl" matches no file; paths count from .*; try: ls c/'),
        ("b", r'"b" is a directory; name its files, such as "b/\*\*/\*\.jsonl"'),
    ],
)
def test_pattern_without_files_is_refused_with_what_to_type(pattern, answer):
    with pytest.raises(ConfigError, match=answer):
        find_files([pattern], "x.files")


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [("b/*", "JSON lines"), ("a/4*", "JSON lines"), ("a/notes", "text")],
)
def test_kind_is_told_by_the_name(pattern, kind):
    assert kind_of(find_files([pattern], "x"), "x") == kind


def test_files_of_two_kinds_are_refused():
    with pytest.raises(ConfigError, match=r"a/4\.JSONL\.gz is JSON lines and a/notes is text"):
        kind_of(find_files(["a/*"], "x"), "x")


@pytest.mark.parametrize("num_bytes", [0, 5, 40_000, 1_000_000])
def test_digest_sees_every_size_and_changes_at_start_middle_and_end(num_bytes, tmp_path):
    path = tmp_path / "text"
    content = bytearray(b"x" * num_bytes)
    path.write_bytes(content)
    (part,) = parts_of([path], "x")

    assert part == TextFile("text", num_bytes, part.digest)
    for changed in {0, num_bytes // 2, num_bytes - 1} if num_bytes else ():
        content[changed] ^= 1
        path.write_bytes(content)
        assert parts_of([path], "x") != [part], changed
        content[changed] ^= 1
    path.write_bytes(content + b"x")
    assert parts_of([path], "x")[0].digest != part.digest


def test_digest_reads_little_of_a_large_file(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)

    (part,) = parts_of([path], "x")

    assert part.num_bytes == 1 << 40


A, B, C = (TextFile(name, 10, name * 20) for name in "abc")


@pytest.mark.parametrize(
    ("here", "there", "answer"),
    [
        ([A, B], [A, B], ""),
        ([A, C], [A, B], "part 2 was b (10 bytes, bbbbbbbbbbbb) and is c (10 bytes, cccccccccccc)"),
        ([A, TextFile("b", 11, B.digest)], [A, B], "it has another size"),
        ([A, TextFile("b", 10, "d")], [A, B], "it has other content"),
        ([TextFile("d", 10, A.digest)], [A, B], "it has another name"),
        ([A, B, C], [A, B], "c (10 bytes, cccccccccccc) was not there"),
        ([A], [A, B], "b (10 bytes, bbbbbbbbbbbb) is gone"),
    ],
)
def test_first_difference_is_named(here, there, answer):
    difference = first_difference(here, there)

    assert answer in difference
    assert bool(answer) == bool(difference)
