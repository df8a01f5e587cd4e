"""Any field that `encode` gives a sequence arrives in the training data, exactly; what cannot is refused in one line."""

import json
from types import SimpleNamespace

from common.args import CommonArgs
from common.data import BadRow, chunk, drop_turns, load_data, pack, truncate, whole
from common.data.encoding import CHUNK
from common.data.fields import as_field
from common.errors import UserError

import numpy as np
import pytest
from transformers import AutoTokenizer

ALONE = SimpleNamespace(is_main_process=True, is_local_main_process=True, wait_for_everyone=lambda: None)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained("data/base_model")


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


def given(row, tokenizer, args):
    """A sequence with the fields that stand in the row."""
    return [{"input_ids": np.arange(3), "loss_mask": np.ones(3, int)} | row.get("fields", {})]


def pairs(row, tokenizer, args):
    (sequence,) = with_fields(row, tokenizer, args)
    return [sequence, sequence | {"score": -1.5}]


def rows_of(count, first=0):
    return [{"i": i, "n": i % 7 + 2} for i in range(first, first + count)]


def arguments(tmp_path, *sources, **settings):
    names = []
    for s, rows in enumerate(sources):
        path = tmp_path / f"{'ab'[s]}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        names.append(str(path))
    defaults = {"dataset_cache_dir": str(tmp_path / "cache"), "dataset_num_proc": 1, "max_steps": 5}
    return CommonArgs(**{"dataset_name": names, "streaming_buffer_size": 20} | defaults | settings)


def load(tmp_path, tokenizer, *sources, encode=with_fields, **settings):
    return load_data(arguments(tmp_path, *sources, **settings), ALONE, encode, tokenizer)[0]


def check(sequence, i, n, start=0):
    """What with_fields gives, from a token on, as it was or as the cache has it."""
    part = slice(start, start + n)
    expected = with_fields({"i": i, "n": start + n}, None, None)[0]
    assert sequence.keys() == expected.keys()
    for name in ("input_ids", "loss_mask", "segment", "is_code", "teacher/logp"):
        assert sequence[name].tolist() == np.asarray(expected[name])[part].tolist()
    assert sequence["segment"].dtype == sequence["is_code"].dtype == np.int64
    assert sequence["teacher/logp"].dtype == np.float32
    numbers = [sequence[name] for name in ("score", "kind", "known")]
    assert numbers == [i + 0.25, 2**40 + i, i % 2 == 0]
    assert [isinstance(number, int) for number in numbers] == [False, True, True]
    assert all(np.ndim(number) == 0 for number in numbers)


# --- where they arrive ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"dataset_streaming": True}])
@pytest.mark.parametrize("sources", [(rows_of(45),), (rows_of(30), rows_of(25, first=100))])
def test_fields_of_every_kind_arrive_exactly(tmp_path, tokenizer, settings, sources):
    for _ in range(2):  # made, and from the cache
        train = load(tmp_path, tokenizer, *sources, **settings)
        seen = set()
        for p in range(45):
            (sequence,) = train[p]
            i = int(sequence["input_ids"][0])
            check(sequence, i, i % 7 + 2)
            seen.add(i)
        assert len(seen) > 30


def test_fields_are_read_from_the_disk(tmp_path, tokenizer):
    (file,) = load(tmp_path, tokenizer, rows_of(5)).data.files
    assert all(isinstance(values.base, np.memmap) and not values.flags.writeable for values in file.per_token.values())
    assert file.ids.dtype == np.uint16 and file.mask.dtype == np.uint8
    assert set(file.per_token) == {"teacher/logp", "segment", "is_code"} and set(file.per_sequence) == {
        "score",
        "kind",
        "known",
    }


def test_several_processes_make_the_same_fields_as_one(tmp_path, tokenizer):
    found = []
    for num_proc in (1, 2):
        folder = tmp_path / str(num_proc)
        args = arguments(tmp_path, rows_of(3 * CHUNK + 5), dataset_cache_dir=str(folder), dataset_num_proc=num_proc)
        load_data(args, ALONE, with_fields, tokenizer)
        found.append({file.name: file.read_bytes() for made in folder.iterdir() for file in made.iterdir()})
    assert found[0] == found[1] and len([name for name in found[0] if name.startswith("field-")]) == 6


@pytest.mark.parametrize("settings", [{}, {"dataset_streaming": True}, {"curriculum_column": "i"}])
def test_packs_have_the_fields_of_their_sequences(tmp_path, tokenizer, settings):
    train = pack(load(tmp_path, tokenizer, rows_of(45), **settings), 20)
    sequences = [sequence for p in range(8) for sequence in train[p]]
    assert len(sequences) > 20
    for sequence in sequences:
        i = int(sequence["input_ids"][0])
        check(sequence, i, i % 7 + 2)


def test_both_sequences_of_a_pair_have_fields_of_their_own(tmp_path, tokenizer):
    train = load(tmp_path, tokenizer, rows_of(30), encode=pairs)
    for data in (train, pack(train, 40)):
        sequences = [sequence for p in range(10) for sequence in data[p]]
        for chosen, rejected in zip(sequences[::2], sequences[1::2], strict=True):
            check(chosen, i := int(chosen["input_ids"][0]), i % 7 + 2)
            check(rejected | {"score": i + 0.25}, i, i % 7 + 2)
            assert rejected["score"] == -1.5


def documents(row, tokenizer, args):
    ids = np.arange(row["n"]) + row["start"]
    return [whole(ids) | {"twice": 2.0 * ids, "thrice": 3 * ids, "document": row["i"]}]


@pytest.mark.parametrize("settings", [{}, {"dataset_streaming": True}])
@pytest.mark.parametrize("across", [True, False])
def test_chunks_have_the_fields_of_their_tokens_and_the_numbers_of_the_document_in_which_they_begin(
    tmp_path, tokenizer, across, settings
):
    sizes = [5, 1, 12, 7, 30, 2, 9]
    starts = np.cumsum([0, *sizes[:-1]])
    rows = [{"i": i, "n": n, "start": int(start)} for i, (n, start) in enumerate(zip(sizes, starts, strict=True))]
    settings = settings | {"streaming_buffer_size": len(sizes)}
    train = chunk(load(tmp_path, tokenizer, rows, encode=documents, **settings), 4, across=across)
    longer = across or any(n > 4 for n in sizes)
    found = [train[p][0] for p in range(len(train.examples))]
    for sequence in found:
        ids = sequence["input_ids"].astype(int)
        assert sequence["twice"].tolist() == (2 * ids).tolist() and sequence["thrice"].tolist() == (3 * ids).tolist()
        assert sequence["document"] == np.searchsorted(starts, ids[0], side="right") - 1
    assert longer and sum(len(sequence["input_ids"]) for sequence in found) > 55
    packed = pack(train, 8)
    assert all({"twice", "thrice", "document"} < sequence.keys() for sequence in packed[0])


def test_truncation_cuts_what_is_per_token_and_keeps_the_numbers():
    (sequence,) = with_fields({"i": 4, "n": 9}, None, None)
    short = truncate(sequence, 5)
    assert [np.asarray(value).size for value in short.values()] == [5, 5, 5, 5, 5, 1, 1, 1] and short["score"] == 4.25
    with pytest.raises(BadRow):
        truncate(sequence, 1)


def test_dropped_turns_are_cut_from_every_field(tmp_path, tokenizer):
    rows = [{"i": i, "n": 12} for i in range(40)]  # trained: 1, 2, 4, 5, 7, 8, 10, 11
    for data in (lambda data: data, lambda data: pack(data, 24)):
        train = data(drop_turns(load(tmp_path, tokenizer, rows), 0.6))
        sizes = set()
        for p in range(len(train)):
            for sequence in train[p]:
                sizes.add(len(sequence["input_ids"]))
                check(sequence, int(sequence["input_ids"][0]), len(sequence["input_ids"]))
        assert sizes == {3, 6, 9, 12}


def test_a_field_that_is_added_later_belongs_to_every_sequence(tmp_path, tokenizer):
    train = load(tmp_path, tokenizer, rows_of(4), encode=pairs)
    packed = pack(train, 100)
    train.data.add_field("ref_logps", np.arange(8) * 0.5)
    assert [[sequence["ref_logps"] for sequence in train.data[i]] for i in range(4)] == [[i, i + 0.5] for i in range(4)]
    assert all("ref_logps" in sequence and "score" in sequence for sequence in packed[0])


# --- what is refused ------------------------------------------------------------------------------------------------


def refused(tmp_path, tokenizer, *sources, encode=given, **settings):
    with pytest.raises(UserError) as caught:
        load(tmp_path, tokenizer, *sources, encode=encode, **settings)[0]
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{tmp_path}/", "")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "value, expected",
    [
        ([1, 2], "a.jsonl:2: the field x has 2 values; expected one for each of 3 tokens, or one"),
        ([[1, 2, 3]], "a.jsonl:2: the field x has 1 x 3 values; expected one for each of 3 tokens"),
        (None, "a.jsonl:2: the field x is None; expected a number, or an array with one for each token"),
        ("high", "a.jsonl:2: the field x is 'high'; expected a number"),
        ([1.0, None, 2.0], "a.jsonl:2: the field x is [1.0, None, 2.0]; expected a number"),
        (["a", "b", "c"], "a.jsonl:2: the field x is ['a', 'b', 'c']; expected a number"),
        ([[1], [1, 2], [3]], "a.jsonl:2: the field x is [[1], [1, 2], [3]]; expected a number"),
        (float("nan"), "a.jsonl:2: the field x is nan; expected finite numbers"),
        ([0.0, float("nan"), 1.0], "a.jsonl:2: the field x is [0.0, nan, 1.0]; expected finite numbers"),
        (1e40, "a.jsonl:2: the field x is 1e+40; expected finite numbers"),
        (2**70, "a.jsonl:2: the field x is 1180591620717411303424; expected a number"),
    ],
)
def test_a_value_that_is_no_number_is_an_error_with_its_row_and_field(tmp_path, tokenizer, value, expected, streaming):
    rows = [{}, {"fields": {"x": value}}]
    assert refused(tmp_path, tokenizer, rows, dataset_streaming=streaming).startswith(expected)


@pytest.mark.parametrize(
    "sequence, expected",
    [
        ({"input_ids": []}, "input_ids is []; expected an array of token ids"),
        ({"input_ids": [1, -1, 2]}, "input_ids is [1, -1, 2]; expected an array of token ids, 0 to 65535"),
        ({"input_ids": [1, 70_000, 2]}, "input_ids is [1, 70000, 2]; expected an array of token ids, 0 to 65535"),
        ({"input_ids": [1.0, 2.0, 3.0]}, "input_ids is [1.0, 2.0, 3.0]; expected an array of token ids"),
        ({"input_ids": [[1, 2, 3]]}, "input_ids is [[1, 2, 3]]; expected an array of token ids"),
        ({"loss_mask": [1, 1]}, "loss_mask is [1, 1]; expected 0 or 1 for each of 3 tokens"),
        ({"loss_mask": [0.5, 1.0, 1.0]}, "loss_mask is [0.5, 1.0, 1.0]; expected 0 or 1 for each of 3 tokens"),
        ({"loss_mask": [0, 2, 1]}, "loss_mask is [0, 2, 1]; expected 0 or 1"),
    ],
)
def test_ids_and_masks_that_would_not_be_kept_as_they_are_are_an_error(tmp_path, tokenizer, sequence, expected):
    assert refused(tmp_path, tokenizer, [{}, {"fields": sequence}]).startswith(f"a.jsonl:2: {expected}")


@pytest.mark.parametrize(
    "made, expected",
    [
        (None, "encode gave NoneType; expected a list of sequences, or a text"),
        ([], "encode gave list; expected a list of sequences, or a text"),
        ({"input_ids": [1]}, "encode gave dict; expected a list of sequences, or a text"),
        ([{"input_ids": [1]}], "encode gave {'input_ids': [1]}; expected sequences {input_ids, loss_mask, ...}"),
        ([[1, 2]], "encode gave [1, 2]; expected sequences {input_ids, loss_mask, ...}"),
    ],
)
def test_what_is_no_example_is_an_error(tmp_path, tokenizer, made, expected):
    assert refused(tmp_path, tokenizer, [{}], encode=lambda row, tokenizer, args: made).startswith(f"a.jsonl:1: {expected}")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.parametrize("at", [1, CHUNK, CHUNK + 3])
@pytest.mark.parametrize(
    "first, other, expected",
    [
        ({"x": 1.5}, {}, "the field x: none; expected floats, one for each sequence, as in a.jsonl:"),
        ({}, {"x": 1.5}, "the field x: floats, one for each sequence; expected none, as in a.jsonl:"),
        ({"x": 1.5}, {"x": 2}, "the field x: whole numbers, one for each sequence; expected floats, one for each sequence"),
        (
            {"x": 1},
            {"x": [1, 2, 3]},
            "the field x: whole numbers, one for each token; expected whole numbers, one for each seq",
        ),
        ({"x": 1, "y": 1}, {"x": 1, "z": 1}, "the field y: none; expected whole numbers"),
    ],
)
def test_sequences_without_the_same_fields_are_an_error(
    tmp_path, tokenizer, first, other, expected, at, num_proc, streaming
):
    rows = [{"fields": first}] * at + [{"fields": other}]
    settings = {"dataset_num_proc": num_proc, "dataset_streaming": streaming, "streaming_buffer_size": at + 1}
    found = refused(tmp_path, tokenizer, rows, **settings)
    assert found.startswith(f"a.jsonl:{at + 1}: {expected}")


def test_later_blocks_of_a_stream_have_the_fields_of_the_first(tmp_path, tokenizer):
    rows = [{"fields": {"x": 1}}] * 20 + [{"fields": {"x": 1, "y": 2}}] * 20
    train = load(tmp_path, tokenizer, rows, encode=given, dataset_streaming=True)
    train[19]
    with pytest.raises(UserError, match="a.jsonl:21: the field y: whole numbers, one for each sequence; expected none"):
        train[20]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_field_that_a_source_lacks_is_an_error(tmp_path, tokenizer, streaming):
    sources = [{"fields": {"x": 1.5}}] * 20, [{}] * 20
    found = refused(tmp_path, tokenizer, *sources, dataset_streaming=streaming)
    where = "b.jsonl:1" if streaming else "b.jsonl"
    assert found.startswith(f"{where}: the field x: none; expected floats, one for each sequence, as in a.jsonl")


@pytest.mark.parametrize("at", [1, CHUNK, CHUNK + 3])
def test_rows_give_the_same_number_of_sequences(tmp_path, tokenizer, at):
    def some(row, tokenizer, args):
        return given(row, tokenizer, args) * row["count"]

    rows = [{"count": 2}] * at + [{"count": 3}]
    found = refused(tmp_path, tokenizer, rows, encode=some)
    first = CHUNK + 1 if at > CHUNK else 1
    assert (
        found == f"a.jsonl:{at + 1}: encode gave 3 sequences; expected 2, as in a.jsonl:{first}: rows give the same number"
    )


def test_the_sequences_of_an_example_have_the_same_fields(tmp_path, tokenizer):
    def half(row, tokenizer, args):
        (sequence,) = given(row, tokenizer, args)
        return [sequence | {"x": 1}, sequence]

    found = refused(tmp_path, tokenizer, [{}] * 2, encode=half)
    assert found.startswith("a.jsonl:1: the field x: none; expected whole numbers, one for each sequence, as in a.jsonl:1")


def test_pairs_are_not_cut_into_chunks(tmp_path, tokenizer):
    with pytest.raises(UserError, match="a.jsonl: examples of 2 sequences are not cut into chunks"):
        chunk(load(tmp_path, tokenizer, rows_of(3), encode=pairs), 4)


def test_tensors_of_any_kind_are_numbers_too():
    import torch

    assert as_field("f", torch.tensor([0.5, 1.0], dtype=torch.bfloat16)).tolist() == [0.5, 1.0]
    assert as_field("f", torch.ones(2, requires_grad=True) * 2).tolist() == [2.0, 2.0]
    assert as_field("f", torch.tensor(3)).dtype == np.int64
    with pytest.raises(UserError, match="expected whole numbers that fit in int64"):
        as_field("f", np.array([2**63 + 5], np.uint64))
