"""Sampling without a cache: every token from a pass over all previous ones, as in training. Slow, but right for any
model."""

from collections.abc import Sequence

from common.memory import to_device
from common.model.flat_model import FlatModel, base_lm
from common.model.lm_head import logits_of
from common.model.rope import one_for_all
from common.sampling.padded import cache_name

import numpy as np
import torch
from torch import Tensor


def why_no_cache(model: FlatModel, longest: int = 0) -> str | None:
    """Why completions of up to `longest` tokens, including the prompt, cannot be sampled with a cache; None if they can."""
    if cache_name(base_lm(model.lm)) is None:
        return f"the cache of {type(base_lm(model.lm)).__name__} is not one of transformers' own"
    if not one_for_all(model.rotaries, longest):  # cached entries would have the positions of a shorter sequence
        return f"beyond its original length {type(base_lm(model.lm)).__name__} has other positions for each length"
    return None


class WholeDecoder:
    """Logits of the next tokens, like FlatDecoder's."""

    def __init__(self, model: FlatModel, prompts: Sequence[Sequence[int]], owner: Sequence[int], max_new_tokens: int):
        self.model, self.device = model, base_lm(model.lm).device
        self.sequences = [[*prompts[i]] for i in owner]

    def read_prompts(self) -> Tensor:
        """(C, V) float32 logits of the first token of every completion."""
        lengths = [len(sequence) for sequence in self.sequences]
        ids = torch.tensor([token for sequence in self.sequences for token in sequence], device=self.device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(self.device)
        row = {"input_ids": ids[None], "position_ids": positions[None], "lengths": lengths, "token_map": None}
        last = to_device(np.cumsum(lengths) - 1, self.device)
        return logits_of(base_lm(self.model.lm), self.model.hidden(row)[last]).float()

    def keep(self, keep: np.ndarray) -> Tensor:
        """Drop completions: keep (n,) bool. Returns the old indices of the remaining rows, (n',)."""
        kept = keep.nonzero()[0]
        self.sequences = [self.sequences[i] for i in kept]
        return to_device(kept, self.device)

    def next_logits(self, tokens: Tensor) -> Tensor:
        """(n,) newest tokens -> (n, V) float32."""
        for sequence, token in zip(self.sequences, tokens.tolist(), strict=True):
            sequence.append(token)
        return self.read_prompts()
