"""Wrap a transformers language model as a FlatModel: checked on a few tokens, with fused norms and MLPs."""

from collections.abc import Iterator
import contextlib
import re

from common.collators import Batch
from common.errors import UserError, say
from common.model import attention
from common.model.attention import FLAT, first_occurrences
from common.model.flat_model import FlatModel
from common.model.fused_layers import use_fused_layers
from common.model.lm_head import logits_of
import numpy as np
import torch
from torch import Tensor, nn

# Attributes with a number of tokens at which attention changes.
WINDOW = re.compile(
    r"(sliding_|attention_|local_)?window(_size)?|attention_chunk_size|index_topk|floor_scale"
)


def wrap(lm: nn.Module) -> FlatModel:
    """Make a causal language model of transformers callable on flat rows.

    On a few tokens the logits must equal those for each sequence alone, and must not depend on the other
    sequences of the row. A model that fails is called on padded batches. Raises UserError if that fails, too.
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
    row, other_row = _probe_rows(lm)
    was_training = lm.training
    lm.eval()
    with torch.no_grad(), _narrow_windows(lm):
        alone = _logits_alone(lm, row)  # by the unmodified model
        if alone.isnan().any():
            raise UserError(
                f"the model ({type(lm).__name__}): a few tokens give NaN: look at *_eps in its config.json"
            )
        use_fused_layers(lm)
        try:
            lm.set_attn_implementation(FLAT)
            flat, after_other = (logits_of(lm, model.hidden(row)) for row in (row, other_row))
            leaks = not _close(flat[5:], after_other[5:], exact)
            reason = None if _close(flat, alone, rough) else "its sequences would not come out as alone"
            reason = "its sequences would see each other" if leaks else reason
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
        elif model.hybrid and (mixers := model.hybrid.mixers):
            kinds = ", ".join(sorted({type(mixer).__name__ for mixer in mixers}))
            say(f"model: {type(lm).__name__} on flat rows, packed mixers: {len(mixers)} {kinds}")
    lm.train(was_training)
    return model


def _probe_rows(lm: nn.Module) -> list[Batch]:
    """Two flat rows of sequences of 5, 3 and 3 tokens, the last two with a shared prefix, that differ in the
    first one."""
    V = lm.config.get_text_config().vocab_size
    ids, other = (torch.arange(start, start + 9, device=lm.device) * 7919 % V for start in (0, 100))
    other[5:] = ids[5:]
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 2]], device=lm.device)
    shared = {
        "position_ids": positions,
        "lengths": [5, 3, 3],
        "token_map": np.array([0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 8]),
    }
    return [{"input_ids": row[None], **shared} for row in (ids, other)]


@contextlib.contextmanager
def _narrow_windows(lm: nn.Module) -> Iterator[None]:
    """Context that reduces the limits of attention (windows, chunks, selected keys) to 2 tokens, so that the
    probe's few tokens show whether they reach attention, or exist only as a mask (PhiMoE, Llama 4), which a
    flat row does not have."""
    kept: list[tuple[object, str, int]] = []
    for owner in (lm.config, lm.config.get_text_config(), *lm.modules()):
        for name, value in list(vars(owner).items()):
            if (
                WINDOW.fullmatch(name)
                and isinstance(value, int)
                and not isinstance(value, bool)
                and value > 2
            ):
                kept.append((owner, name, value))
                setattr(owner, name, 2)
    try:
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def _logits_alone(lm: nn.Module, row: Batch) -> Tensor:
    """The logits (T, V) of a flat row, by the model's own forward on one sequence at a time."""
    sequences = row["input_ids"][0, row["token_map"]].split(row["lengths"])
    logits = torch.cat([lm(input_ids=sequence[None], use_cache=False).logits[0] for sequence in sequences])
    return logits[first_occurrences(row["token_map"])].float()


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool((a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-6))
