"""The LM head: hidden states of the trained positions -> log-probabilities of their tokens, a chunk of logits
at a time.

The full logits (N, V) never exist. With hidden size D, full logits cost 6·N·D·V operations: one matrix
product each for the logits, the gradient of the hidden states and the gradient of the head. The cost in
chunks depends on what is known when:

- `weighted_nll`: the tokens' weights are known before the call (pretrain, SFT). The gradient of `-Σ w_t · log
  p_t` is computed together with the logits, chunk by chunk: 6·N·D·V.
- `log_probs`: the gradient of the log-probabilities is known only in the backward pass (DPO, GRPO). The
  logits of more than one chunk are computed twice: 8·N·D·V.
- With a frozen head (LoRA) both compute the gradient at once: 4·N·D·V.

The arithmetic is in fused_head.py. `map_logits` passes the logits themselves, in chunks, to any function.

Shapes: N trained positions, V tokens of the vocabulary, D hidden size, n rows of a chunk.
"""

from collections.abc import Callable

from common.memory import compute_dtype
from common.model.fused_head import Scoring, WeightedNLL, chunk_rows, gives_float32, token_scores
from common.model.fused_layers import is_hooked
from common.model.logit_transform import apply, logit_transform
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def logits_of(inner: nn.Module, hidden: Tensor, weight: Tensor | None = None) -> Tensor:
    """Logits (N, V) of a transformers model's LM head for hidden states (N, D), transformed as the model does,
    in float32 (or float64), by the arithmetic of `log_probs`.

    weight: `weight_for_float32(inner)`, for whoever calls this often.
    """
    if weight is None:
        weight = weight_for_float32(inner)
    if weight is not None:
        logits = torch.mm(hidden.to(weight.dtype), weight.t(), out_dtype=torch.float32)
    else:
        logits = inner.get_output_embeddings()(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return apply(logit_transform(inner), logits)


def weight_for_float32(inner: nn.Module) -> Tensor | None:
    """The weight (V, D) of a plain head, in the 16 bits that it is multiplied in, if the product gives float32;
    else None."""
    linear = _plain_linear(inner)
    if linear is None:
        return None
    dtype = compute_dtype(linear.weight)
    if not gives_float32(linear.weight, linear.bias, dtype):
        return None
    return linear.weight.to(dtype)


def log_probs(
    inner: nn.Module,
    hidden: Tensor,
    tokens: Tensor,
    temperature: float = 1.0,
    *,
    entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[Tensor, ...]:
    """Log-probabilities of tokens, from the hidden states that predict them.

    inner: the transformers model; hidden (N, D), tokens (N,) int64; temperature divides the logits. Returns
    float32 (N,) each: logps and, with entropy, each distribution's entropy in nats, and 1 if the token is the
    most probable one, else 0. Gradients flow through logps, and with entropy_grad through the entropy.
    """
    transform = logit_transform(inner, temperature)
    linear = _plain_linear(inner)
    if linear is not None:
        scoring = Scoring(tokens, transform, compute_dtype(linear.weight), entropy, entropy_grad)
        scores = token_scores(hidden, linear.weight, linear.bias, scoring)
        return scores if entropy else scores[:1]

    def chunk_scores(h: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        logits = apply(transform, inner.get_output_embeddings()(h).float())
        normalizer = logits.logsumexp(-1)
        chosen = logits.gather(-1, t[:, None])[:, 0]
        logps = chosen - normalizer
        if not entropy:
            return (logps,)
        # without entropy_grad, nothing is saved for the backward pass of the entropy
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_grad):
            probs = (logits - normalizer[:, None]).exp()
            entropies = normalizer - (probs * logits).sum(-1)
        correct = chosen >= logits.amax(-1)
        return logps, entropies, correct.float()

    return _in_chunks(inner, chunk_scores, hidden, tokens)


def map_logits(
    inner: nn.Module,
    hidden: Tensor,
    rows: Tensor,
    function: Callable[[Tensor, Tensor], Tensor],
    temperature: float,
) -> Tensor:
    """Apply function(logits (n, V) float32, rows (n,)) -> (n, ...) chunk by chunk; returns the results
    concatenated, (N, ...).

    hidden (N, D), rows (N,) int64, one or more values per position; temperature divides the logits. Each
    chunk is recomputed in the backward pass, so that only one chunk's logits exist at a time.
    """
    transform = logit_transform(inner, temperature)

    def map_chunk(h: Tensor, r: Tensor) -> tuple[Tensor]:
        result = function(apply(transform, inner.get_output_embeddings()(h).float()), r)
        is_tensor = isinstance(result, Tensor)
        if not is_tensor or not result.dim() or len(result) != len(r):
            given = tuple(result.shape) if is_tensor else type(result).__name__
            raise ValueError(
                f"map_logits gave {given} for {len(r)} rows of logits; expected a tensor ({len(r)}, ...)"
            )
        return (result,)

    return _in_chunks(inner, map_chunk, hidden, rows, random=True)[0]


def _in_chunks(
    inner: nn.Module,
    function: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    hidden: Tensor,
    other: Tensor,
    random: bool = False,
) -> tuple[Tensor, ...]:
    """function(hidden, other) in chunks of rows. If there are several, each is recomputed in the backward
    pass, with the same random numbers if the function may be `random`, or an adapter of the head has dropout."""
    # not the weight's shape, which ZeRO-3 hides
    rows = chunk_rows(hidden.device, inner.config.get_text_config().vocab_size)
    if len(hidden) <= rows:
        return function(hidden, other)
    # Under ZeRO-3 each call of the head gathers it: the number of calls must be the same on every process.
    if hasattr(weight_of(inner.get_output_embeddings()), "ds_id"):
        return function(hidden, other)
    dropout = any(isinstance(part, nn.Dropout) for part in inner.get_output_embeddings().modules())
    chunks = []
    for h, o in zip(hidden.split(rows), other.split(rows), strict=True):
        chunks.append(checkpoint(function, h, o, use_reentrant=False, preserve_rng_state=random or dropout))
    return tuple(map(torch.cat, zip(*chunks, strict=True)))


def weighted_nll(
    inner: nn.Module, hidden: Tensor, tokens: Tensor, weights: Tensor, temperature: float = 1.0
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """`-Σ w_t · log p_t`, with the gradient computed in this call if that saves work.

    As `log_probs`, with weights (N,) float32, which get no gradient. Returns the loss (), and logps, entropy
    and correct, (N,) each, without gradient. The loss supports one backward pass.
    """
    linear = _plain_linear(inner)
    if linear is not None and linear.weight.requires_grad and torch.is_grad_enabled():
        dtype = compute_dtype(linear.weight)
        # float16 waits for the backward pass, where the gradient includes the loss scale that keeps it in
        # float16's range.
        if dtype != torch.float16:
            scoring = Scoring(tokens, logit_transform(inner, temperature), dtype)
            loss, *scores = WeightedNLL.apply(hidden, linear.weight, linear.bias, weights, scoring)
            return loss, tuple(scores)
    logps, entropy, correct = log_probs(inner, hidden, tokens, temperature, entropy=True)
    loss = -(weights * logps).sum()
    return loss, (logps.detach(), entropy.detach(), correct)


# --- the head of a model ------------------------------------------------------------------------------------


def weight_of(module: nn.Module) -> Tensor:
    """The weight of an embedding or a head, without the rows that peft trains (merging them would make a
    copy)."""
    adapter = getattr(module, "token_adapter", None)
    return getattr(adapter, "base_layer", module).weight


def _plain_linear(inner: nn.Module) -> nn.Linear | None:
    """The head if it is a plain matrix: not adapted, quantised, sharded (DTensor, ZeRO-3) or hooked; else
    None."""
    module = inner.get_output_embeddings()
    if type(module) is not nn.Linear or type(module.weight) not in (Tensor, nn.Parameter):
        return None
    if is_hooked(module) or hasattr(module.weight, "ds_id"):
        return None
    return module
