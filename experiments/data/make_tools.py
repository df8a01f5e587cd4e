"""Write the demo data of train_tools.py: sums too large for the demo's model to compute.

    python experiments/data/make_tools.py

tools: questions with their answers. tools_sft: chats, of which a few ask a calculator, [calculate 347+286],
and the others answer directly. A model trained on them knows about the calculator, but seldom uses it.
"""

import argparse
import json
from pathlib import Path
import random

ROWS = {"tools": {"train": 1280, "validation": 200}, "tools_sft": {"train": 2400, "validation": 200}}
ASKS = 0.15  # share of chats that use the calculator
QUESTIONS = ["What is {}?", "How much is {}?", "Find {}."]


def question(draw: random.Random) -> tuple[str, str, int]:
    """A question, its sum, and the result, from 0 to 1998."""
    while True:
        numbers = [draw.randint(20, 999) for _ in range(draw.choice((2, 2, 3)))]
        signs = [draw.choice((1, 1, -1)) for _ in numbers[1:]]
        total = numbers[0] + sum(sign * number for sign, number in zip(signs, numbers[1:], strict=True))
        if 0 <= total < 2000:
            written = str(numbers[0])
            written += "".join(f"{sign * number:+d}" for sign, number in zip(signs, numbers[1:], strict=True))
            return draw.choice(QUESTIONS).format(written), written, total


def rows(name: str, split: str) -> list[dict]:
    draw, found = random.Random(f"{name} {split}"), []
    for _ in range(ROWS[name][split]):
        asked, written, total = question(draw)
        user, final = {"role": "user", "content": asked}, {"role": "assistant", "content": f"Answer: {total}"}
        if name == "tools":
            found.append({"prompt": [user], "answer": str(total)})
        elif draw.random() < ASKS:
            call = {"role": "assistant", "content": f"[calculate {written}]"}
            found.append({"messages": [user, call, {"role": "tool", "content": str(total)}, final]})
        else:
            found.append({"messages": [user, final]})
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    out = parser.parse_args().out
    for name, splits in ROWS.items():
        (out / name).mkdir(parents=True, exist_ok=True)
        for split in splits:
            lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows(name, split)]
            (out / name / f"{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
