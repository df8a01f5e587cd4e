"""Rotary positions whose frequencies depend on the length of a call: each sequence gets those of its own length.

Two kinds depend on the largest position of a call. "longrope" (Ding et al. 2024, arXiv 2402.13753) has two sets of
frequencies, up to the original length and beyond it; "dynamic" (NTK-aware scaling) has another set for each length beyond
it. So the longest sequence of a row, or a batch, would change its neighbours, and with "dynamic" also later calls.
"""

import contextlib
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def follow_lengths(lm: nn.Module) -> None:
    """Make such rotary embeddings handle each sequence of a call separately, while the lengths are known (`knowing`)."""
    for module in lm.modules():
        kinds = _kinds(module)
        if any("dynamic" in kind or kind == "longrope" for kind in kinds.values()) and not hasattr(module, "own_lengths"):
            module.own_lengths, module.plain_forward = None, module.forward
            module.forward = MethodType(_forward, module)


def following(lm: nn.Module) -> list[nn.Module]:
    """The rotary embeddings of a model that `follow_lengths` has changed."""
    return [module for module in lm.modules() if hasattr(module, "own_lengths")]


@contextlib.contextmanager
def knowing(rotaries: Sequence[nn.Module], lengths: list[int]) -> Iterator[None]:
    """Context in which they are called for sequences of these lengths: a flat row, or the rows of a padded batch."""
    for module in rotaries:
        module.own_lengths = lengths
    try:
        yield
    finally:
        for module in rotaries:
            module.own_lengths = None


def one_for_all(rotaries: Sequence[nn.Module], longest: int) -> bool:
    """Whether all sequences of up to `longest` tokens have the same frequencies."""
    return all(longest <= _limit(module) for module in rotaries)


def _kinds(module: nn.Module) -> dict[str, str]:
    """The kinds of RoPE of a rotary embedding, by attribute prefix: one for all layers, or one per layer type."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        return {"": kinds}
    return {f"{layer_type}_": kind for layer_type, kind in kinds.items()} if isinstance(kinds, dict) else {}


def _limit(module: nn.Module) -> int:
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


def _forward(self: nn.Module, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """(cos, sin), both (rows, n, Dh) for position_ids (rows, n): a flat row, or the rows of a padded batch."""
    _restart(self)
    lengths = self.own_lengths
    if lengths is None or max(lengths) <= _limit(self):
        return self.plain_forward(x, position_ids, *args, **kwargs)
    lengths = torch.tensor(lengths, device=position_ids.device)
    if position_ids.shape == (1, int(lengths.sum())):
        own = lengths.repeat_interleave(lengths)[None]
    else:
        own = lengths[:, None].expand(-1, position_ids.shape[1])
        position_ids = position_ids.expand_as(own).minimum(own - 1)  # padding must not count as a longer sequence
    longrope = "longrope" in _kinds(self).values()
    group = (own > _limit(self)).long() if longrope else own.clamp(min=_limit(self))
    found: list[Tensor] = []
    for value in group.unique():
        _restart(self)
        parts = self.plain_forward(x, position_ids[group == value][None], *args, **kwargs)
        found = found or [part.new_empty(*group.shape, part.shape[-1]) for part in parts]
        for whole, part in zip(found, parts, strict=True):
            whole[group == value] = part[0]
    return found[0], found[1]
