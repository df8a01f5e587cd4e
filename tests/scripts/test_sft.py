"""train_sft.py against float64: what is trained, with what weight, and what is told of it."""

import itertools

import pytest

from tests.conftest import write_rows
from tests.scripts.one_step import (
    DROPOUT,
    apart,
    assert_gradient,
    assert_metrics,
    assert_nll_evaluations,
    assert_nll_step,
    exact,
    gradient_of,
    make_model,
    nll_window,
    watched,
)
from tests.scripts.texts import BASE, chat, tokenizer

CHATS = [
    chat("What is 3+4?", "3+4=7. Answer: 7"),
    chat(
        "Eva has 10 figs. She loses 4. How many figs now?",
        "Answer: 6",
        "What is 14-7+3?",
        "Answer: 10",
        system="Be short.",
    ),
    chat(
        "Hi",
        "Hello!",
        "Which number comes before 14?",
        "13 comes before 14.",
        "And before 9?",
        "8 comes before 9.",
    ),
    chat("How much is 15-6-4?", "15-6=9. 9-4=5. Answer: 5", system="Show your working."),
    chat("Today is Monday. What comes next?", "Tuesday", "And then?", "Then comes Wednesday. Then Thursday."),
    chat("Max has 9 cards. He buys 5. How many cards now?", "9+5=14."),
]
HELD_OUT = [
    chat("What is 8-5?", "8-5=3. Answer: 3"),
    chat(
        "A pond has 3 ducks. 7 come. How many now? And who counts them, and why, and for how long?",
        "Answer: 10",
    ),
    chat(
        "What is 1+1?", "2", "What is 6+6?", "6+6 is 12. 8-6 is 2. 12+3 is 15. Answer: 12", system="Be short."
    ),
    chat("Hi", "Hello!"),
    chat("Mia sees Zoe. Who sees Mia?", "Tomorrow is Tuesday. Then Zoe sees Mia."),
]


def encoded(messages, train_on="all_turns"):
    """A conversation as (ids, mask): the template's text, of which the answers and the ends of their turns
    are trained."""
    text, spans = "", []
    for message in messages:
        text += f"<|im_start|>{message['role']}\n"
        start = len(text)
        text += message["content"] + "<|im_end|>"
        if message["role"] == "assistant":
            spans.append((start, len(text)))
        text += "\n"
    assert text == tokenizer().apply_chat_template(messages, tokenize=False)
    spans = {"all_turns": spans, "last_turn": spans[-1:], "everything": [(0, len(text))]}[train_on]
    found = tokenizer()(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [int(any(a <= start and end <= b for a, b in spans)) for start, end in found.offset_mapping]
    return found.input_ids, mask


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    for name, chats in (("chats", CHATS), ("held_out", HELD_OUT)):
        write_rows(folder / f"{name}.jsonl", [{"messages": messages} for messages in chats])
    return folder


def sft(launch, data, *flags, model=BASE, batch=6, output="out"):
    names = [
        "--dataset_name",
        data / "chats.jsonl",
        "--per_device_train_batch_size",
        batch,
        "--learning_rate",
        "1e-3",
    ]
    return watched(launch, "sft", model, *names, *flags, output=output)


ONE = "--max_steps 1"
STEPS = {  # flags, conversations of a micro-batch, what is trained, tokens of a conversation, model
    "all turns": (ONE, 6, "all_turns", 999, None),
    "the last turn": (f"{ONE} --train_on last_turn", 6, "last_turn", 999, None),
    "everything": (f"{ONE} --train_on everything", 6, "everything", 999, None),
    "micro-batches of different numbers of trained tokens": (
        f"{ONE} --gradient_accumulation_steps 3",
        2,
        "all_turns",
        999,
        None,
    ),
    "packed, none of which sees another": ("--packing --max_length 128", 50, "all_turns", 999, None),
    "too long, what is left of them": ("--max_length 36", 50, "all_turns", 36, None),
    "grouped heads": (ONE, 6, "all_turns", 999, "llama"),
    "norms of queries and keys": (ONE, 6, "all_turns", 999, "qwen3"),
    "a sliding window": (ONE, 6, "all_turns", 999, "mistral"),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_answers_are_trained_and_nothing_else(name, launch, data, base, tmp_path):
    """All conversations as one step: each trained token has the same weight; what has no trained token left
    is not there."""
    flags, batch, train_on, longest, kind = STEPS[name]
    model = make_model(tmp_path / "model", kind) if kind else BASE
    run = sft(launch, data, *flags.split(), model=model, batch=batch)
    sequences = [
        (ids[:longest], mask[:longest]) for ids, mask in (encoded(messages, train_on) for messages in CHATS)
    ]
    sequences = [(ids, mask) for ids, mask in sequences if any(mask)]
    assert len(run.rows) == 1 and (
        1 < len(sequences) < len(CHATS) if longest < 999 else len(sequences) == len(CHATS)
    )
    assert_nll_step(
        run, exact(model) if kind else base, sequences, num_tokens=sum(len(ids) for ids, _ in sequences)
    )


def test_packed_rows_are_full(launch, data):
    rows = sft(launch, data, "--packing", "--max_length", 128, batch=1).rows
    assert rows[-1]["num_tokens"] / 128 <= len(rows) < len(CHATS)


@pytest.mark.parametrize("more", [-2, -1, 0])
def test_a_sliding_window_of_about_the_length_of_a_row(more, launch, tmp_path):
    """A token sees as many as the window is wide, itself among them, in rows that are hardly longer than it,
    too."""
    ids, mask = encoded(CHATS[0], "everything")
    model = make_model(tmp_path / "model", "mistral", sliding_window=len(ids) + more)
    one_row = write_rows(tmp_path / "one.jsonl", [{"messages": CHATS[0]}])
    flags = [
        "--dataset_name",
        one_row,
        "--train_on",
        "everything",
        "--per_device_train_batch_size",
        1,
        "--max_steps",
        1,
    ]
    assert_nll_step(watched(launch, "sft", model, *flags), exact(model), [(ids, mask)])


def test_an_epoch_trains_each_conversation_once(launch, data, base):
    """Steps of two conversations at a rate of 0: each loss and gradient is that of one pair, and the pairs
    share no one."""
    run = sft(launch, data, "--num_train_epochs", 2, "--learning_rate", 0, batch=2)
    sequences = [encoded(messages) for messages in CHATS]
    pairs = {
        pair: nll_window(base, [sequences[i] for i in pair]) for pair in itertools.combinations(range(6), 2)
    }
    assert len(run.rows) == 6
    seen = []
    for row, gradient in zip(run.rows, run.grads, strict=True):
        pair = min(pairs, key=lambda pair: abs(pairs[pair][1]["loss"] - row["loss"]))
        assert_metrics(row, pairs[pair][1])
        assert_gradient(gradient, gradient_of(base, nll_window(base, [sequences[i] for i in pair])[0]))
        seen += pair
    assert sorted(seen[:6]) == sorted(seen[6:]) == list(range(6))
    assert seen[:6] != seen[6:]  # each epoch in another order


@pytest.mark.parametrize("size", [2, 5])
def test_the_evaluation_is_the_mean_over_all_held_out_tokens(size, launch, data, base):
    """Rows of different length in batches of any size, before and after a step."""
    flags = [
        "--eval_dataset_name",
        data / "held_out.jsonl",
        "--per_device_eval_batch_size",
        size,
        "--eval_steps",
        1,
    ]
    run = sft(launch, data, *flags, "--max_steps", 2, "--learning_rate", "1e-2")
    assert_nll_evaluations(run, base, [encoded(messages) for messages in HELD_OUT])


def test_a_token_weighs_the_same_in_every_held_out_source(launch, data, base, tmp_path):
    """The loss of all is the mean over their tokens, beside that of each source."""
    parts = {"one": HELD_OUT[:4], "two": HELD_OUT[4:]}
    files = [
        write_rows(tmp_path / f"{name}.jsonl", [{"messages": m} for m in part])
        for name, part in parts.items()
    ]
    run = sft(launch, data, "--eval_dataset_name", *files, "--eval_steps", 1, "--max_steps", 1)
    values = nll_window(base, [encoded(messages) for messages in HELD_OUT])[1]
    own = {
        f"{name}_loss": nll_window(base, list(map(encoded, part)))[1]["loss"] for name, part in parts.items()
    }
    assert_metrics(run.evals[0], {f"eval_{name}": value for name, value in (values | own).items()})


@pytest.mark.parametrize("kind", DROPOUT)
def test_dropout_is_on_in_training_and_off_in_evaluation(kind, launch, data, tmp_path):
    """On the same data and weights the gradient differs from step to step, also after an evaluation, and with
    the seed; it is the same when the run is repeated."""
    model = make_model(tmp_path / "model", kind)
    # in whose order there is no difference
    one_row = write_rows(tmp_path / "one.jsonl", [{"messages": CHATS[2]}])
    flags = ["--dataset_name", one_row, "--eval_dataset_name", data / "held_out.jsonl", "--eval_steps", 1]
    flags += ["--learning_rate", 0, "--max_steps", 3]
    run = sft(launch, data, *flags, model=model, batch=1)
    again = sft(launch, data, *flags, model=model, batch=1, output="again")
    other = sft(launch, data, *flags, "--seed", 1, model=model, batch=1, output="other")
    loss, _ = nll_window(lm := exact(model), [encoded(CHATS[2])])
    for one, two in itertools.combinations([gradient_of(lm, loss), *run.grads, *other.grads], 2):
        assert apart(one, two) > 0.02
    assert [row["loss"] for row in run.rows] == pytest.approx([row["loss"] for row in again.rows], rel=1e-6)
    assert all(apart(one, same) < 1e-5 for one, same in zip(run.grads, again.grads, strict=True))
    values = nll_window(lm, [encoded(messages) for messages in HELD_OUT])[1]
    for row in run.evals:
        assert_metrics(row, {f"eval_{name}": value for name, value in values.items()})


def test_turn_dropping_ends_conversations_after_an_earlier_answer(launch, data, base):
    """At probability 1 each one that has several answers; the loss of a step on one is that of such a start
    of it."""
    run = sft(launch, data, "--turn_dropping", 1, "--learning_rate", 0, batch=1)
    whole = [nll_window(base, [encoded(messages)])[1]["loss"] for messages in CHATS]
    starts = {}
    for i, messages in enumerate(CHATS):
        answers = [j for j, message in enumerate(messages) if message["role"] == "assistant"]
        cut = [messages[: j + 1] for j in answers[:-1]] or [messages]
        starts |= {(i, j): nll_window(base, [encoded(part)])[1]["loss"] for j, part in enumerate(cut)}
    assert len(run.rows) == len(CHATS)
    nearest = [min(starts, key=lambda key: abs(starts[key] - row["loss"])) for row in run.rows]
    assert sorted(i for i, _ in nearest) == list(range(len(CHATS)))
    for row, key in zip(run.rows, nearest, strict=True):
        assert row["loss"] == pytest.approx(starts[key], rel=1e-4)
        several = len([m for m in CHATS[key[0]] if m["role"] == "assistant"]) > 1
        assert not several or abs(row["loss"] - whole[key[0]]) > 1e-3
