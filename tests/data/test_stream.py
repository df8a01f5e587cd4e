"""Streaming: the same examples in the same order for a seed, from any place on, in bounded memory."""

import gzip
import json
import math
from pathlib import Path

from common.args import CommonArgs
from common.collators import Windows
from common.data import stream as streams
from common.data.encode import Job
from common.data.examples import chunk, pack
from common.data.load import load_data
from common.data.order import drop_turns, shares
from common.data.sources import Source, read_rows
from common.data.stream import Stream
from common.data.tokens import tokenize_documents
from common.data.types import BadRow
from common.errors import UserError
import numpy as np
import pytest

from tests.data.rows import alone, arguments, base_tokenizer, process


@pytest.fixture(autouse=True)
def block_rows(monkeypatch):
    """block_rows(n): blocks of n rows; 20 unless it is called."""

    def change(rows):
        monkeypatch.setattr(streams, "BLOCK_ROWS", rows)

    change(20)
    return change


@pytest.fixture(scope="module")
def tokenizer():
    return base_tokenizer()


def source(path, rows, **settings):
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return Source(str(path), **{"label": path.name.split(".")[0]} | settings)


def numbered(path, count, **settings):
    rows = [{"text": f"{path.name[0]}{i} " * (i % 5 + 1), "bad": i % 7 == 3} for i in range(count)]
    return source(path, rows, **settings)


def document(row, tokenizer, args):
    if row.get("bad"):
        raise BadRow("a bad row")
    return row["text"]


def as_they_are(data):
    return data


def packed(data):
    return pack(data, 64)


def wrapped(data):
    return chunk(data, 16)


def stream(tokenizer, *sources, arrange=as_they_are, seed=5, num_proc=1):
    return arrange(
        Stream(list(sources), Job(document, tokenizer, CommonArgs(dataset_num_proc=num_proc)), seed)
    )


def ids(example):
    return [sequence["input_ids"].tolist() for sequence in example]


def naive(tokenizer, sources, examples, block_rows=20, seed=5):
    """The documents of a stream whose examples are documents, worked out row by row. The end of a single source
    ends its block."""
    quotas = shares([s.weight or 1.0 for s in sources], block_rows)
    rows = [[row for row, _ in read_rows(s)] for s in sources]
    found, block, given = [], 0, [0] * len(sources)
    while len(found) < examples:
        texts = []
        for s, quota in enumerate(quotas):
            if len(sources) == 1:
                quota = min(quota, len(rows[s]) - given[s] % len(rows[s]))
            for _ in range(quota):
                columns = rows[s][given[s] % len(rows[s])]  # round and round
                given[s] += 1
                if not columns.get("bad"):
                    texts.append(columns["text"])
        order = np.random.default_rng((seed, block)).permutation(len(texts))
        found += [[tokenize_documents([texts[i]], tokenizer)[0].tolist()] for i in order]
        block += 1
    return found[:examples]


# --- what comes when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, weights, size, shares",
    [
        ([50], [None], 20, [20]),
        ([60], [None], 20, [20]),
        ([7], [None], 20, [20]),
        ([1], [None], 3, [3]),
        ([100], [None], 100, [100]),
        ([13, 70], [None, None], 20, [10, 10]),
        ([13, 70], [1.0, 3.0], 20, [5, 15]),
        ([13, 70], [7.0, 1.0], 20, [18, 2]),
    ],
)
def test_a_stream_is_shuffled_blocks_of_all_sources(
    tmp_path, tokenizer, block_rows, rows, weights, size, shares
):
    """Without end, with its share of every block for each."""
    block_rows(size)
    given = zip("ab"[: len(rows)], rows, weights, strict=True)
    sources = [numbered(tmp_path / f"{name}.jsonl", n, weight=w) for name, n, w in given]
    found, wanted = stream(tokenizer, *sources), naive(tokenizer, sources, 200, size)
    assert [ids(found[p]) for p in range(200)] == wanted
    assert [found.size(p) for p in range(190, 200)] == [len(example[0]) for example in wanted[190:]]
    blocks = found.blocks[-1].number + 1
    if len(rows) == 1:
        passes, more = divmod(blocks, math.ceil(rows[0] / size))
        read = [passes * rows[0] + more * size]
    else:
        read = [blocks * share for share in shares]
    assert [row["rows"] for row in found.data.facts()] == read


@pytest.mark.parametrize("size", [1000, 24, 20])
def test_each_row_comes_once_in_a_pass(tmp_path, tokenizer, block_rows, size):
    """Of a source that is smaller or larger than a block, and not a multiple of it."""
    block_rows(size)
    texts = [f"text {i}" for i in range(24)]
    small = source(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    rows = sorted(tokenize_documents([text], tokenizer)[0].tolist() for text in texts)
    found = stream(tokenizer, small)
    passes = [[ids(found[p])[0] for p in range(first, first + 24)] for first in (0, 24, 48)]
    for one in passes:
        assert sorted(one) == rows
    assert passes[0] != passes[1] != passes[2]

    found = stream(tokenizer, small, arrange=packed)
    sequences, position = [], 0
    while len(sequences) < 24:
        sequences += ids(found[position])
        position += 1
    assert sorted(sequences) == rows


@pytest.mark.parametrize("arrange", [as_they_are, packed, wrapped])
def test_a_block_at_the_end_of_a_source_may_be_empty(tmp_path, tokenizer, block_rows, arrange):
    """The last of 18 rows cannot be used."""
    block_rows(17)
    found = stream(tokenizer, numbered(tmp_path / "a.jsonl", 18), arrange=arrange)
    assert all(found[p] for p in range(60))
    assert found.blocks[-1].number > 3


# --- to go on -----------------------------------------------------------------------------------------------


def some(tmp_path, kind):
    if kind == "first rows":
        return [numbered(tmp_path / "a.jsonl", 90, max_samples=45, held_out=0.2, part="train")]
    return [numbered(tmp_path / "a.jsonl", 13, weight=1.0), numbered(tmp_path / "b.jsonl.gz", 70, weight=3.0)]


@pytest.mark.parametrize("arrange", [as_they_are, packed, wrapped])
@pytest.mark.parametrize("kind", ["first rows", "several"])
def test_a_stream_goes_on_from_any_position(tmp_path, tokenizer, kind, arrange):
    sources = some(tmp_path, kind)
    whole = stream(tokenizer, *sources, arrange=arrange)
    examples, states, borders = [], [], set()
    for p in range(110):
        states.append(json.dumps(whole.state(p)))  # before it is read: what a checkpoint keeps
        examples.append(ids(whole[p]))
        borders |= {block.first for block in whole.blocks}
    states_later = [json.dumps(whole.state(p)) for p in range(whole.blocks[0].first, 110)]
    assert len(borders) > 4 and states_later == states[-len(states_later) :]
    for p in [*range(0, 110, 9), *sorted(borders - {0}), *(border - 1 for border in borders if border)]:
        resumed = stream(tokenizer, *sources, arrange=arrange)
        resumed.restore(json.loads(states[p]))
        end = min(p + 40, 110)
        assert [ids(resumed[q]) for q in range(p, end)] == examples[p:end]
        assert json.dumps(resumed.state(end - 1)) == states[end - 1]


def test_continuing_reads_nothing_from_the_start(tmp_path, tokenizer, monkeypatch):
    a = numbered(tmp_path / "a.jsonl", 1000)
    whole = stream(tokenizer, a)
    wanted, state = ids(whole[500]), whole.state(500)
    read = []
    monkeypatch.setattr(
        streams, "read_rows", lambda *args: (read.append(1) or found for found in read_rows(*args))
    )
    resumed = stream(tokenizer, a)
    resumed.restore(state)
    assert ids(resumed[500]) == wanted and len(read) == 20


def test_a_stream_can_be_read_ahead(tmp_path, tokenizer):
    """The plan of a run reads its first windows before the first of them is trained on."""
    sources = some(tmp_path, "several")
    found, wanted = stream(tokenizer, *sources), naive(tokenizer, sources, 300)
    assert ids(found[299]) == wanted[299]
    facts = found.data.facts()
    assert [ids(found[p]) for p in range(200)] == wanted[:200]
    assert [ids(found[p]) for p in (250, 3, 120)] == [wanted[p] for p in (250, 3, 120)]
    for known, now in zip(facts, found.data.facts(), strict=True):
        assert known["rows"] == now["rows"] and known["dropped"] == now["dropped"]  # each row counts once


# --- memory -------------------------------------------------------------------------------------------------


def test_a_stream_holds_two_blocks(tmp_path, tokenizer, monkeypatch):
    read = []
    monkeypatch.setattr(
        streams, "read_rows", lambda *args: (read.append(1) or found for found in read_rows(*args))
    )
    found = stream(tokenizer, numbered(tmp_path / "a.jsonl", 1000))
    assert not read
    for p in range(300):
        found[p]
        number = found.blocks[-1].number
        assert len(read) == 20 * (number + 1)
        assert [block.number for block in found.blocks] == [*range(number + 1)][-2:]
        assert p < found.blocks[-1].first + len(found.blocks[-1].order)
    assert number > 10


def test_small_blocks_are_kept_as_long_as_a_large_one(tmp_path, tokenizer, monkeypatch, block_rows):
    """A window may span many of them, and is read more than once."""
    block_rows(240)
    read = []
    monkeypatch.setattr(
        streams, "read_rows", lambda *args: (read.append(1) or found for found in read_rows(*args))
    )
    found = stream(tokenizer, source(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(24)]))
    for _ in range(2):
        for p in range(240):
            found[p]
        assert len(read) == 240
    for p in range(2400):
        found[p]
    assert sum(block.rows for block in found.blocks) < 3 * 240


# --- rows that are left out ---------------------------------------------------------------------------------


def test_rows_left_out_of_a_stream_are_counted(tmp_path, tokenizer, capsys):
    a = numbered(tmp_path / "a.jsonl", 60)
    found = stream(tokenizer, a)
    found[100]
    assert capsys.readouterr().out == f"data: rows of a left out: a bad row (first: {a.path}:4)\n"
    rows = 20 * (found.blocks[-1].number + 1)
    facts = found.data.facts()[0]
    assert facts["rows"] == rows and facts["dropped"]["a bad row"]["count"] == sum(
        i % 60 % 7 == 3 for i in range(rows)
    )


def test_a_stream_needs_one_usable_source(tmp_path, tokenizer):
    bad, good = (
        source(tmp_path / "a.jsonl", [{"text": "", "bad": True}] * 9),
        numbered(tmp_path / "b.jsonl", 3),
    )
    with pytest.raises(UserError, match="--dataset_streaming: no row can be used among 9 in succession"):
        stream(tokenizer, bad)[0]
    for arrange in (as_they_are, packed, wrapped):
        found = stream(tokenizer, bad, good, arrange=arrange)
        assert found[0] and found.data.counts[0] == 0


# --- windows over a stream ----------------------------------------------------------------------------------


def in_windows(train, rank=0, world=1, accumulation=2, batch_size=3, **options):
    args = CommonArgs(per_device_train_batch_size=batch_size, max_steps=40)
    return Windows(args, process(rank, world, accumulation), train, **options)


@pytest.mark.parametrize("rows", [20, 4])
@pytest.mark.parametrize("options", [{}, {"max_tokens": 90}, {"batch_size": 20}])
def test_windows_over_a_stream_are_its_examples(tmp_path, tokenizer, options, rows, block_rows):
    """Windows may be larger than blocks."""
    block_rows(rows)
    sources = some(tmp_path, "several")
    found, wanted = in_windows(stream(tokenizer, *sources), **options), naive(tokenizer, sources, 1200, rows)
    examples = [ids(example) for step in range(25) for example in found[step].examples]
    assert examples == wanted[: len(examples)] and len(examples) > 100
    assert found.start(25) == len(examples)


@pytest.mark.parametrize(
    "before, after, options", [(1, 1, {}), (1, 2, {}), (4, 1, {}), (4, 1, {"max_tokens": 90})]
)
def test_other_processes_continue_a_stream_in_place(tmp_path, tokenizer, before, after, options):
    sources = some(tmp_path, "several")
    old = in_windows(stream(tokenizer, *sources), 0, before, **options)
    examples = [len(old[step].examples) for step in range(10)]
    new = in_windows(stream(tokenizer, *sources), 0, after, **options)
    new.plan()  # as it is printed before the run resumes
    new.restore(10, json.loads(json.dumps(old.state(10))))
    at = sum(examples)
    assert new.start(10) == at
    found = [ids(example) for step in range(10, 15) for example in new[step].examples]
    assert found == naive(tokenizer, sources, at + len(found))[at:]
    assert len(found) == new.start(15) - at > 0


# --- the settings of a run ----------------------------------------------------------------------------------


def load(sources, tokenizer, turn_dropping=0.0, **settings):
    given = {"dataset_streaming": True, "seed": 5, "dataset_weights": [source.weight for source in sources]}
    args = arguments(Path("cache"), *(source.path for source in sources), **given | settings)
    train, held_out = load_data(args, alone(), document, tokenizer)
    assert len(held_out) == 0
    return drop_turns(train, turn_dropping)


def test_settings_that_a_stream_cannot_have(tmp_path, tokenizer):
    sources = some(tmp_path, "several")
    found = load(sources, tokenizer)
    assert [ids(found[p]) for p in range(60)] == naive(tokenizer, sources, 60) and found.examples.longest > 1
    for name, value in (("max_steps", -1), ("curriculum_column", "n"), ("turn_dropping", 0.5)):
        with pytest.raises(UserError, match=f"--{name}"):
            load(sources, tokenizer, **{name: value})
