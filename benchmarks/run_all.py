"""All benchmarks, one after the other, and the tables of docs/benchmarks.md made of their results.

python benchmarks/run_all.py [--rounds 3]     # the machine should be otherwise idle
python benchmarks/run_all.py --report         # measures nothing; prints all tables, with spread, machine and versions
"""

import argparse
import json
import subprocess
import sys
from typing import Any

from compare import HERE, RESULTS, ROOT, markdown

# of a table in docs/benchmarks.md, which starts with a line that names it: tables_of_the_page
END = "<!-- end -->"
STAGES = ("sft", "dpo", "grpo", "pretrain", "head", "startup")
FROZEN = ("limits", "others")  # measured once, at the commit that docs/benchmarks.md names
# What is aimed at, of each figure and direction: (result, table, side, floor, words). See LOG.md for what was
# tried to reach it.
FLOORS = {
    ("speedup", ">="): [
        ("sft", "SFT, 1.3M parameters", "TRL defaults", 6.0, "SFT, 1.3M, useful tokens/s, TRL defaults"),
        ("sft", "SFT, 1.3M parameters", "best", 2.5, "SFT, 1.3M, TRL's best"),
        ("sft", "SFT, 20M parameters", "TRL defaults", 2.5, "SFT, 20M, TRL defaults"),
        ("sft", "SFT, 20M parameters", "best", 1.3, "SFT, 20M, TRL's best"),
        ("dpo", "DPO, 1.3M parameters", "TRL defaults", 3.5, "DPO, pairs/s, TRL defaults"),
        ("dpo", "DPO, 1.3M parameters", "best", 2.5, "DPO, TRL's best"),
        ("grpo", "GRPO, whole steps", "TRL defaults", 2.5, "GRPO, steps/s, TRL defaults"),
        ("grpo", "GRPO, whole steps", "best", 2.5, "GRPO, TRL's best"),
        ("grpo", "GRPO, sampling alone", "generate()", 2.5, "GRPO, sampling alone, generate()"),
        ("pretrain", "pretrain, 1.3M parameters, documents", "Trainer, padded", 2.0, "pretrain, 1.3M, documents, useful tokens/s, Trainer"),
        ("pretrain", "pretrain, 1.3M parameters, documents", "best", 1.0, "pretrain, 1.3M, documents, Trainer's best"),
        ("pretrain", "pretrain, 20M parameters, documents", "Trainer, padded", 1.4, "pretrain, 20M, documents, Trainer"),
        ("pretrain", "pretrain, 20M parameters, documents", "best", 1.0, "pretrain, 20M, documents, Trainer's best"),
        ("pretrain", "pretrain, 1.3M parameters, full rows of 512", "Trainer", 2.0, "pretrain, 1.3M, full rows of 512, Trainer"),
        ("pretrain", "pretrain, 1.3M parameters, full rows of 128", "Trainer", 2.0, "pretrain, 1.3M, full rows of 128, Trainer"),
        ("pretrain", "pretrain, 20M parameters, full rows of 512", "Trainer", 1.4, "pretrain, 20M, full rows of 512, Trainer"),
        ("pretrain", "pretrain, 20M parameters, full rows of 512, bfloat16 autocast", "Trainer, float32 (its default)", 1.4, "pretrain, 20M, full rows, bf16 autocast, Trainer's default"),
        ("pretrain", "pretrain, 20M parameters, full rows of 512, bfloat16 autocast", "Trainer", 1.0, "pretrain, 20M, full rows, bf16 autocast, Trainer with bf16"),
    ],
    ("memory", "<="): [
        ("sft", "SFT, 1.3M parameters", "TRL defaults", 0.7, "peak memory, SFT 1.3M, TRL defaults"),
        ("sft", "SFT, 1.3M parameters", "best", 1.0, "peak memory, SFT 1.3M, TRL's best"),
        ("sft", "SFT, 20M parameters", "TRL defaults", 0.7, "peak memory, SFT 20M, TRL defaults"),
        ("sft", "SFT, 20M parameters", "best", 1.0, "peak memory, SFT 20M, TRL's best"),
        ("dpo", "DPO, 1.3M parameters", "TRL defaults", 0.7, "peak memory, DPO, TRL defaults"),
        ("dpo", "DPO, 1.3M parameters", "best", 1.0, "peak memory, DPO, TRL's best"),
        ("grpo", "GRPO, whole steps", "TRL defaults", 0.7, "peak memory, GRPO, TRL defaults"),
        ("pretrain", "pretrain, 1.3M parameters, documents", "Trainer, padded", 0.7, "peak memory, pretrain 1.3M, documents, Trainer"),
        ("pretrain", "pretrain, 20M parameters, documents", "Trainer, padded", 0.7, "peak memory, pretrain 20M, documents, Trainer"),
        ("pretrain", "pretrain, 1.3M parameters, full rows of 512", "Trainer", 0.7, "peak memory, pretrain 1.3M, full rows, Trainer"),
        ("pretrain", "pretrain, 20M parameters, full rows of 512", "Trainer", 0.7, "peak memory, pretrain 20M, full rows, Trainer"),
    ],
    ("memory", ">="): [
        ("head", "loss head", "full logits", 8.0, "loss head, temporary memory, times less than full logits"),
    ],
    ("time", "<="): [
        ("head", "loss head", "full logits", 1.0, "loss head, time, full logits"),
    ],
    ("share", "<="): [
        ("startup", "start-up", "TRL, first step", 0.6, "process start to the end of the first step, TRL"),
    ],
}  # fmt: skip


def floors() -> list[str]:
    lines = ["| figure, ours beside | aim | wall time | CPU time | |", "|---|---|---|---|---|"]
    for (figure, direction), aims in FLOORS.items():
        for name, title, side, floor, words in aims:
            for table in tables_of(name):
                if table["title"] == title or (name == "head" and table["title"].startswith(title)):
                    lines.append(line_of(table, side, figure, direction, floor, words))
                    break
    return lines


def line_of(table: dict[str, Any], side: str, figure: str, direction: str, floor: float, words: str) -> str:
    entry = table["sides"][table["best"] if side == "best" else side]
    value, by_cpu = entry[figure], entry.get(f"{figure}_cpu")
    if isinstance(value, dict):
        value = value["median"]
    decisive = by_cpu["median"] if by_cpu else value
    met = decisive >= floor if direction == ">=" else decisive <= floor
    cpu = f"{by_cpu['median']:.2f}×" if by_cpu else ""
    sign = "≥" if direction == ">=" else "≤"
    return f"| {words} | {sign} {floor:g}× | {value:.2f}× | {cpu} | {'reached' if met else 'not reached'} |"


def tables_of(name: str) -> list[dict[str, Any]]:
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text())["tables"] if file.exists() else []


def shakespeare() -> list[str]:
    """The recipe for a CPU, as far as it was measured: a column a side."""
    found = {
        table["title"].rpartition(": ")[2]: table
        for table in tables_of("shakespeare")
        if ", cpu:" in table["title"]
    }
    if "loss" not in found:
        return []
    losses = found["loss"]["val_loss"]
    rows = ["| | " + " | ".join(losses) + " |", "|---" * (len(losses) + 1) + "|"]
    for seed, values in enumerate(zip(*losses.values(), strict=True)):
        rows.append(
            f"| validation loss, seed {seed} | " + " | ".join(f"{value:.3f}" for value in values) + " |"
        )
    sides = found["speed"]["sides"] if "speed" in found else {}
    for words, figure in (
        (("tokens per CPU second", "cpu_rate"), ("peak memory, MiB", "peak_mib")) if sides else ()
    ):
        rows.append(
            f"| {words} | "
            + " | ".join(f"{sides[n][figure]['median']:,.0f}" if n in sides else "" for n in losses)
            + " |"
        )
    return rows


def measured_on(table: dict[str, Any]) -> str:
    where = table["machine"]
    versions = ", ".join(f"{library} {version}" for library, version in where["versions"].items())
    return (
        f"{where['cpu']}, {where['cores']} cores, {where['threads']} thread(s) a side; {versions}; "
        f"commit {where['commit']}, {where['date']}."
    )


def show() -> None:
    """Print all tables. A ratio is the median over rounds of neighbours in time, with the lowest and the
    highest; `by CPU time` is the same by the CPU seconds of the two processes, which a busy machine disturbs
    less. Peak memory is the resident memory of the whole process up to its last step; `losses`: the largest
    difference from ours in the first steps.
    """
    for name in (*STAGES, *FROZEN):
        for table in tables_of(name):
            print(f"{table.get('markdown') or markdown(table)}\n{measured_on(table)}\n")


def report() -> None:
    page = ROOT / "docs" / "benchmarks.md"
    text = page.read_text(encoding="utf-8")
    for name, lines in tables_of_the_page().items():
        start = f"<!-- {name}: written by run_all.py -->"
        before, rest = text.split(start)
        text = "\n".join([before + start, *lines, END + rest.split(END, 1)[1]])
    page.write_text(text, encoding="utf-8")


def real() -> list[str]:
    """What real.py measured."""
    tables = json.loads((RESULTS / "real.json").read_text())
    shown = [table.get("markdown") or markdown(table) for table in tables.values()]
    return [text.rstrip("\n") + "\n" for text in shown]  # a blank line between tables


def tables_of_the_page() -> dict[str, list[str]]:
    return {"benchmarks": floors(), "shakespeare": shakespeare(), "real": real()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages", nargs="+", default=list(STAGES), choices=STAGES)
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args()
    failed = []
    for stage in [] if args.report else args.stages:
        if subprocess.run(
            [sys.executable, str(HERE / f"{stage}.py"), "--rounds", str(args.rounds)], cwd=ROOT
        ).returncode:
            failed.append(stage)
        report()
    report()
    show()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
