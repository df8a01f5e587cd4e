"""train_grpo.py against float64: what is sampled, what it is compared with, and what each of its tokens weighs.

What was sampled comes from a reward function, which is given the token ids; the rest from completions.jsonl and metrics.jsonl.
"""

import contextlib
import importlib
import json
import math
import statistics
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace

import train_grpo
from common.model import FlatModel
from common.sampling import Sampled, sample
from common.sampling.rollout import rollout_metrics
from common.sampling.sampler import OwnSampler
from common.sampling.schedule import RolloutSchedule
from tests.conftest import module_of
from tests.scripts.one_step import (
    ADAMW,
    BASE,
    DROPOUT,
    assert_adamw,
    assert_clipped,
    assert_gradient,
    assert_metrics,
    exact,
    gradient_of,
    ids_of,
    logits_of,
    make_model,
    read_rows,
    token_scores,
    tokenizer,
    watched,
    write_rows,
)

import pytest
import torch

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
CHATS = ["What is 3+4?", "Hi", "Eva has 10 figs. She loses 4. How many figs now?", "Which number comes before 14?"]
TEXTS = ["Question: What is 8-5?\n", "12-5+6+4: ", "Today is Monday. ", "A pond has 3 ducks. 7 come. Now the pond"]


def chat_rows(kinds=("any", "any", "any", "any")):
    return [{"prompt": [{"role": "user", "content": text}], "kind": kind} for text, kind in zip(CHATS, kinds, strict=True)]


def text_rows():
    return [{"prompt": text, "kind": "any"} for text in TEXTS]


@dataclass
class Completion:
    """One completion, as the run's files and the reward functions know it."""

    prompt_ids: list[int]
    ids: list[int]
    rewards: list[float | None]
    reward: float | None
    advantage: float

    @property
    def finished(self):
        return self.ids[-1] in STOPS


def prompt_ids(prompt):
    if isinstance(prompt, str):
        return ids_of(prompt)
    return ids_of(tokenizer().apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "llama", stops=5.0)


@pytest.fixture
def grpo(launch, tmp_path):
    """grpo(model, *flags) runs the script; run.rollouts are its rollouts, each a list of Completion."""

    def start(model, *flags, rows=None, rewards=("rating",), output="out"):
        folder = tmp_path / f"rewards_{output}"
        folder.mkdir()
        (folder / "rewards.py").write_text(REWARDS)
        names = ["--dataset_name", write_rows(folder / "prompts.jsonl", rows or chat_rows())]
        names += ["--reward_funcs", *(f"{folder / 'rewards.py'}:{name}" for name in rewards), "--num_generations", 4]
        names += ["--max_completion_length", LONGEST, "--per_device_train_batch_size", 8, "--learning_rate", "5e-4"]
        run = watched(launch, "grpo", model, *names, *flags, output=output)
        calls, lines = read_rows(folder / "calls.jsonl"), read_rows(run.output / "completions.jsonl")
        run.rollouts, run.starts, at = [], [], 0
        for call in calls:
            rollout = []
            for prompt, completion, ids in zip(call["prompts"], call["completions"], call["ids"], strict=True):
                line, at = lines[at], at + 1
                text = completion if isinstance(completion, str) else completion[0]["content"]
                assert (line["prompt"], line["completion"]) == (prompt, text)
                assert text == tokenizer().decode(ids, skip_special_tokens=True)
                assert 1 <= len(ids) <= LONGEST and not set(ids[:-1]) & set(STOPS)
                assert len(ids) == LONGEST or ids[-1] in STOPS
                assert line["finished"] == (ids[-1] in STOPS)
                scores = list(line["rewards"].values())
                assert list(line["rewards"]) == list(rewards)
                rollout.append(Completion(prompt_ids(prompt), ids, scores, line["reward"], line["advantage"]))
            run.rollouts.append(rollout)
            run.starts.append(line["step"] - 1)  # the first step that the rollout serves
        assert at == len(lines)
        return run

    return start


# --- the same by hand -----------------------------------------------------------------------------------------------


def combined(rewards, weights):
    """The weighted sum of what the functions gave; None where all of them gave nothing."""
    weights = weights or [1.0] * len(rewards)
    known = [weight * value for weight, value in zip(weights, rewards, strict=True) if value is not None]
    return sum(known) if known else None


def wanted_advantages(rollout, s):
    """Of each completion (2402.03300, eq. 3; 2503.20783 without the division; 2402.14740 and 2501.03262 for the others)."""
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
    old_logps, sampled = (answer_scores(lm, completion, s.temperature)[0] for lm in (old, sampler))
    return old_logps - sampled - moved(completion.ids, s.off)


def is_left_out(old, sampler, completion, s):
    return s.importance_correction == "sequence_mask" and distance(old, sampler, completion, s).sum() > math.log(
        s.importance_cap
    )


def entropy_bound(old, rollout, chosen, s):
    """What a token's entropy has to be at least, among all of the window that are not masked, whatever their advantage."""
    with torch.no_grad():
        entropies = torch.cat([answer_scores(old, rollout[i], s.temperature)[1] for i in chosen])
    return torch.quantile(entropies, 1 - s.top_entropy_quantile)


def window_loss(policy, old, sampler, reference, rollout, window, s):
    """The loss of a step, with its gradient, and what is logged of the tokens. window: which part of the rollout."""
    advantages = wanted_advantages(rollout, s)
    part = range(window * s.size, (window + 1) * s.size)
    run = [i for i in part if is_trained(rollout[i], s)]
    left_out = {i for i, c in enumerate(rollout) if is_left_out(old, sampler, c, s)}
    trained = [i for i in run if i not in left_out]
    tokens_of_window = sum(len(rollout[i].ids) for i in trained)
    tokens_of_rollout = sum(len(c.ids) for i, c in enumerate(rollout) if is_trained(c, s) and i not in left_out)
    bound = entropy_bound(old, rollout, run, s) if s.top_entropy_quantile < 1 else None
    high = s.epsilon if s.epsilon_high is None else s.epsilon_high
    loss, tokens_run, sums = (
        torch.zeros((), dtype=torch.float64),
        0,
        {"kl": 0.0, "entropy": 0.0, "low": 0.0, "high": 0.0, "ratio": 0.0, "difference": 0.0, "cut": 0.0},
    )
    largest = 0.0
    for i in run:
        logps, entropy = answer_scores(policy, rollout[i], s.temperature)
        with torch.no_grad():
            old_logps, ref_logps = (answer_scores(lm, rollout[i], s.temperature)[0] for lm in (old, reference))
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
        if s.importance_correction != "none" and (s.rollout_ahead or s.importance_correction == "token_truncate"):
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
            "dr_grpo": 1 / (s.size * LONGEST),
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
    """Advantages, loss, gradient and metrics of the steps; returns how far the ratios are from 1 on average, step by step."""
    start, olds, distances = exact(run.model), {}, []
    for step in range(len(run.rows)) if steps is None else steps:
        rollout = run.rollouts[step // s.cycle]
        old = olds.setdefault(step // s.cycle, run.policy(step // s.cycle * s.cycle))
        assert run.starts[step // s.cycle] == step // s.cycle * s.cycle
        assert len(rollout) == s.size * s.steps_per_generation
        wanted = wanted_advantages(rollout, s)
        assert [c.advantage for c in rollout] == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert [c.reward for c in rollout] == pytest.approx([combined(c.rewards, s.reward_weights) for c in rollout])
        policy = run.policy(step)
        sampler = run.policy(max(0, step // s.cycle - s.rollout_ahead) * s.cycle)
        loss, means = window_loss(policy, old, sampler, start, rollout, step % s.cycle % s.steps_per_generation, s)
        assert run.rows[step]["step"] == step + 1
        # The loss is a sum of parts that cancel.
        assert run.rows[step]["loss"] == pytest.approx(loss.item(), rel=3e-4, abs=3e-5)
        assert_gradient(run.grads[step], gradient_of(policy, loss))
        logged = {"entropy": means["entropy"], "clip_ratio/low_mean": means["low"], "clip_ratio/high_mean": means["high"]}
        logged |= {"clip_ratio/region_mean": means["low"] + means["high"]} | ({"kl": means["kl"]} if s.beta else {})
        assert_metrics(run.rows[step], logged, rel=1e-3, abs=1e-4)
        logged = {"sampling/logp_difference": means["difference"], "sampling/logp_difference_max": means["largest"]}
        logged |= {"sampling/importance_clipped": means["cut"]} if s.importance_correction == "token_truncate" else {}
        assert_metrics(run.rows[step], logged, rel=1e-3, abs=1e-4)
        distances.append(means["ratio"])
    return distances


# --- the loss -------------------------------------------------------------------------------------------------------

TWICE = {"steps_per_generation": 2, "num_iterations": 2, "temperature": 0.7}
LOSSES = {
    "dapo": TWICE | {"epsilon_high": 0.28},
    "bnpo": TWICE | {"loss_type": "bnpo"},
    "grpo": TWICE | {"loss_type": "grpo", "epsilon": 0.1},
    "dr_grpo": TWICE | {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "cispo": TWICE | {"loss_type": "cispo", "epsilon_high": 1.05, "entropy_coef": 0.01},
    "two-sided": TWICE | {"delta": 1.1, "epsilon_high": 0.05, "entropy_coef": 0.01},
    "leave one out": TWICE | {"advantage_estimator": "rloo", "scale_rewards": "none"},
    "all of the rollout": TWICE | {"advantage_estimator": "reinforce_pp", "scale_rewards": "batch"},
    "batch": TWICE | {"scale_rewards": "batch", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "kl": TWICE | {"beta": 0.3},
    "kl without correction": {"num_iterations": 2, "beta": 0.3, "use_bias_correction_kl": False},
    "entropy": TWICE | {"entropy_coef": 0.2},
    "less entropy": {"entropy_coef": -0.2},
    "entropy and kl": {"num_iterations": 2, "entropy_coef": -0.2, "beta": 0.1, "loss_type": "grpo", "temperature": 1.5},
    "another sampler": TWICE | {"importance_correction": "token_truncate", "off": 0.5, "importance_cap": 1.25, "beta": 0.2},
    "another sampler, once": {"importance_correction": "token_truncate", "off": 0.5, "temperature": 0.7},
    "completions left out": TWICE | {"importance_correction": "sequence_mask", "off": 0.5, "entropy_coef": 0.01},
    "left out, by window": {"importance_correction": "sequence_mask", "off": 0.5, "loss_type": "bnpo"},
    "left out, each": {"importance_correction": "sequence_mask", "off": 0.5, "loss_type": "grpo", "importance_cap": 1.5},
    "not corrected": {"off": 0.5},
    "high entropy": TWICE | {"top_entropy_quantile": 0.3},
    "high entropy, kl": {
        "top_entropy_quantile": 0.5,
        "beta": 0.1,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
    },
    "ahead": {"rollout_ahead": 1},
    "two ahead": {"rollout_ahead": 2, "num_iterations": 2, "loss_type": "grpo"},
    "sequence": TWICE
    | {"importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.06, "learning_rate": 1e-4},
}


LONG = ("another sampler, once", "left out, by window", "left out, each", "not corrected", "two ahead", "high entropy, kl")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in LOSSES])
def test_a_step_is_that_of_the_formula(name, grpo, model, monkeypatch):
    """Loss, gradient and metrics of every update on a rollout, and on the next; one group of prompts has equal rewards.

    Each completion is trained num_iterations times, and after the first update with a ratio that is not 1.
    """
    flags, settings = Settings.flags(**LOSSES[name])
    if settings.off:

        def shifted(*given, **how):
            sampled = sample(*given, **how)
            return [s._replace(logps=(torch.tensor(s.logps) + moved(s.ids, settings.off)).tolist()) for s in sampled]

        monkeypatch.setattr("common.sampling.sampler.sample", shifted)
    rows = chat_rows(("any", "flat", "any", "any"))
    # All of a rollout, and each window of the next one; of the first one that was sampled by older weights than it trains.
    rollouts = 2 + settings.rollout_ahead
    steps = settings.cycle * (rollouts - 1) + settings.steps_per_generation
    run = grpo(model, *flags, "--max_steps", steps, rows=rows)
    distances = check(run, settings)
    assert len(distances) == steps and len(run.rollouts) == rollouts
    for step, distance in enumerate(distances):
        assert distance > 1e-3 if step % settings.cycle else distance < 1e-6
    if settings.importance_correction == "sequence_mask":
        assert 0 < run.rows[0]["sampling/logp_difference_max"]


@pytest.mark.parametrize("beta", [0.0, 0.2])
@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "grpo", "dr_grpo"])
def test_what_was_cut_or_not_rewarded_weighs_as_in_trl(loss_type, beta, grpo, model):
    """Completions that were cut, where they are masked, have neither loss nor KL, and their tokens are in no denominator;
    those that no function rewarded have no advantage, and are there in all else. Both are among the completions."""
    names = {"loss_type": loss_type, "beta": beta, "mask_truncated_completions": True, "steps_per_generation": 2}
    flags, settings = Settings.flags(**names, num_generations=8, per_device_train_batch_size=16)
    rows = chat_rows(("any", "dumb", "any", "any"))
    run = grpo(model, *flags, "--max_steps", 2, rows=rows, rewards=("picky",))
    rollout = run.rollouts[0]
    for window in (rollout[:16], rollout[16:]):
        assert 0 < sum(is_trained(c, settings) for c in window) < 16
    assert any(c.rewards == [None] and c.finished for c in rollout)
    assert any(c.rewards != [None] and not c.finished for c in rollout)
    check(run, settings)


def test_functions_count_by_their_weights(grpo, model):
    """reward is their weighted sum, without those that gave nothing; each has its own mean in the metrics."""
    flags, settings = Settings.flags(reward_weights=(1.0, -0.25), mask_truncated_completions=False)
    run = grpo(model, *flags, "--max_steps", 2, rewards=("picky", "second"))
    check(run, settings)
    for row, rollout in zip(run.rows, run.rollouts, strict=True):
        assert any(None in c.rewards and c.rewards != [None, None] for c in rollout)
        table = [combined(c.rewards, settings.reward_weights) for c in rollout]
        named = [[c.rewards[f] for c in rollout if c.rewards[f] is not None] for f in range(2)]
        logged = {"reward": statistics.mean(v for v in table if v is not None)}
        logged |= {f"rewards/{name}/mean": statistics.mean(v) for name, v in zip(("picky", "second"), named, strict=True)}
        logged |= {f"rewards/{name}/std": statistics.pstdev(v) for name, v in zip(("picky", "second"), named, strict=True)}
        assert_metrics(row, logged)


def test_the_metrics_of_a_rollout(grpo, model):
    """Lengths, what was cut, rewards and their spread, and the tokens so far."""
    run = grpo(model, "--max_steps", 2, rows=chat_rows(("any", "flat", "flat", "any")))
    tokens = 0
    for row, rollout in zip(run.rows, run.rollouts, strict=True):
        lengths = [len(c.ids) for c in rollout]
        groups = [[c.rewards[0] for c in rollout[at : at + 4]] for at in (0, 4)]
        tokens += sum(len(c.prompt_ids) + len(c.ids) for c in rollout)
        logged = {
            "reward": statistics.mean(value for group in groups for value in group),
            "reward_std": statistics.mean(statistics.stdev(group) for group in groups),
            "frac_reward_zero_std": sum(len(set(group)) == 1 for group in groups) / 2,
            "completions/mean_length": statistics.mean(lengths),
            "completions/min_length": min(lengths),
            "completions/max_length": max(lengths),
            "completions/clipped_ratio": sum(not c.finished for c in rollout) / 8,
            "completions/mean_terminated_length": statistics.mean(len(c.ids) for c in rollout if c.finished),
            "num_tokens": tokens,
        }
        assert_metrics(row, logged)


def completion(rewards=(), ids=(5,), **values):
    values = {
        "counted": True,
        "prompt": {"prompt": "p", "prompt_ids": [3, 4]},
        "logps": [-1.0] * len(ids),
        "finished": False,
        "text": "",
    } | values
    return train_grpo.Completion(ids=list(ids), rewards=list(rewards), **values)


def arguments(**values):
    return SimpleNamespace(**vars(Settings(num_generations=2)) | {"max_completion_length": LONGEST} | values)


def test_what_is_left_out_is_told():
    completions = [completion([1.0], counted=counted, reward=1.0) for counted in (True, False, False, False)]
    assert rollout_metrics(completions, [SimpleNamespace(name="f")], 2)["completions/left_out_ratio"] == 0.75
    assert "completions/left_out_ratio" not in rollout_metrics(completions[:1] * 2, [SimpleNamespace(name="f")], 2)


def test_small_differences_of_large_rewards_are_seen():
    """Float32 knows no number between 1e9 and 1e9 + 64."""
    completions = [completion([1e9]), completion([1e9 + 1])]
    train_grpo.add_advantages(completions, [1.0], arguments())
    assert [c.advantage for c in completions] == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-3)
    logged = rollout_metrics(completions, [SimpleNamespace(name="f")], 2)
    assert (logged["reward"], logged["rewards/f/mean"]) == (1e9 + 0.5,) * 2
    assert (logged["reward_std"], logged["rewards/f/std"]) == pytest.approx((0.5**0.5, 0.5))


def test_what_a_rollout_does_not_have_is_not_logged():
    """No completion ended, one function gave nothing: no mean of theirs. A group with one reward has no spread, one of two has."""
    rewards = [SimpleNamespace(name="some"), SimpleNamespace(name="none")]
    completions = [completion([value, None]) for value in (1.0, 3.0, 5.0, None)]
    train_grpo.add_advantages(completions, [1.0, 1.0], arguments())
    logged = rollout_metrics(completions, rewards, 2)
    assert logged["reward_std"] == pytest.approx(2**0.5) and logged["frac_reward_zero_std"] == 0.5
    absent = {"completions/mean_terminated_length", "rewards/none/mean", "rewards/none/std"}
    assert not absent & set(logged) and not any(math.isnan(value) for value in logged.values())


# --- two processes --------------------------------------------------------------------------------------------------


def process(index, processes=2):
    """What the functions of the script ask an Accelerator."""
    names = {"process_index": index, "num_processes": processes, "device": torch.device("cpu")}
    return SimpleNamespace(**names, autocast=contextlib.nullcontext, unwrap_model=lambda model: model)


def test_each_process_samples_its_share(monkeypatch):
    """Six completions of three processes; each is drawn by its place, and all get everything."""
    asked, scored = [], []

    def sample(model, prompts, seeds, **settings):
        asked.append((prompts, seeds, settings))
        return [Sampled([at], [-1.0], True) for _, _, at in seeds]

    def score(rewards, prompts, texts, ids):
        scored.append(([prompt["prompt_ids"] for prompt in prompts], texts, ids))
        return [[float(at) for (at,) in ids]]

    everyones = []
    monkeypatch.setattr("common.sampling.sampler.sample", sample)
    monkeypatch.setattr(train_grpo, "score", score)
    monkeypatch.setattr(train_grpo, "gather_lists", lambda accelerator, part: everyones.extend(part) or everyones * 3)
    decoder = SimpleNamespace(decode=lambda ids, skip_special_tokens: str(ids[0]))
    for index in range(3):
        one = process(index, 3)
        rollouts = three_prompts_a_rollout(one)
        everyones.clear()
        completions = train_grpo.roll_out(
            arguments(seed=7), one, OwnSampler(one, None, batch_size=5), decoder, [], rollouts, 4
        )
        ids, places = [[10 + 12 + index]] * 2, [2 * index, 2 * index + 1]
        assert asked.pop() == (ids, [(7, 4, i) for i in places], {"batch_size": 5})
        assert scored.pop() == (ids, [str(i) for i in places], [[i] for i in places])
        assert [(c.ids, c.text, c.rewards) for c in completions] == [([i], str(i), [i]) for i in places] * 3
        assert [c.prompt["prompt"] for c in completions] == ["12", "12", "13", "13", "14", "14"]


def three_prompts_a_rollout(accelerator, ahead=0, max_steps=9):
    """Two completions of each; windows of six completions of three processes."""

    class Prompts:
        longest = 1

        def __len__(self):
            return 100

        def at(self, i):
            return {"prompt": str(i), "prompt_ids": [10 + i]}

    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "num_train_epochs": 1.0}
    served = {"windows_per_rollout": 1, "updates_per_rollout": 1, "max_completion_length": LONGEST, "rollout_ahead": ahead}
    return RolloutSchedule(
        SimpleNamespace(**sizes, max_steps=max_steps), accelerator, Prompts(), num_generations=2, **served
    )


def test_what_was_sampled_ahead_is_kept_and_goes_on():
    """It was sampled by weights that a resumed run no longer has. Nothing is sampled twice; beyond the last rollout, what a
    run that is made longer trains first."""
    begun = []

    class Sampler:
        def begin(self, ids, keys):
            begun.append(keys[0][1])
            done = Future()
            done.set_result([Sampled([n * 10 + i], [-0.5], True) for _, n, i in keys])
            return done

    one = SimpleNamespace(process_index=0, num_processes=1)
    rollouts = three_prompts_a_rollout(one, ahead=2)
    found = [rollouts.sample(n, Sampler(), 7) for n in range(4)]
    assert begun == [0, 1, 2, 3, 4, 5] and [each[0].ids for each in found] == [[0], [10], [20], [30]]
    state = json.loads(json.dumps(rollouts.state(4)))
    again = three_prompts_a_rollout(one, ahead=2)
    again.restore(4, state)
    assert [again.sample(n, Sampler(), 7)[0] for n in range(4, 9)] == [Sampled([10 * n], [-0.5], True) for n in range(4, 9)]
    assert begun == [*range(11)] and [*again.state(9)["sampled_ahead"]] == [9, 10]
    longer = three_prompts_a_rollout(one, ahead=2, max_steps=12)
    longer.restore(9, json.loads(json.dumps(again.state(9))))
    assert [longer.sample(n, Sampler(), 7)[0].ids for n in range(9, 12)] == [[90], [100], [110]]
    assert begun == [*range(14)]
    other = three_prompts_a_rollout(SimpleNamespace(process_index=1, num_processes=2), ahead=2)
    other.restore(4, state)  # twice as many completions in a rollout: what there is does not fit
    assert other.state(4) == {}


@pytest.mark.parametrize("idle", [False, True], ids=["all", "some idle"])
def test_each_process_trains_its_share(idle):
    """Two windows of four completions of different lengths, of which each process runs two, in two micro-batches; one that
    has nothing to run takes part with a filler, and all completions count in the denominators."""
    completions = [completion(ids=[5] * (i + 1), reward=0.0, advantage=i + 1.0) for i in range(8)]
    if idle:  # the first process's of the first window
        completions[0].advantage = completions[1].advantage = 0.0
    args = arguments(steps_per_generation=2, gradient_accumulation_steps=2)
    for index in range(2):
        windows = train_grpo.make_windows(completions, args, process(index))
        train_grpo.add_token_weights(windows, completions, args)
        for at, window in enumerate(windows):
            assert window.num_tokens == sum(2 + i + 1 for i in range(8)) // 2  # of a window, on average
            batches = list(window)
            assert len(batches) == 2 and window.num_micro_batches == 4
            wanted = [4 * at + 2 * index, 4 * at + 2 * index + 1]
            for i, batch in zip(wanted, batches, strict=True):
                filler = idle and at == index == 0
                i, weight = (wanted[0], 0.0) if filler else (i, 1.0)
                answer = torch.tensor([0.0, 0.0] + [weight] * (i + 1))
                assert batch["input_ids"].flatten().tolist() == [3, 4] + [5] * (i + 1)
                assert batch["loss_mask"].tolist() == answer.tolist()
                assert batch["sampled_logps"].tolist() == (-answer).tolist()
                assert batch["advantage"].tolist() == (answer * (i + 1)).tolist()
                assert batch["token_weight"].tolist() == pytest.approx((answer / 18).tolist())  # 36 tokens in two windows


# --- the rollouts ---------------------------------------------------------------------------------------------------


def test_rollouts_follow_the_data(grpo, model):
    """G completions of a prompt stand together; rollouts do not overlap, and each prompt comes once in an epoch, which is
    what num_train_epochs counts."""
    flags = ["--per_device_train_batch_size", 4, "--steps_per_generation", 2, "--learning_rate", 0]
    run = grpo(model, *flags, "--num_train_epochs", 3)
    assert len(run.rows) == 12 and len(run.rollouts) == 6 and run.starts == [0, 2, 4, 6, 8, 10]
    orders = []
    for rollout in run.rollouts:
        prompts = [tuple(c.prompt_ids) for c in rollout]
        assert prompts == [prompt for prompt in prompts[::4] for _ in range(4)]
        assert len({tuple(c.ids) for c in rollout[:4]}) > 1  # which are not the same completion
        orders += prompts[::4]
    everything = sorted(tuple(prompt_ids(row["prompt"])) for row in chat_rows())
    epochs = [orders[at : at + 4] for at in (0, 4, 8)]
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1  # not always in the same order


def test_each_rollout_is_drawn_anew(grpo, model):
    """The same prompts and weights give other completions in each rollout and with another seed, and the same ones again."""
    flags = ["--per_device_train_batch_size", 4, "--learning_rate", 0, "--max_steps", 3]
    rows = chat_rows()[:1]
    run = grpo(model, *flags, rows=rows)
    again = grpo(model, *flags, rows=rows, output="again")
    other = grpo(model, *flags, "--seed", 1, rows=rows, output="other")
    drawn, same, seeded = ([[c.ids for c in rollout] for rollout in r.rollouts] for r in (run, again, other))
    assert drawn == same
    assert len({str(rollout) for rollout in drawn + seeded}) == 6
    everything = [str(ids) for rollout in drawn for ids in rollout]
    assert len(set(everything)) > 8  # no few completions that come again at other places


def test_completions_come_from_the_weights_of_the_moment(grpo, model):
    """Greedy completions of the second rollout are those of the weights after the first one's updates."""
    run = grpo(model, "--top_k", 1, "--learning_rate", "3e-2", "--entropy_coef", 1.0, "--max_steps", 2)
    assert_greedy(exact(model), run.rollouts[0])
    assert_greedy(run.policy(1), run.rollouts[1])
    plain = exact(model)
    assert any(greedy(plain, c) != c.ids for c in run.rollouts[1])


def next_logits(lm, completion):
    """(n, V): what the model says before each token of a completion."""
    with torch.no_grad():
        logits = logits_of(lm, completion.prompt_ids + completion.ids)
    return logits[len(completion.prompt_ids) - 1 : -1]


def greedy(lm, completion):
    return next_logits(lm, completion).argmax(-1).tolist()


def assert_greedy(lm, rollout):
    for completion in rollout:
        assert greedy(lm, completion) == completion.ids


@pytest.mark.parametrize("flags", [["--top_k", 1], ["--top_p", 1e-6], ["--temperature", 1e-4]], ids=lambda flags: flags[0])
def test_the_most_probable_tokens_alone(flags, grpo, model):
    """top_k 1, a tiny top_p or temperature: all completions of a prompt are the greedy one."""
    run = grpo(model, *flags, "--learning_rate", 0, "--max_steps", 1, rows=text_rows())
    assert_greedy(exact(model), run.rollouts[0])
    assert len({tuple(c.ids) for c in run.rollouts[0]}) == 2
    assert run.rows[0]["frac_reward_zero_std"] == 1


def test_top_k_and_top_p_restrict_what_is_sampled_and_not_what_is_trained(grpo, model):
    """Every sampled token is among the k most probable, or in the nucleus at the sampling temperature; log-probabilities in
    the loss are those of the whole distribution."""
    lm = exact(model)
    for output, choice in (("k", {"top_k": 3}), ("p", {"top_p": 0.4})):
        flags, settings = Settings.flags(temperature=0.7, num_iterations=2)
        run = grpo(model, *flags, *(w for k, v in choice.items() for w in (f"--{k}", v)), "--max_steps", 2, output=output)
        check(run, settings)
        greedy_ones = 0
        for completion in run.rollouts[0]:
            probs = (next_logits(lm, completion) / 0.7).softmax(-1)
            own = probs.gather(-1, torch.tensor(completion.ids)[:, None])
            above = torch.where(probs > own, probs, 0.0)  # what is more probable than the token that was sampled
            if "top_k" in choice:
                assert ((above > 0).sum(-1) < 3).all()
            else:
                assert (above.sum(-1) < 0.4 + 1e-5).all()
            greedy_ones += greedy(lm, completion) == completion.ids
        assert greedy_ones < len(run.rollouts[0])


def test_sampling_has_the_temperature(grpo, model):
    """The log-probability of the sampled tokens at the temperature is what it is on average: minus the entropy."""
    for temperature in (0.5, 1.0):
        flags = ["--temperature", temperature, "--per_device_train_batch_size", 64, "--learning_rate", 0, "--max_steps", 1]
        run = grpo(model, *flags, "--num_generations", 64, rows=chat_rows()[:1], output=f"t{temperature}")
        lm, surprises = exact(model), []
        for completion in run.rollouts[0]:
            with torch.no_grad():
                logps, entropy = answer_scores(lm, completion, temperature)
            surprises += (-logps - entropy).tolist()
        error = statistics.stdev(surprises) / math.sqrt(len(surprises))
        assert abs(statistics.mean(surprises)) < 5 * error, (temperature, statistics.mean(surprises), error)
        assert error < 0.15


def test_prompts_are_what_the_template_makes_of_them(grpo, model):
    """A system prompt makes a chat of a prompt that is a string; one that is too long is left out."""
    system = "Be short."
    longest = sorted(len(prompt_ids([*turns(system, row["prompt"])])) for row in text_rows())
    flags = ["--system_prompt", system, "--max_prompt_length", longest[2], "--per_device_train_batch_size", 12]
    run = grpo(model, *flags, "--max_steps", 1, rows=text_rows())
    chats = [turns(system, row["prompt"]) for row in text_rows()]
    wanted = sorted(prompt_ids(chat) for chat in chats if len(prompt_ids(chat)) <= longest[2])
    assert len(wanted) == 3 and sorted(c.prompt_ids for c in run.rollouts[0][::4]) == wanted
    check(run, Settings(per_device_train_batch_size=12))


def turns(system, text):
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def test_the_evaluation_completes_held_out_prompts_and_weighs_their_rewards(launch, model, tmp_path):
    """Greedily, where no file of prompts and no other functions are named."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    names = ["--dataset_name", write_rows(tmp_path / "train.jsonl", chat_rows())]
    names += ["--eval_dataset_name", write_rows(tmp_path / "held_out.jsonl", text_rows()), "--eval_prompts", ""]
    names += ["--reward_funcs", f"{tmp_path / 'rewards.py'}:count", f"{tmp_path / 'rewards.py'}:rest"]
    names += ["--reward_weights", 1, -0.25, "--eval_temperatures", 0, "--eval_max_new_tokens", LONGEST, "--eval_steps", 1]
    names += ["--num_generations", 2, "--max_completion_length", 2, "--max_steps", 1, "--learning_rate", 0]
    run = watched(launch, "grpo", model, *names)
    lm, answers = exact(model), []
    for row in text_rows():
        ids = prompt_ids(row["prompt"])
        answer = []
        while len(answer) < LONGEST and not set(answer) & set(STOPS):
            with torch.no_grad():
                answer.append(logits_of(lm, ids + answer)[-1].argmax().item())
        answers.append(answer)
    count, rest = (statistics.mean(map(f, answers)) for f in (len, lambda ids: sum(ids) % 7))
    assert len(run.evals) == 2
    for row in run.evals:
        assert_metrics(row, {"eval_count": count, "eval_rest": rest, "eval_reward": count - 0.25 * rest})


@pytest.mark.parametrize("stage", ["grpo", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("ppo", "distill"))])
def test_prompts_of_a_file_are_made_as_those_of_training(stage, launch, model, tmp_path, monkeypatch):
    """Of --eval_prompts, with the system prompt, and within the length."""
    script, seen = importlib.import_module(module_of(stage)), []
    monkeypatch.setattr(script, "complete_prompts", lambda *args: seen.extend(args[-1].rows) or ({}, []))
    rows = [{"prompt": "Hi"}, {"prompt": turns("Sing.", "Hi")}, {"prompt": "word " * 99}]
    words = ["--dataset_name", write_rows(tmp_path / "train.jsonl", text_rows()), "--max_prompt_length", 60]
    words += ["--eval_prompts", write_rows(tmp_path / "prompts.jsonl", rows), "--system_prompt", "Be short."]
    words += ["--reward_funcs", "length:4"] if stage != "distill" else ["--teacher_model_name_or_path", model]
    words += ["--num_generations", 2] if stage == "grpo" else []
    watched(
        launch,
        stage,
        model,
        *words,
        "--max_completion_length",
        2,
        "--max_steps",
        1,
        "--eval_steps",
        5,
        extra=4 * (stage == "ppo"),
    )
    assert [row["prompt"] for row in seen[:2]] == [turns("Be short.", "Hi"), turns("Sing.", "Hi")]
    assert [row["prompt_ids"] for row in seen[:2]] == [prompt_ids(row["prompt"]) for row in seen[:2]] and len(seen) % 2 == 0


# --- the rest -------------------------------------------------------------------------------------------------------


def test_what_the_loss_does_not_need_is_not_computed(grpo, model, monkeypatch):
    """By default there is no reference model, no second pass for the log-probabilities of the model that sampled, and no
    gradient of the entropy."""

    def refuse(*args, **kwargs):
        raise AssertionError("not needed")

    asked, forward = [], FlatModel.forward

    def watched(self, batch, *args, **kwargs):
        asked.append(kwargs.get("entropy_grad"))
        return forward(self, batch, *args, **kwargs)

    monkeypatch.setattr(train_grpo, "load_reference", refuse)
    monkeypatch.setattr(train_grpo.Window, "add_fields", refuse)
    monkeypatch.setattr(FlatModel, "forward", watched)
    grpo(model, "--max_steps", 1)
    assert asked.count(False) >= 1 and True not in asked


def test_adamw_has_the_settings_that_were_asked_for(grpo, model):
    """Betas, epsilon, decay and the rate of each step are in the weights; a gradient that is too long is clipped."""
    free = grpo(model, *ADAMW, "--max_steps", 3)
    assert_adamw(free)
    assert_clipped(grpo(model, "--max_steps", 1, "--max_grad_norm", 0.05, output="clipped"), free, 0.05)


@pytest.mark.parametrize("kind", DROPOUT)
def test_dropout_is_off(kind, grpo, tmp_path):
    """Of a model with dropout, sampled, old, reference and trained log-probabilities are all exact: at a rate of 0 no KL."""
    model = make_model(tmp_path / "model", kind, stops=5.0)
    flags, settings = Settings.flags(beta=0.5, num_iterations=2, temperature=0.7)
    run = grpo(model, *flags, "--max_steps", 2, "--learning_rate", 0)
    assert check(run, settings) == pytest.approx([0, 0], abs=1e-6)
    for row in run.rows:
        assert row["kl"] == pytest.approx(0, abs=1e-6) and row["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize(
    "flags, second",
    [([], False), (["--beta", 0.1], True), (["--beta", 0.1, "--use_peft"], False), (["--use_peft"], False)],
    ids=str,
)
def test_a_dry_run_counts_the_reference_where_there_will_be_one(flags, second, launch, tmp_path, capsys):
    data = write_rows(tmp_path / "prompts.jsonl", chat_rows())
    launch(
        "grpo", "--dataset_name", data, "--model_name_or_path", BASE, "--max_completion_length", LONGEST, *flags, "--dry_run"
    )
    said = capsys.readouterr().out
    assert ("    reference model " in said) == second and " prompts" in said
