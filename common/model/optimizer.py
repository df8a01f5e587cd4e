"""AdamW and the learning rate as a pure function of the step."""

import math
from collections.abc import Callable

from common.errors import UserError

import torch
from torch import nn

SCHEDULES = ("cosine", "linear", "constant", "wsd")


def adamw(
    model: nn.Module, learning_rate: float, weight_decay: float, betas: tuple[float, float], epsilon: float
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) on the trained parameters, weight decay on matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = all(p.device.type in ("cpu", "cuda") for p in trained)  # one kernel for the whole update, where it exists
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=fused)


def schedule(
    kind: str, peak: float, total_steps: int, warmup_steps: float, decay_fraction: float, min_ratio: float
) -> Callable[[int], float]:
    """step -> learning rate, for steps 0 .. total_steps - 1.

    Linear warm-up over warmup_steps (below 1: that share of the run), then cosine, linear or no fall to min_ratio · peak;
    wsd stays flat and falls linearly over the last decay_fraction of the run (Hu et al. 2024, arXiv 2404.06395).
    """
    if kind not in SCHEDULES:
        raise UserError(f"--lr_scheduler_type {kind}: one of {', '.join(SCHEDULES)}")
    warmup = round(warmup_steps * total_steps) if warmup_steps < 1 else round(warmup_steps)

    def at(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        progress = (step - warmup) / max(1, total_steps - warmup)
        if kind == "cosine":
            fall = 0.5 * (1 + math.cos(math.pi * progress))
        elif kind == "linear":
            fall = 1 - progress
        elif kind == "wsd":
            fall = min(1.0, (1 - step / total_steps) / max(decay_fraction, 1e-9))
        else:
            fall = 1.0
        return peak * (min_ratio + (1 - min_ratio) * fall)

    return at


def set_lr(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
