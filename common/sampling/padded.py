"""Sampling from models whose attention cannot be replaced, or whose layers keep a state.

They are sampled from with transformers' cache. Where that does not hold all that the layers keep, each token
takes a pass over all previous ones: slow, but right for any model.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
from functools import partial
import inspect
import itertools
import sys
from typing import TYPE_CHECKING, Any, get_args

from common.memory import to_device
from common.model.flat_model import FlatModel, base_lm
from common.model.hybrids import OWN_CACHE, names_in_code
from common.model.lm_head import logits_of
import numpy as np
import torch
from torch import Tensor, nn
import torch.nn.functional as F

if TYPE_CHECKING:
    from transformers import DynamicCache

# Contents of a layer of transformers' cache: (b, ..., tokens, size) tensors, and dicts of (b, ...) ones.
PER_TOKEN = ("keys", "values")
STATES = ("conv_states", "recurrent_states")
JOINABLE = {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "DummyLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
}


def cache_name(model: FlatModel) -> str | None:
    """The argument for transformers' cache, if it holds everything that the layers keep; else None."""
    from transformers import Cache, DynamicCache

    lm = base_lm(model.lm)
    mixers = model.hybrid.mixers
    has_states = any(hasattr(layer, "conv_states") for layer in _new_cache(lm).layers)
    has_own_cache = any(names_in_code(type(mixer)) & OWN_CACHE for mixer in mixers)
    if has_states != bool(mixers) or has_own_cache:
        return None  # the layers keep their state elsewhere
    for parameter in inspect.signature(lm.forward).parameters.values():
        if {Cache, DynamicCache}.intersection(get_args(parameter.annotation)):
            return parameter.name  # it was renamed in transformers 5.24
    return None


def end_to_end(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The token ids of sequences end to end, and their positions, (T,) each."""
    ids = torch.tensor(list(itertools.chain.from_iterable(sequences)), device=device)
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    return ids, positions.to(device)


def _new_cache(lm: nn.Module) -> "DynamicCache":
    from transformers import DynamicCache

    return DynamicCache(config=lm.config.get_text_config())


def caches_join(lm: nn.Module) -> bool:
    """Whether the caches of prompts of different lengths can be joined. Elsewhere positions may be counted with the
    padding (Llama 4), or entries be selected and compressed."""
    return all(type(layer).__name__ in JOINABLE for layer in _new_cache(lm).layers)


@contextlib.contextmanager
def steps_as_trained(model: FlatModel) -> Iterator[None]:
    """Context in which state-space layers clamp their time step to `time_step_limit` for a single token, too.

    transformers clamps it when a layer reads many tokens, as in training, but not when it continues from a
    state (Nemotron-H, Zamba2: at least time_step_min).
    """
    limits = {}
    for mixer in model.hybrid.mixers:
        limits[type(mixer)] = getattr(mixer, "time_step_limit", None)
    with contextlib.ExitStack() as stack:
        for cls, limit in limits.items():
            if not limit:
                continue
            code = sys.modules[cls.__module__]
            for name, update in list(vars(code).items()):
                if name.endswith("selective_state_update"):
                    stack.callback(setattr, code, name, update)
                    setattr(code, name, partial(_limited, update, limit))
        yield


def _limited(
    update: Callable[..., Tensor], limit: tuple[float, float], *args: Tensor, **kwargs: Any
) -> Tensor:
    """selective_state_update with time steps softplus(dt + dt_bias) clamped to the limit."""
    state, x, dt, *rest = args
    bias = kwargs.pop("dt_bias", None)
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if kwargs.pop("dt_softplus", False):
        dt = F.softplus(dt)
    return update(state, x, dt.clamp(*limit), *rest, **kwargs)


class PaddedDecoder:
    """A Decoder (generate.py) that uses transformers' own cache and masks.

    Prompts are read in groups of equal length, because padding would enter a state. Then their caches are
    joined: keys and values are left-padded, and masked there; a state has no length. Where caches cannot be
    joined, all prompts given are of one length (`SamplingMethod.equal_lengths`).
    """

    def __init__(
        self, model: FlatModel, prompts: Sequence[Sequence[int]], owner: Sequence[int], max_new_tokens: int
    ):
        inner = base_lm(model.lm)
        self.lm = model.lm
        self.prompts = prompts
        self.device = inner.device
        self.owner = torch.tensor(owner, device=self.device)
        self.accepted = inspect.signature(inner.forward).parameters
        self.cache_name = cache_name(model)

    def _call(self, ids: Tensor, mask: Tensor, position_ids: Tensor, cache: "DynamicCache") -> Tensor:
        """ids and position_ids (n, k), mask (n, all tokens so far) -> (n, V) float32, for the last token."""
        optional = {}
        if "position_ids" in self.accepted:
            optional["position_ids"] = position_ids
        if "logits_to_keep" in self.accepted:
            optional["logits_to_keep"] = 1
        # with a cache of states alone, the layers would multiply the new token by the mask
        if any(hasattr(layer, "keys") for layer in cache.layers):
            optional["attention_mask"] = mask
        out = self.lm(input_ids=ids, **{self.cache_name: cache}, use_cache=True, **optional)
        return out.logits[:, -1].float()

    def read_prompts(self) -> Tensor:
        lengths = np.array(list(map(len, self.prompts)))
        order = np.argsort(lengths, kind="stable")
        logits = []
        caches = []
        for length in np.unique(lengths):
            group = np.flatnonzero(lengths == length)
            ids = torch.tensor([self.prompts[i] for i in group], device=self.device)
            position_ids = torch.arange(length, device=self.device).expand_as(ids)
            cache = _new_cache(base_lm(self.lm))
            caches.append(cache)
            logits.append(self._call(ids, torch.ones_like(ids), position_ids, cache))
        self.cache = _joined(caches)
        longest = lengths.max()
        in_order = to_device(lengths[order], self.device)
        is_real = torch.arange(longest, device=self.device) >= longest - in_order[:, None]
        self.mask = is_real.long()
        self.position = in_order - 1  # of the newest token
        rows = to_device(np.argsort(order), self.device)[self.owner]
        self._select(rows)
        return torch.cat(logits)[rows]

    def _select(self, rows: Tensor) -> None:
        self.cache.reorder_cache(rows)
        self.mask = self.mask[rows]
        self.position = self.position[rows]

    def keep(self, keep: np.ndarray) -> Tensor:
        kept = to_device(keep.nonzero()[0], self.device)
        self._select(kept)
        return kept

    def next_logits(self, tokens: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        self.position = self.position + 1
        return self._call(tokens[:, None], self.mask, self.position[:, None], self.cache)


def _joined(caches: "list[DynamicCache]") -> "DynamicCache":
    """One cache with the rows of all caches, which hold prompts of increasing lengths.

    Per-token entries are left-padded with zeros; a layer with a sliding window keeps only the last ones.
    """
    *shorter, cache = caches
    for number, layer in enumerate(cache.layers):
        others = [other.layers[number] for other in shorter]
        for name, value in vars(layer).items():
            if name in PER_TOKEN and torch.is_tensor(value):
                parts = []
                for other in others:
                    part = getattr(other, name)
                    missing = value.shape[-2] - part.shape[-2]
                    parts.append(F.pad(part, (0, 0, missing, 0)))
                setattr(layer, name, torch.cat([*parts, value]))
            elif name in STATES:
                for i, state in value.items():
                    if state is not None:
                        states = [getattr(other, name)[i] for other in others]
                        value[i] = torch.cat([*states, state])
    return cache


class WholeDecoder:
    """A Decoder without a cache."""

    def __init__(
        self, model: FlatModel, prompts: Sequence[Sequence[int]], owner: Sequence[int], max_new_tokens: int
    ):
        self.model = model
        self.device = base_lm(model.lm).device
        self.sequences = [[*prompts[i]] for i in owner]

    def read_prompts(self) -> Tensor:
        lengths = list(map(len, self.sequences))
        ids, positions = end_to_end(self.sequences, self.device)
        row = {"input_ids": ids[None], "position_ids": positions[None], "lengths": lengths, "token_map": None}
        hidden = self.model.hidden(row)
        last = to_device(np.cumsum(lengths) - 1, self.device)
        return logits_of(base_lm(self.model.lm), hidden[last])

    def keep(self, keep: np.ndarray) -> Tensor:
        kept = keep.nonzero()[0]
        self.sequences = [self.sequences[i] for i in kept]
        return to_device(kept, self.device)

    def next_logits(self, tokens: Tensor) -> Tensor:
        for sequence, token in zip(self.sequences, tokens.tolist(), strict=True):
            sequence.append(token)
        return self.read_prompts()
