"""Tokenised data: made once, by any number of processes the same, made anew when anything changes, whole or not there."""

import copy
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

from common.collators import pack, whole
from common.data import cache
from common.data.cache import making, tokenize, train_tokenizer_on
from common.data.examples import TokenFile, Units
from common.data.sources import BadRow, Row, Source
from common.data.tokens import tokenize_chat, tokenize_documents
from common.errors import UserError

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

ALONE = SimpleNamespace(is_main_process=True, is_local_main_process=True, wait_for_everyone=lambda: None)
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {i}?"},
            {"role": "assistant", "content": "It is " + "very " * (i % 4)},
        ]
    }
    for i in range(20)
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained("data/base_model")


def source(path, rows, **settings):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source(str(path), **{"label": path.stem, "format": "text"} | settings)


def numbered(path, count, **settings):
    return source(path, [{"text": f"row {i} " * (i % 3 + 1), "n": i} for i in range(count)], **settings)


def document(columns, tokenizer, *, dataset_format, log=None):
    """Rows whose text begins with bad, wrong or several are what they say."""
    if log:
        with open(log, "a") as file:  # also from another process
            file.write(f"{columns.get('n')}\n")
    text = columns["text"]
    if text.startswith("bad"):
        raise BadRow("a bad row")
    if text.startswith("wrong"):
        raise UserError("no good")
    if text.startswith("several"):
        return [[whole(np.array([1, 2]))], BadRow("a bad piece"), [whole(np.array([3]))]]
    return text


def chats(columns, tokenizer, *, dataset_format):
    return [[tokenize_chat(columns["messages"], tokenizer)]]


def pairs(columns, tokenizer, *, dataset_format):
    chosen, rejected = tokenize_documents([columns["text"], f"no {columns['n']}"], tokenizer)
    return [[{"input_ids": chosen, "loss_mask": np.arange(len(chosen)) % 2}, whole(rejected)]]


def prepare(tmp_path, tokenizer, *sources, make_units=document, setting=None, num_proc=1, **options):
    return tokenize(
        ALONE,
        list(sources),
        make_units,
        tokenizer,
        setting or {},
        cache_dir=str(tmp_path / "cache"),
        num_proc=num_proc,
        **options,
    )


class Counted:
    """prepare with a count of the rows that were tokenised by it."""

    def __init__(self, tmp_path):
        self.tmp_path, self.log = tmp_path, tmp_path / "calls"

    def __call__(self, *args, setting=None, **options):
        self.log.write_text("")
        units = prepare(self.tmp_path, *args, setting={"log": str(self.log)} | (setting or {}), **options)
        return units, len(self.log.read_text().splitlines())


@pytest.fixture
def counted(tmp_path):
    return Counted(tmp_path)


def as_lists(units):
    return [[(s["input_ids"].tolist(), s["loss_mask"].tolist()) for s in units[i]] for i in range(len(units))]


def folders(tmp_path):
    return sorted(path for path in (tmp_path / "cache").iterdir() if not path.name.startswith("."))


def line(caught) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- what is in it --------------------------------------------------------------------------------------------------


def test_documents_are_those_that_the_tokenizer_makes_of_the_rows(tmp_path, tokenizer):
    units = prepare(tmp_path, tokenizer, numbered(tmp_path / "a.jsonl", 10))
    wanted = [tokenize_documents([f"row {i} " * (i % 3 + 1)], tokenizer)[0].tolist() for i in range(10)]
    assert as_lists(units) == [[(ids, [1] * len(ids))] for ids in wanted]
    assert units.counts == [10] and units.lengths.tolist() == [len(ids) for ids in wanted]
    assert units.longest == max(map(len, wanted)) and units.difficulty is None
    with pytest.raises(IndexError):
        units[10]


def test_units_are_those_that_make_units_makes_of_the_rows(tmp_path, tokenizer):
    rows = source(tmp_path / "a.jsonl", CHATS, format="messages")
    units = prepare(tmp_path, tokenizer, rows, make_units=chats)
    direct = [chats(row, tokenizer, dataset_format="messages") for row in CHATS]
    assert as_lists(units) == [
        [(s["input_ids"].tolist(), s["loss_mask"].tolist()) for s in unit] for row in direct for unit in row
    ]
    facts = units.facts()[0]
    assert facts["tokens"] == units.lengths.sum() and facts["rows"] == facts["units"] == 20
    assert facts["trained_tokens"] == sum(sum(mask) for unit in as_lists(units) for _, mask in unit) < facts["tokens"]


def test_the_sequences_of_a_unit_stay_together_and_rows_may_give_any_number_of_units(tmp_path, tokenizer, capsys):
    rows = numbered(tmp_path / "a.jsonl", 5)
    units = prepare(tmp_path, tokenizer, rows, make_units=pairs)
    direct = [pairs({"text": f"row {i} " * (i % 3 + 1), "n": i}, tokenizer, dataset_format="text")[0] for i in range(5)]
    assert as_lists(units) == [[(s["input_ids"].tolist(), s["loss_mask"].tolist()) for s in unit] for unit in direct]
    assert units.lengths.tolist() == [sum(len(s["input_ids"]) for s in unit) for unit in direct]
    assert units.longest == max(len(s["input_ids"]) for unit in direct for s in unit)

    some = source(tmp_path / "b.jsonl", [{"text": "several"}, {"text": "one"}, {"text": "several"}])
    units = prepare(tmp_path, tokenizer, some)
    assert [unit[0][0] for unit in as_lists(units)[:2]] == [[1, 2], [3]] and len(units) == 5
    assert units.files[0].rows.tolist() == [0, 0, 1, 2, 2]
    assert "left out: a bad piece" in capsys.readouterr().out


def test_the_tokens_are_read_from_the_disk(tmp_path, tokenizer):
    rows = source(tmp_path / "a.jsonl", CHATS, format="messages")
    file = prepare(tmp_path, tokenizer, rows, make_units=chats).files[0]
    assert isinstance(file.ids, np.memmap) and isinstance(file.mask, np.memmap) and not file.ids.flags.writeable
    assert prepare(tmp_path, tokenizer, numbered(tmp_path / "b.jsonl", 3)).files[0].mask is None  # all are trained


@pytest.mark.parametrize("largest, kind", [(2**16 - 1, np.uint16), (2**16, np.uint32), (200_000, np.uint32)])
def test_ids_take_two_bytes_where_they_fit(tmp_path, tokenizer, largest, kind):
    large = copy.deepcopy(tokenizer)
    large.__class__ = type("Large", (type(tokenizer),), {"get_vocab": lambda self: {"a": 0, "b": largest}})

    def largest_id(columns, tokenizer, *, dataset_format):
        return [[whole(np.array([0, max(tokenizer.get_vocab().values())]))]]

    units = prepare(tmp_path, large, numbered(tmp_path / "a.jsonl", 2), make_units=largest_id)
    assert units.files[0].ids.dtype == kind and as_lists(units) == [[([0, largest], [1, 1])]] * 2


# --- several processes ----------------------------------------------------------------------------------------------


def test_several_processes_make_the_same_files_as_one(tmp_path, tokenizer):
    rows = [{"text": "bad" if i % 400 == 399 else f"row {i} " * (i % 3 + 1), "n": i} for i in range(2300)]
    rows = source(tmp_path / "a.jsonl", rows)
    found = []
    for num_proc in (1, 2, 3):
        units = prepare(tmp_path / str(num_proc), tokenizer, rows, num_proc=num_proc, curriculum_column="n")
        assert units.difficulty.tolist() == [i for i in range(2300) if i % 400 != 399] == units.files[0].rows.tolist()
        found.append({f.name: f.read_bytes() for f in folders(tmp_path / str(num_proc))[0].iterdir()})
    # The list of the files has them in the same order, too.
    assert found[0] == found[1] == found[2] and json.loads(found[0]["facts.json"])["dropped"]["a bad row"]["count"] == 5


def test_a_mistake_that_a_worker_finds_is_one_line_with_its_row(tmp_path, tokenizer):
    rows = source(tmp_path / "a.jsonl", [{"text": "wrong" if i == 1700 else "fine"} for i in range(3000)])
    with pytest.raises(UserError) as caught:
        prepare(tmp_path, tokenizer, rows, num_proc=2)
    assert line(caught) == f"{rows.path}:1701: no good" and not list((tmp_path / "cache").iterdir())


def test_a_worker_that_fails_for_another_reason_does_not_leave_the_run_waiting(tmp_path, tokenizer):
    def fails(columns, tokenizer, *, dataset_format):
        return "fine" if columns["n"] < 600 else 1 / 0

    with pytest.raises(ZeroDivisionError):
        prepare(tmp_path, tokenizer, numbered(tmp_path / "a.jsonl", 1200), make_units=fails, num_proc=2)
    assert not list((tmp_path / "cache").iterdir())


def test_a_source_is_not_read_into_memory_ahead_of_the_processes(tokenizer):
    read = []
    rows = ((read.append(i) or i, Row(f"a:{i}", {"text": "x"})) for i in range(12_000))
    done = 0
    for count, encoded in cache.encode_all(rows, (document, tokenizer, {"dataset_format": "text"}, None), 2):
        assert encoded.rows.tolist() == list(range(done, done + count))
        done += count
        assert len(read) <= done + 6 * cache.CHUNK
    assert done == len(read) == 12_000


@pytest.mark.parametrize("shared_disk", [True, False])
def test_one_process_of_a_node_makes_what_the_others_read(tmp_path, tokenizer, counted, shared_disk):
    rows, (made, _) = numbered(tmp_path / "a.jsonl", 5), counted(tokenizer, numbered(tmp_path / "a.jsonl", 5))
    folder = folders(tmp_path)[0]
    hidden, waits = tmp_path / "hidden", []
    folder.rename(hidden)

    def wait():
        waits.append(1)
        if shared_disk and len(waits) == 1:
            hidden.rename(folder)  # by the main process, elsewhere

    other = SimpleNamespace(is_main_process=False, is_local_main_process=True, wait_for_everyone=wait)
    counted.log.write_text("")
    found = tokenize(
        other, [rows], document, tokenizer, {"log": str(counted.log)}, cache_dir=str(tmp_path / "cache"), num_proc=1
    )
    assert as_lists(found) == as_lists(made) and len(waits) == 2
    assert len(counted.log.read_text().splitlines()) == (0 if shared_disk else 5)


# --- when it is made anew -------------------------------------------------------------------------------------------


def test_what_is_there_is_used_again(tmp_path, tokenizer, counted):
    rows = numbered(tmp_path / "a.jsonl", 30)
    first, calls = counted(tokenizer, rows)
    again, more = counted(AutoTokenizer.from_pretrained("data/base_model"), rows)
    assert (calls, more) == (30, 0) and as_lists(first) == as_lists(again) and first.facts() == again.facts()


def changed_template(tokenizer):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template += " "
    return {"tokenizer": changed}


def changed_tokenizer(tokenizer):
    changed = copy.deepcopy(tokenizer)
    changed.add_tokens(["<new>"])
    return {"tokenizer": changed}


@pytest.mark.parametrize(
    "change",
    [
        lambda t: {"rows": [{"text": "another", "n": 0}] * 3},
        lambda t: {"rows": [{"text": f"ROW {i}", "n": i} for i in range(3)]},  # of the same size
        lambda t: {"source": {"format": "other"}},
        lambda t: {"source": {"max_samples": 2}},
        lambda t: {"setting": {"another": 1}},
        lambda t: {"curriculum_column": "n"},
        changed_tokenizer,
        changed_template,
    ],
)
def test_what_has_changed_is_made_anew(tmp_path, tokenizer, counted, change):
    def any_settings(columns, tokenizer, *, dataset_format, log, another=None):
        return document(columns, tokenizer, dataset_format=dataset_format, log=log)

    kept = {"rows": [{"text": f"row {i}", "n": i} for i in range(3)], "source": {}, "tokenizer": tokenizer}
    for turn, expected in enumerate((True, False, True)):  # as it was, again, changed
        use = kept | (change(tokenizer) if turn == 2 else {})
        if turn == 0 or use["rows"] != kept["rows"]:
            source(tmp_path / "a.jsonl", use["rows"])
        rows = Source(str(tmp_path / "a.jsonl"), **{"label": "a", "format": "text"} | use["source"])
        options = {name: use[name] for name in ("setting", "curriculum_column") if name in use}
        units, calls = counted(use["tokenizer"], rows, make_units=any_settings, **options)
        assert calls == (len(units) if expected else 0)
    assert len(folders(tmp_path)) == 2


STAGE = """
MARK = "!"

def twice(text):
    return ending(text) + ending(text)

def ending(text):
    return text + "."

def unused(text):
    return text

def make_units(columns, tokenizer, *, dataset_format):
    CALLS.append(1)
    return " ".join(twice(word) for word in columns["text"].split())
"""


@pytest.mark.parametrize(
    "old, new, expected",
    [
        ("columns, tok", "columns, tok", 0),
        ('" ".join', '"_".join', 5),
        ("ending(text) + ending", "ending(text) * 2 + ending", 5),
        ('text + "."', 'text + ","', 5),
        ("return text\n", "return text + text\n", 0),
    ],
)
def test_the_code_that_makes_units_is_part_of_the_key(tmp_path, tokenizer, old, new, expected):
    """make_units, what it calls from inside a loop, and what that calls; not the rest of its module."""
    rows, calls = numbered(tmp_path / "a.jsonl", 5), []
    for code in (STAGE, STAGE.replace(old, new)):
        (tmp_path / "stage.py").write_text(code)
        calls.clear()
        module = {"__name__": "stage", "CALLS": calls}
        exec(compile(code, tmp_path / "stage.py", "exec"), module)
        prepare(tmp_path, tokenizer, rows, make_units=module["make_units"])
    assert len(calls) == expected


def test_each_source_has_its_own_folder_and_a_new_one_leaves_the_others_alone(tmp_path, tokenizer, counted):
    a, b, c = (numbered(tmp_path / f"{name}.jsonl", n) for name, n in (("a", 3), ("b", 4), ("c", 5)))
    assert counted(tokenizer, a, b)[1] == 7
    before = folders(tmp_path)
    assert [folder.name.split("-")[0] for folder in before] == ["a", "b"]
    units, calls = counted(tokenizer, c, b, a)
    assert calls == 5 and units.counts == [5, 4, 3] and set(before) < set(folders(tmp_path))
    assert [found["source"] for found in units.facts()] == ["c", "b", "a"]
    alone = [counted(tokenizer, one)[0] for one in (c, b, a)]
    assert as_lists(units) == [unit for one in alone for unit in as_lists(one)]
    for s, one in enumerate(alone):
        assert as_lists(units.of_source(s)) == as_lists(one) and units.of_source(s).facts() == one.facts()


def test_a_tokenizer_is_trained_once(tmp_path, monkeypatch):
    rows = [numbered(tmp_path / "a.jsonl", 50), source(tmp_path / "b.jsonl", [{"text": "zebra zebra"}, {"text": None}] * 9)]
    first = train_tokenizer_on(ALONE, rows, 300, str(tmp_path / "cache"), "text")
    monkeypatch.setattr(cache, "train_tokenizer", None)
    again = train_tokenizer_on(ALONE, rows, 300, str(tmp_path / "cache"), "text")
    assert first.get_vocab() == again.get_vocab() and first.chat_template == again.chat_template
    assert len(first("zebra").input_ids) < 5
    with pytest.raises(TypeError):  # it would be trained again
        train_tokenizer_on(ALONE, rows, 301, str(tmp_path / "cache"), "text")


# --- killed, cut off, not to be written -----------------------------------------------------------------------------


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except OSError:
        return False


def within(seconds, condition):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_run_that_is_killed_leaves_nothing_that_a_later_one_trusts(tmp_path, tokenizer, counted, num_proc):
    rows, pids = numbered(tmp_path / "a.jsonl", 1500), tmp_path / "pids"
    stop = tmp_path / "stop"
    stop.touch()

    def slow(columns, tokenizer, *, dataset_format, log):
        if columns["n"] >= 700 and stop.exists():
            with open(pids, "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(60)
        return document(columns, tokenizer, dataset_format=dataset_format, log=log)

    child = multiprocessing.get_context("fork").Process(
        target=lambda: counted(tokenizer, rows, make_units=slow, num_proc=num_proc)
    )
    child.start()
    assert within(30, lambda: pids.exists() and len(pids.read_text().splitlines()) == num_proc)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    stop.unlink()
    left = list((tmp_path / "cache").iterdir())
    assert len(left) == 1 and left[0].name.startswith(".") and left[0].name.endswith(".tmp") and not folders(tmp_path)
    assert within(10, lambda: not any(map(is_running, map(int, pids.read_text().split()))))  # its workers end with it

    units, calls = counted(tokenizer, rows, make_units=slow, num_proc=num_proc)
    assert calls == len(units) == 1500 and len(folders(tmp_path)) == 1
    assert as_lists(units) == as_lists(prepare(tmp_path, tokenizer, rows))
    assert left[0].exists()  # it may belong to a run that is still at it; after a day it does not
    for path in (*left[0].iterdir(), left[0]):
        os.utime(path, (0, 0))
    prepare(tmp_path, tokenizer, numbered(tmp_path / "b.jsonl", 3))
    assert not left[0].exists()


def test_two_runs_may_make_the_same_at_a_time(tmp_path):
    """In containers both are process 1."""
    with making(tmp_path / "a") as first:
        (first / "x").write_text("first")
        with making(tmp_path / "a") as second:
            assert first != second
            (second / "x").write_text("second")
    assert (tmp_path / "a" / "x").read_text() == "second" and [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_gets_its_name_at_once_when_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(cache, "flush", lambda path: flushed.append(path.name))

    def interrupted(old, new):
        assert {path.name for path in old.iterdir()} == set(flushed) == {"x", "files.json"} and not new.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), making(tmp_path / "a") as folder:
        (folder / "x").write_text("x")
    assert not list(tmp_path.iterdir())


FILES = ["ids.bin", "mask.bin", "lengths.npy", "rows.npy", "difficulty.npy", "facts.json", "files.json"]


@pytest.mark.parametrize("damage", ["cut", "gone"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_off_or_gone_is_noticed_and_made_anew(tmp_path, tokenizer, name, damage):
    rows = source(tmp_path / "a.jsonl", CHATS, format="messages")
    first = as_lists(prepare(tmp_path, tokenizer, rows, make_units=chats))
    (folder,) = folders(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    if damage == "gone":
        (folder / name).unlink()
    else:
        os.truncate(folder / name, (folder / name).stat().st_size - 1)
    again = prepare(tmp_path, tokenizer, rows, make_units=chats)
    assert as_lists(again) == first and sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert list((tmp_path / "cache").iterdir()) == [folder]


def test_a_cache_that_cannot_be_written_is_an_error_of_one_line(tmp_path, tokenizer):
    rows = numbered(tmp_path / "a.jsonl", 3)
    (tmp_path / "cache").touch()
    with pytest.raises(UserError) as caught:
        prepare(tmp_path, tokenizer, rows)
    assert line(caught).startswith(f"--dataset_cache_dir {tmp_path}/cache: cannot be written: ")


# --- rows that are left out -----------------------------------------------------------------------------------------


def test_rows_left_out_are_said_with_their_place_also_when_the_cache_is_used(tmp_path, tokenizer, counted, capsys):
    rows = source(tmp_path / "a.jsonl", [{"text": "bad" if i in (2, 5) else "fine"} for i in range(9)])
    for expected in (9, 0):
        units, calls = counted(tokenizer, rows)
        assert calls == expected and len(units) == 7
        assert capsys.readouterr().out == f"data: 2 of 9 rows of a left out: a bad row (first: {rows.path}:3)\n"
        dropped = {"a bad row": {"count": 2, "first": [f"{rows.path}:3", f"{rows.path}:6"]}}
        assert units.facts()[0]["dropped"] == dropped and units.facts()[0]["rows"] == 9


@pytest.mark.parametrize("num_proc", [1, 2])
def test_strict_data_makes_the_first_bad_row_an_error(tmp_path, tokenizer, num_proc):
    rows = source(tmp_path / "a.jsonl", [{"text": "bad" if i in (800, 900) else "fine"} for i in range(1600)])
    for cached in (False, True):
        if cached:
            prepare(tmp_path, tokenizer, rows)
        with pytest.raises(UserError) as caught:
            prepare(tmp_path, tokenizer, rows, num_proc=num_proc, strict=True)
        assert line(caught) == f"{rows.path}:801: a bad row (--strict_data)"
        assert len(list((tmp_path / "cache").iterdir())) == cached


def test_a_source_without_a_usable_row_is_an_error(tmp_path, tokenizer):
    rows = source(tmp_path / "a.jsonl", [{"text": "bad"}] * 3)
    for _ in range(2):
        with pytest.raises(UserError, match="none of the 3 rows.* can be used.*a bad row") as caught:
            prepare(tmp_path, tokenizer, rows)
        line(caught)


def test_rows_of_which_a_part_is_left_out_are_used(tmp_path, tokenizer):
    units = prepare(tmp_path, tokenizer, source(tmp_path / "a.jsonl", [{"text": "several"}] * 3))
    assert len(units) == 6  # three pieces are left out, of three rows


# --- curriculum -----------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_curriculum_come_from_the_rows(tmp_path, tokenizer, capsys):
    values = [3, "4.5", None, -1, "hard", 0.25, True, float("nan"), [1]]
    rows = source(tmp_path / "a.jsonl", [{"text": f"row {i}", "n": value} for i, value in enumerate(values)])
    units = prepare(tmp_path, tokenizer, rows, numbered(tmp_path / "b.jsonl", 2), curriculum_column="n")
    assert units.difficulty.tolist() == [3, 4.5, -1, 0.25, 1, 0, 1] and units.files[0].rows.tolist() == [0, 1, 3, 5, 6]
    assert f"4 of 9 rows of a left out: n is not a number (first: {rows.path}:3)" in capsys.readouterr().out
    assert units.of_source(1).difficulty.tolist() == [0, 1]


def test_a_curriculum_by_length_needs_no_column(tmp_path, tokenizer):
    units = prepare(tmp_path, tokenizer, numbered(tmp_path / "a.jsonl", 9), curriculum_column="length")
    assert units.difficulty.tolist() == units.lengths.tolist() and len(set(units.lengths)) > 1
    assert prepare(tmp_path, tokenizer, numbered(tmp_path / "b.jsonl", 9)).difficulty is None


def test_a_curriculum_column_that_is_not_there_is_an_error(tmp_path, tokenizer):
    rows = numbered(tmp_path / "a.jsonl", 3)
    with pytest.raises(UserError) as caught:
        prepare(tmp_path, tokenizer, rows, curriculum_column="m")
    assert line(caught) == f"{rows.path}:1: --curriculum_column m: no such column; found text, n"


# --- units in memory ------------------------------------------------------------------------------------------------

DOCUMENTS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=12), min_size=1, max_size=3)


def units_of(sources, difficulty=False):
    """Units of documents of these many tokens in each source; token t of a source has the id t."""
    files = []
    for sizes in sources:
        ends, n = np.cumsum(sizes), np.arange(len(sizes))
        files.append(TokenFile(np.arange(sum(sizes)), None, ends - sizes, ends, 1, n, n * 1.0, {}))
    units = Units(files, [None] * len(files))
    if difficulty:
        units.difficulty = np.concatenate([100.0 * s + file.difficulty for s, file in enumerate(files)])
    return units


@settings(deadline=None)
@given(DOCUMENTS, st.integers(1, 40), st.booleans(), st.booleans())
def test_cut_documents_are_those_of_a_loop(sources, max_length, across, difficulty):
    wanted, counts, begins = [], [], []
    for s, sizes in enumerate(sources):
        stream, count = list(range(sum(sizes))), 0
        of = [d for d, size in enumerate(sizes) for _ in range(size)]  # the document of each token
        texts = [stream] if across else [[t for t in stream if of[t] == d] for d in range(len(sizes))]
        for text in texts:
            for start in range(0, len(text), max_length):
                piece = text[start : start + max_length]
                if len(piece) > 1:  # one token has nothing to predict
                    wanted.append(piece)
                    begins.append(100 * s + of[piece[0]])
                    count += 1
        counts.append(count)
    cut = units_of(sources, difficulty).cut(max_length, across)
    assert [ids for unit in as_lists(cut) for ids, _ in unit] == wanted and cut.counts == counts
    assert cut.lengths.tolist() == [len(piece) for piece in wanted]
    assert cut.longest == max(map(len, wanted), default=0)
    assert [100 * s + row for s, file in enumerate(cut.files) for row in file.rows.tolist()] == begins
    assert (cut.difficulty is None) == (not difficulty)
    if difficulty:
        assert cut.difficulty.tolist() == begins


def test_documents_that_are_cut_for_a_curriculum_can_be_packed_in_bands(tmp_path, tokenizer):
    units = prepare(tmp_path, tokenizer, numbered(tmp_path / "a.jsonl", 40), curriculum_column="n")
    packs = pack(units.cut(8, across=False), 8, bands=10)
    assert packs.difficulty.max() > 36 and packs.difficulty.min() < 3


def test_a_field_belongs_to_every_sequence(tmp_path, tokenizer):
    a, b = numbered(tmp_path / "a.jsonl", 3), numbered(tmp_path / "b.jsonl", 2)
    units = prepare(tmp_path, tokenizer, a, b, make_units=pairs)
    units.add_field("ref_logps", np.arange(10) * 0.5)
    assert [[s["ref_logps"] for s in units[i]] for i in range(5)] == [[i, i + 0.5] for i in range(5)]
    assert [[s["ref_logps"] for s in units.of_source(1)[i]] for i in range(2)] == [[3, 3.5], [4, 4.5]]
    packed = pack(units, 1000)
    assert [s["ref_logps"] for s in packed[1]] in ([3, 3.5, 4, 4.5], [4, 4.5, 3, 3.5])
    with pytest.raises(KeyError):
        prepare(tmp_path, tokenizer, a, make_units=pairs)[0][0]["ref_logps"]
