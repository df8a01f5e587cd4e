"""Tokenised data: made once, by any number of processes the same, made anew when anything changes, whole or not there."""

import copy
import importlib
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

from common.args import CommonArgs
from common.data import encoding
from common.data import folders as cache_folders
from common.data.cache import tokenize
from common.data.encoding import Job
from common.data.examples import Examples, TokenFile
from common.data.folders import new_folder
from common.data.packing import chunk, pack
from common.data.sources import Source
from common.data.tokens import tokenize_documents, tokenize_messages
from common.data.types import BadRow, Row, whole
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


def run_arguments(tmp_path, *sources, **settings):
    """All shared arguments of a run, with these files as sources."""
    names = [found.path for found in sources]
    return CommonArgs(
        **{"dataset_name": names, "dataset_cache_dir": str(tmp_path / "cache"), "dataset_num_proc": 1} | settings
    )


def numbered(path, count, **settings):
    return source(path, [{"text": f"row {i} " * (i % 3 + 1), "n": i} for i in range(count)], **settings)


def document(row, tokenizer, args):
    """Rows whose text begins with bad or wrong are what they say."""
    log(row, args.log)
    text = row["text"]
    if text.startswith("bad"):
        raise BadRow("a bad row")
    if text.startswith("wrong"):
        raise UserError("no good")
    return text


def log(row, path):
    if path:
        with open(path, "a") as file:  # also from another process
            file.write(f"{row.get('n')}\n")


def chats(row, tokenizer, args):
    return [tokenize_messages(row["messages"], tokenizer)]


def pairs(row, tokenizer, args):
    chosen, rejected = tokenize_documents([row["text"], f"no {row['n']}"], tokenizer)
    return [{"input_ids": chosen, "loss_mask": np.arange(len(chosen)) % 2}, whole(rejected)]


def arguments(tmp_path, **settings):
    given = {"dataset_cache_dir": str(tmp_path / "cache"), "dataset_num_proc": 1, "strict_data": False, "log": None}
    return SimpleNamespace(**given | settings)


def prepare(tmp_path, tokenizer, *sources, encode=document, curriculum_column=None, accelerator=ALONE, **settings):
    args = arguments(tmp_path, **settings)
    return tokenize(args, accelerator, list(sources), encode, tokenizer, curriculum_column)


class Counted:
    """prepare with a count of the rows that were tokenised by it."""

    def __init__(self, tmp_path):
        self.tmp_path, self.log = tmp_path, tmp_path / "calls"

    def __call__(self, *args, **options):
        self.log.write_text("")
        examples = prepare(self.tmp_path, *args, log=str(self.log), **options)
        return examples, len(self.log.read_text().splitlines())


@pytest.fixture
def counted(tmp_path):
    return Counted(tmp_path)


def as_lists(examples):
    return [[(s["input_ids"].tolist(), s["loss_mask"].tolist()) for s in examples[i]] for i in range(len(examples))]


def folders(tmp_path):
    return sorted(path for path in (tmp_path / "cache").iterdir() if not path.name.startswith("."))


def line(caught) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- what is in it --------------------------------------------------------------------------------------------------


def test_documents_are_those_that_the_tokenizer_makes_of_the_rows(tmp_path, tokenizer):
    examples = prepare(tmp_path, tokenizer, numbered(tmp_path / "a.jsonl", 10))
    wanted = [tokenize_documents([f"row {i} " * (i % 3 + 1)], tokenizer)[0].tolist() for i in range(10)]
    assert as_lists(examples) == [[(ids, [1] * len(ids))] for ids in wanted]
    assert examples.counts == [10] and examples.lengths.tolist() == [len(ids) for ids in wanted]
    assert examples.longest == max(map(len, wanted)) and examples.difficulty is None
    with pytest.raises(IndexError):
        examples[10]


def test_examples_are_those_that_encode_makes_of_the_rows(tmp_path, tokenizer):
    rows = source(tmp_path / "a.jsonl", CHATS, format="messages")
    examples = prepare(tmp_path, tokenizer, rows, encode=chats)
    direct = [chats(row, tokenizer, None) for row in CHATS]
    assert as_lists(examples) == [
        [(s["input_ids"].tolist(), s["loss_mask"].tolist()) for s in example] for example in direct
    ]
    facts = examples.facts()[0]
    assert facts["tokens"] == examples.lengths.sum() and facts["rows"] == facts["examples"] == 20
    assert (
        facts["trained_tokens"] == sum(sum(mask) for example in as_lists(examples) for _, mask in example) < facts["tokens"]
    )


def test_the_sequences_of_an_example_stay_together(tmp_path, tokenizer):
    examples = prepare(tmp_path, tokenizer, numbered(tmp_path / "a.jsonl", 5), encode=pairs)
    direct = [pairs({"text": f"row {i} " * (i % 3 + 1), "n": i}, tokenizer, None) for i in range(5)]
    assert as_lists(examples) == [[(s["input_ids"].tolist(), s["loss_mask"].tolist()) for s in pair] for pair in direct]
    assert examples.lengths.tolist() == [sum(len(s["input_ids"]) for s in pair) for pair in direct]
    assert examples.longest == max(len(s["input_ids"]) for pair in direct for s in pair)


def test_the_tokens_are_read_from_the_disk(tmp_path, tokenizer):
    rows = source(tmp_path / "a.jsonl", CHATS, format="messages")
    file = prepare(tmp_path, tokenizer, rows, encode=chats).files[0]
    for values in (file.ids, file.mask):  # as a plain array, of which a slice takes a third of the time
        assert type(values) is np.ndarray and isinstance(values.base, np.memmap) and not values.flags.writeable
    assert prepare(tmp_path, tokenizer, numbered(tmp_path / "b.jsonl", 3)).files[0].mask is None  # all are trained


@pytest.mark.parametrize("largest, kind", [(2**16 - 1, np.uint16), (2**16, np.uint32), (200_000, np.uint32)])
def test_ids_take_two_bytes_where_they_fit(tmp_path, tokenizer, largest, kind):
    large = copy.deepcopy(tokenizer)
    large.__class__ = type("Large", (type(tokenizer),), {"get_vocab": lambda self: {"a": 0, "b": largest}})

    def largest_id(row, tokenizer, args):
        return [whole(np.array([0, max(tokenizer.get_vocab().values())]))]

    examples = prepare(tmp_path, large, numbered(tmp_path / "a.jsonl", 2), encode=largest_id)
    assert examples.files[0].ids.dtype == kind and as_lists(examples) == [[([0, largest], [1, 1])]] * 2


# --- several processes ----------------------------------------------------------------------------------------------


def test_several_processes_make_the_same_files_as_one(tmp_path, tokenizer):
    rows = [{"text": "bad" if i % 400 == 399 else f"row {i} " * (i % 3 + 1), "n": i} for i in range(2300)]
    rows = source(tmp_path / "a.jsonl", rows)
    found = []
    for num_proc in (1, 2, 3):
        examples = prepare(tmp_path / str(num_proc), tokenizer, rows, dataset_num_proc=num_proc, curriculum_column="n")
        assert examples.difficulty.tolist() == [i for i in range(2300) if i % 400 != 399] == examples.files[0].rows.tolist()
        found.append({f.name: f.read_bytes() for f in folders(tmp_path / str(num_proc))[0].iterdir()})
    # The list of the files has them in the same order, too.
    assert found[0] == found[1] == found[2] and json.loads(found[0]["facts.json"])["dropped"]["a bad row"]["count"] == 5


def test_a_mistake_that_a_worker_finds_is_one_line_with_its_row(tmp_path, tokenizer):
    rows = source(tmp_path / "a.jsonl", [{"text": "wrong" if i == 1700 else "fine"} for i in range(3000)])
    with pytest.raises(UserError) as caught:
        prepare(tmp_path, tokenizer, rows, dataset_num_proc=2)
    assert line(caught) == f"{rows.path}:1701: no good" and not list((tmp_path / "cache").iterdir())


def test_a_worker_that_fails_for_another_reason_does_not_leave_the_run_waiting(tmp_path, tokenizer):
    def fails(row, tokenizer, args):
        return "fine" if row["n"] < 600 else 1 / 0

    with pytest.raises(ZeroDivisionError):
        prepare(tmp_path, tokenizer, numbered(tmp_path / "a.jsonl", 1200), encode=fails, dataset_num_proc=2)
    assert not list((tmp_path / "cache").iterdir())


def test_a_source_is_not_read_into_memory_ahead_of_the_processes(tokenizer):
    read = []
    rows = ((read.append(i) or i, Row({"text": "x"}, f"a:{i}")) for i in range(12_000))
    done = 0
    for count, encoded in encoding.encode_all(rows, Job(document, tokenizer, SimpleNamespace(log=None)), 2):
        assert encoded.rows.tolist() == list(range(done, done + count))
        done += count
        assert len(read) <= done + 6 * encoding.CHUNK
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
    found = prepare(tmp_path, tokenizer, rows, accelerator=other, log=str(counted.log))
    assert as_lists(found) == as_lists(made) and len(waits) == 2
    assert len(counted.log.read_text().splitlines()) == (0 if shared_disk else 5)


# --- when it is made anew -------------------------------------------------------------------------------------------


def test_what_is_there_is_used_again(tmp_path, tokenizer, counted):
    rows = numbered(tmp_path / "a.jsonl", 30)
    first, calls = counted(tokenizer, rows)
    again, more = counted(AutoTokenizer.from_pretrained("data/base_model"), rows)
    assert (calls, more) == (30, 0) and as_lists(first) == as_lists(again) and first.facts() == again.facts()


def test_what_is_there_is_hashed_once(tmp_path, tokenizer, monkeypatch):
    """By the main process, which is its machine's first one, too."""
    rows, checks = numbered(tmp_path / "a.jsonl", 5), []
    prepare(tmp_path, tokenizer, rows)
    is_complete = cache_folders.is_complete
    monkeypatch.setattr(cache_folders, "is_complete", lambda folder: checks.append(folder) or is_complete(folder))
    prepare(tmp_path, tokenizer, rows)
    assert checks == folders(tmp_path)


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
        lambda t: {"another": 1},
        lambda t: {"curriculum_column": "n"},
        changed_tokenizer,
        changed_template,
    ],
)
def test_what_has_changed_is_made_anew(tmp_path, tokenizer, counted, change):
    def reads_another(row, tokenizer, args):
        log(row, args.log)
        return row["text"] * args.another

    kept = {"another": 2, "curriculum_column": None}
    kept |= {"rows": [{"text": f"row {i}", "n": i} for i in range(3)], "source": {}, "tokenizer": tokenizer}
    for turn, expected in enumerate((True, False, True)):  # as it was, again, changed
        use = kept | (change(tokenizer) if turn == 2 else {})
        if turn == 0 or use["rows"] != kept["rows"]:
            source(tmp_path / "a.jsonl", use["rows"])
        rows = Source(str(tmp_path / "a.jsonl"), **{"label": "a", "format": "text"} | use["source"])
        options = {name: use[name] for name in ("another", "curriculum_column")}
        examples, calls = counted(use["tokenizer"], rows, encode=reads_another, **options)
        assert calls == (len(examples) if expected else 0)
    assert len(folders(tmp_path)) == 2


STAGE = """
MARK = "!"

def twice(text):
    return ending(text) + ending(text)

def ending(text):
    return text + "."

def unused(text):
    return text

def encode(row, tokenizer, args):
    CALLS.append(1)
    return " ".join(twice(word) for word in row["text"].split())
"""


@pytest.mark.parametrize(
    "old, new, expected",
    [
        ("row, tok", "row, tok", 0),
        ('" ".join', '"_".join', 5),
        ("ending(text) + ending", "ending(text) * 2 + ending", 5),
        ('text + "."', 'text + ","', 5),
        ("return text\n", "return text + text\n", 0),
    ],
)
def test_the_code_that_encodes_is_part_of_the_key(tmp_path, tokenizer, old, new, expected):
    """encode, what it calls from inside a loop, and what that calls; not the rest of its module."""
    rows, calls = numbered(tmp_path / "a.jsonl", 5), []
    for code in (STAGE, STAGE.replace(old, new)):
        (tmp_path / "stage.py").write_text(code)
        calls.clear()
        module = {"__name__": "stage", "CALLS": calls}
        exec(compile(code, tmp_path / "stage.py", "exec"), module)
        prepare(tmp_path, tokenizer, rows, encode=module["encode"])
    assert len(calls) == expected


def test_each_source_has_its_own_folder_and_a_new_one_leaves_the_others_alone(tmp_path, tokenizer, counted):
    a, b, c = (numbered(tmp_path / f"{name}.jsonl", n) for name, n in (("a", 3), ("b", 4), ("c", 5)))
    assert counted(tokenizer, a, b)[1] == 7
    before = folders(tmp_path)
    assert [folder.name.split("-")[0] for folder in before] == ["a", "b"]
    examples, calls = counted(tokenizer, c, b, a)
    assert calls == 5 and examples.counts == [5, 4, 3] and set(before) < set(folders(tmp_path))
    assert [found["source"] for found in examples.facts()] == ["c", "b", "a"]
    alone = [counted(tokenizer, one)[0] for one in (c, b, a)]
    assert as_lists(examples) == [example for one in alone for example in as_lists(one)]
    for s, one in enumerate(alone):
        assert as_lists(examples.of_source(s)) == as_lists(one) and examples.of_source(s).facts() == one.facts()


def test_a_tokenizer_is_trained_once(tmp_path, monkeypatch, capsys):
    rows = [numbered(tmp_path / "a.jsonl", 50), source(tmp_path / "b.jsonl", [{"text": "zebra zebra"}, {"text": None}] * 9)]
    module = importlib.import_module("common.data.train_tokenizer")
    args = run_arguments(tmp_path, *rows)
    first = module.train_tokenizer(args, ALONE, 300, "text")
    monkeypatch.setattr(module, "train_bpe", None)
    again = module.train_tokenizer(args, ALONE, 300, "text")
    assert first.get_vocab() == again.get_vocab() and first.chat_template == again.chat_template
    assert len(first("zebra").input_ids) < 5
    with pytest.raises(TypeError):  # it would be trained again
        module.train_tokenizer(args, ALONE, 301, "text")
    said = "tokenizer: none named; training a byte-level BPE of 300 tokens on the documents\n"
    assert capsys.readouterr().out.startswith(2 * said)


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

    def slow(row, tokenizer, args):
        if row["n"] >= 700 and stop.exists():
            with open(pids, "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(60)
        return document(row, tokenizer, args)

    child = multiprocessing.get_context("fork").Process(
        target=lambda: counted(tokenizer, rows, encode=slow, dataset_num_proc=num_proc)
    )
    child.start()
    assert within(30, lambda: pids.exists() and len(pids.read_text().splitlines()) == num_proc)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    stop.unlink()
    left = list((tmp_path / "cache").iterdir())
    assert len(left) == 1 and left[0].name.startswith(".") and left[0].name.endswith(".tmp") and not folders(tmp_path)
    assert within(10, lambda: not any(map(is_running, map(int, pids.read_text().split()))))  # its workers end with it

    examples, calls = counted(tokenizer, rows, encode=slow, dataset_num_proc=num_proc)
    assert calls == len(examples) == 1500 and len(folders(tmp_path)) == 1
    assert as_lists(examples) == as_lists(prepare(tmp_path, tokenizer, rows))
    assert left[0].exists()  # it may belong to a run that is still at it; after a day it does not
    for path in (*left[0].iterdir(), left[0]):
        os.utime(path, (0, 0))
    prepare(tmp_path, tokenizer, numbered(tmp_path / "b.jsonl", 3))
    assert not left[0].exists()


def test_two_runs_may_make_the_same_at_a_time(tmp_path):
    """In containers both are process 1."""
    with new_folder(tmp_path / "a") as first:
        (first / "x").write_text("first")
        with new_folder(tmp_path / "a") as second:
            assert first != second
            (second / "x").write_text("second")
    assert (tmp_path / "a" / "x").read_text() == "second" and [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_gets_its_name_at_once_when_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(cache_folders, "flush", lambda path: flushed.append(path.name))

    def interrupted(old, new):
        assert {path.name for path in old.iterdir()} == set(flushed) == {"x", "files.json"} and not new.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("x")
    assert not list(tmp_path.iterdir())


FILES = ["ids.bin", "mask.bin", "lengths.npy", "rows.npy", "difficulty.npy", "facts.json", "files.json"]


@pytest.mark.parametrize("damage", ["cut", "gone"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_cut_off_or_gone_is_noticed_and_made_anew(tmp_path, tokenizer, name, damage):
    rows = source(tmp_path / "a.jsonl", CHATS, format="messages")
    first = as_lists(prepare(tmp_path, tokenizer, rows, encode=chats))
    (folder,) = folders(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    if damage == "gone":
        (folder / name).unlink()
    else:
        os.truncate(folder / name, (folder / name).stat().st_size - 1)
    again = prepare(tmp_path, tokenizer, rows, encode=chats)
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
        examples, calls = counted(tokenizer, rows)
        assert calls == expected and len(examples) == 7
        assert capsys.readouterr().out == f"data: 2 of 9 rows of a left out: a bad row (first: {rows.path}:3)\n"
        dropped = {"a bad row": {"count": 2, "first": [f"{rows.path}:3", f"{rows.path}:6"]}}
        assert examples.facts()[0]["dropped"] == dropped and examples.facts()[0]["rows"] == 9


@pytest.mark.parametrize("num_proc", [1, 2])
def test_strict_data_makes_the_first_bad_row_an_error(tmp_path, tokenizer, num_proc):
    rows = source(tmp_path / "a.jsonl", [{"text": "bad" if i in (800, 900) else "fine"} for i in range(1600)])
    for cached in (False, True):
        if cached:
            prepare(tmp_path, tokenizer, rows)
        with pytest.raises(UserError) as caught:
            prepare(tmp_path, tokenizer, rows, dataset_num_proc=num_proc, strict_data=True)
        assert line(caught) == f"{rows.path}:801: a bad row (--strict_data)"
        assert len(list((tmp_path / "cache").iterdir())) == cached


def test_a_source_without_a_usable_row_is_an_error(tmp_path, tokenizer):
    rows = source(tmp_path / "a.jsonl", [{"text": "bad"}] * 3)
    for _ in range(2):
        with pytest.raises(UserError, match="none of the 3 rows.* can be used.*a bad row") as caught:
            prepare(tmp_path, tokenizer, rows)
        line(caught)


# --- curriculum -----------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_curriculum_come_from_the_rows(tmp_path, tokenizer, capsys):
    values = [3, "4.5", None, -1, "hard", 0.25, True, float("nan"), [1]]
    rows = source(tmp_path / "a.jsonl", [{"text": f"row {i}", "n": value} for i, value in enumerate(values)])
    examples = prepare(tmp_path, tokenizer, rows, numbered(tmp_path / "b.jsonl", 2), curriculum_column="n")
    assert examples.difficulty.tolist() == [3, 4.5, -1, 0.25, 1, 0, 1] and examples.files[0].rows.tolist() == [0, 1, 3, 5, 6]
    assert f"4 of 9 rows of a left out: n is not a number (first: {rows.path}:3)" in capsys.readouterr().out
    assert examples.of_source(1).difficulty.tolist() == [0, 1]


def test_a_curriculum_by_length_needs_no_column(tmp_path, tokenizer):
    examples = prepare(tmp_path, tokenizer, numbered(tmp_path / "a.jsonl", 9), curriculum_column="length")
    assert examples.difficulty.tolist() == examples.lengths.tolist() and len(set(examples.lengths)) > 1
    assert prepare(tmp_path, tokenizer, numbered(tmp_path / "b.jsonl", 9)).difficulty is None


def test_a_curriculum_column_that_is_not_there_is_an_error(tmp_path, tokenizer):
    rows = numbered(tmp_path / "a.jsonl", 3)
    with pytest.raises(UserError) as caught:
        prepare(tmp_path, tokenizer, rows, curriculum_column="m")
    assert line(caught) == f"{rows.path}:1: --curriculum_column m: no such column; found text, n"


# --- examples in memory ------------------------------------------------------------------------------------------------

DOCUMENTS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=12), min_size=1, max_size=3)


def examples_of(sources, difficulty=False):
    """Examples of documents of these many tokens in each source; token t of a source has the id t."""
    files = []
    for sizes in sources:
        ends, n = np.cumsum(sizes), np.arange(len(sizes))
        files.append(TokenFile(np.arange(sum(sizes)), None, ends - sizes, ends, 1, n, n * 1.0, {}))
    examples = Examples(files, [Source(f"source {s}") for s in range(len(files))])
    if difficulty:
        examples.difficulty = np.concatenate([100.0 * s + file.difficulty for s, file in enumerate(files)])
    return examples


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
    cut = chunk(examples_of(sources, difficulty), max_length, across)
    assert [ids for example in as_lists(cut) for ids, _ in example] == wanted and cut.counts == counts
    assert cut.lengths.tolist() == [len(piece) for piece in wanted]
    assert cut.longest == max(map(len, wanted), default=0)
    assert [100 * s + row for s, file in enumerate(cut.files) for row in file.rows.tolist()] == begins
    assert (cut.difficulty is None) == (not difficulty)
    if difficulty:
        assert cut.difficulty.tolist() == begins


def test_documents_that_are_cut_for_a_curriculum_can_be_packed_in_bands(tmp_path, tokenizer):
    examples = prepare(tmp_path, tokenizer, numbered(tmp_path / "a.jsonl", 40), curriculum_column="n")
    packs = pack(chunk(examples, 8, across=False), 8)
    assert packs.difficulty.max() > 36 and packs.difficulty.min() < 3


def test_a_field_belongs_to_every_sequence(tmp_path, tokenizer):
    a, b = numbered(tmp_path / "a.jsonl", 3), numbered(tmp_path / "b.jsonl", 2)
    examples = prepare(tmp_path, tokenizer, a, b, encode=pairs)
    examples.add_field("ref_logps", np.arange(10) * 0.5)
    assert [[s["ref_logps"] for s in examples[i]] for i in range(5)] == [[i, i + 0.5] for i in range(5)]
    assert [[s["ref_logps"] for s in examples.of_source(1)[i]] for i in range(2)] == [[3, 3.5], [4, 4.5]]
    packed = pack(examples, 1000)
    assert [s["ref_logps"] for s in packed[1]] in ([3, 3.5, 4, 4.5], [4, 4.5, 3, 3.5])
    with pytest.raises(KeyError):
        prepare(tmp_path, tokenizer, a, encode=pairs)[0][0]["ref_logps"]
