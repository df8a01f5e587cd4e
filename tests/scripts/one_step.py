"""What the tests of the scripts share: a run that is watched from outside, and the same numbers in float64.

Nothing here imports the project's code. A run is seen through the files that it writes and through the
weights and gradients that reach `torch.optim.AdamW.step`; what they should be is computed by transformers in
float64, one sequence at a time, without padding, batches or shared beginnings, from the formulas of the
papers.
"""

from dataclasses import dataclass, field
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.conftest import read_rows, train_metrics
from tests.scripts.texts import tokenizer

# Every step is one line of the metrics, and the gradient reaches AdamW as it is.
PLAIN = "--logging_steps 1 --eval_steps 0 --save_steps 0 --num_samples 0 --max_grad_norm 0".split()
PLAIN += "--lr_scheduler_type constant --warmup_steps 0 --dataset_num_proc 1".split()


# --- models -------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 512, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = SMALL | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2}
GPT2 = SMALL | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.2}
OPT = SMALL | {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT |= {"max_position_embeddings": 256, "word_embed_proj_dim": 32, "init_std": 0.2}
KINDS = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    # Dropout as modules (residual, embedding and, inside of the attention call, on its weights) ...
    "gpt2": lambda: transformers.GPT2Config(**GPT2, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3),
    # ... on the weights of the attention only, which is a number that the layer hands to a function ...
    "llama_attention": lambda: transformers.LlamaConfig(**LLAMA, attention_dropout=0.3),
    # ... and as calls of torch.nn.functional.dropout in the middle of a layer.
    "opt": lambda: transformers.OPTConfig(**OPT, dropout=0.3, attention_dropout=0.3),
    # Each token sees itself and the five before it.
    "mistral": lambda: transformers.MistralConfig(**LLAMA, head_dim=8, sliding_window=6),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA, head_dim=12, tie_word_embeddings=True),
    # A mixture of experts.
    "moe": lambda: transformers.Qwen3MoeConfig(
        **LLAMA, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    # No attention: it is called on padded batches, and sampled without a cache.
    "rwkv": lambda: transformers.RwkvConfig(
        **SMALL, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2
    ),
    # Layers that carry a state along a sequence, beside attention.
    "lfm2": lambda: transformers.Lfm2Config(**LLAMA, layer_types=["conv", "full_attention"]),
}
DROPOUT = ("gpt2", "llama_attention", "opt")


def make_model(folder: Path, kind: str = "llama", *, stops: float = 1.0, **settings: Any) -> str:
    """A tiny random model with the tokenizer of data/base_model, in which no two parameters are alike.

    stops: how much larger than others the rows of the LM head are that write a stop token: above 1 it is
    sampled often. settings: of its config.
    """
    generator = torch.Generator().manual_seed(7)
    config = KINDS[kind]()
    config.update(settings)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:  # norms are all 1 and biases all 0
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        head = model.get_output_embeddings().weight
        head[[0, 2]] *= stops
    model.generation_config.eos_token_id = [0, 2]  # the end of a text, and of a turn
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def exact(model: str | Path, weights: dict[str, torch.Tensor] | None = None) -> Any:
    """The model in float64, without dropout; with other weights in place of its own, if given."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager").eval()
    if weights is not None:
        with torch.no_grad():
            for name, parameter in lm.named_parameters():
                parameter.copy_(weights[name])
    return lm


# --- a run, watched -----------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a run left behind, and for each of its steps the weights before it and the gradients, by the
    parameters' names."""

    model: str
    # tensors that are trained and are none of the model's: "extra.0", ... in the optimizer's order
    extra: int = 0
    output: Path = Path()
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    grads: list[dict[str, torch.Tensor]] = field(default_factory=list)
    _names: dict[int, str] = field(default_factory=dict)
    _policies: dict[int, Any] = field(default_factory=dict)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The metrics of the training steps."""
        return train_metrics(self.output)

    @property
    def evals(self) -> list[dict[str, Any]]:
        rows = read_rows(self.output / "metrics.jsonl")
        return [row for row in rows if any(name.startswith("eval_") for name in row)]

    def policy(self, step: int) -> Any:
        """The model before an update, in float64; the same object each time. step: from 0."""
        if step not in self._policies:
            self._policies[step] = exact(self.model, self.weights[step])
        return self._policies[step]

    def _record(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # before the first update the weights are those of the file, by which their names are known
        if not self._names:
            start = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
            for name, value in start.named_parameters():
                same = [p for p in parameters if p.shape == value.shape and torch.equal(p.detach(), value)]
                assert len(same) == 1, f"{len(same)} parameters that are trained have the values of {name}"
                self._names[id(same[0])] = name
            others = [parameter for parameter in parameters if id(parameter) not in self._names]
            assert len(others) == self.extra
            self._names |= {id(parameter): f"extra.{i}" for i, parameter in enumerate(others)}
        named = {self._names[id(parameter)]: parameter for parameter in parameters}
        self.weights.append({name: p.detach().clone() for name, p in named.items()})
        zero = torch.zeros(())
        self.grads.append(
            {name: (zero.expand(p.shape) if p.grad is None else p.grad).clone() for name, p in named.items()}
        )


def watched(launch: Any, stage: str, model: str, *flags: Any, output: str = "out", extra: int = 0) -> Run:
    """Launch a script on a model, with PLAIN and then the flags. extra: see Run."""
    run, step = Run(model, extra), torch.optim.AdamW.step

    def watched_step(optimizer: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        run._record(optimizer)
        return step(optimizer, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", watched_step)
        run.output = launch(stage, "--model_name_or_path", model, *PLAIN, *flags, output=output)
    return run


# --- the same in float64 ------------------------------------------------------------------------------------


def logits_of(lm: Any, ids: list[int]) -> torch.Tensor:
    """Of one sequence of n tokens: (n, V)."""
    return lm(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long)).logits[
        0
    ]


def token_scores(
    lm: Any, ids: list[int], temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of one sequence of n tokens, for all but the first: log-probability, entropy of its distribution, and
    whether it was the most probable one: (n-1,) each."""
    logits = logits_of(lm, ids)[:-1] / temperature
    logps = logits.log_softmax(-1)
    targets = torch.tensor(ids[1:])
    entropy = -(logps.exp() * logps).sum(-1)
    return logps.gather(-1, targets[:, None])[:, 0], entropy, (logits.argmax(-1) == targets).double()


def nll_window(
    lm: Any, sequences: list[tuple[list[int], list[int]]]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Cross-entropy over the trained tokens of (ids, mask) sequences, with its gradient, and what a script
    logs of it."""
    sums, count = [torch.zeros((), dtype=torch.float64) for _ in range(3)], 0
    for ids, mask in sequences:
        weights = torch.tensor(mask[1:], dtype=torch.float64)  # nothing stands before the first token
        sums = [
            total + (values * weights).sum()
            for total, values in zip(sums, token_scores(lm, ids), strict=True)
        ]
        count += int(weights.sum())
    loss, entropy, accuracy = -sums[0] / count, sums[1] / count, sums[2] / count
    values = {"loss": loss.item(), "entropy": entropy.item(), "mean_token_accuracy": accuracy.item()}
    return loss, values


def assert_nll_evaluations(run: Run, lm: Any, sequences: list[tuple[list[int], list[int]]]) -> None:
    """The evaluations of a run of two steps are means over the trained tokens of these sequences."""
    assert [row["step"] for row in run.evals] == [0, 1, 2]
    for row, policy in zip(run.evals, (lm, run.policy(1)), strict=False):
        values = nll_window(policy, sequences)[1]
        assert 0.02 < values["mean_token_accuracy"] < 0.98
        assert_metrics(row, {f"eval_{name}": value for name, value in values.items()})


def gradient_of(lm: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    parameters = dict(lm.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    pairs = zip(parameters.items(), found, strict=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}


def norm(gradient: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(value.double().square().sum().item() for value in gradient.values()))


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """How far two gradients are from each other, as a share of the larger one."""
    return norm({name: one[name].double() - other[name] for name in one}) / max(norm(one), norm(other))


def assert_gradient(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], scale: float | None = None
) -> None:
    """Float32 gradients are those of float64, together and parameter by parameter. scale: the size that
    errors are compared with, where the gradient itself may cancel to nothing."""
    assert found.keys() == wanted.keys()
    total = scale or norm(wanted)
    assert total > 1e-6, "a gradient of 0 proves nothing"
    difference = {name: found[name].double() - wanted[name] for name in wanted}
    assert norm(difference) < 2e-4 * total, f"error {norm(difference):.3g}, gradient {total:.3g}"
    for name in wanted:
        error = difference[name].norm().item()
        assert error < 2e-3 * wanted[name].norm().item() + 3e-5 * total, f"{name}: error {error:.3g}"


def assert_metrics(
    row: dict[str, Any], wanted: dict[str, float], rel: float = 1e-4, abs: float = 1e-5
) -> None:
    assert {name: row.get(name) for name in wanted} == pytest.approx(wanted, rel=rel, abs=abs)


def assert_step(
    run: Run, step: int, lm: Any, loss: torch.Tensor, logged: dict[str, float], **tolerance: float
) -> None:
    """A step (from 0) has these metrics and the gradient of this loss. lm: the model before it, in
    float64."""
    assert_metrics(run.rows[step], logged, **tolerance)
    assert_gradient(run.grads[step], gradient_of(lm, loss))


def assert_nll_step(run: Run, lm: Any, sequences: list[tuple[list[int], list[int]]], **more: float) -> None:
    """The first step is that of the trained tokens of these sequences. more: metrics beside those of its
    loss."""
    loss, values = nll_window(lm, sequences)
    assert_step(run, 0, lm, loss, values | more)


def adamw_update(
    weights: list[dict[str, torch.Tensor]],
    grads: list[dict[str, torch.Tensor]],
    rates: list[float],
    **settings: float,
) -> dict[str, torch.Tensor]:
    """The weights after the given steps of AdamW (arXiv 1711.05101, algorithm 2), from those before the first
    one, in float64; matrices decay, vectors do not."""
    beta1, beta2, epsilon, decay = (settings[name] for name in ("beta1", "beta2", "epsilon", "weight_decay"))
    result = {}
    for name, start in weights[0].items():
        x, m, v = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
        for t, rate in enumerate(rates, start=1):
            gradient = grads[t - 1][name].double()
            m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient**2
            if x.dim() >= 2:
                x = x - rate * decay * x
            x = x - rate * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + epsilon)
        result[name] = x
    return result


# Settings of AdamW none of which is the default of a script.
ADAMW = "--adam_beta1 0.8 --adam_beta2 0.7 --adam_epsilon 1e-3 --weight_decay 0.5".split()
ADAMW += "--lr_scheduler_type linear --learning_rate 3e-3 --min_lr_ratio 0.1 --warmup_steps 2".split()


def assert_adamw(run: Run) -> None:
    """A few steps with the flags ADAMW: the rates, which rise for two steps and then fall to a tenth where
    the run ends, and the weights before the last step."""
    rates, last = [row["learning_rate"] for row in run.rows], len(run.rows) - 1
    falling = [3e-3 * (1 - 0.9 * step / (last - 1)) for step in range(last - 1)]
    assert rates == pytest.approx([1.5e-3, 3e-3, *falling])
    wanted = adamw_update(
        run.weights, run.grads, rates[:last], beta1=0.8, beta2=0.7, epsilon=1e-3, weight_decay=0.5
    )
    for name, value in wanted.items():
        torch.testing.assert_close(run.weights[last][name].double(), value, rtol=1e-4, atol=1e-6)
    assert max((run.weights[last][name] - run.weights[0][name]).abs().max().item() for name in wanted) > 1e-4


def assert_clipped(run: Run, free: Run, limit: float) -> None:
    """With --max_grad_norm the first gradient is that of the free run, scaled to the limit; the metric is the
    norm before."""
    size = norm(free.grads[0])
    assert size > limit and run.rows[0]["grad_norm"] == pytest.approx(size, rel=1e-4)
    assert free.rows[0]["grad_norm"] == pytest.approx(size, rel=1e-4)
    assert_gradient(
        run.grads[0], {name: value.double() * limit / size for name, value in free.grads[0].items()}
    )
