"""A fixed GRPO task that anybody can repeat with any trainer: model, questions, reward, settings and seeds
are in this repository.

    python benchmarks/grpo_task.py [--seeds 0 1 2] [--sides ours TRL] [--precision no|bf16] [--out grpo_task.json]

What is fixed: grpo_task.yaml, with the model, the questions and the reward (rewards.py, in TRL's signature)
that it names. What is measured, of each side and seed, in a process of its own:

- start s: from the start of the process to the first step; loop s: of the 60 steps; steps/s: of all but the
first two
- reward: mean of the last 10 steps
- right before, right after: share of the 200 held-out questions of data/prompts/zero_test.jsonl whose greedy
  completion (56 tokens at most) has the right last number; by transformers' generate() here, the same for all
  sides

How to compare another trainer: train data/base_model on the same questions with the settings of
grpo_task.yaml for 60 steps, save it with save_pretrained, and call `python benchmarks/grpo_task.py --evaluate
FOLDER`. Sampling is random, so a side is compared by its spread over seeds: `right after` within the spread
of the others, then seconds. Say the machine beside them.
"""

import argparse
import json
import os
from pathlib import Path
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

from compare import failure

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TASK = HERE / "grpo_task.yaml"
HELD_OUT = ROOT / "data" / "prompts" / "zero_test.jsonl"
WARM_UP, LAST = 2, 10
# Of grpo_task.yaml, what TRL calls otherwise, or has other defaults for.
TRL = {
    "top_k": 0, "steps_per_generation": 1, "gradient_checkpointing": False, "shuffle_dataset": True,
    "lr_scheduler_type": "constant_with_warmup", "use_liger_kernel": False,
}  # fmt: skip
ONLY_OURS = "model_name_or_path dataset_name reward_funcs max_prompt_length max_steps eval_steps num_samples save_steps".split()


def settings() -> dict[str, Any]:
    import yaml

    return yaml.safe_load(TASK.read_text())


def ours(work: Path, seed: int, precision: str, steps: int) -> tuple[list[str], dict[str, str], Path]:
    words = [
        HERE / "ours.py",
        work / "result.json",
        "train_grpo.py",
        "--config",
        TASK,
        "--seed",
        seed,
        "--max_steps",
        steps,
    ]
    words += ["--output_dir", work / "model", "--overwrite_output_dir", "--dataset_cache_dir", work / "cache"]
    return list(map(str, words)), {"ACCELERATE_MIXED_PRECISION": precision}, work / "model"


def trl(work: Path, seed: int, precision: str, steps: int) -> tuple[list[str], dict[str, str], Path]:
    options = {name: value for name, value in settings().items() if name not in ONLY_OURS} | TRL
    options |= {"seed": seed, "bf16": precision == "bf16", "logging_steps": 1}
    batch = options.pop("per_device_train_batch_size")
    spec = {
        "kind": "trl_grpo",
        "model": str(ROOT / "data/base_model"),
        "rows": str(ROOT / "data/grpo_zero/train.jsonl"),
    }
    spec |= {
        "steps": steps,
        "batch": batch,
        "options": options,
        "work": str(work / "trl"),
        "save": str(work / "model"),
    }
    (work / "spec.json").write_text(json.dumps(spec))
    return [str(HERE / "peers.py"), str(work / "result.json"), str(work / "spec.json")], {}, work / "model"


SIDES = {"ours": ours, "TRL": trl}


def run_side(
    side: str, seed: int, precision: str, steps: int, timeout: float | None = None
) -> dict[str, Any]:
    """Raises RuntimeError with what it failed of, subprocess.TimeoutExpired."""
    with tempfile.TemporaryDirectory() as folder:
        words, environ, model = SIDES[side](Path(folder), seed, precision, steps)
        began = time.time()
        done = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env=os.environ | environ,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode:
            raise failure(done.stdout + done.stderr)
        found = json.loads((Path(folder) / "result.json").read_text())
        after = evaluate(model)
    wall, rewards = found["wall"], [m.get("reward", m.get("reward/mean")) for m in found["metrics"]]
    timed = wall[min(WARM_UP, len(wall) - 2) :]
    return {
        "side": side, "seed": seed, "steps": len(wall) - 1, "start s": round(found["epoch"][0] - began, 1),
        "loop s": round(wall[-1] - wall[0], 2), "steps/s": round((len(timed) - 1) / (timed[-1] - timed[0]), 3),
        "reward": round(sum(rewards[-LAST:]) / len(rewards[-LAST:]), 3), "right after": after,
    }  # fmt: skip


def evaluate(folder: str | Path) -> float:
    """The share of held-out questions that a model answers rightly, greedily, in float32."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    rows = [json.loads(line) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    encoded = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True).to(device)
    encoded.pop("token_type_ids", None)
    settings = transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=56,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.no_grad():
        out = model.generate(**encoded, generation_config=settings)[:, encoded["input_ids"].shape[1] :]
    numbers = [re.findall(r"-?\d+", text) for text in tokenizer.batch_decode(out, skip_special_tokens=True)]
    return sum(bool(n) and n[-1] == row["answer"] for n, row in zip(numbers, rows, strict=True)) / len(rows)


def markdown(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(str(row.get(c, "")) for c in columns) + " |" for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=["ours"])
    parser.add_argument("--precision", choices=["no", "bf16"], default="no")
    parser.add_argument(
        "--steps", type=int, default=60, help="other than 60 is another task, to see that it runs"
    )
    parser.add_argument("--out", type=Path, help="a JSON file, written after each run")
    parser.add_argument("--evaluate", type=Path, help="only say what share a model of this folder gets right")
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if args.evaluate:
        print(f"{evaluate(args.evaluate):.3f}")
        return
    rows: list[dict[str, Any]] = []
    before = evaluate(ROOT / "data" / "base_model")
    for seed in args.seeds:
        for side in args.sides:
            try:
                rows.append(run_side(side, seed, args.precision, args.steps) | {"right before": before})
            except RuntimeError as error:
                rows.append({"side": side, "seed": seed, "failed": str(error)[:200]})
            print(rows[-1], file=sys.stderr, flush=True)
            if args.out:
                args.out.write_text(
                    json.dumps({"task": TASK.name, "precision": args.precision, "rows": rows}, indent=1)
                    + "\n"
                )
    print(markdown(rows))


if __name__ == "__main__":
    main()
