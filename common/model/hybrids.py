"""Models whose layers look at the whole input: recurrent mixers, and rotary positions that depend on its
length.

A mixer (linear attention, short convolution, state-space model) carries a state along its input, and so from
one sequence of a flat row into the next. While a model is called on a flat row (`calling`), each mixer
receives the row as right-padded batches of its sequences, and the outputs are gathered back: padding after a
sequence changes nothing in it. Attention, norms and MLPs of the same model work on the flat row. A prefix
that sequences share is repeated for each of them, and the row gets back the output for the first one, which
is the same in all.

Two kinds of RoPE depend on the largest position of a call. "longrope" (Ding et al. 2024, arXiv 2402.13753)
has two sets of frequencies, up to the original length and beyond it; "dynamic" (NTK-aware scaling) has
another set for each length beyond it. So the longest sequence of a row, or a batch, would change its
neighbours, and with "dynamic" also later calls. Here each sequence gets the frequencies for its own length.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import inspect
import math
from types import MethodType
from typing import Any, NamedTuple

from common.collators import Batch
from common.memory import to_device
from common.model.attention import FlatRow, Gather, first_occurrences, pad_groups, similar
import torch
from torch import Tensor, nn

# Methods of transformers' cache, called by layers that carry a state along a sequence.
KEEPS_STATE = {"update_conv_state", "update_recurrent_state"}
# A method of MiniMax's own cache, and the attribute in which RecurrentGemma's modules keep a state.
OWN_CACHE = {"set_linear_cache", "conv1d_state"}


class Call(NamedTuple):
    """What a model is called on."""

    lengths: Sequence[int]  # of the sequences
    row: FlatRow | None  # None: they are the rows of a padded batch


# A global, because some models do not pass arguments on to their layers.
_current_call: Call | None = None


class Hybrid:
    """The layers of a language model that need to know the sequences of a call: those that carry a state along
    their input, and rotary embeddings that depend on its length."""

    def __init__(self, lm: nn.Module):
        self.mixers = recurrent_mixers(lm)
        self.rotaries = scaled_rotaries(lm)
        for module in self.mixers:
            _replace_forward(module, _mixer_forward)
        for module in self.rotaries:
            _replace_forward(module, _rotary_forward)

    @property
    def max_unscaled_length(self) -> float:
        """The length up to which all sequences have the same rotary frequencies; inf without such
        layers."""
        return min(map(_original_length, self.rotaries), default=math.inf)


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    if not hasattr(module, "own_forward"):
        module.own_forward = module.forward
        module.forward = MethodType(forward, module)


def names_in_code(cls: type) -> set[str]:
    """The names of attributes and globals in the code of a class."""
    names = set()
    for value in vars(cls).values():
        if inspect.isfunction(value):
            names.update(inspect.unwrap(value).__code__.co_names)
    return names


@contextlib.contextmanager
def calling(call: Call | None) -> Iterator[None]:
    """Context of a model's call."""
    global _current_call
    before = _current_call
    _current_call = call
    try:
        yield
    finally:
        _current_call = before


def unshared(batch: Batch) -> tuple[Batch, Tensor]:
    """The flat row without sharing, of length F = sum of its lengths, and the first place of each of the T
    tokens in it."""
    ids = batch["input_ids"]
    token_map = batch["token_map"]
    positions = torch.cat([torch.arange(n) for n in batch["lengths"]])
    fields = {
        "input_ids": ids[:, to_device(token_map, ids.device)],
        "position_ids": positions.to(ids.device)[None],
        "token_map": None,
    }
    return batch | fields, to_device(first_occurrences(token_map), ids.device)


def recompute_contexts() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """For `context_fn` of torch.utils.checkpoint: a block recomputed in the backward pass uses its own row,
    not the one called last."""
    return contextlib.nullcontext(), calling(_current_call)


def exclude_from_compilation() -> None:
    """Keep the loop over batches out of compiled graphs: each number of batches would need its own graph."""
    global _batch_by_batch
    _batch_by_batch = torch.compiler.disable(_batch_by_batch)


# --- recurrent mixers ---------------------------------------------------------------------------------------


def recurrent_mixers(lm: nn.Module) -> list[nn.Module]:
    """The modules that carry a state along a sequence, recognised by code that stores it in a cache."""
    has_state = {}
    mixers = []
    for module in lm.modules():
        cls = type(module)
        if cls not in has_state:
            has_state[cls] = bool(names_in_code(cls) & (KEEPS_STATE | OWN_CACHE))
        if has_state[cls]:
            mixers.append(module)
    return mixers


def _mixer_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("flat_row", None)
    return _batch_by_batch(self, args, kwargs)


def _batch_by_batch(mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mixer's output for the row, computed batch by batch."""
    if _current_call is None or _current_call.row is None:
        return mixer.own_forward(*args, **kwargs)
    row = _current_call.row
    # ZeRO-3 needs the same number of calls on all processes
    together = any(hasattr(p, "ds_id") for p in mixer.parameters())
    batches, inverse = _places(row, together)
    T = len(inverse)

    def split(x: Any) -> list[Any]:
        """(1, T, ...) -> (b, L, ...) for each batch; arguments without a token dimension go to all batches
        unchanged."""
        if isinstance(x, tuple) and x:
            return list(zip(*map(split, x), strict=True))
        if not isinstance(x, Tensor) or x.shape[:2] != (1, T):
            return [x] * len(batches)
        parts = []
        for part, batch in zip(Gather.apply(x[0], batches, inverse, row.shared), batches, strict=True):
            parts.append(part.view(*batch.shape, *x.shape[2:]))
        return parts

    def join(parts: tuple[Any, ...]) -> Any:
        """(b, L, ...) of each batch -> (1, T, ...)."""
        first = parts[0]
        if isinstance(first, tuple):
            return tuple(map(join, zip(*parts, strict=True)))
        if not isinstance(first, Tensor) or first.shape[:2] != batches[0].shape:
            return None  # a state or weights, meaningless for a row
        out = [part.flatten(0, 1) for part in parts]
        joined = out[0] if len(out) == 1 else torch.cat(out)
        return joined.index_select(0, inverse)[None]

    outputs = []
    arguments = map(split, (*args, *kwargs.values()))
    for own in zip(*arguments, strict=True):  # the arguments for one batch
        named = dict(zip(kwargs, own[len(args) :], strict=True))
        outputs.append(mixer.own_forward(*own[: len(args)], **named))
    return join(tuple(outputs))


def _places(row: FlatRow, together: bool) -> tuple[list[Tensor], Tensor]:
    """All sequences in full as right-padded batches: (b, L) int64, the tokens of the row in each batch, and
    (T,) int64, each token's first place in the concatenated batches. Padding repeats a sequence's last token.

    together: use a single batch. Built once per row, on the CPU, and used by every layer.
    """
    if together in row.mixer_batches:
        return row.mixer_batches[together]
    lengths = row.lengths
    groups = [[*range(len(lengths))]] if together else similar(lengths, lengths)
    padded, inverse = pad_groups(groups, lengths, lengths.cumsum())
    if row.shared:
        inverse = inverse[row.first_places]
    batches = [row.in_row(tokens) for tokens in padded]
    row.mixer_batches[together] = batches, to_device(inverse, row.device)
    return row.mixer_batches[together]


# --- rotary positions ---------------------------------------------------------------------------------------


def _kinds(module: nn.Module) -> dict[str, str]:
    """The kinds of RoPE of a rotary embedding, by attribute prefix: one for all layers, or one per layer
    type."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        return {"": kinds}
    if isinstance(kinds, dict):
        return {f"{layer_type}_": kind for layer_type, kind in kinds.items()}
    return {}


def scaled_rotaries(lm: nn.Module) -> list[nn.Module]:
    """The rotary embeddings whose frequencies depend on the length of their input."""
    rotaries = []
    for module in lm.modules():
        kinds = _kinds(module).values()
        if any("dynamic" in kind or kind == "longrope" for kind in kinds):
            rotaries.append(module)
    return rotaries


def _original_length(module: nn.Module) -> int:
    """The length up to which all sequences have the same frequencies."""
    limits = [module.original_max_seq_len]
    for prefix, kind in _kinds(module).items():
        if kind == "longrope":
            parameters = module.config.rope_parameters
            if prefix:
                parameters = parameters[prefix[:-1]]
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
    call = _current_call
    if call is None or max(call.lengths) <= limit:
        return self.own_forward(x, position_ids, *args, **kwargs)
    lengths = torch.tensor(call.lengths, device=position_ids.device)
    # (rows, n): the length of each token's sequence
    if call.row is not None:
        length = lengths.repeat_interleave(lengths)[None]
    else:
        length = lengths[:, None].expand(-1, position_ids.shape[1])
        # padding must not count as a longer sequence
        position_ids = position_ids.expand_as(length).minimum(length - 1)
    # Tokens with the same number here have the same frequencies: 0 or 1 for longrope, else the length.
    longrope = "longrope" in _kinds(self).values()
    group = (length > limit).long() if longrope else length.clamp(min=limit)
    embeddings = []  # cos and sin
    for value in group.unique():
        _restart(self)
        members = group == value
        parts = self.own_forward(x, position_ids[members][None], *args, **kwargs)
        if not embeddings:
            embeddings = [part.new_empty(*group.shape, part.shape[-1]) for part in parts]
        for embedding, part in zip(embeddings, parts, strict=True):
            embedding[members] = part[0]
    return tuple(embeddings)
