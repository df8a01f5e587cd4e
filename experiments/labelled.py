"""Chats labelled good or bad (KTO): a chat with a prompt, as read by formats.py, plus a label column; and
mismatched pairs of prompts and answers."""

from typing import Any

from common.data.formats import Columns, as_chat
from common.data.types import BadRow, Example, Sequence, may_reject
import numpy as np

LABELS = ("label", "kto_tag")  # true for a good answer; kto_tag is LLaMA-Factory's name
TEXTS = {"true": True, "false": False, "1": True, "0": False}  # labels in tables, which hold only text


@may_reject
def as_labelled(columns: Columns) -> dict[str, Any]:
    """The result of as_chat plus "label": true for a good answer, false for a bad one; for messages also
    "prompt_turns".

    Raises BadRow for a row of no known format, or an unusable one.
    """
    label = next((columns[name] for name in LABELS if columns.get(name) is not None), None)
    if label is None:
        raise BadRow(
            f"no column label (true: a good answer, false: a bad one); found {', '.join(columns)} "
            "(of a pair, make two rows: prompt, completion, label)"
        )
    label = TEXTS.get(label.strip().lower(), label) if isinstance(label, str) else label
    if label not in (True, False):  # true of 1 and 0 as well
        raise BadRow(f"label is {str(label)[:20]!r}; expected true or false")
    chat = as_chat({name: value for name, value in columns.items() if name not in LABELS})
    if "text" in chat:
        raise BadRow(f"a label needs prompt + completion, or a chat; found columns {', '.join(columns)}")
    if "messages" in chat:  # without a marked prompt, the last turn is the answer
        chat.setdefault("prompt_turns", len(chat["messages"]) - 1)
    return chat | {"label": bool(label)}


def mismatched(rows: list[Sequence], max_length: int) -> list[Example]:
    """Each prompt with the answer of the next row, at most max_length tokens, as examples of one sequence."""
    n = [int(row["loss_mask"].argmax()) for row in rows]  # prompt lengths in tokens

    def join(i: int, field: str) -> np.ndarray:
        return np.concatenate([rows[i - 1][field][: n[i - 1]], rows[i][field][n[i] :]])[:max_length]

    return [[{field: join(i, field) for field in ("input_ids", "loss_mask")}] for i in range(len(rows))]
