"""Which sources the arguments name, which of their rows are chosen, of what format they are, and what is said of mistakes."""

import gzip
import json
import pickle
import re
import sys
from dataclasses import replace
from itertools import islice

from common.data.dropped import Dropped, convert
from common.data.formats import as_chat, as_text, text_format
from common.data.sources import Source, identity, load_rows, read_rows
from common.data.types import BadRow, Row
from common.errors import UserError
from tests.data.test_readers import CHAT, columns, found, jsonl, line, numbered, texts, write

import pytest

# --- shares ---------------------------------------------------------------------------------------------------------


def test_held_out_rows_stay_held_out_when_rows_are_added_or_moved(tmp_path):
    path = tmp_path / "a.jsonl"
    parts = [Source(str(path), held_out=0.1, part=part) for part in ("train", "held_out")]
    rows = [{"text": f"row {i} \ud83d"} for i in range(1000)]
    jsonl(path, rows)
    train, held_out = (set(texts(part)) for part in parts)
    assert len(train) + len(held_out) == 1000 and not train & held_out and 60 < len(held_out) < 140
    jsonl(path, [{"text": f"new {i}"} for i in range(1000)] + rows[::-1])
    again = [set(texts(part)) for part in parts]
    assert train < again[0] and held_out < again[1] and not again[0] & again[1]


def test_held_out_rows_are_those_whose_hash_says_so(tmp_path):
    # Written down when the choice was made: other rows held out would make old runs' evaluations incomparable.
    source = Source(numbered(tmp_path / "a.jsonl", 40), held_out=0.1, part="held_out")
    assert texts(source) == [f"row {i}" for i in (1, 2, 11, 13, 20, 26, 36)]


def test_a_fraction_is_the_same_rows_whatever_stands_around_them_and_has_nothing_to_do_with_the_hold_out(tmp_path):
    path = tmp_path / "a.jsonl"
    numbered(path, 2000)
    source = Source(str(path), fraction=0.5)
    half = set(texts(source))
    assert 900 < len(half) < 1100
    assert set(texts(replace(source, fraction=0.25))) < half
    parts = [set(texts(replace(source, held_out=0.5, part=part))) for part in ("train", "held_out")]
    assert parts[0] | parts[1] == half and not parts[0] & parts[1] and min(map(len, parts)) > 400
    numbered(path, 2000, start=1000)
    again = set(texts(source))
    assert {text for text in half if int(text[4:]) >= 1000} == {text for text in again if int(text[4:]) < 2000}


def test_the_choice_of_rows_does_not_depend_on_renames(tmp_path):
    path = numbered(tmp_path / "a.jsonl", 100)
    source = Source(path, held_out=0.3, part="held_out", fraction=0.8)
    assert [row["body"] for row in columns(replace(source, columns=("body=text",)))] == texts(source)


def test_max_samples_are_the_first_rows_after_the_other_choices(tmp_path):
    source = Source(numbered(tmp_path / "a.jsonl", 100), fraction=0.5, held_out=0.5, part="train")
    assert texts(replace(source, max_samples=7)) == texts(source)[:7]


def test_rows_beyond_max_samples_are_not_read(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "x"}\n{"text": \n')
    assert texts(Source(path, max_samples=1)) == ["x"]


# --- sources that the arguments name --------------------------------------------------------------------------------


def test_sources_keep_their_order_and_have_short_labels_that_differ(tmp_path):
    (tmp_path / "b").mkdir()
    names = [
        numbered(tmp_path / "a.jsonl", 1),
        numbered(tmp_path / "b" / "a.jsonl", 1),
        numbered(tmp_path / "v1.5.jsonl", 1),
        str(tmp_path / "b"),
        str(tmp_path / "b") + "/",
    ]
    train, evaluation = found(*names)
    assert [source.path for source in train] == names and evaluation == []
    assert [source.label for source in train] == ["a", "a-2", "v1.5", "b", "b-2"]
    assert {source.format for source in train} == {"text"}


def test_an_item_may_be_a_json_object_with_settings_of_its_own(tmp_path):
    a, b = (
        numbered(tmp_path / "a.jsonl", 9),
        jsonl(tmp_path / "b.jsonl", [{"question": "q", "completion": "a", "text": "t"}]),
    )
    settings = {"weight": 0.7, "max_samples": 3, "fraction": 0.9, "split": "train", "name": None}
    more = {"weight": 2, "columns": ["prompt=question"], "format": "prompt_completion"}
    first, second = found({"path": a, **settings}, {"path": b, **more}, max_train_samples=5)[0]
    assert first == Source(a, weight=0.7, max_samples=3, fraction=0.9, format="text", label="a")
    assert second == Source(b, weight=2, max_samples=5, columns=("prompt=question",), format="prompt_completion", label="b")
    assert len(columns(first)) == 3


@pytest.mark.parametrize(
    "item, expected",
    [
        ('{"path": ', "not valid JSON"),
        ({"weight": 1}, "no path; expected a file, a folder or a Hub name"),
        ({"path": "a.jsonl", "wieght": 1}, "unknown key wieght; known: path, name, split, weight, max_samples, fraction"),
        ({"path": 3}, "path: expected a file, a folder or a Hub name, not 3"),
        ({"path": "a.jsonl", "weight": 0}, "weight: expected a number above 0, not 0"),
        ({"path": "a.jsonl", "weight": "2"}, "weight: expected a number above 0, not '2'"),
        ({"path": "a.jsonl", "weight": float("inf")}, "weight: expected a number above 0, not inf"),
        ({"path": "a.jsonl", "max_samples": 0}, "max_samples: expected a whole number above 0, not 0"),
        ({"path": "a.jsonl", "max_samples": True}, "max_samples: expected a whole number above 0, not True"),
        ({"path": "a.jsonl", "max_samples": 1.5}, "max_samples: expected a whole number above 0, not 1.5"),
        ({"path": "a.jsonl", "fraction": 1.5}, "fraction: expected a share above 0, at most 1, not 1.5"),
        ({"path": "a.jsonl", "columns": "a=b"}, "columns: expected a list of new=old, not 'a=b'"),
        ({"path": "a.jsonl", "columns": ["a"]}, "--columns a: expected new=old"),
    ],
)
def test_an_item_that_is_wrong_is_an_error_that_says_what_is_expected(item, expected):
    with pytest.raises(UserError) as caught:
        found(item)
    assert expected in line(caught)


def test_weights_are_given_one_for_each_source(tmp_path):
    names = [numbered(tmp_path / "a.jsonl", 1), numbered(tmp_path / "b.jsonl", 1)]
    assert [source.weight for source in found(*names, dataset_weights=[0.25, 3])[0]] == [0.25, 3]
    assert [source.weight for source in found(*names)[0]] == [None, None]


@pytest.mark.parametrize(
    "first, weights, expected",
    [
        ({}, [1.0], "--dataset_weights: 1 weights for 2 sources"),
        ({"weight": 1}, [1.0, 1.0], "a.jsonl has a weight of its own; give weights in one place"),
        ({"weight": 1}, None, "a.jsonl has a weight and {}/b.jsonl has none; all or none"),
    ],
)
def test_weights_that_do_not_fit_the_sources_are_an_error(tmp_path, first, weights, expected):
    names = [{"path": numbered(tmp_path / "a.jsonl", 1), **first}, numbered(tmp_path / "b.jsonl", 1)]
    with pytest.raises(UserError) as caught:
        found(*names, dataset_weights=weights)
    assert expected.format(tmp_path) in line(caught)


def test_evaluation_is_on_the_split_of_those_sources_that_have_it(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        numbered(tmp_path / name / "train.jsonl", 9)
    numbered(tmp_path / "b" / "validation.jsonl", 9)
    names = [
        str(tmp_path / "a"),
        {"path": str(tmp_path / "b"), "fraction": 0.9, "max_samples": 3},
        numbered(tmp_path / "c.jsonl", 1),
    ]
    evaluation = found(*names, max_eval_samples=5)[1]
    assert evaluation == [Source(str(tmp_path / "b"), split="validation", max_samples=5, format="text", label="b")]


def test_the_evaluation_split_has_a_format_of_its_own_unless_one_is_insisted_on(tmp_path):
    jsonl(tmp_path / "train.jsonl", [{"text": "t"}])
    jsonl(tmp_path / "validation.jsonl", [{**CHAT, "text": "t"}])
    assert [source.format for part in found(str(tmp_path)) for source in part] == ["text", "messages"]
    insisted = found({"path": str(tmp_path), "format": "text"})
    assert [source.format for part in insisted for source in part] == ["text", "text"]


def test_evaluation_is_never_on_the_split_that_is_trained_on(tmp_path):
    numbered(tmp_path / "validation.jsonl", 9)
    assert found({"path": str(tmp_path), "split": "validation"})[1] == []


def test_a_dataset_for_evaluation_is_read_at_its_evaluation_split_or_whole(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    numbered(folder / "train.jsonl", 1)
    numbered(folder / "validation.jsonl", 2)
    a, b = numbered(tmp_path / "a.jsonl", 3), {"path": str(folder), "split": "train", "max_samples": 1}
    evaluation = found(a, eval_dataset_name=[str(folder), a, json.dumps(b)], max_eval_samples=2)[1]
    assert [(s.label, s.split, s.max_samples, len(columns(s))) for s in evaluation] == [
        ("folder", "validation", 2, 2),
        ("a", "train", 2, 2),
        ("folder-2", "train", 1, 1),
    ]


def test_an_eval_fraction_divides_each_source_in_two(tmp_path):
    names = [
        numbered(tmp_path / "a.jsonl", 100),
        {"path": numbered(tmp_path / "b.jsonl", 100, 100), "weight": 1, "fraction": 0.5},
    ]
    names[0] = {"path": names[0], "weight": 2}
    train, evaluation = found(*names, eval_fraction=0.2, max_eval_samples=4)
    assert [(s.label, s.part, s.held_out, s.format) for s in train] == [(n, "train", 0.2, "text") for n in "ab"]
    assert [(s.label, s.part, s.max_samples, s.weight) for s in evaluation] == [
        (n, "held_out", 4, w) for n, w in (("a", 2), ("b", 1))
    ]
    for source, part in zip(train, evaluation, strict=True):
        rows = texts(source), texts(replace(part, max_samples=None)), texts(replace(source, part="all"))
        assert not set(rows[0]) & set(rows[1]) and set(rows[0]) | set(rows[1]) == set(rows[2])


def test_a_source_of_which_no_row_is_held_out_is_left_out_of_the_evaluation_and_said(tmp_path, capsys):
    names = [numbered(tmp_path / "a.jsonl", 300), numbered(tmp_path / "b.jsonl", 1)]
    assert [source.label for source in found(*names, eval_fraction=0.1)[1]] == ["a"]
    assert capsys.readouterr().out == f"data: --eval_fraction 0.1 holds out no row of {names[1]}\n"


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"eval_fraction": 0.1, "eval_dataset_name": ["x"]}, "--eval_fraction and --eval_dataset_name"),
        ({"eval_fraction": 1e-9}, "--eval_fraction 1e-09: no row is held out; a larger share is needed"),
        ({"eval_fraction": 1 - 1e-9}, "--eval_fraction 0.999999999); at least one is needed"),
        ({"eval_dataset_name": ['{"path": "x", "weight": 1}']}, "weight is for training sources"),
        ({"eval_dataset_name": ["missing.jsonl"]}, "missing.jsonl: there is no such file"),
        ({"columns": ["body"]}, "--columns body: expected new=old, for instance prompt=question"),
        ({"columns": ["x=y"]}, "a.jsonl:1 has no column y; it has text"),
        ({"dataset_format": "openai"}, "a.jsonl:1: --dataset_format openai: known here are messages, sharegpt"),
        ({"dataset_format": "alpaca"}, "a.jsonl:1: the format alpaca needs instruction + output; found text"),
    ],
)
def test_settings_that_cannot_be_are_an_error(tmp_path, settings, expected):
    with pytest.raises(UserError) as caught:
        found(numbered(tmp_path / "a.jsonl", 10), **settings)
    assert expected in line(caught)


# --- formats of sources ---------------------------------------------------------------------------------------------


def test_the_format_that_is_insisted_on_is_that_of_all_sources(tmp_path):
    both = {**CHAT, "instruction": "q", "output": "b"}
    names = [jsonl(tmp_path / "a.jsonl", [both]), {"path": jsonl(tmp_path / "b.jsonl", [both]), "format": "messages"}]
    assert [source.format for source in found(*names, dataset_format="alpaca")[0]] == ["alpaca", "messages"]
    assert [source.format for source in found(*names)[0]] == ["messages", "messages"]


def test_a_source_whose_first_rows_are_null_is_recognised_by_a_later_one(tmp_path):
    name = jsonl(tmp_path / "a.jsonl", [{"messages": None}, {"messages": None}, CHAT])
    assert found(name)[0][0].format == "messages"


def test_a_column_that_is_there_and_never_filled_does_not_make_a_format(tmp_path):
    name = jsonl(tmp_path / "a.jsonl", [{"messages": None, "question": "q"}] * 200)
    with pytest.raises(UserError, match=r"a.jsonl:1: no chat format fits the columns messages \(null\), question") as caught:
        found(name)
    line(caught)
    name = jsonl(tmp_path / "b.jsonl", [{"messages": None, "instruction": "q", "output": "a"}] * 2)
    assert found(name)[0][0].format == "alpaca"


def test_a_file_of_other_columns_in_a_folder_is_an_error_with_its_file_and_row(tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"instruction": "q", "output": "a"}] * 2)
    jsonl(tmp_path / "b.jsonl", [{"question": "q", "answer": "a"}])
    source = found(str(tmp_path))[0][0]
    with pytest.raises(UserError, match=r"b.jsonl:1: the format alpaca needs instruction \+ output; found question, answer"):
        convert(load_rows(source), as_chat, "rows")


def test_the_field_of_pretraining_documents_is_looked_for(tmp_path):
    name = jsonl(tmp_path / "a.jsonl", [{"body": "t"}])

    def recognise(row, wanted):
        return text_format(row, wanted, "body")

    assert found(name, recognise=recognise)[0][0].format == "text"
    with pytest.raises(UserError, match="a.jsonl:1: no column text; found body"):
        found(name, recognise=text_format)


# --- identity -------------------------------------------------------------------------------------------------------


def test_the_identity_of_a_source_is_json_and_changes_with_everything_that_changes_its_rows(tmp_path):
    path = numbered(tmp_path / "a.jsonl", 3)
    source = Source(path, label="a", weight=1.0)
    same = identity(source)
    assert json.loads(json.dumps(same)) == same
    assert identity(replace(source, label="b", weight=2.0)) == same
    changes = [
        {"max_samples": 1},
        {"fraction": 0.5},
        {"columns": ("a=text",)},
        {"held_out": 0.1, "part": "train"},
        {"format": "text"},
    ]
    assert all(identity(replace(source, **change)) != same for change in changes)
    numbered(tmp_path / "a.jsonl", 4)
    assert identity(source) != same


def test_the_identity_of_a_dataset_is_its_fingerprint(tmp_path):
    datasets = pytest.importorskip("datasets")
    prints = []
    for name, rows in (("a", [{"text": "x"}]), ("b", [{"text": "y"}])):
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / name)
        prints.append(identity(Source(str(tmp_path / name)))["fingerprint"])
    assert all(prints) and prints[0] != prints[1]


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("a.jsonl", b"", "no rows in"),
        ("a.jsonl", b"\n \n", "no rows in"),
        ("a.txt", b" \n\n", "no rows in"),
        ("a.txt", b"\xef\xbb\xbf", "no rows in"),
        ("a.json", b"", "no rows in"),
        ("a.json", b"[]", "no rows in"),
        ("a.csv", b"", "no rows in"),
        ("a.csv", b"text,n\n", "no rows in"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl:2: not valid JSON: Expecting value; expected one object"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "y', "a.jsonl:2: not valid JSON: Unterminated string"),
        ("a.jsonl", b'{"text": "x"} {"text": "y"}\n', "a.jsonl:1: not valid JSON: Extra data"),
        ("a.jsonl", b'{"n": ' + b"1" * 5000 + b"}\n", "a.jsonl:1: not valid JSON: Exceeds the limit"),
        ("a.jsonl", b'{"n": ' + b"[" * 100_000 + b"\n", "a.jsonl:1: not valid JSON: maximum recursion depth"),
        ("a.json", b'[\n{"text": "x"},\n{"text": }\n]', "a.json:3: not valid JSON: Expecting value"),
        ("a.json", b'{"text": "x"}\n{"text": \n', "a.json:2: not valid JSON: Expecting value"),
        ("a.json", b'{"data": [1]}', "a.json: expected a list of rows, [{...}, ...], found dict"),
        ("a.json", b'{\n"data": [1]}', "a.json: expected a list of rows, [{...}, ...], found dict"),
        ("a.json", b'["x"]', "a.json row 1: expected an object {column: value}, found str"),
        ("a.jsonl", b'{"text": "x"}\n3\n', "a.jsonl:2: expected an object {column: value}, found int"),
        ("a.jsonl", b"null\n", "a.jsonl:1: expected an object {column: value}, found NoneType"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": "\xff"}\n',
            "a.jsonl:2: byte 0xff is not UTF-8; if the file is Latin-1: iconv",
        ),
        (
            "a.json",
            b'[{"text": "x"},\n{"text": "caf\xe9"}]',
            "a.json:2: byte 0xe9 is not UTF-8; if the file is Latin-1: iconv",
        ),
        ("a.txt", b"one\n\ncaf\xe9\n", "a.txt:3: byte 0xe9 is not UTF-8"),
        ("a.csv", b'text\n"a\nb"\ncaf\xe9\n', "a.csv:4: byte 0xe9 is not UTF-8"),
        ("a.jsonl", '{"text": "x"}\n'.encode("utf-16"), "a.jsonl:1: UTF-16 text; make UTF-8 of it: iconv -f UTF-16"),
        ("a.json", "[]".encode("utf-16"), "a.json:1: UTF-16 text; make UTF-8 of it: iconv -f UTF-16"),
        ("a.csv", "text\nx\n".encode("utf-16"), "a.csv:1: UTF-16 text; make UTF-8 of it: iconv -f UTF-16"),
        ("a.csv", b"text\na\nb,c\n", "a.csv:3: 2 fields, but the first line names 1 columns (text); a field with ','"),
        ("a.csv", b'text\na\n"b\nc\n', "a.csv:3: not a valid table: unexpected end of data (a quote that opens is closed"),
        ("a.tsv", b'text\n"b" c\n', "a.tsv:2: not a valid table: '\\t' expected after"),
        ("a.csv", b"text,n,text\na,b,c\n", "a.csv:1: expected the names of the columns, each one once; found text, n, text"),
        ("a.csv", b'q;a\n"x";1\n', "a.csv:1: one column, named 'q;a': are the fields separated by ';'? A .csv has ','"),
        ("a.csv", b"q\ta\nx\t1\n", "a.csv:1: one column, named 'q\\ta': are the fields separated by '\\t'? A .csv has ','"),
        ("a.tsv", b"q,a\nx,1\n", "a.tsv:1: one column, named 'q,a': are the fields separated by ','? A .csv has ','"),
        ("a.jsonl.gz", b"not gzip", "a.jsonl.gz: cannot be read: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "x"}' * 99, mtime=0)[:20],
            "a.jsonl.gz: cannot be read: Compressed file ended before",
        ),
        ("a.txt.bz2", b"not bzip2", "a.txt.bz2: cannot be read: Invalid data stream"),
        ("a.csv.xz", b"not xz", "a.csv.xz: cannot be read: Input format not supported"),
        ("a.parquet", b"not parquet", "a.parquet: cannot be read as parquet"),
        ("a.parquet.gz", b"x", "a.parquet.gz: unknown kind of file"),
        ("a.docx", b"x", "a.docx: unknown kind of file; expected .jsonl, .json, .txt, .csv, .tsv, .parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_of_one_line_with_its_place(tmp_path, name, content, expected):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_rows(str(tmp_path / name))
    assert expected in line(caught)


@pytest.mark.parametrize(
    "name", ["missing.jsonl", "./missing", "~/missing-folder", "no-such/dataset-on-the-hub", "a.csv.gz"]
)
def test_a_missing_source_is_an_error_of_one_line(name):
    for read in (found, load_rows):
        with pytest.raises(UserError) as caught:
            read(name)
        assert line(caught).startswith(f"{name}: there is no such file") or f"dataset {name}" in line(caught)


@pytest.mark.parametrize(
    "row, new",
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "completion"),
        ({"chosen": CHAT["messages"], "rejected": CHAT["messages"]}, "messages"),
        ({"chosen": "Human: q", "rejected": "Human: r"}, "text"),
    ],
)
def test_pairs_where_chats_are_wanted_are_told_from_them_and_what_is_proposed_is_read(tmp_path, row, new):
    name = jsonl(tmp_path / "a.jsonl", [row] * 3)
    with pytest.raises(UserError, match=rf"a.jsonl:1: these are pairs, for train_dpo.py; .*: --columns {new}=chosen$"):
        found(name)
    assert found(name, columns=[f"{new}=chosen"])[0][0].format in ("prompt_completion", "messages", "text")


def test_several_names_with_commas_between_them_are_answered_with_how_they_are_written():
    with pytest.raises(UserError, match="several are separated by spaces: data/sft data/dpo$"):
        load_rows("data/sft,data/dpo")


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no file for split train .*found no data file"):
        found(str(tmp_path))


@pytest.mark.parametrize("module, name", [("pyarrow.parquet", "a.parquet"), ("datasets", "org/dataset")])
def test_a_library_that_is_missing_is_an_error_that_says_what_to_install(tmp_path, monkeypatch, module, name):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(UserError, match=f"pip install {module.split('.')[0]}") as caught:
        load_rows(str(tmp_path / name) if name == "a.parquet" else name)
    line(caught)


# --- rows that are left out -----------------------------------------------------------------------------------------


def some_rows(count, bad):
    return [Row({"text": "" if i in bad else f"row {i}"}, f"a:{i}") for i in range(count)]


def test_rows_left_out_are_counted_and_said_with_their_origin(capsys):
    results, facts = convert(iter(some_rows(9, {1, 2, 3, 4, 5, 6})), as_text, "rows")
    assert results == ["row 0", "row 7", "row 8"]
    dropped = {"empty text": {"count": 6, "first": ["a:1", "a:2", "a:3", "a:4", "a:5"]}}
    assert facts == {"rows": 9, "kept": 3, "dropped": dropped}
    assert capsys.readouterr().out == "data: 6 of 9 rows left out: empty text (first: a:1)\n"


def test_a_run_without_any_usable_row_is_refused():
    with pytest.raises(UserError, match="none of the 2 rows can be used: empty text"):
        convert(some_rows(2, {0, 1}), as_text, "rows")
    assert convert([], as_text, "rows") == ([], {"rows": 0, "kept": 0, "dropped": {}})


def test_strict_data_makes_the_first_bad_row_a_mistake():
    with pytest.raises(UserError, match=re.escape("a:1: empty text (--strict_data)")):
        convert(some_rows(3, {1, 2}), as_text, "rows", strict=True)


def test_half_a_surrogate_pair_is_a_row_left_out(tmp_path):
    name = write(tmp_path / "a.jsonl", '{"text": "\\ud83d"}\n{"text": "x"}\n')
    results, facts = convert(load_rows(name), as_text, "rows")
    assert results == ["x"] and "half a surrogate pair" in next(iter(facts["dropped"]))


def test_counts_of_several_workers_are_put_together(capsys):
    first, second = Dropped(), Dropped()
    for i in range(4):
        first.add("short", f"a:{i}")
        second.add("short", f"b:{i}")
    second.add("long", "b:9", count=10)
    first.merge(pickle.loads(pickle.dumps(second)))
    assert list(first.facts().items()) == [
        ("long", {"count": 10, "first": ["b:9"]}),
        ("short", {"count": 8, "first": ["a:0", "a:1", "a:2", "a:3", "b:0"]}),
    ]
    assert second.facts()["short"]["count"] == 4
    first.say(20, "rows", kept=2)
    assert capsys.readouterr().out.count("of 20 rows left out") == 2


def test_rows_are_converted_as_they_are_read(tmp_path):
    rows = read_rows(Source(numbered(tmp_path / "a.jsonl", 5)))
    assert convert((row for row, _ in islice(rows, 2)), as_text, "rows")[0] == ["row 0", "row 1"]
    assert next(rows)[0] == {"text": "row 2"}


def test_a_bad_row_is_not_a_mistake_of_the_user():
    assert not issubclass(BadRow, UserError)
