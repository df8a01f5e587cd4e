"""Muon for the matrices (Jordan et al. 2024; scaled as in Liu et al. 2025, arXiv 2502.16982, so that AdamW's
learning rate fits) and AdamW for the rest."""

from collections.abc import Callable

from common.args import CommonArgs
import torch
from torch import nn


class Muon(torch.optim.Optimizer):
    """Torch's two classes, combined into one optimizer with one state."""

    def __init__(self, parts: list[torch.optim.Optimizer]):
        self.parts = parts
        self.counts = [len(part.param_groups) for part in parts]
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else closure()
        start = 0
        # either may have been loaded, or moved, since
        for part, count in zip(self.parts, self.counts, strict=True):
            part.param_groups, part.state = self.param_groups[start : start + count], self.state
            part.step()
            start += count
        return loss


def join(args: CommonArgs, parts: list[torch.optim.Optimizer], parameters: list[nn.Parameter]) -> Muon:
    """The optimizers of the rest with one for these matrices."""
    options = {"weight_decay": args.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    return Muon([*parts, torch.optim.Muon(parameters, lr=args.learning_rate, **options)])


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained matrices of the language model except embeddings and head: those that Muon updates."""
    lm = getattr(model, "lm", model)
    tables = {id(m.weight) for m in lm.modules() if isinstance(m, nn.Embedding)}
    if hasattr(lm, "get_output_embeddings"):
        tables |= {id(p) for p in lm.get_output_embeddings().parameters()}
    return [
        p
        for name, p in lm.named_parameters()
        if p.requires_grad and p.dim() == 2 and id(p) not in tables and "trainable_tokens" not in name
    ]
