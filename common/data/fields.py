"""The fields of a sequence: checked as a script's `encode` returns them, and the same throughout a dataset.

Besides input_ids and loss_mask a sequence may have fields of any name: arrays with a number per token, or single numbers.
"""

from typing import Any, NamedTuple

from common.data.types import Sequence
from common.errors import UserError

import numpy as np


class Field(NamedTuple):
    """The type of a field, the same for all its values."""

    per_token: bool  # else one number per sequence
    dtype: str  # int64 or float32

    def __str__(self) -> str:
        kind = "whole numbers" if self.dtype == "int64" else "floats"
        return f"{kind}, one for each {'token' if self.per_token else 'sequence'}"


def as_field(name: str, value: Any) -> np.ndarray:
    """A value as int64 or float32, of the same shape. Raises UserError if it is not numeric, or not finite."""
    if hasattr(value, "detach"):  # a tensor; numpy has no bfloat16
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise UserError(f"the field {name} is {_shown(value)}; expected whole numbers that fit in int64")
    if array.dtype.kind in "bui":
        return array.astype(np.int64)
    if array.dtype.kind != "f":
        raise UserError(f"the field {name} is {_shown(value)}; expected a number, or an array with one for each token")
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    if not np.isfinite(array).all():
        raise UserError(f"the field {name} is {_shown(value)}; expected finite numbers")
    return array


def check_sequence(sequence: Any, largest_id: int) -> Sequence:
    """A sequence returned by `encode`, as arrays: ids and mask unchanged, other fields as int64 or float32.

    largest_id: the largest id that can be stored. Raises UserError, naming the field, for a sequence that cannot be trained
    on.
    """
    if not isinstance(sequence, dict) or not {"input_ids", "loss_mask"} <= sequence.keys():
        raise UserError(f"encode gave {_shown(sequence)}; expected sequences {{input_ids, loss_mask, ...}}, or a text")
    ids, mask = np.asarray(sequence["input_ids"]), np.asarray(sequence["loss_mask"])
    if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "ui" or ids.min() < 0 or ids.max() > largest_id:
        raise UserError(f"input_ids is {_shown(sequence['input_ids'])}; expected an array of token ids, 0 to {largest_id}")
    if mask.shape != ids.shape or mask.dtype.kind not in "bui" or mask.min() < 0 or mask.max() > 1:
        raise UserError(f"loss_mask is {_shown(sequence['loss_mask'])}; expected 0 or 1 for each of {len(ids)} tokens")
    checked: Sequence = {"input_ids": ids, "loss_mask": mask}
    for name, value in sequence.items():
        if name not in checked:
            array = as_field(name, value)
            if array.ndim > 1 or (array.ndim == 1 and len(array) != len(ids)):
                shape = " x ".join(map(str, array.shape))
                raise UserError(f"the field {name} has {shape} values; expected one for each of {len(ids)} tokens, or one")
            checked[name] = array
    return checked


def fields_of(sequence: Sequence) -> dict[str, Field]:
    """The fields of a checked sequence other than ids and mask."""
    return {
        name: Field(value.ndim == 1, str(value.dtype))
        for name, value in sequence.items()
        if name not in ("input_ids", "loss_mask")
    }


def require_fields(found: dict[str, Field], expected: dict[str, Field], where: str, first: str) -> None:
    """Raise UserError if the fields found at `where` differ from those expected since `first`."""
    if found == expected:
        return
    name = next(name for name in [*expected, *found] if found.get(name) != expected.get(name))
    has, had = (f"{fields[name]}" if name in fields else "none" for fields in (found, expected))
    same = "sequences have the same fields (float(...) makes floats of whole numbers)"
    raise UserError(f"{where}: the field {name}: {has}; expected {had}, as in {first}: {same}")


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 60 else f"{text[:57]}..."
