"""What a model does to the output of its head before the softmax: a scale, and for some a cap."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class LogitTransform(NamedTuple):
    """A model's transform of its head's output x: `cap · tanh(scale · x / cap)`, or, without a cap, `scale ·
    x`."""

    scale: float
    cap: float | None


def logit_transform(inner: nn.Module, temperature: float = 1.0) -> LogitTransform:
    config = inner.config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):  # Cohere, Falcon-H1, Muse
        scale *= getattr(config, name, None) or 1.0
    # Granite, Inkling; HyperCLOVA X multiplies
    for name in ("logits_scaling", "logits_mup_width_multiplier"):
        factor = getattr(config, name, None) or 1.0
        scale = scale * factor if config.model_type.startswith("hyperclovax") else scale / factor
    cap = None
    # Gemma, RecurrentGemma, xLSTM
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        cap = cap or getattr(config, name, None)
    if not cap:
        return LogitTransform(scale / temperature, None)
    return LogitTransform(scale / temperature, cap / temperature)


def apply(transform: LogitTransform, logits: Tensor) -> Tensor:
    """The transformed logits."""
    if transform.cap is not None:
        return transform.cap * torch.tanh(logits * (transform.scale / transform.cap))
    return logits if transform.scale == 1.0 else logits * transform.scale


def apply_(transform: LogitTransform, logits: Tensor, gradient: bool) -> Tensor | None:
    """`apply` in place; with gradient, returns a capped transform's derivative, divided by the scale."""
    if transform.cap is None:
        if transform.scale != 1.0:
            logits.mul_(transform.scale)
        return None
    logits.mul_(transform.scale / transform.cap).tanh_()
    derivative = logits.square().neg_().add_(1) if gradient else None
    logits.mul_(transform.cap)
    return derivative
