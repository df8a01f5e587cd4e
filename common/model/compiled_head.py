"""The LM head's softmax for large vocabularies on a GPU: compiled, it passes over the logits three times."""

import functools
from typing import Any

from common.errors import say
from common.memory import is_oom
from common.model.logit_transform import LogitTransform, apply_
import torch
from torch import Tensor

works = True  # until the compiler has failed


def softmax(out: Tensor | None, logits: Tensor, tokens: Tensor, *how: Any) -> tuple[Tensor, Tensor] | None:
    """`plain_softmax`, compiled; None for a single row, and if there is no compiler, or one that fails."""
    global works
    if not works or len(logits) == 1:
        return None
    try:
        return compiled()(out, logits, tokens.clone(), *how)
    except Exception as error:
        if is_oom(error):
            raise
        works = False
        say(f"the loss head is not compiled: {type(error).__name__}: {error}"[:200])


def plain_softmax(
    out: Tensor | None, logits: Tensor, tokens: Tensor, transform: LogitTransform, normalize: bool
) -> tuple:
    """fused_head's softmax of a chunk, with stats: scores and factor. The derivative goes to out (n, V) if
    given."""
    logits = logits.clone()
    slope = apply_(transform, logits, gradient=True)
    largest = logits.amax(-1, keepdim=True)
    chosen = logits.gather(-1, tokens[:, None])
    exponentials = (logits - largest).exp()
    total = exponentials.sum(-1, keepdim=True)
    log_total = total.log()
    entropy = log_total - ((logits - largest) * exponentials).sum(-1, keepdim=True) / total
    scores = torch.cat([chosen - largest - log_total, entropy, chosen >= largest], 1)
    if out is not None:
        is_token = torch.arange(logits.shape[1], device=logits.device) == tokens[:, None]
        derivative = torch.where(is_token, exponentials - total, exponentials)
        if normalize:
            derivative = derivative / total
            total = torch.ones_like(total)
        out.copy_(derivative if slope is None else derivative * slope)
    return scores.t(), (-transform.scale / total)[:, 0]


@functools.cache
def compiled() -> Any:
    """plain_softmax, compiled at its first use, since torch.compile refuses some versions of Python. One graph
    serves any number of rows above 1. Tokens are copied, because a view's offset would need a graph of its own, and
    after 8 graphs torch stops compiling."""
    return torch.compile(plain_softmax, dynamic=True)
