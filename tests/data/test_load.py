"""The data of a run as its script asks for it: load_data, load_prompts, and what is done to them
afterwards."""

from common.data import (
    BadRow,
    as_chat,
    as_prompt,
    as_text,
    chunk,
    drop_turns,
    load_data,
    load_prompts,
    pack,
    stream,
    tokenize_chat,
    tokenize_completion,
    tokenize_messages,
    tokenize_row,
)
from common.data.tokens import tokenize_documents
from common.errors import UserError
import pytest

from tests.data.rows import alone, arguments, base_tokenizer, ids, jsonl

U, A, B = (
    {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b"))
)


@pytest.fixture(scope="module")
def tokenizer():
    return base_tokenizer()


def documents(row, tokenizer, args):
    return as_text(row)


def one_chat(row, tokenizer, args):
    return tokenize_chat(as_chat(row), tokenizer, max_length=30)


def numbered(path, count):
    return jsonl(path, [{"text": f"row {i} " * (i % 5 + 1), "n": i} for i in range(count)])


# --- load_data ----------------------------------------------------------------------------------------------


def test_chunks_may_be_enough_for_the_weights(tmp_path, tokenizer):
    names = [jsonl(tmp_path / f"{name}.jsonl", [{"text": "word " * 500}]) for name in "ab"]
    train, _ = load_data(
        arguments(tmp_path, *names, dataset_weights=[0.9, 0.1]), alone(), documents, tokenizer
    )
    chunks = chunk(train, 16)
    assert chunks[0] and chunks.order.quotas[0] > 5 * chunks.order.quotas[1] > 0
    with pytest.raises(UserError, match="--dataset_weights: of 2 examples, source 2 would give none"):
        train[0]


@pytest.mark.parametrize(
    "row, encode, note",
    [
        ({"messages": [U, A], "id": 3, "empty": None}, one_chat, "not read: id"),
        ({"messages": [U, A | {"content": "word " * 50}]}, one_chat, "cut at max_length 30"),
        ({"prompt": "q", "completion": "a"}, one_chat, "plain text goes without the chat template"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_lost_of_rows_is_said(tmp_path, tokenizer, capsys, monkeypatch, row, encode, note, streaming):
    monkeypatch.setattr(stream, "BLOCK_ROWS", 100)
    good = {"messages": [U, A], "id": None}
    for bad, said in ((3, True), (2, False)):  # of 100: up to two go without a word, and are in the facts
        name = jsonl(tmp_path / f"{bad}.jsonl", [row] * bad + [good] * (100 - bad))
        train, _ = load_data(
            arguments(tmp_path, name, dataset_streaming=streaming), alone(), encode, tokenizer
        )
        facts = train[0] and train.data.facts()[0]
        ((found, counted),) = facts["noted"].items()
        assert found.startswith(note) and counted["first"][0] == f"{name}:1" and facts["columns"]
        assert streaming or counted["count"] == bad
        assert (note in capsys.readouterr().out) == (said or streaming)


def test_a_column_that_is_said_to_be_unused_needs_no_note(tmp_path, tokenizer, capsys):
    name = jsonl(tmp_path / "a.jsonl", [{"messages": [U, A], "label": True}] * 4)
    args = arguments(tmp_path, name, columns=["unused=label"])
    train, _ = load_data(args, alone(), one_chat, tokenizer)
    assert len(train) == 4 and train.data.facts()[0]["noted"] == {}
    assert "not read" not in capsys.readouterr().out


@pytest.mark.parametrize("streaming", [False, True])
def test_a_column_that_is_not_there_to_be_renamed_is_said(tmp_path, tokenizer, capsys, streaming):
    name = jsonl(tmp_path / "a.jsonl", [{"messages": [U, A], "question": "q"}] * 4)
    args = arguments(
        tmp_path, name, columns=["unused=question", "messages=chat"], dataset_streaming=streaming
    )
    train, _ = load_data(args, alone(), one_chat, tokenizer)
    assert train[0] and "no column chat, which --columns would rename (first:" in capsys.readouterr().out


def test_prompts_that_go_another_way_are_noted(tmp_path, tokenizer, capsys):
    def encode(row, tokenizer, args):
        return tokenize_row(as_prompt(row), tokenizer)

    tools = [{"name": "search"}]
    load_prompts(arguments(tmp_path, jsonl(tmp_path / "a.jsonl", [{"prompt": "q"}])), encode, tokenizer)
    assert "--system_prompt" in capsys.readouterr().out
    load_prompts(
        arguments(tmp_path, jsonl(tmp_path / "b.jsonl", [{"prompt": [U], "tools": tools}])), encode, tokenizer
    )
    assert "no place for tools" in capsys.readouterr().out


# --- what is done to the training data ----------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"dataset_streaming": True}])
def test_packing_keeps_kind_data_and_order(tmp_path, tokenizer, settings, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK_ROWS", 60)
    args = arguments(tmp_path, numbered(tmp_path / "a.jsonl", 60), **settings)
    train, _ = load_data(args, alone(), documents, tokenizer)
    plain = sorted(example[0] for example in ids(train, 60))
    packed = pack(train, 64)
    assert (
        type(packed) is type(train)
        and packed.examples.longest == train.examples.longest
        and packed.sources == train.sources
    )
    assert sorted(part for example in ids(packed, len(packed.examples)) for part in example) == plain
    assert packed.data.sizes.tolist() == train.data.sizes.tolist() and len(packed.examples) < 40
    assert ids(train, 60) != ids(packed, 30)  # what was packed is as it was


def test_turns_may_be_dropped_before_or_after_packing(tmp_path, tokenizer):
    chat = [U, A] * 4
    name = jsonl(tmp_path / "a.jsonl", [{"messages": chat[: 2 * (i % 4 + 1)]} for i in range(40)])
    train, _ = load_data(arguments(tmp_path, name), alone(), one_chat, tokenizer)
    before, after = pack(drop_turns(train, 0.5), 200), drop_turns(pack(train, 200), 0.5)
    assert ids(before, len(before)) == ids(after, len(after)) != ids(pack(train, 200), len(before))
    assert drop_turns(train, 0.0) is train


# --- prompts ------------------------------------------------------------------------------------------------


def encode_prompt(row, tokenizer, args):
    return as_prompt(row) | {"prompt_ids": list(range(len(row["prompt"])))}


@pytest.mark.parametrize("column", [None, "n", "length"])
def test_prompts_stand_at_positions_like_any_training_data(tmp_path, tokenizer, capsys, column):
    rows = [{"prompt": "x" * (i % 7 + 1), "n": f"{60 - i}", f"answer{i % 2}": str(i)} for i in range(60)]
    name = jsonl(tmp_path / "a.jsonl", [*rows, {"prompt": "x", "n": "hard"}] if column == "n" else rows)
    args = arguments(tmp_path, name, eval_fraction=0.2, curriculum_column=column)
    prompts, held_out = load_prompts(args, encode_prompt, tokenizer)
    assert (
        "prompts left out: ValueError: could not convert string to float: 'hard' (first: "
        in capsys.readouterr().out
    ) == (column == "n")
    assert len(prompts) + len(held_out) == 60 and held_out.difficulty is None and len(held_out) > 0
    if column:  # from easy to hard in the first half of the first epoch
        difficulty = [len(row["prompt"]) if column == "length" else float(row["n"]) for row in prompts.rows]
        assert prompts.difficulty.tolist() == difficulty
        found = [prompts.at(position) for position in range(len(prompts) // 2)]
        ranks = [len(row["prompt"]) if column == "length" else float(row["n"]) for row in found]
        assert max(ranks[:4]) < min(ranks[-4:])
    for epoch in range(2):
        found = [
            prompts.at(position)["n"] for position in range(epoch * len(prompts), (epoch + 1) * len(prompts))
        ]
        assert sorted(found) == sorted(prompts[i]["n"] for i in range(len(prompts)))
    # Whatever rows a reward is called with, it gets the columns of all.
    assert all(
        {"answer0", "answer1"} < row.keys() and (row["answer0"] is None) != (row["answer1"] is None)
        for row in prompts.rows
    )
    assert prompts.longest == 7 and prompts.sizes.tolist() == [len(row["prompt"]) for row in prompts.rows]
    assert prompts.facts()[0]["examples"] == len(prompts) and [
        source.label for source in prompts.sources
    ] == ["a"]


def test_held_out_prompts_have_the_columns_of_those_trained_on(tmp_path, tokenizer):
    """A reward is called with both."""
    names = [jsonl(tmp_path / f"{n}.jsonl", [{"prompt": "x", key: 1}] * 2) for n, key in ("ab", "cd")]
    args = arguments(tmp_path, *names, eval_dataset_name=names[:1])
    prompts, held_out = load_prompts(args, lambda row, *_: dict(row) | {"prompt_ids": [1]}, tokenizer)
    expected = {"prompt": "x", "b": 1, "d": None, "prompt_ids": [1]}
    assert held_out.rows == [expected] * 2 == prompts.rows[:2]


def test_prompts_that_are_all_unusable_are_refused(tmp_path, tokenizer):
    def refuse(row, tokenizer, args):
        raise BadRow("too long")

    name = jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}] * 2)
    with pytest.raises(UserError, match="none of the 2 prompts can be used: too long"):
        load_prompts(arguments(tmp_path, name), refuse, tokenizer)


# --- rows ---------------------------------------------------------------------------------------------------


def test_whatever_as_chat_gives_is_tokenized(tokenizer):
    def equal(found, expected):
        (found,) = found
        assert found["input_ids"].tolist() == expected["input_ids"].tolist()
        assert found["loss_mask"].tolist() == expected["loss_mask"].tolist()

    chat = [U, A, U, B]
    last = tokenize_messages(chat, tokenizer, train_on="last_turn")
    equal(tokenize_chat(as_chat({"messages": chat}), tokenizer, train_on="last_turn"), *last)
    prompt = as_chat({"prompt": chat[:3], "completion": chat[3:]})
    equal(tokenize_chat(prompt, tokenizer), *tokenize_messages(chat, tokenizer, first_trained_turn=3))
    strings = {"prompt": "What is ", "completion": "this"}
    equal(tokenize_chat(as_chat(strings), tokenizer), tokenize_completion("What is ", "this", tokenizer))
    (text,) = tokenize_chat(as_chat({"text": "some words"}), tokenizer)
    assert text["input_ids"].tolist() == tokenize_documents(["some words"], tokenizer)[0].tolist()
    (everything,) = tokenize_chat(as_chat({"messages": chat}), tokenizer, train_on="everything")
    for sequence in (text, everything):  # nothing predicts the first
        assert sequence["loss_mask"].tolist() == [0] + [1] * (len(sequence["input_ids"]) - 1)
    (long,) = tokenize_chat({"messages": [U, A | {"content": "one two three " * 300}]}, tokenizer)
    assert sum(long["loss_mask"]) > 600  # in numbers of 8 bits it would start again at 256
    (short,) = tokenize_chat(as_chat({"text": "some words"}), tokenizer, max_length=2)
    assert len(short["input_ids"]) == 2
    with pytest.raises(BadRow, match="no trained token within max_length 1"):
        tokenize_chat(as_chat({"messages": chat}), tokenizer, max_length=1)


def test_held_out_rows_keep_their_order(tmp_path, tokenizer):
    """So that an evaluation is the same at each run."""
    name = numbered(tmp_path / "a.jsonl", 50)
    train, held_out = load_data(
        arguments(tmp_path, name, eval_fraction=0.2, curriculum_column="n"), alone(), documents, tokenizer
    )
    assert len(train) + len(held_out) == 50 and 3 < len(held_out) < 20 and held_out.difficulty is None
    assert len(pack(held_out, 64)) < len(held_out)
    by_length, _ = load_data(
        arguments(tmp_path, name, curriculum_column="length"), alone(), documents, tokenizer
    )
    sizes = [by_length.size(position) for position in range(25)]  # the first half of the first epoch
    assert max(sizes[:3]) < min(sizes[-3:])
    args = arguments(tmp_path, name, eval_dataset_name=[name], max_eval_samples=5)
    _, held_out = load_data(args, alone(), documents, tokenizer)
    wanted = tokenize_documents([f"row {i} " * (i % 5 + 1) for i in range(5)], tokenizer)
    assert ids(held_out, 5) == [[document.tolist()] for document in wanted]
    assert held_out.sizes.tolist() == [len(document) for document in wanted]
