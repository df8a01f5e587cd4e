"""The copies of train_grpo.py against float64: rollouts of older weights, groups drawn again, pairs that were
just sampled."""

import json
from types import SimpleNamespace

from common.sampling import Sampled, sample
import pytest
import torch
from torch.nn.functional import logsigmoid

from experiments.rollout_ahead import RolloutsAhead
from tests.scripts.grpo_by_hand import (
    Settings,
    answer_scores,
    chat_rows,
    check,
    check_rollouts,
    moved,
    run_grpo,
)
from tests.scripts.one_step import assert_step, exact

TWICE = {"steps_per_generation": 2, "num_iterations": 2, "temperature": 0.7}
MASK = {"importance_correction": "sequence_mask", "off": 0.5}
SMALL = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
AHEAD = {
    "two-sided": TWICE | {"delta": 1.1, "epsilon_high": 0.05, "entropy_coef": 0.01},
    "another sampler": TWICE
    | {"importance_correction": "token_truncate", "off": 0.5, "importance_cap": 1.25, "beta": 0.2},
    "completions left out": TWICE | MASK | {"entropy_coef": 0.01},
    "left out, by window": MASK | {"loss_type": "bnpo"},
    "left out, each": MASK | {"loss_type": "grpo", "importance_cap": 1.5},
    "not corrected": {"off": 0.5},
    "high entropy": TWICE | {"top_entropy_quantile": 0.3},
    "high entropy, kl": SMALL | {"top_entropy_quantile": 0.5, "beta": 0.1},
    "ahead": {"rollout_ahead": 1},
    "two ahead": {"rollout_ahead": 2, "num_iterations": 2, "loss_type": "grpo"},
}
SLOW = ("left out, by window", "left out, each", "not corrected", "two ahead", "high entropy, kl")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in AHEAD]
)
def test_a_step_of_grpo_ahead_is_that_of_the_formula(name, launch, tmp_path, model, monkeypatch):
    """As of train_grpo.py; up to the first rollout that was sampled by older weights than it trains."""
    flags, settings = Settings.flags(**AHEAD[name])

    def shifted(*given, **how):
        sampled = sample(*given, **how)
        return [
            s._replace(logps=(torch.tensor(s.logps) + moved(s.ids, settings.off)).tolist()) for s in sampled
        ]

    if settings.off:  # as another sampler's are
        monkeypatch.setattr("common.sampling.sampler.sample", shifted)
    rollouts = 2 + settings.rollout_ahead
    steps = settings.cycle * (rollouts - 1) + settings.steps_per_generation
    rows = chat_rows(("any", "flat", "any", "any"))
    run = run_grpo(launch, tmp_path, "grpo_ahead", model, *flags, "--max_steps", steps, rows=rows)
    check_rollouts(run, settings, rollouts, steps)


@pytest.mark.parametrize("rank", [0, 1])
def test_rollouts_sampled_ahead_go_back_to_their_process(rank):
    """Unless there are more, or fewer, of them now."""
    mine, everyones = range(4 * rank, 4 * rank + 4), [Sampled([i], [-1.0], True) for i in range(8)]
    accelerator = SimpleNamespace(num_processes=2, process_index=rank)
    rollouts = SimpleNamespace(_begun={}, prompts=lambda _: [None] * 8, _accelerator=accelerator)
    RolloutsAhead.restore(
        rollouts, 3, json.loads(json.dumps({"sampled_ahead": {3: everyones, 4: everyones[:4]}}))
    )
    assert list(rollouts._begun) == [3] and rollouts._begun[3].result() == [everyones[i] for i in mine]


# --- dynamic sampling ---------------------------------------------------------------------------------------

G = 4
DYNAMIC = {
    "full": {"steps_per_generation": 2, "num_iterations": 2},
    "std of the rollout": {"scale_rewards": "batch"},
    "not full": {"loss_type": "grpo", "beta": 0.1},
}
KINDS = {"not full": ("flat", "any", "flat", "flat")}


@pytest.mark.parametrize("name", DYNAMIC)
def test_groups_of_equal_rewards_are_drawn_again(name, launch, tmp_path, model):
    """Until rewards differ in every group, or to the last draw; each draw is of the groups that are missing,
    and the first is that of train_grpo.py."""
    flags, settings = Settings.flags(**DYNAMIC[name])
    kinds, draws = KINDS.get(name, ("any", "flat", "any", "flat")), 2 if name == "not full" else 10
    flat = [row["prompt"] for row in chat_rows(kinds) if row["kind"] == "flat"]
    size, drawn, given = settings.size * settings.steps_per_generation, [], []

    def rollouts_of(calls):
        given.extend(calls)
        rollouts, numbers = [], []
        for call in calls:
            if (
                not rollouts
                or numbers[-1] == draws
                or sum(useful(group) for group in rollouts[-1]) == size // G
            ):
                rollouts, numbers = [*rollouts, []], [*numbers, 0]
            assert len(call) == size - G * sum(useful(group) for group in rollouts[-1])
            rollouts[-1] += [call[first : first + G] for first in range(0, len(call), G)]
            numbers[-1] += 1
        drawn.extend(numbers)
        return [sum(sorted(groups, key=lambda group: not useful(group)), []) for groups in rollouts]

    def useful(group):  # by `rating` of the rewards
        return group[0][0] not in flat and len({sum(ids) * 37 % 11 for _, _, ids in group}) > 1

    words = [*flags, "--max_draws", draws, "--max_steps", 2 * settings.cycle]
    run = run_grpo(
        launch, tmp_path, "dynamic_sampling", model, *words, rows=chat_rows(kinds), rollouts_of=rollouts_of
    )
    assert len(drawn) == 2 and max(drawn) > 1
    everything = run.rollouts
    run.rollouts = [rollout[:size] for rollout in everything]
    left_out = [rollout[size:] for rollout in everything]
    assert any(left_out) and not any(completion.advantage for rollout in left_out for completion in rollout)
    idle = [
        not any(c.advantage for c in rollout[at : at + G])
        for rollout in run.rollouts
        for at in range(0, size, G)
    ]
    assert any(idle) == (name == "not full")
    check(run, settings)
    for n, start in enumerate(run.starts):
        row, share = run.rows[start], len(left_out[n]) / len(everything[n])
        assert row.get("completions/left_out_ratio", 0) == pytest.approx(share)
        assert row["reward"] == pytest.approx(sum(c.reward for c in everything[n]) / len(everything[n]))
    flags += ["--max_steps", settings.cycle]
    parent = run_grpo(launch, tmp_path, "grpo", model, *flags, rows=chat_rows(kinds), output="parent")
    assert [c.ids for c in parent.rollouts[0]] == [ids for _, _, ids in given[0]]


# --- online DPO ---------------------------------------------------------------------------------------------


def margin(policy, reference, chosen, rejected, temperature):
    """How much more than the reference the policy prefers the chosen completion, in nats (2305.18290, eq.
    7)."""
    with torch.no_grad():
        before = [answer_scores(reference, c, temperature)[0].sum() for c in (chosen, rejected)]
    now = [answer_scores(policy, c, temperature)[0].sum() for c in (chosen, rejected)]
    return (now[0] - before[0]) - (now[1] - before[1])


@pytest.mark.parametrize("rewards", ["rating", "picky"])
def test_a_step_of_online_dpo_is_that_of_the_formula(rewards, launch, tmp_path, model, monkeypatch):
    """Every update on a rollout and on the next; the rewards of some pairs are equal, or one is missing. Also if
    a micro-batch is split: both of a pair stay in one part."""
    if rewards == "picky":
        monkeypatch.setattr("common.run.retry.tokens_at_once", lambda *_: 20.0)
    flags, s = Settings.flags(**TWICE, beta=0.4, num_generations=2, per_device_train_batch_size=16)
    rows = chat_rows(("any", "flat", "any", "any"))
    run = run_grpo(
        launch, tmp_path, "online_dpo", model, *flags, "--max_steps", 6, rows=rows, rewards=(rewards,)
    )
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
        accuracy = sum(m.item() > 0 for m in margins) / len(margins)
        logged = {"loss": loss.item(), "rewards/margins": torch.stack(margins).mean().item()}
        logged |= {"rewards/accuracies": accuracy} if step % s.cycle else {}
        assert_step(run, step, policy, loss, logged, abs=1e-4)
        seen += [m.item() for m in margins]
    assert len(seen) < 6 * s.size // 2 and max(map(abs, seen)) > 0.01


def test_the_other_objective_is_that_of_the_parent(launch, tmp_path, model):
    flags, settings = Settings.flags(beta=0.1)
    check(
        run_grpo(launch, tmp_path, "online_dpo", model, "--objective", "grpo", *flags, "--max_steps", 2),
        settings,
    )
