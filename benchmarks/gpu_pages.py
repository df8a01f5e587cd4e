"""The pages' figures of a GPU, written from results/gpu.jsonl by `gpu.py --keep`: between the comment that names
gpu.py and the next `<!-- end -->`."""

from pathlib import Path
import re
from typing import Any

from gpu import SECTIONS, machine_of, machines, measured, ratio, table

Row = dict[str, Any]
START, END = "<!-- gpu: written by gpu.py -->", "<!-- end -->"
# section, side, figure, how it is shown; and what is said around it in each README
FIGURES = (
    ("sft", "0.6B 16 x 512, eager", "tokens/s", "{:,}"),
    ("sft", "0.6B 16 x 512, eager", "MFU", "{:.0%}"),
    ("sft", "0.6B 16 x 512, eager", "peak GiB", "{}"),
    ("grpo", "whole steps, 64 x 256 tokens", "seconds a step", "{}"),
    ("grpo", "sampling, 64 x 256 tokens, graphs", "tokens/s", "{:,}"),
)
WORDS = {
    "README.md": (
        "SFT of 0.6B parameters {} tokens/s",
        "{} MFU",
        "{} GiB",
        "GRPO, 64 completions of 256 tokens, {} s a step",
        "sampling {} tokens/s",
    ),
    "README.zh-CN.md": (
        "0.6B 参数的 SFT 每秒 {} 个 token",
        "MFU {}",
        "{} GiB",
        "GRPO（64 条补全，各 256 个 token）每步 {} 秒",
        "采样每秒 {} 个 token",
    ),
}
NOTHING = {
    "README.md": "**Not yet run on a GPU**: mixed precision, the variable-length attention kernel, the sampler's CUDA graph",
    "README.zh-CN.md": "**还没有在 GPU 上跑过**：混合精度、变长注意力内核、采样器的 CUDA graph",
}
HEADS = {"README.md": "**On one GPU** ({}): {}", "README.zh-CN.md": "**单卡 GPU**（{}）：{}"}
LOSSES = {"README.md": "the loss {} times that of a CPU", "README.zh-CN.md": "损失为 CPU 的 {} 倍"}
COMMAS = {"README.md": ", ", "README.zh-CN.md": "，"}


def where(rows: list[Row], machine: tuple[str, str]) -> str:
    """Card, versions and commits of these figures."""
    these = [row for row in rows if machine_of(row) == machine and "value" in row]
    transformers, commits = ([], [])
    for row in these:
        for name, found in (("transformers", transformers), ("commit", commits)):
            if row[name] not in found:
                found.append(row[name])
    noun = "commit" if len(commits) == 1 else "commits"
    return f"{machine[0]}, torch {machine[1]}, transformers {', '.join(transformers)}, {noun} {', '.join(commits)}"


def sentence(rows: list[Row], page: str) -> str:
    """Of a README: the machine with the most figures."""
    known = [machine for machine in machines(rows) if measured(rows, machine)]
    if not known:
        return NOTHING[page]
    machine = max(known, key=lambda one: sum(map(len, measured(rows, one).values())))
    there = measured(rows, machine)
    parts = []
    for (section, side, figure, form), words in zip(FIGURES, WORDS[page], strict=True):
        row = there.get(section, {}).get(side)
        if row and figure in row["value"]:
            parts.append(words.format(form.format(row["value"][figure])))
    right = there.get("right", {})
    if "SFT, bf16" in right and (times := ratio("right", "SFT, bf16", right)):
        parts.append(LOSSES[page].format(times))
    return HEADS[page].format(where(rows, machine), COMMAS[page].join(parts) or "-")


def section_tables(rows: list[Row], sections: list[str]) -> str:
    """Of each machine: its tables, and what has not been measured there."""
    blocks = []
    for machine in machines(rows):
        there = measured(rows, machine)
        shown = [table(rows, machine, section) for section in sections]
        lines = [f"**{where(rows, machine)}**", "", *filter(None, shown)]
        missing = []
        for section in sections:
            absent = [side for side in SECTIONS[section] if side not in there.get(section, {})]
            if len(absent) == len(SECTIONS[section]):
                missing.append(section)
            elif absent:
                missing.append(f"{section} ({'; '.join(absent)})")
        if missing:
            lines.append(f"Not measured there: {', '.join(missing)}.")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) or "Nothing has been measured on a GPU yet."


def write_pages(rows: list[Row], root: Path) -> None:
    texts = {page: sentence(rows, page) for page in WORDS}
    others = [section for section in SECTIONS if section != "memory"]
    texts["docs/benchmarks.md"] = "\n" + section_tables(rows, others) + "\n"
    texts["docs/memory.md"] = "\n" + section_tables(rows, ["memory"]) + "\n"
    for page, text in texts.items():
        file = root / page
        before = file.read_text(encoding="utf-8")
        block = re.compile(re.escape(START) + ".*?" + re.escape(END), re.S)
        assert len(block.findall(before)) == 1, page
        after = block.sub(lambda _, text=text: START + text + END, before)
        file.write_text(after, encoding="utf-8")
