"""The figures that need a GPU: three calls in this order, each under ten minutes, without a network.

    python benchmarks/gpu.py --plan                   # what to bring along, what each call does, and for how long
    python benchmarks/gpu.py a                        # then b, then c
    python benchmarks/gpu.py b --only sft head        # some sections of a call
    python benchmarks/gpu.py a --device cpu --tiny    # a rehearsal at toy sizes

A figure is a line of gpu_a.jsonl (gpu_b, gpu_c; in $OUT, else beside this file), written when it is found.
Each section is a process of its own: where it dies or its time is over, what it found stays, and the next one
begins. TRACEBACK=1 shows where one failed. Weights and tokens are random but for the scripts and the fixed
GRPO task (grpo_task.py); beside ours stands what TRL computes, written out with transformers, and in the last
call TRL itself.
"""

import argparse
import json
import os
from pathlib import Path
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

CALLS = {  # call: section: its module, seconds at most, what it does
    "a": {
        "tests": (
            "gpu_scripts",
            120,
            "pytest -m gpu: attention, head and CUDA graphs beside the same without the GPU's kernels",
        ),
        "scripts": (
            "gpu_scripts",
            440,
            "the four scripts, 40 steps each: float32, bf16, fp16, compiled, LoRA, resumed after kill -9; losses within 1 % of "
            "float32's and the CPU's",
        ),
    },
    "b": {
        "sampling": (
            "gpu_grpo",
            150,
            "beside generate() and continuous batching; captures and replays of CUDA graphs",
        ),
        "grpo": ("gpu_grpo", 60, "a step: sampling and update"),
        "sft": ("gpu_train", 110, "chats of uneven length beside padding; compiled"),
        "pretrain": ("gpu_train", 160, "124M and 1.1B, eager and compiled: MFU"),
        "head": ("gpu_parts", 60, "the loss head at V = 152k, 248k and 50,257 beside full logits"),
        "attention": ("gpu_parts", 40, "varlen kernel, buckets, dense mask"),
    },
    "c": {
        "sft_8k": ("gpu_train", 80, "rows of 8,192 tokens: kept, compiled, recomputed"),
        "dpo": ("gpu_train", 80, "beside padded pairs and full logits"),
        "long_row": ("gpu_train", 60, "one row of 16k tokens: kept, recomputed"),
        "task": (
            "gpu_scripts",
            140,
            "the fixed GRPO task, start to reward: train_grpo.py, then TRL while there is time",
        ),
        "trl": ("gpu_scripts", 140, "train_sft.py beside TRL's SFTTrainer, a process each"),
    },
}
PLAN = """Bring along: this repository, with data/, and where TRL is to stand beside ours its wheels (2 MB), fetched where pip has an
index. Needed there: torch (2.11 was tried), transformers (5.17), accelerate, psutil, peft; pytest, hypothesis; no `datasets`.

    python -m pip download --no-deps --only-binary :all: --python-version 3.12 --dest wheels \\
        trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19

There, from the root of the repository:
"""
INSTALL = "python -m pip install -q --no-index --no-deps --target /tmp/trl wheels/*.whl; PYTHONPATH=/tmp/trl python benchmarks/gpu.py c"


def plan() -> str:
    """Sections of each call, in their order, with the seconds after which they are ended."""
    lines = [PLAN]
    for call, sections in CALLS.items():
        command = INSTALL if call == "c" else f"python benchmarks/gpu.py {call}"
        lines.append(
            f"    {command}    # at most {sum(most for _, most, _ in sections.values()) / 60:.1f} minutes\n"
        )
        lines += [f"        {name:10} {most:4} s  {what}" for name, (_, most, what) in sections.items()] + [
            ""
        ]
    return "\n".join(lines)


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = []
    for section in dict.fromkeys(row["section"] for row in rows):
        these = [row for row in rows if row["section"] == section]
        columns = list(dict.fromkeys(key for row in these for key in row if key != "section"))
        lines += [f"**{section}**", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        for row in these:
            cells = (row.get(c, "") for c in columns)
            lines.append(
                "| "
                + " | ".join(f"{c:,}" if isinstance(c, int) and c > 9999 else str(c) for c in cells)
                + " |"
            )
        lines.append("")
    return "\n".join(lines)


def nvidia_smi() -> str:
    asked = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__


def run_section(words: list[str], most: float) -> str:
    """In a process of its own, which is ended with those that it has started. How it ended."""
    process = subprocess.Popen([sys.executable, __file__, *words], start_new_session=True)
    try:
        status = process.wait(most)
    except subprocess.TimeoutExpired:
        return f"its {most} s are over"
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    return "done" if status == 0 else f"exit status {status}"


def measure(call: str, name: str, device: str, tiny: bool, file: Path) -> None:
    """The process of a section."""
    import importlib

    from gpu_bench import Bench

    bench = Bench(device, tiny, file)
    print(f"--- {name}: {bench.facts()}", flush=True)
    getattr(importlib.import_module(CALLS[call][name][0]), name)(bench)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("call", nargs="?", choices=list(CALLS))
    parser.add_argument("--plan", action="store_true", help="print it, and do nothing")
    parser.add_argument("--only", nargs="+", metavar="SECTION")
    parser.add_argument("--device", default="", help="cuda where there is one, else cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)  # for the process of a section
    args = parser.parse_args()
    if args.plan or not args.call:
        print(plan())
        return
    os.environ |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1"}
    if args.file:
        measure(args.call, args.only[0], args.device, args.tiny, args.file)
        return
    folder = Path(
        os.environ.get("OUT") or (tempfile.mkdtemp() if args.tiny else Path(__file__).resolve().parent)
    )
    file = folder / f"gpu_{args.call}.jsonl"
    file.write_text("")
    for name, (_, most, _) in CALLS[args.call].items():
        if args.only and name not in args.only:
            continue
        words, began = (
            [args.call, "--only", name, "--device", args.device, "--file", str(file)]
            + ["--tiny"] * args.tiny,
            time.time(),
        )
        ended = run_section(words, most * (5 if args.tiny else 1))  # a CPU may be busy
        row = {
            "section": "sections",
            "side": name,
            "s": round(time.time() - began),
            "ended": ended,
            "then": nvidia_smi(),
        }
        print(f"    {name}: {ended}", flush=True)
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
    print("\n" + markdown([json.loads(line) for line in file.read_text().splitlines()]))


if __name__ == "__main__":
    main()
