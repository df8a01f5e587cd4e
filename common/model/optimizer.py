"""AdamW and the learning rate as a pure function of the step."""

import math
from collections.abc import Callable

from common.args import CommonArgs
from common.errors import UserError

import torch
from torch import nn

SCHEDULES = ("cosine", "linear", "constant", "wsd")


def adamw(args: CommonArgs, model: nn.Module) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) on the trained parameters, weight decay on matrices only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=all(p.device.type in ("cpu", "cuda") for p in trained),  # one kernel for the whole update, where it exists
    )


def schedule(args: CommonArgs, total_steps: int) -> Callable[[int], float]:
    """step -> learning rate, for steps 0 .. total_steps - 1.

    Linear warm-up over warmup_steps (below 1: that share of the run), then cosine, linear or no decay to min_lr_ratio ·
    learning_rate; wsd stays flat and falls linearly over the last lr_decay_fraction of the run (Hu et al. 2024, arXiv
    2404.06395).
    """
    kind, peak, least = args.lr_scheduler_type, args.learning_rate, args.min_lr_ratio
    if kind not in SCHEDULES:
        raise UserError(f"--lr_scheduler_type {kind}: one of {', '.join(SCHEDULES)}")
    warmup = round(args.warmup_steps * total_steps) if args.warmup_steps < 1 else round(args.warmup_steps)

    def lr_at(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        progress = (step - warmup) / max(1, total_steps - warmup)
        if kind == "cosine":
            share = 0.5 * (1 + math.cos(math.pi * progress))
        elif kind == "linear":
            share = 1 - progress
        elif kind == "wsd":
            share = min(1.0, (1 - step / total_steps) / max(args.lr_decay_fraction, 1e-9))
        else:
            share = 1.0
        return peak * (least + (1 - least) * share)

    return lr_at


def set_lr(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
