"""Mixtures of experts through the scripts: the routers' losses of a window are the same however it is
split."""

from common.model import FlatModel
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.conftest import assert_same, losses, train_metrics, write_rows
from tests.run.test_fsdp import sharded  # noqa: F401
from tests.scripts.one_step import assert_gradient, gradient_of, make_model, nll_window, watched
from tests.scripts.test_equivalence import arguments, two_processes
from tests.scripts.test_sft import CHATS, encoded

LOSSES = ["--router_aux_loss_coef", "20"]
ROUTERS = ("moe/aux_loss", "moe/max_load", "moe/unused_experts")


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return [
        "--model_name_or_path",
        make_model(tmp_path_factory.mktemp("moe") / "moe", "moe", max_position_embeddings=1024),
    ]


def assert_same_routing(one, other):
    """A rounding may send a token to another of two experts that are all but equally good: a change of 1e-4
    in a count."""
    assert_same(losses(one), losses(other), tolerance=1e-4, norm_tolerance=1e-3)
    for a, b in zip(train_metrics(one), train_metrics(other), strict=True):
        assert [a[name] for name in ROUTERS] == pytest.approx([b[name] for name in ROUTERS], rel=2e-3)


SLOW = [pytest.param(stage, marks=pytest.mark.slow) for stage in ("pretrain", "dpo", "grpo")]


@pytest.mark.parametrize("stage", ["sft", *SLOW])
def test_micro_batches_change_nothing(stage, launch, moe):
    words = [*moe, *LOSSES]
    whole = launch(stage, *arguments(stage, 8, 1), *words, output="whole")
    norms = [norm for *_, norm in losses(whole)]
    plain = [norm for *_, norm in losses(launch(stage, *arguments(stage, 8, 1), *moe, output="plain"))]
    # the losses make a difference
    assert all(abs(a - b) > 1e-2 * b for a, b in zip(norms, plain, strict=True))
    for batch, accumulation in ((2, 4), (1, 8)) if stage != "sft" else ((2, 4),):
        split = launch(
            stage, *arguments(stage, batch, accumulation), *words, output=f"{batch}x{accumulation}"
        )
        assert_same_routing(whole, split)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["pretrain", "sft", "dpo", "grpo"])
def test_two_processes_change_nothing(stage, launch, moe, tmp_path):
    words = [*moe, *LOSSES]
    whole = launch(stage, *arguments(stage, 8, 1), *words)
    assert_same_routing(whole, two_processes(stage, tmp_path / "2", *arguments(stage, 2, 2), *words))
    if stage == "sft":  # one micro-batch on each: no pass of its own counts
        assert_same_routing(whole, two_processes(stage, tmp_path / "4", *arguments(stage, 4, 1), *words))
        words.append("--auto_micro_batch")
        assert_same_routing(whole, two_processes(stage, tmp_path / "auto", *arguments(stage, 2, 2), *words))


@pytest.mark.slow
def test_sharded_weights_give_the_same(launch, moe, sharded):  # noqa: F811
    words = [*arguments("sft", 8, 1), *moe, *LOSSES, "--gradient_checkpointing"]
    assert_same_routing(launch("sft", *words), sharded("sft", *words))


def test_the_gradient_has_transformers_own_term(launch, tmp_path):
    """In float64, of four conversations in two micro-batches; the sequences one by one, so without
    padding."""
    model = make_model(tmp_path / "moe", "moe", output_router_logits=True, router_aux_loss_coef=0.3)
    rows = write_rows(tmp_path / "chats.jsonl", [{"messages": messages} for messages in CHATS[:4]])
    flags = ["--dataset_name", rows, "--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2]
    run = watched(launch, "sft", model, *flags, "--max_steps", 1)

    exact = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    sequences = [encoded(messages) for messages in CHATS[:4]]
    loss, wanted = nll_window(exact, sequences)
    logits = [exact(torch.tensor([ids]), output_router_logits=True).router_logits for ids, _ in sequences]
    logits = tuple(torch.cat(parts) for parts in zip(*logits, strict=True))
    term = transformers.models.qwen3_moe.modeling_qwen3_moe.load_balancing_loss_func
    aux = sum(term((layer,), 4, 2) for layer in logits) / len(logits)
    assert_gradient(run.grads[0], gradient_of(exact, loss + 0.3 * aux))
    assert run.rows[0]["moe/aux_loss"] == pytest.approx(aux.item(), rel=1e-4)
    # without the term, as an evaluation's
    assert run.rows[0]["loss"] == pytest.approx(wanted["loss"], rel=1e-4)


def test_a_restarted_window_is_the_same(launch, moe, monkeypatch, capsys):
    words = [*arguments("sft", 8, 1), *moe, *LOSSES, "--max_steps", "1"]
    whole = launch("sft", *words, output="whole")
    forward = FlatModel.forward

    def limited(self, batch, *args, **kwargs):
        if self.experts.recording and len(batch["lengths"]) > 4:
            raise torch.OutOfMemoryError
        return forward(self, batch, *args, **kwargs)

    monkeypatch.setattr(FlatModel, "forward", limited)
    parts = launch("sft", *words, output="parts")
    assert "out of memory; again" in capsys.readouterr().out
    assert_same_routing(whole, parts)
