"""From the start of the process to the end of the first step, and how soon a question or a mistake is
answered.

    python benchmarks/startup.py [--rounds 5]

The first step of SFT on the tiny model and 80 chats, tokenised anew (nothing cached) and from the cache.
"""

from collections.abc import Callable
from pathlib import Path
import shutil
import subprocess
import sys
import time

from compare import INPUTS, ROOT, WORK, arguments, ours, peer, ratios, save, shown, spread

STEPS = 1


def answer(words: list[str], expected: int) -> float:
    began = time.perf_counter()
    run = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == expected, run.stderr
    return time.perf_counter() - began


def main() -> None:
    args = arguments(__doc__, rounds=5)
    rows = {}
    for name in ("chats.jsonl", "chats.ordered.jsonl"):  # the same 80 rows
        rows[name] = WORK / name
        rows[name].write_text("".join((INPUTS / name).read_text().splitlines(keepends=True)[:80]))
    words = (
        "train_sft.py",
        "--model_name_or_path",
        INPUTS / "tiny",
        "--dataset_name",
        rows["chats.jsonl"],
        "--max_steps",
        STEPS,
    )
    first_step = ours(*words)
    cache = WORK / "startup_cache"

    def anew() -> float:
        shutil.rmtree(cache, ignore_errors=True)
        return first_step(cache)["to_first_step_s"]

    trl = peer("trl_sft", "tiny", str(rows["chats.ordered.jsonl"]), STEPS, 8)
    trl_cli = str(Path(sys.executable).with_name("trl"))
    sides: dict[str, tuple[Callable[[], float], str | None]] = {
        "ours, first step": (anew, None),
        "ours, first step, tokens cached": (lambda: first_step(cache)["to_first_step_s"], None),
        "TRL, first step": (lambda: trl()["to_first_step_s"], "ours, first step"),
        "ours, --help": (lambda: answer(["train_sft.py", "--help"], 0), None),
        "TRL, --help": (lambda: answer([trl_cli, "sft", "--help"], 0), "ours, --help"),
        "ours, a flag that does not exist": (
            lambda: answer(["train_sft.py", "--lerning_rate", "1"], 1),
            None,
        ),
        "TRL, a flag that does not exist": (
            lambda: answer(
                [trl_cli, "sft", "--model_name_or_path", "x", "--dataset_name", "y", "--lerning_rate", "1"], 1
            ),
            "ours, a flag that does not exist",
        ),
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, (side, _) in sides.items():
            found[name].append(side())
    table = {"title": "start-up", "rounds": args.rounds, "sides": {}}
    lines = [
        f"**start-up**, medians of {args.rounds} alternating rounds",
        "",
        "| what | seconds | ours takes |",
        "|---|---|---|",
    ]
    for name, (_, beside) in sides.items():
        entry = {"seconds": spread(found[name])}
        if beside:
            entry["share"] = ratios(found[beside], found[name])
        lines.append(
            f"| {name} | {entry['seconds']['median']:.2f} | {shown(entry['share']) if beside else ''} |"
        )
        table["sides"][name] = entry
    save("startup", [table | {"markdown": "\n".join(lines) + "\n"}])


if __name__ == "__main__":
    main()
