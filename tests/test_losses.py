"""Losses: against values recorded from TRL, against numbers worked out by hand, and against naive loops."""

import json
import math
from pathlib import Path
import statistics
from types import SimpleNamespace

from common.losses import (
    DPO_LOSS_TYPES,
    GRPO_LOSS_TYPES,
    SMOOTHED,
    combine_rewards,
    dpo_loss,
    group_advantages,
    grpo_loss,
    grpo_token_weights,
    log1mexp,
    segment_ids,
    segment_sum,
)
from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
import torch

from experiments.rollout_ahead import keep_high_entropy

RECORDED = json.loads(Path(__file__).with_name("trl_recorded.json").read_text())
SCALES = ["group", "batch", "none"]
NAN = float("nan")
NO_TOKENS = {"window_tokens": 0, "window_completions": 0, "max_completion_length": 8}


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(found: torch.Tensor, wanted, tolerance: float = 1e-5) -> None:
    wanted = torch.as_tensor(wanted, dtype=found.dtype)
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance, equal_nan=True)


def case_name(case: dict) -> str:
    shown = [
        f"{k}={v}" for k, v in case.items() if isinstance(v, int | float) and k not in ("loss", "simpo_gamma")
    ]
    return " ".join([case.get("loss_type") or case.get("scale_rewards") or case["inputs"], *shown])


def flat_row(rows: list[list[float]], lengths: list[int]) -> torch.Tensor:
    """Rows end to end; the first token of each has no log-probability: column i of a row is its token i +
    1."""
    return torch.cat([torch.tensor([0.0, *row[: n - 1]]) for row, n in zip(rows, lengths, strict=True)])


def borders(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


# --- sums over the sequences of a flat row ------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.floats(-5, 5), max_size=7), min_size=1, max_size=6))
def test_segments_are_those_of_a_loop(sequences):
    lengths = [len(sequence) for sequence in sequences]
    values = tensor(*(value for sequence in sequences for value in sequence)).requires_grad_()
    assert segment_ids(borders(lengths), len(values)).tolist() == [
        s for s, n in enumerate(lengths) for _ in range(n)
    ]
    sums = segment_sum(values, borders(lengths))
    close(sums, [sum(sequence) for sequence in sequences], 1e-12)
    factors = tensor(*range(1, len(lengths) + 1))
    (sums * factors).sum().backward()
    close(values.grad, factors[segment_ids(borders(lengths), len(values))], 1e-12)


# --- DPO and its family: recorded ---------------------------------------------------------------------------


def preference(case, logps, ref, mask, sides, borders_of=None):
    """The losses of pairs, whose chosen and rejected answers are at these slices of the sums."""
    sums = [
        segment_sum(x * mask, borders_of) if borders_of is not None else (x * mask).sum(-1)
        for x in (logps, ref, torch.ones_like(mask))
    ]
    parts = [values[side] for values in sums for side in sides]
    options = {name: case[name] for name in ("beta", "loss_type", "label_smoothing") if name in case}
    return dpo_loss(*parts, **options)[0].mean()


@pytest.mark.parametrize("case", RECORDED["dpo"]["cases"], ids=case_name)
def test_preference_losses_are_trls(case):
    """On the flat row of the recorded pairs, chosen and rejected in turn. TRL ignores label_smoothing for
    sigmoid: its smoothed form is compared below, with CPO's recorded values and with the formula."""
    inputs = RECORDED["dpo"]
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    lengths = [inputs["lengths"][i] for i in order]
    logps, ref, mask = (
        flat_row([inputs[x][i] for i in order], lengths) for x in ("logps", "ref_logps", "mask")
    )
    loss = preference(
        case, logps.requires_grad_(), ref, mask, (slice(0, None, 2), slice(1, None, 2)), borders(lengths)
    )
    loss.backward()
    close(loss, case["loss"])
    per_token = [[case["grad_per_token"][i]] * 9 for i in order]
    close(logps.grad, flat_row(per_token, lengths) * mask)


@pytest.mark.parametrize("case", RECORDED["dpo_more"]["cases"], ids=case_name)
def test_newer_preference_losses_are_trls(case):
    inputs = RECORDED["dpo_more"]
    logps, ref, mask = (
        torch.tensor(inputs[name]).float() for name in ("logps", "ref_logps", "completion_mask")
    )
    mask = mask[:, 1:]  # column i of the log-probabilities is token i + 1
    loss = preference(case, logps.requires_grad_(), ref, mask, (slice(4), slice(4, 8)))
    loss.backward()
    close(loss, case["loss"])
    close(logps.grad, torch.tensor(case["grad_logps"]) * mask)


def reference_free(case: dict, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """The loss of mean log-probabilities (B,), given to dpo_loss as sums over tokens: 3 and 5, or 1 where no
    mean is taken. The reference gives probability 1, which leaves it out."""
    simpo = case["loss_type"] == "simpo"
    n, m, zero = (
        torch.full_like(chosen, 3 if simpo else 1),
        torch.full_like(chosen, 5 if simpo else 1),
        chosen * 0,
    )
    options = {k: case[k] for k in ("beta", "loss_type", "label_smoothing", "simpo_gamma")}
    return dpo_loss(chosen * n, rejected * m, zero.detach(), zero.detach(), n, m, **options)[0]


@pytest.mark.parametrize("case", RECORDED["cpo"]["cases"], ids=case_name)
def test_losses_without_reference_are_trls(case):
    """Among them simpo, and the conservative form of sigmoid and simpo with label_smoothing 0.1."""
    inputs = RECORDED["cpo"]
    chosen, rejected = (
        torch.tensor(inputs[x], requires_grad=True) for x in ("chosen_logps", "rejected_logps")
    )
    losses = reference_free(case, chosen, rejected)
    losses.mean().backward()
    close(losses, case["losses"])
    close(chosen.grad, case["grad_chosen"])
    close(rejected.grad, case["grad_rejected"])


# --- DPO and its family: by hand ----------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", DPO_LOSS_TYPES)
def test_extreme_margins_stay_finite(loss_type):
    chosen, rejected = torch.tensor([-1e4, -1e-7, 0.0]).requires_grad_(), torch.tensor([-1e-7, -1e4, 0.0])
    ref, one = torch.zeros(3), torch.ones(3)
    losses, _, _ = dpo_loss(chosen, rejected, ref, ref, one, one, beta=1.0, loss_type=loss_type)
    losses.sum().backward()
    assert losses.isfinite().all() and chosen.grad.isfinite().all()


@pytest.mark.parametrize(("weights", "first", "second"), [(None, 1, 1), ([0.25, 3.0], 0.25, 3.0)])
def test_several_types_are_summed_by_weight(weights, first, second):
    """By hand: x = (-2 + 3.5) - (-3 + 2.5), so βx = 1; the reverse KL of σ(1) to 0.8, and 0.8 · 0.3133 + 0.2 · 1.3133."""
    pair = [tensor(x) for x in (-2.0, -3.0, -3.5, -2.5, 4.0, 2.0)]
    options = {"loss_type": ["exo_pair", "sigmoid"], "loss_weights": weights, "label_smoothing": 0.2}
    losses, _, _ = dpo_loss(*pair, beta=0.5, **options)
    up = 1 / (1 + math.exp(-1))
    divergence = up * math.log(up / 0.8) + (1 - up) * math.log((1 - up) / 0.2)
    assert losses.item() == pytest.approx(first * divergence + second * 0.51326169)


@pytest.mark.parametrize("x", [-1e-6, -1e-3, -0.5, -0.693, -0.6932, -2.0, -30.0, -80.0])
def test_log1mexp_is_accurate_at_both_ends(x):
    x = torch.tensor(x).item()  # as float32 holds it
    wanted = math.log(-math.expm1(x)) if x > -0.5 else math.log1p(-math.exp(x))
    found = torch.tensor(x, requires_grad=True)
    y = log1mexp(found)
    y.backward()
    assert y.item() == pytest.approx(wanted, rel=1e-6)
    assert found.grad.item() == pytest.approx(-math.exp(x) / -math.expm1(x), rel=1e-5)


NO_SENSE = [{"loss_type": "dpo"}, {"loss_type": "robust", "label_smoothing": 0.5}]
NO_SENSE += [{"loss_type": "sigmoid", "label_smoothing": -0.1}]
NO_SENSE += [{"loss_type": name, "label_smoothing": 0.1} for name in DPO_LOSS_TYPES if name not in SMOOTHED]


@pytest.mark.parametrize("options", NO_SENSE, ids=str)
def test_options_without_sense_are_refused(options):
    with pytest.raises(ValueError, match="loss_type|label_smoothing"):
        dpo_loss(*[tensor(-1.0)] * 4, tensor(1.0), tensor(1.0), beta=0.1, **options)


def test_unknown_kinds_are_refused():
    rewards = torch.zeros(1, 2)
    for call, says in (
        (lambda: grpo_loss(*uneven_row(), importance_sampling_level="word"), "token or sequence"),
        (lambda: grpo_token_weights("ppo", tensor(1.0), **NO_TOKENS), "grpo, bnpo, dapo, dr_grpo"),
        (lambda: group_advantages(rewards, "std"), "group, batch or none"),
        (lambda: group_advantages(rewards, "group", "ppo"), "estimator is one of grpo, rloo, reinforce_pp"),
    ):
        with pytest.raises(ValueError, match=says):
            call()


# --- rewards and advantages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RECORDED["advantages"]["cases"], ids=case_name)
def test_advantages_are_trls(case):
    """The recordings hold no abstention; ours is tested below: out of its group, and 0."""
    rewards = combine_rewards(torch.tensor(case["rewards_per_func"]), torch.tensor(case["reward_weights"]))
    close(group_advantages(rewards.view(2, 4), case["scale_rewards"]).flatten(), case["advantages"])


@pytest.mark.parametrize(
    "case", RECORDED["rloo"]["cases"], ids=lambda case: f"{case['name']} {case['num_generations']}"
)
def test_leave_one_out_advantages_are_trls(case):
    """With functions that gave nothing, and groups of which one or none was scored."""
    table = torch.tensor([[NAN if r is None else r for r in row] for row in case["rewards_per_func"]])
    rewards = combine_rewards(table, torch.tensor(case["reward_weights"]))
    found = group_advantages(rewards.view(-1, case["num_generations"]), "none", "rloo")
    close(found.flatten(), case["advantages"])


def test_reinforce_pp_compares_with_all_rewards():
    """By hand: 1, 3 and 5, 7 (mean 4, std √(20/3)); a group without spread counts, nothing at all where no
    reward differs."""
    rewards = tensor(1.0, 3.0, 5.0, 7.0).view(2, 2)
    std = math.sqrt(20 / 3) + 1e-4
    close(
        group_advantages(rewards, "batch", "reinforce_pp"), [[-3 / std, -1 / std], [1 / std, 3 / std]], 1e-12
    )
    close(
        group_advantages(tensor(2.0, 2.0, 5.0, 5.0).view(2, 2), "none", "reinforce_pp"),
        [[-1.5, -1.5], [1.5, 1.5]],
        1e-12,
    )
    assert group_advantages(torch.full((2, 2), 0.1), "none", "reinforce_pp").tolist() == [[0, 0], [0, 0]]
    for some in (rewards, tensor(1.0, 1.0, 0.0, 1.0).view(2, 2)):  # of a group of equal rewards the std is 0
        batch = group_advantages(some, "batch", "reinforce_pp")
        assert torch.equal(group_advantages(some, "group", "reinforce_pp"), batch) and batch.abs().max() < 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(*[st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0, NAN])] * 4), min_size=1, max_size=4),
    st.sampled_from(SCALES),
)
def test_advantages_are_those_of_a_loop_over_groups(groups, scale):
    everything = [r for group in groups for r in group if not math.isnan(r)]
    wanted = []
    for group in groups:
        known = [r for r in group if not math.isnan(r)]
        if len(set(known)) < 2:
            wanted.append([0.0] * 4)
            continue
        std = {"group": statistics.stdev(known), "batch": statistics.stdev(everything), "none": 1 - 1e-4}[
            scale
        ]
        mean = statistics.mean(known)
        wanted.append([0.0 if math.isnan(r) else (r - mean) / (std + 1e-4) for r in group])
    close(group_advantages(torch.tensor(groups, dtype=torch.float64), scale), wanted, 1e-9)


@pytest.mark.parametrize("scale", SCALES)
def test_a_group_without_spread_gets_0(scale):
    """Also where the mean of equal numbers is not that number, as for 0.1 in float32, and where nobody has a
    reward."""
    rewards = torch.tensor([[0.1] * 7, [0.1] * 5 + [NAN] * 2, [3.0] + [NAN] * 6, [NAN] * 7])
    assert (group_advantages(rewards, scale) == 0).all()


@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_a_token_weighs_as_its_sampling_ratio(loss_type):
    """min(π_old / π_sampler, cap) times the policy's part, and not the KL, without a gradient of its own. By
    hand."""
    logps = torch.tensor([0.0, -1.0, -1.2, -0.5], requires_grad=True)
    old, ref = torch.tensor([0.0, -1.1, -1.0, -0.5]), torch.tensor([0.0, -1.3, -1.0, -0.7])
    sampled = torch.tensor([0.0, -1.1 - math.log(1.5), -1.0 - math.log(9.0), -0.5 + math.log(4.0)])
    advantages, mask = torch.tensor([0.0, 2.0, 2.0, 2.0]), torch.tensor([0.0, 1.0, 1.0, 1.0])
    options = {
        "epsilon": 0.5,
        "epsilon_high": 5.0 if loss_type == "cispo" else 0.5,
        "beta": 0.25,
        "loss_type": loss_type,
    }
    rows = (logps, old, ref, advantages, mask, borders([4]))
    losses, stats = grpo_loss(*rows, **options, sampled_logps=sampled, importance_cap=3.0)
    alone, _ = grpo_loss(*rows, **options)
    x = ref - logps
    kl = 0.25 * (x.exp() - x - 1) * (logps - old).exp() * mask
    factors = torch.tensor([1.0, 1.5, 3.0, 0.25])
    torch.testing.assert_close(losses - kl, factors * (alone - kl))
    (found,) = torch.autograd.grad(losses.sum(), logps, retain_graph=True)
    (wanted,) = torch.autograd.grad((factors * (alone - kl) + kl).sum(), logps)
    torch.testing.assert_close(found, wanted)
    assert stats["sampling/importance_clipped"].tolist() == [0, 0, 1, 0]
    difference = torch.tensor([0.0, math.log(1.5), math.log(9.0), math.log(4.0)])
    torch.testing.assert_close(stats["sampling/logp_difference"], difference)
    # three tokens count as eight
    assert stats["sampling/completion_difference_max"].tolist() == pytest.approx([math.log(54) / 8] * 4)


# --- GRPO and its family: recorded --------------------------------------------------------------------------


GRPO_CASES = [
    (name, case) for name in ("grpo", "grpo_cispo", "grpo_more") for case in RECORDED[name]["cases"]
]


@pytest.mark.parametrize(
    ("inputs", "case"), GRPO_CASES, ids=[f"{name} {case_name(case)}" for name, case in GRPO_CASES]
)
def test_policy_losses_are_trls(inputs, case):
    """On a flat row, in which each completion follows one token of prompt.

    A window is grad_accum of TRL's micro-batches, of which this is one: 4 completions, 20 tokens, or 5 and
    19.
    """
    inputs = RECORDED[inputs]
    all_tokens = sum(map(sum, inputs["mask"]))
    lengths = [1 + sum(row) for row in inputs["mask"]]
    logps, old, ref, mask = (
        flat_row(inputs[x], lengths) for x in ("logps", "old_logps", "ref_logps", "mask")
    )
    cu_seqlens = borders(lengths)
    sequence = segment_ids(cu_seqlens, len(mask))
    logps.requires_grad_()
    policy_mask = None
    if "top_entropy_quantile" in case:
        entropies = flat_row(inputs["entropies"], lengths)
        rows = zip(entropies.split(lengths), mask.split(lengths), strict=True)
        sequences = [{"entropy": entropy.numpy(), "loss_mask": of.numpy()} for entropy, of in rows]
        window = SimpleNamespace(sequences=sequences, examples=[[sequence] for sequence in sequences])
        keep_high_entropy(window, SimpleNamespace(num_processes=1), case["top_entropy_quantile"])
        policy_mask = torch.cat([torch.from_numpy(sequence["policy_mask"]) for sequence in sequences])
    losses, stats = grpo_loss(
        logps,
        logps.detach() if case.get("on_policy") else old,
        ref if case["beta"] else None,
        torch.tensor(inputs["advantages"])[sequence],
        mask,
        cu_seqlens,
        loss_type=case["loss_type"],
        delta=case.get("delta"),
        epsilon=case["epsilon"],
        epsilon_high=case["epsilon_high"],
        beta=case["beta"],
        use_bias_correction_kl=case.get("use_bias_correction_kl", True),
        policy_mask=policy_mask,
    )
    weights = grpo_token_weights(
        case["loss_type"],
        segment_sum(mask, cu_seqlens),
        window_tokens=case["num_items_in_batch"]
        if case["loss_type"] in ("dapo", "cispo")
        else all_tokens * case["grad_accum"],
        window_completions=len(inputs["mask"]) * case["grad_accum"],
        max_completion_length=12,
    )
    loss = (losses * weights[sequence]).sum()
    loss.backward()
    close(loss, case["loss"])
    close(logps.grad, flat_row(case["grad_logps"], lengths))
    for name in ("clip_ratio/region_mean", "kl"):
        if name in case["metrics"]:
            close(stats[name].sum() / all_tokens, case["metrics"][name])
    if "cispo_clip_ratio" in case["metrics"]:
        close(stats["clip_ratio/high_mean"].sum() / all_tokens, case["metrics"]["cispo_clip_ratio"])


# --- GRPO and its family: by hand ---------------------------------------------------------------------------


def uneven_row(dtype=torch.float64) -> tuple:
    """Three completions of 1, 4 and 2 tokens, each after 2 tokens of prompt, off policy."""
    lengths = [3, 6, 4]
    mask = torch.cat([torch.tensor([0.0, 0.0] + [1.0] * (n - 2)) for n in lengths]).to(dtype)
    generator = torch.Generator().manual_seed(0)
    logps, old, ref = (-torch.rand(13, generator=generator).to(dtype) * 3 * mask for _ in range(3))
    advantages = tensor(1.0, -0.5, 0.7).to(dtype)[segment_ids(borders(lengths), 13)]
    return logps, old, ref, advantages, mask, borders(lengths)


def test_untrained_tokens_count_nothing():
    logps, old, ref, advantages, mask, cu_seqlens = uneven_row()
    logps = (logps + (1 - mask) * -9.0).requires_grad_()  # a prompt that has become unlikely
    losses, stats = grpo_loss(logps, old, ref, advantages, mask, cu_seqlens, beta=1.0)
    losses.sum().backward()
    for values in (losses, logps.grad, *stats.values()):
        assert (values[mask == 0] == 0).all()
    assert not any(value.requires_grad for value in stats.values())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_in_the_mask_count_once(level):
    """A script may multiply the mask by weights: each loss is multiplied by its weight, and no ratio is. Of
    completions of three tokens and of one."""
    moved = tensor(0.0, 0.3, -0.1, 0.2, 0.0, 0.1)
    weights = tensor(0.0, 0.1, 0.5, 0.2, 0.0, 0.3)
    old = tensor(0.0, -1.0, -2.0, -0.5, 0.0, -1.5)
    ratios = moved.exp()
    if level == "sequence":
        ratios[1:4] = math.exp(0.4 / 3)
    how = dict(ref_logps=None, advantages=torch.ones(6), importance_sampling_level=level)
    how |= {"cu_seqlens": torch.tensor([0, 4, 6]), "loss_mask": weights}
    losses, _ = grpo_loss(logps=old + moved, old_logps=old, **how)
    close(losses, -ratios.clamp(max=1.2) * weights)


@pytest.mark.parametrize("loss_type", GRPO_LOSS_TYPES)
def test_a_window_without_trained_tokens_gives_0(loss_type):
    logps, *rest, mask, cu_seqlens = uneven_row()
    logps.requires_grad_()
    losses, _ = grpo_loss(logps, *rest, mask * 0, cu_seqlens, beta=0.1)
    weights = grpo_token_weights(loss_type, torch.zeros(3), **NO_TOKENS)
    assert weights.isfinite().all()
    loss = (losses * weights[segment_ids(cu_seqlens, 13)]).sum()
    loss.backward()
    assert loss == 0 and (logps.grad == 0).all()
