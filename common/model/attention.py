"""Attention inside each sequence of a flat row: no padding between sequences, no mask over the row, no leak.

A flat row holds S sequences end to end, T tokens in all. The function here is registered with transformers' attention
interface under the name "flat", and the matching mask function says "no mask", so that nothing of size T x T is ever
made. Sequences of similar length are gathered into one right-padded bucket and go through PyTorch's SDPA together: under
a causal mask, padding on the right is never attended to by a real token, so the bucket needs no mask either. On a GPU, in
half precision, PyTorch's kernel for sequences of unequal length takes the place of the buckets.

Sequences that begin with the same tokens may share them: these stand in the row once. Such a row has F > T tokens when it
is written out, and `places` says which token of the row each of them is. Keys and values are gathered for each sequence in
full; the queries are what it has for itself, its last tokens, and such a bucket has a mask of its own.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common.memory import to_device

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # PyTorch before 2.10
    varlen_attn = None
# PyTorch before 2.12 has fewer key heads than query heads without being told.
VARLEN_IS_TOLD_GQA = varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters

FLAT = "flat"
SLACK = 0.8  # the shortest sequence of a bucket, as a share of the longest
STRIP, LONGEST_IN_STRIPS = 128, 640  # tokens: see _strips_pay
LEAST_ASKED = 0.5  # of a bucket's queries, how many are real where a start is shared
MOST_ASKING = 1024  # tokens that a sequence has for itself beside a shared start; with more, a mask would take too much room


@dataclass
class FlatRow:
    """How the tokens of a flat row are dealt out to sequences, and back."""

    buckets: list["Bucket"]
    inverse: Tensor | None  # (T,) int64: where each token of the row lies in the buckets' output; None: in order
    shared: bool  # whether a token of the row may lie in several sequences
    is_bucket: bool  # the row is its only bucket as it stands: sequences of equal length, nothing shared
    ragged: "Ragged | None" = None  # the same for a kernel that needs no buckets; None where there is none


@dataclass
class Bucket:
    """b sequences of similar length. Padding on the right repeats a sequence's last token."""

    keys: Tensor  # (b, L) int64: the token of the row at each place
    queries: Tensor  # (b, Lq) int64: the same of the last tokens of each sequence, which ask; `keys` itself where all ask
    first: Tensor | None = None  # (b,) int64: the place of the first token that asks; None: 0
    masks: dict[Any, Tensor] = field(default_factory=dict)  # each made once, for all layers of its kind

    def mask(self, window: int | None, dtype: torch.dtype, always: bool = False) -> Tensor | None:
        """(b or 1, 1, Lq, L): 0, or -inf where a token comes later or `window` or more before.

        None where causal attention will do and there need not always be one.
        """
        Lq, L = self.queries.shape[1], self.keys.shape[1]
        if self.first is None and (window is None or L <= window) and not always:
            return None
        if (window, dtype) not in self.masks:
            first = self.keys.new_zeros(1) if self.first is None else self.first
            column = torch.arange(L, device=first.device)
            asking = (first[:, None] + column[:Lq])[:, None, :, None]
            unseen = column > asking
            if window is not None:
                unseen |= column <= asking - window
            self.masks[window, dtype] = unseen.new_zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, -torch.inf)
        return self.masks[window, dtype]


@dataclass
class Ragged:
    """What each sequence has for itself in the row looks at all of the sequence, written out end to end: F tokens."""

    own: Tensor  # (S+1,) int32, borders in the row
    full: Tensor  # (S+1,) int32, borders of the sequences written out
    longest: tuple[int, int]  # of both
    places: Tensor | None  # (F,) int64: the token of the row at each place; None: nothing is shared, F = T


def plan_flat_row(lengths: Sequence[int], device: torch.device, places: np.ndarray | None = None) -> FlatRow:
    """Deal sequences of the given lengths into buckets of similar ones.

    places: (F,) int64, the token of the row that each token of the sequences is, end to end; None: nothing is shared.
    What a sequence has for itself are its last tokens, and lies in the row in the order of the sequences. Made once per
    row, on the CPU, and used by every layer.
    """
    lengths = np.asarray(lengths)
    ends = lengths.cumsum()
    first = None if places is None else first_places(places)
    own = lengths if first is None else np.diff(np.searchsorted(first, ends), prepend=0)
    asking = np.where(own <= MOST_ASKING, own, lengths)

    def dealt(index: np.ndarray) -> Tensor:
        return to_device(index if places is None else places[index], device)

    buckets, filled = [], 0
    inverse = np.empty(ends[-1], np.int64)  # of all F, first
    for group in _alike(lengths, asking):
        queries = _last(asking[group], ends[group])
        real = np.arange(queries.shape[1]) < asking[group, None]
        inverse[queries[real]] = filled + np.flatnonzero(real)
        filled += queries.size
        keys, before = dealt(_last(lengths[group], ends[group])), lengths[group] - asking[group]
        buckets.append(Bucket(keys, dealt(queries), to_device(before, device)) if before.any() else Bucket(keys, keys))
    inverse = inverse if first is None else inverse[first]

    ragged = None
    if _has_varlen(device):
        borders = (to_device(np.cumsum([0, *counts]).astype(np.int32), device) for counts in (own, lengths))
        longest = int(own.max()), int(lengths.max())
        ragged = Ragged(*borders, longest, None if places is None else to_device(places, device))
    in_order = filled == len(inverse) and bool((inverse == np.arange(filled)).all())
    is_bucket = in_order and len(buckets) == 1
    return FlatRow(buckets, None if in_order else to_device(inverse, device), places is not None, is_bucket, ragged)


def _alike(lengths: np.ndarray, asking: np.ndarray) -> list[list[int]]:
    """Sequences in groups of similar length, those in which all tokens ask apart from the others: longest first.

    Without those in which none asks: all that they are, others are, too.
    """
    groups: list[list[int]] = []
    order = np.lexsort((-lengths, asking < lengths))  # stable: equal lengths keep their order
    for s in order[asking[order] > 0].tolist():
        if groups and _fits(s, groups[-1], lengths, asking):
            groups[-1].append(s)
        else:
            groups.append([s])
    return groups


def _fits(s: int, group: list[int], lengths: np.ndarray, asking: np.ndarray) -> bool:
    longest, together = group[0], asking[[*group, s]]
    alike = (asking[s] < lengths[s]) == (asking[longest] < lengths[longest]) and lengths[s] >= SLACK * lengths[longest]
    return alike and together.mean() >= LEAST_ASKED * together.max()


def _last(counts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The last `counts` tokens of sequences that end before `ends`, (b, the largest count); their last one as padding."""
    return np.minimum((ends - counts)[:, None] + np.arange(counts.max()), ends[:, None] - 1)


def first_places(places: np.ndarray) -> np.ndarray:
    """Where each token of the row comes first among the sequences written out end to end: (F,) -> (T,)."""
    first = np.empty(places.max() + 1, np.int64)
    first[places[::-1]] = np.arange(len(places))[::-1]  # the last one written stays
    return first


def flat_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    flat_row: FlatRow | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence. query (1, H, T, Dh), key and value (1, Hkv, T, Dh) -> (1, T, H, Dh).

    Raises RuntimeError where the model asks for what SDPA cannot do (soft-capping, attention sinks), or where the row's
    plan did not reach the layer: without it sequences would see each other.
    """
    if flat_row is None or attention_mask is not None:
        raise RuntimeError("flat attention needs flat_row and no attention_mask")
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise RuntimeError("flat attention has no soft-capping and no attention sinks")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, H, Dh)
    if flat_row.ragged is not None and dropout == 0 and (dtype := _varlen_dtype(v)) is not None:
        return _ragged_attention(*(x.to(dtype) for x in (q, k, v)), flat_row.ragged, scaling, sliding_window)[None], None
    settings = {"scale": scaling, "dropout": dropout, "window": sliding_window}
    if flat_row.is_bucket:
        return _sdpa(q, k, v, flat_row.buckets[0], **settings)[None], None
    return _bucket_attention(q, k, v, flat_row, settings)[None], None


@torch.compiler.disable  # the number of buckets differs from row to row: each number would be compiled by itself
def _bucket_attention(q: Tensor, k: Tensor, v: Tensor, row: FlatRow, settings: dict[str, Any]) -> Tensor:
    """(T, H, Dh), (T, Hkv, Dh) twice -> (T, H, Dh), by one bucket after another."""
    queries, places = [bucket.queries for bucket in row.buckets], [bucket.keys for bucket in row.buckets]
    dealt = [_Deal.apply(q, queries, row.inverse, False)] + [_Deal.apply(x, places, row.inverse, row.shared) for x in (k, v)]
    outputs = [_sdpa(*rows, bucket, **settings) for bucket, *rows in zip(row.buckets, *dealt, strict=True)]
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if row.inverse is None else out.index_select(0, row.inverse)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, bucket: Bucket, *, scale: float | None, dropout: float, window: int | None
) -> Tensor:
    """The sequences of a bucket: (b Lq, H, Dh), (b L, Hkv, Dh) twice -> (b Lq, H, Dh)."""
    b, T, H = len(bucket.keys), *q.shape[:2]
    attend = partial(F.scaled_dot_product_attention, dropout_p=dropout, scale=scale, enable_gqa=H != k.shape[1])
    q, k, v = (x.view(b, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))  # (b, H, Lq or L, Dh)
    mask = bucket.mask(window, v.dtype)
    if mask is None and _strips_pay(q):
        mask = bucket.mask(window, v.dtype, always=True)
        strips = [(slice(at, at + STRIP), slice(at + STRIP)) for at in range(0, q.shape[2], STRIP)]
        outputs = [attend(q[:, :, own], k[:, :, seen], v[:, :, seen], mask[:, :, own, seen]) for own, seen in strips]
        out = torch.cat([output.transpose(1, 2) for output in outputs], 1)
    else:
        out = attend(q, k, v, mask, is_causal=mask is None).transpose(1, 2)
    return out.reshape(T, H, -1)


def _strips_pay(q: Tensor) -> bool:
    """Whether queries (b, H, L, Dh) go faster strip by strip, each with the keys up to its end.

    The CPU's kernel skips what is masked in blocks of 512 keys only: of shorter sequences nothing.
    """
    plain = q.device.type == "cpu" and q.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return plain and 2 * STRIP <= q.shape[2] <= LONGEST_IN_STRIPS and not torch.compiler.is_compiling()


class _Deal(torch.autograd.Function):
    """The row (T, ...) -> for each bucket its tokens (b L, ...), padding included.

    No real token attends to the padding, whose own output is dropped: its gradient is 0. So where no token counts in two
    places, the gradient is gathered, in place of being added to zeros bucket by bucket. Of the queries none does: one
    place's output is kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, buckets: list[Tensor], inverse: Tensor | None, several: bool) -> tuple[Tensor, ...]:
        """buckets: the token at each place. inverse (T,): the place of each token. several: it may have others."""
        ctx.buckets, ctx.inverse, ctx.several, ctx.T = buckets, inverse, several, len(x)
        return tuple(x.index_select(0, index.view(-1)) for index in buckets)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
        if ctx.several:
            index = torch.cat([index.view(-1) for index in ctx.buckets])
            gradient = gradient.new_zeros(ctx.T, *gradient.shape[1:]).index_add_(0, index, gradient)
        elif ctx.inverse is not None:
            gradient = gradient.index_select(0, ctx.inverse)
        return gradient, None, None, None


def _ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, row: Ragged, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """(T, H, Dh), (T, Hkv, Dh) twice -> (T, H, Dh), by the kernel for sequences of unequal length.

    Where there are fewer queries than keys, it takes them for the last ones of the sequence. So a token of a shared start is
    a query once only.
    """
    if row.places is not None:
        k, v = k[row.places], v[row.places]
    window = (-1 if sliding_window is None else sliding_window - 1, 0)  # tokens seen before and after each one; -1: all
    told = {"enable_gqa": q.shape[1] != k.shape[1]} if VARLEN_IS_TOLD_GQA else {}
    return varlen_attn(q, k, v, row.own, row.full, *row.longest, scale=scaling, window_size=window, **told)


def _has_varlen(device: torch.device) -> bool:
    return varlen_attn is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _varlen_dtype(value: Tensor) -> torch.dtype | None:
    """What the kernel would compute in; None where it cannot: it knows 16 bits and heads of up to 192 in steps of 8."""
    device = value.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) and value.shape[-1] in range(8, 193, 8) else None


def _no_mask(*args: object, **kwargs: object) -> None:
    return None


AttentionInterface.register(FLAT, flat_attention)
AttentionMaskInterface.register(FLAT, _no_mask)
