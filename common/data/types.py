"""The types that all of the data wing speaks of: a row, a sequence of tokens, an example."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Tokenizer = PreTrainedTokenizerBase
else:
    Tokenizer = Any

Message = dict[str, Any]  # {"role", "content", ...}: a turn of a chat
# One text as tokens: `input_ids` (n,) and `loss_mask` (n,), 1 where trained; and further fields by any name, which arrive in
# the batch: an array of n numbers is a field per token, a number a field per sequence.
Sequence = dict[str, np.ndarray | float | int]
# What stays together: the sequence of a conversation, the chosen and rejected answer of a pair, all sequences of a pack.
Example = list[Sequence]


class Row(dict[str, Any]):
    """The columns of a row of a dataset, where it comes from, and the format that its source was recognised as."""

    def __init__(self, columns: dict[str, Any], where: str = "", format: str | None = None):
        """where: for the user, like "chats.jsonl:12". format: see formats.py."""
        super().__init__(columns)
        self.where, self.format = where, format


class BadRow(Exception):
    """This one row cannot be used; the message is the reason under which it is counted."""


def whole(ids: np.ndarray) -> Sequence:
    """A sequence of which every token is trained."""
    return {"input_ids": ids, "loss_mask": np.ones(len(ids), np.int64)}
