"""Attention inside each sequence of a flat row: no padding between sequences, no mask, no leak.

A flat row holds S sequences end to end, T tokens in all. The function here is registered with transformers' attention
interface under the name "flat", and the matching mask function says "no mask", so that nothing of size T x T is ever
made. Sequences of similar length are gathered into one right-padded bucket and go through PyTorch's SDPA together: under
a causal mask, padding on the right is never attended to by a real token, so the bucket needs no mask either. On a GPU, in
half precision, PyTorch's kernel for sequences of unequal length takes the place of the buckets.

Sequences that begin with the same tokens may share them: these stand in the row once, and only the gathering here sees
each sequence in full. Such a row has F > T tokens when it is written out, and `places` says which token of the row each
of them is.
"""

import inspect
from dataclasses import dataclass
from typing import Any

from common.device import on_device

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


@dataclass
class FlatRow:
    """How the tokens of a flat row are dealt out to sequences, and back."""

    buckets: list[Tensor]  # (b, L) int64 each: the token of the row at each place; padding repeats the sequence's last
    inverse: Tensor | None  # (T,) int64: where each token of the row lies in the buckets' output; None: in order
    shared: bool = False  # whether a token of the row may lie in several places
    ragged: "Ragged | None" = None  # the same for a kernel that needs no buckets; None where there is none


@dataclass
class Ragged:
    """What each sequence has for itself in the row looks at all of the sequence, written out end to end: F tokens."""

    own: Tensor  # (S+1,) int32, borders in the row
    full: Tensor  # (S+1,) int32, borders of the sequences written out
    longest: tuple[int, int]  # of both
    places: Tensor | None  # (F,) int64: the token of the row at each place; None: nothing is shared, F = T


def plan_flat_row(lengths: list[int], device: torch.device, places: np.ndarray | None = None, slack: float = 0.8) -> FlatRow:
    """Deal sequences of the given lengths into buckets in which the shortest has at least `slack` of the longest.

    places: (F,) int64, the token of the row that each token of the sequences is, end to end; None: nothing is shared.
    What a sequence has for itself are its last tokens, and lies in the row in the order of the sequences. Made once per row, on the CPU, and used by every layer.
    """
    ends = np.cumsum(lengths)
    groups: list[list[int]] = []
    for s in sorted(range(len(lengths)), key=lambda s: -lengths[s]):  # stable: equal lengths keep their order
        if groups and lengths[s] >= slack * lengths[groups[-1][0]]:
            groups[-1].append(s)
        else:
            groups.append([s])

    buckets, filled = [], 0
    inverse = np.empty(ends[-1], np.int64)  # of all F, first
    for group in groups:
        column, last = np.arange(lengths[group[0]]), ends[group][:, None] - 1
        index = last + 1 - np.array([lengths[s] for s in group])[:, None] + column
        real = index <= last
        index = np.minimum(index, last)
        inverse[index[real]] = filled + np.flatnonzero(real)
        filled += index.size
        buckets.append(index if places is None else places[index])
    first = None if places is None else first_places(places)
    if first is not None:
        inverse = inverse[first]

    ragged = None
    if _has_varlen(device):
        own = lengths if places is None else np.diff(np.searchsorted(first, ends), prepend=0)
        borders = (on_device(np.cumsum([0, *counts]).astype(np.int32), device) for counts in (own, lengths))
        there = None if places is None else on_device(places, device)
        ragged = Ragged(*borders, (int(max(own)), max(lengths)), there)
    in_order = filled == len(inverse) and bool((inverse == np.arange(filled)).all())
    buckets = [on_device(index, device) for index in buckets]
    return FlatRow(buckets, None if in_order else on_device(inverse, device), places is not None, ragged)


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
    if flat_row.inverse is None and len(flat_row.buckets) == 1:  # sequences of equal length, in order
        return _sdpa(q, k, v, *flat_row.buckets[0].shape, **settings)[None], None
    return _bucket_attention(q, k, v, flat_row, settings)[None], None


@torch.compiler.disable  # the number of buckets differs from row to row: each number would be compiled by itself
def _bucket_attention(q: Tensor, k: Tensor, v: Tensor, row: FlatRow, settings: dict[str, Any]) -> Tensor:
    """(T, H, Dh), (T, Hkv, Dh) twice -> (T, H, Dh), by one bucket after another."""
    dealt = [_Deal.apply(x, row) for x in (q, k, v)]
    outputs = [_sdpa(*rows, *index.shape, **settings) for index, *rows in zip(row.buckets, *dealt, strict=True)]
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if row.inverse is None else out.index_select(0, row.inverse)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, b: int, L: int, *, scale: float | None, dropout: float, window: int | None
) -> Tensor:
    """b sequences of L tokens: (b L, H, Dh), (b L, Hkv, Dh) twice -> (b L, H, Dh)."""
    rows = (x.view(b, L, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))  # (b, H, L, Dh)
    mask = _band(L, window, q.device) if window is not None and L > window else None
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(*rows, mask, dropout, is_causal=mask is None, scale=scale, enable_gqa=gqa)
    return out.transpose(1, 2).reshape(b * L, q.shape[1], -1)


class _Deal(torch.autograd.Function):
    """The row (T, ...) -> for each bucket its tokens (b L, ...), padding included.

    No real token attends to the padding, whose own output is dropped: its gradient is 0. So where no token lies in two
    places, the gradient is gathered, in place of being added to zeros bucket by bucket.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: FlatRow) -> tuple[Tensor, ...]:
        ctx.row, ctx.T = row, len(x)
        return tuple(x.index_select(0, index.view(-1)) for index in row.buckets)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        row, gradient = ctx.row, gradients[0] if len(gradients) == 1 else torch.cat(gradients)
        if row.shared:
            index = torch.cat([index.view(-1) for index in row.buckets])
            return gradient.new_zeros(ctx.T, *gradient.shape[1:]).index_add_(0, index, gradient), None
        return gradient if row.inverse is None else gradient.index_select(0, row.inverse), None


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


def _band(L: int, window: int, device: torch.device) -> Tensor:
    """(L, L) bool: each token sees itself and the window - 1 before it."""
    distance = torch.arange(L, device=device)[:, None] - torch.arange(L, device=device)[None, :]
    return (distance >= 0) & (distance < window)


def _no_mask(*args: object, **kwargs: object) -> None:
    return None


AttentionInterface.register(FLAT, flat_attention)
AttentionMaskInterface.register(FLAT, _no_mask)
