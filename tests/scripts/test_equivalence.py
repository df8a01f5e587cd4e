"""The same window gives the same loss and the same gradient, however it is split."""

import json

import pytest

from tests.conftest import assert_same, demo, losses, run_script, teacher, torchrun, words_of
from tests.run.test_fit import limit_memory

COMMON = "--eval_steps 0 --logging_steps 1 --save_steps 0 --max_grad_norm 1.0 --lr_scheduler_type constant"
COMMON = [*COMMON.split(), "--max_eval_samples", "4", "--eval_prompts", ""]
# Windows of 8 examples of uneven length; 20 examples, so that the last of 3 windows holds 4 and some
# processes have none.
ALL = "--max_train_samples 20 --max_steps -1"
STAGES = {
    "pretrain": "--max_train_samples 60 --max_steps -1 --packing_strategy bfd --max_length 64",
    "sft": ALL,
    "dpo": ALL,
    "grpo": "--max_train_samples 20 --max_steps 2 --num_generations 4 --beta 0.02 --num_iterations 2",
}
SLOW = {
    "reward": ALL,
    "kto": ALL,
    "sft dft": f"{ALL} --loss_type dft",
    "label_smoothing": ALL,
    "mtp": STAGES["pretrain"],
    "ema": ALL,
    "rft": "--max_train_samples 10 --max_steps -1 --reward_threshold 0 --num_generations 2",
    "tools": "--max_steps 2 --num_generations 4",
    "grpo_ahead entropy": "--max_steps 2 --num_generations 4 --top_entropy_quantile 0.4 --loss_type bnpo",
    "grpo_ahead": "--max_steps 4 --num_generations 4 --rollout_ahead 1 --importance_correction sequence_mask"
    " --importance_cap 1.02",
    "online_dpo": "--max_steps 3 --num_iterations 2",
    "dynamic_sampling": "--max_steps 3 --num_generations 4 --max_draws 3 --scale_rewards batch",
    "ppo": "--max_steps 5 --steps_per_generation 2 --beta 0.02 --num_iterations 2",
    "self_distill": "--max_steps 3 --beta 0.4 --lmbda 0.6",
    "distill": f"--max_steps 3 --beta 0.4 --dataset_name data/sft --lmbda 0.6 --teacher_model_name_or_path {teacher()}",
}  # their fast tests are in tests/scripts
WORDS = STAGES | SLOW


def arguments(stage, batch, accumulation):
    words = f"--config {demo(stage.split()[0])} --model_name_or_path data/base_model {WORDS[stage]}".split()
    sizes = f"--per_device_train_batch_size {batch} --gradient_accumulation_steps {accumulation}".split()
    return [*words, *COMMON, *sizes]


def two_processes(stage, folder, *words):
    """The script on two processes of this machine: its output folder."""
    folders = ["--output_dir", str(folder), "--dataset_cache_dir", str(folder.parent / "cache")]
    run = run_script([*torchrun(), *words_of(stage), *map(str, words), *folders])
    assert run.returncode == 0, run.stderr[-6000:]
    assert json.loads((folder / "summary.json").read_text())["processes"] == 2
    return folder


@pytest.mark.parametrize("stage", [*STAGES, *(pytest.param(stage, marks=pytest.mark.slow) for stage in SLOW)])
def test_a_window_split_over_micro_batches_gives_the_same_loss_and_gradient(stage, launch):
    script = stage.split()[0]
    whole = losses(launch(script, *arguments(stage, 8, 1), output="8x1"))
    assert len(whole) >= 2
    for batch, accumulation in ((2, 4), (1, 8)):
        split = losses(
            launch(script, *arguments(stage, batch, accumulation), output=f"{batch}x{accumulation}")
        )
        assert_same(whole, split)


@pytest.mark.parametrize("stage", ["dpo", "reward"])
def test_a_window_that_is_cut_when_memory_runs_out_keeps_pairs_together(stage, launch, monkeypatch):
    words = [*arguments(stage, 3, 1), "--max_steps", "2"]
    whole = losses(launch(stage, *words, output="whole"))
    limit_memory(monkeypatch, 2)
    assert_same(whole, losses(launch(stage, *words, output="cut")))


@pytest.mark.slow
@pytest.mark.parametrize("stage", WORDS)
def test_a_window_split_over_two_processes_gives_the_same_loss_and_gradient(stage, launch, tmp_path):
    whole = losses(launch(stage.split()[0], *arguments(stage, 8, 1)))
    assert_same(whole, losses(two_processes(stage.split()[0], tmp_path / "two", *arguments(stage, 2, 2))))


@pytest.mark.slow
def test_a_window_of_a_token_budget_split_over_two_processes_gives_the_same_loss_and_gradient(
    launch, tmp_path
):
    """Micro-batches filled by tokens, from two weighted sources, packed, streamed: who computes what makes no
    difference."""
    words = "--dataset_name data/sft data/sft/validation.jsonl --dataset_weights 2 1 --packing".split()
    words += "--dataset_streaming --max_tokens_per_batch 256 --max_steps 3".split()
    words += ["--max_length", "256"]
    whole = losses(launch("sft", *arguments("sft", 8, 2), *words))
    assert_same(whole, losses(two_processes("sft", tmp_path / "two", *arguments("sft", 8, 1), *words)))


def test_packing_changes_nothing_but_the_rows(launch):
    """All 20 answers are one window, packed or not (of chats and pairs: test_sft.py and test_dpo.py, in
    float64)."""
    alone = losses(launch("kto", *arguments("kto", 20, 1), output="alone"))
    packed = losses(launch("kto", *arguments("kto", 20, 1), "--packing", output="packed"))
    assert len(alone) == 1
    assert_same(alone, packed)
