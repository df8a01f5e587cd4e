"""A mistake of the user gives one clear line, exit code 1 and no traceback."""

import importlib.util
import json
import sys

from common.errors import UserError
from tests.conftest import run_script, train_metrics

import pytest

SFT = ["--config", "data/configs/sft.yaml", "--model_name_or_path", "data/base_model", "--eval_steps", "0"]
SFT += [
    "--eval_prompts",
    "",
    "--max_steps",
    "2",
    "--per_device_train_batch_size",
    "2",
    "--save_steps",
    "0",
    "--logging_steps",
    "1",
]
GRPO = [
    "--config",
    "data/configs/grpo.yaml",
    "--model_name_or_path",
    "data/base_model",
    "--eval_steps",
    "0",
    "--max_steps",
    "1",
]
GRPO += ["--per_device_train_batch_size", "8", "--eval_prompts", ""]
CHAT = {"messages": [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "Answer: 2"}]}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def refused(launch, stage, arguments, *words):
    with pytest.raises(UserError) as error:
        launch(stage, *arguments)
    line = str(error.value)
    assert "\n" not in line and all(word in line for word in words), line


def test_a_script_ends_with_one_line_and_exit_code_1(tmp_path):
    for arguments in (["--dataset_name", "nowhere.jsonl"], ["--learning_rat", "1"]):
        command = [sys.executable, "train_sft.py", "--output_dir", str(tmp_path / "out"), *arguments]
        run = run_script(command)
        assert run.returncode == 1 and "Traceback" not in run.stderr
        assert len([line for line in run.stderr.splitlines() if line.startswith("error: ")]) == 1


def test_flags_and_keys_are_checked(launch, tmp_path):
    refused(launch, "sft", ["--learning_rat", "1"], "unknown flag --learning_rat", "did you mean --learning_rate")
    refused(launch, "sft", ["--learning_rate", "fast"], "learning_rate", "invalid float")
    refused(launch, "sft", ["--config", "nowhere.yaml"], "nowhere.yaml", "no such file")
    (tmp_path / "a.yaml").write_text("learning_rte: 1\n")
    refused(launch, "sft", ["--config", str(tmp_path / "a.yaml")], "a.yaml", "unknown key learning_rte", "learning_rate")
    refused(launch, "sft", [*SFT, "--train_on", "some"], "train_on", "all_turns")
    refused(launch, "sft", [*SFT, "--lr_scheduler_type", "up"], "lr_scheduler_type", "cosine")
    refused(launch, "sft", [*SFT, "--dtype", "int8"], "dtype", "bfloat16")
    refused(launch, "sft", [*SFT, "--activation_offloading"], "--activation_offloading", "CUDA", "cpu")
    refused(launch, "dpo", [*SFT[2:], "--dataset_name", "data/dpo", "--loss_type", "kto"], "loss_type", "sigmoid")
    refused(
        launch,
        "dpo",
        [*SFT[2:], "--dataset_name", "data/dpo", "--loss_type", "ipo", "--label_smoothing", "0.1"],
        "smoothing",
    )
    dpo = [*SFT[2:], "--dataset_name", "data/dpo", "--loss_weights", "0.8", "0.2"]
    refused(launch, "dpo", dpo, "--loss_weights: 2 for 1 --loss_type")


def test_launches_that_are_not_what_they_seem_are_refused(launch, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_USE_FSDP", "true")  # Accelerate leaves it out on a CPU, in silence
        refused(launch, "sft", SFT, "asks for FSDP", "not in use on cpu")
    if importlib.util.find_spec("deepspeed") is None:
        with monkeypatch.context() as patch:
            patch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
            refused(launch, "sft", SFT, "DeepSpeed", "pip install deepspeed")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # what `accelerate launch --cpu --num_processes 2` sets
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    refused(launch, "sft", SFT, "asked for several CPU processes and started one", "cpu_ddp.yaml")


def test_trackers_must_be_known_and_installed(launch):
    refused(launch, "sft", [*SFT, "--report_to", "nothing"], "report_to nothing", "tensorboard")
    refused(launch, "sft", [*SFT, "--report_to", "swanlab"], "pip install swanlab")


def test_data_is_checked(launch, tmp_path):
    empty, columns = tmp_path / "empty.jsonl", tmp_path / "columns.jsonl"
    empty.write_text("")
    write(columns, [{"question": "1+1?", "solution": "2"}])
    refused(launch, "sft", [*SFT, "--dataset_name", "nowhere.jsonl"], "nowhere.jsonl", "no such file")
    refused(launch, "sft", [*SFT, "--dataset_name", str(empty)], "empty.jsonl", "empty")
    refused(launch, "sft", [*SFT, "--dataset_name", str(columns)], "columns.jsonl:1", "question, solution", "messages")
    refused(launch, "dpo", [*SFT[2:], "--dataset_name", str(columns)], "chosen", "rejected", "question, solution")
    refused(launch, "grpo", [*GRPO, "--dataset_name", str(columns)], "prompt", "question, solution", "--columns")
    refused(launch, "sft", [*SFT, "--model_name_or_path", "no/such-model"], "no/such-model")


def test_rows_without_a_trained_token_are_left_out_and_counted(launch, tmp_path, capsys):
    long = {"messages": [{"role": "user", "content": "1+1=2. " * 200}, CHAT["messages"][1]]}
    data = write(tmp_path / "some.jsonl", [CHAT, {"messages": CHAT["messages"][:1]}, long])
    output = launch("sft", *SFT, "--dataset_name", data)
    said = capsys.readouterr().out
    assert "1 of 3 rows of some left out: no assistant turn" in said and "some.jsonl:2" in said
    assert "1 of 3 rows of some left out: no trained token within max_length 256" in said
    assert len(train_metrics(output)) == 2
    none = write(tmp_path / "none.jsonl", [{"messages": CHAT["messages"][:1]}])
    refused(
        launch, "sft", [*SFT, "--dataset_name", none, "--output_dir", str(tmp_path / "b")], "none of the 1 rows", "assistant"
    )


def test_grpo_settings_are_checked(launch, tmp_path):
    refused(launch, "grpo", [*GRPO, "--num_generations", "1"], "--num_generations 1 is out of range", "[2, 1e5]")
    refused(launch, "grpo", [*GRPO, "--loss_type", "cispo"], "--epsilon_high, for example 5")
    refused(launch, "grpo", [*GRPO, "--loss_type", "cispo", "--epsilon_high", "0.28"], "--epsilon_high, for example 5")
    refused(launch, "grpo", [*GRPO, "--num_generations", "3"], "num_generations 3", "does not divide the 8 completions")
    refused(launch, "grpo", [*GRPO, "--temperature", "0"], "temperature")
    refused(launch, "grpo", [*GRPO, "--reward_weights", "1", "2", "3"], "--reward_weights: 3 for 2")
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def fails(completions, **kw): return [1 / 0 for _ in completions]\n"
        "def short(completions, **kw): return [1.0]\n"
        "def nan(completions, **kw): return [float('nan') for _ in completions]\n"
        "def none(completions, **kw): return [None for _ in completions]\n"
    )
    one = [*GRPO, "--reward_weights", "1", "--reward_funcs"]
    refused(launch, "grpo", [*one, f"{rewards}:fails"], "reward function fails", "ZeroDivisionError")
    refused(launch, "grpo", [*one, f"{rewards}:short"], "reward function short", "1 values for 8")
    refused(launch, "grpo", [*one, f"{rewards}:nan"], "reward function nan", "finite")
    refused(launch, "grpo", [*one, f"{rewards}:none"], "all returned None")
    refused(launch, "grpo", [*one, f"{rewards}:absent"], "no function absent")
