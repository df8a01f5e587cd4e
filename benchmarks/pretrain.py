"""Pretraining on full rows: tokens per second and peak memory, ours beside transformers' Trainer and a bare loop.

    python benchmarks/pretrain.py [--rounds 3] [--only tiny short 20m bf16]

All sides: the same model and weights, the same rows in the same order, float32 (or, in the last table, autocast to bfloat16),
AdamW, one log line a step. 8 rows of 512 tokens a step; of 128 where the table says so, as in the demo: there the cost of a
step beside its arithmetic is seen.
"""

from pathlib import Path

from compare import INPUTS, arguments, compare, ours, peer, save, wanted

BATCH = 8


def pretrain(model: str, title: str, rounds: int, steps: int, length: int = 512, bf16: bool = False) -> dict:
    env = {"ACCELERATE_MIXED_PRECISION": "bf16"} if bf16 else None
    same = ("transformers Trainer", "bare loop")
    sides = {
        "ours": ours(
            "train_pretrain.py", "--model_name_or_path", INPUTS / model, "--dataset_name", INPUTS / "text.jsonl",
            "--max_length", length, "--per_device_train_batch_size", BATCH, "--max_steps", steps, env=env,
        ),
        "transformers Trainer": peer("trainer", model, f"text{length}.ordered.npy", steps, BATCH, bf16=bf16),
        "bare loop": peer("bare_pretrain", model, f"text{length}.ordered.npy", steps, BATCH, bf16=bf16),
    }  # fmt: skip
    tokens = [BATCH * length] * steps
    return compare(
        title, "tokens/s", sides, rounds, amounts=lambda side, result: tokens, same_maths=() if bf16 else same, best_of=same
    )


def main() -> None:
    args = arguments(__doc__)
    tables = []
    if wanted(args.only, "tiny"):
        tables.append(pretrain("tiny", "pretrain, 1.3M parameters", args.rounds, steps=10))
    if wanted(args.only, "short"):
        tables.append(pretrain("tiny", "pretrain, 1.3M parameters, rows of 128", args.rounds, steps=30, length=128))
    if wanted(args.only, "20m"):
        tables.append(pretrain("20m", "pretrain, 20M parameters", args.rounds, steps=5))
    cpu = Path("/proc/cpuinfo")
    if wanted(args.only, "bf16") and cpu.exists() and "avx512_bf16" in cpu.read_text():
        tables.append(pretrain("20m", "pretrain, 20M parameters, bfloat16 autocast", args.rounds, steps=5, bf16=True))
    save("pretrain", tables, args.only)


if __name__ == "__main__":
    main()
