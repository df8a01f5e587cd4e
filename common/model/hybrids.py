"""Models whose layers look at the whole input: recurrent mixers, and rotary positions that depend on its
length.

A mixer (linear attention, short convolution, state-space model) carries a state along its input, and so from
one sequence of a flat row into the next. While a model is called on a flat row (`calling`), each mixer
receives the row as right-padded batches of its sequences, and the outputs are gathered back: padding after a
sequence changes nothing in it. Attention, norms and MLPs of the same model work on the flat row. A prefix
that sequences share is written out for each of them, and the row gets back the first one's output, which is
the same in all.

Two kinds of RoPE depend on the largest position of a call. "longrope" (Ding et al. 2024, arXiv 2402.13753)
has two sets of frequencies, up to the original length and beyond it; "dynamic" (NTK-aware scaling) has
another set for each length beyond it. So the longest sequence of a row, or a batch, would change its
neighbours, and with "dynamic" also later calls. Here each sequence gets the frequencies of its own length.
"""

from collections.abc import Iterator, Sequence
import contextlib
import inspect
import math
from types import MethodType
from typing import Any, NamedTuple

from common.collators import Batch
from common.memory import to_device
from common.model.attention import FlatRow, Gather, first_occurrences, last_tokens, similar
import numpy as np
import torch
from torch import Tensor, nn

# Cache methods of transformers in the code of layers that carry a state along a sequence; and of MiniMax's
# own cache, with the attribute in which RecurrentGemma's modules keep a state.
KEEPS_STATE, OWN_CACHE = {"update_conv_state", "update_recurrent_state"}, {"set_linear_cache", "conv1d_state"}


class Call(NamedTuple):
    """What a model is called on."""

    lengths: Sequence[int]  # of the sequences
    row: FlatRow | None  # None: they are the rows of a padded batch


# the current one; not an argument, because some models pass none on to their layers
_call: Call | None = None


class Hybrid:
    """The layers of a language model that need to know the sequences of a call."""

    def __init__(self, lm: nn.Module):
        self.mixers = recurrent_mixers(lm)
        self.rotaries = [module for module in lm.modules() if _follows_length(module)]
        for modules, forward in ((self.mixers, _mixer_forward), (self.rotaries, _rotary_forward)):
            for module in modules:
                if not hasattr(module, "own_forward"):
                    module.own_forward, module.forward = module.forward, MethodType(forward, module)

    @property
    def longest_alike(self) -> float:
        """The length up to which all sequences have the same positions."""
        return min(map(_original_length, self.rotaries), default=math.inf)


def names_in_code(cls: type) -> set[str]:
    """The names of attributes and globals in the code of a class."""
    functions = [inspect.unwrap(f) for f in vars(cls).values() if inspect.isfunction(f)]
    return {name for f in functions for name in f.__code__.co_names}


def is_hybrid(lm: nn.Module) -> bool:
    """Whether a layer carries a state along its input, or the positions depend on its length."""
    if any(
        names_in_code(cls) & (KEEPS_STATE | OWN_CACHE) for cls in {type(module) for module in lm.modules()}
    ):
        return True
    kinds = [str(getattr(module, "rope_type", "")) for module in lm.modules()]
    return any("dynamic" in kind or "longrope" in kind for kind in kinds)


@contextlib.contextmanager
def calling(call: Call | None) -> Iterator[None]:
    """Context of a model's call."""
    global _call
    before, _call = _call, call
    try:
        yield
    finally:
        _call = before


def written_out(batch: Batch) -> tuple[Batch, Tensor]:
    """The flat row without sharing, of length F = sum of its lengths, and the first place of each of the T
    tokens in it."""
    ids, token_map = batch["input_ids"], batch["token_map"]
    positions = torch.cat([torch.arange(n) for n in batch["lengths"]]).to(ids.device)
    whole = {
        "input_ids": ids[:, to_device(token_map, ids.device)],
        "position_ids": positions[None],
        "token_map": None,
    }
    return batch | whole, to_device(first_occurrences(token_map), ids.device)


def recompute_contexts() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """For `context_fn` of torch.utils.checkpoint: a block recomputed in the backward pass uses its own row,
    not the one called last."""
    return contextlib.nullcontext(), calling(_call)


def exclude_from_compilation() -> None:
    """Keep the loop over batches out of compiled graphs: each number of batches would need its own graph."""
    global _batch_by_batch
    _batch_by_batch = torch.compiler.disable(_batch_by_batch)


# --- recurrent mixers ---------------------------------------------------------------------------------------


def recurrent_mixers(lm: nn.Module) -> list[nn.Module]:
    """The modules that carry a state along a sequence, recognised by code that stores it in a cache."""
    mixers = {
        cls
        for cls in {type(module) for module in lm.modules()}
        if names_in_code(cls) & (KEEPS_STATE | OWN_CACHE)
    }
    return [module for module in lm.modules() if type(module) in mixers]


def _mixer_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("flat_row", None)
    return _batch_by_batch(self, args, kwargs)


def _batch_by_batch(mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mixer's output for the row, computed batch by batch."""
    if _call is None or _call.row is None:
        return mixer.own_forward(*args, **kwargs)
    row, sharded = _call.row, any(hasattr(p, "ds_id") for p in mixer.parameters())
    # ZeRO-3 needs the same number of calls on all processes
    batches, inverse = _places(row, together=sharded)
    T = len(inverse)

    def split(x: Any) -> list[Any]:
        """(1, T, ...) -> (b, L, ...) for each batch; arguments without a token dimension go to all batches
        unchanged."""
        if isinstance(x, tuple) and x:
            return list(zip(*map(split, x), strict=True))
        if not isinstance(x, Tensor) or x.shape[:2] != (1, T):
            return [x] * len(batches)
        parts = Gather.apply(x[0], batches, inverse, row.shared)
        return [part.view(*batch.shape, *x.shape[2:]) for part, batch in zip(parts, batches, strict=True)]

    def join(parts: tuple[Any, ...]) -> Any:
        """(b, L, ...) of each batch -> (1, T, ...)."""
        if isinstance(parts[0], tuple):
            return tuple(map(join, zip(*parts, strict=True)))
        if not isinstance(parts[0], Tensor) or parts[0].shape[:2] != batches[0].shape:
            return None  # a state or weights, meaningless for a row
        out = [part.flatten(0, 1) for part in parts]
        return (out[0] if len(out) == 1 else torch.cat(out)).index_select(0, inverse)[None]

    outputs = []
    for own in zip(*(split(x) for x in (*args, *kwargs.values())), strict=True):
        named = dict(zip(kwargs, own[len(args) :], strict=True))
        outputs.append(mixer.own_forward(*own[: len(args)], **named))
    return join(tuple(outputs))


def _places(row: FlatRow, together: bool) -> tuple[list[Tensor], Tensor]:
    """All sequences in full as right-padded batches: (b, L) int64, the tokens of the row in each batch, and
    (T,) int64, each token's first place in the concatenated batches. Padding repeats a sequence's last token.

    together: use a single batch. Built once per row, on the CPU, and used by every layer.
    """
    if together not in row.places:
        lengths, device = row.lengths, row.device
        ends, batches, filled = lengths.cumsum(), [], 0
        inverse = np.empty(ends[-1], np.int64)
        for group in [np.arange(len(lengths))] if together else similar(lengths, lengths):
            index = last_tokens(lengths[group], ends[group])
            real = np.arange(index.shape[1]) < lengths[group, None]
            inverse[index[real]] = filled + np.flatnonzero(real)
            filled += index.size
            batches.append(to_device(index if row.token_map is None else row.token_map[index], device))
        if row.token_map is not None:
            inverse = inverse[first_occurrences(row.token_map)]
        row.places[together] = batches, to_device(inverse, device)
    return row.places[together]


# --- rotary positions ---------------------------------------------------------------------------------------


def _kinds(module: nn.Module) -> dict[str, str]:
    """The kinds of RoPE of a rotary embedding, by attribute prefix: one for all layers, or one per layer
    type."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        return {"": kinds}
    return {f"{layer_type}_": kind for layer_type, kind in kinds.items()} if isinstance(kinds, dict) else {}


def _follows_length(module: nn.Module) -> bool:
    return any("dynamic" in kind or kind == "longrope" for kind in _kinds(module).values())


def _original_length(module: nn.Module) -> int:
    """The length up to which all sequences have the same frequencies."""
    limits = [module.original_max_seq_len]
    for prefix, kind in _kinds(module).items():
        if kind == "longrope":
            parameters = module.config.rope_parameters
            parameters = parameters[prefix[:-1]] if prefix else parameters
            limits.append(parameters["original_max_position_embeddings"])
    return min(limits)


def _restart(module: nn.Module) -> None:
    """Forget the longest call so far."""
    for prefix, kind in _kinds(module).items():
        if "dynamic" in kind:
            module._buffers[f"{prefix}inv_freq"] = getattr(module, f"{prefix}original_inv_freq")
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def _rotary_forward(
    self: nn.Module, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """(cos, sin), both (rows, n, Dh) for position_ids (rows, n): a flat row, or the rows of a padded
    batch."""
    _restart(self)
    limit = _original_length(self)
    if _call is None or max(_call.lengths) <= limit:
        return self.own_forward(x, position_ids, *args, **kwargs)
    lengths = torch.tensor(_call.lengths, device=position_ids.device)
    if _call.row is not None:
        own = lengths.repeat_interleave(lengths)[None]
    else:
        own = lengths[:, None].expand(-1, position_ids.shape[1])
        # padding must not count as a longer sequence
        position_ids = position_ids.expand_as(own).minimum(own - 1)
    longrope = "longrope" in _kinds(self).values()
    group = (own > limit).long() if longrope else own.clamp(min=limit)
    found: list[Tensor] = []
    for value in group.unique():
        _restart(self)
        parts = self.own_forward(x, position_ids[group == value][None], *args, **kwargs)
        found = found or [part.new_empty(*group.shape, part.shape[-1]) for part in parts]
        for whole, part in zip(found, parts, strict=True):
            whole[group == value] = part[0]
    return found[0], found[1]
