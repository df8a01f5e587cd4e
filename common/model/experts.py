"""Mixtures of experts: load balancing, and its metrics.

Over the T tokens of a window (all micro-batches of all processes), let f_e be the share of tokens that a
layer routes to expert e and P_e the mean of its router's probability of e (a softmax, also for routers that
choose by sigmoids), then

    load-balancing loss = E · Σ_e f_e · P_e, averaged over the layers    (Fedus et al. 2021, arXiv 2101.03961, eq. 4-6)

scaled as in transformers, where `router_aux_loss_coef` multiplies it: with a perfectly balanced layer it
equals the number of experts per token. transformers averages f and P over the layers before multiplying them,
so that layers may favour different experts at no cost; here each layer is balanced (docs/models.md has
figures).

Every token of every sequence counts once, trained or not; tokens of a shared prefix count once for each of
its sequences, so that the result does not depend on how a window is split. f_e has no gradient, so each
micro-batch adds `E/T · Σ f_e · p_e`, a sum over its tokens, once f_e is known for the whole window. The first
micro-batch is counted during its own pass; each other one of a process costs a forward pass without gradient.
"""

from collections.abc import Iterator, Sequence
import contextlib
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from common.args import CommonArgs
from common.collators import Batch, Window
from common.errors import UserError, say
from common.memory import compute_dtype, finest_dtype, to_device
import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Config names of the number of experts, and of the number of experts per token.
NUMBERS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_top_k", "top_k_experts")


def expert_modules(lm: nn.Module) -> list[nn.Module]:
    """The module of each MoE layer that holds all its experts."""
    return [module for name, module in lm.named_modules() if name.endswith(".experts")]


def routing_size(lm: nn.Module) -> tuple[int, int] | None:
    """(experts per layer, experts per token) of a mixture of experts that exposes its routing; else None."""
    recorded = getattr(lm.base_model, "_can_record_outputs", None) or {}
    # Doge's config counts experts even for a dense model
    if "router_logits" not in recorded or not expert_modules(lm):
        return None
    experts = _number_in(lm.config, NUMBERS)
    chosen = _number_in(lm.config, CHOSEN)
    return (experts, chosen) if experts and chosen else None


def _number_in(config: "PreTrainedConfig", names: Sequence[str]) -> int:
    """The number under the first of these names that a configuration has; 0 if it has none."""
    config = config.get_text_config()
    for name in names:
        number = getattr(config, name, None)
        if number:
            return max(number) if isinstance(number, list) else number  # a list has one for each layer
    return 0


def idle_parameters(lm: nn.Module) -> float:
    """How many of the experts' parameters a token does not use."""
    size = routing_size(lm)
    if size is None:
        return 0.0
    experts, chosen = size
    total = 0
    for module in expert_modules(lm):
        total += sum(p.numel() for p in module.parameters())
    return (1 - chosen / experts) * total


def mixtral_config(
    shape: dict[str, Any], num_experts: int, chosen: int, width: int | None
) -> "PreTrainedConfig":
    """A Llama-type configuration whose MLPs become mixtures of experts. chosen: experts per token. width: of an
    expert; by default the experts of a token are together as wide as the MLP would be."""
    from transformers import LlamaConfig, MixtralConfig

    if chosen > num_experts:
        raise UserError(f"--num_experts_per_tok {chosen}: there are only {num_experts} (--num_experts)")
    if not width:
        width = math.ceil(shape["intermediate_size"] / chosen / 32) * 32
    shape = shape | {"intermediate_size": width}
    rope = LlamaConfig().rope_parameters  # Mixtral's defaults are for 32k tokens
    return MixtralConfig(
        **shape, num_local_experts=num_experts, num_experts_per_tok=chosen, rope_parameters=rope
    )


class Experts:
    """The routing of a model's tokens, one window at a time.

    Call `begin`, then run the passes with gradient (the model calls `add` for each), then `finish`; or
    `give_up`. With a load-balancing loss:

        begin    counts every micro-batch but the first, in passes without gradient
        add      counts the first one, and adds the counts of all processes: now the loss is known
        add ...  the other micro-batches
        finish   the metrics
    """

    def __init__(self, lm: nn.Module, aux_coef: float):
        """lm: the transformers model, a mixture of experts."""
        E, self.chosen_experts = routing_size(lm)
        self.shape = len(expert_modules(lm)), E  # (L, E)
        self.aux_coef = aux_coef
        # whether routers return probabilities rather than logits: Gemma 4
        self.shows_probabilities = None  # not known yet
        self.recording = False  # whether passes belong to a window
        self.counting = False  # whether the current pass only counts, without gradient
        self.counts_synced = True  # whether the whole window's counts are known to all processes
        # a list for the experts that each token chooses in each layer, while they are recorded
        self.choices = None
        for module in expert_modules(lm):
            module.register_forward_pre_hook(self._record_choice, with_kwargs=True)

    def records_pass(self) -> bool:
        """Whether the routing of the pass that now begins is recorded."""
        return self.recording and (torch.is_grad_enabled() or self.counting)

    def _record_choice(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self.choices is None:  # sampling, or a recomputed block
            return
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and not x.is_floating_point() and x.dim() == 2:
                self.choices.append(x)
                return

    @contextlib.contextmanager
    def recording_choices(self, choices: list[Tensor]) -> Iterator[None]:
        """Add to a list the experts chosen in each layer while the context is active."""
        self.choices = choices
        try:
            yield
        finally:
            self.choices = None

    def begin(self, accelerator: Accelerator, model: nn.Module, window: Window) -> None:
        """Start a window. Called on every process. With a load-balancing loss, runs all micro-batches but the
        first through the model (as prepared) to count."""
        self.accelerator = accelerator
        self.device = accelerator.device
        self.recording = True
        self.calls = 0
        self.num_calls = len(window)
        self.counts_synced = not self.aux_coef
        self.own_tokens = sum(len(sequence["input_ids"]) for sequence in window.sequences)
        self.tokens = None
        self.counts = self.probabilities = self.load = None
        self.counted = None  # (L, E), over the micro-batches after the first
        if not self.aux_coef or len(window) == 1:
            return
        self.counting = True
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices), torch.no_grad(), accelerator.autocast():
                for batch in itertools.islice(window, 1, None):
                    model(batch)
        finally:
            self.counting = False

    def add(self, batch: Batch, logits: list[Tensor], chosen: list[Tensor]) -> Tensor:
        """Record a pass over a micro-batch. Returns its addition to the loss, ().

        logits (T, E) and chosen (T, k) of each layer.
        """
        weights = _token_weights(batch)  # (T,)
        L = len(logits)
        E = logits[0].shape[-1]
        self.shape = (L, E)
        if self.shows_probabilities is None:  # checked once, because it synchronises with the device
            first = logits[0].detach()
            sums_to_1 = (first.float().sum(-1) - 1).abs() < 0.02
            self.shows_probabilities = bool(sums_to_1.all() & (first.min() >= 0))
        if self.shows_probabilities:
            logits = [x.float().clamp(min=1e-30).log() for x in logits]
        if len(chosen) != len(logits):
            chosen = [x.topk(self.chosen_experts, dim=-1).indices for x in logits]
        counts = torch.stack([_count(c, weights, E) for c in chosen])  # (L, E)
        if self.counting:
            self.counted = _sum(self.counted, counts)
            return weights.new_zeros(())
        self.calls += 1
        if not self.counts_synced:
            self._sync(_sum(self.counted, counts))
        probabilities = []
        for x in logits:
            weighted = weights[:, None] * x.float().softmax(-1)
            probabilities.append(weighted.sum(0))
        probabilities = torch.stack(probabilities)  # (L, E)
        self.counts = _sum(self.counts, counts)
        self.probabilities = _sum(self.probabilities, probabilities.detach().to(counts.dtype))
        if not self.aux_coef:
            return weights.new_zeros(())
        T = self.tokens.clamp(min=1).float()
        return self.aux_coef * E / L * (self.load.float() / T * probabilities).sum() / T

    def _sync(self, load: Tensor) -> None:
        """Sum this process's counts (L, E) of the window, and its tokens, over all processes."""
        sums = torch.cat([load.flatten(), load.new_full((1,), self.own_tokens)])
        sums = self.accelerator.reduce(sums, "sum")
        self.load = sums[:-1].view(load.shape)
        self.tokens = sums[-1]
        self.counts_synced = True

    def give_up(self) -> None:
        """Abandon the window before it is restarted for lack of memory. If other processes may still wait for
        this one's counts, takes part in their sum with zeros."""
        self.recording = False
        if not self.counts_synced:
            self._sync(torch.zeros(self.shape, dtype=finest_dtype(self.device), device=self.device))

    @torch.no_grad()
    def finish(self) -> dict[str, Tensor]:
        """End the window; returns its metrics, the same on each process. Raises ValueError if the loss needs
        it and the script did not call the model with gradient exactly once per micro-batch."""
        self.recording = False
        if self.aux_coef and self.calls != self.num_calls:
            raise ValueError(
                f"{self.calls} calls of the model with gradient on {self.num_calls} micro-batches: expected one each"
            )
        if self.counts is None:  # a script that does not train the model
            return {}
        L, E = self.counts.shape
        tokens = self.counts.new_full((1,), self.own_tokens)
        sums = torch.cat([self.counts.flatten(), self.probabilities.flatten(), tokens])
        sums = self.accelerator.reduce(sums, "sum")
        self.counts, probabilities = sums[:-1].view(2, L, E)
        T = sums[-1].clamp(min=1)
        mean = self.counts.mean(-1, keepdim=True).clamp(min=1e-9)
        return {
            "moe/aux_loss": E / L * (self.counts / T * probabilities / T).sum(),
            "moe/max_load": (self.counts / mean).max(),
            "moe/unused_experts": (self.counts == 0).to(self.counts.dtype).mean(),
        }


def make_experts(args: CommonArgs, lm: nn.Module) -> Experts | None:
    """Expert balancing for a transformers model, by the flag, or else by its config; None for a model without
    experts.

    Raises UserError for the flag if the model has no experts.
    """
    aux_coef = args.router_aux_loss_coef
    size = routing_size(lm)
    if size is None:
        if aux_coef:
            raise UserError(
                f"--router_aux_loss_coef: {type(lm).__name__} is no mixture of experts, or hides its routing"
            )
        return None
    if aux_coef is None:
        config = lm.config.get_text_config()
        aux_coef = 0.0
        if getattr(config, "output_router_logits", False):
            aux_coef = getattr(config, "router_aux_loss_coef", None) or 0.0
    num_experts, chosen = size
    layers = len(expert_modules(lm))
    follow_autocast()
    say(
        f"experts: {num_experts} in each of {layers} layers, {chosen} for each token; {aux_coef:g} · load-balancing loss"
    )
    return Experts(lm, aux_coef)


@functools.cache
def follow_autocast() -> None:
    """Let transformers' grouped matrix product of experts follow autocast, which PyTorch's function does not.
    In float32 it has no GPU kernel: the experts would be computed one by one, with a wait for the host before
    each layer."""
    from transformers.integrations import moe

    stock = moe._grouped_mm

    def grouped_mm(x: Tensor, weight: Tensor, *offsets: Tensor, **named: Tensor) -> Tensor:
        return stock(x, weight.to(compute_dtype(weight)), *offsets, **named)  # which casts x

    moe._grouped_mm = grouped_mm


def _token_weights(batch: Batch) -> Tensor:
    """The number of sequence tokens that each token of the flat row represents, (T,) float32; 0 in a
    filler."""
    T = batch["input_ids"].shape[1]
    row_weight = batch["sequence_mask"][0]
    if batch["token_map"] is None:
        return row_weight.expand(T)
    times = np.bincount(batch["token_map"], minlength=T).astype(np.float32)
    return to_device(times, row_weight.device) * row_weight


def _sum(so_far: Tensor | None, more: Tensor) -> Tensor:
    return more if so_far is None else so_far + more


def _count(chosen: Tensor, weights: Tensor, E: int) -> Tensor:
    """The number of tokens that chose each expert, (E,); chosen (T, k)."""
    weights = weights.to(finest_dtype(weights.device))
    repeated = weights.repeat_interleave(chosen.shape[-1])
    return weights.new_zeros(E).index_add_(0, chosen.flatten().long(), repeated)
