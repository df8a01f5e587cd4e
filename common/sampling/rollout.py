"""Metrics of a rollout, and the selection of completions and tokens to train on."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

from common.collators import Window
from common.processes import gather_lists
from common.sampling.rewards import Reward

import numpy as np
import torch
from accelerate import Accelerator


class Scored(Protocol):
    """A completion, as the scripts represent it."""

    prompt: dict[str, Any]
    ids: list[int]
    text: str
    finished: bool
    rewards: list[float | None]  # one per function; None: it abstained
    reward: float  # their weighted sum; NaN: all abstained


def rollout_metrics(
    completions: Sequence[Scored], rewards: list[Reward], group: int, lengths: list[int] | None = None
) -> dict[str, float]:
    """Metrics of rewards and completion lengths. group: the number of neighbours compared with each other. lengths: number
    of sampled tokens, if not all of a completion's tokens were sampled."""
    reward = torch.tensor([completion.reward for completion in completions], dtype=torch.float64)
    known = [each[~each.isnan()] for each in reward.view(-1, group)]
    stds = torch.stack([each.std() if len(each) > 1 else each.new_tensor(math.nan) for each in known])  # (P,)
    counts = torch.tensor(lengths or [len(completion.ids) for completion in completions], dtype=torch.float64)
    finished = torch.tensor([completion.finished for completion in completions])
    logged = {
        "reward": reward.nanmean().item(),
        "reward_std": stds.nanmean().item(),
        "frac_reward_zero_std": (~(stds > 1e-12)).double().mean().item(),
        "completions/mean_length": counts.mean().item(),
        "completions/min_length": counts.min().item(),
        "completions/max_length": counts.max().item(),
        "completions/clipped_ratio": (~finished).double().mean().item(),
    }
    if finished.any():
        logged["completions/mean_terminated_length"] = counts[finished].mean().item()
    if left_out := sum(not getattr(completion, "counted", True) for completion in completions):
        logged["completions/left_out_ratio"] = left_out / len(completions)
    for f, function in enumerate(rewards):
        values = torch.tensor([c.rewards[f] for c in completions if c.rewards[f] is not None], dtype=torch.float64)
        if len(values):
            logged[f"rewards/{function.name}/mean"] = values.mean().item()
            logged[f"rewards/{function.name}/std"] = values.std(correction=0).item()
    return logged


def rollout_lines(step: int, completions: Sequence[Scored], rewards: list[Reward]) -> list[dict[str, Any]]:
    """A line of completions.jsonl for each completion."""
    names = [reward.name for reward in rewards]
    lines = []
    for c in completions:
        line = {"step": step, "prompt": c.prompt["prompt"], "completion": c.text, "finished": c.finished}
        line |= {"rewards": dict(zip(names, c.rewards, strict=True)), "reward": None if math.isnan(c.reward) else c.reward}
        if hasattr(c, "advantage"):
            line["advantage"] = c.advantage
        lines.append(line)
    return lines


def far_from_sampler(windows: list[Window], accelerator: Accelerator, cap: float) -> list[int]:
    """The places (in the rollout, over all processes) of completions that the model before its update would have written
    more than `cap` times as often as the model that sampled them.

    The windows' sequences have old_logps, sampled_logps and `place`. As in TRL's sequence_mask, the ratio is that of the
    whole completion, so that long ones reach the bound sooner. Unlike there, kept completions are not weighted by their
    ratios, and dropped ones contribute neither to the KL term nor to any denominator.
    """
    far = []
    for sequence in (sequence for window in windows for sequence in window.sequences):
        ratio = (sequence["old_logps"] - sequence["sampled_logps"]) * sequence["loss_mask"]
        if ratio.sum(dtype=np.float64) > math.log(cap):
            far.append(int(sequence["place"]))
    return gather_lists(accelerator, far)


def keep_high_entropy(window: Window, accelerator: Accelerator, share: float) -> None:
    """Add `policy_mask` to the sequences: 1 on that share of the window's tokens (over all processes) with the highest
    entropy (Wang et al. 2025, arXiv 2506.01939). The sequences have `entropy`."""
    mine = [sequence["entropy"][sequence["loss_mask"] > 0] for sequence in window.sequences]
    all_tokens = np.concatenate([np.zeros(0, np.float32), *gather_lists(accelerator, mine)])
    threshold = np.quantile(all_tokens.astype(np.float64), 1 - share) if len(all_tokens) else 0.0
    for sequence in (sequence for example in window.examples for sequence in example):
        sequence["policy_mask"] = (sequence["entropy"] >= threshold).astype(np.float32)
