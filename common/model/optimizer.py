"""The optimizers, and the learning rate as a pure function of the step."""

from collections.abc import Callable
import importlib.util
import math

from accelerate.utils import DistributedType
from common.args import CommonArgs
from common.errors import UserError
from common.memory import SHARDED
import torch
from torch import nn


def make_optimizer(
    args: CommonArgs, model: nn.Module, extra_lr_multiplier: float = 1.0
) -> torch.optim.Optimizer:
    """The optimizer of --optim for the trained parameters, with weight decay on those of two or
    more dimensions.

    AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101); adamw_8bit: 8-bit moments, by bitsandbytes; muon: Muon
    for the matrices (Jordan et al. 2024; scaled as in Liu et al. 2025, arXiv 2502.16982, so that AdamW's
    learning rate fits), and AdamW for the rest. extra_lr_multiplier: the learning rate of the modules in
    model.extra, relative to the others; if it is not 1, these modules have no weight decay.
    """
    muon_ids = set(map(id, matrices(model))) if args.optim == "muon" else set()
    extra_ids = set(map(id, model.extra.parameters())) if extra_lr_multiplier != 1 else set()
    decayed = []
    not_decayed = []
    extra = []
    for_muon = []
    fused = True  # one kernel for the whole update, where available
    for p in model.parameters():
        if not p.requires_grad:
            continue
        fused = fused and p.device.type in ("cpu", "cuda")
        if id(p) in extra_ids:
            extra.append(p)
        elif id(p) in muon_ids:
            for_muon.append(p)
        elif p.dim() >= 2:
            decayed.append(p)
        else:
            not_decayed.append(p)
    groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": not_decayed, "weight_decay": 0.0},
        {"params": extra, "weight_decay": 0.0, "lr_multiplier": extra_lr_multiplier},
    ]
    groups = [group for group in groups if group["params"]]
    settings = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    if args.optim == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, **settings)
    parts = []
    if groups:  # Muon may take all parameters
        parts.append(torch.optim.AdamW(groups, fused=fused, **settings))
    if not for_muon:
        return parts[0]
    options = {"weight_decay": args.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    parts.append(torch.optim.Muon(for_muon, lr=args.learning_rate, **options))
    return MuonAndAdamW(parts)


class MuonAndAdamW(torch.optim.Optimizer):
    """AdamW and Muon, torch's two classes, as one optimizer with one state."""

    def __init__(self, parts: list[torch.optim.Optimizer]):
        self.parts = parts
        self.counts = []  # of each part's groups
        groups = []
        for part in parts:
            self.counts.append(len(part.param_groups))
            groups += part.param_groups
        super().__init__(groups, {})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None if closure is None else closure()
        start = 0
        # this optimizer's groups and state may have been loaded, or moved, since the last step
        for part, count in zip(self.parts, self.counts, strict=True):
            part.param_groups = self.param_groups[start : start + count]
            part.state = self.state
            part.step()
            start += count
        return loss


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained matrices of the language model except embeddings and head: those that Muon updates."""
    lm = getattr(model, "lm", model)
    tables = set()  # ids of the weights of embeddings and head
    for module in lm.modules():
        if isinstance(module, nn.Embedding):
            tables.add(id(module.weight))
    if hasattr(lm, "get_output_embeddings"):
        tables.update(map(id, lm.get_output_embeddings().parameters()))
    found = []
    for name, p in lm.named_parameters():
        is_table = id(p) in tables or "trainable_tokens" in name
        if p.requires_grad and p.dim() == 2 and not is_table:
            found.append(p)
    return found


def check_optimizer(args: CommonArgs, distributed_type: DistributedType) -> None:
    """Raise UserError for an optimizer that is not installed, or does not support the kind of distributed
    run."""
    if args.optim == "adamw_8bit":
        if importlib.util.find_spec("bitsandbytes") is None:
            raise UserError("--optim adamw_8bit needs bitsandbytes: pip install bitsandbytes")
        if distributed_type in SHARDED:
            raise UserError(
                "--optim adamw_8bit: its moments are not sharded (FSDP, DeepSpeed): adamw, or muon with FSDP"
            )
    if args.optim == "muon" and distributed_type == DistributedType.DEEPSPEED:
        raise UserError(
            "--optim muon: DeepSpeed hands the optimizer pieces of matrices: FSDP, or --optim adamw"
        )


def schedule(args: CommonArgs, total_steps: int) -> Callable[[int], float]:
    """step -> learning rate, for steps 0 .. total_steps - 1.

    Linear warm-up over warmup_steps (below 1: a share of the run), then cosine, linear or no decay to
    min_lr_ratio · learning_rate; wsd stays flat and falls linearly over the last lr_decay_fraction of the run
    (Hu et al. 2024, arXiv 2404.06395).
    """
    kind = args.lr_scheduler_type
    peak = args.learning_rate
    least = args.min_lr_ratio
    warmup = args.warmup_steps
    if warmup < 1:
        warmup *= total_steps
    warmup = round(warmup)

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
    """Set the rate of every parameter group, times its `lr_multiplier` if it has one. Raises UserError if a
    script gave a group another rate, which would be overwritten."""
    rates = {group["lr"] for group in optimizer.param_groups if "lr_multiplier" not in group}
    if len(rates) > 1:
        raise UserError(
            f"parameter groups have different learning rates ({', '.join(map(str, sorted(rates)))}), and the schedule "
            'would overwrite them: give a group "lr_multiplier", its rate relative to --learning_rate'
        )
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_multiplier", 1.0)
