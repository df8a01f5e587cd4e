"""FSDP2 over two processes gives what one process gives: losses, samples, checkpoints, exports.

Accelerate takes FSDP for GPUs only. The launcher tells it that the two CPU processes are such, and has the LM
head run in chunks, too, which the other side of the comparisons does not.
"""

import shutil

import pytest
from safetensors.torch import load_file
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import ROOT, assert_same, losses, read_metrics, read_rows, run_script, teacher, torchrun
from tests.run.fsdp import LAUNCHER
from tests.scripts.one_step import make_model

pytestmark = pytest.mark.slow

COMMON = "--model_name_or_path data/base_model --max_steps 3 --save_steps 2 --eval_steps 1 --logging_steps 1"
COMMON += " --max_grad_norm 1.0 --lr_scheduler_type constant --max_eval_samples 7 --eval_max_new_tokens 12"
STAGES = {
    "sft": "--config data/configs/sft.yaml --max_train_samples 20",
    "dpo": "--config data/configs/dpo.yaml --max_train_samples 20 --precompute_ref_log_probs false --gradient_checkpointing",
    "kto": "--config experiments/configs/kto.yaml --max_train_samples 20",
    "ema": "--config experiments/configs/ema.yaml --max_train_samples 20 --ema_decay 0.6",
    "tools": "--config experiments/configs/tools.yaml --num_generations 4 --reward_funcs length:4",
    "grpo": "--config data/configs/grpo.yaml --num_generations 4 --num_iterations 2 --beta 0.02",
    "ppo": "--config experiments/configs/ppo.yaml --num_iterations 2 --beta 0.02",
    "distill": "--config experiments/configs/distill.yaml --dataset_name data/sft --lmbda 0.6 --beta 0.4"
    f" --teacher_model_name_or_path {teacher()}",
}


@pytest.fixture
def words(tmp_path):
    """words(stage): the arguments, with a single prompt to complete, so that the second process has none."""
    prompt = (ROOT / "data/prompts/chat_validation.jsonl").read_text().splitlines()[0]
    (tmp_path / "prompt.jsonl").write_text(prompt + "\n")
    return lambda stage: [
        *STAGES[stage].split(),
        *COMMON.split(),
        "--eval_prompts",
        str(tmp_path / "prompt.jsonl"),
    ]


@pytest.fixture
def sharded(tmp_path, token_cache):
    """sharded(stage, *arguments): train_<stage>.py under FSDP2, two micro-batches on each process, of two
    conversations; or under HSDP, two copies on two processes each, of one. first: code that is run before; it
    may kill, and then `died` is to be True."""

    def launch(
        stage,
        *argv,
        output="sharded",
        mixed_precision="no",
        first="",
        config="fsdp2",
        processes=0,
        died=False,
        **environ,
    ):
        launcher = tmp_path / "launcher.py"
        launcher.write_text(LAUNCHER)
        processes = processes or (4 if config == "hsdp" else 2)
        command = [*torchrun(processes), str(launcher), stage, mixed_precision, *argv]
        command += [
            "--per_device_train_batch_size",
            str(4 // processes),
            "--gradient_accumulation_steps",
            "2",
        ]
        command += ["--output_dir", str(tmp_path / output), "--dataset_cache_dir", str(token_cache)]
        run = run_script(command, timeout=240, FIRST=first, CONFIG=config, **environ)
        assert (run.returncode != 0) == died, run.stderr[-6000:]
        return tmp_path / output

    return launch


def weights(folder):
    """As from_pretrained reads them, and as the file has them."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model.state_dict(), load_file(folder / "model.safetensors")


def assert_same_model(one, other):
    for a, b in zip(weights(one), weights(other), strict=True):
        assert a.keys() == b.keys()
        assert all(
            a[name].dtype == b[name].dtype and torch.allclose(a[name], b[name], rtol=0, atol=2e-5)
            for name in a
        )


def evaluations(output):
    return [
        {k: v for k, v in row.items() if k.startswith("eval_")}
        for row in read_metrics(output)
        if "loss" not in row
    ]


def assert_same_run(one, two):
    assert_same(losses(one), losses(two))
    found = [evaluations(one), evaluations(two)]
    for run in found:  # DPO's model is the reference still: rounding decides which reward is larger
        run[0].pop("eval_rewards/accuracies", None)
    for a, b in zip(*found, strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)
    assert read_rows(one / "samples.jsonl") == read_rows(two / "samples.jsonl")
    for folder in ("", "checkpoint-2"):
        assert_same_model(one / folder, two / folder)
    if (one / "completions.jsonl").exists():
        tokens = [
            [(row["prompt"], row["completion"]) for row in read_rows(run / "completions.jsonl")]
            for run in (one, two)
        ]
        assert tokens[0] == tokens[1] and len({len(text) for _, text in tokens[0]}) > 2  # of many lengths


@pytest.mark.parametrize(("stage", "config"), [*((stage, "fsdp2") for stage in STAGES), ("sft", "hsdp")])
def test_losses_samples_checkpoint_and_export_are_those_of_one_process(stage, config, launch, sharded, words):
    one = launch(stage, *words(stage), "--per_device_train_batch_size", "8", output="one")
    two = sharded(stage, *words(stage), config=config)
    assert_same_run(one, two)
    for folder in ("", "checkpoint-2") if stage == "ppo" else ():
        a, b = (load_file(run / folder / "extra.safetensors") for run in (one, two))  # the critic
        assert a.keys() == b.keys() and all(torch.allclose(a[name], b[name], rtol=0, atol=1e-5) for name in a)


def test_a_reward_model_is_that_of_one_process(launch, sharded):
    words = [*"--config experiments/configs/reward.yaml --max_train_samples 20".split(), *COMMON.split()]
    one = launch("reward", *words, "--per_device_train_batch_size", "8", output="one")
    two = sharded("reward", *words)
    assert_same(losses(one), losses(two))
    for a, b in zip(evaluations(one), evaluations(two), strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)
    a, b = (load_file(output / "classifier" / "model.safetensors") for output in (one, two))
    assert a.keys() == b.keys() and a["score.weight"].abs().max() > 1e-4
    assert all(torch.allclose(a[name], b[name], rtol=0, atol=1e-5) for name in a)


def assert_goes_on(train, *words, **options):
    """A run that was stopped after its checkpoint of step 2 is in the end the one that was not."""
    whole = train(*words, **options)
    again = whole.parent / "again"
    shutil.copytree(whole, again)
    for name in ("summary.json", "model.safetensors"):
        (again / name).unlink()
    train(*words, output="again", **options)
    assert read_metrics(whole) == read_metrics(again)
    ours, theirs = weights(whole)[0], weights(again)[0]
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("stage", "config"), [("sft", "fsdp2"), ("ema", "fsdp2"), ("sft", "hsdp")])
def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(stage, config, sharded, words):
    """ema has a sharded average by run.keep."""
    assert_goes_on(sharded, stage, *words(stage), config=config)


def test_log_probabilities_and_gradients_are_not_rounded_with_bf16(launch, sharded, words):
    """The model runs in bf16 and what it returns is float32, so that sampler and trainer nearly agree."""
    one = launch("sft", *words("sft"), "--per_device_train_batch_size", "8", output="one")
    two = sharded("sft", *words("sft"), mixed_precision="bf16")
    for (_, loss, norm), (_, loss2, norm2) in zip(losses(one)[:2], losses(two)[:2], strict=True):
        assert loss == pytest.approx(loss2, rel=0.01) and norm == pytest.approx(norm2, rel=0.03)
    two = sharded("grpo", *words("grpo"), mixed_precision="bf16", output="grpo")
    assert read_metrics(two)[1]["sampling/logp_difference"] < 0.01


def test_an_untied_head_is_saved_beside_the_embedding(launch, sharded, words, tmp_path):
    argv = [
        *words("sft"),
        "--model_name_or_path",
        make_model(tmp_path / "untied", max_position_embeddings=512),
    ]
    one, two = launch("sft", *argv, "--per_device_train_batch_size", "8", output="one"), sharded("sft", *argv)
    assert_same(losses(one), losses(two))
    for folder in ("", "checkpoint-2"):
        a, b = (load_file(run / folder / "model.safetensors") for run in (one, two))
        assert a.keys() == b.keys() and all(torch.allclose(a[name], b[name], rtol=0, atol=1e-5) for name in a)
        assert not torch.equal(b["lm_head.weight"], b["model.embed_tokens.weight"])


def test_a_reference_without_adapter_scores_pairs_in_step(launch, sharded, words):
    """Each pass gathers the weights: as many on each process, though 17 pairs fill 2 and 1 batches."""
    lora = "--use_peft --lora_r 4 --precompute_ref_log_probs true --max_train_samples 17".split()
    lora += ["--per_device_eval_batch_size", "8"]
    one = launch("dpo", *words("dpo"), *lora, "--per_device_train_batch_size", "8", output="one")
    two = sharded("dpo", *words("dpo"), *lora)
    assert_same(losses(one), losses(two), norm_tolerance=1e-4)


@pytest.mark.parametrize("merge", [False, True])
def test_lora_adapters_are_those_of_one_process(merge, launch, sharded, words):
    lora = [*"--use_peft --lora_r 4 --merge_lora".split(), str(merge)]
    if not merge:  # from an adapter, which is the reference, too
        few = "--max_steps 2 --learning_rate 1e-3 --eval_steps 0".split()
        lora += ["--model_name_or_path", str(launch("sft", *words("sft"), *lora, *few, output="start"))]
    one = launch("grpo", *words("grpo"), *lora, "--per_device_train_batch_size", "8", output="one")
    two = sharded("grpo", *words("grpo"), *lora)
    # the gradient is what is left of terms that cancel
    assert_same(losses(one), losses(two), norm_tolerance=1e-4)
    for file in (
        "checkpoint-2/adapter_model.safetensors",
        "model.safetensors" if merge else "adapter_model.safetensors",
    ):
        a, b = load_file(one / file), load_file(two / file)
        assert a.keys() == b.keys() and all(torch.allclose(a[name], b[name], atol=1e-5) for name in a)


def test_muon_turns_whole_matrices_and_no_shards_of_them(launch, sharded, words):
    """Its products are in bfloat16, and in another order: a few percent of an update (of shards it would be
    half of it)."""
    argv = [*words("sft"), *"--optim muon --learning_rate 1e-3".split()]
    one, two = launch("sft", *argv, "--per_device_train_batch_size", "8", output="one"), sharded("sft", *argv)
    assert_same(losses(one), losses(two), tolerance=0.02)
    first = load_file(ROOT / "data" / "base_model" / "model.safetensors")
    a, b = (load_file(folder / "model.safetensors") for folder in (one, two))
    for name in (name for name in a if "proj" in name):
        update, other = a[name] - first[name], b[name] - first[name]
        assert (update - other).norm() < 0.1 * update.norm(), name
    resumed = (
        sharded("sft", *argv, "--max_steps", "2", output="resumed"),
        sharded("sft", *argv, output="resumed"),
    )
    c = load_file(resumed[1] / "model.safetensors")
    assert all(torch.allclose(b[name], c[name], atol=1e-5) for name in b)
