"""Tasks of reasoning-gym, from text to GRPO with its own scorers: a table for docs/rollouts.md.

    pip install reasoning-gym
    python benchmarks/reasoning.py [--seeds 0 1 2]

A new model of 0.3M parameters reads questions and answers as plain text (pretraining), learns to answer in chats (SFT), and then,
once for each seed, from the tasks' scores alone (GRPO). Scored greedily on 200 held-out questions of each task: `score`, with reasoning-gym's points
for a part of the answer, and `solved`, without. Writes results/reasoning.json and prints the table.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

from compare import RESULTS, ROOT, WORK, machine

FOLDER = WORK / "reasoning"
TASKS = {
    "spell": ["spell_backward", "--rows", "20000", "max_word_len=5"],
    "sum": ["chain_sum", "--rows", "12000", "max_terms=2", "max_digits=2"],
}
NEW = "--vocab_size 259 --hidden_size 96 --num_layers 3 --num_heads 4 --intermediate_size 256 --initializer_range 0.04"
SCORES = "tools/reasoning_tasks.py:score tools/reasoning_tasks.py:solved"
STAGES = {  # script and settings
    "pretrain": (
        "train_pretrain.py",
        f"{NEW} --packing_strategy bfd --max_length 128 --per_device_train_batch_size 16 --max_steps 600 "
        "--learning_rate 4e-3 --lr_scheduler_type wsd --lr_decay_fraction 0.5 --min_lr_ratio 0.05 --warmup_steps 30 --eval_steps 0",
    ),
    "sft": (
        "train_sft.py",
        "--max_train_samples 2000 --max_length 128 --per_device_train_batch_size 16 --max_steps 200 "
        "--learning_rate 2e-3 --lr_scheduler_type linear --warmup_steps 10 --eval_steps 0",
    ),
    "grpo": (
        "train_grpo.py",
        f"--reward_funcs {SCORES} --per_device_train_batch_size 128 --num_generations 8 --max_steps 200 "
        "--max_completion_length 16 --learning_rate 3e-4 --warmup_steps 5 --eval_steps 50 --eval_max_new_tokens 16 "
        f"--eval_reward_funcs {SCORES}",
    ),
}


def call(*words: str) -> float:
    """Seconds that a command took."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.perf_counter() - began


def run(stage: str, tasks: list[str], seed: int, name: str, start: str | None) -> dict[str, Any]:
    """The seconds of a stage, and for one task the curve of what is scored: {step: {"score", "solved"}}."""
    script, settings = STAGES[stage]
    output = FOLDER / name
    words = [script, "--dataset_name", *(str(FOLDER / task) for task in tasks), *settings.split(), "--seed", str(seed)]
    words += ["--output_dir", str(output), "--overwrite_output_dir", "--save_steps", "0", "--dataset_num_proc", "1"]
    if start:
        words += ["--model_name_or_path", str(FOLDER / start)]
    if stage == "grpo":
        words += ["--eval_prompts", str(FOLDER / tasks[0] / "validation.jsonl")]
    seconds = call(*words)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    curve = {
        line["step"]: {key: line[f"eval_{key}"] for key in ("score", "solved")} for line in lines if "eval_score" in line
    }
    return {"run": name, "task": tasks[0], "seed": seed, "seconds": round(seconds, 1), "curve": curve}


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: after how many steps of GRPO what is right."""
    runs = [entry for entry in runs if entry["curve"]]
    steps = list(runs[0]["curve"])
    lines = ["| held out, step | " + " | ".join(map(str, steps)) + " |", "|---" * (len(steps) + 1) + "|"]
    for entry in runs:
        cells = [f"{values['score']:.2f}, {values['solved']:.2f}" for values in entry["curve"].values()]
        lines.append(f"| {TASKS[entry['task']][0]}, seed {entry['seed']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, words in TASKS.items():
        call("-m", "tools.reasoning_tasks", words[0], str(FOLDER / name), *words[1:])
    runs = [run("pretrain", list(TASKS), 0, "pretrain", None), run("sft", list(TASKS), 0, "sft", "pretrain")]
    for task in TASKS:
        runs += [run("grpo", [task], seed, f"grpo_{task}_{seed}", "sft") for seed in args.seeds]
        (RESULTS / "reasoning.json").write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
