"""Real data with real tokenizers: every file is read by its stage, and what is trained is decoded and compared.

Needs a folder with data and tokenizers beside the repository, or named by PLAINLOOP_DATA; skipped without it.
"""

import os
from functools import cache
from pathlib import Path

from common.args import CommonArgs
from common.data.chat import end_of_turn, stop_token_ids
from common.data.encode import convert
from common.data.formats import as_chat, as_preference, as_prompt, as_text
from common.data.sources import Source, load_rows
from common.data.tokens import show_trained, tokenize_documents, tokenize_messages, tokenize_pair, tokenize_prompt
from common.data.types import BadRow
from common.errors import UserError
from common.model.load import load_tokenizer

import numpy as np
import pytest
from transformers import GenerationConfig

pytestmark = pytest.mark.slow

DATA = Path(os.environ.get("PLAINLOOP_DATA", Path(__file__).parents[3] / "shared" / "data"))
if not (DATA / "tokenizers").is_dir():
    pytest.skip("no real data here", allow_module_level=True)

ROWS = 60
TOKENIZERS = [("minimind", None), ("phi3_mini", None), ("gpt2", "plain"), ("gpt2", "chatml")]
# What the columns of a file are called here.
RENAMES = {
    "bbh_boolean_expressions_250.jsonl": ["prompt=input"],
    "bbh_object_counting_250.jsonl": ["prompt=input"],
    "cmath_zh_0_300.jsonl": ["prompt=question"],
    "gsm8k_train.jsonl": ["prompt=question"],
    "glaive_toolcall_en_150.json": ["unused=tools"],
}
# What the words of an answer may lose: white space at the border.
BORDER = " \n\t"


def files(stage: str) -> list[str]:
    return sorted(path.name for path in (DATA / stage).iterdir())


@cache
def rows_of(stage: str, name: str, rename: bool = True) -> list:
    return load_rows(Source(str(DATA / stage / name), columns=tuple(RENAMES.get(name, ()) if rename else ())))[:ROWS]


@cache
def tokenizer_of(name: str, template: str | None = None):
    return load_tokenizer(CommonArgs(chat_template=template), DATA / "tokenizers" / name)


def decode(ids, tokenizer) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def trained(sequence, tokenizer) -> list[str]:
    mask = sequence["loss_mask"].astype(bool)
    stretches = np.split(np.arange(len(mask)), np.flatnonzero(np.diff(mask)) + 1)
    return [decode(sequence["input_ids"][part], tokenizer) for part in stretches if mask[part[0]]]


def tokenized(rows, function, tolerated: tuple[str, ...] = ()) -> list:
    """function(row) of the rows; what it refuses must be refused for one of the tolerated reasons."""
    results = []
    for row in rows:
        try:
            results.append(function(row))
        except BadRow as reason:
            assert any(known in str(reason) for known in tolerated), f"{row.where}: {reason}"
    assert results
    return results


@pytest.mark.parametrize("name", ["gpt2", "minimind", "phi3_mini"])
@pytest.mark.parametrize("file", files("pretrain"))
def test_documents_read_back_and_end_on_one_eos(file, name):
    tokenizer = tokenizer_of(name)
    texts = [as_text(row) for row in rows_of("pretrain", file)]
    for text, ids in zip(texts, tokenize_documents(texts, tokenizer), strict=True):
        assert ids[-1] == tokenizer.eos_token_id and (ids == tokenizer.eos_token_id).sum() == 1
        assert decode(ids[:-1], tokenizer).lstrip(" ") == text.lstrip(" ")  # phi3 takes the first space for its own


@pytest.mark.parametrize("name, template", TOKENIZERS)
@pytest.mark.parametrize("file", files("sft"))
def test_what_is_trained_in_a_chat_is_every_answer_and_its_end(file, name, template):
    tokenizer = tokenizer_of(name, template)

    def check(row):
        chat = as_chat(row)
        sequence = tokenize_messages(chat["messages"], tokenizer, tools=chat["tools"])
        answers = [m["content"].strip(BORDER) for m in chat["messages"] if m["role"] == "assistant"]
        end = end_of_turn(tokenizer)
        found = [text.removesuffix(end).strip(BORDER) for text in trained(sequence, tokenizer)]
        assert found == answers
        assert all(text.endswith(end) for text in trained(sequence, tokenizer))
        start = int(sequence["loss_mask"].argmax())
        prompt = next(i for i, m in enumerate(chat["messages"]) if m["role"] == "assistant")
        if prompt:
            prompt_ids = tokenize_prompt(chat["messages"][:prompt], tokenizer, chat["tools"])
            assert sequence["input_ids"][:start].tolist() == prompt_ids

    # A template without the role tool, and the few rows with an empty answer.
    tolerated = ("empty output", "empty answer", *(["leaves out a tool message"] if name == "phi3_mini" else []))
    if name == "minimind" and template is None:
        tolerated += ("starts with the assistant",)
    tokenized(rows_of("sft", file), check, tolerated)


@pytest.mark.parametrize("name", ["minimind", "phi3_mini"])
def test_tools_are_in_the_prompt_or_the_rows_are_refused(name):
    tokenizer = tokenizer_of(name)
    rows = rows_of("sft", "glaive_toolcall_en_150.json", rename=False)

    def make(row):
        chat = as_chat(row)
        assert chat["tools"] or "tools" in row
        return tokenize_messages(chat["messages"], tokenizer, tools=chat["tools"]), chat["tools"]

    if name == "phi3_mini":
        with_tools = [row for row in rows if as_chat(row)["tools"]]
        with pytest.raises(UserError, match="the chat template leaves out the tools"):
            convert(with_tools, make, "rows")
        return
    for sequence, tools in tokenized(rows, make):
        text = decode(sequence["input_ids"], tokenizer)
        assert all(tool.get("function", tool)["name"] in text for tool in tools or [])


@pytest.mark.parametrize("name, template", TOKENIZERS)
@pytest.mark.parametrize("file", files("dpo"))
def test_both_sides_of_a_pair_share_the_prompt_and_train_the_answer(file, name, template):
    tokenizer = tokenizer_of(name, template)

    def check(row):
        row = as_preference(row)
        pair = tokenize_pair(row["prompt"], row["chosen"], row["rejected"], tokenizer, 100_000)
        prompt = tokenize_prompt(row["prompt"], tokenizer)
        for side, sequence in zip(("chosen", "rejected"), pair, strict=True):
            assert sequence["input_ids"][: len(prompt)].tolist() == prompt
            answers = [m["content"].strip(BORDER) for m in row[side] if m["role"] == "assistant"]
            end = end_of_turn(tokenizer)
            assert [text.removesuffix(end).strip(BORDER) for text in trained(sequence, tokenizer)] == answers

    tokenized(rows_of("dpo", file), check, ("empty answer", "chosen equals rejected", "no shared prompt"))


@pytest.mark.parametrize("name, template", TOKENIZERS)
@pytest.mark.parametrize("file", files("grpo"))
def test_prompts_hold_the_question_and_the_header_of_the_answer(file, name, template):
    tokenizer = tokenizer_of(name, template)
    for row in rows_of("grpo", file):
        found = as_prompt(row)
        assert set(row) <= set(found)
        question = found["prompt"] if isinstance(found["prompt"], str) else found["prompt"][-1]["content"]
        text = decode(tokenize_prompt(found["prompt"], tokenizer), tokenizer)
        assert question in text
        assert text == question or not isinstance(found["prompt"], str)


def test_without_a_chat_template_the_first_chat_says_what_to_pass():
    tokenizer = tokenizer_of("gpt2")
    rows = rows_of("sft", "alpaca_5k.json")
    with pytest.raises(UserError, match=r"alpaca_5k.json row 1: the tokenizer has no chat template: pass --chat_template"):
        convert(rows, lambda row: tokenize_messages(as_chat(row)["messages"], tokenizer), "rows")


@pytest.mark.parametrize("name, marks", [("minimind", ["<|im_end|>"]), ("phi3_mini", ["<|end|>", "<|endoftext|>"])])
def test_the_stop_tokens_hold_the_end_of_turn_and_eos(name, marks):
    tokenizer = tokenizer_of(name)
    assert stop_token_ids(tokenizer, GenerationConfig()) == sorted(tokenizer.convert_tokens_to_ids(marks))


def test_phi3_shows_what_is_trained():
    tokenizer = tokenizer_of("phi3_mini")
    chat = [{"role": r, "content": c} for r, c in [("user", "q"), ("assistant", "a b"), ("user", "r"), ("assistant", "c")]]
    expected = "<|user|>q<|end|><|assistant|>[[a b<|end|>]]<|user|>r<|end|><|assistant|>[[c<|end|>]]<|endoftext|>"
    assert show_trained(tokenize_messages(chat, tokenizer), tokenizer) == expected


@pytest.mark.parametrize("name", ["minimind", "phi3_mini"])
def test_an_answer_that_spells_the_end_of_its_turn_does_not_end_it(name):
    tokenizer = tokenizer_of(name)
    end = end_of_turn(tokenizer)
    chat = [
        {"role": "user", "content": f"what is {end}?"},
        {"role": "assistant", "content": f"The token {end} ends it."},
    ]
    sequence = tokenize_messages(chat, tokenizer)
    assert trained(sequence, tokenizer) == [f"The token {end} ends it.{end}"]
    assert (sequence["input_ids"] == tokenizer.convert_tokens_to_ids(end)).sum() == 2


def test_two_thousand_short_chats_of_real_data_are_all_read():
    tokenizer = tokenizer_of("minimind")
    rows = load_rows(str(DATA / "sft" / "alpaca_5k.json"))
    sequences, _ = convert(rows[:2000], lambda row: tokenize_messages(as_chat(row)["messages"], tokenizer), "rows")
    assert len(sequences) > 1990
