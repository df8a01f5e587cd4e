"""PyTorch's attention kernel for sequences of different lengths (varlen_attn), on GPUs of capability 8.0 or
higher."""

from dataclasses import dataclass
import inspect

from common.memory import HALF, capability, compute_dtype, to_device
import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# 2.12 and later need a flag where there are fewer key heads than query heads.
TAKES_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass
class Ragged:
    """A flat row for the kernel: each sequence's own tokens attend to the full sequence."""

    own: Tensor  # (S+1,) int32: offsets of each sequence's own tokens in the row
    full: Tensor  # (S+1,) int32: offsets of the full sequences, laid end to end
    longest: tuple[int, int]  # the longest sequence, by own and by all tokens
    token_map: Tensor | None  # (F,) int64: see plan_flat_row; None: nothing is shared, F = T

    def dtype(self, query: Tensor) -> torch.dtype | None:
        """The dtype that the kernel would compute in, or None if it cannot: it needs 16 bits and head sizes
        that are multiples of 8, up to 256 on GPUs with enough shared memory for the backward pass (A100,
        H100, B200), else up to 192."""
        dtype = compute_dtype(query)
        largest = 256 if capability(query.device) in ((8, 0), (9, 0), (10, 0)) else 192
        fits = query.shape[-1] in range(8, largest + 1, 8)
        return dtype if fits and dtype in HALF else None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, sliding_window: int | None
    ) -> Tensor:
        """(T, H, Dh), (T, Hkv, Dh), (T, Hkv, Dv) -> (T, H, Dv), Dv up to Dh (smaller in latent
        attention).

        For a sequence with fewer queries than keys, the kernel aligns them to its end. So a token of a shared
        prefix is a query only once.
        """
        if self.token_map is not None:
            k = k.index_select(0, self.token_map)
            v = v.index_select(0, self.token_map)
        Dv = v.shape[-1]
        missing = q.shape[-1] - Dv
        if missing > 0:
            v = torch.nn.functional.pad(v, (0, missing))
        # tokens visible before and after; -1: all
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        options = {"enable_gqa": q.shape[1] != k.shape[1]} if TAKES_ENABLE_GQA else {}
        out = varlen_attn(
            q, k, v, self.own, self.full, *self.longest, scale=scaling, window_size=window, **options
        )
        return out[..., :Dv]


def plan(own: np.ndarray, lengths: np.ndarray, token_map: np.ndarray | None, device: torch.device) -> Ragged:
    """own, lengths (S,): tokens of each sequence that are its own, and all."""
    longest = int(own.max()), int(lengths.max())
    tokens = None if token_map is None else to_device(token_map, device)
    own_offsets = np.cumsum([0, *own], dtype=np.int32)
    full_offsets = np.cumsum([0, *lengths], dtype=np.int32)
    return Ragged(to_device(own_offsets, device), to_device(full_offsets, device), longest, tokens)
