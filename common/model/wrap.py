"""Wrap a transformers language model as a FlatModel: checked on a few tokens, with fused norms and MLPs."""

from collections.abc import Iterator
import contextlib
import re

from common.collators import Batch
from common.errors import UserError, say
from common.model import attention
from common.model.attention import FLAT
from common.model.flat_model import FlatModel
from common.model.fused_layers import use_fused_layers
from common.model.lm_head import logits_of
import numpy as np
import torch
from torch import Tensor, nn

# Attributes with a number of tokens at which attention changes.
LENGTH = re.compile(
    r"(sliding_|attention_|local_|keep_)?window(_size)?|attention_chunk_size|index_topk|floor_scale|compress_rate"
)


def wrap(lm: nn.Module) -> FlatModel:
    """Make a causal language model of transformers callable on flat rows.

    On a few tokens the logits must equal those for each sequence alone, and must not depend on the other
    sequences of the row. A model that fails is called on padded batches. Raises UserError if that fails, too,
    or if a token changes the logits before it.
    """
    attention.register()
    lm.config.use_cache = True  # the saved model must generate quickly; training disables the cache per call
    if lm.get_output_embeddings() is None:
        raise UserError(
            f"{type(lm).__name__} has no LM head (get_output_embeddings): it cannot be trained here"
        )
    model = FlatModel(lm)
    implementation = lm.stock_attention = lm.config._attn_implementation
    exact, rough = (1e-5, 1e-3) if lm.dtype == torch.float32 else (1e-2, 1e-1)
    was_training = lm.training
    lm.eval()
    with torch.no_grad(), _short_lengths(lm) as longest:
        row, other_row = _probe_rows(lm, longest)
        first, second, third = _logits_alone(lm, row)  # by the unmodified model
        alone = torch.cat([first, second, third[-1:]])
        if alone.isnan().any():
            raise UserError(
                f"the model ({type(lm).__name__}): a few tokens give NaN: look at *_eps in its config.json"
            )
        if not _close(second[:-1], third[:-1], rough):  # they differ in their last token
            raise UserError(
                f"the model ({type(lm).__name__}): a token changes the logits before it, as is_causal or "
                "use_bidirectional_attention in config.json may ask for: it cannot learn to predict a next token"
            )
        use_fused_layers(lm)
        try:
            lm.set_attn_implementation(FLAT)
            flat, after_other = (logits_of(lm, model.hidden(row)) for row in (row, other_row))
            reason = None
            if not _close(flat[len(first) :], after_other[len(first) :], exact):
                reason = "its sequences would see each other"
            elif not _close(flat, alone, rough):
                reason = "its sequences would not come out as alone"
        except Exception as error:  # architectures fail in different ways; padded batches are checked below
            reason = " ".join(str(error).split())
        if reason is not None:
            lm.set_attn_implementation(implementation)
            model.padded = True
            if not _close(logits_of(lm, model.hidden(row)), alone, rough):
                raise UserError(f"the model ({type(lm).__name__}): its head does not give its logits")
            say(
                f"model: {type(lm).__name__} cannot be called on flat rows ({reason}); padded batches instead"
            )
        elif mixers := model.hybrid.mixers:
            kinds = ", ".join(sorted({type(mixer).__name__ for mixer in mixers}))
            say(f"model: {type(lm).__name__} on flat rows, packed mixers: {len(mixers)} {kinds}")
    lm.train(was_training)
    return model


def _probe_rows(lm: nn.Module, longest: int) -> list[Batch]:
    """Two flat rows that differ in the first of their three sequences, each longer than `longest`: of 5, 3 and
    3 tokens more, the last two with all but one token in common."""
    V = lm.config.get_text_config().vocab_size
    first, shared = longest + 5, longest + 2
    T = first + shared + 2
    ids, other = (torch.arange(start, start + T, device=lm.device) * 7919 % V for start in (0, 100))
    other[first:] = ids[first:]
    row = {
        "position_ids": torch.tensor([[*range(first), *range(shared + 1), shared]], device=lm.device),
        "lengths": [first, shared + 1, shared + 1],
        "token_map": np.array([*range(T - 1), *range(first, first + shared), T - 1]),
    }
    return [{"input_ids": tokens[None], **row} for tokens in (ids, other)]


@contextlib.contextmanager
def _short_lengths(lm: nn.Module) -> Iterator[int]:
    """Context that reduces the lengths at which attention changes (windows, chunks, selected keys) to 2 tokens,
    so that a few tokens show whether they reach attention, or exist only as a mask (PhiMoE, Llama 4), which a
    flat row does not have. A length that is also a dimension of its module's weights stays as it is
    (DeepSeek-V4's compression); yields the longest of these, or 0."""
    kept: list[tuple[object, str, int]] = []
    longest = 0
    for owner in (lm.config, lm.config.get_text_config(), *lm.modules()):
        for name, value in list(vars(owner).items()):
            if not LENGTH.fullmatch(name) or type(value) is not int or value <= 2:
                continue
            weights = owner.parameters(recurse=False) if isinstance(owner, nn.Module) else ()
            if any(value in weight.shape for weight in weights):
                longest = max(longest, value)
            else:
                kept.append((owner, name, value))
                setattr(owner, name, 2)
    try:
        yield longest
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def _logits_alone(lm: nn.Module, row: Batch) -> list[Tensor]:
    """The logits (n, V) of each sequence of a flat row, by the model's own forward on it."""
    sequences = row["input_ids"][0, row["token_map"]].split(row["lengths"])
    return [lm(input_ids=sequence[None], use_cache=False).logits[0].float() for sequence in sequences]


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-6))
