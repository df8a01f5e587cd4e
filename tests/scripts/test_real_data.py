"""Real data with real tokenizers: every file is read by its stage, and what is trained is decoded and
compared.

Needs a folder with data and tokenizers beside the repository, or named by TESTS_DATA; skipped without it.
"""

from functools import cache
import os
from pathlib import Path

from common.args import CommonArgs
from common.data.chat import ends_of_turns
from common.data.formats import as_chat, as_preference
from common.data.sources import Source, load_rows
from common.data.tokens import tokenize_messages, tokenize_pair, tokenize_prompt
from common.data.types import BadRow
from common.model.load import load_tokenizer
import numpy as np
import pytest

pytestmark = pytest.mark.slow

DATA = Path(os.environ.get("TESTS_DATA", Path(__file__).parents[3] / "shared" / "data"))
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
def rows_of(stage: str, name: str) -> list:
    return load_rows(Source(str(DATA / stage / name), columns=tuple(RENAMES.get(name, ()))))[:ROWS]


@cache
def tokenizer_of(name: str, template: str | None = None):
    return load_tokenizer(CommonArgs(chat_template=template), DATA / "tokenizers" / name)


def assert_trained(sequences, turns, tokenizer):
    """Each answer and its end, and nothing else."""
    parts = []
    for sequence in sequences:
        mask = sequence["loss_mask"].astype(bool)
        stretches = np.split(np.arange(len(mask)), np.flatnonzero(np.diff(mask)) + 1)
        parts += [sequence["input_ids"][stretch] for stretch in stretches if mask[stretch[0]]]
    texts = [
        tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) for ids in parts
    ]
    end = ends_of_turns(tokenizer)[0]
    assert all(text.endswith(end) for text in texts)
    for text, turn in zip(texts, [turn for turn in turns if turn["role"] == "assistant"], strict=True):
        said, calls = text.removesuffix(end).strip(BORDER), turn.get("tool_calls", [])
        assert calls[0]["function"]["name"] in said if calls else said == turn["content"].strip(BORDER)


def check_rows(rows, check, tolerated):
    """check(row) of each; what it refuses must be refused for one of the tolerated reasons."""
    refused = 0
    for row in rows:
        try:
            check(row)
        except BadRow as reason:
            assert any(known in str(reason) for known in tolerated), f"{row.where}: {reason}"
            refused += 1
    assert refused < len(rows)


@pytest.mark.parametrize("name, template", TOKENIZERS)
@pytest.mark.parametrize("file", files("sft"))
def test_what_is_trained_in_a_chat_is_every_answer_and_its_end(file, name, template):
    tokenizer = tokenizer_of(name, template)

    def check(row):
        chat = as_chat(row)
        messages, tools = chat["messages"], chat.get("tools")
        sequences = tokenize_messages(messages, tokenizer, tools=tools)
        assert_trained(sequences, messages, tokenizer)
        prompts = []
        for sequence in sequences:
            mask, ids = sequence["loss_mask"], sequence["input_ids"].tolist()
            prompts += [ids[:i] for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        assert prompts == [tokenize_prompt(messages[:i], tokenizer, tools) for i in answers]

    # Templates without tool calls, and the few rows with an empty answer.
    tolerated = (
        "empty output",
        "empty answer",
        "refuses it" if name == "minimind" else "no place for tool",
    )
    check_rows(rows_of("sft", file), check, tolerated)


@pytest.mark.parametrize("name, template", TOKENIZERS)
@pytest.mark.parametrize("file", files("dpo"))
def test_both_sides_of_a_pair_share_the_prompt_and_train_the_answer(file, name, template):
    tokenizer = tokenizer_of(name, template)

    def check(row):
        row = as_preference(row)
        pair = tokenize_pair(row, tokenizer, 100_000)
        prompt = tokenize_prompt(row["prompt"], tokenizer)
        for side, sequence in zip(("chosen", "rejected"), pair, strict=True):
            assert sequence["input_ids"][: len(prompt)].tolist() == prompt
            assert_trained([sequence], row[side], tokenizer)

    check_rows(rows_of("dpo", file), check, ("empty answer", "chosen equals rejected", "no shared prompt"))
