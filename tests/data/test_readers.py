"""Rows of every kind of file, folder and dataset, read one by one, and on from any cursor."""

from dataclasses import replace
import gzip
import json
import re
import tracemalloc

from common.data import as_chat, sources, tables
from common.data.sources import Source, identity, read_rows
from common.errors import UserError
import pytest

from tests.data.rows import CHAT, columns, found, jsonl, line, texts, write

ROWS = [{"text": "one\nline"}, {"text": "你好 é 🙂"}, {"text": "three"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
TABLE = 'text,n\n"one\nline",1\n你好 é 🙂,\n\nthree,"a ""b"""\n'
TABLE_ROWS = [
    {"text": "one\nline", "n": "1"},
    {"text": "你好 é 🙂", "n": ""},
    {"text": "three", "n": 'a "b"'},
]
TEXT = "\n\none\nline\n\n你好 é 🙂\n \nthree"
COMPRESS = {".gz": gzip.compress}


# --- kinds of files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, text, rows",
    [
        ("rows.jsonl", LINES, ROWS),
        ("rows.jsonl", "\n" + LINES.replace("\n", "\r\n\r\n"), ROWS),
        ("rows.jsonl", "\ufeff" + LINES.rstrip(), ROWS),
        ("rows.jsonl", json.dumps(ROWS), ROWS),
        ("rows.jsonl", "\ufeff\n" + json.dumps(ROWS, indent=1), ROWS),
        ("rows.json", json.dumps(ROWS), ROWS),
        ("rows.json", "\ufeff" + json.dumps(ROWS, indent=1), ROWS),
        ("rows.json", "\n" + LINES, ROWS),
        ("rows.txt", TEXT, ROWS),
        ("rows.txt", "\ufeff" + TEXT.replace("\n", "\r\n"), ROWS),
        ("rows.csv", TABLE, TABLE_ROWS),
        (
            "rows.csv",
            "\ufeff" + TABLE.replace("e\nl", "e l").replace("\n", "\r\n"),
            [TABLE_ROWS[0] | {"text": "one line"}, *TABLE_ROWS[1:]],
        ),
        ("rows.tsv", TABLE.replace(",", "\t"), TABLE_ROWS),
        ("rows.csv", "text,n\none\n", [{"text": "one", "n": None}]),
        ("rows.CSV", ",text\n0,one\n", [{"": "0", "text": "one"}]),
        ("rows.csv", f"text\n{'x' * 200_000}\n", [{"text": "x" * 200_000}]),
    ],
)
def test_a_file_is_read_by_its_suffix(tmp_path, name, text, rows):
    (tmp_path / name).write_bytes(text.encode())
    assert columns(tmp_path / name) == rows
    places = {
        LINES: ":1 :2 :3",
        TEXT: ":3 :6 :8",
        TABLE: " row 1, row 2, row 3",
        json.dumps(ROWS): " row 1, row 2, row 3",
    }
    if text in places:
        wanted = [f"{tmp_path / name}{place}" for place in re.findall(r":\d| row \d", places[text])]
        assert [row.where for row, _ in read_rows(Source(str(tmp_path / name)))] == wanted


def test_text_without_blank_lines_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_BLOCK", 20)
    source = write(tmp_path / "a.txt", "0123456789\n" * 5 + "\nlast")
    assert texts(source) == ["0123456789\n0123456789", "0123456789\n0123456789", "0123456789", "last"]
    assert [row.where for row, _ in read_rows(Source(source))] == [f"{source}:{i}" for i in (1, 3, 5, 7)]


@pytest.mark.parametrize("name, end", [("a.jsonl", "\n"), ("a.txt", "\n\n"), ("a.csv", "\n")])
def test_reading_a_large_file_takes_little_memory(tmp_path, name, end):
    row = json.dumps({"text": "x" * 1000}) if name == "a.jsonl" else "x" * 1000
    path = write(
        tmp_path / name, f"text{end}" + (row + end) * 4000 if name == "a.csv" else (row + end) * 4000
    )
    tracemalloc.start()
    count = sum(1 for _ in read_rows(Source(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count >= 4000 and peak < 500_000 < 4_000_000


# --- cursors ------------------------------------------------------------------------------------------------


def folder_of(folder, kind):
    """Two files of a kind, with 5 rows each."""
    for number in range(2):
        rows = [{"text": f"é row {i}"} for i in range(number * 5, number * 5 + 5)]
        path = folder / f"train-{number}.{kind}"
        if kind == "parquet":
            pa = pytest.importorskip("pyarrow")
            import pyarrow.parquet as parquet

            parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
            continue
        text = {
            "json": json.dumps(rows),
            "jsonl": "\ufeff\n" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
            "txt": "\ufeff\n" + "\n\n\n".join(row["text"].replace(" ", "\n") for row in rows),
            "csv": "\ufefftext,n\r\n" + "".join(f'"{row["text"]}\n ""b",\r\n\r\n' for row in rows),
            "tsv": "text\n" + "".join(f"{row['text']}\n" for row in rows),
        }[kind.split(".")[0]]
        path.write_bytes(COMPRESS.get(path.suffix, bytes)(text.encode()))
    return Source(str(folder))


@pytest.mark.parametrize("how", ["columns", "lines", "json"])
def test_a_table_gives_tools_and_calls_as_they_were(how, tmp_path):
    """It gives each the keys of all, as do the .jsonl files it writes, or holds JSON, which `datasets`
    marks."""
    datasets, rows = pytest.importorskip("datasets"), []
    for name, key in (("f", "city"), ("g", "zone")):
        call = {"type": "function", "function": {"name": name, "arguments": {key: "x", "several": [None, 1]}}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        schema = {
            "inputSchema" if how == "columns" else "parameters": {"properties": {key: {"type": "string"}}}
        }
        tool = {"name": name, **schema}
        tools = [tool if how == "columns" else {"type": "function", "function": tool}]
        rows.append(
            {"messages": [*CHAT["messages"], answer], "functions": tools, "tests": [{"city": 1, key: None}]}
        )
    table = datasets.Dataset.from_list(rows, **({"on_mixed_types": "use_json"} if how == "json" else {}))
    write = table.to_json if how == "lines" else table.to_parquet
    write(tmp_path / ("train.jsonl" if how == "lines" else "train.parquet"))
    for row, (read, _) in zip(
        rows, read_rows(Source(str(tmp_path), columns=("tools=functions",))), strict=True
    ):
        assert as_chat(read) == {"messages": row["messages"], "tools": row["functions"]}
        # what rewards look up is there
        assert read["tests"] == [{"zone": None} | row["tests"][0]] or how == "json"


@pytest.mark.parametrize("kind", ["jsonl", "json", "txt", "csv", "parquet", "jsonl.gz", "txt.gz", "csv.gz"])
@pytest.mark.parametrize("change", [{}, {"max_samples": 7, "held_out": 0.2, "part": "train"}])
def test_reading_goes_on_from_every_cursor(tmp_path, kind, change):
    source = replace(folder_of(tmp_path, kind), **change)
    everything = list(read_rows(source))
    found = [int(row["text"].split()[2]) for row, _ in everything]
    assert len(found) > 2 and (change or found == list(range(10))) and found == sorted(found)
    for i, (_, cursor) in enumerate(everything):
        assert json.loads(json.dumps(cursor)) == cursor and cursor[2] == i + 1
        assert list(read_rows(source, cursor)) == everything[i + 1 :]
    assert list(read_rows(source, [0, 0, 0])) == everything


# --- folders and datasets -----------------------------------------------------------------------------------


def test_a_folder_gives_the_files_of_the_split(tmp_path):
    folder = tmp_path / "splits"
    folder.mkdir()
    for name in (
        "train-00001-of-00002.jsonl",
        "train-00000-of-00002.jsonl.gz",
        "validation.jsonl",
        "README.md",
    ):
        text = json.dumps({"text": name}) + "\n"
        (folder / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    assert texts(folder) == ["train-00000-of-00002.jsonl.gz", "train-00001-of-00002.jsonl"]
    assert texts(Source(str(folder), split="validation")) == ["validation.jsonl"]
    with pytest.raises(UserError, match="no file for split test"):
        columns(Source(str(folder), split="test"))
    write(tmp_path / "b.txt", "b")  # without splits all is for training; one file may be empty
    jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    write(tmp_path / "0.jsonl", "")
    assert texts(tmp_path) == ["a", "b"]


def test_a_folder_of_save_to_disk_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{**CHAT, "n": i} for i in range(3)])
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "splits")
    for name in ("saved", "splits"):
        source = Source(str(tmp_path / name))
        everything = list(read_rows(source))
        assert columns(source) == list(table)
        assert list(read_rows(source, everything[0][1])) == everything[1:]
        assert everything[2][0].where == f"{tmp_path / name} row 3"
    assert columns(Source(str(tmp_path / "splits"), split="test")) == [{**CHAT, "n": 1}]
    with pytest.raises(UserError, match="Unknown split validation; found train, test"):
        columns(Source(str(tmp_path / "splits"), split="validation"))
    with pytest.raises(UserError, match="no source has it"):
        found(str(tmp_path / "splits"), dataset_eval_split="tset")
    train, evaluation = found(str(tmp_path / "splits"), dataset_eval_split="test")
    assert [source.split for source in train + evaluation] == ["train", "test"]
    assert found(str(tmp_path / "saved"))[1] == []
    datasets.DatasetDict({"train": table, "test": table.select([])}).save_to_disk(tmp_path / "empty")
    with pytest.raises(UserError, match="without rows"):
        found(str(tmp_path / "empty"), dataset_eval_split="test")


@pytest.fixture
def hub(monkeypatch):
    """A Hub with one dataset, numbers; the calls that load it."""
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(path, name=None, split=None, streaming=False):
        calls.append((path, name, split, streaming))
        if split == "validation":
            raise ValueError(
                f"Bad split: {split}." if streaming else f'Unknown split "{split}". Should be one of train.'
            )
        rows = [{"text": f"row {i}"} for i in range(5)]
        if path.endswith("broken"):
            rows = iter_broken
        if streaming:
            return datasets.IterableDataset.from_generator(lambda: iter(rows() if callable(rows) else rows))
        return datasets.Dataset.from_list(rows)

    def iter_broken():
        yield {"text": "row 0"}
        raise ConnectionError("the network\nis gone")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    tables._load.cache_clear()
    yield calls
    tables._load.cache_clear()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_dataset_is_read_from_any_cursor(hub, streaming):
    train, evaluation = found(
        "org/numbers", dataset_config="small", dataset_streaming=streaming, eval_dataset_name=["org/numbers"]
    )
    assert train[0].streaming == streaming and train[0].label == "numbers"
    assert evaluation[0].split == "test"  # it has no split validation
    everything = list(read_rows(train[0]))
    assert ("org/numbers", "small", "train", streaming) in hub and bool(
        identity(train[0])["fingerprint"]
    ) is not streaming
    assert [row.where for row, _ in everything] == [f"org/numbers row {i}" for i in range(1, 6)]
    for i, (_, cursor) in enumerate(everything):
        assert list(read_rows(train[0], cursor)) == everything[i + 1 :]


def test_a_stream_that_breaks_off_is_one_line(hub):
    with pytest.raises(
        UserError, match="dataset org/broken row 2: cannot be read: the network is gone"
    ) as caught:
        columns(Source("org/broken", streaming=True))
    line(caught)
