"""experiments/train_ppo.py against float64: what each token earns, what the critic is told, and what both
weigh."""

from types import SimpleNamespace

import pytest
import torch

from tests.scripts.grpo_by_hand import LONGEST, chat_rows, run_grpo
from tests.scripts.one_step import assert_gradient, assert_metrics, exact, token_scores

# None of them is a default.
SETTINGS = {"gamma": 0.9, "lam": 0.7, "vf_coef": 0.6, "cliprange_value": 0.03}
SETTINGS |= {
    "beta": 0.3,
    "epsilon": 0.1,
    "epsilon_high": 0.15,
    "entropy_coef": 0.02,
    "temperature": 0.7,
    "num_iterations": 2,
    "steps_per_generation": 2,
}


# --- the same by hand ---------------------------------------------------------------------------------------


def head_of(weights):
    """The critic's tensors, in float64."""
    return [weights[f"extra.{i}"].double().requires_grad_() for i in range(4)]


def say(lm, head, prompt, ids, s):
    """Log-probabilities, entropies and values (n,) of the tokens of a completion."""
    logps, entropy, _ = token_scores(lm, prompt + ids, s.temperature)
    states = lm.model(input_ids=torch.tensor([prompt + ids])).last_hidden_state[0, len(prompt) - 1 : -1]
    hidden = torch.nn.functional.silu(states @ head[0].T + head[1])
    return logps[len(prompt) - 1 :], entropy[len(prompt) - 1 :], (hidden @ head[2].T + head[3])[:, 0]


def advantages_of(rewards, values, s):
    """1506.02438, eq. 16, as the sum that it is."""
    after = torch.cat([values[1:], torch.zeros(1)])
    deltas = rewards + s.gamma * after - values
    n = len(values)
    return torch.stack([sum((s.gamma * s.lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)])


def window_loss(run, s, step):
    """Of a step, from the weights before it: loss, trained tensors by name, metrics, explained variance, how
    many count."""
    cycle = s.num_iterations * s.steps_per_generation
    first = step // cycle * cycle
    size = 8
    start = step % s.steps_per_generation * size
    part = run.rollouts[step // cycle][start : start + size]
    part = [c for c in part if c.reward is not None and (c.finished or not s.mask_truncated_completions)]
    counted = [(c.prompt_ids, c.ids, c.reward) for c in part]
    assert len(counted) > 1
    lm, old, reference = run.policy(step), run.policy(first), exact(run.model)
    head, old_head = head_of(run.weights[step]), head_of(run.weights[first])
    known = []
    with torch.no_grad():
        for prompt, ids, reward in counted:
            old_logps, _, values = say(old, old_head, prompt, ids, s)
            ref_logps = say(reference, old_head, prompt, ids, s)[0]
            rewards = (
                -s.beta * (old_logps - ref_logps) if s.use_kl_in_reward else torch.zeros(len(ids)).double()
            )
            rewards[-1] += reward
            known.append((old_logps, ref_logps, values, advantages_of(rewards, values, s)))
    everyones = torch.cat([A for *_, A in known])
    returns = torch.cat([A + values for *_, values, A in known])
    mean, std = everyones.mean(), everyones.std(correction=0)
    total, critic, clipped, kls = torch.zeros(()).double(), 0.0, 0.0, 0.0
    for (prompt, ids, _), (old_logps, ref_logps, values, A) in zip(counted, known, strict=True):
        logps, entropy, now = say(lm, head, prompt, ids, s)
        ratio, target, A = (logps - old_logps).exp(), A + values, (A - mean) / std
        losses = -torch.minimum(ratio * A, ratio.clamp(1 - s.epsilon, 1 + s.epsilon_high) * A)
        x = ref_logps - logps
        kl = ratio * (x.exp() - 1 - x)
        if not s.use_kl_in_reward:
            losses = losses + s.beta * kl
        near = torch.maximum(torch.minimum(now, values + s.cliprange_value), values - s.cliprange_value)
        squares = 0.5 * torch.maximum((now - target) ** 2, (near - target) ** 2)
        total = total + (losses + s.vf_coef * squares - s.entropy_coef * entropy).sum()
        kls += kl.sum().item()
        critic += squares.sum().item()
        clipped += ((near - target) ** 2 > (now - target) ** 2).sum().item()
    N = len(everyones)
    logged = {"value_loss": critic / N, "value_clip_ratio": clipped / N, "kl": kls / N}
    explained = 1 - everyones.var(correction=0).item() / returns.var(correction=0).item()
    trained = dict(lm.named_parameters()) | {f"extra.{i}": tensor for i, tensor in enumerate(head)}
    return total / N, trained, logged, explained, len(counted)


@pytest.mark.parametrize("in_reward", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_step_is_that_of_the_papers(in_reward, launch, model, tmp_path):
    """Two rollouts of two minibatches in two epochs: at first, where the critic says 0 and all ratios are 1,
    and later. Of some completions nobody says what they are worth, or those that were cut do not count."""
    settings = SETTINGS | {"use_kl_in_reward": in_reward, "mask_truncated_completions": not in_reward}
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value).lower())]
    flags += [
        "--per_device_train_batch_size",
        4,
        "--gradient_accumulation_steps",
        2,
        "--learning_rate",
        "2e-3",
    ]
    flags += ["--max_steps", 6, "--max_completion_length", LONGEST if in_reward else 5]
    rows, s = chat_rows(("any", "any", "any", "flat")), SimpleNamespace(**settings)
    run = run_grpo(launch, tmp_path, "ppo", model, *flags, rows=rows, rewards=("picky",), extra=4)
    seen, explained, numbers = [], [], []
    for step in range(6):
        loss, trained, logged, share, counted = window_loss(run, s, step)
        found = torch.autograd.grad(loss, list(trained.values()))
        assert run.rows[step]["loss"] == pytest.approx(loss.item(), rel=3e-4, abs=3e-5)
        assert_gradient(run.grads[step], dict(zip(trained, found, strict=True)))
        assert_metrics(run.rows[step], logged, rel=1e-3, abs=1e-4)
        seen.append(logged["value_clip_ratio"])
        explained.append(share)
        numbers.append(counted)
    assert seen[0] == 0 < max(seen), "the clip of the values was never seen at work"
    assert min(numbers) < 8, "all completions count"
    for step in (0, 4):  # of the windows of a rollout, when it was sampled
        share = (explained[step] + explained[step + 1]) / 2
        assert run.rows[step]["explained_variance"] == pytest.approx(share, rel=1e-3, abs=1e-4)
    assert run.rows[0]["explained_variance"] == pytest.approx(0, abs=1e-9) and explained[4] != 0
    assert all(row["sampling/logp_difference"] < 1e-4 for row in run.rows)
