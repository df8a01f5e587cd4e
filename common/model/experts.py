"""Mixtures of experts: load balancing, and its metrics.

Over the T tokens of a window (all micro-batches of all processes), let f_e be the share of tokens that a layer routes to
expert e and P_e the mean of its router's probability of e; both losses are averaged over the layers:

    load-balancing loss   E · Σ_e f_e · P_e         (Fedus et al. 2021, arXiv 2101.03961, eq. 4-6)
    z-loss                1/T · Σ_t logsumexp_t²    (Zoph et al. 2022, arXiv 2202.08906, eq. 5)

The first is scaled as in transformers, where `router_aux_loss_coef` multiplies it: with a perfectly balanced layer it equals
the number of experts per token. transformers averages f and P over the layers before multiplying them, so that layers may
favour different experts at no cost; here each layer is balanced (benchmarks/moe.py has figures).

Every token of every sequence counts once, trained or not; tokens of a shared prefix count once for each of its sequences, so
that the result does not depend on how a window is split. f_e has no gradient, so each micro-batch adds `E/T · Σ f_e · p_e`,
a sum over its tokens, once f_e is known for the whole window. The first micro-batch is counted during its own pass; each
other one of a process costs a forward pass without gradient.

Some families have no such loss, but a bias for the selection of each expert, which goes up by a fixed step if its load was
below the mean and down if it was above (Wang et al. 2024, arXiv 2408.15664, algorithm 1).
"""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from common.args import CommonArgs
from common.collators import Batch, Window
from common.errors import UserError, say
from common.memory import finest_dtype, to_device

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

# Config names of the number of experts, and of the number of experts per token.
NUMBERS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_top_k", "top_k_experts")
BIASES = ("e_score_correction_bias", "expert_bias")


def expert_modules(lm: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """(block, experts) of each MoE layer: the module that routes, and the one that holds all its experts."""
    modules = dict(lm.named_modules())
    return [(modules[name.rpartition(".")[0]], m) for name, m in modules.items() if name.endswith(".experts")]


def routing_size(lm: nn.Module) -> tuple[int, int] | None:
    """(experts per layer, experts per token) of a mixture of experts that exposes its routing; else None."""
    config, recorded = lm.config.get_text_config(), getattr(lm.base_model, "_can_record_outputs", None) or {}
    if "router_logits" not in recorded or not expert_modules(lm):  # Doge's config counts experts even for a dense model
        return None
    found = (next((n for name in names if (n := getattr(config, name, None))), None) for names in (NUMBERS, CHOSEN))
    experts, chosen = (max(n) if isinstance(n, list) else n for n in found)  # a list has one number per layer
    return (experts, chosen) if experts and chosen else None


def idle_parameters(lm: nn.Module) -> float:
    """How many of the experts' parameters a token does not use."""
    if (size := routing_size(lm)) is None:
        return 0.0
    experts, chosen = size
    return (1 - chosen / experts) * sum(p.numel() for _, module in expert_modules(lm) for p in module.parameters())


class Experts:
    """The routing of a model's tokens, one window at a time.

    Call `begin`, then run the passes with gradient (the model calls `add` for each), then `finish`; or `give_up`.
    """

    def __init__(self, lm: nn.Module, *, aux_coef: float = 0.0, z_coef: float = 0.0, bias_rate: float = 0.0):
        """lm: the transformers model. Raises UserError for a bias_rate if its routers have no bias."""
        size = routing_size(lm)
        if size is None:
            raise UserError(f"{type(lm).__name__} is no mixture of experts, or does not show its routers' logits")
        self.chosen_experts = size[1]
        self.shape = len(expert_modules(lm)) or lm.config.get_text_config().num_hidden_layers, size[0]  # (L, E)
        self.aux_coef, self.z_coef, self.bias_rate = aux_coef, z_coef, bias_rate
        self.shows_probabilities: bool | None = None  # whether routers return probabilities rather than logits: Gemma 4
        self.watches = False  # whether the current pass belongs to a window
        self.counting = False  # whether the current pass only counts, without gradient
        self.calls = 0  # passes with gradient in this window
        self.agreed = True  # whether the whole window's counts are known to all processes
        self.heard: list[Tensor] | None = None  # for each layer, the experts that each token of the current pass chose
        self.blocks = [block for block, _ in expert_modules(lm)]
        if bias_rate and (not self.blocks or any(_bias_of(block) is None for block in self.blocks)):
            raise UserError(
                f"--router_bias_update_rate: the routers of {type(lm).__name__} have no bias ({', '.join(BIASES)}): "
                "balance it with --router_aux_loss_coef"
            )
        for _, module in expert_modules(lm):
            module.register_forward_pre_hook(self._hear, with_kwargs=True)

    def _hear(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.heard is not None:  # otherwise sampling, or a recomputed block
            found = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            self.heard += [x for x in found if not x.is_floating_point() and x.dim() == 2][:1]

    @contextlib.contextmanager
    def listening(self) -> Iterator[list[Tensor]]:
        """Collect the experts chosen in each layer while the context is active."""
        self.heard = heard = []
        try:
            yield heard
        finally:
            self.heard = None

    # --- a window ---------------------------------------------------------------------------------------------------

    def begin(self, accelerator: Accelerator, model: nn.Module, window: Window) -> None:
        """Start a window. Called on every process. With a load-balancing loss, runs all micro-batches but the first through
        the model (as prepared) to count."""
        self.accelerator, self.device = accelerator, accelerator.device
        self.watches, self.calls, self.num_calls = True, 0, len(window)
        self.agreed = not (self.aux_coef or self.z_coef)
        self.own_tokens, self.tokens = window.own_tokens, None
        self.counts = self.probabilities = self.z_sum = self.load = None
        self.counted = None  # (L, E), over the micro-batches after the first
        self.first = None
        if not self.aux_coef or len(window) == 1:
            return
        self.first = next(iter(window))["lengths"]
        self.counting = True
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices), torch.no_grad(), accelerator.autocast():
                for batch in itertools.islice(window, 1, None):
                    model(batch)
        finally:
            self.counting = False

    def add(self, batch: Batch, logits: tuple[Tensor, ...], chosen: list[Tensor]) -> Tensor:
        """Record a pass over a micro-batch. Returns its addition to the loss, ().

        logits (T, E) and chosen (T, k) of each layer.
        """
        weights, self.shape = token_weights(batch), (len(logits), logits[0].shape[-1])  # (T,)
        if self.shows_probabilities is None:  # checked once, because it synchronises with the device
            sums, least = logits[0].detach().float().sum(-1), logits[0].detach().min()
            self.shows_probabilities = bool(((sums - 1).abs() < 0.02).all() & (least >= 0))
            if self.shows_probabilities and self.z_coef:
                raise UserError("--router_z_loss_coef: this model shows probabilities of its routers, and no logits")
        if self.shows_probabilities:
            logits = tuple(x.float().clamp(min=1e-30).log() for x in logits)
        if len(chosen) != len(logits):
            chosen = [x.topk(self.chosen_experts, dim=-1).indices for x in logits]
        with torch.no_grad():
            counts = torch.stack([_count(c, weights, x.shape[-1]) for c, x in zip(chosen, logits, strict=True)])  # (L, E)
            if self.counting:
                self.counted = counts + (0 if self.counted is None else self.counted)
                return weights.new_zeros(())
        self.calls += 1
        if not self.agreed:
            self._agree(counts, batch)
        probabilities = torch.stack([(weights[:, None] * x.float().softmax(-1)).sum(0) for x in logits])  # (L, E)
        z_sum = sum((weights * x.float().logsumexp(-1).square()).sum() for x in logits)
        now = [counts, probabilities.detach().to(counts.dtype), z_sum.detach().to(counts.dtype)]
        before = [self.counts, self.probabilities, self.z_sum]
        self.counts, self.probabilities, self.z_sum = now if self.counts is None else map(torch.add, before, now)
        loss = weights.new_zeros(())
        if self.aux_coef or self.z_coef:
            T, (L, E) = self.tokens.clamp(min=1).float(), counts.shape
        if self.aux_coef:
            loss = loss + self.aux_coef * E / L * (self.load.float() / T * probabilities).sum() / T
        if self.z_coef:
            loss = loss + self.z_coef * z_sum / (T * L)
        return loss

    def _agree(self, counts: Tensor, batch: Batch) -> None:
        """Reduce what the losses need over all processes, given this process's counts (L, E) of its first micro-batch."""
        if self.first is not None and self.first != batch["lengths"]:
            raise ValueError("the load-balancing loss: the first micro-batch of a window comes first")
        self._exchange(counts if self.counted is None else counts + self.counted)

    def _exchange(self, load: Tensor) -> None:
        both = torch.cat([load.flatten(), load.new_tensor([self.own_tokens])])
        both = self.accelerator.reduce(both, "sum")
        self.load, self.tokens, self.agreed = both[:-1].view(load.shape), both[-1], True

    def give_up(self) -> None:
        """Abandon the window before it is restarted for lack of memory. Sends this process's counts if the others may still
        wait for them."""
        self.watches = False
        if not self.agreed:
            self._exchange(torch.zeros(self.shape, dtype=finest_dtype(self.device), device=self.device))

    @torch.no_grad()
    def finish(self) -> dict[str, Tensor]:
        """End the window; returns its metrics, the same on each process. Raises ValueError if a loss needs it and the script
        did not call the model with gradient exactly once per micro-batch."""
        self.watches = False
        if (self.aux_coef or self.z_coef) and self.calls != self.num_calls:
            raise ValueError(
                f"{self.calls} calls of the model with gradient on {self.num_calls} micro-batches: the losses of its "
                "routers count each once"
            )
        if self.counts is None:  # a script that does not train the model
            return {}
        L, E = self.counts.shape
        tokens = self.counts.new_tensor([self.own_tokens])
        sums = torch.cat([self.counts.flatten(), self.probabilities.flatten(), self.z_sum[None], tokens])
        sums = self.accelerator.reduce(sums, "sum")
        (counts, probabilities), T = sums[:-2].view(2, L, E), sums[-1].clamp(min=1)
        self.counts = counts
        mean = counts.mean(-1, keepdim=True).clamp(min=1e-9)
        logged = {
            "moe/aux_loss": E / L * (counts / T * probabilities / T).sum(),
            "moe/max_load": (counts / mean).max(),
            "moe/unused_experts": (counts == 0).to(counts.dtype).mean(),
        }
        return logged | ({"moe/z_loss": sums[-2] / (T * L)} if self.z_coef else {})

    @torch.no_grad()
    def update_biases(self, skip: Tensor | bool) -> None:
        """After the step, move each bias by the rate against its expert's load in the window. skip: the step was skipped."""
        if not self.bias_rate or self.counts is None:
            return
        if len(self.blocks) != len(self.counts):
            raise UserError("--router_bias_update_rate: this model routes other layers than those that have a bias")
        for block, counts in zip(self.blocks, self.counts, strict=True):
            bias = _bias_of(block)  # looked up each time: moving the model to a device replaces the tensor
            step = self.bias_rate * torch.sign(counts.mean() - counts)
            step = torch.where(torch.as_tensor(skip, device=step.device), 0.0, step).to(bias.dtype).view(bias.shape)
            bias += _placed_as(step, bias)


def add_experts(args: CommonArgs, model: Any) -> Experts | None:
    """Expert balancing for a FlatModel as set by the flags, or else by its config; None for a model without experts.

    Raises UserError for a flag that the model does not support.
    """
    lm = model.lm.get_base_model() if hasattr(model.lm, "get_base_model") else model.lm
    config, size = lm.config.get_text_config(), routing_size(lm)
    asked = {name: getattr(args, name) for name in ("router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate")}
    if size is None:
        for name, value in asked.items():
            if value:
                raise UserError(f"--{name}: {type(lm).__name__} is no mixture of experts, or does not show its routing")
        return None
    if args.router_bias_update_rate and args.use_peft:
        raise UserError("--router_bias_update_rate: an adapter does not hold the routers' biases: train without --use_peft")
    known, aux_coef = getattr(config, "router_aux_loss_coef", None), args.router_aux_loss_coef
    source = "--router_aux_loss_coef"
    if aux_coef is None:
        aux_coef = (known or 0.0) if getattr(config, "output_router_logits", False) else 0.0
        source = "by the model's config, which has output_router_logits"
    parts = [f"{aux_coef:g} · load-balancing loss ({source})"] if aux_coef else []
    parts += [f"{args.router_z_loss_coef:g} · z-loss"] if args.router_z_loss_coef else []
    parts += [f"biases move by {args.router_bias_update_rate:g} a step"] if args.router_bias_update_rate else []
    unused = f" (--router_aux_loss_coef; its config names {known:g})" if known else ""
    layers = len(expert_modules(lm)) or config.num_hidden_layers
    say(
        f"experts: {size[0]} in each of {layers} layers, {size[1]} for each token; "
        f"{', '.join(parts) or f'nothing balances their load{unused}'}"
    )
    settings = {"aux_coef": aux_coef, "z_coef": args.router_z_loss_coef, "bias_rate": args.router_bias_update_rate}
    return Experts(lm, **settings)


def token_weights(batch: Batch) -> Tensor:
    """The number of sequence tokens that each token of the flat row represents, (T,) float32; 0 in a filler."""
    T, shown = batch["input_ids"].shape[1], batch["sequence_mask"][0]
    if batch["token_map"] is None:
        return shown.expand(T)
    times = np.bincount(batch["token_map"], minlength=T).astype(np.float32)
    return to_device(times, shown.device) * shown


def _count(chosen: Tensor, weights: Tensor, E: int) -> Tensor:
    """The number of tokens that chose each expert, (E,); chosen (T, k)."""
    weights = weights.to(finest_dtype(weights.device))
    return weights.new_zeros(E).index_add_(0, chosen.flatten().long(), weights.repeat_interleave(chosen.shape[-1]))


def _bias_of(block: nn.Module) -> Tensor | None:
    """The bias added to the experts' scores for selection: a buffer in most families, a parameter in some."""
    named = itertools.chain(block.named_buffers(), block.named_parameters())
    return next((tensor for name, tensor in named if name.rpartition(".")[2] in BIASES), None)


def _placed_as(step: Tensor, bias: Tensor) -> Tensor:
    """The step, sharded like the bias if FSDP2 shards it."""
    if not hasattr(bias, "placements"):
        return step
    from torch.distributed.tensor import DTensor, Replicate

    whole = DTensor.from_local(step, bias.device_mesh, [Replicate()] * bias.device_mesh.ndim)
    return whole.redistribute(placements=bias.placements)
