"""Sampling: prompts -> completions with the log-probabilities of their tokens.

Each prompt is read once, however many completions it gets; finished rows leave the batch. The randomness of a completion
comes from a generator of its own, so what is sampled does not depend on what else is in the batch.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from common.errors import UserError
from common.model import LogProbModel, base_lm, generating

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache


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
        for start in range(0, len(prompts), batch_size):
            part = slice(start, start + batch_size)
            done += _sample_batch(lm, prompts[part], keys[part], list(stop_ids), max_new_tokens, temperature, top_k, top_p)
    return done


def why_not_sampled(model: LogProbModel) -> str | None:
    """Why this architecture cannot be sampled from; None where it can."""
    lm = base_lm(model.lm)
    layers = DynamicCache(config=lm.config.get_text_config()).layers
    selectable = all(hasattr(layer, "batch_select_indices") for layer in layers)  # a layer with a state is not
    if selectable and "past_key_values" in inspect.signature(lm.forward).parameters:
        return None
    return f"sampling from {type(lm).__name__} is not supported: it has no key/value cache to share"


def _sample_batch(
    lm: Any,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[tuple[int, ...]],
    stop_ids: list[int],
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
) -> list[Completion]:
    device, C = base_lm(lm).device, len(prompts)
    uniforms = np.stack([np.random.default_rng(key).random(max_new_tokens, np.float32) for key in keys])
    uniforms = torch.from_numpy(uniforms).to(device)
    stops = torch.tensor(stop_ids, device=device)

    # Read each distinct prompt once, left-padded, then give every completion its copy of the cache.
    distinct = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
    longest = max(map(len, distinct))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in distinct], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in distinct], device=device)
    place = {prompt: i for i, prompt in enumerate(distinct)}
    copies = torch.tensor([place[tuple(prompt)] for prompt in prompts], device=device)
    cache = DynamicCache(config=base_lm(lm).config.get_text_config())
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = _next_logits(lm, ids, mask, position_ids, cache)[copies]
    cache.batch_select_indices(copies)
    mask, position = mask[copies], position_ids[copies, -1]

    tokens = torch.zeros(C, max_new_tokens, dtype=torch.long, device=device)
    logps = torch.zeros(C, max_new_tokens, device=device)
    rows = torch.arange(C, device=device)  # the completions that are still being sampled
    finished = torch.zeros(C, dtype=torch.bool, device=device)
    for t in range(max_new_tokens):
        chosen, chosen_logps = draw(logits, uniforms[rows, t], temperature, top_k, top_p)
        tokens[rows, t], logps[rows, t] = chosen, chosen_logps
        finished[rows] |= torch.isin(chosen, stops)
        # Whether all are done is asked of the device only now and then where asking makes it wait.
        if device.type == "cpu" or t % 8 == 7:
            going = (~finished[rows]).nonzero().flatten()
            if len(going) == 0:
                break
            if len(going) < 0.9 * len(rows):
                rows, mask, position, chosen = rows[going], mask[going], position[going], chosen[going]
                cache.batch_select_indices(going)
        if t + 1 < max_new_tokens:
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            position = position + 1
            logits = _next_logits(lm, chosen[:, None], mask, position[:, None], cache)

    completions = []
    for row, row_logps in zip(tokens.tolist(), logps.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(row) if token in stop_ids), None)
        completions.append(Completion(row[:end], row_logps[:end], end is not None))
    return completions


def _next_logits(lm: Any, ids: Tensor, mask: Tensor, position_ids: Tensor, cache: DynamicCache) -> Tensor:
    """(rows, V) float32 logits of the token after the last one."""
    understood = inspect.signature(base_lm(lm).forward).parameters
    optional = {"position_ids": position_ids, "logits_to_keep": 1}
    optional = {name: value for name, value in optional.items() if name in understood}
    out = lm(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **optional)
    return out.logits[:, -1].float()


def draw(logits: Tensor, uniforms: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> tuple[Tensor, Tensor]:
    """One token per row by inverting the cumulative distribution at a uniform number.

    logits (rows, V), uniforms (rows,) in [0, 1). Returns tokens (rows,) and their log-probabilities (rows,) under
    softmax(logits / temperature), whole. temperature 0: the most probable token, with its log-probability at 1.
    top_k and top_p (Holtzman et al. 2020, arXiv 1904.09751) restrict what can be drawn.
    """
    if temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    all_logps = (logits / temperature).log_softmax(-1)
    weights = all_logps.exp()
    if top_k > 0 and top_k < weights.shape[-1]:
        weights = weights * (weights >= weights.topk(top_k).values[:, -1:])
    if top_p < 1.0:
        weights = weights / weights.sum(-1, keepdim=True)
        ordered, order = weights.sort(descending=True, stable=True)
        keep = ordered.cumsum(-1) - ordered < top_p  # up to and with the token that crosses top_p
        keep[:, 0] = True
        ordered = ordered * keep
        weights = torch.zeros_like(weights).scatter(-1, order, ordered)
    cumulative = weights.cumsum(-1)
    tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]
    # Rounding may point past the last token that has weight.
    last = weights.shape[-1] - 1 - (weights.flip(-1) > 0).to(torch.int8).argmax(-1)
    tokens = torch.minimum(tokens, last)
    return tokens, all_logps.gather(-1, tokens[:, None])[:, 0]
