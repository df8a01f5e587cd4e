"""Any field that `encode` gives a sequence arrives in the training data, exactly; what cannot is refused in
one line."""

from common.args import CommonArgs
from common.collators import Window, Windows
from common.data import BadRow, all_trained, chunk, drop_turns, load_data, pack, stream, truncate
from common.data.encode import CHUNK, Job, agree, check_sequence, encode_all
from common.data.types import RESERVED, Row
from common.errors import UserError
import numpy as np
import pytest
import torch

from tests.data.rows import alone, arguments, base_tokenizer, jsonl, line


def with_fields(row, tokenizer, args):
    """A sequence of row["n"] tokens with fields of every kind, all told by the row's number."""
    i, n = row["i"], row["n"]
    return [
        {
            "input_ids": np.arange(n) + i,
            "loss_mask": np.arange(n) % 3 > 0,
            "teacher/logp": -np.arange(n) / 8 - i,
            "segment": (np.arange(n) + i).tolist(),
            "is_code": np.arange(n) % 2 == 0,
            "score": i + 0.25,
            "kind": 2**40 + i,
            "known": i % 2 == 0,
        }
    ]


def pairs(row, tokenizer, args):
    (sequence,) = with_fields(row, tokenizer, args)
    return [sequence, sequence | {"score": -1.5}]


def documents(row, tokenizer, args):
    ids = np.arange(row["n"]) + row["start"]
    return [all_trained(ids) | {"twice": 2.0 * ids, "thrice": 3 * ids, "document": row["i"]}]


def stream_of_documents(row, tokenizer, args):
    [sequence] = documents(row, tokenizer, args)
    return [{name: value for name, value in sequence.items() if name != "document"}]


def rows_of(count, first=0):
    return [{"i": i, "n": i % 7 + 2} for i in range(first, first + count)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(stream, "BLOCK_ROWS", 20)


def load(tmp_path, *sources, encode=with_fields, **settings):
    names = [jsonl(tmp_path / f"{'ab'[s]}.jsonl", rows) for s, rows in enumerate(sources)]
    return load_data(arguments(tmp_path, *names, **settings), alone(), encode, base_tokenizer())[0]


def check(sequence, i, n, start=0):
    """What with_fields gives, from a token on, as it was or as the cache has it."""
    part = slice(start, start + n)
    expected = with_fields({"i": i, "n": start + n}, None, None)[0]
    assert sequence.keys() == expected.keys()
    for name in ("input_ids", "loss_mask", "segment", "is_code", "teacher/logp"):
        assert sequence[name].tolist() == np.asarray(expected[name])[part].tolist()
    assert sequence["segment"].dtype == np.int64 and sequence["is_code"].dtype == np.bool_
    assert sequence["teacher/logp"].dtype == np.float32
    numbers = [sequence[name] for name in ("score", "kind", "known")]
    assert numbers == [i + 0.25, 2**40 + i, i % 2 == 0]
    assert [type(number) for number in numbers] == [float, int, bool]


# --- where they arrive --------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"dataset_streaming": True}, {"curriculum_column": "i"}])
@pytest.mark.parametrize("sources", [(rows_of(45),), (rows_of(30), rows_of(25, first=100))])
def test_fields_of_every_kind_arrive_exactly(tmp_path, settings, sources):
    """As they are made, from the cache, and in packs."""
    for arrange, positions in (
        (lambda data: data, 45),
        (lambda data: data, 45),
        (lambda data: pack(data, 20), 12),
    ):
        shares = {"dataset_weights": [1.0] * len(sources)} if "dataset_streaming" in settings else {}
        train, seen = arrange(load(tmp_path, *sources, **settings, **shares)), set()
        for sequence in [sequence for p in range(positions) for sequence in train[p]]:
            i = int(sequence["input_ids"][0])
            check(sequence, i, i % 7 + 2)
            seen.add(i)
        assert len(seen) > 30


def test_both_sequences_of_a_pair_have_fields(tmp_path):
    train = load(tmp_path, rows_of(30), encode=pairs)
    for data in (train, pack(train, 40)):
        sequences = [sequence for p in range(10) for sequence in data[p]]
        for chosen, rejected in zip(sequences[::2], sequences[1::2], strict=True):
            check(chosen, i := int(chosen["input_ids"][0]), i % 7 + 2)
            check(rejected | {"score": i + 0.25}, i, i % 7 + 2)
            assert rejected["score"] == -1.5
    with pytest.raises(UserError, match="a.jsonl: examples of several sequences are not cut into chunks"):
        chunk(train, 4)


@pytest.mark.parametrize("settings", [{}, {"dataset_streaming": True}])
@pytest.mark.parametrize("across", [True, False])
def test_chunks_have_the_fields_of_their_tokens(tmp_path, across, settings, monkeypatch):
    sizes = [5, 1, 12, 7, 30, 2, 9]
    monkeypatch.setattr(stream, "BLOCK_ROWS", len(sizes))
    starts = np.cumsum([0, *sizes[:-1]])
    rows = [
        {"i": i, "n": n, "start": int(start)} for i, (n, start) in enumerate(zip(sizes, starts, strict=True))
    ]
    encode = stream_of_documents if across else documents
    train = chunk(load(tmp_path, rows, encode=encode, **settings), 4, across=across)
    found = [train[p][0] for p in range(len(train.examples))]
    for sequence in found:
        ids = sequence["input_ids"].astype(int)
        assert (
            sequence["twice"].tolist() == (2 * ids).tolist()
            and sequence["thrice"].tolist() == (3 * ids).tolist()
        )
        if not across:
            assert sequence["document"] == np.searchsorted(starts, ids[0], side="right") - 1
    assert sum(len(sequence["input_ids"]) for sequence in found) > 55


def test_a_row_of_several_documents_has_no_number_of_one(tmp_path):
    """It would count for its neighbours, too."""
    train = load(tmp_path, [{"i": 0, "n": 5, "start": 0}], encode=documents)
    with pytest.raises(
        UserError, match="^/.*a.jsonl: a row holds several documents, so one number for each .document. has"
    ):
        chunk(train, 4)


def test_cuts_shorten_what_is_per_token(tmp_path):
    (sequence,) = with_fields({"i": 4, "n": 9}, None, None)
    short = truncate(sequence, 5)
    assert [np.asarray(value).size for value in short.values()] == [5, 5, 5, 5, 5, 1, 1, 1] and short[
        "score"
    ] == 4.25
    with pytest.raises(BadRow):
        truncate(sequence, 1)
    rows = [{"i": i, "n": 12} for i in range(40)]  # trained: 1, 2, 4, 5, 7, 8, 10, 11
    train, sizes = drop_turns(load(tmp_path, rows), 0.6), set()
    for p in range(len(train)):
        (sequence,) = train[p]
        sizes.add(len(sequence["input_ids"]))
        check(sequence, int(sequence["input_ids"][0]), len(sequence["input_ids"]))
    assert sizes == {3, 6, 9, 12}


def test_a_field_added_later_belongs_to_every_sequence(tmp_path):
    train = load(tmp_path, rows_of(4), rows_of(2), encode=pairs)
    packed = pack(train, 100)
    train.data.add_field("ref_logps", np.arange(12) * 0.5)
    assert [[sequence["ref_logps"] for sequence in train.data[i]] for i in range(6)] == [
        [i, i + 0.5] for i in range(6)
    ]
    assert all("ref_logps" in sequence and "score" in sequence for sequence in packed[0])


# --- what is refused ----------------------------------------------------------------------------------------


def given(row, tokenizer, args):
    """A sequence with the first fields of the row, or, from the row number `at` on, with the second."""
    fields = row["given"][row["i"] >= row["at"]]
    return [{"input_ids": np.arange(3), "loss_mask": np.ones(3, int)} | fields]


def refused(encode, rows, num_proc=1):
    rows = [Row(row, f"a.jsonl:{i + 1}") for i, row in enumerate(rows)]
    with pytest.raises(UserError) as caught:
        layout = None
        for _, encoded in encode_all(enumerate(rows), Job(encode, base_tokenizer(), CommonArgs()), num_proc):
            layout = agree(layout, encoded.layout)
    return line(caught)


@pytest.mark.parametrize(
    "name, value",
    [
        ("x", [1, 2]),
        ("x", [[1, 2, 3]]),
        ("x", None),
        ("x", "high"),
        ("x", [1.0, None, 2.0]),
        ("x", ["a", "b", "c"]),
        ("x", [[1], [1, 2], [3]]),
        ("x", float("nan")),
        ("x", [0.0, float("nan"), 1.0]),
        ("x", 1e40),
        ("x", 2**70),
        ("input_ids", []),
        ("input_ids", [1, -1, 2]),
        ("input_ids", [1, 70_000, 2]),
        ("input_ids", [1.0, 2.0, 3.0]),
        ("input_ids", [[1, 2, 3]]),
        ("loss_mask", [1, 1]),
        ("loss_mask", [0.5, 1.0, 1.0]),
        ("loss_mask", [0, 2, 1]),
        *((name, 1.0) for name in RESERVED),
    ],
)
def test_a_wrong_field_is_named_with_its_row(name, value):
    found = refused(given, [{"given": [{}, {name: value}], "at": 1, "i": i} for i in range(2)])
    assert found.startswith(f"a.jsonl:2: the field {name} ")


def several(row, tokenizer, args):
    sequence = {"input_ids": np.arange(10), "loss_mask": np.array([0] * 9 + [1])}
    return [sequence] * (row["i"] % 4 + 1)


def test_what_is_no_example_is_named():
    for made in (None, [], {"input_ids": [1]}, [{"input_ids": [1]}], [[1, 2]], 3):
        said = refused(lambda row, tokenizer, args, made=made: made, [{}])
        assert said.startswith("a.jsonl:1: ")
    assert said == "a.jsonl:1: encode gave 3; expected a list of sequences, or a text"
    sequence = {"input_ids": np.arange(3), "loss_mask": np.ones(3, int)}
    half = lambda row, tokenizer, args: [sequence | {"x": 1}, sequence]  # noqa: E731
    fields = "{'input_ids': ('token', 'int64'), 'loss_mask': ('token', 'int64')"
    assert refused(half, [{}]) == (
        f"a.jsonl:1: sequences with fields {fields}}}; expected, as in a.jsonl:1, {fields}, 'x': ('sequence', 'int64')}}"
    )
    wrong = lambda row, tokenizer, args: [sequence | {"x": [1, 2]}]  # noqa: E731
    assert refused(wrong, [{}]) == (
        "a.jsonl:1: the field x is [1, 2]; expected finite numbers, one or one for each of 3 tokens; "
        "input_ids of 0 to 65535, a loss_mask of 0 and 1"
    )


def test_examples_may_have_any_number_of_sequences(tmp_path):
    """As packs and windows, whose sizes count shared tokens once."""

    train = load(tmp_path, [{"i": i} for i in range(40)], encode=several)
    assert [len(train.examples[i]) for i in range(40)] == [i % 4 + 1 for i in range(40)]
    assert all(one["input_ids"].tolist() == list(range(10)) for i in range(40) for one in train.examples[i])
    # of ten tokens nine are shared: a row holds 10, 11, 12 or 13
    assert train.examples.sizes.tolist() == [10, 11, 12, 13] * 10
    packed = pack(train, 30)
    assert sum(len(packed[p]) for p in range(len(packed))) == 100 and packed.examples.sizes.max() <= 30
    window = Windows(CommonArgs(per_device_train_batch_size=4, max_steps=1), alone(), train)[0]
    assert window.num_sequences == sum(len(example) for example in window.examples)
    with pytest.raises(UserError, match="an example of [13] sequences: this script needs 2 each"):
        Windows(CommonArgs(max_steps=1), alone(), train, indivisible=2)[0]


@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.parametrize("at", [1, CHUNK + 3])
@pytest.mark.parametrize(
    "first, other, named",
    [
        ({"x": 1.5}, {}, "x"),
        ({}, {"x": 1.5}, "x"),
        ({"x": 1.5}, {"x": 2}, "x"),
        ({"x": 1}, {"x": [1, 2, 3]}, "x"),
        ({"x": 1, "y": 1}, {"x": 1, "z": 1}, "y"),
    ],
)
def test_rows_have_the_same_fields(first, other, named, at, num_proc):
    found = refused(given, [{"given": [first, other], "at": at, "i": i} for i in range(at + 1)], num_proc)
    assert found.startswith(f"a.jsonl:{at + 1}: ") and f"'{named}'" in found and "as in a.jsonl:" in found


@pytest.mark.parametrize("streaming", [False, True])
def test_a_field_that_a_source_lacks_is_named(tmp_path, streaming):
    rows = [[{"given": [{"x": 1.5}], "at": 99, "i": 0}] * 20, [{"given": [{}], "at": 99, "i": 0}] * 20]
    with pytest.raises(UserError, match=r"b.jsonl(:1)?: .*as in .*a.jsonl(:1)?, .*'x'"):
        load(tmp_path, *rows, encode=given, dataset_streaming=streaming, dataset_weights=[1.0, 1.0])[0]


def test_later_blocks_have_the_fields_of_the_first(tmp_path):
    rows = [{"given": [{"x": 1}, {"x": 1, "y": 2}], "at": 20, "i": i} for i in range(40)]
    train = load(tmp_path, rows, encode=given, dataset_streaming=True)
    train[19]
    with pytest.raises(UserError, match="a.jsonl:21: .*'y'"):
        train[20]


@pytest.mark.parametrize(
    "changes",
    [
        ({}, {"x": np.ones(3)}),
        ({"x": np.ones(2)}, {"x": np.ones(2)}),
        ({"x": np.ones((3, 2))}, {"x": np.ones((3, 2))}),
        ({"loss_mask": np.ones(2)}, {}),
    ],
)
def test_sequences_of_a_script_are_checked_alike(changes):
    examples = [[all_trained(np.arange(3)) | change] for change in changes]
    with pytest.raises(UserError, match="x|loss_mask"):
        Window(alone(), examples, [[0, 1]])


def test_a_script_may_make_sequences_of_lists():
    examples = [[{"input_ids": list(range(12)), "loss_mask": [0] * 10 + [1, 1]}] for _ in range(2)]
    (batch,) = Window(alone(), examples, [[0, 1]])
    assert batch["input_ids"].tolist() == [[*range(12), 10, 11]]  # the second one's start is the first one's


def test_tensors_and_masks_of_floats_are_taken():
    found = check_sequence(
        {"input_ids": [1, 2], "loss_mask": [0.0, 1.0], "n": torch.tensor(3), "g": torch.ones(2) * 2}
    )
    assert found["g"].tolist() == [2.0, 2.0] and found["n"].dtype == np.int64
    with pytest.raises(UserError, match="the field b"):  # numpy has no bfloat16
        check_sequence({"input_ids": [1, 2], "loss_mask": [0, 1], "b": torch.ones(2, dtype=torch.bfloat16)})
