"""A language model called on a flat batch for per-token log-probabilities, and helpers for its parts and
figures.

All four scripts call a model for training through `FlatModel`. It runs the body of any causal language model
on the flat row, and applies the LM head (lm_head.py) only at the trained positions.
"""

from collections.abc import Callable, Iterable, Sequence
import contextlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from common.collators import Batch
from common.errors import UserError
from common.memory import to_device
from common.model import hybrids, lm_head
from common.model.attention import first_occurrences, pad_groups, plan_flat_row
import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Output(NamedTuple):
    """The output of a FlatModel for a flat row of T tokens; None for what was not requested. With nll_weights
    only `nll` has a gradient, not logps or entropy; entropy and correct then come for free.

    A NamedTuple, because FSDP2 and Accelerate look for tensors in a model's return value.
    """

    # (T,) float32: log p(token t | tokens before it in its sequence) of each target; 0 elsewhere
    logps: Tensor
    # (T,) float32, in nats: of the distribution that predicts each target; 0 elsewhere
    entropy: Tensor | None = None
    correct: Tensor | None = None  # (T,) float32: 1 if the target is the most probable token; no gradient
    nll: Tensor | None = None  # (): -Σ nll_weights[t] · logps[t]
    hidden: Tensor | None = None  # (T, D): the input of the LM head
    mapped: Tensor | None = None  # (N, ...): the result of map_logits, in the order of batch["targets"]
    extra: dict[str, Tensor] | None = None  # outputs of the extra modules
    aux_loss: Tensor | float = 0.0  # (): this batch's share of the expert-balancing loss (experts.py)


class _States(NamedTuple):
    """The output of a model's body for a flat row."""

    hidden: Tensor  # (T, D)
    predicting: Tensor | None  # (N, D): the states that predict the targets
    routers: list[Tensor] | None = None  # if requested, (T, experts) for each MoE layer
    chosen: Sequence[Tensor] = ()  # the chosen experts of each layer, (T, k), if they could be observed


class _Pass(NamedTuple):
    """A flat row's pass through the body of a model: a call for the row, or for each of several padded
    batches."""

    outputs: list[Any]  # of transformers' model, one for each call
    # (T,) int64: the place of each token of the row in the outputs laid end to end; None: one output, in order
    order: Tensor | None = None

    def in_row(self, parts: Sequence[Tensor]) -> Tensor:
        """A tensor of each call, (..., size) -> (T, size)."""
        parts = [part.reshape(-1, part.shape[-1]) for part in parts]
        return parts[0] if self.order is None else torch.cat(parts)[self.order]

    def hidden(self) -> Tensor:
        """(T, D)."""
        return self.in_row([out.last_hidden_state for out in self.outputs])

    def routers(self) -> list[Tensor]:
        """(T, experts) for each MoE layer."""
        layers = zip(*[out.router_logits for out in self.outputs], strict=True)
        return list(map(self.in_row, layers))

    def chosen(self, choices: list[Tensor]) -> list[Tensor]:
        """(T, k) for each MoE layer. choices: of each layer of the first call, then of the second, ..."""
        num_layers = len(choices) // len(self.outputs)
        return [self.in_row(choices[layer::num_layers]) for layer in range(num_layers)]


class FlatModel(nn.Module):
    """A causal language model that is called on flat batches (see collators.flat_batch) and returns an
    `Output`.

    Architectures whose layers carry a state along the row, or whose attention cannot be replaced, run on a
    padded batch instead (`padded`); the result is the same.
    """

    def __init__(self, lm: nn.Module):
        """lm: a transformers causal language model, or peft's wrapper of one."""
        super().__init__()
        self.lm = lm
        # a script's own modules, added before `make_optimizer` and `run.prepare`
        self.extra = nn.ModuleDict()
        self.padded = False  # set by wrap
        self.hybrid = hybrids.Hybrid(lm)
        self.dropout_off = False  # see disable_dropout
        self.stop_ids = []  # the tokens that end a completion; set by load_model
        self.experts = None  # of a mixture of experts, an experts.Experts; set by load_model
        # read by FSDP's wrapping policy
        self._no_split_modules = getattr(base_lm(lm), "_no_split_modules", None)

    @property
    def config(self) -> "PreTrainedConfig":
        return self.lm.config

    def train(self, mode: bool = True) -> "FlatModel":
        """As for any module, except that if dropout is disabled only recomputed blocks enter training
        mode."""
        super().train(mode)
        if self.dropout_off:
            for module in self.lm.modules():
                is_recomputed = bool(getattr(module, "gradient_checkpointing", False))
                module.training = mode and is_recomputed
        return self

    def tie_weights(self) -> None:
        """Called by Accelerate when FSDP loads the weights on one process only, which unties them."""
        base_lm(self.lm).tie_weights()

    def forward(
        self,
        batch: Batch,
        *,
        temperature: float = 1.0,
        nll_weights: Tensor | None = None,
        entropy: bool = False,
        entropy_grad: bool = False,
        hidden: bool = False,
        map_logits: Callable[[Tensor, Tensor], Tensor] | None = None,
        extra: Sequence[str] = (),
    ) -> Output:
        """Log-probabilities of a batch's targets, and whatever else is requested.

        batch: input_ids (1, T), position_ids (1, T), lengths (S ints), targets and previous (N,), token_map.
        temperature: divides the logits, as it did when the tokens were sampled. nll_weights (T,): out.nll is
        cheaper than the same sum over logps, because its gradient is computed together with the logits (see
        lm_head.weighted_nll). logps and entropy, which then come for free, have no gradient. entropy: also
        return entropy and correct; the entropy has a gradient only with entropy_grad. hidden: also return the
        hidden states. map_logits: f(logits (n, V) float32, rows (n,) int64) -> (n, ...), called on one chunk
        of targets at a time and again in the backward pass, so that the full logits (N, V) never exist unless
        f returns them. logits[i], divided by the temperature, predicts token rows[i] of the flat row. The
        result has a gradient, also together with nll_weights. extra: names of modules in `self.extra` to call
        on the hidden states (T, D).

        In a filler (flat_batch) logps, entropy, correct, nll and mapped are 0. A backward pass through a
        value without gradient is an error. Raises ValueError for nll_weights of another length, or that (or a
        temperature that) require a gradient; UserError for a sequence longer than the model's positions.
        """
        for value in (nll_weights, temperature):
            if getattr(value, "requires_grad", False):
                raise ValueError(
                    "nll_weights and temperature get no gradient here: weigh out.logps, or divide in map_logits"
                )
        if nll_weights is not None and nll_weights.shape != batch["input_ids"].shape[1:]:
            raise ValueError(
                f"nll_weights {tuple(nll_weights.shape)}: one for each of {batch['input_ids'].shape[1]} tokens"
            )
        recording = self.experts is not None and self.experts.records_pass()
        states, predicting, routers, chosen = self._run_body(batch, recording)
        aux_loss = 0.0
        if recording:
            aux_loss = self.experts.add(batch, routers, chosen)
            if self.experts.counting:
                return Output(states.new_zeros(len(states)))
        targets = batch["targets"]
        inner = base_lm(self.lm)
        tokens = batch["input_ids"][0, targets]
        # (N,) 1; 0 in a filler, and for the one target of a row without a trained token. Not 0: a script may
        # have put weights into the mask.
        is_trained = (batch["loss_mask"][targets] != 0).float()
        nll = mapped = None
        if nll_weights is not None:
            weights = nll_weights[targets] * is_trained
            nll, scores = lm_head.weighted_nll(inner, predicting, tokens, weights, temperature)
        else:
            entropy = entropy or entropy_grad
            scores = lm_head.log_probs(
                inner, predicting, tokens, temperature, entropy=entropy, entropy_grad=entropy_grad
            )
        rows: list[Tensor | None] = [None, None, None]
        for i, values in enumerate(scores):
            zeros = values.new_zeros(len(states))
            rows[i] = zeros.index_put((targets,), values * is_trained)
        logps, entropies, correct = rows  # without `entropy` only the first
        if torch.is_grad_enabled():
            if nll_weights is not None:
                logps = without_gradient(logps, nll, "logps: it has a gradient without nll_weights")
            if entropies is not None and (nll_weights is not None or not entropy_grad):
                why = "entropy: it has a gradient with entropy_grad=True and without nll_weights"
                entropies = without_gradient(entropies, states, why)
        if map_logits is not None:
            mapped = lm_head.map_logits(inner, predicting, targets, map_logits, temperature)
            factors = is_trained.to(mapped.dtype)
            mapped = mapped * factors.view(-1, *[1] * (mapped.dim() - 1))
        return Output(
            logps,
            entropies,
            correct,
            nll=nll,
            hidden=states if hidden else None,
            mapped=mapped,
            extra={name: self._call_extra(name, states) for name in extra} if extra else None,
            aux_loss=aux_loss,
        )

    def _call_extra(self, name: str, states: Tensor) -> Tensor:
        module = self.extra[name]
        for p in module.parameters():
            if p.is_floating_point():
                return module(states.to(p.dtype))
        return module(states)

    def hidden(self, batch: Batch) -> Tensor:
        """The hidden states that the LM head reads, (T, D)."""
        return self._run_body(batch).hidden

    def predicting(self, batch: Batch) -> Tensor:
        """The hidden states that predict the targets, in their order, (N, D). Raises UserError as a call
        does."""
        return self._run_body(batch).predicting

    def _run_body(self, batch: Batch, recording: bool = False) -> _States:
        """recording: with the routing of a mixture of experts."""
        check_positions(self, max(batch["lengths"]))
        # a cache or any attention_mask would let sequences see each other
        options = {"use_cache": False}
        if recording:
            options["output_router_logits"] = True
        previous = batch.get("previous")
        first = None  # of each token of the row, its first place in a row without sharing
        # In longer sequences a shared prefix has different states in each of them.
        longest_shared = self.hybrid.max_unscaled_length
        if padding_matters(self):
            longest_shared = 0
        if batch.get("token_map") is not None and max(batch["lengths"]) > longest_shared:
            batch, first = hybrids.unshared(batch)
            if previous is not None:
                previous = first[batch["targets"]] - 1  # the left neighbour, without sharing
        call = self._call_padded if self.padded else self._call_flat
        choices = []
        with self.experts.recording_choices(choices) if recording else contextlib.nullcontext():
            body_pass = call(batch, options)
        hidden = body_pass.hidden()
        predicting = None if previous is None else hidden.index_select(0, previous)
        if first is not None:
            hidden = hidden[first]
        if not recording:
            return _States(hidden, predicting)
        routers = body_pass.routers()
        chosen = body_pass.chosen(choices)
        if first is not None:
            routers = [x[first] for x in routers]
            chosen = [x[first] for x in chosen]
        return _States(hidden, predicting, routers, chosen)

    def _call_flat(self, batch: Batch, options: dict[str, Any]) -> _Pass:
        flat_row = plan_flat_row(batch["lengths"], batch["input_ids"].device, batch.get("token_map"))
        inputs = {
            "input_ids": batch["input_ids"],
            "position_ids": batch["position_ids"],
            "flat_row": flat_row,
        }
        with hybrids.calling(hybrids.Call(batch["lengths"], flat_row)):
            return _Pass([body(self.lm)(**inputs, **options)])

    def _call_padded(self, batch: Batch, options: dict[str, Any]) -> _Pass:
        """The sequences become the rows of a padded batch, or, where padding would change the results, of
        several batches, each of sequences of equal length.

        Raises UserError for several batches with sharded weights: processes then wait for each other in every
        call.
        """
        ids = batch["input_ids"][0]
        lengths = np.array(batch["lengths"])
        token_map = batch.get("token_map")
        if token_map is not None:
            ids = ids[to_device(token_map, ids.device)]
        groups = [np.arange(len(lengths))]
        if padding_matters(self):
            groups = [np.flatnonzero(lengths == length) for length in np.unique(lengths)]
        if len(groups) > 1 and is_sharded(self):
            raise UserError(
                f"{type(base_lm(self.lm)).__name__} is not padded: with sharded weights one sequence at a time"
            )
        sequences = ids.split(lengths.tolist())
        outputs = []
        for group in groups:
            padded = nn.utils.rnn.pad_sequence([sequences[s] for s in group], batch_first=True)
            is_real = np.arange(padded.shape[1]) < lengths[group, None]
            mask = to_device(is_real, ids.device).long()
            with hybrids.calling(hybrids.Call(lengths[group].tolist(), None)):
                outputs.append(body(self.lm)(input_ids=padded, attention_mask=mask, **options))
        # computed on the host: to ask the mask would be to wait for the device
        _, places = pad_groups(groups, lengths, lengths.cumsum())
        if token_map is not None:
            places = places[first_occurrences(token_map)]
        return _Pass(outputs, to_device(places, ids.device))


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, anchor: Tensor, why: str) -> Tensor:
        ctx.why = why
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise RuntimeError(ctx.why)


def without_gradient(values: Tensor, anchor: Tensor, why: str) -> Tensor:
    """The values, changed so that a backward pass through them raises RuntimeError(why) instead of silently
    ignoring them.

    anchor: a tensor of the graph; if it requires no gradient, neither do the values.
    """
    return _WithoutGradient.apply(values.detach(), anchor, why)


def num_positions(model: FlatModel) -> float:
    """The most tokens of a sequence; infinity if the model has no limit."""
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    # its limit is the original length, which it stretches
    if most is not None and rope.get("rope_type") == "dynamic":
        most = int(most * rope.get("factor", 1.0))
    return math.inf if most is None else most


def check_positions(model: FlatModel, longest: int, limits: str = "the length limits") -> None:
    """Raise UserError if the longest sequence exceeds the model's positions. limits: the flags that limit
    lengths."""
    most = num_positions(model)
    if longest > most:
        raise UserError(
            f"a sequence may have {longest} tokens, the model has {most} positions: lower {limits}"
        )


# --- the parts of a transformers model ----------------------------------------------------------------------


def base_lm(lm: nn.Module) -> nn.Module:
    """The transformers model inside a LoRA wrapper, or the model itself."""
    return lm.get_base_model() if hasattr(lm, "get_base_model") else lm


def body(lm: nn.Module) -> nn.Module:
    """Everything but the LM head: token ids -> hidden states."""
    inner = base_lm(lm)
    found = inner.base_model
    return inner.model if found is inner else found  # Llama 4's class attribute misnames its body


def padding_matters(model: FlatModel) -> bool:
    """Whether layers attend to the best-scored keys only (DeepSeek-V3.2, GLM-MoE-DSA, Doge): ties among these
    scores, which are often equal, are broken by the number of keys."""
    settings = vars(model.config.get_text_config())
    return any(name.startswith(("index_topk", "keep_window")) for name in settings)


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 or ZeRO-3 shards the weights."""
    has_fsdp = any(hasattr(m, "unshard") for m in model.modules())
    return has_fsdp or any(hasattr(p, "ds_id") for p in model.parameters())


def disable_dropout(model: FlatModel) -> FlatModel:
    """Disable everything random in training mode: preference and policy losses compare log-probabilities, and
    randomness adds noise to them.

    Takes modules out of training mode (all forms of dropout, the random routing of some experts). Blocks that
    stay in it because they are recomputed get rates of 0.
    """
    for module in model.lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    model.dropout_off = True
    return model.train(model.training)


def is_quantised(lm: nn.Module) -> bool:
    """Whether a model's frozen weights are in 4 or 8 bits (quantised.py)."""
    return getattr(base_lm(lm), "is_quantized", False)


# --- figures ------------------------------------------------------------------------------------------------


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(trained, all) parameters."""
    parameters = list(model.parameters())
    trained = total = 0
    for p, size in zip(parameters, sizes(parameters), strict=True):
        total += size
        if p.requires_grad:
            trained += size
    return trained, total


def sizes(parameters: Iterable[nn.Parameter]) -> list[int]:
    """The number of elements of each parameter; two in 4 bits share a byte."""
    return [p.quant_state.shape.numel() if hasattr(p, "quant_state") else p.numel() for p in parameters]


def size_of_all_layers(config: "PreTrainedConfig", name: str) -> int:
    """A size in a configuration, or 0 if it is missing or differs between layers (Gemma 4)."""
    try:
        value = getattr(config, name, 0)
    except Exception:  # its own exception class, for a size that differs between layers
        return 0
    return value if isinstance(value, int) else 0
