"""The learning rate step by step, by hand, and AdamW against its formula in float64."""

import copy
import dataclasses
import importlib.util

from accelerate.utils import DistributedType
from common.args import CommonArgs
from common.errors import UserError
from common.model import FlatModel
from common.model.optimizer import check_optimizer, make_optimizer, schedule, set_lr
from common.run.dry_run import moments_bytes
import pytest
import torch
from torch import nn

from tests.tiny import tiny_lm


def rates(kind: str, total: int = 10, *, peak=1.0, warmup=0.0, decay=0.2, least=0.0) -> list[float]:
    args = CommonArgs(lr_scheduler_type=kind, learning_rate=peak)
    args.warmup_steps, args.lr_decay_fraction, args.min_lr_ratio = warmup, decay, least
    lr_at = schedule(args, total)
    return [lr_at(step) for step in range(total)]


# --- schedules ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "wanted"),
    [
        ("constant", {}, [1] * 10),
        # a share of the steps, rounded
        ("constant", {"warmup": 0.38}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        ("constant", {"warmup": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", {}, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ("linear", {"warmup": 2}, [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        ("linear", {"warmup": 2, "least": 0.2}, [0.5, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]),
        (
            "linear",
            {"peak": 3e-4, "warmup": 5},
            [x * 3e-4 for x in (0.2, 0.4, 0.6, 0.8, 1, 1, 0.8, 0.6, 0.4, 0.2)],
        ),
        ("cosine", {"total": 4}, [1, 0.8535534, 0.5, 0.1464466]),  # (1 + cos(π·k/4)) / 2
        ("cosine", {"total": 5, "warmup": 1, "least": 0.1}, [1, 1, 0.8681981, 0.55, 0.2318019]),
        ("wsd", {}, [1] * 9 + [0.5]),  # the fall of 2 steps: 1 - 8/10 and 1 - 9/10 of 0.2
        ("wsd", {"decay": 0.5, "warmup": 2}, [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        ("wsd", {"decay": 0.5, "least": 0.5}, [1] * 6 + [0.9, 0.8, 0.7, 0.6]),
        ("wsd", {"decay": 1.0}, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ("wsd", {"decay": 0.0}, [1] * 10),
    ],
)
def test_learning_rates_by_hand(kind, options, wanted):
    assert rates(kind, **options) == pytest.approx(wanted, abs=1e-7)


# --- AdamW --------------------------------------------------------------------------------------------------


class Toy(nn.Module):
    """Matrices (one of them used twice), vectors, a kernel of three dimensions, and a matrix that is not
    trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.linear = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.conv, self.head, self.frozen = (
            nn.Conv1d(4, 4, 1),
            nn.Linear(4, 7, bias=False),
            nn.Linear(4, 4, bias=False),
        )
        self.head.weight = self.embed.weight
        self.frozen.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.norm(self.embed(ids)))
        x = self.conv(self.frozen(x).T[None])[0].T
        return self.head(torch.tanh(x))


ARGS = CommonArgs(learning_rate=1e-2, weight_decay=0.3, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8)


def test_adamw_is_its_formula_in_float64():
    """Loshchilov & Hutter 2019, algorithm 2, with a learning rate that changes at every step."""
    model = Toy().double()
    optimizer = make_optimizer(ARGS, model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    theta = {name: p.detach().clone() for name, p in trained.items()}
    m = {name: torch.zeros_like(p) for name, p in theta.items()}
    v = {name: torch.zeros_like(p) for name, p in theta.items()}
    frozen = model.frozen.weight.clone()
    for step in range(1, 7):
        lr = 1e-2 * step
        set_lr(optimizer, lr)
        ids = torch.arange(6).roll(step)
        nn.functional.cross_entropy(model(ids), ids.roll(1)).backward()
        for name, p in trained.items():
            g = p.grad.clone()
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g * g
            m_hat, v_hat = m[name] / (1 - 0.9**step), v[name] / (1 - 0.95**step)
            decay = 0.3 if p.dim() > 1 else 0.0
            theta[name] = theta[name] - lr * (m_hat / (v_hat.sqrt() + 1e-8) + decay * theta[name])
        optimizer.step()
        optimizer.zero_grad()
        for name, p in trained.items():
            torch.testing.assert_close(
                p.detach(), theta[name], atol=1e-10, rtol=1e-10, msg=f"{name} at step {step}"
            )
    assert torch.equal(model.frozen.weight, frozen)


# --- Muon and 8 bits ----------------------------------------------------------------------------------------


def test_matrices_go_by_torchs_muon_the_rest_by_adamw():
    """Embedding (the head, too), norms, biases and the kernel of three dimensions go by AdamW."""
    model, plain = Toy(), Toy()
    optimizer, known = (
        make_optimizer(dataclasses.replace(ARGS, optim="muon"), model),
        make_optimizer(ARGS, plain),
    )
    matrix = nn.Parameter(model.linear.weight.detach().clone())
    muon = torch.optim.Muon([matrix], weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    for step in range(1, 4):
        ids = torch.arange(6).roll(step)
        for each in (model, plain):
            each.zero_grad()
        nn.functional.cross_entropy(model(ids), ids.roll(1)).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            q.grad = None if p.grad is None else p.grad.clone()
        matrix.grad = model.linear.weight.grad.clone()
        for each in (optimizer, known, muon):
            set_lr(each, 1e-2 * step)
            each.step()
        assert torch.equal(model.linear.weight, matrix) and not torch.equal(
            model.linear.weight, plain.linear.weight
        )
        for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert name == "linear.weight" or torch.equal(p, q[1]), name


@pytest.mark.parametrize("optim", ["adamw", "muon", "adamw_8bit"])
def test_an_optimizer_resumes_bit_for_bit(optim, tmp_path):
    if optim == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    args = CommonArgs(optim=optim, learning_rate=1e-2, weight_decay=0.1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96))
    optimizer = make_optimizer(args, model)

    def steps(model, optimizer, seeds):
        for seed in seeds:
            torch.manual_seed(seed)
            optimizer.zero_grad()
            model(torch.randn(8, 96)).square().mean().add(model[0].weight.sum() * 1e-3).backward()
            optimizer.step()

    steps(model, optimizer, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    other = copy.deepcopy(model)
    again = make_optimizer(args, other)
    again.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    steps(model, optimizer, range(3, 6)), steps(other, again, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    tables = ("step", "qmap1", "qmap2")  # 256 numbers that all tensors share
    kept = [
        t
        for s in optimizer.state.values()
        for k, t in s.items()
        if isinstance(t, torch.Tensor) and k not in tables
    ]
    assert sum(t.numel() * t.element_size() for t in kept) == pytest.approx(
        moments_bytes(model, optim), rel=0.02
    )


@pytest.mark.parametrize(
    "optim, distributed, said", [("adamw_8bit", "FSDP", "not sharded"), ("muon", "DEEPSPEED", "pieces")]
)
def test_an_optimizer_that_cannot_be_sharded(monkeypatch, optim, distributed, said):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)  # bitsandbytes
    check_optimizer(CommonArgs(optim=optim), DistributedType.MULTI_GPU)
    with pytest.raises(UserError, match=f"--optim {optim}.*{said}"):
        check_optimizer(CommonArgs(optim=optim), DistributedType[distributed])


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_extra_modules_may_have_their_own_rate(optim):
    """By the first step of AdamW, which moves each weight by the rate; Muon has the matrices of the layers,
    and neither the embedding nor the head. The factor is in the optimizer's state."""
    model = FlatModel(tiny_lm("llama"))
    model.extra["value"] = nn.Linear(3, 2)
    args = CommonArgs(optim=optim, learning_rate=1e-2, weight_decay=0.0)
    optimizer = make_optimizer(args, model, extra_lr_multiplier=5.0)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    set_lr(optimizer, 1e-3)
    optimizer.step()
    for name, p in model.named_parameters():
        moved, rate = before[name] - p.detach(), 5e-3 if name.startswith("extra.") else 1e-3
        by_adamw = torch.allclose(moved, torch.full_like(moved, rate), rtol=1e-3, atol=1e-6)
        assert by_adamw == (optim == "adamw" or ".layers." not in name or "norm" in name), name
    again = make_optimizer(dataclasses.replace(args, weight_decay=0.1), model, extra_lr_multiplier=5.0)
    assert [group["weight_decay"] for group in again.param_groups if "lr_multiplier" in group] == [0.0]
    again.load_state_dict(optimizer.state_dict())
    set_lr(again, 2e-3)
    assert sorted({group["lr"] for group in again.param_groups}) == pytest.approx([2e-3, 1e-2])


def test_a_group_has_the_rate_of_the_schedule_times_its_multiplier():
    """A rate of its own would be overwritten at the first step."""
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([one], lr=0.1)
    optimizer.add_param_group({"params": [other], "lr": 0.01})
    with pytest.raises(UserError, match="different learning rates .0.01, 0.1..*lr_multiplier"):
        set_lr(optimizer, 0.1)
    optimizer.param_groups[1]["lr_multiplier"] = 0.1
    for rate in (0.1, 0.05):
        set_lr(optimizer, rate)
        assert [group["lr"] for group in optimizer.param_groups] == [rate, pytest.approx(rate / 10)]
