"""A language model, called on a flat batch for per-token log-probabilities, and the parts and figures of it.

`LogProbModel` is the one way in which a model is called for training, in all four stages. It runs the body of any causal
language model on the flat row, and applies the LM head (common/head.py) only at the positions that are trained.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from common.memory import to_device
from common.model.attention import first_places, plan_flat_row
from common.model.lm_head import nll, score

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class TokenStats(NamedTuple):
    """Per token of the flat row, all (T,) float32 and 0 where the token is not a target."""

    logps: Tensor
    entropy: Tensor  # of the distribution that the token was drawn from, in nats
    correct: Tensor  # 1 where the token was the most probable one; no gradient


class LogProbModel(nn.Module):
    """A causal language model that answers with log-probabilities.

    Called on a flat batch (see common/collators.py) it returns logps (T,) float32:
    `logps[t] = log p(token t | tokens before it in its sequence)` for the targets of the batch, 0 elsewhere.

    Architectures whose layers carry a state along the row, or whose attention cannot be replaced, go through a padded
    batch instead (`padded`); the result is the same.
    """

    def __init__(self, lm: nn.Module, *, padded: bool = False):
        super().__init__()
        self.lm = lm
        self.padded = padded
        self.offload = False  # what the body keeps for the backward pass is kept by the host
        self._no_split_modules = getattr(base_lm(lm), "_no_split_modules", None)  # read by FSDP's wrapping policy

    @property
    def config(self) -> Any:
        return self.lm.config

    def tie_weights(self) -> None:
        """Called by Accelerate where FSDP loads the weights on one process only, which unties them."""
        base_lm(self.lm).tie_weights()

    def forward(
        self,
        batch: dict[str, Any],
        temperature: float = 1.0,
        stats: bool = False,
        entropy_grad: bool = False,
        nll_weights: Tensor | None = None,
    ) -> Tensor | TokenStats | tuple[Tensor, TokenStats]:
        """batch: input_ids (1, T), position_ids (1, T), lengths (S ints), targets and previous (N,).

        temperature divides the logits, as it did when the tokens were sampled. Returns logps (T,), or TokenStats, in
        which only logps has a gradient, and with entropy_grad the entropy.

        With nll_weights (T,) it returns the loss `-Σ nll_weights[t] · logps[t]`, (), and TokenStats without a gradient:
        cheaper than the same sum over logps, because the gradient is formed on the way (see common/head.py).
        """
        targets = batch["targets"]
        hidden = self.hidden(batch)
        T = hidden.shape[0]

        def scattered(scores: tuple[Tensor, ...]) -> list[Tensor]:
            return [torch.zeros(T, dtype=s.dtype, device=s.device).index_put((targets,), s) for s in scores]

        predicted = base_lm(self.lm), hidden.index_select(0, batch["previous"]), batch["input_ids"][0, targets]
        if nll_weights is not None:
            loss, scores = nll(*predicted, nll_weights[targets], temperature)
            return loss, TokenStats(*scattered(scores))
        scores = scattered(score(*predicted, temperature, stats=stats, entropy_grad=entropy_grad))
        return TokenStats(*scores) if stats else scores[0]

    def hidden(self, batch: dict[str, Any]) -> Tensor:
        """What the LM head reads, (T, D)."""
        with torch.autograd.graph.save_on_cpu(pin_memory=True) if self.offload else contextlib.nullcontext():
            return self._hidden_padded(batch) if self.padded else self._hidden_flat(batch)

    def _hidden_flat(self, batch: dict[str, Any]) -> Tensor:
        return body(self.lm)(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            use_cache=False,  # with a cache, or with any attention_mask, transformers lets sequences see each other
            flat_row=plan_flat_row(batch["lengths"], batch["input_ids"].device, batch.get("places")),
        ).last_hidden_state[0]

    def _hidden_padded(self, batch: dict[str, Any]) -> Tensor:
        ids, lengths, places = batch["input_ids"][0], batch["lengths"], batch.get("places")
        if places is not None:
            ids = ids[to_device(places, ids.device)]
        padded = nn.utils.rnn.pad_sequence(ids.split(lengths), batch_first=True)
        mask = torch.arange(padded.shape[1], device=ids.device)[None] < torch.tensor(lengths, device=ids.device)[:, None]
        out = body(self.lm)(input_ids=padded, attention_mask=mask.long(), use_cache=False).last_hidden_state
        return out[mask] if places is None else out[mask][to_device(first_places(places), ids.device)]


# --- the parts of a transformers model ------------------------------------------------------------------------------


def base_lm(lm: nn.Module) -> nn.Module:
    """The transformers model under a LoRA wrapper, or the model itself."""
    return lm.get_base_model() if hasattr(lm, "get_base_model") else lm


def body(lm: nn.Module) -> nn.Module:
    """Everything but the LM head: token ids -> hidden states."""
    return base_lm(lm).base_model


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Where FSDP2 or DeepSpeed's ZeRO-3 shards the weights: all of them on each process, which may then call the language
    model on its own.

    All processes gather together, and each needs the memory of the whole model. Changes of the weights are lost.
    """
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    zero = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    for part in parts:
        part.unshard()
    # The hooks of both would shard each block again after its call, and remember the calls, whose number differs between
    # the processes, for what they gather in the next backward pass.
    hooked = list(model.modules()) if zero else parts
    hooks = [(kind, dict(kind)) for module in hooked for kind in (module._forward_pre_hooks, module._forward_hooks)]
    for kind, _ in hooks:
        kind.clear()
    try:
        with _zero_gathered(zero):
            yield
    finally:
        for kind, kept in hooks:
            kind.update(kept)
        for part in parts:
            part.reshard()


def _zero_gathered(parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager:
    if not parameters:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to 0: preference and policy losses compare log-probabilities, which dropout would blur."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


# --- figures --------------------------------------------------------------------------------------------------------


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(trained, all) parameters."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trained in sizes if trained), sum(n for n, _ in sizes)


def flops_per_token(model: LogProbModel, T: int) -> float:
    """Floating-point operations to train on one token: `6 · N + 6 · L · H · Dh · T`.

    N: parameters of the matrix products (all but the input embedding, the LM head included); L layers, H heads of size
    Dh, T the length of a sequence. Causal: the attention of a token spans T/2 others on average.
    """
    config = model.config.get_text_config()
    embedding = base_lm(model.lm).get_input_embeddings().weight
    tied = embedding is base_lm(model.lm).get_output_embeddings().weight
    N = sum(p.numel() for p in model.parameters()) - (0 if tied else embedding.numel())
    heads = getattr(config, "num_attention_heads", 0)  # a state-space model has none
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1))
    return 6.0 * N + 6.0 * config.num_hidden_layers * width * T


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 operations per second of the GPU by its data sheet; None where it is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    table = {
        "H100": 989e12,
        "H200": 989e12,
        "B200": 2250e12,
        "A100": 312e12,
        "L40S": 362e12,
        "L4": 121e12,
        "4090": 165e12,
    }
    return next((value for key, value in table.items() if key in name), None)
