"""Texts, chats and pairs for the tests of the scripts, and their tokens by the tokenizer of
data/base_model."""

from functools import cache
from typing import Any

from transformers import AutoTokenizer

from tests.conftest import ROOT

BASE = str(ROOT / "data" / "base_model")
END = "<|im_end|>"  # of a turn, in its template


@cache
def tokenizer() -> Any:
    """The tokenizer of data/base_model: 512 tokens, byte-level, with a chat template."""
    return AutoTokenizer.from_pretrained(BASE)


def ids_of(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False).input_ids


def chat(*texts: str, system: str = "") -> list[dict[str, str]]:
    """Turns of a user and an assistant."""
    before = [{"role": "system", "content": system}] if system else []
    return before + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def prompt_ids(prompt: str | list[dict[str, str]]) -> list[int]:
    """A text, or a chat up to where the assistant answers."""
    if isinstance(prompt, str):
        return ids_of(prompt)
    return ids_of(tokenizer().apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))


# Chosen and rejected differ in length, now the one is longer and now the other; prompts of one turn and of
# several.
PAIRS = [  # turns of the prompt, chosen answer, rejected one
    (["What is 11-9+2?"], "Sure! 11-9=2. 2+2=4. Answer: 4", "Answer: 4"),
    (
        ["Zoe has 4 figs. She finds 6. She eats 3. So how many figs?"],
        "Answer: 7",
        "4+6=12. 12-3=9. I think. Answer: 9",
    ),
    (["Hi", "Hello!", "What is 5+5?"], "Sure! Answer: 10", "People ask me so much. That is fun. Answer: 11"),
    (["How much is 15-6-4?"], "15-6=9. 9-4=5. So it is 5, as you can see. Answer: 5", "No."),
]
HELD_OUT_PAIRS = [
    (["What is 3+4?"], "Sure! 3+4=7. Answer: 7", "8"),
    (
        ["Max has 9 cards. He buys 5. How many cards now?"],
        "14",
        "9+5=13. Then he sells some of them. Answer: 13",
    ),
    (["Hi"], "Hello! How are you?", "What?"),
]


def pair_rows(pairs: list[tuple[list[str], str, str]]) -> list[dict[str, Any]]:
    return [{"prompt": chat(*p), "chosen": chat("", c)[1:], "rejected": chat("", r)[1:]} for p, c, r in pairs]
