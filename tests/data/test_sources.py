"""Which sources the arguments name, which of their rows are chosen, and what is said of mistakes."""

from dataclasses import replace
import gzip
import json
import os

from common.data.encode import convert
from common.data.formats import as_text
from common.data.sources import Source, identity, load_rows
from common.data.types import BadRow
from common.errors import UserError
import pytest

from tests.data.rows import CHAT, columns, found, jsonl, line, numbered, texts, write

# --- the rows of a source -----------------------------------------------------------------------------------


def test_held_out_rows_stay_held_out(tmp_path):
    path = tmp_path / "a.jsonl"
    parts = [Source(str(path), held_out=0.1, part=part) for part in ("train", "held_out")]
    rows = [{"text": f"row {i} \ud83d"} for i in range(1000)]
    jsonl(path, rows)
    train, held_out = (set(texts(part)) for part in parts)
    assert len(train) + len(held_out) == 1000 and not train & held_out and 60 < len(held_out) < 140
    # as of a table
    jsonl(path, [{"text": f"new {i}"} for i in range(1000)] + [row | {"more": None} for row in rows[::-1]])
    again = [set(texts(part)) for part in parts]
    assert train < again[0] and held_out < again[1] and not again[0] & again[1]


def test_held_out_rows_are_those_recorded(tmp_path):
    # Written down when the choice was made: other rows held out would make old runs' evaluations
    # incomparable.
    source = Source(numbered(tmp_path / "a.jsonl", 40), held_out=0.1, part="held_out")
    assert texts(source) == [f"row {i}" for i in (1, 2, 11, 13, 20, 26, 36)]
    rows = [{"text": f"é {i}", "a": i} for i in range(40)]
    assert [row["a"] for row in columns(replace(source, path=jsonl(tmp_path / "b.jsonl", rows)))] == [
        4,
        12,
        18,
        27,
        29,
    ]
    assert [row["body"] for row in columns(replace(source, columns=("body=text",)))] == texts(source)


@pytest.mark.parametrize(
    "renames, row, renamed",
    [
        ("a=b b=a", {"a": 1, "b": 2}, {"a": 2, "b": 1}),  # all at the same time
        ("a=b c=b", {"b": 2}, {"a": 2, "c": 2}),
        ("a=b b=b", {"b": 2}, {"a": 2, "b": 2}),
        # rows of several sources: this one has its own name for it
        ("a=b", {"a": 1}, {"a": 1}),
        ("a=b", {"a": 1, "b": None}, {"a": 1}),
        ("a=b", {"a": None, "b": 2}, {"a": 2}),
        ("a=b", {"a": "", "b": 2}, {"a": 2}),  # of a table
        ("a=b", {"a": 1, "b": ""}, {"a": 1}),
        ("a=b a=c", {"b": 1, "c": None}, {"a": 1}),
        ("a=b a=c", {"b": 1, "c": 2}, "two columns would be called a"),
        ("a=b", {"a": 1, "b": 2}, "two columns would be called a"),
        ("unused=a a=b", {"a": 1, "b": 2}, {"a": 2}),  # which the message proposes
        ("unused=c a=b", {"b": 1, "c": 2}, {"a": 1}),
        (
            "unused=b",
            {"m": [{"role": "user", "b": 1}], "n": [{"b": 1}]},
            {"m": [{"role": "user"}], "n": [{"b": 1}]},
        ),
    ],
)
def test_renamed_columns_replace_nothing(tmp_path, renames, row, renamed):
    source = Source(jsonl(tmp_path / "a.jsonl", [row]), columns=tuple(renames.split()))
    if isinstance(renamed, dict):
        assert [dict(found) for found in columns(source)] == [renamed]
        return
    with pytest.raises(UserError) as caught:
        columns(source)
    assert line(caught).startswith(f"{source.path}:1: --columns") and renamed in line(caught)


def test_a_source_may_have_renames_of_its_own(tmp_path):
    paths = [jsonl(tmp_path / f"{name}.jsonl", [{"a": 1, "b": 2}]) for name in "xyz"]
    sources = [{"path": paths[0], "columns": ["c=b"]}, {"path": paths[1], "columns": []}, paths[2]]
    rows = [columns(source) for source in found(*sources, columns=["c=a"])[0]]
    assert rows == [[{"a": 1, "c": 2}], [{"a": 1, "b": 2}], [{"b": 2, "c": 1}]]


def test_max_samples_are_the_first_after_hold_out(tmp_path):
    source = Source(numbered(tmp_path / "a.jsonl", 100), held_out=0.5, part="train")
    assert texts(replace(source, max_samples=7)) == texts(source)[:7]
    path = write(tmp_path / "b.jsonl", '{"text": "x"}\n{"text": \n')  # the second line is not read
    assert texts(Source(path, max_samples=1)) == ["x"]


# --- sources that the arguments name ------------------------------------------------------------------------


def test_sources_keep_their_order_and_have_labels(tmp_path):
    (tmp_path / "b").mkdir()
    files = [tmp_path / "a.jsonl", tmp_path / "b" / "a.jsonl", tmp_path / "v1.5.jsonl"]
    names = [*(numbered(path, 1) for path in files), str(tmp_path / "b"), str(tmp_path / "b") + "/"]
    train, evaluation = found(*names)
    assert [source.path for source in train] == names and evaluation == []
    assert [source.label for source in train] == ["a", "a-2", "v1.5", "b", "b-2"]


def test_an_item_may_have_settings_of_its_own(tmp_path):
    a, b = numbered(tmp_path / "a.jsonl", 9), numbered(tmp_path / "b.jsonl", 9)
    first = {"path": a, "max_samples": 3, "split": "train"}
    train = found(first, b, max_train_samples=5, dataset_weights=[0.7, 2])[0]
    assert train[0] == Source(a, weight=0.7, max_samples=3, label="a")
    assert train[1] == Source(b, weight=2, max_samples=5, label="b")
    assert [len(columns(source)) for source in train] == [3, 5]


def test_evaluation_is_on_the_evaluation_split(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        numbered(tmp_path / name / "train.jsonl", 9)
    jsonl(tmp_path / "b" / "validation.jsonl", [CHAT])  # of another format
    names = [
        str(tmp_path / "a"),
        {"path": str(tmp_path / "b"), "max_samples": 3},
        numbered(tmp_path / "c.jsonl", 1),
    ]
    evaluation = found(*names, max_eval_samples=5)[1]
    assert evaluation == [Source(str(tmp_path / "b"), split="validation", max_samples=5, label="b")]
    assert found({"path": str(tmp_path / "b"), "split": "validation"})[1] == []  # never on what is trained on


@pytest.mark.parametrize(
    "name", ["val.jsonl", "dev-00000-of-00001.jsonl", "data/valid_1.jsonl", "Validation.jsonl"]
)
@pytest.mark.parametrize("flags", [{}, {"eval_dataset_name": True}])
def test_an_evaluation_split_has_the_names_of_the_datasets_library(name, flags, tmp_path):
    """In data/, too, where a copy of a Hub dataset has its files, beside some that are no data."""
    folder = tmp_path / name
    if folder.parent != tmp_path:
        (tmp_path / "LICENSE.txt").write_text("Permission is granted.")
    numbered(folder.parent / "train.jsonl", 9), numbered(folder, 2)
    train, evaluation = found(str(tmp_path), **dict.fromkeys(flags, [str(tmp_path)]))
    assert [len(columns(source)) for source in (*train, *evaluation)] == [9, 2]
    if not flags:  # what is trained on is no evaluation: here the folder's only file
        (folder.parent / "train.jsonl").unlink()
        assert [len(sources) for sources in found(str(tmp_path))] == [1, 0]


def test_notes_are_no_data(tmp_path):
    for name in ("LICENSE-MIT.txt", "README_zh.txt", "dataset_info.json", "stats.json", "._chats.jsonl"):
        (tmp_path / name).write_text("Permission is granted.")
    numbered(tmp_path / "data" / "train_2.jsonl", 2)
    numbered(tmp_path / "data" / "test.jsonl", 1)
    assert [len(columns(Source(str(tmp_path), split=split))) for split in ("train", "test")] == [2, 1]
    os.remove(tmp_path / "stats.json")
    numbered(tmp_path / "chats.jsonl", 3)  # what is in data is of something else
    assert len(columns(tmp_path)) == 3


def test_an_evaluation_dataset_is_its_split_or_whole(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    numbered(folder / "train.jsonl", 1)
    numbered(folder / "validation.jsonl", 2)
    numbered(tmp_path / "two" / "test.jsonl", 1), numbered(tmp_path / "two" / "train.jsonl", 5)
    a, b = numbered(tmp_path / "a.jsonl", 3), {"path": str(folder), "split": "train", "max_samples": 1}
    evaluation = found(
        a, eval_dataset_name=[str(folder), a, json.dumps(b), str(tmp_path / "two")], max_eval_samples=2
    )[1]
    assert [(s.label, s.split, s.max_samples, len(columns(s))) for s in evaluation] == [
        ("folder", "validation", 2, 2),
        ("a", "train", 2, 2),
        ("folder-2", "train", 1, 1),
        ("two", "test", 2, 1),
    ]


def test_an_eval_fraction_divides_each_source_in_two(tmp_path):
    paths = [numbered(tmp_path / f"{n}.jsonl", *rows) for n, *rows in (("a", 100), ("b", 100, 100), ("c", 1))]
    train, evaluation = found(*paths, dataset_weights=[2, 1, 1], eval_fraction=0.2, max_eval_samples=4)
    assert [(s.label, s.part, s.held_out) for s in train] == [(n, "train", 0.2) for n in "abc"]
    assert [(s.label, s.max_samples, s.weight) for s in evaluation] == [("a", 4, 2), ("b", 4, 1)]
    for source, part in zip(train[:2], evaluation, strict=True):
        rows = texts(source), texts(replace(part, max_samples=None)), texts(replace(source, part="all"))
        assert not set(rows[0]) & set(rows[1]) and set(rows[0]) | set(rows[1]) == set(rows[2])


# --- identity -----------------------------------------------------------------------------------------------


def test_identity_changes_with_what_changes_the_rows(tmp_path):
    source = Source(numbered(tmp_path / "a.jsonl", 3), label="a", weight=1.0)
    same = json.dumps(identity(source))
    assert json.dumps(identity(replace(source, label="b", weight=2.0))) == same
    changes = [{"max_samples": 1}, {"columns": ("a=text",)}, {"held_out": 0.1, "part": "train"}]
    assert all(json.dumps(identity(replace(source, **change))) != same for change in changes)
    numbered(tmp_path / "a.jsonl", 4)
    assert json.dumps(identity(source)) != same


def test_the_identity_of_a_dataset_is_its_fingerprint(tmp_path):
    datasets = pytest.importorskip("datasets")
    prints = []
    for name, rows in (("a", [{"text": "x"}]), ("b", [{"text": "y"}])):
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / name)
        prints.append(identity(Source(str(tmp_path / name)))["fingerprint"])
    assert all(prints) and prints[0] != prints[1]


# --- bad input: one line that names the flag, the file and the row ------------------------------------------


@pytest.mark.parametrize(
    "item, named",
    [
        ('{"path": ', 'name {"path": : not valid JSON: Expecting value: line 1'),
        ({"split": "train"}, 'name {"split": "train"}: path is None; expected path (str), name (str)'),
        ({"path": "a.jsonl", "weight": 1}, "weight is 1; expected path (str), name (str), split (str), max"),
        ({"path": "a.jsonl", "max_samples": 0}, "max_samples is 0; expected"),
    ],
)
def test_a_wrong_item_is_named(item, named):
    with pytest.raises(UserError) as caught:
        found(item)
    assert line(caught).startswith("--dataset_name ") and named in line(caught)


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"eval_fraction": 0.1, "eval_dataset_name": ["x"]}, "--eval_fraction and --eval_dataset_name"),
        ({"eval_fraction": 1e-9}, "--eval_fraction 1e-09"),
        ({"eval_dataset_name": ["missing.jsonl"]}, "missing.jsonl"),
        ({"columns": ["body"]}, "--columns body"),
        ({"dataset_weights": [1.0, 2.0]}, "--dataset_weights"),
    ],
)
def test_wrong_settings_are_named(tmp_path, settings, named):
    path = numbered(tmp_path / "a.jsonl", 10)
    with pytest.raises(UserError) as caught:
        [columns(source) for source in sum(found(path, **settings), [])]
    assert named in line(caught)


@pytest.mark.parametrize(
    "name",
    ["link.jsonl", "loop", "links", "empty", "missing.jsonl", "~/missing-folder", "no/dataset-on-the-hub"],
)
def test_a_missing_source_is_named(tmp_path, name):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "empty").mkdir()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "train.jsonl").symlink_to("train.jsonl")  # to itself
    name = str(tmp_path / name) if os.path.lexists(tmp_path / name) else name
    with pytest.raises(UserError) as caught:
        columns(found(name)[0][0])
    assert line(caught).removeprefix("dataset ").startswith(name)


@pytest.mark.parametrize(
    "name, content, named",
    [
        ("a.jsonl", b"", "a.jsonl"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl:2: not valid JSON: Expecting value"),
        ("a.json", b'[\n{"text": "x"},\n{"text": }\n]', "a.json: cannot be read: Expecting value: line 3"),
        ("a.json", b'["x"]', "a.json row 1"),
        ("a.jsonl", b'{"text": "x"}\n3\n', "a.jsonl:2: expected an object {column: value}, found int"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', "a.jsonl:2: expected UTF-8: invalid start byte; "),
        ("a.csv", b'text\n"a\nb"\ncaf\xe9\n', "a.csv:4"),
        ("a.jsonl", '{"text": "x"}\n'.encode("utf-16"), "a.jsonl:1"),
        ("a.csv", b"text\na\nb,c\n", "a.csv:3: more fields than columns: text"),
        ("a.csv", b"text,n,text\na,1,b\n", "a.csv:1: several columns have one name: text, n, text"),
        ("a.csv", b'text\na\n"b\nc\n', "a.csv"),
        ("a.jsonl.gz", b"not gzip", "a.jsonl.gz"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}' * 99, mtime=0)[:20], "a.jsonl.gz"),
        ("a.parquet", b"not parquet", "a.parquet"),
        ("a.docx", b"x", "a.docx: unknown kind of file; expected .jsonl, .json, .txt, .csv, .tsv, .parq"),
    ],
)
def test_a_broken_file_is_named_with_its_place(tmp_path, name, content, named):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_rows(str(tmp_path / name))
    assert line(caught).removeprefix("no rows in ").startswith(f"{tmp_path}/{named}")


def test_another_encoding_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes("你好，世界".encode("gb18030"))
    with pytest.raises(UserError, match="a.txt:1: expected UTF-8.*iconv -f GB18030"):
        load_rows(str(tmp_path / "a.txt"))


def test_files_of_a_split_are_all_read(tmp_path):
    """As the datasets library names them; and none of another split."""
    for number, name in enumerate(
        ["train", "train-1", "train_2", "train.3", "train4", "training", "validation", "test_1"]
    ):
        jsonl(tmp_path / f"{name}.jsonl", [{"text": str(number)}])
    jsonl(tmp_path / "train_eval.jsonl", [{"text": "held out"}])
    assert sorted(row["text"] for row in load_rows(str(tmp_path))) == ["0", "1", "2", "3", "4"]
    for name in ("chats.jsonl", "chats-Val1.jsonl"):  # which of them is for training?
        jsonl(tmp_path / "other" / name, [CHAT])
    with pytest.raises(UserError, match="no file for split train"):
        load_rows(str(tmp_path / "other"))


# --- bad rows: left out, counted, named ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        '{"text": "\\ud83d"}',
        '{"text": ""}',
        '{"text": null}',
        '{"text": true}',
        '{"text": "a", "n": ' + "1" * 5000 + "}",
        '{"text": "a", "n": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)
def test_a_bad_row_is_left_out_and_named(tmp_path, row, capsys):
    name = write(tmp_path / "a.jsonl", '{"text": "x"}\n' + row + '\n{"text": "y"}\n')
    train = Source(name, held_out=1e-9, part="train")
    for source in (name, train):
        results, facts = convert(load_rows(source), as_text, "rows")
        assert results == ["x", "y"] and [found["first"] for found in facts["dropped"].values()] == [
            [f"{name}:2"]
        ]
        assert (
            f"data: 1 of 3 rows left out: {next(iter(facts['dropped']))} (first: {name}:2)"
            in capsys.readouterr().out
        )


def test_reasons_that_differ_are_counted_together(tmp_path):
    """Some have a value of the row in them."""
    name = jsonl(tmp_path / "a.jsonl", [{"text": "x", "n": i} for i in range(50)])

    def encode(row):
        if row["n"] > 0:
            raise BadRow(f"too long: {row['n']}")

    dropped = convert(load_rows(name), encode, "rows")[1]["dropped"]
    assert len(dropped) < 25 and sum(found["count"] for found in dropped.values()) == 49
    assert "other reasons" in dropped


def test_a_test_split_without_a_validation_split_is_named(tmp_path, capsys):
    """Nothing is evaluated by default; with the flag it is."""
    for split in ("train", "test"):
        numbered(tmp_path / "data" / f"{split}.jsonl", 3)
    folder = str(tmp_path / "data")
    assert found(folder)[1] == [] and "--dataset_eval_split test" in capsys.readouterr().out
    assert [source.split for source in found(folder, dataset_eval_split="test")[1]] == ["test"]
    assert "no validation split" not in capsys.readouterr().out
