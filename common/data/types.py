"""The types used throughout the data wing: a row, a sequence of tokens, an example."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Tokenizer = PreTrainedTokenizerBase
else:
    Tokenizer = Any

Message = dict[str, Any]  # {"role", "content", ...}: a turn of a chat
# One text as tokens: `input_ids` (n,) and `loss_mask` (n,), 1 where trained; and further fields of any name, which reach
# the batch: an array of n numbers is a per-token field, a single number a per-sequence field.
Sequence = dict[str, np.ndarray | float | int]
# Sequences that stay together: that of a conversation, the chosen and rejected answers of a pair, all those of a pack.
Example = list[Sequence]


class Row(dict[str, Any]):
    """The columns of a dataset row, its origin, and the format recognised for its source."""

    def __init__(self, columns: dict[str, Any], where: str = "", format: str | None = None):
        """where: shown to the user, like "chats.jsonl:12". format: see formats.py."""
        super().__init__(columns)
        self.where, self.format = where, format


class BadRow(Exception):
    """This one row cannot be used; it is counted under the message."""


def whole(ids: np.ndarray) -> Sequence:
    """A sequence with every token trained."""
    return {"input_ids": ids, "loss_mask": np.ones(len(ids), np.int64)}
