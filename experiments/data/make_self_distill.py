"""Write the chats on which the model of train_self_distill.py's demo learns to repeat what it was shown.

    python experiments/data/make_self_distill.py

A thousand questions of data/dpo, each twice in a chat and answered alike, but with the answer to another
question: they teach to repeat, not to calculate.
"""

import argparse
import json
from pathlib import Path
import random

PAIRS = Path(__file__).resolve().parents[2] / "data" / "dpo"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    out = parser.parse_args().out / "self_distill_sft"
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        rows = [json.loads(line) for line in (PAIRS / f"{split}.jsonl").read_text().splitlines()[:1000]]
        draw = random.Random(split)
        others = [draw.choice(rows)["chosen"] for _ in rows]
        chats = [
            [*row["prompt"], *answer, *row["prompt"], *answer]
            for row, answer in zip(rows, others, strict=True)
        ]
        lines = [json.dumps({"messages": chat}, separators=(",", ":")) + "\n" for chat in chats]
        (out / f"{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
