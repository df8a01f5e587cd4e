"""Each script, launched as a user launches it, learns on the embedded demo and leaves behind what the README
says."""

import json
import math
import sys

import pytest
from safetensors.torch import load_file
import torch
from transformers import AutoConfig
import yaml

from tests.conftest import (
    EXPERIMENTS,
    demo,
    read_metrics,
    read_rows,
    run_script,
    teacher,
    torchrun,
    train_metrics,
)
from tests.scripts.one_step import ADAMW, assert_adamw, assert_clipped, make_model, watched
from tests.scripts.texts import BASE as BASE_MODEL

# script -> (flags that make the demo short, what must have happened between the first and the last
# evaluation)
RUNS = {
    "pretrain": (
        "--max_steps 100 --eval_steps 100",
        lambda a, b: b["eval_perplexity"] < a["eval_perplexity"] / 50,
    ),
    "sft": (
        "--max_steps 50 --eval_steps 50 --max_eval_samples 60 --eval_max_new_tokens 16",
        lambda a, b: b["eval_loss"] < 1 < 3 < a["eval_loss"],
    ),
    "dpo": (
        "--max_steps 30 --eval_steps 30 --max_eval_samples 60",
        lambda a, b: (
            b["eval_rewards/accuracies"] > 0.85
            and b["eval_rewards/margins"] > 1 > abs(a["eval_rewards/margins"])
        ),
    ),
    "grpo": (
        "--config data/configs/grpo_zero.yaml --max_steps 16 --eval_steps 16",
        lambda a, b: b["eval_exact_number"] > a["eval_exact_number"] + 0.1,
    ),
}
LEFT = {
    "model.safetensors",
    "config.json",
    "tokenizer.json",
    "metrics.jsonl",
    "samples.jsonl",
    "args.yaml",
    "summary.json",
}
LEFT |= {"report.html", "events.jsonl", "generation_config.json"}
LOGGED = {"step", "loss", "grad_norm", "learning_rate", "num_tokens", "tokens_per_second"}
TRAINED = {
    "pretrain": "mean_token_accuracy entropy",
    "sft": "mean_token_accuracy entropy",
    "dpo": "rewards/chosen rewards/rejected rewards/margins rewards/accuracies logps/chosen logps/rejected",
    "grpo": "reward reward_std rewards/exact_number/mean rewards/regex/mean frac_reward_zero_std entropy "
    "clip_ratio/region_mean completions/mean_length completions/clipped_ratio sampling/logp_difference",
}
BASE = "--model_name_or_path data/base_model --eval_steps 0 --logging_steps 1"


@pytest.mark.parametrize(
    "stage", [s if s == "sft" else pytest.param(s, marks=pytest.mark.slow) for s in RUNS]
)
def test_a_script_learns_and_leaves_everything_behind(stage, tmp_path):
    words, learned = RUNS[stage]
    launcher = [sys.executable, "-m", "accelerate.commands.launch"] if stage == "dpo" else [sys.executable]
    folders = ["--output_dir", str(tmp_path / "out"), "--dataset_cache_dir", str(tmp_path / "cache")]
    run = run_script([*launcher, f"train_{stage}.py", *words.split(), *folders])
    assert run.returncode == 0, run.stderr[-6000:]
    assert "eval:" in run.stdout and "saved in" in run.stdout and "->" in run.stdout
    output = tmp_path / "out"
    assert LEFT | {f"train_{stage}.py"} <= {path.name for path in output.iterdir()}
    evaluations = [row for row in read_metrics(output) if any(name.startswith("eval_") for name in row)]
    assert learned(evaluations[0], evaluations[-1]), evaluations
    logged = [row for row in map(json.loads, (output / "metrics.jsonl").open()) if "loss" in row]
    assert all(LOGGED | {*TRAINED[stage].split()} <= row.keys() for row in logged)
    assert [row["step"] for row in logged] == sorted({row["step"] for row in logged})
    sample = json.loads((output / "samples.jsonl").read_text().splitlines()[0])
    assert {"step", "prompt", "completion", "temperature"} <= sample.keys()
    assert yaml.safe_load((output / "args.yaml").read_text())["output_dir"] == str(output)
    if stage == "grpo":
        row = json.loads((output / "completions.jsonl").read_text().splitlines()[0])
        assert {"step", "prompt", "completion", "rewards", "advantage"} <= row.keys()


# What a demo lacks, what makes it short, and what gives the base model rewards that differ.
SAMPLED = "--reward_funcs length:4 --reward_weights 1 --max_completion_length 8"
MORE = {
    stage: f"{SAMPLED} --num_generations 4" for stage in ("grpo", "grpo_ahead", "dynamic_sampling", "tools")
}
MORE |= {
    "online_dpo": SAMPLED,
    "ppo": f"{SAMPLED} --num_iterations 1",
    "rft": "--reward_threshold 0 --max_completion_length 8",
}
MORE["self_distill"] = "--max_completion_length 4"
MORE["distill"] = f"--max_completion_length 4 --teacher_model_name_or_path {teacher()}"
MORE["dpo"] = "--sft_weight 0 --precompute_ref_log_probs false"


@pytest.mark.parametrize(
    "stage", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in EXPERIMENTS)]
)
def test_the_schedule_ends_with_the_run(stage, launch):
    words = f"--config {demo(stage)} {BASE} --learning_rate 3e-4 --lr_scheduler_type linear --warmup_steps 0"
    words += f" --min_lr_ratio 0 --max_steps 3 --max_train_samples 12 --per_device_train_batch_size 4 {MORE.get(stage, '')}"
    output = launch(stage, *words.split(), "--save_steps", "0", "--eval_prompts", "")
    assert [row["learning_rate"] for row in train_metrics(output)] == pytest.approx([3e-4, 2e-4, 1e-4])
    assert (output / "report.html").exists()


# One window after another from the demo's data, with a gradient.
FEW = {
    "pretrain": "--dataset_name data/pretrain/validation.txt --max_length 64 --per_device_train_batch_size 4",
    "sft": "--dataset_name data/sft --max_train_samples 24 --per_device_train_batch_size 4",
    "dpo": "--dataset_name data/dpo --max_train_samples 24 --per_device_train_batch_size 4",
    "grpo": "--dataset_name data/grpo --reward_funcs length:4 --num_generations 4 --max_completion_length 8",
}


@pytest.mark.parametrize("stage", FEW)
def test_adamw_has_the_settings_that_were_asked_for(stage, launch):
    """Betas, epsilon, decay and the rate of each step are in the weights; a gradient that is too long is
    clipped."""
    free = watched(launch, stage, BASE_MODEL, *FEW[stage].split(), *ADAMW, "--max_steps", 6)
    assert_adamw(free)
    words = [*FEW[stage].split(), "--max_steps", 1, "--max_grad_norm", 0.05]
    assert_clipped(watched(launch, stage, BASE_MODEL, *words, output="clipped"), free, 0.05)


# Windows of 8 examples of uneven length; the second one of SFT and DPO holds 3, so that the second process
# has one at most. Of DPO's evaluation it has none.
STEP = {
    "pretrain": "--config data/configs/pretrain.yaml --packing_strategy bfd --max_train_samples 60 --max_length 64",
    "sft": "--config data/configs/sft.yaml --max_train_samples 11 --num_train_epochs 1 --max_steps -1",
    "dpo": "--config data/configs/dpo.yaml --max_train_samples 11 --num_train_epochs 1 --max_steps -1 --max_eval_samples 1"
    " --auto_micro_batch",
    "grpo": "--config data/configs/grpo.yaml --max_train_samples 20 --num_generations 4 --beta 0.02 --num_iterations 2 --temperature 0.9",
}


# Runs one script after another in the same two processes.
IN_TURN = """
import importlib, json, os, sys
sys.path.insert(0, os.getcwd())
from common.command_line import parse_args
from common.errors import UserError
from torch.optim.optimizer import register_optimizer_step_post_hook
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
Accelerator.end_training = lambda self: None  # the next script goes on with the same process group
for stage, words in json.loads(sys.argv[1]).items():
    script = importlib.import_module(f"train_{stage}")
    script.main(parse_args(script.Args, None, None, words))
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
drift = lambda optimizer, *_: optimizer.param_groups[0]["params"][0].data.add_(1e-6 * int(os.environ["RANK"]))
register_optimizer_step_post_hook(drift)
script = importlib.import_module("train_sft")
try:
    script.main(parse_args(script.Args, None, None, json.loads(sys.argv[2])))
except UserError as error:
    print("refused:", error, flush=True)
os._exit(0)  # as `launch` does: a process group that Python takes down may end in a signal
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{script: the model that it starts with}; one has experts, which are balanced over all processes."""
    experts = tmp_path_factory.mktemp("moe") / "moe"
    make_model(experts, "moe", output_router_logits=True, router_aux_loss_coef=0.3)
    return dict.fromkeys(STEP, "data/base_model") | {"pretrain": str(experts)}


@pytest.fixture(scope="module")
def on_two_processes(models, tmp_path_factory):
    """{script: the output folder of two steps on two processes}; all in one launch, as starting takes the
    longest. Weights that drift apart are not saved."""
    folder = tmp_path_factory.mktemp("two")
    words = {stage: [*steps(stage, models, 2, 2), "--output_dir", f"{folder}/{stage}"] for stage in STEP}
    words = {stage: [*given, "--dataset_cache_dir", f"{folder}/cache"] for stage, given in words.items()}
    (folder / "in_turn.py").write_text(IN_TURN)
    drifts = [*words["sft"], "--output_dir", f"{folder}/drifts"]
    run = run_script(
        [*torchrun(), str(folder / "in_turn.py"), json.dumps(words), json.dumps(drifts)], timeout=200
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "refused: step 1: the weights differ between the processes" in run.stdout
    return {stage: folder / stage for stage in STEP}


def steps(stage, models, batch, accumulation):
    sizes = f"--per_device_train_batch_size {batch} --gradient_accumulation_steps {accumulation}"
    evaluation = "--eval_steps 2 --max_eval_samples 5 --per_device_eval_batch_size 2 --eval_max_new_tokens 4"
    words = f"{BASE} --model_name_or_path {models[stage]} --max_steps 2 {evaluation} {STEP[stage]} --warmup_steps 0 {sizes}"
    return [*words.split(), "--save_steps", "1" if stage == "sft" else "0"]


@pytest.mark.parametrize("stage", STEP)
def test_two_processes_take_the_steps_of_one(stage, launch, models, on_two_processes):
    """Metrics, evaluations and weights: 4 + 4 examples, in micro-batches of 2, are one window of 8. One
    process goes on from what two have saved."""
    words = steps(stage, models, 8, 1)
    whole, parts = launch(stage, *words), on_two_processes[stage]
    assert json.loads((parts / "summary.json").read_text())["processes"] == 2
    for one, two in zip(read_metrics(whole), read_metrics(parts), strict=True):
        assert one.keys() == two.keys() and two == pytest.approx(one, rel=2e-4, abs=2e-5)
    one, two = (load_file(folder / "model.safetensors") for folder in (whole, parts))
    moved = max(
        (one[name] - value).abs().max()
        for name, value in load_file(f"{models[stage]}/model.safetensors").items()
    )
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=0.02 * moved.item())
    if stage == "sft":
        resumed = launch(stage, *words, "--resume_from_checkpoint", parts / "checkpoint-1", output="resumed")
        (*_, last), (*_, last_resumed) = train_metrics(whole), train_metrics(resumed)
        assert last_resumed == pytest.approx(last, rel=2e-4, abs=2e-5)


FIRST_LOSS = {"dpo": math.log(2), "kto": 0.5}  # where the reference is the model without its adapter


@pytest.mark.parametrize(
    "stage", ["sft", "dpo", "grpo", *(pytest.param(name, marks=pytest.mark.slow) for name in EXPERIMENTS)]
)
def test_adapters_are_trained_with_recomputation(stage, launch):
    """The adapter is what is saved in checkpoints, and at the end where it is not merged."""
    pytest.importorskip("peft")
    words = f"--config {demo(stage)} {BASE} --max_steps 4 --save_steps 2 --warmup_steps 0 --learning_rate 1e-2 --use_peft"
    words += f" --lora_r 4 --gradient_checkpointing --max_train_samples 16 --per_device_train_batch_size 4 {MORE.get(stage, '')}"
    merged = ["--merge_lora"] if stage in EXPERIMENTS else []
    output = launch(stage, *words.split(), *merged)
    rows = train_metrics(output)
    adapters = [load_file(output / f"checkpoint-{step}" / "adapter_model.safetensors") for step in (2, 4)]
    assert any(not torch.equal(adapters[0][name], weights) for name, weights in adapters[1].items())
    assert rows[0]["loss"] == pytest.approx(FIRST_LOSS.get(stage, rows[0]["loss"]), abs=1e-5)
    assert (output / "model.safetensors").exists() == bool(merged)


QUESTION = "What is 1+1?"
ROWS = {
    "pretrain": ({"text": "one two three four " + "字" * 900}, "one two three four " + "字" * 81),
    "sft": ({"instruction": QUESTION, "output": "Answer: 2"}, [{"role": "user", "content": QUESTION}]),
    "dpo": (
        {side: f"\n\nHuman: {QUESTION}\n\nAssistant: {n}" for side, n in (("chosen", 2), ("rejected", 3))},
        [{"role": "user", "content": QUESTION}],
    ),
}


@pytest.mark.parametrize("stage", ROWS)
def test_without_prompts_the_first_rows_are_completed(stage, launch, tmp_path, capsys):
    """But not those that are too long for the model; where none has a prompt, that is said."""
    row, prompt = ROWS[stage]
    text = json.dumps(row)
    (tmp_path / "rows.jsonl").write_text(text.replace(QUESTION, "Say 1. " * 300) + f"\n{text}" * 8)
    words = f"{BASE} --max_steps 2 --max_length 64 --eval_steps 2 --num_samples 2 --eval_max_new_tokens 4"
    output = launch(stage, *words.split(), "--dataset_name", tmp_path / "rows.jsonl")
    samples = read_rows(output / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [0, 0, 2, 2] and samples[0]["prompt"] == prompt
    assert "no samples: " not in capsys.readouterr().out
    if stage == "sft":
        (tmp_path / "rows.jsonl").write_text('{"text": "plain"}\n' * 8)
        launch(stage, *words.split(), "--dataset_name", tmp_path / "rows.jsonl", output="plain")
        assert "no samples: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "kind, stages", [("rwkv", ["sft"]), pytest.param("lfm2", [*RUNS], marks=pytest.mark.slow)]
)
def test_a_model_with_a_state_trains_and_is_sampled(kind, stages, launch, tmp_path):
    """One stage after the other, from the model that the last one saved."""
    model = make_model(tmp_path / kind, kind, **{"lfm2": {"max_position_embeddings": 1024}}.get(kind, {}))
    few = "--max_steps 3 --eval_steps 3 --eval_max_new_tokens 2 --max_train_samples 16 --max_eval_samples 2"
    few += " --logging_steps 1 --save_steps 0 --learning_rate 1e-2 --per_device_train_batch_size 4"
    for stage in stages:
        more = {"pretrain": "--max_length 64", "grpo": "--max_completion_length 8 --num_generations 4"}.get(
            stage, ""
        )
        words = [
            "--dataset_name",
            "data/pretrain/train.txt" if stage == "pretrain" else f"data/{stage}",
            *more.split(),
        ]
        output = launch(stage, "--model_name_or_path", model, *few.split(), *words, output=stage)
        assert len(train_metrics(output)) == 3 and (output / "samples.jsonl").read_text()
        assert (
            AutoConfig.from_pretrained(output).architectures
            == AutoConfig.from_pretrained(model).architectures
        )
        model = output


# --- mixed precision ----------------------------------------------------------------------------------------

# One window is all of the data and of the evaluation, and nothing is learned.
STILL = "--learning_rate 0 --max_steps 1 --eval_steps 2 --num_samples 0 --max_train_samples 4 --max_eval_samples 4"
STILL += " --per_device_train_batch_size 4 --per_device_eval_batch_size 4"
IN_HALF = {
    "dpo": "--dataset_name data/dpo --eval_dataset_name data/dpo/train.jsonl",
    "grpo": f"{FEW['grpo']} --beta 0.1 --epsilon 0 --num_iterations 2 --max_steps 2 --max_train_samples 2000"
    " --eval_dataset_name data/grpo --max_eval_samples 40 --per_device_train_batch_size 8",
}


@pytest.mark.parametrize("stage", IN_HALF)
def test_in_bfloat16_everything_is_rounded_alike(stage, launch, monkeypatch):
    """Training, evaluation, the old model and the reference: what is computed twice is the same twice, and
    none of it is what float32 gives."""
    words = [*BASE.split(), *STILL.split(), *IN_HALF[stage].split()]
    whole = launch(stage, *words, output="whole")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    half = launch(stage, *words, output="half")
    same, rounded = {}, 0
    for row, in_float32 in zip(read_metrics(half), read_metrics(whole), strict=True):
        assert row.keys() == in_float32.keys()
        for name, value in row.items():
            plain = name.removeprefix("eval_")
            if plain.startswith(("rewards/chosen", "rewards/rejected", "clip_ratio", "kl", "frac_idle")):
                assert value == 0
            elif plain in ("loss", "entropy", "logps/chosen", "nll_loss", "length"):
                assert value == pytest.approx(same.setdefault(plain, value), rel=1e-6)
                rounded += value != pytest.approx(in_float32[name], rel=1e-5)
    assert rounded >= 4
