"""GRPO: whole steps and sampling alone, ours beside TRL and generate().

    python benchmarks/grpo.py [--rounds 3] [--only steps sampling]

16 prompts x 8 completions of at most 56 tokens, from the embedded SFT model, whose completions are of uneven
length and end on the chat template's end of turn (its generation_config.json says so, which is where TRL and
generate() read it). What is sampled is random, so the losses cannot be compared token by token; the mean
length and reward of the completions stand beside each other instead, and the learning rate is so small (1e-6)
that they stay what they are.
"""

import json
from pathlib import Path
import shutil
import statistics

from compare import (
    HERE,
    INPUTS,
    WORK,
    arguments,
    compare,
    ours,
    peer,
    ratios,
    run_process,
    save,
    shown,
    spread,
    wanted,
)

COMPLETIONS, STEPS = 128, 8
MODEL = INPUTS / "sft_model"


def train_sft_model() -> None:
    """The model that `python train_sft.py` leaves behind, once."""
    if not (MODEL / "summary.json").exists():
        words = [
            "train_sft.py",
            "--model_name_or_path",
            "data/base_model",
            "--config",
            "data/configs/sft.yaml",
        ]
        run_process([*words, "--eval_steps", "0", "--output_dir", str(WORK / "sft")])
        shutil.move(WORK / "sft", MODEL)


def steps(rounds: int) -> dict:
    def trl(**options):
        return peer("trl_grpo", MODEL, "prompts.ordered.jsonl", STEPS, COMPLETIONS, **options)

    blocks = {"num_blocks": 512, "block_size": 32}  # by default it takes the machine's memory for its cache
    sides = {
        "ours": ours(
            "train_grpo.py", "--model_name_or_path", MODEL, "--dataset_name", INPUTS / "prompts.jsonl",
            "--reward_funcs", HERE / "rewards.py:right_and_in_form", "--max_completion_length", 56, "--num_generations", 8,
            "--per_device_train_batch_size", COMPLETIONS, "--max_steps", STEPS, "--learning_rate", 1e-6,
        ),
        "TRL defaults": trl(),
        "TRL without checkpointing": trl(gradient_checkpointing=False),
        "TRL, continuous batching": trl(
            gradient_checkpointing=False,
            use_transformers_continuous_batching=True,
            transformers_continuous_batching_config=blocks,
        ),
    }  # fmt: skip
    table = compare(
        "GRPO, whole steps",
        "steps/s",
        sides,
        rounds,
        amounts=lambda side, result: [1.0] * STEPS,
        best_of=tuple(name for name in sides if name.startswith("TRL")),
    )
    return table


def sampling(rounds: int) -> dict:
    """Sides in one process, alternately: the same model object, the same prompts."""
    rounds *= 8  # one takes a second
    result = WORK / "sampling.json"
    run_process(
        [
            str(HERE / "generate_peer.py"),
            str(MODEL),
            str(INPUTS / "prompts.ordered.jsonl"),
            str(result),
            str(rounds),
        ]
    )
    found = json.loads(result.read_text())
    table = {"title": "GRPO, sampling alone", "unit": "tokens/s", "rounds": rounds, "sides": {}}
    lines = [
        f"**GRPO, sampling alone**, medians of {rounds} alternating rounds in one process, 128 completions",
        "",
        "| side | tokens/s | ours is faster by | by CPU time | mean length | longest |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in found.items():
        rates, cpu = ([row["tokens"] / row[clock] for row in rows] for clock in ("wall", "cpu"))
        entry = {
            "rate": spread(rates),
            "cpu_rate": spread(cpu),
            "mean_length": statistics.mean(r["mean"] for r in rows),
        }
        cells = [name, f"{entry['rate']['median']:,.0f}", "", ""]
        if name != "ours":
            entry["speedup"] = ratios([r["tokens"] / r["wall"] for r in found["ours"]], rates)
            entry["speedup_cpu"] = ratios([r["tokens"] / r["cpu"] for r in found["ours"]], cpu)
            cells[2:] = [shown(entry["speedup"]), f"{entry['speedup_cpu']['median']:.2f}×"]
        cells += [f"{entry['mean_length']:.1f}", str(max(r["longest"] for r in rows))]
        lines.append("| " + " | ".join(cells) + " |")
        table["sides"][name] = entry
    return table | {"markdown": "\n".join(lines) + "\n"}


def main() -> None:
    args = arguments(__doc__)
    Path(WORK).mkdir(parents=True, exist_ok=True)
    train_sft_model()
    tables = []
    if wanted(args.only, "steps"):
        tables.append(steps(args.rounds))
    if wanted(args.only, "sampling"):
        tables.append(sampling(args.rounds))
    save("grpo", tables, args.only)


if __name__ == "__main__":
    main()
