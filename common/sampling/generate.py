"""Sampling: prompts -> completions with the log-probabilities of their tokens.

Each prompt is read once, however many completions it gets; finished rows leave the batch. The randomness of a completion
comes from a generator of its own, so what is sampled does not depend on what else is in the batch.
"""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from common.errors import UserError, say
from common.memory import empty_caches, is_oom, to_device
from common.model.attention import FLAT
from common.model.flat_model import LogProbModel, base_lm, body, gathered
from common.model.lm_head import logits_of
from common.sampling.kv_cache import CACHED, KVCache

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

DRAW_BLOCK = 128  # tokens of the vocabulary whose probabilities are summed first
DRAW_AT_ONCE = 1024  # the most of a vocabulary for which one level is quicker


class Completion(NamedTuple):
    ids: list[int]  # the sampled tokens, the stop token included
    logps: list[float]  # log-probability of each under the model at the sampling temperature, before top_k and top_p
    finished: bool  # it ended with a stop token; False: cut at max_new_tokens


def sample(
    model: LogProbModel,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[tuple[int, ...]],
    *,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    batch_size: int = 128,
) -> list[Completion]:
    """One completion for each prompt (token ids). The same prompt may occur many times.

    keys: one tuple of non-negative integers per prompt, from which the randomness of its completion is drawn.
    temperature 0 takes the most probable token. top_k 0 and top_p 1 leave the distribution whole. batch_size: completions
    sampled at a time, which bounds the memory and changes nothing else.
    """
    if (reason := why_not_sampled(model)) is not None:
        raise UserError(reason)
    done: list[Completion] = []
    with generating(model) as lm:
        decoder = PaddedDecoder if model.padded else FlatDecoder
        start = 0
        while start < len(prompts):
            part = slice(start, start + batch_size)
            distinct = list(dict.fromkeys(map(tuple, prompts[part])))
            number = {prompt: i for i, prompt in enumerate(distinct)}
            owner = [number[tuple(prompt)] for prompt in prompts[part]]
            completions = None
            try:
                language_model = decoder(lm, distinct, owner, max_new_tokens)
                completions = _sample_batch(language_model, keys[part], stop_ids, max_new_tokens, temperature, top_k, top_p)
            except Exception as error:
                if not is_oom(error) or len(owner) == 1:
                    raise
            if completions is None:  # here the exception is gone, and with it what it held
                batch_size, language_model = len(owner) // 2, None
                empty_caches(base_lm(lm).device)
                say(f"sampling: out of memory; again with {batch_size} at a time, which changes nothing else")
                continue
            done += completions
            start += len(completions)
    return done


def why_not_sampled(model: LogProbModel) -> str | None:
    """Why this architecture cannot be sampled from; None where it can."""
    lm = base_lm(model.lm)
    layers = DynamicCache(config=lm.config.get_text_config()).layers
    selectable = all(hasattr(layer, "batch_select_indices") for layer in layers)  # a layer with a state is not
    if selectable and "past_key_values" in inspect.signature(lm.forward).parameters:
        return None
    return f"sampling from {type(lm).__name__} is not supported: it has no key/value cache to share"


@contextlib.contextmanager
def generating(model: nn.Module) -> Iterator[nn.Module]:
    """The bare language model, ready to sample: eval mode, attention over what is cached, nothing compiled; all put back.

    Where weights are sharded, all processes enter it together.
    """
    lm = model.lm
    inner = base_lm(lm)
    was_training, implementation = lm.training, inner.config._attn_implementation
    lm.eval()
    if implementation == FLAT:
        inner.set_attn_implementation(CACHED)
    try:
        # Compiled blocks would be compiled again for every number of rows. Weights are gathered outside of inference mode,
        # whose tensors no backward pass may meet.
        with torch.no_grad(), gathered(model), torch.inference_mode(), torch.compiler.set_stance("force_eager"):
            yield lm
    finally:
        if implementation == FLAT:
            inner.set_attn_implementation(FLAT)
        lm.train(was_training)


def _sample_batch(
    decoder: "FlatDecoder | PaddedDecoder",
    keys: Sequence[tuple[int, ...]],
    stop_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
) -> list[Completion]:
    logits = decoder.read_prompts()  # (C, V)
    device, C = logits.device, len(keys)
    uniforms = np.stack([np.random.default_rng(key).random(max_new_tokens, np.float32) for key in keys])
    uniforms = to_device(uniforms, device)
    stops = torch.zeros(max([logits.shape[-1] - 1, *stop_ids]) + 1, dtype=torch.bool, device=device)
    stops[list(stop_ids)] = True

    tokens = torch.zeros(C, max_new_tokens, dtype=torch.long, device=device)
    logps = torch.zeros(C, max_new_tokens, device=device)
    rows = torch.arange(C, device=device)  # the completions that are still being sampled
    going = torch.ones(C, dtype=torch.bool, device=device)
    # Whether completions have ended is asked of the device only now and then where asking makes it wait.
    every, few = (1, 0.9) if device.type == "cpu" else (8, 0.75)
    for t in range(max_new_tokens):
        chosen, tokens_logps = draw(logits, uniforms[rows, t], temperature, top_k, top_p)
        tokens[rows, t], logps[rows, t] = chosen, tokens_logps
        if t + 1 == max_new_tokens:
            break
        going &= ~stops[chosen]
        if t % every == every - 1:
            still = going.cpu().numpy()
            if not still.any():
                break
            if still.sum() < few * len(rows):
                kept = decoder.keep(still)
                rows, chosen, going = rows[kept], chosen[kept], going[kept]
        logits = decoder.next_logits(chosen)

    ended = stops[tokens]
    ends = torch.where(ended.any(-1), ended.int().argmax(-1) + 1, max_new_tokens).tolist()
    return [
        Completion(row[:end], row_logps[:end], finished)
        for row, row_logps, end, finished in zip(tokens.tolist(), logps.tolist(), ends, ended.any(-1).tolist(), strict=True)
    ]


class FlatDecoder:
    """Logits of the next token, by the calls that training makes: one flat row of all prompts, then of the newest tokens.

    lm: a language model whose attention is `cached_attention`. On a GPU a step is one CUDA graph (static).
    """

    def __init__(
        self,
        lm: Any,
        prompts: Sequence[Sequence[int]],
        owner: Sequence[int],
        max_new_tokens: int,
        static: bool | None = None,
    ):
        self.lm, self.prompts = lm, prompts
        self.device = base_lm(lm).device
        static = self.device.type == "cuda" if static is None else static
        self.cache = KVCache(prompts, owner, max_new_tokens, self.device, static)
        self.owner = torch.tensor(owner, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.graph_version = -1  # of the cache, for which the graph was made

    def _hidden(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        """(T,), (T,) -> (T, D)."""
        rows = {"input_ids": ids[None], "position_ids": position_ids[None]}
        return body(self.lm)(**rows, use_cache=False, kv_cache=self.cache).last_hidden_state[0]

    def read_prompts(self) -> Tensor:
        """(C, V) float32 logits of the first token of every completion."""
        lengths = torch.tensor([len(prompt) for prompt in self.prompts])
        ids = torch.tensor([token for prompt in self.prompts for token in prompt], device=self.device)
        hidden = self._hidden(ids, torch.cat([torch.arange(n) for n in lengths]).to(self.device))
        self.position = (lengths - 1).to(self.device)[self.owner]  # of the newest token
        return logits_of(base_lm(self.lm), hidden[lengths.cumsum(0).to(self.device) - 1]).float()[self.owner]

    def keep(self, going: np.ndarray) -> Tensor:
        """Drop the completions that are not going; returns which is now where."""
        kept = self.cache.keep(going)
        self.position = self.position[kept]
        return kept

    def next_logits(self, tokens: Tensor) -> Tensor:
        """(n,) newest tokens -> (n, V) float32."""
        self.cache.advance()
        self.position += 1
        if self.device.type == "cuda":
            return self._replayed(tokens)
        return logits_of(base_lm(self.lm), self._hidden(tokens, self.position)).float()

    def _replayed(self, tokens: Tensor) -> Tensor:
        """The same by a CUDA graph, which is captured anew when shapes change; the step before it warms up."""
        if self.graph is not None and self.graph_version == self.cache.version:
            self.tokens.copy_(tokens)
            self.graph.replay()
            return self.logits
        logits = logits_of(base_lm(self.lm), self._hidden(tokens, self.position)).float()
        if self.graph_version != self.cache.version:
            self.graph_version, self.graph, self.tokens = self.cache.version, None, tokens.clone()
            self.cache.masks = {}  # they are made inside the graph
            graph = torch.cuda.CUDAGraph()
            with contextlib.suppress(RuntimeError):  # a layer that asks the device for a value: no graph of these shapes
                with torch.cuda.graph(graph):
                    self.logits = logits_of(base_lm(self.lm), self._hidden(self.tokens, self.position)).float()
                self.graph = graph
        return logits


class PaddedDecoder:
    """The same for architectures whose attention cannot be replaced: transformers' own cache, masks and padding."""

    def __init__(self, lm: Any, prompts: Sequence[Sequence[int]], owner: Sequence[int], max_new_tokens: int):
        inner = base_lm(lm)
        self.lm, self.cache = lm, DynamicCache(config=inner.config.get_text_config())
        self.owner = torch.tensor(owner, device=inner.device)
        longest = max(map(len, prompts))
        self.ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=inner.device)
        self.mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=inner.device)
        self.understood = inspect.signature(inner.forward).parameters

    def _call(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        optional = {"position_ids": position_ids, "logits_to_keep": 1}
        optional = {name: value for name, value in optional.items() if name in self.understood}
        out = self.lm(input_ids=ids, attention_mask=self.mask, past_key_values=self.cache, use_cache=True, **optional)
        return out.logits[:, -1].float()

    def read_prompts(self) -> Tensor:
        position_ids = (self.mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._call(self.ids, position_ids)
        self.position = position_ids[:, -1]
        self._select(self.owner)
        return logits[self.owner]

    def _select(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.mask, self.position = self.mask[rows], self.position[rows]

    def keep(self, going: np.ndarray) -> Tensor:
        kept = to_device(going.nonzero()[0], self.mask.device)
        self._select(kept)
        return kept

    def next_logits(self, tokens: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        self.position = self.position + 1
        return self._call(tokens[:, None], self.position[:, None])


def draw(logits: Tensor, uniforms: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """One token per row by inverting the cumulative distribution at a uniform number.

    logits (rows, V), uniforms (rows,) in [0, 1). Returns tokens (rows,) and their log-probabilities (rows,) under
    softmax(logits / temperature), whole. temperature 0: the most probable token, with its log-probability at 1.
    top_k and top_p (Holtzman et al. 2020, arXiv 1904.09751) restrict what can be drawn.
    """
    if temperature == 0:
        largest, tokens = logits.max(-1)
        return tokens, largest - logits.logsumexp(-1)
    probs = (logits if temperature == 1 else logits / temperature).softmax(-1)
    V = probs.shape[-1]
    if top_p >= 1.0 and not 0 < top_k < V:
        tokens = _invert(probs, uniforms)
    else:
        if 0 < top_k < V:
            ordered, order = probs.topk(top_k)
        else:
            ordered, order = probs.sort(descending=True, stable=True)
        if top_p < 1.0:
            reached = ordered.cumsum(-1)
            keep = reached - ordered < top_p * reached[:, -1:]  # up to and with the token that crosses top_p
            keep[:, 0] = True
            ordered = ordered * keep
        tokens = order.gather(-1, _invert(ordered, uniforms))
    return tokens[:, 0], probs.gather(-1, tokens)[:, 0].log()


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """(rows, W) weights of any sum, (rows,) uniforms -> (rows, 1): the index at which the share `uniforms` is reached.

    Of a large vocabulary in two levels: which block of it, then which token of the block. A cumulative sum over all of it
    would be one more pass over memory, and in float32 it would be too coarse for rare tokens; these short ones are in
    float64. What remains is that a float32 uniform has 24 bits. An index of weight 0 is never given.
    """
    W = weights.shape[-1]
    if W <= DRAW_AT_ONCE:
        return _invert_short(weights.double(), uniforms[:, None].double())[0]
    whole = W - W % DRAW_BLOCK
    blocks = weights[:, :whole].unflatten(-1, (whole // DRAW_BLOCK, DRAW_BLOCK)).sum(-1)
    blocks = torch.cat([blocks, weights[:, whole:].sum(-1, keepdim=True)], -1).double()
    block, share = _invert_short(blocks, uniforms[:, None].double())
    index = block * DRAW_BLOCK + torch.arange(DRAW_BLOCK, device=weights.device)
    inside = weights.gather(-1, index.clamp(max=W - 1)) * (index < W)
    return block * DRAW_BLOCK + _invert_short(inside.double(), share)[0]


def _invert_short(weights: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, W) float64, (rows, 1) in [0, 1) -> the index at which it is reached, and how far in, in [0, 1)."""
    cumulative = weights.cumsum(-1)
    target = share * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).clamp(max=weights.shape[-1] - 1)
    weight = weights.gather(-1, index)
    return index, ((target - cumulative.gather(-1, index) + weight) / weight).clamp(0, 1 - 2**-24)
