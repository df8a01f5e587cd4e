"""experiments/train_online_dpo.py against float64: DPO's loss on pairs of sampled completions, ranked by their rewards."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.scripts.grpo_by_hand import Settings, answer_scores, chat_rows, check, run_grpo
from tests.scripts.one_step import assert_gradient, assert_metrics, exact, gradient_of

TWICE = {"steps_per_generation": 2, "num_iterations": 2, "temperature": 0.7}


def margin(policy, reference, chosen, rejected, temperature):
    """How much more than the reference the policy prefers the chosen completion, in nats (2305.18290, eq. 7)."""
    with torch.no_grad():
        before = [answer_scores(reference, c, temperature)[0].sum() for c in (chosen, rejected)]
    now = [answer_scores(policy, c, temperature)[0].sum() for c in (chosen, rejected)]
    return (now[0] - before[0]) - (now[1] - before[1])


@pytest.mark.parametrize("rewards", ["rating", "picky"])
def test_a_step_is_that_of_the_formula(rewards, launch, tmp_path, model):
    """Every update on a rollout and on the next; the rewards of some pairs are equal, or one is missing."""
    flags, s = Settings.flags(**TWICE, beta=0.4, num_generations=2, per_device_train_batch_size=16)
    rows = chat_rows(("any", "flat", "any", "any"))
    run = run_grpo(launch, tmp_path, "online_dpo", model, *flags, "--max_steps", 6, rows=rows, rewards=(rewards,))
    reference, seen = exact(model), []
    for step in range(6):
        rollout, window = run.rollouts[step // s.cycle], step % s.cycle % s.steps_per_generation
        part = rollout[window * s.size : (window + 1) * s.size]
        policy, margins = run.policy(step), []
        for one, two in zip(part[::2], part[1::2], strict=True):
            assert one.prompt_ids == two.prompt_ids
            if None not in (one.reward, two.reward) and one.reward != two.reward:
                chosen, rejected = (one, two) if one.reward > two.reward else (two, one)
                margins.append(0.4 * margin(policy, reference, chosen, rejected, s.temperature))
        loss = -logsigmoid(torch.stack(margins)).sum() / (s.size // 2)
        assert_gradient(run.grads[step], gradient_of(policy, loss))
        accuracy = sum(m.item() > 0 for m in margins) / len(margins)
        logged = {"loss": loss.item(), "rewards/margins": torch.stack(margins).mean().item()}
        assert_metrics(run.rows[step], logged | ({"rewards/accuracies": accuracy} if step % s.cycle else {}), abs=1e-4)
        seen += [m.item() for m in margins]
    assert len(seen) < 6 * s.size // 2 and max(map(abs, seen)) > 0.01


def test_the_other_objective_is_that_of_the_parent(launch, tmp_path, model):
    flags, settings = Settings.flags(beta=0.1)
    check(run_grpo(launch, tmp_path, "online_dpo", model, "--objective", "grpo", *flags, "--max_steps", 2), settings)
