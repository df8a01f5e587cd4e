"""Tasks of reasoning-gym, from text to GRPO with its own scorers, ours beside TRL: a table and a picture for
docs/rollouts.md.

    pip install reasoning-gym trl==1.16.0
    python benchmarks/reasoning.py [--rounds 3] [--only spell]

A new model of 0.4M parameters reads questions and answers as plain text (pretraining), learns to answer in
chats (SFT), and then, once for each seed, from the task's scores alone (GRPO): by train_grpo.py and by TRL's
GRPOTrainer, from the same model, with the same rows, rewards and settings; both sides draw their own order
and samples. TRL is faster without its gradient checkpointing, so it runs without. Seconds are those of CPU
time from the first step on, on one thread. Each SAVED steps the model is saved, and afterwards answers 200
held-out questions greedily, by transformers' generate(): `score`, with reasoning-gym's points for a part of
the answer, and `solved`, without. Writes results/reasoning.json and docs/reasoning.png.
"""

from collections.abc import Callable
import json
from os.path import commonprefix
from pathlib import Path
import shutil
import statistics
import sys
from typing import Any

from compare import (
    RESULTS,
    ROOT,
    WORK,
    Result,
    arguments,
    machine,
    our_words,
    ours,
    peer,
    run_process,
    wanted,
)
from curves import draw

FOLDER = WORK / "reasoning"
TASKS = {
    "spell": ["spell_backward", "--rows", "20000", "max_word_len=5"],
    "sum": ["chain_sum", "--rows", "12000", "max_terms=2", "max_digits=2"],
}
NEW = "--vocab_size 259 --hidden_size 96 --num_layers 3 --num_heads 4 --intermediate_size 256 --initializer_range 0.04"
STAGES = {  # script and settings
    "pretrain": (
        "train_pretrain.py",
        f"{NEW} --packing_strategy bfd --max_length 128 --per_device_train_batch_size 16 --max_steps 600 "
        "--learning_rate 4e-3 --lr_scheduler_type wsd --lr_decay_fraction 0.5 --min_lr_ratio 0.05 --warmup_steps 30 "
        "--weight_decay 0.1 --adam_beta2 0.95",
    ),
    "sft": (
        "train_sft.py",
        "--max_train_samples 2000 --max_length 128 --per_device_train_batch_size 16 --max_steps 200 "
        "--learning_rate 2e-3 --lr_scheduler_type linear --warmup_steps 10",
    ),
}
STEPS, SAVED, COMPLETIONS, NEW_TOKENS = 200, 50, 128, 16
REWARDS = ("score", "solved")
GRPO: dict[str, Any] = {
    "num_generations": 8, "max_completion_length": NEW_TOKENS, "temperature": 1.0, "loss_type": "dapo", "beta": 0.0,
    "learning_rate": 3e-4, "warmup_steps": 5, "save_steps": SAVED,
}  # fmt: skip
TRL: dict[str, Any] = {
    "lr_scheduler_type": "constant_with_warmup", "gradient_checkpointing": False, "shuffle_dataset": True,
    "save_strategy": "steps", "save_only_model": True, "reward_funcs": [f"tools.reasoning_tasks:{name}" for name in REWARDS],
}  # fmt: skip


def start(tasks: list[str]) -> None:
    """FOLDER/sft: the model that GRPO begins with."""
    model: list[Any] = []
    for stage, (script, settings) in STAGES.items():
        words = [*settings.split(), *model, "--output_dir", FOLDER / stage]
        words += ["--dataset_name", *(FOLDER / task for task in tasks)]
        print(f"{stage}: {run_process(our_words(script, *words)):.0f} s", file=sys.stderr, flush=True)
        model = ["--model_name_or_path", FOLDER / stage]


def sides_of(task: str, seed: int) -> dict[str, Callable[[], Result]]:
    """Each leaves its models in FOLDER/side/checkpoint-<step>."""
    rows, words = (
        FOLDER / task / "train.jsonl",
        [word for name, value in GRPO.items() for word in (f"--{name}", value)],
    )
    words += [
        "--reward_funcs",
        *(f"tools/reasoning_tasks.py:{name}" for name in REWARDS),
        "--save_total_limit",
        0,
    ]
    words += ["--model_name_or_path", FOLDER / "sft", "--dataset_name", rows, "--output_dir", FOLDER / "ours"]
    words += ["--per_device_train_batch_size", COMPLETIONS, "--max_steps", STEPS, "--seed", seed]
    trl = peer(
        "trl_grpo",
        FOLDER / "sft",
        rows,
        STEPS,
        COMPLETIONS,
        work=FOLDER / "TRL",
        **GRPO | TRL | {"seed": seed},
    )
    return {"ours": ours("train_grpo.py", *words), "TRL": trl}


def greedy_texts(model_folder: str | Path, prompts: list[list[dict]], new_tokens: int) -> list[str]:
    """What a saved model answers to chats, by transformers' generate(), in float32."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    rows = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)["input_ids"]
    start = commonprefix(rows)[:-1]  # of all prompts, computed once
    rest = tokenizer.pad({"input_ids": [row[len(start) :] for row in rows]}, return_tensors="pt")
    starts = torch.tensor([start] * len(rows))
    ids = torch.cat([starts, rest["input_ids"]], dim=1)
    mask = torch.cat([torch.ones_like(starts), rest["attention_mask"]], dim=1)
    with torch.no_grad():
        cache = model(starts[:1], use_cache=True).past_key_values  # which TRL saves as False
    cache.batch_repeat_interleave(len(rows))
    out = model.generate(
        ids, attention_mask=mask, past_key_values=cache, do_sample=False, max_new_tokens=new_tokens
    )
    return tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)


def answered(model_folder: str | Path, folder: Path) -> dict[str, float]:
    """The means of `score` and `solved` over a task's held-out questions, answered greedily."""
    from tools.reasoning_tasks import score, solved

    rows = [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]
    prompts, index, names = ([row[name] for row in rows] for name in ("prompt", "index", "task"))
    completions = [[{"content": text}] for text in greedy_texts(model_folder, prompts, NEW_TOKENS)]
    return {f.__name__: statistics.mean(f(prompts, completions, names, index)) for f in (score, solved)}


def run(task: str, seed: int, side: str, grpo: Callable[[], Result]) -> dict[str, Any]:
    """The curve of a side: of each saved step the CPU seconds up to it, `score` and `solved`."""
    shutil.rmtree(FOLDER / side, ignore_errors=True)
    cpu = grpo()["cpu"]
    folders = {0: FOLDER / "sft"} | {
        step: FOLDER / side / f"checkpoint-{step}" for step in range(SAVED, STEPS + 1, SAVED)
    }
    curve = {
        step: {"seconds": round(cpu[step] - cpu[0], 1)} | answered(folder, FOLDER / task)
        for step, folder in folders.items()
    }
    print(f"{task}, {side}, seed {seed}: {curve[STEPS]}", file=sys.stderr, flush=True)
    return {"task": TASKS[task][0], "side": side, "seed": seed, "curve": curve}


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: after how many steps of GRPO what is right, and the CPU seconds of all."""
    steps = list(runs[0]["curve"])
    lines = [
        "| held out, step | " + " | ".join(map(str, steps)) + " | CPU s |",
        "|---" * (len(steps) + 2) + "|",
    ]
    for entry in runs:
        values = list(entry["curve"].values())
        cells = [f"{value['score']:.2f}, {value['solved']:.2f}" for value in values] + [
            f"{values[-1]['seconds']:.0f}"
        ]
        lines.append(
            f"| {entry['task']}, {entry['side']}, seed {entry['seed']} | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines)


def picture(runs: list[dict[str, Any]]) -> None:
    curves: dict[str, list[list[list[float]]]] = {}
    for entry in runs:
        if entry["task"] == "spell_backward":
            curve = [[value["seconds"], 100 * value["solved"]] for value in entry["curve"].values()]
            curves.setdefault(entry["side"], []).append(curve)
    draw("reasoning", "GRPO on reasoning-gym: spell_backward", "CPU seconds", "% solved, held out", curves)


def main() -> None:
    args = arguments(__doc__)
    sys.path.insert(0, str(ROOT))  # for the scorers
    FOLDER.mkdir(parents=True, exist_ok=True)
    for task, words in TASKS.items():
        run_process(["-m", "tools.reasoning_tasks", words[0], str(FOLDER / task), *words[1:]])
    start(list(TASKS))
    runs = []
    for task in (task for task in TASKS if wanted(args.only, task)):
        for seed in range(args.rounds):
            runs += [run(task, seed, side, grpo) for side, grpo in sides_of(task, seed).items()]
            (RESULTS / "reasoning.json").write_text(
                json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n"
            )
    picture(runs)
    print(table(runs))


if __name__ == "__main__":
    main()
