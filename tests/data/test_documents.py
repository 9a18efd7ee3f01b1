"""Documents: read in order from every kind of file, exact from every position, refused clearly."""

import gzip
import json
import subprocess
import sys

import pytest

from diloco.config.data import SourceConfig
from diloco.data.documents import open_source
from diloco.errors import ConfigError
from tests.data.text_files import COMMIT, pieces, write_jsonl, write_parquet

#: Files of one source: borders, and one without any document.
CUTS = [(0, 23), (23, 23), (23, 40), (40, 61)]
NUM_DOCUMENTS = 61


def parts(texts):
    return [list(texts[start:stop]) for start, stop in CUTS]


def parquet(directory, texts):
    for n, part in enumerate(parts(texts)):
        write_parquet(directory / f"{n}.parquet", part)
    return {"files": "*.parquet"}


def json_lines(directory, texts):
    for n, part in enumerate(parts(texts)):
        write_jsonl(directory / f"{n}.jsonl", part, field="body")
    return {"files": "*.jsonl", "field": "body"}


def compressed(directory, texts):
    for n, part in enumerate(parts(texts)):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (directory / f"{n}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return {"files": "*.jsonl.gz"}


def json_arrays(directory, texts):
    for n, part in enumerate(parts(texts)):
        if part:
            (directory / f"{n}.json").write_text(json.dumps([{"text": text} for text in part]))
    return {"files": "*.json"}


def paragraphs(directory, texts):
    for n, part in enumerate(parts(texts)):
        (directory / f"{n}.py").write_text("\n\n".join(part))
    return {"files": "*.py"}


def lines(directory, texts):
    for n, part in enumerate(parts([text.replace("\n", " ") for text in texts])):
        (directory / f"{n}.txt").write_text("".join(f"{line}\n" for line in part))
    return {"files": "*.txt", "document": "line"}


def whole_files(directory, texts):
    for n, text in enumerate(texts):
        (directory / f"{n:03}.txt").write_text(text)
    return {"files": ["00*.txt", "*.txt"], "document": "file"}


WRITERS = [parquet, json_lines, compressed, json_arrays, paragraphs, lines, whole_files]
writers = pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)


def open_files(monkeypatch, directory, table):
    monkeypatch.chdir(directory)
    return open_source("web", SourceConfig.model_validate(table))


def read_all(reader):
    texts, positions = [], [reader.position()]
    while (text := reader.read()) is not None:
        texts.append(text.decode())
        positions.append(reader.position())
    return texts, positions


@writers
def test_documents_come_in_order_over_files_and_row_groups(write, tmp_path, monkeypatch):
    texts = pieces(NUM_DOCUMENTS)
    source = open_files(monkeypatch, tmp_path, write(tmp_path, texts))

    reader = source.read()
    read, _ = read_all(reader)

    assert read == [text.replace("\n", " ") if write is lines else text for text in texts]
    assert reader.read() is None
    assert reader.document == NUM_DOCUMENTS


@writers
def test_files_are_read_without_a_word_to_the_network(write, tmp_path, monkeypatch):
    asked = []

    def refuse(*arguments, **options):
        asked.append(arguments)
        raise OSError("no network")

    monkeypatch.setattr("socket.getaddrinfo", refuse)

    source = open_files(monkeypatch, tmp_path, write(tmp_path, pieces(NUM_DOCUMENTS)))

    assert len(read_all(source.read())[0]) == NUM_DOCUMENTS
    assert not asked


@writers
def test_reading_goes_on_exactly_from_every_position(write, tmp_path, monkeypatch):
    source = open_files(monkeypatch, tmp_path, write(tmp_path, pieces(NUM_DOCUMENTS)))
    texts, positions = read_all(source.read())

    reader = source.read()
    for n, position in enumerate(positions):
        reader.go_to(json.loads(json.dumps(position)))
        assert reader.position() == position
        rest, _ = read_all(reader)

        assert rest == texts[n:], f"position {n}"
    reader.go_to(None)
    assert read_all(reader)[0] == texts


def test_two_readers_of_a_source_do_not_disturb_each_other(tmp_path, monkeypatch):
    source = open_files(monkeypatch, tmp_path, parquet(tmp_path, pieces(NUM_DOCUMENTS)))
    one, other = source.read(), source.read()
    texts = [one.read() for _ in range(30)]
    position = one.position()

    assert [other.read() for _ in range(30)] == texts
    one.go_to(position)
    assert one.read() == other.read() == pieces(NUM_DOCUMENTS)[30].encode()


def test_records_may_have_other_keys_later_and_no_text(tmp_path, monkeypatch, caplog):
    records = [
        {"text": "a"},
        {"text": None},
        {"text": "b", "more": {"x": 1}},
        {"text": "c", "n": "y"},
    ]
    text = "\n".join(json.dumps(record) for record in records)
    (tmp_path / "a.jsonl").write_text(text + "\n\n")
    (tmp_path / "b.jsonl").write_text('{"n": 5, "text": "d"}\n')
    source = open_files(monkeypatch, tmp_path, {"files": "?.jsonl"})

    read, _ = read_all(source.read())

    assert read == ["a", "", "b", "c", "", "d"]
    assert "document 2" in caplog.text
    assert "a.jsonl) is null and passed over" in caplog.text


@pytest.mark.parametrize(
    "name", ["a[1].txt", "b?.txt", "c d.txt", "*.txt", ".hidden.txt", "e,{}.txt"]
)
def test_a_path_is_taken_literally_where_it_exists(name, tmp_path, monkeypatch):
    (tmp_path / name).write_text("this one")
    (tmp_path / "a1.txt").write_text("not this one")

    source = open_files(monkeypatch, tmp_path, {"files": name})

    assert read_all(source.read())[0] == ["this one"]


GOOD = '{"text": "good"}\n'
REFUSALS = {
    # file name, content, table, parts of the answer
    "broken-json": (
        "a.jsonl",
        GOOD + '{"text": "b"\n',
        {},
        ["document 2", "a.jsonl", "JSONDecodeError"],
    ),
    "torn-json": ("a.jsonl", GOOD + '{"te', {}, ["document 2", "cannot be decoded"]),
    "no-object": ("a.jsonl", GOOD + "[1]\n", {}, ["document 2", "is a JSON list, no object"]),
    "lone-surrogate": (
        "a.jsonl",
        '{"text": "\\ud800"}\n',
        {},
        ["document 1", "surrogates not allowed"],
    ),
    "no-field": (
        "a.jsonl",
        '{"body": "x", "n": 1}\n',
        {},
        ["document 1", 'no field "text"; fields found: body, n; set data.sources.web.field'],
    ),
    "number": ("a.jsonl", '{"text": 5}\n', {}, ['field "text" is no text but int']),
    "no-field-json": ("a.json", '[{"body": "x"}]', {}, ['no field "text"; fields found: body']),
    "no-field-text": ("a.txt", "x", {"field": "body"}, ['no field "body"; fields found: text']),
    "other-encoding": ("a.txt", b"caf\xe9", {}, ["document 1", "a.txt", "can't decode byte 0xe9"]),
    "no-parquet": ("a.parquet", "text", {}, ["a.parquet cannot be decoded: ArrowInvalid"]),
    "torn-gzip": ("a.txt.gz", gzip.compress(b"text" * 99)[:20], {}, ["document 1", "EOFError"]),
    "empty": ("a.txt", "", {}, ["data.sources.web.files: a.txt is empty, and so are all 1 files"]),
}


@pytest.mark.parametrize(("name", "content", "table", "answer"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_read_is_refused_by_document_and_file(
    name, content, table, answer, tmp_path, monkeypatch
):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(ConfigError) as caught:
        read_all(open_files(monkeypatch, tmp_path, {"files": name, **table}).read())

    message = str(caught.value)
    assert "data.sources.web" in message
    assert all(part in message for part in answer), message


def test_what_cannot_be_decoded_comes_with_a_command_that_shows_it(tmp_path, monkeypatch):
    for name, content in (
        ("a.jsonl", b'{"text": "b"\n'),
        ("b c.jsonl.gz", gzip.compress(b'{"text": "b"\n')),
        ("d.json", b'[{"text": 1'),
        ("e.txt", b"caf\xe9"),
        ("f.parquet", b"text"),
    ):
        (tmp_path / name).write_bytes(content)

        with pytest.raises(ConfigError, match="fix the file or take it out of data") as caught:
            read_all(open_files(monkeypatch, tmp_path, {"files": name}).read())

        command = str(caught.value).split(": ")[-1]
        python = f"{sys.executable} "
        shown = subprocess.run(
            command.replace("python ", python), shell=True, cwd=tmp_path, capture_output=True
        )
        assert shown.returncode != 0, command
        assert shown.stderr, command


def test_torn_table_is_refused_with_its_name(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "b.parquet", pieces(61))
    path.write_bytes(path.read_bytes()[:-100])
    write_parquet(tmp_path / "a.parquet", pieces(3))

    with pytest.raises(ConfigError, match=r"document 4 \(b\.parquet\) cannot be decoded: Arrow"):
        read_all(open_files(monkeypatch, tmp_path, {"files": "*.parquet"}).read())


def test_table_without_the_column_is_refused_with_its_columns(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", pieces(3))

    with pytest.raises(
        ConfigError, match=r'a\.parquet has no field "body"; fields found: id, text'
    ):
        open_files(monkeypatch, tmp_path, {"files": "a.parquet", "field": "body"})


def test_hub_data_set_is_streamed_at_the_commit_that_its_revision_has_now(hub):
    source = open_source("web", SourceConfig(hub="owner/name", subset="small", split="validation"))

    texts, _ = read_all(source.read())

    options = {"split": "validation", "revision": COMMIT, "streaming": True}
    assert hub.asked == [("owner/name", "main"), ("owner/name", "small", options)]
    assert texts == list(pieces(60))
    (part,) = source.parts
    assert (part.name, part.digest) == ("owner/name", COMMIT)


def test_a_commit_is_not_looked_up(hub):
    source = open_source("web", SourceConfig(hub="owner/name", revision=COMMIT))

    source.read()

    (asked,) = hub.asked
    assert asked == ("owner/name", None, {"split": "train", "revision": COMMIT, "streaming": True})


@pytest.mark.parametrize("revision", ["main", COMMIT])
def test_hub_data_set_that_is_not_there_is_refused_by_name(revision, hub):
    hub.error = FileNotFoundError("no such data set")

    with pytest.raises(ConfigError, match=r"data\.sources\.web.*no such data set"):
        open_source("web", SourceConfig(hub="owner/name", revision=revision)).read()


def test_a_broken_connection_to_the_hub_is_not_the_users_mistake(hub):
    reader = open_source("web", SourceConfig(hub="owner/name")).read()

    def rows():
        raise ConnectionError("gone")
        yield

    reader._rows = rows()

    with pytest.raises(ConnectionError, match="gone"):
        reader.read()
