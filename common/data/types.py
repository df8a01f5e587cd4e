"""The types used throughout the data wing: a row, a sequence of tokens, an example."""

from collections.abc import Callable, Iterator
import functools
from typing import Any, TypeVar

from common.errors import UserError
import numpy as np

Tokenizer = Any  # a transformers.PreTrainedTokenizerBase: importing that takes seconds
Function = TypeVar("Function", bound=Callable[..., Any])
Message = dict[str, Any]  # {"role", "content", ...}: a turn of a chat
# One text as tokens: `input_ids` (n,) and `loss_mask` (n,), 1 where trained; and further fields of any name,
# which reach the batch: an array of n numbers is a per-token field, a single number a per-sequence field.
Sequence = dict[str, np.ndarray | float | int]
# Sequences that stay together: that of a conversation, the chosen and rejected answers of a pair, all those
# of a pack.
Example = list[Sequence]
# Names of a batch's own fields (collators.flat_batch): no field of a sequence may have one of them.
RESERVED = ("position_ids", "cu_seqlens", "targets", "previous", "sequence_mask", "lengths", "token_map")


# Names of one thing: each template reads its own (Cohere's tool_plan).
REASONING = ("reasoning_content", "thinking", "reasoning", "tool_plan")
# Remarks about the row that is being tokenised: encode.py counts them, and empties the set.
notes: set[str] = set()


class Row(dict[str, Any]):
    """The columns of a dataset row, and its origin. It records in `read` which columns were looked at."""

    def __init__(self, columns: dict[str, Any], where: str = "", problem: str | None = None):
        """where: shown to the user, like "chats.jsonl:12". problem: why it could not be read."""
        super().__init__(columns)
        self.where = where
        self.problem = problem
        self.read: set[str] = set()
        self.lacks: list[str] = []  # columns that --columns would rename

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def __iter__(self) -> Iterator[str]:  # so that dict(row) and {**row} look at all columns
        return super().__iter__()

    def items(self) -> Any:
        return dict(self).items()

    def __or__(self, other: dict[str, Any]) -> dict[str, Any]:
        return dict(self) | other


class BadRow(Exception):
    """This one row cannot be used; it is counted under the message."""


def may_reject(function: Function) -> Function:
    """For functions of a row's content: whatever fails there (half a surrogate, a list where an object should
    be, too deep a nesting) is a BadRow, with the error's own message."""

    @functools.wraps(function)
    def called(*values: Any, **options: Any) -> Any:
        try:
            return function(*values, **options)
        except (UserError, BadRow, MemoryError):
            raise
        except Exception as error:
            raise BadRow(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error

    return called


@may_reject
def valid_text(text: str) -> str:
    """The text. Raises BadRow for half of a surrogate pair, which JSON can hold and no tokenizer accepts."""
    text.encode()
    return text


def without_nulls(value: Any) -> Any:
    """A value whose objects lack the keys that are None: a table gives each of them the keys that any of them
    has."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def all_trained(ids: np.ndarray) -> Sequence:
    """A sequence with every token trained."""
    return {"input_ids": ids, "loss_mask": np.ones(len(ids), np.int64)}
