"""SFT on chats of uneven length: useful tokens per second and peak memory, ours beside TRL and a bare loop.

    python benchmarks/sft.py [--rounds 3] [--only tiny 20m]

All sides: the same model, chats and order (but where the peer's option is to have its own), batch 8, trained
on what the assistant says, float32, AdamW, one log line a step. TRL's defaults include gradient
checkpointing; they are left as they are but for bfloat16. Its other sides are without it, and the fastest of
them is its best.
"""

import json

from compare import INPUTS, arguments, compare, ours, peer, save, wanted

BATCH, LENGTH = 8, 1024
FAST = {"gradient_checkpointing": False}


def sft(model: str, title: str, rounds: int, steps: int, epoch: bool) -> dict:
    """steps: of the slow sides; with `epoch` the others run all chats, else they stop there, too."""
    lengths = json.loads((INPUTS / "chats.lengths.json").read_text())
    in_order = [sum(lengths[i : i + BATCH]) for i in range(0, len(lengths), BATCH)]
    all_steps = len(in_order) if epoch else steps
    packs = round(sum(in_order) / LENGTH / 1.02) if epoch else steps + 4

    def useful(side: str, result: dict) -> list[float]:
        own_order = side in ("TRL grouped by length", "TRL packed, bfd")
        return [b["useful"] for b in result["batches"]] if own_order else in_order

    def trl(steps: int, batch: int = BATCH, **options):
        return peer("trl_sft", model, "chats.ordered.jsonl", steps, batch, **options)

    sides = {
        "ours": ours(
            "train_sft.py", "--model_name_or_path", INPUTS / model, "--dataset_name", INPUTS / "chats.jsonl",
            "--max_length", LENGTH, "--per_device_train_batch_size", BATCH, "--max_steps", all_steps,
        ),
        "TRL defaults": trl(steps),
        "TRL padded": trl(steps, **FAST),
        "TRL padding-free": trl(steps, padding_free=True, max_length=None, **FAST),
        "TRL grouped by length": trl(all_steps, train_sampling_strategy="group_by_length", **FAST),
        "TRL packed, bfd": trl(packs, batch=1, packing=True, **FAST),
        "bare loop": peer("bare_sft", model, "chats.ordered.jsonl", steps, BATCH),
    }  # fmt: skip
    return compare(
        title,
        "useful tokens/s",
        sides,
        rounds,
        amounts=useful,
        same_maths=("TRL defaults", "TRL padded", "TRL padding-free", "bare loop"),
        best_of=tuple(name for name in sides if name.startswith("TRL ")),
    )


def main() -> None:
    args = arguments(__doc__)
    tables = []
    if wanted(args.only, "tiny"):
        tables.append(sft("tiny", "SFT, 1.3M parameters", args.rounds, steps=10, epoch=True))
    if wanted(args.only, "20m"):
        tables.append(sft("20m", "SFT, 20M parameters", min(args.rounds, 3), steps=6, epoch=False))
    save("sft", tables, args.only)


if __name__ == "__main__":
    main()
