"""Texts that get a number: what a classifier reads of a text, and numbers in the columns of a row."""

import re

from common.data.formats import Columns
from common.data.types import BadRow, Sequence, Tokenizer

import numpy as np

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
LARGEST = 1e15  # in size: its square is a number in float32


def number_of(columns: Columns, name: str, default: float | None = None) -> float:
    """The number in a column, which may be written as text (tables have nothing else). default: where it is not there, null
    or an empty text. Raises BadRow for anything else."""
    value = columns[name] if columns.get(name) not in (None, "") else default
    if value is None:
        raise BadRow(f"no number in the column {name}")
    if isinstance(value, str) and NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise BadRow(f"{name} is {str(value)[:20]!r}; expected a number (of at most {LARGEST:g} in size)")
    return float(value)


def up_to_the_score(sequence: Sequence, tokenizer: Tokenizer, max_length: int, plain_text: bool) -> Sequence:
    """A sequence up to the token on whose state a classifier of transformers puts its head, with a loss_mask of 1 there.

    That is the last token which is not padding, and may be the same as the end of a turn. plain_text: without the end of
    text, which nobody writes before a classifier. Raises BadRow for more than max_length tokens, whose end would be lost.
    """
    ids, passed_over = sequence["input_ids"], [tokenizer.pad_token_id, tokenizer.eos_token_id if plain_text else None]
    n = len(ids)
    while n > 1 and ids[n - 1] in passed_over:
        n -= 1
    if n > max_length:
        raise BadRow(f"more than max_length {max_length} tokens")
    return sequence | {"input_ids": ids[:n], "loss_mask": (np.arange(n) == n - 1).astype(np.int64)}
