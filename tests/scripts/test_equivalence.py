"""The same window gives the same loss and the same gradient, however it is split."""

import json

import pytest

from tests.conftest import assert_same, losses, run_script, teacher, torchrun, words_of

COMMON = "--eval_steps 0 --logging_steps 1 --save_steps 0 --max_grad_norm 1.0 --lr_scheduler_type constant".split()
# Windows of 8 examples of uneven length; 20 examples, so that the last of 3 windows holds 4 and some processes have none.
STAGES = {
    "pretrain": ["--config", "data/configs/pretrain.yaml", "--model_name_or_path", "data/base_model", "--max_steps", "-1"]
    + ["--packing_strategy", "bfd", "--max_train_samples", "60", "--max_length", "64"],
    "sft": ["--config", "data/configs/sft.yaml", "--max_train_samples", "20", "--max_steps", "-1"],
    "dpo": ["--config", "data/configs/dpo.yaml", "--max_train_samples", "20", "--max_steps", "-1"],
    "reward": ["--config", "experiments/configs/reward.yaml", "--max_train_samples", "20", "--max_steps", "-1"],
    "sft dft": ["--config", "data/configs/sft.yaml", "--max_train_samples", "20", "--max_steps", "-1"]
    + ["--loss_type", "dft"],
    "label_smoothing": ["--config", "data/configs/sft.yaml", "--max_train_samples", "20", "--max_steps", "-1"],
    "kto": ["--config", "experiments/configs/kto.yaml", "--max_train_samples", "20", "--max_steps", "-1"],
    "rft": ["--config", "experiments/configs/rft.yaml", "--max_train_samples", "10", "--max_steps", "-1"]
    + ["--reward_threshold", "0", "--num_generations", "2", "--eval_prompts", ""],
    "tools": ["--config", "experiments/configs/tools.yaml", "--max_steps", "2", "--num_generations", "4"],
    "grpo": ["--config", "data/configs/grpo.yaml", "--max_steps", "2", "--num_generations", "4", "--beta", "0.02"]
    + ["--num_iterations", "2", "--eval_prompts", ""],
    "grpo_ahead entropy": [
        "--config",
        "data/configs/grpo.yaml",
        "--max_steps",
        "2",
        "--num_generations",
        "4",
        "--eval_prompts",
        "",
    ]
    + ["--top_entropy_quantile", "0.4", "--loss_type", "bnpo"],
    "grpo_ahead": ["--config", "data/configs/grpo.yaml", "--max_steps", "4", "--num_generations", "4", "--eval_prompts", ""]
    + ["--rollout_ahead", "1", "--importance_correction", "sequence_mask", "--importance_cap", "1.02"],
    "ppo": ["--config", "experiments/configs/ppo.yaml", "--max_steps", "5", "--steps_per_generation", "2", "--beta", "0.02"]
    + ["--num_iterations", "2", "--eval_prompts", ""],
    "distill": ["--config", "experiments/configs/distill.yaml", "--max_steps", "3", "--eval_prompts", "", "--beta", "0.4"]
    + ["--dataset_name", "data/sft", "--lmbda", "0.6", "--teacher_model_name_or_path", teacher()],
}
BASE = {stage: ["--model_name_or_path", "data/base_model"] for stage in STAGES if stage != "pretrain"}


def arguments(stage, batch, accumulation):
    return [*STAGES[stage], *BASE.get(stage, []), *COMMON, "--per_device_train_batch_size", str(batch)] + [
        "--gradient_accumulation_steps",
        str(accumulation),
    ]


SLOW = (
    "reward",
    "sft dft",
    "label_smoothing",
    "rft",
    "tools",
    "grpo_ahead entropy",
    "grpo_ahead",
    "ppo",
    "distill",
)  # their fast tests are in tests/scripts


@pytest.mark.parametrize("stage", [pytest.param(s, marks=pytest.mark.slow) if s in SLOW else s for s in STAGES])
def test_a_window_split_over_micro_batches_gives_the_same_loss_and_gradient(stage, launch):
    script = stage.split()[0]
    whole = losses(launch(script, *arguments(stage, 8, 1), output="8x1"))
    assert len(whole) >= 2
    for batch, accumulation in ((2, 4), (1, 8)):
        split = losses(launch(script, *arguments(stage, batch, accumulation), output=f"{batch}x{accumulation}"))
        assert_same(whole, split)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_window_split_over_two_processes_gives_the_same_loss_and_gradient(stage, launch, tmp_path):
    whole = losses(launch(stage.split()[0], *arguments(stage, 8, 1)))
    command = torchrun()
    command += [*words_of(stage.split()[0]), *arguments(stage, 2, 2), "--output_dir", str(tmp_path / "two")]
    run = run_script(command)
    assert run.returncode == 0, run.stderr[-6000:]
    assert_same(whole, losses(tmp_path / "two"))
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["processes"] == 2


@pytest.mark.slow
def test_a_window_of_a_token_budget_split_over_two_processes_gives_the_same_loss_and_gradient(launch, tmp_path):
    """Micro-batches filled by tokens, from two weighted sources, packed, streamed: who computes what makes no difference."""
    words = ["--dataset_name", "data/sft", "data/sft/validation.jsonl", "--dataset_weights", "2", "1", "--packing"]
    words += ["--dataset_streaming", "--max_tokens_per_batch", "256", "--max_steps", "3"]
    words += ["--max_length", "256"]
    whole = losses(launch("sft", *arguments("sft", 8, 2), *words))
    command = torchrun()
    command += ["train_sft.py", *arguments("sft", 8, 1), *words, "--output_dir", str(tmp_path / "two")]
    run = run_script(command)
    assert run.returncode == 0, run.stderr[-6000:]
    assert_same(whole, losses(tmp_path / "two"))


@pytest.mark.parametrize("stage", ["sft", "dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_packing_changes_nothing_but_the_rows(stage, launch):
    """All 20 examples are one window, packed or not."""
    alone = losses(launch(stage, *arguments(stage, 20, 1), output="alone"))
    packed = losses(launch(stage, *arguments(stage, 20, 1), "--packing", output="packed"))
    assert len(alone) == 1
    assert_same(alone, packed)


def test_precomputed_reference_log_probabilities_equal_those_computed_on_the_way(launch):
    once = losses(launch("dpo", *arguments("dpo", 8, 1), "--precompute_ref_log_probs", "true", output="once"))
    online = losses(launch("dpo", *arguments("dpo", 8, 1), "--precompute_ref_log_probs", "false", output="online"))
    assert_same(once, online)
