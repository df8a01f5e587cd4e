"""The losses of experiments/: against values recorded from TRL, numbers worked out by hand, and formulas of the papers."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
import torch

from experiments.train_distill import generalized_jsd
from experiments.train_kto import LOSS_TYPES, kto_loss
from experiments.train_ppo import gae, value_loss
from experiments.train_reward import bradley_terry_loss
from tests.test_losses import RECORDED, case_name, close, tensor

# --- one answer at a time, and rewards --------------------------------------------------------------------------------


def kto_case(case, dtype=torch.float32):
    """(losses, rewards, log-probabilities, labels) of a recorded case; its KL is a mean over all rows, of no gradient."""
    inputs = RECORDED["kto"]["inputs"][case["inputs"]]
    logps, ref, mixed, ref_mixed = (
        torch.tensor(inputs[name], dtype=dtype) for name in ("logps", "ref_logps", "KL_logps", "ref_KL_logps")
    )
    labels, kl = torch.tensor(inputs["label"]), (mixed - ref_mixed).mean().clamp(min=0)
    logps.requires_grad_()
    names = ("beta", "loss_type", "desirable_weight", "undesirable_weight")
    losses, rewards = kto_loss(logps, ref, labels, kl, **{name: case[name] for name in names})
    return losses, rewards, logps, labels


@pytest.mark.parametrize("case", RECORDED["kto"]["cases"], ids=case_name)
def test_losses_of_labelled_answers_are_trls(case):
    losses, rewards, logps, labels = kto_case(case)
    losses.mean().backward()
    close(losses.mean(), case["loss"])
    close(logps.grad, case["grad_logps"])
    for name, members in (("rewards/chosen", labels), ("rewards/rejected", ~labels)):
        assert (name in case["metrics"]) == bool(members.any())
        if members.any():
            close(rewards[members].mean(), case["metrics"][name])


def test_a_loss_of_labelled_answers_by_hand():
    """β = 0.5, KL = 2, log-ratios 3 and -1: 1 - σ(0.5), and for a bad answer of the second 1 - σ(1.5)."""
    sigma = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    logps, ref, labels = tensor(-4.0, -6.0), tensor(-7.0, -5.0), torch.tensor([1, 0])
    losses, rewards = kto_loss(logps, ref, labels, 2.0, beta=0.5, undesirable_weight=3.0)
    close(losses, [1 - sigma(0.5), 3 * (1 - sigma(1.5))], 1e-12)
    close(rewards, [1.5, -0.5], 1e-12)
    losses, _ = kto_loss(logps, ref, labels, 2.0, beta=0.5, loss_type="apo_zero_unpaired")
    close(losses, [1 - sigma(1.5), sigma(-0.5)], 1e-12)  # whatever the KL
    with pytest.raises(ValueError, match=", ".join(LOSS_TYPES)):
        kto_loss(logps, ref, labels, 2.0, beta=0.5, loss_type="sigmoid")


@pytest.mark.parametrize("case", RECORDED["reward"]["cases"], ids=case_name)
def test_losses_of_rewards_are_trls(case):
    inputs = RECORDED["reward"]["inputs"][case["inputs"]]
    chosen, rejected = (torch.tensor(inputs[name], requires_grad=True) for name in ("chosen", "rejected"))
    margin = torch.tensor(inputs["margin"]) if case["margin"] else 0.0
    loss = bradley_terry_loss(chosen, rejected, margin, case["center_rewards_coefficient"] or 0.0).mean()
    loss.backward()
    close(loss, case["loss"])
    close(chosen.grad, case["grad_chosen"])
    close(rejected.grad, case["grad_rejected"])
    close((chosen > rejected).float().mean(), case["metrics"]["accuracy"])
    close((chosen - rejected).mean(), case["metrics"]["margin"])


# --- PPO with a critic ------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=9), st.floats(0, 1), st.floats(0, 1))
def test_advantages_of_a_critic_are_the_papers_sum(pairs, gamma, lam):
    """Â_t = Σ_l (γλ)^l δ_{t+l} (1506.02438, eq. 16)."""
    rewards, values = ([pair[k] for pair in pairs] for k in (0, 1))
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, [*values[1:], 0.0], strict=True)]
    wanted = [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]
    close(gae(tensor(*rewards), tensor(*values), gamma=gamma, lam=lam), wanted, 1e-9)


def test_a_loss_of_values_by_hand():
    """Clip 0.5 around the old value 1, return 3: up to 1.5 it learns, beyond it has no gradient; away from it, it does."""
    values = tensor(1.25, 2.0, 0.0).requires_grad_()
    losses, clipped = value_loss(values, tensor(1, 1, 1), tensor(3, 3, 3), cliprange_value=0.5)
    close(losses, [0.5 * 1.75**2, 0.5 * 1.5**2, 0.5 * 3**2], 1e-12)
    assert clipped.tolist() == [0, 1, 0]
    losses.sum().backward()
    close(values.grad, [-1.75, 0, -3], 1e-12)


# --- distillation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RECORDED["distillation"]["cases"], ids=case_name)
def test_divergences_are_trls(case):
    inputs, mask = RECORDED["distillation"]["inputs"][case["inputs"]], torch.tensor(case["mask"])
    logits = torch.tensor(inputs["student_logits"], requires_grad=True)
    divergence = generalized_jsd(
        logits / case["temperature"], torch.tensor(inputs["teacher_logits"]) / case["temperature"], case["beta"]
    )
    loss = (divergence * mask).sum() / mask.sum()
    loss.backward()
    close(loss, case["loss"])
    close(logits.grad, case["grad_logits"])


def test_a_divergence_by_hand():
    """s = (1/2, 1/2), t = (1/4, 3/4); with β = 1/4 their mixture is (7/16, 9/16). Equal ones are 0 apart."""
    s, t = tensor(0.5, 0.5).log()[None], tensor(0.25, 0.75).log()[None] + 3.0  # logits have no zero
    close(generalized_jsd(s, t, 0.0), [0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)], 1e-12)
    close(generalized_jsd(s, t, 1.0), [0.5 * math.log(2) + 0.5 * math.log(2 / 3)], 1e-12)
    to_teacher = 0.25 * math.log(4 / 7) + 0.75 * math.log(12 / 9)
    to_student = 0.5 * math.log(8 / 7) + 0.5 * math.log(8 / 9)
    close(generalized_jsd(s, t, 0.25), [0.25 * to_teacher + 0.75 * to_student], 1e-12)
    for beta in (0.0, 0.3, 1.0):
        close(generalized_jsd(s, s, beta), [0.0], 1e-12)
