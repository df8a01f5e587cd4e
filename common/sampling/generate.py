"""Sampling: prompts -> completions with the log-probabilities of their tokens.

A prompt is read once, however many completions it gets, and a finished completion leaves the batch. Each
completion has its own random generator, so that it does not depend on the rest of the batch.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
from functools import partial
from typing import NamedTuple, Protocol

from common.errors import say
from common.memory import compute_dtype, empty_caches, finest_dtype, is_oom, to_device
from common.model.attention import FLAT
from common.model.experts import expert_modules
from common.model.flat_model import FlatModel, base_lm, body, check_positions, is_sharded, num_positions
from common.model.lm_head import logits_of, weight_for_float32
from common.model.sharded import gathered as gathered_weights
from common.sampling import kv_cache
from common.sampling.cuda_graph import StepGraph, completions_at_once
from common.sampling.kv_cache import CACHED, KVCache
from common.sampling.padded import (
    PaddedDecoder,
    WholeDecoder,
    cache_name,
    caches_join,
    end_to_end,
    steps_as_trained,
)
import numpy as np
import torch
from torch import Tensor, nn

AT_ONCE = 128  # completions, where memory is unknown
DRAW_BLOCK = 128  # tokens per block of the vocabulary in the two-level draw: see _invert
DRAW_AT_ONCE = 1024  # up to this vocabulary size a single level is faster


class Sampled(NamedTuple):
    """A completion."""

    ids: list[int]  # the sampled tokens, including the stop token
    # log-probability of each under the model at the sampling temperature, before top_k and top_p
    logps: list[float]
    finished: bool  # ended with a stop token; False: truncated at max_new_tokens


class Decoder(Protocol):
    """Logits of the next tokens, step by step, for completions of P distinct prompts."""

    def read_prompts(self) -> Tensor:
        """(C, V) float32 logits of the first token of every completion."""

    def keep(self, keep: np.ndarray) -> Tensor:
        """Drop completions: keep (n,) bool. Returns the old indices of the remaining rows, (n',)."""

    def next_logits(self, tokens: Tensor) -> Tensor:
        """(n,) newest tokens -> (n, V) float32."""


class SamplingMethod(NamedTuple):
    """How a kind of model is sampled from."""

    # (prompts, prompt of each, longest)
    decoder: Callable[[Sequence[Sequence[int]], Sequence[int], int], Decoder]
    attention: str  # the attention implementation to sample with, if the model is trained on flat rows
    equal_lengths: bool = False  # whether only prompts of equal length can be completed together


def sample(
    model: FlatModel,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[tuple[int, ...]],
    *,
    max_new_tokens: int | Sequence[int],
    stop_ids: Sequence[int] | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    batch_size: int | None = None,
) -> list[Sampled]:
    """Sample one completion for each prompt (token ids). The same prompt may occur many times.

    keys: one tuple of non-negative integers per prompt, the seed of its completion. max_new_tokens: one limit
    for all, or one per completion. stop_ids: the tokens that end a completion; None: the model's own.
    temperature 0 takes the most probable token. top_k 0 and top_p 1 leave the distribution unrestricted.
    batch_size: completions sampled at a time, which limits memory and changes nothing else; None: as many as
    fit. It is halved when memory runs out.

    A completion ends, unfinished, at the model's last position. Raises UserError for a longer prompt.
    """
    if stop_ids is None:
        stop_ids = model.stop_ids
    if isinstance(max_new_tokens, int):
        limits = [max_new_tokens] * len(prompts)
    else:
        limits = list(max_new_tokens)
    lengths = [len(prompt) for prompt in prompts]
    check_positions(model, max(lengths, default=0), "the length of the prompts")
    longest = 0  # tokens of a prompt and its completion
    for i, (length, limit) in enumerate(zip(lengths, limits, strict=True)):
        # the last token is sampled and never read: it needs no position
        limits[i] = min(limit, num_positions(model) - length + 1)
        longest = max(longest, length + limits[i])
    method = choose_method(model, longest)
    batch_size = batch_size or default_batch_size(model, method, longest)
    waiting = list(range(len(prompts)))  # indices of prompts
    if method.equal_lengths:
        waiting.sort(key=lambda i: lengths[i])
    completions = {}
    with generating(model, method.attention) as lm:
        while waiting:
            members = waiting[:batch_size]
            if method.equal_lengths:
                # still the first ones of `waiting`, which is sorted by length
                members = [i for i in members if lengths[i] == lengths[members[0]]]
            distinct, owner = distinct_prompts([prompts[i] for i in members])
            member_keys = [keys[i] for i in members]
            member_limits = [limits[i] for i in members]
            batch = None
            try:
                decoder = method.decoder(distinct, owner, max(member_limits))
                batch = _sample_batch(
                    decoder, member_keys, stop_ids, member_limits, temperature, top_k, top_p
                )
            except Exception as error:
                if not is_oom(error) or len(members) == 1:
                    raise
            if batch is None:  # by now the exception is gone, and with it the tensors that it held
                batch_size = len(members) // 2
                decoder = None  # with its cache
                empty_caches(base_lm(lm).device)
                say(f"sampling: out of memory; again with {batch_size} at a time, which changes nothing else")
                continue
            completions |= zip(members, batch, strict=True)
            waiting = waiting[len(members) :]
    return [completions[i] for i in range(len(prompts))]


def distinct_prompts(prompts: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], list[int]]:
    """The different ones among the prompts, and for each prompt its index among them."""
    indices = {}
    owner = []
    for prompt in prompts:
        owner.append(indices.setdefault(tuple(prompt), len(indices)))
    return list(indices), owner


def choose_method(model: FlatModel, longest: int) -> SamplingMethod:
    """longest: the largest number of tokens of a prompt and its completion."""
    flat = SamplingMethod(partial(FlatDecoder, model.lm), CACHED)
    if not model.padded and not model.hybrid.mixers and not model.hybrid.rotaries:
        return flat
    # No cache fits: the layers keep a state that transformers' cache lacks, or a completion may grow past the
    # length up to which rotary frequencies stay the same, so that earlier entries would have the wrong ones.
    if cache_name(model) is None or longest > model.hybrid.max_unscaled_length:
        return SamplingMethod(partial(WholeDecoder, model), FLAT)
    if not model.padded and not model.hybrid.mixers:
        return flat
    inner = base_lm(model.lm)
    equal_lengths = model.padded or not caches_join(inner)
    return SamplingMethod(partial(PaddedDecoder, model), inner.stock_attention, equal_lengths)


def default_batch_size(model: FlatModel, method: SamplingMethod, longest: int) -> int:
    """How many completions to sample together."""
    lm = base_lm(model.lm)
    if lm.device.type != "cuda" or method.attention != CACHED:
        return AT_ONCE
    return max(AT_ONCE, completions_at_once(lm, longest))


@contextlib.contextmanager
def generating(model: FlatModel, attention: str = CACHED) -> Iterator[nn.Module]:
    """Context with the language model ready to sample: in eval mode, with this attention if it is trained on
    flat rows, not compiled. Everything is restored afterwards.

    With sharded weights all processes enter it together.
    """
    kv_cache.register()
    lm = model.lm
    inner = base_lm(lm)
    was_training = model.training
    implementation = inner.config._attn_implementation
    lm.eval()
    if implementation == FLAT:
        inner.set_attn_implementation(attention)
    limited = steps_as_trained(model)
    gathered = gathered_weights(model) if is_sharded(model) else contextlib.nullcontext()
    eager = torch.compiler.set_stance("force_eager")
    try:
        # Compiled blocks would be recompiled for every number of rows. Weights are gathered outside inference
        # mode, because a backward pass may not use tensors created in it.
        with limited, cast_once(inner) as cached_casts, torch.no_grad(), gathered, eager:
            # Inference mode is faster, but in it autocast would not keep the casts.
            fastest = contextlib.nullcontext() if cached_casts else torch.inference_mode()
            with fastest:
                yield lm
    finally:
        if implementation == FLAT:
            inner.set_attn_implementation(FLAT)
        model.train(was_training)  # not lm: without dropout only recomputed blocks are in training mode


@contextlib.contextmanager
def cast_once(lm: nn.Module) -> Iterator[bool]:
    """Context in which weights are cast for autocast once instead of for each token. Yields whether autocast
    is active.

    Autocast itself caches only weights that require a gradient, none in inference mode, and none of experts,
    whose product it does not know.
    """
    if not torch.is_autocast_enabled(lm.device.type):
        yield False
        return
    frozen = [p for p in lm.parameters() if p.dtype == torch.float32 and not p.requires_grad]
    originals = [(p, p.data) for p in weights_of_experts(lm)]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        for parameter, data in originals:
            parameter.data = data.to(compute_dtype(data))
        yield True
    finally:
        for parameter, data in originals:
            parameter.data = data
        for parameter in frozen:
            parameter.requires_grad_(False)
        torch.clear_autocast_cache()  # the casts have no graph, and so no use in training


def weights_of_experts(lm: nn.Module) -> list[nn.Parameter]:
    """The parameters that hold a matrix for each expert, unless they are sharded."""
    weights = []
    for module in expert_modules(lm):
        for parameter in module.parameters(recurse=False):
            if parameter.dim() == 3 and type(parameter) is nn.Parameter:
                weights.append(parameter)
    return weights


def _sample_batch(
    decoder: Decoder,
    keys: Sequence[tuple[int, ...]],
    stop_ids: Sequence[int],
    limits: Sequence[int],
    temperature: float,
    top_k: int,
    top_p: float,
) -> list[Sampled]:
    """One completion for each of C keys. limits: the maximum number of tokens of each."""
    logits = decoder.read_prompts()  # (C, V)
    device = logits.device
    C = len(keys)
    max_new_tokens = max(limits)
    last = to_device(np.array(limits) - 1, device)  # index of the last token that each may get
    uniforms = np.stack([np.random.default_rng(key).random(max_new_tokens, np.float32) for key in keys])
    uniforms = to_device(uniforms, device)
    stops = torch.zeros(max([logits.shape[-1] - 1, *stop_ids]) + 1, dtype=torch.bool, device=device)
    stops[list(stop_ids)] = True

    tokens = torch.zeros(C, max_new_tokens, dtype=torch.long, device=device)
    logps = torch.zeros(C, max_new_tokens, device=device)
    rows = torch.arange(C, device=device)  # the completions in the batch
    unfinished = torch.ones(C, dtype=torch.bool, device=device)
    # Checking for finished ones synchronises with a GPU: only every few tokens. There, fewer rows also mean a
    # new CUDA graph.
    check_every, shrink_below = (1, 0.9) if device.type == "cpu" else (8, 0.75)
    for t in range(max_new_tokens):
        chosen, tokens_logps = draw(logits, uniforms[rows, t], temperature, top_k, top_p)
        tokens[rows, t] = chosen
        logps[rows, t] = tokens_logps
        if t + 1 == max_new_tokens:
            break
        unfinished &= ~stops[chosen] & (t < last[rows])  # rows that are finished go on until they are dropped
        if t % check_every == check_every - 1:
            keep = unfinished.cpu().numpy()
            if not keep.any():
                break
            if keep.sum() < shrink_below * len(rows):
                kept = decoder.keep(keep)
                rows = rows[kept]
                chosen = chosen[kept]
                unfinished = unfinished[kept]
        logits = decoder.next_logits(chosen)

    ended = stops[tokens] & (torch.arange(max_new_tokens, device=device) <= last[:, None])
    finished = ended.any(-1)
    ends = torch.where(finished, ended.int().argmax(-1) + 1, last + 1)
    columns = (tokens.tolist(), logps.tolist(), ends.tolist(), finished.tolist())
    completions = []
    for ids, ids_logps, end, is_finished in zip(*columns, strict=True):
        completions.append(Sampled(ids[:end], ids_logps[:end], is_finished))
    return completions


class FlatDecoder:
    """A Decoder that calls the model on flat rows, as in training: first all prompts, then the newest
    tokens."""

    def __init__(
        self,
        lm: nn.Module,
        prompts: Sequence[Sequence[int]],
        owner: Sequence[int],
        max_new_tokens: int,
        static: bool | None = None,
    ):
        """lm: with `cached_attention`. prompts: P distinct ones. owner: the prompt of each of C completions.

        static: keep memory at fixed addresses from step to step, as a CUDA graph requires; None: on a GPU
        only.
        """
        self.lm = lm
        self.prompts = prompts
        self.device = base_lm(lm).device
        if static is None:
            static = self.device.type == "cuda"
        self.cache = KVCache(prompts, owner, max_new_tokens, self.device, static)
        self.owner = torch.tensor(owner, device=self.device)
        self.graph = StepGraph() if self.device.type == "cuda" else None
        self.head_weight = weight_for_float32(base_lm(lm))  # cast once, not at each step

    def _hidden(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        """(T,), (T,) -> (T, D)."""
        rows = {"input_ids": ids[None], "position_ids": position_ids[None]}
        return body(self.lm)(**rows, use_cache=False, kv_cache=self.cache).last_hidden_state[0]

    def _logits(self, hidden: Tensor) -> Tensor:
        """(n, D) -> (n, V)."""
        return logits_of(base_lm(self.lm), hidden, self.head_weight)

    def read_prompts(self) -> Tensor:
        lengths = torch.tensor(list(map(len, self.prompts)))
        hidden = self._hidden(*end_to_end(self.prompts, self.device))
        self.position = (lengths - 1).to(self.device)[self.owner]  # of the newest token
        last = lengths.cumsum(0).to(self.device) - 1
        return self._logits(hidden[last])[self.owner]

    def keep(self, keep: np.ndarray) -> Tensor:
        kept = self.cache.keep(keep)
        self.position = self.position[kept]
        return kept

    def next_logits(self, tokens: Tensor) -> Tensor:
        self.cache.advance()
        self.position += 1  # in place: a CUDA graph reads this memory
        if self.graph is None:
            return self._next(tokens)
        return self.graph(self._next, tokens, self.cache.version)

    def _next(self, tokens: Tensor) -> Tensor:
        self.cache.begin_pass()
        return self._logits(self._hidden(tokens, self.position))


def draw(
    logits: Tensor, uniforms: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution at a uniform number.

    logits (rows, V), uniforms (rows,) in [0, 1). Returns tokens (rows,) and their log-probabilities (rows,)
    under the unrestricted softmax(logits / temperature). temperature 0: the most probable token, with its
    log-probability at 1. top_k and top_p (Holtzman et al. 2020, arXiv 1904.09751) restrict what can be drawn.
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
            # up to and including the token that crosses top_p
            keep = reached - ordered < top_p * reached[:, -1:]
            keep[:, 0] = True
            ordered = ordered * keep
        tokens = order.gather(-1, _invert(ordered, uniforms))
    return tokens[:, 0], probs.gather(-1, tokens)[:, 0].log()


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """(rows, W) weights of any sum, (rows,) uniforms -> (rows, 1): the index at which the cumulative share
    reaches `uniforms`.

    In two levels for a large vocabulary: first the block, then the token in it. A cumulative sum over all
    tokens would be another pass over memory, and in float32 too coarse for rare tokens; these short ones are
    in float64 (where available), so the 24 bits of a float32 uniform are the only limit. An index of weight 0
    is never returned.
    """
    W = weights.shape[-1]
    fine = finest_dtype(weights.device)
    share = uniforms[:, None].to(fine)
    if W <= DRAW_AT_ONCE:
        return _invert_short(weights.to(fine), share)[0]
    full = W - W % DRAW_BLOCK  # tokens in full blocks
    blocks = weights[:, :full].unflatten(-1, (full // DRAW_BLOCK, DRAW_BLOCK)).sum(-1)
    rest = weights[:, full:].sum(-1, keepdim=True)
    block, share = _invert_short(torch.cat([blocks, rest], -1).to(fine), share)
    start = block * DRAW_BLOCK
    index = start + torch.arange(DRAW_BLOCK, device=weights.device)
    inside = weights.gather(-1, index.clamp(max=W - 1)) * (index < W)
    return start + _invert_short(inside.to(fine), share)[0]


def _invert_short(weights: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, W) float64, (rows, 1) in [0, 1) -> the index whose interval contains the share, and where in it,
    in [0, 1)."""
    cumulative = weights.cumsum(-1)
    below_1 = share.clamp(max=1 - 2 * torch.finfo(share.dtype).eps)
    target = below_1 * cumulative[:, -1:]  # below the sum even in float32
    index = torch.searchsorted(cumulative, target, right=True).clamp(max=weights.shape[-1] - 1)
    weight = weights.gather(-1, index)
    inside = (target - cumulative.gather(-1, index) + weight) / weight
    return index, inside.clamp(0, 1 - 2**-24)
