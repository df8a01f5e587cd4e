"""Pretraining: useful tokens per second and peak memory, ours beside transformers' Trainer and a bare loop.

    python benchmarks/pretrain.py [--rounds 3] [--only tiny 20m rows short rows20m bf16]

All sides: the same model and weights, the same text in the same order, float32, AdamW, one log line a step.
First whole documents of uneven length, about 9 in a step: ours packs them; Trainer pads, or groups by length
in its own order, or flattens (end to end, with a mask). Then full rows, cut from one stream, 8 of 512 tokens
a step, or of 128 as in the demo: no padding on any side, so what is left is the same arithmetic, and what
surrounds it. Where the CPU has units for bfloat16, the same at 20M under autocast, also beside Trainer's
default, which is float32.

Trainer's padded batches hold the documents of our packs, long with short ones; what share of them is useful
stands in the table (the chats' random batches of sft.py have 44 %).
"""

import json
from pathlib import Path

from compare import INPUTS, arguments, compare, ours, peer, save, wanted

BATCH = 8


def documents(model: str, title: str, rounds: int, steps: int, slow: int) -> dict:
    """slow: steps of the sides that pad."""
    in_steps = json.loads((INPUTS / "pages.steps.json").read_text())
    useful = [sum(map(len, step)) for step in in_steps]
    each = round(sum(map(len, in_steps)) / len(in_steps))  # documents of a step

    def trainer(steps: int, **options):
        return peer("trainer_documents", model, "pages.steps.json", steps, each, **options)

    sides = {
        "ours": ours(
            "train_pretrain.py", "--model_name_or_path", INPUTS / model, "--dataset_name", INPUTS / "pages.jsonl",
            "--packing_strategy", "bfd", "--max_length", 1024, "--per_device_train_batch_size", 2, "--max_steps", steps,
        ),
        "Trainer, padded": trainer(slow),
        "Trainer, flattened": trainer(slow, flattened=True),
        "Trainer, grouped by length": trainer(steps, train_sampling_strategy="group_by_length"),
        "bare loop, padded": peer("bare_documents", model, "pages.steps.json", slow, each),
    }  # fmt: skip
    return compare(
        title,
        "useful tokens/s",
        sides,
        rounds,
        amounts=lambda side, found: [b["useful"] for b in found["batches"]] if "grouped" in side else useful,
        same_maths=("Trainer, padded", "Trainer, flattened", "bare loop, padded"),
        best_of=tuple(name for name in sides if name.startswith("Trainer")),
    )


def rows(model: str, title: str, rounds: int, steps: int, length: int = 512, bf16: bool = False) -> dict:
    env = {"ACCELERATE_MIXED_PRECISION": "bf16"} if bf16 else None

    def other(kind: str, bf16: bool):
        return peer(kind, model, f"text{length}.ordered.npy", steps, BATCH, bf16=bf16)

    sides = {
        "ours": ours(
            "train_pretrain.py", "--model_name_or_path", INPUTS / model, "--dataset_name", INPUTS / "text.jsonl",
            "--max_length", length, "--per_device_train_batch_size", BATCH, "--max_steps", steps, env=env,
        ),
        "Trainer": other("trainer", bf16),
        "bare loop": other("bare_pretrain", bf16),
    }  # fmt: skip
    if bf16:
        sides["Trainer, float32 (its default)"] = other("trainer", False)
    return compare(
        title,
        "tokens/s",
        sides,
        rounds,
        amounts=lambda side, found: [BATCH * length] * steps,
        same_maths=() if bf16 else ("Trainer", "bare loop"),
        best_of=("Trainer", "bare loop"),
    )


def main() -> None:
    args = arguments(__doc__)
    tables = []
    if wanted(args.only, "tiny"):
        tables.append(
            documents("tiny", "pretrain, 1.3M parameters, documents", args.rounds, steps=20, slow=10)
        )
    if wanted(args.only, "20m"):
        tables.append(documents("20m", "pretrain, 20M parameters, documents", args.rounds, steps=6, slow=6))
    if wanted(args.only, "rows"):
        tables.append(rows("tiny", "pretrain, 1.3M parameters, full rows of 512", args.rounds, steps=10))
    if wanted(args.only, "short"):
        tables.append(
            rows("tiny", "pretrain, 1.3M parameters, full rows of 128", args.rounds, steps=30, length=128)
        )
    if wanted(args.only, "rows20m"):
        tables.append(rows("20m", "pretrain, 20M parameters, full rows of 512", args.rounds, steps=5))
    cpu = Path("/proc/cpuinfo")
    if wanted(args.only, "bf16") and cpu.exists() and "avx512_bf16" in cpu.read_text():
        title = "pretrain, 20M parameters, full rows of 512, bfloat16 autocast"
        tables.append(rows("20m", title, args.rounds, steps=5, bf16=True))
    save("pretrain", tables, args.only)


if __name__ == "__main__":
    main()
