"""Recurrent mixers on a flat row: linear attention, short convolutions, state-space models.

Such a layer carries a state along its input, and so from one sequence of a flat row into the next. While a flat row is
processed (`dealing`), each mixer receives the row as right-padded batches of its sequences, and the outputs are gathered
back: padding after a sequence changes nothing in it. Attention, norms and MLPs of the same model work on the flat row. A
prefix that sequences share is written out for each of them, and the row gets back the first one's output, which is the same
in all.
"""

import contextlib
import inspect
from collections.abc import Iterator
from types import MethodType
from typing import Any

from common.memory import to_device
from common.model.attention import MIN_RELATIVE_LENGTH, FlatRow, Gather, first_occurrences

import numpy as np
import torch
from torch import Tensor, nn

# Cache methods of transformers and of MiniMax's own cache, and the attribute in which RecurrentGemma's modules keep a state.
KEEPS_STATE, OWN_CACHE = {"update_conv_state", "update_recurrent_state"}, {"set_linear_cache", "conv1d_state"}

_row: FlatRow | None = None  # the current row; not an argument, because some models pass none on to their mixers


def recurrent_mixers(lm: nn.Module) -> list[nn.Module]:
    """The modules that carry a state along a sequence, recognised by code that stores it in a cache."""
    classes = {type(module) for module in lm.modules()}
    mixers = {cls for cls in classes if _names(cls) & (KEEPS_STATE | OWN_CACHE)}
    return [module for module in lm.modules() if type(module) in mixers]


def own_cache(mixers: list[nn.Module]) -> bool:
    """Whether they keep their states in a cache of their own kind."""
    return any(_names(type(mixer)) & OWN_CACHE for mixer in mixers)


def _names(cls: type) -> set[str]:
    """The names of attributes and globals in the code of a class."""
    functions = [inspect.unwrap(f) for f in vars(cls).values() if inspect.isfunction(f)]
    return {name for f in functions for name in f.__code__.co_names}


def deal_out(lm: nn.Module) -> list[nn.Module]:
    """Make all mixers of a language model split rows under `dealing` into batches. Returns the mixers."""
    mixers = recurrent_mixers(lm)
    for mixer in mixers:
        if not hasattr(mixer, "undealt_forward"):
            mixer.undealt_forward = mixer.forward
            mixer.forward = MethodType(_forward, mixer)
    return mixers


def exclude_from_compilation() -> None:
    """Keep the loop over batches out of compiled graphs: each number of batches would need its own graph."""
    global _deal_out
    _deal_out = torch.compiler.disable(_deal_out)


@contextlib.contextmanager
def dealing(row: FlatRow | None) -> Iterator[None]:
    """Context in which the mixers' inputs are tokens of this row."""
    global _row
    before, _row = _row, row
    try:
        yield
    finally:
        _row = before


def recompute_contexts() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """For `context_fn` of torch.utils.checkpoint: a block recomputed in the backward pass uses its own row, not the one
    called last."""
    return contextlib.nullcontext(), dealing(_row)


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("flat_row", None)
    return _deal_out(self, args, kwargs)


def _deal_out(mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mixer's output for the row, computed batch by batch."""
    if _row is None:
        return mixer.undealt_forward(*args, **kwargs)
    row, sharded = _row, any(hasattr(p, "ds_id") for p in mixer.parameters())
    batches, inverse = _places(row, together=sharded)  # ZeRO-3 needs the same number of calls on all processes
    T = len(inverse)

    def deal(x: Any) -> list[Any]:
        """(1, T, ...) -> (b, L, ...) for each batch; arguments without a token dimension go to all batches unchanged."""
        if isinstance(x, tuple) and x:
            return list(zip(*map(deal, x), strict=True))
        if not isinstance(x, Tensor) or x.shape[:2] != (1, T):
            return [x] * len(batches)
        parts = Gather.apply(x[0], batches, inverse, row.shared)
        return [part.view(*batch.shape, *x.shape[2:]) for part, batch in zip(parts, batches, strict=True)]

    def collect(parts: tuple[Any, ...]) -> Any:
        """(b, L, ...) of each batch -> (1, T, ...)."""
        if isinstance(parts[0], tuple):
            return tuple(map(collect, zip(*parts, strict=True)))
        if not isinstance(parts[0], Tensor) or parts[0].shape[:2] != batches[0].shape:
            return None  # a state or weights, meaningless for a row
        out = [part.flatten(0, 1) for part in parts]
        return (out[0] if len(out) == 1 else torch.cat(out)).index_select(0, inverse)[None]

    dealt = [deal(x) for x in (*args, *kwargs.values())]
    n = len(args)
    outputs = [
        mixer.undealt_forward(*own[:n], **dict(zip(kwargs, own[n:], strict=True))) for own in zip(*dealt, strict=True)
    ]
    return collect(tuple(outputs))


def _places(row: FlatRow, together: bool) -> tuple[list[Tensor], Tensor]:
    """All sequences in full as right-padded batches: (b, L) int64, the tokens of the row in each batch, and (T,) int64, each
    token's first place in the concatenated batches. Padding repeats a sequence's last token.

    together: use a single batch. Built once per row, on the CPU, and used by every layer.
    """
    if together not in row.places:
        lengths, device = row.lengths, row.buckets[0].keys.device
        ends, batches, filled = lengths.cumsum(), [], 0
        inverse = np.empty(ends[-1], np.int64)
        for group in _similar(lengths, 0.0 if together else MIN_RELATIVE_LENGTH):
            column = np.arange(lengths[group].max())
            index = np.minimum((ends - lengths)[group, None] + column, ends[group, None] - 1)
            real = column < lengths[group, None]
            inverse[index[real]] = filled + np.flatnonzero(real)
            filled += index.size
            batches.append(to_device(index if row.token_map is None else row.token_map[index], device))
        if row.token_map is not None:
            inverse = inverse[first_occurrences(row.token_map)]
        row.places[together] = batches, to_device(inverse, device)
    return row.places[together]


def _similar(lengths: np.ndarray, least: float) -> list[list[int]]:
    """Groups of sequences, longest first; the shortest in a group has at least `least` of the longest one's length."""
    groups: list[list[int]] = []
    for s in np.argsort(-lengths, kind="stable").tolist():
        if groups and lengths[s] >= least * lengths[groups[-1][0]]:
            groups[-1].append(s)
        else:
            groups.append([s])
    return groups
