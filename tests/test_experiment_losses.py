"""The losses of experiments/: against values recorded from TRL, numbers worked out by hand, and formulas of
the papers."""

import pytest
import torch

from experiments.train_distill import generalized_jsd
from experiments.train_kto import kto_loss
from experiments.train_reward import bradley_terry_loss
from tests.test_losses import RECORDED, case_name, close

# --- one answer at a time, and rewards ----------------------------------------------------------------------


def kto_case(case, dtype=torch.float32):
    """(losses, rewards, log-probabilities, labels) of a recorded case; its KL is a mean over all rows, of no
    gradient."""
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


# --- distillation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RECORDED["distillation"]["cases"], ids=case_name)
def test_divergences_are_trls(case):
    inputs, mask = RECORDED["distillation"]["inputs"][case["inputs"]], torch.tensor(case["mask"])
    logits = torch.tensor(inputs["student_logits"], requires_grad=True)
    divergence = generalized_jsd(
        logits / case["temperature"],
        torch.tensor(inputs["teacher_logits"]) / case["temperature"],
        case["beta"],
    )
    loss = (divergence * mask).sum() / mask.sum()
    loss.backward()
    close(loss, case["loss"])
    close(logits.grad, case["grad_logits"])
