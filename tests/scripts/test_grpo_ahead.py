"""experiments/train_grpo_ahead.py against float64: rollouts of older weights, and what of them is trained."""

from common.sampling import sample
import pytest
import torch

from tests.scripts.grpo_by_hand import Settings, chat_rows, check_rollouts, moved, run_grpo

TWICE = {"steps_per_generation": 2, "num_iterations": 2, "temperature": 0.7}
MASK = {"importance_correction": "sequence_mask", "off": 0.5}
SMALL = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
LOSSES = {
    "two-sided": TWICE | {"delta": 1.1, "epsilon_high": 0.05, "entropy_coef": 0.01},
    "another sampler": TWICE | {"importance_correction": "token_truncate", "off": 0.5, "importance_cap": 1.25, "beta": 0.2},
    "completions left out": TWICE | MASK | {"entropy_coef": 0.01},
    "left out, by window": MASK | {"loss_type": "bnpo"},
    "left out, each": MASK | {"loss_type": "grpo", "importance_cap": 1.5},
    "not corrected": {"off": 0.5},
    "high entropy": TWICE | {"top_entropy_quantile": 0.3},
    "high entropy, kl": SMALL | {"top_entropy_quantile": 0.5, "beta": 0.1},
    "ahead": {"rollout_ahead": 1},
    "two ahead": {"rollout_ahead": 2, "num_iterations": 2, "loss_type": "grpo"},
}
LONG = ("left out, by window", "left out, each", "not corrected", "two ahead", "high entropy, kl")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in LOSSES])
def test_a_step_is_that_of_the_formula(name, launch, tmp_path, model, monkeypatch):
    """As of train_grpo.py; up to the first rollout that was sampled by older weights than it trains."""
    flags, settings = Settings.flags(**LOSSES[name])

    def shifted(*given, **how):
        sampled = sample(*given, **how)
        return [s._replace(logps=(torch.tensor(s.logps) + moved(s.ids, settings.off)).tolist()) for s in sampled]

    if settings.off:  # as another sampler's are
        monkeypatch.setattr("experiments.train_grpo_ahead.sample", shifted)
    rollouts = 2 + settings.rollout_ahead
    steps = settings.cycle * (rollouts - 1) + settings.steps_per_generation
    rows = chat_rows(("any", "flat", "any", "any"))
    run = run_grpo(launch, tmp_path, "grpo_ahead", model, *flags, "--max_steps", steps, rows=rows)
    check_rollouts(run, settings, rollouts, steps)
