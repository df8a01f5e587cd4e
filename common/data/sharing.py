"""Prefix sharing: neighbours in a flat row that begin with the same tokens have one copy of them.

These counts decide how long a row is (`encode.py`), and how it is laid out (`collators.py`).
"""

from collections.abc import Sequence as Listing
import itertools

from common.data.types import Sequence
import numpy as np

LEAST_SHARED = 8  # tokens: sharing a shorter prefix costs about what it saves


def shared_starts(sequences: Listing[Sequence]) -> list[int]:
    """How many tokens each sequence of a row shares with the one before it."""
    counts = [0]
    for before, sequence in itertools.pairwise(sequences):
        counts.append(shared_start(before, sequence))
    return counts


def shared_start(one: Sequence, other: Sequence) -> int:
    """The number of untrained tokens at the start of `other` that it shares with its neighbour; 0 if sharing
    does not pay.

    A script's own field that is not 0 on a token, in either sequence, may use that token differently in each;
    and in a sequence without a trained token the last one may be read. Such tokens are not shared.
    """
    a = one["input_ids"]
    b = other["input_ids"]
    mask = other["loss_mask"]
    n = min(len(a), len(b))
    # Most neighbours differ early: comparing one token spares them the comparison of whole arrays.
    if n < LEAST_SHARED or a[LEAST_SHARED - 1] != b[LEAST_SHARED - 1] or not mask.any():
        return 0
    differs = (a[:n] != b[:n]) | (mask[:n] != 0)
    for name, values in other.items():
        if np.ndim(values) and name not in ("input_ids", "loss_mask"):
            differs |= (one[name][:n] != 0) | (values[:n] != 0)
    if differs.any():
        n = int(differs.argmax())
    return n if n >= LEAST_SHARED else 0
