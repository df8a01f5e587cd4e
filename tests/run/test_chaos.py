"""No run is lost: killed with SIGKILL anywhere, and started again with the same command, it ends as if
nothing had been.

`pytest -m slow tests/run/test_chaos.py` kills each stage in twenty cases, up to three times each, and some by
the clock.
"""

import importlib.util
import json
import os
from pathlib import Path
import random
import signal
import time

import pytest
import torch
import transformers

from tests.conftest import CLOCK, read_metrics
from tests.run.chaos import attempt

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.slow

COMMON = "--logging_steps 1 --eval_steps 4 --save_steps 3 --max_eval_samples 6 --eval_max_new_tokens 4 --learning_rate 3e-3"
COMMON += " --lr_scheduler_type linear --per_device_train_batch_size 4 --num_samples 2 --dataset_num_proc 1"
SFT = "--max_length 128 --eval_reward_funcs length:8"
DPO = "--max_length 128 --beta 0.3"
GRPO = "--max_prompt_length 64 --max_completion_length 10 --num_generations 4 --per_device_train_batch_size 8"
GRPO += " --dataset_name data/grpo --max_train_samples 6 --reward_funcs {rewards} length:8"
# name: (stage, arguments, steps of an epoch). {llama}, {gpt2}: tiny models, the second with dropout.
CASES = {
    "pretrain, epochs, dropout": (
        "pretrain",
        "--model_name_or_path {gpt2} --dataset_name data/pretrain --max_train_samples 60 --max_length 64"
        " --packing_strategy bfd --num_train_epochs 2 --gradient_accumulation_steps 2",
        3,
    ),
    "sft, packing, LoRA with dropout, several sources": (
        "sft",
        f"{SFT} --model_name_or_path {{llama}} --dataset_name data/sft data/sft/validation.jsonl --dataset_weights 0.8 0.2"
        " --max_train_samples 20 --packing --use_peft --lora_r 4 --lora_dropout 0.2 --gradient_accumulation_steps 2"
        " --num_train_epochs 3",
        3,
    ),
    "sft, epochs, dropout, save_best": (
        "sft",
        f"{SFT} --model_name_or_path {{gpt2}} --dataset_name data/sft --max_train_samples 14 --num_train_epochs 3"
        " --eval_steps 2 --save_best eval_loss --turn_dropping 0.5 --curriculum_column length",
        3,
    ),
    "dpo, epochs, reference scored once, save_best": (
        "dpo",
        f"{DPO} --model_name_or_path {{gpt2}} --dataset_name data/dpo --max_train_samples 14 --num_train_epochs 3"
        " --precompute_ref_log_probs --eval_steps 2 --save_best eval_loss --sft_weight 0.5",
        3,
    ),
    "grpo, rollouts used again, KL": (
        "grpo",
        f"{GRPO} --model_name_or_path {{llama}} --num_iterations 2 --steps_per_generation 2 --beta 0.04 --max_steps 12"
        " --save_steps 4",
        6,
    ),
    "grpo, ahead, tokens of high entropy": (
        "grpo_ahead",
        f"{GRPO} --model_name_or_path {{llama}} --rollout_ahead 2 --importance_cap 1.01 --top_entropy_quantile 0.5 --max_steps 12"
        " --save_steps 2 --num_iterations 2",
        6,
    ),
    "sft, a base in 4 bits, DoRA": (
        "sft",
        f"{SFT} --model_name_or_path {{llama}} --dataset_name data/sft --max_train_samples 14 --num_train_epochs 3"
        " --use_peft --lora_r 4 --lora_dropout 0.2 --use_rslora --load_in_4bit --optim adamw_8bit",
        3,
    ),
}
if importlib.util.find_spec("bitsandbytes") is None:
    del CASES["sft, a base in 4 bits, DoRA"]
KINDS = ("step", "save", "evaluation", "line", "epoch", "rollout", "prune", "page")
STAGES = ("pretrain", "sft", "dpo", "grpo")
EACH = int(os.environ.get("TESTS_CHAOS", "20"))  # killed runs of each stage


@pytest.fixture(scope="session")
def whole(tmp_path_factory, token_cache):
    """whole(case): the command, the uninterrupted run, and how many moments of each kind it passes, in how
    many seconds."""
    folder, known = tmp_path_factory.mktemp("whole"), {}
    (folder / "rewards.py").write_text(
        "def letters(completions, **columns):\n"
        "    return [len(set(text if isinstance(text, str) else text[0]['content'])) for text in completions]\n"
    )
    names = {"rewards": f"{folder}/rewards.py:letters"}
    tokenizer = transformers.AutoTokenizer.from_pretrained("data/base_model")
    size = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    llama = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        **size,
    )
    gpt2 = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=256, **size)  # dropout of 0.1
    for name, config in (("llama", llama), ("gpt2", gpt2)):
        torch.manual_seed(0)
        names[name] = str(folder / name)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(names[name])
        tokenizer.save_pretrained(names[name])

    def run_once(case: str):
        if case not in known:
            stage, text, epoch = CASES[case]
            words = [*COMMON.split(), *text.format(**names).split(), "--dataset_cache_dir", str(token_cache)]
            output, log = folder / case.replace(" ", "_"), folder / f"{case}.log"
            # The tokenised data first, so that every run finds it, and none writes it
            for more in (["--dry_run"], []):
                began = time.monotonic()
                code = attempt(stage, [*words, *more, "--output_dir", str(output)], log, epoch=epoch)
                assert code == 0, log.read_text()[-4000:]
            moments = json.loads(log.with_suffix(".json").read_text())
            assert moments.keys() == set(KINDS) - (set() if "grpo" in stage else {"rollout"}), moments
            known[case] = words, output, moments, time.monotonic() - began
        return known[case]

    return run_once


def run_through(case: str, whole, folder: Path, seed: int, kind: str | None, most: int = 3) -> int:
    """Kill, start again, up to `most` times, then let it end; returns the kills. kind None: the first one by
    the clock."""
    words, _, moments, seconds = whole(case)
    stage, _, epoch = CASES[case]
    rng, kills = random.Random(f"{case} {kind} {seed}"), 0
    wanted = rng.randint(1, most)
    for _ in range(most + 1):
        doomed = {}
        if kills < wanted:
            kind = kind if kills == 0 else rng.choice([*moments, None])
            # A run that goes on passes fewer moments than a whole one: the first few of them are likely to be
            # there.
            least = moments.get(kind, 0) if kills == 0 else -(-moments.get(kind, 0) // 2)
            doomed = (
                {"kind": kind, "at": rng.randint(1, least)} if kind else {"seconds": rng.random() * seconds}
            )
        code = attempt(
            stage, [*words, "--output_dir", str(folder / "out")], folder / "out.log", epoch=epoch, **doomed
        )
        if code == 0:
            break
        assert code == -signal.SIGKILL, (folder / "out.log").read_text()[-4000:]
        kills += 1
    assert code == 0
    return kills


def assert_nothing_is_lost(case: str, whole, folder: Path) -> None:
    _, one, _, _ = whole(case)
    other = folder / "out"
    rows = read_metrics(other)
    assert rows == read_metrics(one)
    for kind in (lambda row: "loss" in row, lambda row: any(name.startswith("eval_") for name in row)):
        steps = [row["step"] for row in rows if kind(row)]
        assert steps == sorted(set(steps)) and len(steps) > 1
    trained = [row["step"] for row in rows if "loss" in row]
    assert trained == list(range(1, trained[-1] + 1))
    not_exact = ("metrics.jsonl", "events.jsonl")  # which have the clock in them, and tell of the kills
    exact = [
        path.name
        for path in one.iterdir()
        if path.suffix in (".safetensors", ".jsonl") and path.name not in not_exact
    ]
    assert {"samples.jsonl"} < set(exact) and any(name.endswith(".safetensors") for name in exact)
    for name in exact:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    summaries = [json.loads((output / "summary.json").read_text()) for output in (one, other)]
    for summary in summaries:
        summary["final"] = {name: value for name, value in summary["final"].items() if name not in CLOCK}
    assert all(
        summaries[0][name] == summaries[1][name]
        for name in summaries[0].keys() - {"seconds", "peak_memory_gib"}
    )
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}


@pytest.mark.parametrize("seed", range(EACH))
@pytest.mark.parametrize("stage", STAGES)
def test_runs_killed_anywhere_lose_nothing(stage, seed, whole, tmp_path):
    cases = [case for case, (its, *_) in CASES.items() if its == stage]
    case = cases[seed % len(cases)]
    kinds = [*whole(case)[2], None]
    kind = kinds[seed // len(cases) % len(kinds)]
    kills = run_through(case, whole, tmp_path, seed=1 + seed, kind=kind)
    assert kills > 0 or kind is None  # by the clock, it may have ended before
    print(f"{case}: {kills} kills, the first at: {kind or 'a time'}")  # shown by -rP
    assert_nothing_is_lost(case, whole, tmp_path)
