"""DPO on pairs of uneven length: pairs per second and peak memory, ours beside TRL.

    python benchmarks/dpo.py [--rounds 3]

All sides: the same model, pairs and order, 8 pairs a step, β 0.1, float32, AdamW, one log line a step. The
reference is a second model in memory, or its log-probabilities are computed before the first step (outside
the clock; the table says how long that takes as the time to the first step); each of TRL's sides is compared
with ours of the same kind.
"""

import json

from compare import INPUTS, arguments, compare, ours, peer, save

BATCH, STEPS = 8, 10


def main() -> None:
    args = arguments(__doc__)
    ours_words = (
        "train_dpo.py", "--model_name_or_path", INPUTS / "tiny", "--dataset_name", INPUTS / "pairs.jsonl",
        "--max_length", 1024, "--per_device_train_batch_size", BATCH, "--max_steps", STEPS, "--beta", 0.1,
    )  # fmt: skip

    def trl(**options):
        return peer("trl_dpo", "tiny", "pairs.ordered.jsonl", STEPS, BATCH, **options)

    sides = {
        "ours": ours(*ours_words),
        "ours, reference computed before": ours(*ours_words, "--precompute_ref_log_probs", "true"),
        "TRL defaults": trl(),
        "TRL without checkpointing": trl(gradient_checkpointing=False),
        "TRL, reference computed before": trl(gradient_checkpointing=False, precompute_ref_log_probs=True),
    }
    table = compare(
        "DPO, 1.3M parameters",
        "pairs/s",
        sides,
        args.rounds,
        amounts=lambda side, result: [BATCH] * STEPS,
        same_maths=("TRL defaults", "TRL without checkpointing", "TRL, reference computed before"),
        best_of=("TRL defaults", "TRL without checkpointing", "TRL, reference computed before"),
        against={"TRL, reference computed before": "ours, reference computed before"},
    )
    lengths = json.loads((INPUTS / "pairs.lengths.json").read_text())[: BATCH * STEPS]
    table["mean_tokens_of_a_pair"] = sum(map(sum, lengths)) / len(lengths)
    save("dpo", [table])


if __name__ == "__main__":
    main()
