"""Write the demo data of train_kto.py: one answer of each pair in data/dpo, with its label."""

import argparse
import json
from pathlib import Path


def main(root: Path) -> None:
    for split in ("train", "validation"):
        pairs = Path(__file__).parents[2] / "data" / "dpo" / f"{split}.jsonl"
        lines = []
        for i, line in enumerate(pairs.read_text(encoding="utf-8").splitlines()):
            pair = json.loads(line)
            good = i % 4 < 2  # two kinds of questions alternate, and the label must not depend on the kind
            row = {
                "prompt": pair["prompt"],
                "completion": pair["chosen" if good else "rejected"],
                "label": good,
            }
            lines.append(json.dumps(row, separators=(",", ":")) + "\n")
        (root / "kto").mkdir(parents=True, exist_ok=True)
        (root / "kto" / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the demo data of KTO.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write to")
    main(parser.parse_args().out)
