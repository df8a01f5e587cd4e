"""GRPO's runs and their steps by hand, in float64: for train_grpo.py and its copies.

What was sampled comes from a reward function, which is given the token ids; the rest from completions.jsonl
and metrics.jsonl.
"""

from dataclasses import dataclass
import math
from pathlib import Path
import statistics

import pytest
import torch

from tests.conftest import read_rows, write_rows
from tests.scripts.one_step import assert_gradient, assert_metrics, exact, gradient_of, token_scores, watched
from tests.scripts.texts import chat, prompt_ids, tokenizer

STOPS = (0, 2)  # the end of a text, and of a turn
LONGEST = 8  # max_completion_length of the runs
# One file of reward functions; the first one keeps what it is given. `kind` is a column of the data.
REWARDS = '''
import json
from pathlib import Path


def rating(prompts, completions, completion_ids, kind, **columns):
    """Any number for each completion; one and the same for prompts that are flat."""
    values = [0.5 if k == "flat" else sum(ids) * 37 % 11 / 10 for k, ids in zip(kind, completion_ids)]
    with open(Path(__file__).with_name("calls.jsonl"), "a") as file:
        file.write(json.dumps({"prompts": prompts, "completions": completions, "ids": completion_ids}) + "\\n")
    return values


def picky(prompts, completions, completion_ids, kind, **columns):
    """The same, but for a third of the completions nothing, nor for any of the prompts that are dumb."""
    values = rating(prompts, completions, completion_ids, kind)
    dumb = [k == "dumb" or sum(ids) % 3 == 0 for k, ids in zip(kind, completion_ids)]
    return [None if none else value for none, value in zip(dumb, values)]


def second(completion_ids, **columns):
    """Another number, and for some completions nothing."""
    return [None if sum(ids) % 5 == 0 else len(ids) + sum(ids) % 7 for ids in completion_ids]


def count(completion_ids, **columns):
    return [len(ids) for ids in completion_ids]


def rest(completion_ids, **columns):
    return [sum(ids) % 7 for ids in completion_ids]
'''
CHATS = [
    "What is 3+4?",
    "Hi",
    "Eva has 10 figs. She loses 4. How many figs now?",
    "Which number comes before 14?",
]
TEXTS = [
    "Question: What is 8-5?\n",
    "12-5+6+4: ",
    "Today is Monday. ",
    "A pond has 3 ducks. 7 come. Now the pond",
]


def chat_rows(kinds=("any", "any", "any", "any")):
    return [{"prompt": chat(text), "kind": kind} for text, kind in zip(CHATS, kinds, strict=True)]


def text_rows():
    return [{"prompt": text, "kind": "any"} for text in TEXTS]


@dataclass
class Completion:
    """One completion, as the run's files and the reward functions know it."""

    prompt_ids: list[int]
    ids: list[int]
    rewards: list[float | None]
    reward: float | None
    advantage: float | None  # of each token in PPO

    @property
    def finished(self):
        return self.ids[-1] in STOPS


def run_grpo(
    launch,
    folder,
    stage,
    model,
    *flags,
    rows=None,
    rewards=("rating",),
    output="out",
    rollouts_of=None,
    extra=0,
):
    """Run a script of GRPO's; run.rollouts are its rollouts, each a list of Completion.

    rollouts_of: makes rollouts of what the reward functions were given at each call, (prompt, completion,
    ids) of each completion, in the order of completions.jsonl. By default each call is a rollout.
    """
    folder = Path(folder) / f"rewards_{output}"
    folder.mkdir()
    (folder / "rewards.py").write_text(REWARDS)
    names = ["--dataset_name", write_rows(folder / "prompts.jsonl", rows or chat_rows())]
    names += ["--reward_funcs", *(f"{folder / 'rewards.py'}:{name}" for name in rewards)]
    names += ["--num_generations", 4] if stage != "ppo" else []
    names += [
        "--max_completion_length",
        LONGEST,
        "--per_device_train_batch_size",
        8,
        "--learning_rate",
        "5e-4",
    ]
    run = watched(launch, stage, model, *names, *flags, output=output, extra=extra)
    longest = int(dict(zip(flags, flags[1:], strict=False)).get("--max_completion_length", LONGEST))
    calls, lines = read_rows(folder / "calls.jsonl"), read_rows(run.output / "completions.jsonl")
    calls = [list(zip(call["prompts"], call["completions"], call["ids"], strict=True)) for call in calls]
    run.rollouts, run.starts, at = [], [], 0
    for given in rollouts_of(calls) if rollouts_of else calls:
        rollout = []
        for prompt, completion, ids in given:
            line, at = lines[at], at + 1
            text = completion if isinstance(completion, str) else completion[0]["content"]
            assert (line["prompt"], line["completion"]) == (prompt, text)
            assert text == tokenizer().decode(ids, skip_special_tokens=True)
            assert 1 <= len(ids) <= longest and not set(ids[:-1]) & set(STOPS)
            assert len(ids) == longest or ids[-1] in STOPS
            assert line["finished"] == (ids[-1] in STOPS)
            scores = list(line["rewards"].values())
            assert list(line["rewards"]) == list(rewards)
            rollout.append(Completion(prompt_ids(prompt), ids, scores, line["reward"], line.get("advantage")))
        run.rollouts.append(rollout)
        run.starts.append(line["step"] - 1)  # the first step that the rollout serves
    assert at == len(lines)
    return run


def check_rollouts(run, settings, rollouts, steps):
    """`check`, and that a step has a ratio of 1 where, and only where, the model is the one that sampled."""
    distances = check(run, settings)
    assert len(distances) == steps and len(run.rollouts) == rollouts
    for step, distance in enumerate(distances):
        assert distance > 1e-3 if step % settings.cycle else distance < 1e-6


# --- the same by hand ---------------------------------------------------------------------------------------


def combined(rewards, weights):
    """The weighted sum of what the functions gave; None where all of them gave nothing."""
    weights = weights or [1.0] * len(rewards)
    known = [weight * value for weight, value in zip(weights, rewards, strict=True) if value is not None]
    return sum(known) if known else None


def wanted_advantages(rollout, s):
    """Of each completion (2402.03300, eq. 3; 2503.20783 without the division; 2402.14740 and 2501.03262 for
    the others)."""
    G, weights, scale = s.num_generations, s.reward_weights, s.scale_rewards
    rewards = [combined(c.rewards, weights) for c in rollout]
    everything = [value for value in rewards if value is not None]
    advantages = []
    for first in range(0, len(rewards), G):
        group = rewards[first : first + G]
        known = [value for value in group if value is not None]
        mean = statistics.mean(known) if known else 0.0
        std = {
            "group": lambda known=known: statistics.stdev(known) if len(known) > 1 else 0.0,
            "batch": lambda: statistics.stdev(everything),
            "none": lambda: 1.0 - 1e-4,
        }[scale]()
        for value in group:
            others = [*known]
            if s.advantage_estimator == "rloo" and value is not None:
                others.remove(value)
            baseline = statistics.mean(everything) if s.advantage_estimator == "reinforce_pp" else None
            baseline = (statistics.mean(others) if others else mean) if baseline is None else baseline
            idle = value is None or (len(set(known)) == 1 and s.advantage_estimator != "reinforce_pp")
            advantages.append(0.0 if idle else (value - baseline) / (std + 1e-4))
    return advantages


@dataclass
class Settings:
    """What a run was told, with the defaults of the script."""

    num_generations: int = 4
    learning_rate: float = 5e-4
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    steps_per_generation: int = 1
    num_iterations: int = 1
    temperature: float = 1.0
    max_completion_length: int = LONGEST
    loss_type: str = "dapo"
    scale_rewards: str = "group"
    reward_weights: tuple | None = None  # 1 for each
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    entropy_coef: float = 0.0
    importance_sampling_level: str = "token"
    use_bias_correction_kl: bool = True
    mask_truncated_completions: bool = False
    delta: float | None = None
    advantage_estimator: str = "grpo"
    importance_correction: str = "auto"
    importance_cap: float = 2.0
    top_entropy_quantile: float = 1.0
    rollout_ahead: int = 0
    off: float = 0.0  # no flag: how far the sampler's log-probabilities are from those of its model

    @classmethod
    def flags(cls, **settings):
        """(the flags that ask for these settings, the settings)"""
        words = []
        for name, value in settings.items():
            if name == "off":
                continue
            words += [f"--{name}", *(value if isinstance(value, tuple) else [str(value).lower()])]
        return words, cls(**settings)

    @property
    def size(self):
        """Completions of a window."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def cycle(self):
        return self.steps_per_generation * self.num_iterations


def answer_scores(lm, completion, temperature):
    """Log-probabilities and entropies (n,) of the tokens of a completion."""
    ids = completion.prompt_ids + completion.ids
    return [values[len(completion.prompt_ids) - 1 :] for values in token_scores(lm, ids, temperature)[:2]]


def is_trained(completion, settings):
    return completion.finished or not settings.mask_truncated_completions


def moved(ids, off):
    """What is added to the sampler's log-probabilities, to see what becomes of the difference."""
    return off * torch.sin(torch.tensor(ids, dtype=torch.float64))


@torch.no_grad()
def distance(old, sampler, completion, s):
    """(n,) log π_old - log π_sampler of the tokens."""
    if old is sampler:
        return -moved(completion.ids, s.off)
    old_logps, sampled = (answer_scores(lm, completion, s.temperature)[0] for lm in (old, sampler))
    return old_logps - sampled - moved(completion.ids, s.off)


def is_left_out(old, sampler, completion, s):
    return s.importance_correction == "sequence_mask" and distance(
        old, sampler, completion, s
    ).sum() > math.log(s.importance_cap)


def entropy_bound(old, rollout, chosen, s):
    """What a token's entropy has to be at least, among all of the window that are not masked, whatever their
    advantage."""
    with torch.no_grad():
        entropies = torch.cat([answer_scores(old, rollout[i], s.temperature)[1] for i in chosen])
    return torch.quantile(entropies, 1 - s.top_entropy_quantile)


def window_loss(policy, old, sampler, reference, rollout, window, s):
    """The loss of a step, with its gradient, and what is logged of the tokens. window: which part of the
    rollout."""
    advantages = wanted_advantages(rollout, s)
    part = range(window * s.size, (window + 1) * s.size)
    run = [i for i in part if is_trained(rollout[i], s)]
    left_out = {i for i, c in enumerate(rollout) if is_left_out(old, sampler, c, s)}
    trained = [i for i in run if i not in left_out]
    tokens_of_window = sum(len(rollout[i].ids) for i in trained)
    tokens_of_rollout = sum(
        len(c.ids) for i, c in enumerate(rollout) if is_trained(c, s) and i not in left_out
    )
    bound = entropy_bound(old, rollout, run, s) if s.top_entropy_quantile < 1 else None
    high = s.epsilon if s.epsilon_high is None else s.epsilon_high
    loss, tokens_run, largest = torch.zeros((), dtype=torch.float64), 0, 0.0
    sums = dict.fromkeys(("kl", "entropy", "low", "high", "ratio", "difference", "cut"), 0.0)
    for i in run:
        logps, entropy = answer_scores(policy, rollout[i], s.temperature)
        with torch.no_grad():
            old_logps = logps.detach() if old is policy else answer_scores(old, rollout[i], s.temperature)[0]
            ref_logps = answer_scores(reference, rollout[i], s.temperature)[0] if s.beta else old_logps
        A, n = advantages[i], len(logps)
        if s.importance_sampling_level == "sequence":  # 2507.18071, eq. 7
            ratio = (logps - old_logps).mean().exp().expand(n)
        else:
            ratio = (logps - old_logps).exp()
        clipped = (ratio > 1 + high) if A > 0 else (ratio < 1 - s.epsilon)
        limit = 1 + high if A > 0 else 1 - s.epsilon
        losses = -torch.where(clipped, torch.full_like(ratio, limit), ratio) * A
        if s.delta is not None and A < 0:  # 2505.07291
            losses = -torch.where(clipped, torch.full_like(ratio, limit), ratio.clamp(max=s.delta)) * A
        if s.loss_type == "cispo":  # 2506.13585
            losses = -ratio.detach().clamp(max=high) * A * logps
            clipped = (ratio > high) & (A > 0)
        difference = distance(old, sampler, rollout[i], s)
        if s.importance_correction != "none" and (
            s.rollout_ahead or s.importance_correction == "token_truncate"
        ):
            losses = losses * difference.exp().clamp(max=s.importance_cap)
            sums["cut"] += (difference > math.log(s.importance_cap)).sum().item()
        if bound is not None:
            losses = losses * (answer_scores(old, rollout[i], s.temperature)[1].detach() >= bound)
        x = ref_logps - logps
        kl = x.exp() - 1 - x  # Schulman's k3
        if s.use_bias_correction_kl:
            kl = kl * ratio
        losses = losses + s.beta * kl - s.entropy_coef * entropy
        weight = {
            "grpo": 1 / (s.size * n),  # TRL: the mean of all rows, 0 for one that is masked
            "bnpo": 1 / tokens_of_window,
            "cispo": 1 / (tokens_of_rollout / s.steps_per_generation),
            "dapo": 1 / (tokens_of_rollout / s.steps_per_generation),
            "dr_grpo": 1 / (s.size * s.max_completion_length),
        }[s.loss_type]
        if i not in left_out:
            loss = loss + weight * losses.sum()
        thresholds = s.importance_correction == "sequence_mask" or s.top_entropy_quantile < 1
        if not (A or s.beta or s.entropy_coef or thresholds):  # not run, and in no mean
            continue
        tokens_run += n
        sums["kl"] += kl.sum().item()
        sums["entropy"] += entropy.sum().item()
        sums["low"] += clipped.sum().item() * (A < 0)
        sums["high"] += clipped.sum().item() * (A > 0)
        sums["ratio"] += (ratio - 1).abs().sum().item()
        sums["difference"] += difference.abs().sum().item()
        largest = max(largest, difference.abs().max().item())
    means = {name: value / tokens_run for name, value in sums.items()}
    return loss, means | {"largest": largest}


def check(run, s, steps=None):
    """Advantages, loss, gradient and metrics of the steps; returns how far the ratios are from 1 on average,
    step by step."""
    start, distances = exact(run.model), []
    tokens = 0
    for step in range(len(run.rows)) if steps is None else steps:
        rollout = run.rollouts[step // s.cycle]
        old = run.policy(step // s.cycle * s.cycle)
        assert run.starts[step // s.cycle] == step // s.cycle * s.cycle
        assert len(rollout) == s.size * s.steps_per_generation
        wanted = wanted_advantages(rollout, s)
        assert [c.advantage for c in rollout] == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert [c.reward for c in rollout] == pytest.approx(
            [combined(c.rewards, s.reward_weights) for c in rollout]
        )
        policy = run.policy(step)
        sampler = run.policy(max(0, step // s.cycle - s.rollout_ahead) * s.cycle)
        window = step % s.cycle % s.steps_per_generation
        loss, means = window_loss(policy, old, sampler, start, rollout, window, s)
        tokens += sum(len(c.prompt_ids + c.ids) for c in rollout[window * s.size : (window + 1) * s.size])
        assert steps or run.rows[step]["num_tokens"] == tokens
        assert run.rows[step]["step"] == step + 1
        # The loss is a sum of parts that cancel.
        assert run.rows[step]["loss"] == pytest.approx(loss.item(), rel=3e-4, abs=3e-5)
        assert_gradient(run.grads[step], gradient_of(policy, loss))
        logged = {
            "entropy": means["entropy"],
            "clip_ratio/low_mean": means["low"],
            "clip_ratio/high_mean": means["high"],
        }
        logged |= {"clip_ratio/region_mean": means["low"] + means["high"]} | (
            {"kl": means["kl"]} if s.beta else {}
        )
        assert_metrics(run.rows[step], logged, rel=1e-3, abs=1e-4)
        logged = {
            "sampling/logp_difference": means["difference"],
            "sampling/logp_difference_max": means["largest"],
        }
        logged |= (
            {"sampling/importance_clipped": means["cut"]}
            if s.importance_correction == "token_truncate"
            else {}
        )
        assert_metrics(run.rows[step], logged, rel=1e-3, abs=1e-4)
        distances.append(means["ratio"])
    return distances
