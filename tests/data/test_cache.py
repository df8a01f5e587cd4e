"""Tokenised data: made once, by any number of processes the same, and again when anything changes; whole or
not there."""

import copy
from dataclasses import dataclass, field
import importlib
import json
import multiprocessing
import os
from pathlib import Path
import signal
import sys
import time
import types

from common.args import CommonArgs
from common.data import cache, encode
from common.data.cache import make_job, tokenize
from common.data.encode import Job
from common.data.sources import Source
from common.data.tokenizer import train_tokenizer
from common.data.tokens import tokenize_documents, tokenize_messages
from common.data.types import BadRow, Row, all_trained
from common.errors import UserError
from common.files import loaded_code
import numpy as np
import pytest

from tests.data.rows import alone, arguments, base_tokenizer, jsonl, line

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {i}?"},
            {"role": "assistant", "content": "It is " + "so " * (i % 4)},
        ]
    }
    for i in range(20)
]


@dataclass
class Args(CommonArgs):
    log: str | None = field(default=None, metadata={"help": ""})
    times: int = field(default=1, metadata={"help": ""})
    unread: int = field(default=1, metadata={"help": ""})
    slow_from: int | None = field(default=None, metadata={"help": ""})


def source(path, rows, **settings):
    jsonl(path, rows)
    return Source(str(path), **{"label": path.stem} | settings)


def numbered(path, count, **settings):
    return source(path, [{"text": f"row {i} " * (i % 3 + 1), "n": i} for i in range(count)], **settings)


def document(row, tokenizer, args):
    """Rows whose text begins with bad or wrong are what they say."""
    if args.log:
        with open(args.log, "a") as file:  # also from another process
            file.write(f"{os.getpid()}\n")
    if args.slow_from is not None and row["n"] >= args.slow_from:
        time.sleep(60)
    if row["text"].startswith("bad"):
        raise BadRow("a bad row")
    if row["text"].startswith("wrong"):
        raise UserError("no good")
    return row["text"] * args.times


def chats(row, tokenizer, args):
    return tokenize_messages(row["messages"], tokenizer)


def pairs(row, tokenizer, args):
    chosen, rejected = tokenize_documents([row["text"], f"no {row['n']}"], tokenizer)
    return [{"input_ids": chosen, "loss_mask": np.arange(len(chosen)) % 2}, all_trained(rejected)]


def largest_id(row, tokenizer, args):
    return [all_trained(np.array([0, max(tokenizer.get_vocab().values())]))]


def prepare(tmp_path, *sources, encode=document, tokenizer=None, column=None, **settings):
    settings = {"dataset_cache_dir": str(tmp_path / "cache"), "dataset_num_proc": 1} | settings
    job = make_job(alone(), encode, tokenizer or base_tokenizer(), Args(**settings))
    return tokenize(alone(), list(sources), job._replace(column=column))


def counted(tmp_path, *sources, **options):
    """The examples, and how many rows were tokenised for them."""
    log = tmp_path / "calls"
    log.write_text("")
    examples = prepare(tmp_path, *sources, log=str(log), **options)
    return examples, len(log.read_text().splitlines())


def as_lists(examples):
    return [
        [(s["input_ids"].tolist(), s["loss_mask"].tolist()) for s in examples[i]]
        for i in range(len(examples))
    ]


def folders(tmp_path):
    return sorted(path for path in (tmp_path / "cache").iterdir() if not path.name.startswith("."))


# --- what is in it ------------------------------------------------------------------------------------------


def test_documents_are_those_of_the_tokenizer(tmp_path):
    """From each source, in a folder of its own, which serves other runs as well."""
    a, b = numbered(tmp_path / "a.jsonl", 10), numbered(tmp_path / "b.jsonl", 4)
    examples = prepare(tmp_path, a)
    texts = [f"row {i} " * (i % 3 + 1) for i in range(10)]
    wanted = [found.tolist() for found in tokenize_documents(texts, base_tokenizer())]
    assert as_lists(examples) == [[(ids, [1] * len(ids))] for ids in wanted]
    assert examples.counts == [10] and examples.sizes.tolist() == [len(ids) for ids in wanted]
    assert examples.longest == max(map(len, wanted))
    both = prepare(tmp_path, b, a)
    assert both.counts == [4, 10] and [folder.name.split("-")[0] for folder in folders(tmp_path)] == [
        "a",
        "b",
    ]
    assert as_lists(both)[4:] == as_lists(examples) and both.facts()[1] == examples.facts()[0]


@pytest.mark.parametrize(
    "encode, rows", [(chats, CHATS), (pairs, [{"text": f"row {i}", "n": i} for i in range(5)])]
)
def test_examples_are_those_of_encode(tmp_path, encode, rows):
    examples = prepare(tmp_path, source(tmp_path / "a.jsonl", rows), encode=encode)
    direct = [encode(row, base_tokenizer(), None) for row in rows]
    assert as_lists(examples) == [
        [(s["input_ids"].tolist(), s["loss_mask"].tolist()) for s in e] for e in direct
    ]
    assert examples.sizes.tolist() == [sum(len(s["input_ids"]) for s in example) for example in direct]
    facts = examples.facts()[0]
    assert facts["tokens"] == examples.sizes.sum() and facts["rows"] == facts["examples"] == len(rows)
    assert facts["trained_tokens"] == sum(sum(mask) for example in as_lists(examples) for _, mask in example)
    for values in examples.files[0].fields.values():  # as a plain array: a slice takes a third of the time
        assert (
            type(values) is np.ndarray and isinstance(values.base, np.memmap) and not values.flags.writeable
        )


@pytest.mark.parametrize("largest, kind", [(2**16 - 1, np.uint16), (2**16, np.uint32), (200_000, np.uint32)])
def test_ids_take_two_bytes_where_they_fit(tmp_path, largest, kind):
    large = copy.deepcopy(base_tokenizer())
    large.__class__ = type("Large", (type(large),), {"get_vocab": lambda self: {"a": 0, "b": largest}})
    examples = prepare(tmp_path, numbered(tmp_path / "a.jsonl", 2), encode=largest_id, tokenizer=large)
    assert (
        examples.files[0].fields["input_ids"].dtype == kind
        and as_lists(examples) == [[([0, largest], [1, 1])]] * 2
    )


# --- several processes --------------------------------------------------------------------------------------


def test_several_processes_make_the_same_files(tmp_path):
    texts = ["bad" if i % 300 == 299 else f"row {i} " * (i % 3 + 1) for i in range(2300)]
    rows = [{"text": text, "n": i} | ({"id": i} if i % 500 == 3 else {}) for i, text in enumerate(texts)]
    rows, found = source(tmp_path / "a.jsonl", rows), []
    for num_proc in (1, 2, 3):
        examples = prepare(tmp_path / str(num_proc), rows, dataset_num_proc=num_proc, column="n")
        assert (
            examples.difficulty.tolist()
            == [i for i in range(2300) if i % 300 != 299]
            == examples.files[0].rows.tolist()
        )
        found.append({f.name: f.read_bytes() for f in folders(tmp_path / str(num_proc))[0].iterdir()})
    facts = json.loads(found[0]["facts.json"])
    assert found[0] == found[1] == found[2] and facts["columns"] == ["n", "text"] and facts["rows"] == 2300
    assert facts["dropped"] == {
        "a bad row": {"count": 7, "first": [f"{rows.path}:{i}" for i in range(300, 1501, 300)]}
    }
    assert facts["noted"] == {
        "not read: id": {"count": 5, "first": [f"{rows.path}:{i}" for i in range(4, 2005, 500)]}
    }


@pytest.mark.parametrize("num_proc", [1, 2])
def test_errors_name_the_row(tmp_path, num_proc):
    rows = [{"text": "wrong", "n": 1}, {"text": 3, "n": 1}]
    for wrong, error in zip(rows, (UserError, AttributeError), strict=True):
        rows = source(tmp_path / "a.jsonl", [wrong if i == 1700 else {"text": "fine"} for i in range(3000)])
        with pytest.raises(error) as caught:
            prepare(tmp_path, rows, dataset_num_proc=num_proc)
        said = line(caught) if error is UserError else "".join(caught.value.__notes__)
        assert f"{rows.path}:1701" in said and not list((tmp_path / "cache").iterdir())


def test_a_source_is_not_read_ahead(tmp_path):
    read = []
    rows = ((read.append(1) or i, Row({"text": "x"}, f"a:{i}")) for i in range(12_000))
    done = 0
    for count, encoded in encode.encode_all(rows, Job(document, base_tokenizer(), Args()), 2):
        assert encoded.rows.tolist() == list(range(done, done + count))
        done += count
        assert len(read) <= done + 6 * encode.CHUNK
    assert done == len(read) == 12_000


def test_long_rows_are_tokenised_a_few_at_a_time(monkeypatch):
    """A .txt with a text per line has rows of a megabyte; each character needs 60 bytes."""
    monkeypatch.setattr(encode, "CHUNK_CHARACTERS", 10)
    rows = [Row({"text": "x" * length, "n": 7}) for length in (4, 4, 4, 30, 1, 1)]
    job = Job(document, base_tokenizer(), Args())
    chunks = list(encode.encode_all(enumerate(rows), job, 1))
    assert [encoded.rows.tolist() for _, encoded in chunks] == [[0, 1, 2], [3], [4, 5]]


# --- when it is made again ----------------------------------------------------------------------------------


def changed(tokenizer, change):
    copied = copy.deepcopy(tokenizer)
    change(copied)
    return copied


@pytest.mark.parametrize(
    "rows, settings, again",
    [
        (3, {}, False),
        (3, {"unread": 2, "learning_rate": 1.0, "seed": 7, "dataset_num_proc": 2}, False),
        (3, {"times": 2}, True),
        (4, {}, True),
        (3, {"column": "n"}, True),
        (
            3,
            {"tokenizer": changed(base_tokenizer(), lambda t: setattr(t, "chat_template", "{{ 'x' }}"))},
            True,
        ),
        (3, {"tokenizer": changed(base_tokenizer(), lambda t: t.add_tokens(["<new>"]))}, True),
    ],
)
def test_it_is_used_until_something_changes(tmp_path, rows, settings, again):
    first, calls = counted(tmp_path, numbered(tmp_path / "a.jsonl", 3))
    assert calls == 3
    if rows != 3:
        numbered(tmp_path / "a.jsonl", rows)
    examples, calls = counted(tmp_path, Source(str(tmp_path / "a.jsonl"), label="a"), **settings)
    assert calls == (len(examples) if again else 0)
    assert again or (as_lists(first) == as_lists(examples) and first.facts() == examples.facts())
    # both are kept
    assert counted(tmp_path, Source(str(tmp_path / "a.jsonl"), label="a"), **settings)[1] == 0


@pytest.mark.parametrize("library", ["transformers", "tokenizers"])
def test_another_version_of_a_library_reads_anew(library, monkeypatch):
    versions = {"transformers": "1", "tokenizers": "1"}
    monkeypatch.setattr(cache, "version", lambda name: versions[name])
    before = cache.key_of(document, base_tokenizer())
    versions[library] = "2"
    assert cache.key_of(document, base_tokenizer()) != before


SCRIPT = '''"""A script."""

import os
from dataclasses import dataclass

import numpy as np
import torch
from my_helper import Base, scale
from common.args import CommonArgs, arg
from common.losses import segment_sum

TABLE = np.load("table.npy")
TENSOR = torch.from_numpy(np.load("tensor.npy"))
WORDS = [{"few": [{"words": set(os.environ.get("MY_WORDS", "a b c").split())}]}]
MODE = os.environ.get("MY_MODE", "plain")


@dataclass
class Args(CommonArgs):
    max_length: int = arg(8, help="tokens")
    beta: float = arg(0.1, help="of the loss")

    @property
    def half(self):
        return self.max_length // 2


def times(x, *, more=0):
    return x + more


class Settings(Base):
    factor = 1


def encode(row, tokenizer, args):
    """The text."""
    import my_late

    CALLS.append(1)
    words = sorted(WORDS[0]["few"][0]["words"])
    return f"{row['text']} {scale(Settings.factor)} {TABLE[0]} {TENSOR[0]} {times(2)} {MODE} {words} {args.half} {my_late.X}"


CALLS = []


def main(args):
    # the loop
    return segment_sum(args.beta)
'''
FILES = {
    "my_helper.py": "from my_other import OFFSET\n\nclass Base:\n    depth = 1\n\ndef scale(x):\n    return x + OFFSET\n"
}
FILES |= {"my_other.py": "OFFSET = 1\n", "my_late.py": "X = 1\n", "script.py": SCRIPT}


def run_script_once(folder, tmp_path, monkeypatch, **settings):
    """Import the script as a new process would, and load its data: how many rows it tokenised."""
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    for name in ("script", "my_helper", "my_other", "my_late"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    for pyc in folder.rglob("*.pyc"):
        pyc.unlink()
    script = importlib.import_module("script")
    name = tmp_path / "rows.jsonl"
    settings = {"dataset_cache_dir": str(tmp_path / "cache"), "dataset_num_proc": 1} | settings
    job = make_job(alone(), script.encode, base_tokenizer(), script.Args(**settings))
    tokenize(alone(), [Source(str(name), label="rows")], job)
    return len(script.CALLS)


@pytest.mark.parametrize(
    "file, old, new, expected",
    [
        ("script.py", "return segment_sum(args.beta)", "print('another loop')", 0),
        (
            "script.py",
            "from common.losses import segment_sum",
            "from common.losses import segment_sum, dpo_loss",
            0,
        ),
        ("script.py", "    # the loop\n", "", 0),
        ("script.py", '"""The text."""', '"""The text of a row."""', 0),
        (
            "script.py",
            'beta: float = arg(0.1, help="of the loss")',
            'beta: float = arg(0.2, help="weight")',
            0,
        ),
        ("script.py", "scale(Settings.factor)", "scale(2)", 3),
        ("script.py", "more=0", "more=1", 3),
        ("script.py", "factor = 1", "factor = 2", 3),
        ("my_helper.py", "depth = 1", "depth = 2", 3),
        ("my_late.py", "X = 1", "X = 2", 3),
        ("script.py", "max_length // 2", "max_length // 4", 3),
        ("script.py", "max_length: int = arg(8", "max_length: int = arg(12", 3),
        ("my_helper.py", "x + OFFSET", "x - OFFSET", 3),
        ("my_other.py", "OFFSET = 1", "OFFSET = 2", 3),
        ("table.npy", None, None, 3),
        ("tensor.npy", None, None, 3),
        ("MY_MODE", None, None, 3),
        ("MY_WORDS", None, None, 3),
    ],
)
def test_edits_that_matter_are_seen_and_others_not(tmp_path, monkeypatch, file, old, new, expected):
    folder = tmp_path / "code"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name in ("table.npy", "tensor.npy"):
        np.save(folder / name, np.arange(3.0))
    jsonl(tmp_path / "rows.jsonl", [{"text": f"row {i}"} for i in range(3)])
    # Modules of other tests in this process are the user's code, too.
    own = cache.loaded_code
    here = lambda script: {path: code for path, code in own(script).items() if path.startswith(str(folder))}  # noqa: E731
    monkeypatch.setattr(cache, "loaded_code", here)
    assert run_script_once(folder, tmp_path, monkeypatch) == 3
    assert run_script_once(folder, tmp_path, monkeypatch) == 0
    assert run_script_once(folder, tmp_path, monkeypatch, beta=3.0, max_steps=9) == 0
    if file.endswith(".npy"):
        np.save(folder / file, np.arange(3.0) + 0.25)
    elif file.startswith("MY_"):
        monkeypatch.setenv(file, "7")
    else:
        assert FILES[file].count(old) == 1
        (folder / file).write_text(FILES[file].replace(old, new))
    assert run_script_once(folder, tmp_path, monkeypatch) == expected


def test_encode_is_a_function_at_the_top():
    method = "<method 'split' of 'str' objects>"
    for wrong, shown in ((str.split, method), (lambda row, tokenizer, args: "x", "<function .*<lambda>")):
        with pytest.raises(UserError, match=f"encode is {shown}"):
            make_job(alone(), wrong, base_tokenizer(), Args())


def test_a_tokenizer_is_trained_once(tmp_path):
    rows = [
        numbered(tmp_path / "a.jsonl", 50),
        source(tmp_path / "b.jsonl", [{"text": "zebra zebra", "story": "lion"}, {"text": None}] * 9),
    ]
    args = arguments(tmp_path, *(found.path for found in rows))
    first = train_tokenizer(args, alone(), 300, "text")
    made = folders(tmp_path)
    again = train_tokenizer(args, alone(), 300, "text")
    assert first.get_vocab() == again.get_vocab() and first.chat_template == again.chat_template
    assert len(first("zebra").input_ids) < 5 and folders(tmp_path) == made and len(made) == 1
    train_tokenizer(args, alone(), 301, "text")
    assert len(folders(tmp_path)) == 2
    assert train_tokenizer(args, alone(), 300, "story").get_vocab() != first.get_vocab()


# --- killed, cut off, not to be written ---------------------------------------------------------------------


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
def test_a_killed_run_leaves_nothing_that_is_trusted(tmp_path, num_proc):
    rows, log = numbered(tmp_path / "a.jsonl", 1500), tmp_path / "pids"
    settings = {"log": str(log), "slow_from": 700, "dataset_num_proc": num_proc}
    child = multiprocessing.get_context("fork").Process(target=lambda: prepare(tmp_path, rows, **settings))
    child.start()
    assert within(30, lambda: log.exists() and len(log.read_text().splitlines()) > 700)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    (left,) = (tmp_path / "cache").iterdir()
    assert left.name.startswith(".") and left.name.endswith(".tmp") and not folders(tmp_path)
    # its workers end with it
    assert within(10, lambda: not any(map(is_running, map(int, set(log.read_text().split())))))
    examples, calls = counted(tmp_path, rows, dataset_num_proc=num_proc)
    assert calls == len(examples) == 1500 and len(folders(tmp_path)) == 1


@pytest.mark.parametrize("damage", ["cut", "gone"])
@pytest.mark.parametrize("name", ["0.bin", "4.bin", "facts.json"])
def test_a_damaged_file_is_noticed(tmp_path, name, damage):
    rows = source(tmp_path / "a.jsonl", CHATS)
    first = as_lists(prepare(tmp_path, rows, encode=chats))
    (folder,) = folders(tmp_path)
    if damage == "gone":
        (folder / name).unlink()
    else:
        os.truncate(folder / name, (folder / name).stat().st_size - 1)
    assert as_lists(prepare(tmp_path, rows, encode=chats)) == first and len(folders(tmp_path)) == 2


@pytest.mark.parametrize("name", ["0.bin", "5.bin"])
def test_a_flipped_bit_is_noticed(tmp_path, name):
    """The number of a length or a token, which would be trained on."""
    rows = source(tmp_path / "a.jsonl", CHATS)
    prepare(tmp_path, rows, encode=chats)
    (folder,) = folders(tmp_path)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(UserError) as caught:
        prepare(tmp_path, rows, encode=chats)
    assert line(caught).startswith(f"{folder}: its files have changed")


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    rows = numbered(tmp_path / "a.jsonl", 3)
    (tmp_path / "cache").touch()
    with pytest.raises(UserError) as caught:
        prepare(tmp_path, rows)
    assert line(caught).startswith(f"--dataset_cache_dir {tmp_path}/cache: cannot be written: [Errno")


# --- rows that are left out, and curricula ------------------------------------------------------------------


def test_rows_left_out_are_said_again(tmp_path, capsys):
    rows = source(tmp_path / "a.jsonl", [{"text": "bad" if i in (2, 5) else "fine"} for i in range(9)])
    for expected in (9, 0):
        examples, calls = counted(tmp_path, rows)
        assert calls == expected and len(examples) == 7
        assert (
            capsys.readouterr().out == f"data: 2 of 9 rows of a left out: a bad row (first: {rows.path}:3)\n"
        )
        dropped = {"a bad row": {"count": 2, "first": [f"{rows.path}:3", f"{rows.path}:6"]}}
        assert examples.facts()[0]["dropped"] == dropped and examples.facts()[0]["rows"] == 9


def test_a_source_without_a_usable_row_is_refused(tmp_path):
    rows = source(tmp_path / "a.jsonl", [{"text": "bad"}] * 3)
    for _ in range(2):
        with pytest.raises(UserError, match="none of the 3 rows.* can be used.*a bad row") as caught:
            prepare(tmp_path, rows)
        line(caught)


def test_a_curriculum_takes_numbers_from_the_rows(tmp_path, capsys):
    values = [3, "4.5", None, -1, "hard", 0.25, True, float("nan"), [1], 10**400]
    rows = source(tmp_path / "a.jsonl", [{"text": f"row {i}", "n": value} for i, value in enumerate(values)])
    examples = prepare(tmp_path, rows, numbered(tmp_path / "b.jsonl", 2), column="n")
    assert examples.difficulty.tolist() == [3, 4.5, -1, 0.25, 1, 0, 1] and examples.files[
        0
    ].rows.tolist() == [0, 1, 3, 5, 6]
    assert f"1 of 10 rows of a left out: n is not a number (first: {rows.path}:8)" in capsys.readouterr().out
    with pytest.raises(UserError, match="none of the 10 rows .* KeyError: 'm'"):
        prepare(tmp_path, rows, column="m")


class Lazy:
    """As a library's module of optional parts, in sys.modules or at the top of the user's code."""

    @property
    def __class__(self):  # isinstance asks for it
        raise RuntimeError("settings are not configured")

    def __getattr__(self, name):
        raise RuntimeError(f"{name} needs a library that is not installed")


def test_a_module_that_raises_ends_nothing_and_an_editable_library_is_none_of_the_users(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "lazy", Lazy())
    own, library = (types.ModuleType(name) for name in ("mine", "transformers.models.odd"))
    for module in (own, library):
        module.__file__ = str(tmp_path / f"{module.__name__}.py")
        Path(module.__file__).write_text("SIZE = 1")
        monkeypatch.setitem(sys.modules, module.__name__, module)
    own.lazy, own.SIZE = Lazy(), 1
    code = loaded_code("script.py")
    assert own.__file__ in code and library.__file__ not in code
    before = cache.key_of(encode_text, base_tokenizer())
    own.SIZE = 2
    assert cache.key_of(encode_text, base_tokenizer()) != before


@pytest.mark.parametrize("name", ["WORDS", "_WORDS"])
def test_a_set_is_its_elements(monkeypatch, name):
    """Whose order may differ between two processes: here it is that in which they were added."""
    keys = []
    for words in ({0, 8}, {8, 0}, {8, 1}):
        monkeypatch.setitem(globals(), name, words)
        keys.append(cache.key_of(encode_text, base_tokenizer()))
    assert keys[0] == keys[1] != keys[2]


def encode_text(row, tokenizer, args):
    return row["text"]
