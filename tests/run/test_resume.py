"""A run that was stopped goes on exactly where it was, and a broken checkpoint is never taken for a whole
one."""

import os
import shutil
import signal
import subprocess
import sys
import time

from common.data import stream as streams
from common.run import run as module
from common.run.folder import checkpoints
import pytest
from safetensors.torch import load_file
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import EXPERIMENTS, ROOT, SFT, demo, read_metrics, teacher, train_metrics, words_of
from tests.scripts.one_step import make_model

COMMON = "--logging_steps 1 --eval_steps 4 --save_steps 3 --max_steps 8 --model_name_or_path data/base_model".split()
COMMON += [
    "--eval_prompts",
    "data/prompts/chat_validation.jsonl",
    "--max_eval_samples",
    "8",
    "--eval_max_new_tokens",
    "4",
]
FEW = "--max_train_samples 20 --per_device_train_batch_size 4"
WORDS = {
    "pretrain": "--max_train_samples 100 --per_device_train_batch_size 4",
    "sft": FEW,
    # Packs of a stream: blocks of seven rows, and the sources start again and again.
    "sft streamed": "--dataset_name data/sft data/sft/validation.jsonl --max_train_samples 10 --dataset_streaming --packing"
    " --dataset_weights 1 1 --max_length 128 --per_device_train_batch_size 2",
    "sft mixed": "--dataset_name data/sft data/sft/validation.jsonl --dataset_weights 0.8 0.2 --max_train_samples 30"
    " --max_tokens_per_batch 200 --gradient_accumulation_steps 2 --curriculum_column length --turn_dropping 0.5",
    "pretrain streamed": "--dataset_streaming --max_tokens_per_batch 300",
    "dpo": FEW,
    "reward": FEW,
    "kto": FEW,
    "ema": FEW,
    "rft": f"{FEW} --reward_threshold 0",
    "tools": "--per_device_train_batch_size 16",
    "grpo": "--max_train_samples 40 --per_device_train_batch_size 16 --num_iterations 2 --beta 0.02",
    "mtp": "--max_train_samples 100 --per_device_train_batch_size 4",
    "online_dpo": "--per_device_train_batch_size 16",
    "dynamic_sampling": "--per_device_train_batch_size 16 --max_draws 3",
    "ppo": "--per_device_train_batch_size 16 --num_iterations 2 --beta 0.02",
    "self_distill": "--per_device_train_batch_size 8 --lmbda 0.6 --beta 0.4",
    "distill": f"--teacher_model_name_or_path {teacher()} --per_device_train_batch_size 8 --dataset_name data/sft --lmbda 0.6"
    " --beta 0.4",
}
STAGES = {stage: ["--config", demo(stage.split()[0]), *words.split()] for stage, words in WORDS.items()}


class Stop(Exception):
    pass


def stop_after_save(monkeypatch, at):
    """Let the script fail right after it has written its checkpoint at step `at`."""
    save = module.save_checkpoint

    def save_and_stop(*args, **kwargs):
        written = save(*args, **kwargs)
        if args[5] >= at:
            raise Stop
        return written

    monkeypatch.setattr(module, "save_checkpoint", save_and_stop)


SHORT = ("sft streamed", "dpo")


@pytest.mark.parametrize(
    "stage", [s if s in SHORT else pytest.param(s, marks=pytest.mark.slow) for s in STAGES]
)
def test_resumed_runs_equal_uninterrupted_ones(stage, launch, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_ROWS", 9)
    arguments, stage = [*STAGES[stage], *COMMON, "--logging_steps", "2"], stage.split()[0]
    whole = launch(stage, *arguments, output="whole")
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_after_save(patch, at=3)
        launch(stage, *arguments, output="stopped")
    resumed = launch(stage, *arguments, output="stopped")
    assert read_metrics(resumed) == read_metrics(whole)
    weights = "adapter_model.safetensors" if "--use_peft" in arguments else "model.safetensors"
    for file in [weights, "extra.safetensors"] if (whole / "extra.safetensors").exists() else [weights]:
        one, other = load_file(whole / file), load_file(resumed / file)
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("more", ["", "--use_peft --merge_lora --save_best eval_loss --eval_steps 1"])
def test_a_bfloat16_base_leaves_as_bfloat16(more, launch, tmp_path):
    """Also of a run that was resumed: its checkpoints are in float32."""
    base = shutil.copytree(ROOT / "data" / "base_model", tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    for steps in (2, 3):
        out = launch(
            "sft", *SFT, *more.split(), "--model_name_or_path", base, "--max_steps", steps, "--save_steps", 1
        )
        assert {w.dtype for w in load_file(out / "model.safetensors").values()} == {torch.bfloat16}


def test_an_evaluation_changes_no_dropout(launch, tmp_path):
    model = make_model(tmp_path / "model", "gpt2")
    words = [*STAGES["sft"], *COMMON, "--model_name_or_path", model, "--max_steps", "4", "--eval_steps"]
    plain, evaluated = (train_metrics(launch("sft", *words, every, output=every)) for every in ("0", "2"))
    assert [row["loss"] for row in plain] == [row["loss"] for row in evaluated]


@pytest.mark.parametrize(
    "stage", ["sft", *(pytest.param(stage, marks=pytest.mark.slow) for stage in EXPERIMENTS)]
)
def test_killed_runs_resume_with_the_same_command(stage, launch, tmp_path):
    settings = STAGES.get(stage, STAGES["grpo" if stage == "grpo_ahead" else "sft"])
    arguments = [*settings, *COMMON, *"--max_steps 60 --save_steps 5 --eval_steps 0".split()]
    whole = launch(stage, *arguments, output="whole")
    command = [sys.executable, *words_of(stage), *arguments, "--output_dir", str(tmp_path / "killed")]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ
    )
    deadline = time.monotonic() + 120
    while len(checkpoints(tmp_path / "killed")) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "summary.json").exists()
    resumed = launch(stage, *arguments, output="killed")
    assert read_metrics(resumed) == read_metrics(whole)


def test_args_yaml_repeats_a_run_exactly(launch):
    arguments = [*STAGES["sft"], *COMMON]
    first = launch("sft", *arguments, output="first")
    from_file = launch("sft", "--config", str(first / "args.yaml"), output="from_file")
    assert read_metrics(first) == read_metrics(from_file)


def test_checkpoints_rotate_and_load_with_from_pretrained(launch):
    output = launch("sft", *STAGES["sft"], *COMMON, "--save_steps", "2", "--save_total_limit", "2")
    assert [path.name for path in checkpoints(output)] == ["checkpoint-6", "checkpoint-8"]
    kept = shutil.copytree(output / "checkpoint-6", output.parent / "kept")
    other = launch("sft", *STAGES["sft"], *COMMON, "--resume_from_checkpoint", kept, output="other")
    assert read_metrics(other) == [row for row in read_metrics(output) if row["step"] > 6]
    for folder in (output, checkpoints(output)[-1]):
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        stops = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
        assert set(model.generation_config.eos_token_id) == stops and model.config.use_cache
