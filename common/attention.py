"""Attention inside each sequence of a flat row: no padding between sequences, no mask, no leak.

A flat row holds S sequences end to end, T tokens in all. The function here is registered with transformers' attention
interface under the name "flat", and the matching mask function says "no mask", so that nothing of size T x T is ever
made. Sequences of similar length are gathered into one right-padded bucket and go through PyTorch's SDPA together: under
a causal mask, padding on the right is never attended to by a real token, so the bucket needs no mask either.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

FLAT = "flat"


@dataclass
class Bucket:
    index: Tensor  # (b, L) int64: the token of the flat row at each place; padding repeats the sequence's last token
    real: Tensor | None  # (n,) int64: which of the b*L places are real; None where all are


@dataclass
class FlatRow:
    """How the tokens of a flat row are dealt out to buckets, and back."""

    buckets: list[Bucket]
    inverse: Tensor | None  # (T,) int64: where each token of the row lies in the buckets' output; None: in order


def plan_flat_row(lengths: list[int], device: torch.device, slack: float = 0.8) -> FlatRow:
    """Deal sequences of the given lengths into buckets in which the shortest has at least `slack` of the longest.

    Pure Python over S sequences, made once per row and used by every layer.
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    order = sorted(range(len(lengths)), key=lambda s: -lengths[s])  # stable: equal lengths keep their order
    groups: list[list[int]] = []
    for s in order:
        if groups and lengths[s] >= slack * lengths[groups[-1][0]]:
            groups[-1].append(s)
        else:
            groups.append([s])

    buckets, places = [], []
    for group in groups:
        length = torch.tensor([lengths[s] for s in group])[:, None]
        start = torch.tensor([starts[s] for s in group])[:, None]
        column = torch.arange(lengths[group[0]])[None, :]
        index = start + torch.minimum(column, length - 1)
        real = (column < length).flatten()
        full = bool(real.all())
        places.append(index.flatten() if full else index.flatten()[real])
        buckets.append(Bucket(index.to(device), None if full else real.nonzero().flatten().to(device)))
    place = torch.cat(places)
    in_order = bool((place == torch.arange(len(place))).all())
    return FlatRow(buckets, None if in_order else place.argsort().to(device))


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
    outputs = []
    for bucket in flat_row.buckets:
        b, L = bucket.index.shape
        whole_row = b * L == len(q) and flat_row.inverse is None  # equal lengths in order: a view, no gather
        # (b, H, L, Dh)
        qb, kb, vb = ((x.view(b, L, *x.shape[1:]) if whole_row else x[bucket.index]).transpose(1, 2) for x in (q, k, v))
        mask = _band(L, sliding_window, q.device) if sliding_window is not None and L > sliding_window else None
        out = F.scaled_dot_product_attention(
            qb, kb, vb, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        out = out.transpose(1, 2).reshape(b * L, q.shape[1], -1)
        outputs.append(out if bucket.real is None else out[bucket.real])
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return (out if flat_row.inverse is None else out[flat_row.inverse])[None], None


def _band(L: int, window: int, device: torch.device) -> Tensor:
    """(L, L) bool: each token sees itself and the window - 1 before it."""
    distance = torch.arange(L, device=device)[:, None] - torch.arange(L, device=device)[None, :]
    return (distance >= 0) & (distance < window)


def _no_mask(*args: object, **kwargs: object) -> None:
    return None


AttentionInterface.register(FLAT, flat_attention)
AttentionMaskInterface.register(FLAT, _no_mask)
