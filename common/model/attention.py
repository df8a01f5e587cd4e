"""Attention within each sequence of a flat row: no padding between sequences, no mask over the row, no
leakage.

A flat row holds S sequences end to end, T tokens in all. The function here is registered with transformers'
attention interface under the name "flat", without a mask function, so that nothing of size T x T ever exists.
Sequences of similar length are gathered into one right-padded bucket and go through PyTorch's SDPA together:
under a causal mask, no real token attends to padding on its right, so the bucket needs no mask either. On a
GPU, in half precision, PyTorch's kernel for sequences of different lengths (varlen_attn) replaces the
buckets.

Sequences with a common prefix may share it: the row holds its tokens once. Laid end to end in full, the
sequences of such a row have F > T tokens, and `token_map` (F,) gives for each of them its token in the row.
Keys and values are gathered for each sequence in full; its queries are only its own tokens, the last ones,
under a mask for the bucket.

So an index is one of three: a token of the *row* (T), a token of the *full* sequences (F; without sharing the
same), or a place in the *buckets*, padding included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from common.memory import HALF, capability, compute_dtype, to_device
import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
import torch.nn.functional as F

FLAT = "flat"
MIN_RELATIVE_LENGTH = 0.8  # shortest sequence of a bucket relative to the longest
STRIP = 128  # queries per strip on a CPU
LONGEST_IN_STRIPS = 640  # the longest sequence that is split into strips there (see _strips_pay)
MIN_REAL_QUERIES = 0.5  # share of real (unpadded) queries in a bucket, where a prefix is shared
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
CUDNN_MULTIPLE = 512  # of the lengths that it is asked for: see plan_flat_row
MAX_OWN_TOKENS = 1024  # for a sequence with a shared prefix; with more, its mask would take too much memory


def register() -> None:
    """Register flat attention with transformers. Called when a model is wrapped, because importing
    transformers is slow.

    Without a mask function, transformers builds no mask, and does not look for sequence boundaries in the
    positions, which would synchronise with the device in each pass.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(FLAT, flat_attention)


def exclude_from_compilation() -> None:
    """Keep the loop over buckets out of compiled graphs: each number of buckets would need its own graph."""
    global _bucket_attention
    _bucket_attention = torch.compiler.disable(_bucket_attention)


@dataclass
class FlatRow:
    """How a flat row's tokens are gathered into buckets, and their outputs put back in row order."""

    lengths: np.ndarray  # (S,): of the full sequences
    token_map: np.ndarray | None  # see plan_flat_row
    device: torch.device
    is_bucket: bool  # the row itself is its only bucket: sequences of equal length, nothing shared
    cudnn_first: bool  # see plan_flat_row
    # a varlen.Ragged: the plan for a kernel that needs no buckets; None if there is no such kernel
    ragged: Any = None
    buckets: list["Bucket"] | None = None  # None: not planned yet, see plan_buckets
    # (T,) int64: the place of each token of the row in the buckets' output; None: in order
    inverse: Tensor | None = None
    # the row as batches for recurrent layers, once made: see hybrids._places
    mixer_batches: dict[bool, tuple[list[Tensor], Tensor]] = field(default_factory=dict)

    @property
    def shared(self) -> bool:
        """Whether a token of the row may belong to several sequences."""
        return self.token_map is not None

    @cached_property
    def first_places(self) -> np.ndarray:
        """See first_occurrences; of a row that is shared."""
        return first_occurrences(self.token_map)

    def in_row(self, full: np.ndarray) -> Tensor:
        """Tokens of the full sequences, as tokens of the row."""
        index = self.token_map[full] if self.shared else full
        return to_device(index, self.device)


@dataclass
class Bucket:
    """b sequences of similar length, right-padded by repeating a sequence's last token."""

    keys: Tensor  # (b, L) int64: tokens of the row
    # (b, Lq) int64: the sequences' own tokens, their last ones; `keys` itself if nothing is shared
    queries: Tensor
    first_query: Tensor | None = None  # (b,) int64: the position of the first query in its sequence; None: 0
    # built once for all layers
    masks: dict[tuple[int | None, torch.dtype, bool], Tensor] = field(default_factory=dict)

    def mask(
        self, window: int | None, dtype: torch.dtype, always: bool = False, sink: bool = False
    ) -> Tensor | None:
        """(b or 1, 1, Lq, L): -inf for later tokens and for those `window` or more before, else 0. With a
        `sink`, (..., L + 1): preceded by a column of 0.

        None if SDPA's own causal mask suffices, unless `always`.
        """
        L = self.keys.shape[1]
        if self.first_query is None and (window is None or L <= window) and not always:
            return None
        kind = window, dtype, sink
        if kind in self.masks:
            return self.masks[kind]
        first = self.keys.new_zeros(1) if self.first_query is None else self.first_query
        key = torch.arange(L, device=first.device)
        # A padding query may lie beyond the last key. With a window all its scores would be -inf, and the gradient
        # of such a softmax is NaN: so its position is that of the last key.
        query = (first[:, None] + key[: self.queries.shape[1]]).clamp(max=L - 1)
        query = query[:, None, :, None]
        unseen = key > query
        if window is not None:
            unseen |= key <= query - window
        mask = unseen.new_zeros(unseen.shape, dtype=dtype)
        mask.masked_fill_(unseen, -torch.inf)
        if sink:
            mask = F.pad(mask, (1, 0))
        self.masks[kind] = mask
        return mask


def plan_flat_row(
    lengths: Sequence[int], device: torch.device, token_map: np.ndarray | None = None
) -> FlatRow:
    """How sequences of the given lengths attend, each within itself. Built once per row, on the CPU, and used by
    every layer.

    token_map: (F,) int64, the token in the row of each token of the full sequences; None: nothing is shared.
    A sequence's own tokens are its last ones, and are in the row in the order of the sequences.

    On Hopper, cuDNN's kernel is about twice as fast as the others (transformers#48163), but takes up to a
    second to prepare for each new shape (FunASR#3704). So it is used only for rows of sequences of equal length,
    because such lengths recur: full rows have always the same.
    """
    lengths = np.asarray(lengths)
    is_bucket = token_map is None and bool((lengths == lengths[0]).all())
    kind = capability(device)
    cudnn_first = kind == (9, 0) and is_bucket and lengths[0] % CUDNN_MULTIPLE == 0
    row = FlatRow(lengths, token_map, device, is_bucket, bool(cudnn_first))
    if kind >= (8, 0):
        from common.model import varlen  # its kernel takes a second to import

        row.ragged = varlen.plan(own_tokens(row), lengths, token_map, device)
    if row.ragged is None or is_bucket:
        plan_buckets(row)
    return row


def own_tokens(row: FlatRow) -> np.ndarray:
    """The number of each sequence's own tokens, (S,)."""
    if not row.shared:
        return row.lengths
    # where each sequence's own tokens end in the row; `first_places` rises, because they are in order there
    own_ends = np.searchsorted(row.first_places, row.lengths.cumsum())
    return np.diff(own_ends, prepend=0)


def plan_buckets(row: FlatRow) -> None:
    """Group the sequences of a row into buckets of similar lengths."""
    lengths = row.lengths
    ends = lengths.cumsum()
    own = own_tokens(row)
    # With more, all tokens are queries, the shared ones again: then SDPA's own causal mask does.
    num_queries = np.where(own <= MAX_OWN_TOKENS, own, lengths)
    num_before = lengths - num_queries  # tokens of each sequence before its first query
    groups = similar(lengths, num_queries)
    queries, places = pad_groups(groups, num_queries, ends)
    row.buckets = []
    for group, group_queries in zip(groups, queries, strict=True):
        keys = row.in_row(last_tokens(group, lengths, ends))
        bucket = Bucket(keys, keys)
        if num_before[group].any():
            bucket.queries = row.in_row(group_queries)
            bucket.first_query = to_device(num_before[group], row.device)
        row.buckets.append(bucket)
    if row.shared:
        places = places[row.first_places]
    num_places = sum(group_queries.size for group_queries in queries)
    if not np.array_equal(places, np.arange(num_places)):
        row.inverse = to_device(places, row.device)


def similar(lengths: np.ndarray, num_queries: np.ndarray) -> list[list[int]]:
    """Groups of sequences of similar length, longest first; those with a shared prefix apart from the others.

    A sequence without queries (all its tokens belong to others as well) is in no group.
    """
    groups = []
    group = []  # the last one
    total = most = 0  # queries of the last group, together and at most
    order = np.lexsort((-lengths, num_queries < lengths))  # stable: equal lengths keep their order
    length = lengths.tolist()
    queries = num_queries.tolist()
    for s in order.tolist():
        if queries[s] == 0:
            continue
        longest = group[0] if group else s
        total += queries[s]  # with this sequence
        most = max(most, queries[s])
        is_same_kind = (queries[s] < length[s]) == (queries[longest] < length[longest])
        is_similar = length[s] >= MIN_RELATIVE_LENGTH * length[longest]
        has_little_padding = total >= MIN_REAL_QUERIES * most * (len(group) + 1)
        if not (group and is_same_kind and is_similar and has_little_padding):
            group = []
            groups.append(group)
            total = most = queries[s]
        group.append(s)
    return groups


def pad_groups(
    groups: list[list[int]], counts: np.ndarray, ends: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray]:
    """For each group of sequences the `last_tokens` (b, max count); and the place of each token of the full
    sequences in these arrays, laid end to end, (F,). A token that is in none has no valid place."""
    padded = []
    places = np.empty(ends[-1], np.int64)
    start = 0  # of the group's array
    for group in groups:
        tokens = last_tokens(group, counts, ends)
        is_real = np.arange(tokens.shape[1]) < counts[group, None]
        places[tokens[is_real]] = start + np.flatnonzero(is_real)
        start += tokens.size
        padded.append(tokens)
    return padded, places


def last_tokens(group: Sequence[int], counts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The last `counts` tokens of each sequence of a group, as tokens of the full sequences, (b, max count).
    Padding repeats a sequence's last token. counts, ends (S,): of all sequences."""
    count = counts[group, None]
    end = ends[group, None]
    return np.minimum(end - count + np.arange(count.max()), end - 1)


def first_occurrences(token_map: np.ndarray) -> np.ndarray:
    """For each token of the row, its first place among the full sequences: (F,) -> (T,)."""
    first = np.empty(token_map.max() + 1, np.int64)
    first[token_map[::-1]] = np.arange(len(token_map))[::-1]  # the last write wins
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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence. query (1, H, T, Dh), key and value (1, Hkv, T, Dh) -> (1, T, H,
    Dh).

    softcap: scores s become softcap · tanh(s / softcap) (Gemma 2, arXiv 2408.00118). s_aux (H,): attention
    sinks, the score of one extra key per head, whose value is 0 (GPT-OSS, arXiv 2508.10925). Raises
    RuntimeError if the row's plan did not reach the layer: without it sequences would attend to each other;
    for keys beside the row's (DeepSeek-V4); and for an unknown tensor, which may choose keys (MiniMax-M3).
    """
    if flat_row is None or attention_mask is not None:
        raise RuntimeError("flat attention needs flat_row and no attention_mask")
    for name, unknown in kwargs.items():
        if isinstance(unknown, Tensor) and name != "position_ids":
            raise RuntimeError(f"flat attention does not know the tensor {name}")
    if key.shape[2] != query.shape[2]:
        raise RuntimeError("flat attention needs one key for each token")
    # (T, H, Dh); squeeze, not x[0], whose backward pass fills a new tensor of zeros
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    plain = softcap is None and s_aux is None and dropout == 0
    cudnn_first = flat_row.cudnn_first and plain and sliding_window is None
    ragged = flat_row.ragged
    if ragged is not None and plain and not cudnn_first:
        dtype = ragged.dtype(q)
        if dtype is not None:
            out = ragged.attend(q.to(dtype), k.to(dtype), v.to(dtype), scaling, sliding_window)
            return out[None], None
    settings = {
        "scale": scaling,
        "dropout": dropout,
        "window": sliding_window,
        "softcap": softcap,
        "sinks": s_aux,
    }
    if not flat_row.is_bucket:
        out = _bucket_attention(q, k, v, flat_row, settings)
    elif cudnn_first:
        with sdpa_kernel(CUDNN_FIRST, set_priority=True):
            out = _sdpa(q, k, v, flat_row.buckets[0], **settings)
    else:
        out = _sdpa(q, k, v, flat_row.buckets[0], **settings)
    return out[None], None


def _bucket_attention(q: Tensor, k: Tensor, v: Tensor, row: FlatRow, settings: dict[str, Any]) -> Tensor:
    """(T, H, Dh), (T, Hkv, Dh) twice -> (T, H, Dh), bucket by bucket."""
    if row.buckets is None:  # the varlen kernel does not take these queries
        plan_buckets(row)
    queries = [bucket.queries for bucket in row.buckets]
    keys = [bucket.keys for bucket in row.buckets]
    qs = Gather.apply(q, queries, row.inverse, False)
    ks = Gather.apply(k, keys, row.inverse, row.shared)
    vs = Gather.apply(v, keys, row.inverse, row.shared)
    outputs = []
    for *padded, bucket in zip(qs, ks, vs, row.buckets, strict=True):
        outputs.append(_sdpa(*padded, bucket, **settings))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if row.inverse is None else out.index_select(0, row.inverse)


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bucket: Bucket,
    *,
    scale: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """SDPA on the sequences of a bucket: (b Lq, H, Dh), (b L, Hkv, Dh) twice -> (b Lq, H, Dh)."""
    b = len(bucket.keys)
    rows, H = q.shape[:2]
    Dv = v.shape[-1]
    q, k, v = (x.view(b, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))  # (b, H, Lq or L, Dh)
    sink = sinks is not None
    if sink:
        if scale is None:
            scale = q.shape[-1] ** -0.5
        q, k, v = _with_sink(q, k, v, sinks / scale)
    mask = bucket.mask(window, v.dtype, sink=sink)
    g = H // k.shape[1]  # query heads of a key head
    if g > 1 and not _kernel_knows_groups(q, masked=mask is not None):
        k = k.repeat_interleave(g, 1)
        v = v.repeat_interleave(g, 1)
        g = 1
    if softcap is None:
        attend = partial(F.scaled_dot_product_attention, dropout_p=dropout, scale=scale, enable_gqa=g > 1)
    else:
        attend = partial(_capped_attention, softcap=softcap, dropout=dropout, scale=scale)
    if mask is None and (_strips_pay(q) or softcap is not None):
        mask = bucket.mask(window, v.dtype, always=True, sink=sink)
        out = _in_strips(attend, q, k, v, mask)
    elif mask is None and sink:
        # the sink is the first key: with a query of its own, the mask is an ordinary causal one
        q = F.pad(q, (0, 0, 1, 0))
        out = attend(q, k, v, is_causal=True).transpose(1, 2)[:, 1:]
    else:
        out = attend(q, k, v, mask, is_causal=mask is None).transpose(1, 2)
    return out[..., :Dv].reshape(rows, H, -1)


def _in_strips(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of (b, H, L, Dh), a strip of queries at a time, each with the keys up to its end ->
    (b, L, H, Dh). There may be keys before the first query's own: a sink."""
    L = q.shape[2]
    before = k.shape[2] - L
    size = _strip_size(q)
    outputs = []
    for start in range(0, L, size):
        own = slice(start, start + size)
        seen = slice(before + min(start + size, L))
        out = attend(q[:, :, own], k[:, :, seen], v[:, :, seen], mask[:, :, own, seen])
        outputs.append(out.transpose(1, 2))
    return torch.cat(outputs, 1)


def _kernel_knows_groups(q: Tensor, masked: bool) -> bool:
    """Whether SDPA has a fast kernel for fewer key heads than query heads (b, H, L, Dh).

    On CUDA only flash attention does (16 bits, no mask). Otherwise SDPA would fall back to the kernel that
    keeps L x L scores.
    """
    if q.device.type != "cuda":
        return True
    has_flash = compute_dtype(q) in HALF and q.shape[-1] <= 256 and capability(q.device) >= (8, 0)
    return has_flash and not masked


def _with_sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with an extra first key, which scores `sinks` (H,) and has the value 0.

    It is the unit vector of a new dimension, in which other keys are 0 and queries hold their head's score.
    So any kernel computes its gradient. Dh grows by 8, to suit the kernels.
    """
    D = q.shape[-1]
    score = sinks.to(q.dtype).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
    q = torch.cat([q, score, q.new_zeros(*q.shape[:3], 7)], -1)
    k = F.pad(k, (0, 8, 1, 0))
    v = F.pad(v, (0, 8, 1, 0))
    k[:, :, 0, D] = 1
    return q, k, v


def _capped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    softcap: float,
    scale: float | None,
    dropout: float,
    is_causal: bool = False,
) -> Tensor:
    """(b, H, Lq, Dh), (b, Hkv, L, Dh) twice, mask (b or 1, 1, Lq, L) -> (b, H, Lq, Dh), with scores computed
    in full."""
    if scale is None:
        scale = q.shape[-1] ** -0.5
    g = q.shape[1] // k.shape[1]
    if g > 1:
        k = k.repeat_interleave(g, 1)
        v = v.repeat_interleave(g, 1)
    scores = torch.tanh((q * (scale / softcap)) @ k.transpose(-1, -2)) * softcap
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = (scores + mask).softmax(-1, dtype=wide).to(v.dtype)
    return F.dropout(weights, dropout) @ v


def _strips_pay(q: Tensor) -> bool:
    """Whether queries (b, H, L, Dh) are faster in strips, each with the keys up to its end.

    The CPU kernel skips masked keys only in blocks of 512, which saves nothing for shorter sequences.
    """
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    is_plain = q.device.type == "cpu" and q.dtype == torch.float32
    return is_plain and 2 * STRIP <= q.shape[2] <= LONGEST_IN_STRIPS


def _strip_size(q: Tensor) -> int:
    """Queries per strip: large for few kernel launches on a GPU, and constant for one graph under
    compilation."""
    if torch.compiler.is_compiling():
        return q.shape[2]
    return STRIP if q.device.type == "cpu" else 8 * STRIP


class Gather(torch.autograd.Function):
    """Gathers the row (T, ...) into each bucket's tokens (b L, ...), padding included.

    No real token attends to padding, and the output at padding is dropped, so its gradient is 0. Hence, if
    each token of the row has one place in the buckets, its gradient is gathered from there rather than
    scatter-added into zeros. For queries that always holds: the output of one place is kept.
    """

    @staticmethod
    def forward(ctx: Any, x, buckets, inverse, several):
        """x (T, ...). buckets: the token at each place. inverse (T,): the place of each token; None: in order.
        several: a token may have more than one place."""
        ctx.buckets = buckets
        ctx.inverse = inverse
        ctx.several = several
        ctx.T = len(x)
        return tuple(x.index_select(0, index.view(-1)) for index in buckets)

    @staticmethod
    def backward(ctx: Any, *gradients):
        gradient = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
        if ctx.several:
            index = torch.cat([index.view(-1) for index in ctx.buckets])
            gradient = gradient.new_zeros(ctx.T, *gradient.shape[1:]).index_add_(0, index, gradient)
        elif ctx.inverse is not None:
            gradient = gradient.index_select(0, ctx.inverse)
        return gradient, None, None, None
