"""The key/value cache of sampling: a prompt's entries once, however many completions it has, plus each
completion's own.

The function here is registered with transformers' attention interface under the name "cached". It stores the
keys and values that the layers compute, so the model is called as in training, on a flat row: first all
prompts end to end, then the newest token of each completion. Memory is written in place: no step copies
existing entries.

Shapes: P distinct prompts, Lp tokens of the longest; n completions, at most G per prompt; H heads, Hkv key
heads, g = H / Hkv, Dh.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.memory import compute_dtype, to_device
from common.model.attention import flat_attention, plan_flat_row
import numpy as np
import torch
from torch import Tensor

CACHED = "cached"
FIRST_CAPACITY = 64  # tokens per completion; doubled when full, so that memory follows the actual lengths


def register() -> None:
    """Register cached attention with transformers. Called when sampling starts, because importing
    transformers is slow."""
    from transformers import AttentionInterface

    # no mask function, so that transformers builds no mask
    AttentionInterface.register(CACHED, cached_attention)


@dataclass
class Layer:
    prompt_keys: Tensor  # (P, Hkv, Lp, Dh), left-padded
    prompt_values: Tensor
    keys: Tensor  # (n or more, Hkv, capacity, Dh): token t of every completion in column t
    values: Tensor


class KVCache:
    """The entries that completions attend to: their prompt and their own tokens.

    prompts: the P distinct ones. owner: the prompt of each of the n completions. limit: the maximum number of
    tokens of a completion. static: shapes and addresses stay the same until `version` changes, as a CUDA
    graph requires; unfilled columns are masked rather than left out.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        owner: Sequence[int],
        limit: int,
        device: torch.device,
        static: bool = False,
    ):
        self.device = device
        self.static = static
        self.limit = limit
        self.capacity = min(limit, FIRST_CAPACITY)
        self.layers = []
        self.calls = 0  # calls of `attend` in this forward pass; layers come in the same order in each
        self.masks = {}  # of this pass, by window
        self.version = 0
        self.t = -1  # the completions' newest token; -1: prompts are being read
        self.newest = torch.full((1,), -1, device=device)  # the same on the device

        lengths = torch.tensor([len(prompt) for prompt in prompts])
        self.flat_row = plan_flat_row(lengths.tolist(), device)
        self.prompt_length = Lp = int(lengths.max())
        start = lengths.cumsum(0) - lengths
        # (P, Lp): the index in its prompt of the token in each column, negative in the padding
        index = torch.arange(Lp) - (Lp - lengths[:, None])
        source = start[:, None] + index.clamp(min=0)
        self.source = source.to(device)  # the same in the flat row
        padding = torch.where(index < 0, -torch.inf, 0.0)
        self.padding = padding[:, None, None].to(device)  # (P, 1, 1, Lp)
        self._group_by_prompt(np.asarray(owner))

    def _group_by_prompt(self, owner: np.ndarray) -> None:
        """Plan how n completions map to P prompts x G slots, and back."""
        self.owner = owner
        completions = np.arange(len(owner))
        sizes = np.bincount(owner)
        self.G = int(sizes.max())
        order = np.argsort(owner, kind="stable")  # by prompt
        sorted_owner = owner[order]
        start = np.cumsum(sizes) - sizes  # of each prompt, in this order
        slot = np.empty(len(owner), np.int64)  # of each completion
        slot[order] = sorted_owner * self.G + completions - start[sorted_owner]
        # the completion in each slot; any one in an unused slot
        member = np.zeros(len(sizes) * self.G, np.int64)
        member[slot] = completions
        self.member = self.slot = None  # None: the completions in their order fill the slots
        if not np.array_equal(member, completions):
            self.member = to_device(member, self.device)
            self.slot = to_device(slot, self.device)

    def advance(self) -> None:
        """Make room for the next token of every completion."""
        self.t += 1
        self.newest += 1
        if self.t == self.capacity:
            self.capacity = min(2 * self.capacity, self.limit)
            self.version += 1
            for layer in self.layers:
                layer.keys = self._grown(layer.keys)
                layer.values = self._grown(layer.values)

    def begin_pass(self) -> None:
        """Start a pass of the newest tokens through the layers, possibly again: an earlier pass may have
        failed half way."""
        self.calls = 0
        self.masks = {}

    def _grown(self, old: Tensor) -> Tensor:
        new = self._columns(old)
        new[:, :, : old.shape[2]] = old[: len(new)]
        return new

    def _columns(self, like: Tensor) -> Tensor:
        shape = len(self.owner), like.shape[1], self.capacity, like.shape[-1]
        if self.static:
            return like.new_zeros(shape)  # 0 · (masked entry) must be 0
        return like.new_empty(shape)

    def keep(self, keep: np.ndarray) -> Tensor:
        """Drop completions, keep (n,) bool, and prompts without completions.

        The last rows move into the gaps; the others are not copied. Returns the old indices of the remaining
        rows, (n',).
        """
        order, gaps, moved = _close_gaps(keep, self.device)
        owner = self.owner[order]
        in_use = np.bincount(owner, minlength=len(self.padding)) > 0
        prompts, prompt_gaps, moved_prompts = _close_gaps(in_use, self.device)
        for layer in self.layers:
            for own in (layer.keys, layer.values):
                filled = own[:, :, : self.t + 1]
                filled[gaps] = filled[moved]
            if len(moved_prompts):
                for shared in (layer.prompt_keys, layer.prompt_values):
                    shared[prompt_gaps] = shared[moved_prompts]
            layer.prompt_keys = layer.prompt_keys[: len(prompts)]
            layer.prompt_values = layer.prompt_values[: len(prompts)]
        self.padding = self.padding[to_device(prompts, self.device)]
        number = np.empty(len(in_use), np.int64)  # of each old prompt among the new ones
        number[prompts] = np.arange(len(prompts))
        self._group_by_prompt(number[owner])
        self.version += 1
        return to_device(order, self.device)

    # --- called by the layers -------------------------------------------------------------------------------

    def read_prompts(self, key: Tensor, value: Tensor) -> None:
        """key, value (Hkv, T, Dh) of all prompts end to end."""
        keys = key[:, self.source].transpose(0, 1).contiguous()
        values = value[:, self.source].transpose(0, 1).contiguous()
        layer = Layer(keys, values, self._columns(keys), self._columns(values))
        self.layers.append(layer)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query (n, H, Dh), key and value (n, Hkv, Dh) of the newest tokens -> (n, H, Dh). softcap, sinks:
        flat_attention.

        One softmax over the prompt's tokens and the completion's own. All completions of a prompt are
        multiplied with it together, so that it is read from memory once.
        """
        layer = self.layers[self.calls]
        self.calls += 1
        n, H, Dh = query.shape
        keys = layer.keys[:n]
        values = layer.values[:n]
        if self.static:
            keys.index_copy_(2, self.newest, key[:, :, None])
            values.index_copy_(2, self.newest, value[:, :, None])
        else:
            keys = keys[:, :, : self.t + 1]
            values = values[:, :, : self.t + 1]
            keys[:, :, self.t] = key
            values[:, :, self.t] = value
        query = query.reshape(n, key.shape[1], -1, Dh)
        to_prompt = _scores(self._by_prompt(query), layer.prompt_keys, scaling)
        to_own = _scores(query, keys, scaling)
        if softcap is not None:
            to_prompt = torch.tanh(to_prompt / softcap) * softcap
            to_own = torch.tanh(to_own / softcap) * softcap
        to_prompt = self._by_completion(to_prompt + self.padding)
        scores = torch.cat([to_prompt, to_own], -1)  # (n, Hkv, g, Lp + own)
        mask = self._mask(window, scores.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(mask, -torch.inf)
        if sinks is not None:
            sink = sinks.to(scores.dtype).view(1, *scores.shape[1:3], 1)
            scores = torch.cat([scores, sink.expand(n, -1, -1, 1)], -1)
        weights = scores.softmax(-1).to(values.dtype)
        Lp = self.prompt_length
        from_prompt = self._by_prompt(weights[..., :Lp]) @ layer.prompt_values
        from_own = weights[..., Lp : Lp + keys.shape[2]] @ values  # without the sink
        out = from_own + self._by_completion(from_prompt)
        return out.view(n, H, -1)

    def _by_prompt(self, x: Tensor) -> Tensor:
        """(n, Hkv, g, ...) -> (P, Hkv, G g, ...)."""
        if self.member is not None:
            x = x.index_select(0, self.member)
        return x.unflatten(0, (-1, self.G)).transpose(1, 2).flatten(2, 3)

    def _by_completion(self, x: Tensor) -> Tensor:
        """(P, Hkv, G g, ...) -> (n, Hkv, g, ...)."""
        x = x.unflatten(2, (self.G, -1)).transpose(1, 2).flatten(0, 1)
        return x if self.slot is None else x.index_select(0, self.slot)

    def _mask(self, window: int | None, width: int) -> Tensor | None:
        """(width,) bool: the columns that the newest token must not see; None if it sees all.

        The same in all rows, because prompts end at the same column. Built once per step for all layers with
        the same window.
        """
        if not self.static and (window is None or width <= window):
            return None
        if window not in self.masks:
            column = torch.arange(width, device=self.device)
            newest = self.prompt_length + self.newest
            mask = column > newest
            if window is not None:
                mask |= column <= newest - window
            self.masks[window] = mask
        return self.masks[window]


def _close_gaps(keep: np.ndarray, device: torch.device) -> tuple[np.ndarray, Tensor, Tensor]:
    """How to compact the kept rows: (the old row of each new one, the gaps, the rows moved there)."""
    order = np.arange(keep.sum())
    gaps = np.flatnonzero(~keep[: len(order)])
    moved = len(order) + np.flatnonzero(keep[len(order) :])
    order[gaps] = moved
    return order, to_device(gaps, device), to_device(moved, device)


def _scores(query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """query (b, Hkv, q, Dh), keys (b, Hkv, k, Dh) -> (b, Hkv, q, k), float32 or better: bfloat16 would round
    the scores."""
    if query.dtype in (torch.float32, torch.float64):
        return (query * scaling) @ keys.transpose(-1, -2)
    if query.device.type == "cuda":
        transposed = keys.flatten(0, 1).transpose(-1, -2)
        scores = torch.bmm(query.flatten(0, 1), transposed, out_dtype=torch.float32)
        return scores.unflatten(0, query.shape[:2]) * scaling
    return (query.float() * scaling) @ keys.float().transpose(-1, -2)


def cached_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    kv_cache: KVCache,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Causal attention within each prompt, or of the newest tokens. query (1, H, T, Dh), key and value (1,
    Hkv, T, Dh).

    Raises RuntimeError as `flat_attention` does.
    """
    dtype = compute_dtype(query)  # as SDPA does by itself
    query = query.to(dtype)
    key = key.to(dtype)
    value = value.to(dtype)
    if kv_cache.t < 0:
        kv_cache.read_prompts(key[0], value[0])
        kwargs |= {"flat_row": kv_cache.flat_row, "softcap": softcap, "s_aux": s_aux}
        return flat_attention(
            module, query, key, value, attention_mask, scaling, 0.0, sliding_window, **kwargs
        )
    with torch.autocast(query.device.type, enabled=False):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if scaling is None:
            scaling = q.shape[-1] ** -0.5
        out = kv_cache.attend(q, k, v, scaling, sliding_window, softcap, s_aux)
        return out[None], None
