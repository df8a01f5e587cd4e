"""The maths of the four stages: pure functions of tensors and floats (torch only).

Everything starts from per-token log-probabilities `logps` (T,) of a flat row: `logps[t] = log p(token t | the
tokens before it in the same sequence)`, 0 if token t is not a target. Nothing here takes a mean: the caller
divides by the size of the whole window (all micro-batches of all processes), so that the gradient does not
depend on how the window is split. The masked cross-entropy that the scripts train with is in model/lm_head.py, where
its gradient is computed together with the log-probabilities.

Shape letters: T tokens of the flat row, S sequences in it, B pairs, P prompts, G completions per prompt,
C completions, F reward functions.
"""

import math

import torch
from torch import Tensor
import torch.nn.functional as F

DPO_LOSS_TYPES = (
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "apo_zero",
    "sppo_hard",
    "simpo",
    "orpo",
)
REFERENCE_FREE = ("simpo", "orpo")
# those that support a share of flipped pairs
SMOOTHED = ("sigmoid", "sigmoid_norm", "robust", "exo_pair", "simpo")
GRPO_LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo", "cispo")
ADVANTAGE_ESTIMATORS = ("grpo", "rloo", "reinforce_pp")
# The mean difference between a completion and its sampler is over at least so many tokens: in a very short
# completion a single one may differ by a nat.
FEW = 8


def segment_sum(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sums per sequence of a flat row.

    values (T,), cu_seqlens (S+1,) int, the sequence boundaries. Returns (S,).
    """
    return values.new_zeros(len(cu_seqlens) - 1).index_add(0, segment_ids(cu_seqlens, len(values)), values)


def segment_ids(cu_seqlens: Tensor, T: int) -> Tensor:
    """The sequence that each token of a flat row belongs to: cu_seqlens (S+1,) -> (T,) int64."""
    lengths = cu_seqlens.diff()
    index = torch.arange(len(lengths), device=cu_seqlens.device)
    return torch.repeat_interleave(index, lengths, output_size=T)


# --- DPO and its family -------------------------------------------------------------------------------------


def dpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    chosen_tokens: Tensor,
    rejected_tokens: Tensor,
    *,
    beta: float,
    loss_type: str | list[str] = "sigmoid",
    loss_weights: list[float] | None = None,
    label_smoothing: float = 0.0,
    simpo_gamma: float = 0.5,
) -> tuple[Tensor, Tensor, Tensor]:
    """One preference loss per pair, and the implicit rewards.

    The first four (B,): log-probabilities summed over the completion (simpo and orpo ignore the reference's);
    the next two (B,): the number of trained tokens in the completions. Returns losses (B,), and the chosen
    and rejected rewards (B,): `beta * log(policy / reference)`; reference-free types have `beta * mean
    log-probability`. Several types are summed with loss_weights (None: 1 each); the rewards are those of the
    first one.

    Let `x = (chosen - ref_chosen) - (rejected - ref_rejected)`, sums over tokens.

    - sigmoid: `-log σ(βx)` (Rafailov et al. 2023, arXiv 2305.18290, eq. 7); with label_smoothing ε the
      conservative form `-(1-ε) log σ(βx) - ε log σ(-βx)` (cDPO, Mitchell 2023).
    - robust: its unbiased form, `[-(1-ε) log σ(βx) + ε log σ(-βx)] / (1-2ε)` (Chowdhury et al. 2024,
      2403.00409).
    - sigmoid_norm: `-log σ(β x̄)` with x̄ from means over tokens (Tulu 3, Lambert et al. 2024, 2411.15124), ε
      as in cDPO.
    - exo_pair: the reverse KL of σ(βx) to (1-ε, ε): `σ(βx) [log σ(βx) - log(1-ε)] + σ(-βx) [log σ(-βx) - log
      ε]`, with ε 0.001 if label_smoothing is 0 (Ji et al. 2024, 2402.00856, eq. 16).
    - nca_pair: `-log σ(βc) - ½ log σ(-βc) - ½ log σ(-βr)`, c and r the log-ratios of chosen and rejected
      (Chen et al. 2024, 2402.05369).
    - bco_pair: `-log σ(βc) - log σ(-βr)` (Jung et al. 2024, 2404.04656, of pairs and without its reward
      shift).
    - hinge: `relu(1 - βx)` (SLiC, Zhao et al. 2023, 2305.10425).
    - ipo: `(x̄ - 1/(2β))²` with x̄ from means over tokens (Azar et al. 2023, 2310.12036, eq. 17).
    - apo_zero: `1 - σ(β(chosen - ref)) + σ(β(rejected - ref))` (D'Oosterlinck et al. 2024, 2408.06266).
    - sppo_hard: `(chosen - ref - 1/(2β))² + (rejected - ref + 1/(2β))²` (Wu et al. 2024, 2405.00675).
    - simpo: `-log σ(β(mean chosen - mean rejected) - γ)` (Meng et al. 2024, 2405.14734), ε as in cDPO.
    - orpo: `-β log σ(log odds(chosen) - log odds(rejected))` of mean log-probabilities (Hong et al. 2024,
      2403.07691); its NLL term is the caller's.

    Raises ValueError for an unknown type, or if label_smoothing does not apply or makes `robust` singular.
    """
    if not isinstance(loss_type, str):
        sides = (
            chosen_logps,
            rejected_logps,
            ref_chosen_logps,
            ref_rejected_logps,
            chosen_tokens,
            rejected_tokens,
        )
        options = {"beta": beta, "label_smoothing": label_smoothing, "simpo_gamma": simpo_gamma}
        terms = [dpo_loss(*sides, loss_type=one, **options) for one in loss_type]
        weights = loss_weights or [1.0] * len(terms)
        total = 0.0
        for weight, (losses, _, _) in zip(weights, terms, strict=True):
            total = total + weight * losses
        _, chosen_reward, rejected_reward = terms[0]
        return total, chosen_reward, rejected_reward
    if loss_type not in DPO_LOSS_TYPES:
        raise ValueError(f"loss_type {loss_type!r} is unknown; one of {', '.join(DPO_LOSS_TYPES)}")
    if label_smoothing and loss_type not in SMOOTHED:
        raise ValueError(f"label_smoothing acts on {', '.join(SMOOTHED)}, not on {loss_type}")
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is the share of flipped pairs, in [0, 0.5), not {label_smoothing}")

    chosen_mean = chosen_logps / chosen_tokens
    rejected_mean = rejected_logps / rejected_tokens
    if loss_type in REFERENCE_FREE:
        chosen_reward = beta * chosen_mean
        rejected_reward = beta * rejected_mean
    else:
        chosen_ratio = chosen_logps - ref_chosen_logps
        rejected_ratio = rejected_logps - ref_rejected_logps
        chosen_reward = beta * chosen_ratio
        rejected_reward = beta * rejected_ratio
    margin = chosen_reward - rejected_reward  # βx

    if loss_type == "sigmoid_norm":
        margin = chosen_reward / chosen_tokens - rejected_reward / rejected_tokens
    if loss_type == "simpo":
        margin = margin - simpo_gamma
    as_labelled = F.logsigmoid(margin)  # log of the probability that the label is right
    flipped = F.logsigmoid(-margin)  # and that it is wrong
    if loss_type in ("sigmoid", "sigmoid_norm", "simpo"):
        losses = -(1 - label_smoothing) * as_labelled - label_smoothing * flipped
    elif loss_type == "robust":
        unbiased = -(1 - label_smoothing) * as_labelled + label_smoothing * flipped
        losses = unbiased / (1 - 2 * label_smoothing)
    elif loss_type == "exo_pair":
        share = label_smoothing or 1e-3
        right = as_labelled.exp() * (as_labelled - math.log1p(-share))
        wrong = flipped.exp() * (flipped - math.log(share))
        losses = right + wrong
    elif loss_type == "nca_pair":
        both = F.logsigmoid(-chosen_reward) + F.logsigmoid(-rejected_reward)
        losses = -F.logsigmoid(chosen_reward) - 0.5 * both
    elif loss_type == "bco_pair":
        losses = -F.logsigmoid(chosen_reward) - F.logsigmoid(-rejected_reward)
    elif loss_type == "hinge":
        losses = F.relu(1 - margin)
    elif loss_type == "ipo":
        losses = (chosen_ratio / chosen_tokens - rejected_ratio / rejected_tokens - 1 / (2 * beta)) ** 2
    elif loss_type == "apo_zero":
        losses = 1 - chosen_reward.sigmoid() + rejected_reward.sigmoid()
    elif loss_type == "sppo_hard":
        losses = (chosen_ratio - 0.5 / beta) ** 2 + (rejected_ratio + 0.5 / beta) ** 2
    else:  # orpo: log odds = log p - log(1 - p), with log(1 - e^x) in the form that is accurate near p = 1
        log_odds = (chosen_mean - rejected_mean) - (log1mexp(chosen_mean) - log1mexp(rejected_mean))
        losses = -beta * F.logsigmoid(log_odds)
    return losses, chosen_reward, rejected_reward


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, accurate at both ends (Mächler 2012)."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near = x > -0.6931  # exp(x) > 1/2
    # torch.where differentiates both branches: the one that is not chosen gets a constant, since an infinite gradient
    # times 0 would be NaN.
    of_near = torch.log(-torch.expm1(torch.where(near, x, -0.5)))
    of_far = torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    return torch.where(near, of_near, of_far)


# --- GRPO and its family ------------------------------------------------------------------------------------


def combine_rewards(rewards_per_func: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over the reward functions: (C, F), (F,) -> (C,).

    NaN means that a function abstained (returned None) and is left out; if all abstained the result is NaN.
    """
    total = (rewards_per_func * weights).nansum(-1)
    return total.masked_fill(rewards_per_func.isnan().all(-1), float("nan"))


def group_advantages(rewards: Tensor, scale_rewards: str, estimator: str = "grpo") -> Tensor:
    """Rewards relative to the group: (P, G) -> (P, G). Shao et al. 2024 (arXiv 2402.03300), eq. 3's Â.

    `(r - mean of the group) / (std + 1e-4)`, unbiased std of the group ("group"), of all rewards ("batch"),
    or no division ("none": Dr. GRPO, Liu et al. 2025, 2503.20783). estimator "rloo" compares each with the
    mean of the others in its group (Ahmadian et al. 2024, 2402.14740, without division there), "reinforce_pp"
    with the mean of all rewards (REINFORCE++, Hu et al. 2025, 2501.03262); then "group" means "batch",
    because a group of equal rewards that differ from the others' has no std to divide by. A NaN reward is
    left out, and gets 0; if nothing differs all get exactly 0. Raises ValueError for another scale_rewards or
    estimator.
    """
    known = ~rewards.isnan()
    # what each reward is compared with
    among = rewards.reshape(1, -1) if estimator == "reinforce_pp" else rewards
    mean = among.nanmean(-1, keepdim=True)
    low = among.nan_to_num(nan=torch.inf).amin(-1, keepdim=True)
    high = among.nan_to_num(nan=-torch.inf).amax(-1, keepdim=True)
    centred = torch.where(known & (high > low), rewards - mean, torch.zeros_like(rewards))
    n = known.sum(-1, keepdim=True)  # of each group
    others = (n - 1).clamp(min=1)
    variance = (centred**2).sum(-1, keepdim=True) / others
    if estimator == "rloo":  # r - (n · mean - r) / (n - 1)
        centred = centred * n / others
    elif estimator not in ADVANTAGE_ESTIMATORS:
        raise ValueError(f"estimator is one of {', '.join(ADVANTAGE_ESTIMATORS)}, not {estimator!r}")
    if scale_rewards == "none":
        return centred
    if scale_rewards == "group" and estimator != "reinforce_pp":
        return centred / (variance.sqrt() + 1e-4)
    if scale_rewards in ("group", "batch"):
        values = rewards[known]
        std = values.std() if len(values) > 1 else values.new_zeros(())
        return centred / (std + 1e-4)
    raise ValueError(f"scale_rewards is group, batch or none, not {scale_rewards!r}")


def grpo_loss(
    logps: Tensor,
    old_logps: Tensor,
    ref_logps: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    loss_type: str = "dapo",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    importance_sampling_level: str = "token",
    use_bias_correction_kl: bool = True,
    sampled_logps: Tensor | None = None,
    importance_cap: float | None = None,
    policy_mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO-clip with a KL penalty, per token: `-min(ρ A, clip(ρ, 1-ε, 1+ε_high) A) · w + β KL`.

    All (T,), cu_seqlens (S+1,); ref_logps may be None if beta is 0. `ρ = exp(logps - old_logps)` per token,
    or with importance_sampling_level "sequence" the exponential of the mean log-ratio of the sequence (GSPO,
    Zheng et al. 2025, 2507.18071, eq. 7). delta: upper bound of the unclipped ratio, also for negative
    advantages (two-sided clip, INTELLECT-2, 2505.07291). loss_type "cispo" weights the log-probability by a
    clipped ratio without gradient, so that no token is dropped: `-min(ρ, epsilon_high) A log p` (MiniMax
    2025, 2506.13585). KL is the k3 estimator `exp(ref - logps) - (ref - logps) - 1` (Schulman 2020), times ρ
    with use_bias_correction_kl, which makes its gradient that of the reverse KL.

    w is 1, or, if the sampler differed slightly from the model of old_logps, min(exp(old_logps -
    sampled_logps), importance_cap), without gradient (Yao et al. 2025, "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training"); and 0 where policy_mask is 0 (Wang et al. 2025, 2506.01939: only
    tokens of high entropy).

    Returns the token losses (T,), 0 outside loss_mask, for the caller to weight with `grpo_token_weights`,
    and per-token metrics, detached, (T,) each: `kl`, if there is a reference, and where the clip takes effect
    below, above, or either (`clip_ratio/low_mean`, `high_mean`, `region_mean`); with sampled_logps
    `sampling/logp_difference` and `_max`, their distance from old_logps, and with importance_cap where w is
    capped (`sampling/importance_clipped`), and the mean distance in the token's sequence
    (`sampling/completion_difference_max`; in one of fewer than 8 tokens the sum / 8).
    """
    trained = (loss_mask != 0).to(logps.dtype)  # a script may put weights into the mask
    log_ratio = (logps - old_logps) * trained
    if importance_sampling_level == "sequence":
        tokens = segment_sum(trained, cu_seqlens).clamp(min=1)
        sequence = (segment_sum(log_ratio, cu_seqlens) / tokens)[segment_ids(cu_seqlens, len(logps))]
        log_ratio = sequence * trained
    elif importance_sampling_level != "token":
        raise ValueError(f"importance_sampling_level is token or sequence, not {importance_sampling_level!r}")
    ratio = log_ratio.exp()
    high = epsilon if epsilon_high is None else epsilon_high
    if loss_type == "cispo":
        losses = -ratio.detach().clamp(max=high) * advantages * logps
        below = torch.zeros_like(ratio)
        above = ((ratio > high) & (advantages > 0)).float()
    else:
        most = math.inf if delta is None else delta
        clipped = ratio.clamp(1 - epsilon, 1 + high)
        losses = -torch.min(ratio.clamp(max=most) * advantages, clipped * advantages)
        below = ((ratio < 1 - epsilon) & (advantages < 0)).float()
        above = ((ratio > 1 + high) & (advantages > 0)).float()
    stats = {
        "clip_ratio/low_mean": below,
        "clip_ratio/high_mean": above,
        "clip_ratio/region_mean": below + above,
    }
    if sampled_logps is not None:
        moved = (old_logps - sampled_logps).detach() * trained
        stats["sampling/logp_difference"] = stats["sampling/logp_difference_max"] = moved.abs()
        if importance_cap is not None:
            losses = losses * moved.exp().clamp(max=importance_cap)
            tokens = segment_sum(trained, cu_seqlens).clamp(min=FEW)
            distances = segment_sum(moved.abs(), cu_seqlens) / tokens  # (S,)
            of_each_token = distances[segment_ids(cu_seqlens, len(logps))]
            stats["sampling/completion_difference_max"] = of_each_token
            stats["sampling/importance_clipped"] = (moved.exp() > importance_cap).float()
    if policy_mask is not None:
        losses = losses * policy_mask
    if ref_logps is not None:
        difference = (ref_logps - logps) * trained
        kl = difference.exp() - difference - 1
        if use_bias_correction_kl:
            kl = kl * ratio
        losses = losses + beta * kl
        stats["kl"] = kl.detach()
    return losses * loss_mask, stats


def grpo_token_weights(
    loss_type: str,
    tokens: Tensor,
    *,
    window_tokens: float,
    window_completions: float,
    max_completion_length: int,
) -> Tensor:
    """The weight of each token of a completion in the window's loss: tokens (C,) -> weights (C,).

    window_tokens counts the trained tokens of the window, window_completions all its completions, including
    untrained ones (--mask_truncated_completions); both over all processes.

    - grpo: the mean over completions of the mean over tokens (2402.03300): `1 / (completions · tokens of this
      one)`.
    - bnpo, dapo, cispo: the mean over tokens (2503.14476): `1 / window_tokens`. They differ in what the
      caller passes: for bnpo the tokens of this window; for the others those of the whole generation batch
      divided by its windows.
    - dr_grpo: a constant, `1 / (completions · max_completion_length)` (2503.20783).
    """
    if loss_type == "grpo":
        return 1.0 / (max(window_completions, 1) * tokens.clamp(min=1))
    if loss_type in ("bnpo", "dapo", "cispo"):
        return torch.full_like(tokens, 1.0 / max(window_tokens, 1), dtype=torch.float32)
    if loss_type == "dr_grpo":
        weight = 1.0 / (max(window_completions, 1) * max_completion_length)
        return torch.full_like(tokens, weight, dtype=torch.float32)
    raise ValueError(f"loss_type {loss_type!r} is unknown; one of {', '.join(GRPO_LOSS_TYPES)}")
