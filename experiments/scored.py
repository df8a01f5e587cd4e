"""Texts with scores: the part of a text that a classifier reads, and numbers in the columns of a row."""

import re

from common.data.formats import Columns
from common.data.types import BadRow, Sequence, Tokenizer
import numpy as np

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
LARGEST = 1e15  # largest absolute value: its square is finite in float32


def number_of(columns: Columns, name: str, default: float | None = None) -> float:
    """The number in a column, which may be written as text (as in tables). default: for a missing or null
    column, or an empty text. Raises BadRow for anything else."""
    value = columns[name] if columns.get(name) not in (None, "") else default
    if value is None:
        raise BadRow(f"no number in the column {name}")
    if isinstance(value, str) and NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise BadRow(f"{name} is {str(value)[:20]!r}; expected a number (of at most {LARGEST:g} in size)")
    return float(value)


def up_to_the_score(sequence: Sequence, tokenizer: Tokenizer, max_length: int, plain_text: bool) -> Sequence:
    """A sequence up to the token whose hidden state a transformers classifier scores, with a loss_mask of 1
    there.

    That is the last token that is not padding, which may be the same token as the end of a turn. plain_text:
    remove the end-of-text token, as nobody adds one for a classifier. Raises BadRow for more than max_length
    tokens, as the end would be lost.
    """
    ids, passed_over = (
        sequence["input_ids"],
        [tokenizer.pad_token_id, tokenizer.eos_token_id if plain_text else None],
    )
    n = len(ids)
    while n > 1 and ids[n - 1] in passed_over:
        n -= 1
    if n > max_length:
        raise BadRow(f"more than max_length {max_length} tokens")
    return sequence | {"input_ids": ids[:n], "loss_mask": (np.arange(n) == n - 1).astype(np.int64)}
