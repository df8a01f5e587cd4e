"""The figures that need a GPU: one script, under ten minutes on an H200, random weights and random tokens, no network.

    python benchmarks/gpu.py [--minutes 9.5] [--only sft dpo]       # writes $OUT/gpu.json, else gpu.json beside this file
    python benchmarks/gpu.py --device cpu --tiny                    # every section at toy sizes: to see that it runs

TRL is not needed and not called: what stands for it is in gpu_sections.py. A section that fails says so in one line and the
next one begins; each has a share of the time. TRACEBACK=1 shows where.
"""

import argparse
import json
import os
import signal
import subprocess
import time
import traceback
from pathlib import Path
from typing import Any

from compare import HERE, machine
from gpu_bench import Bench, Row, TimeIsOver
from gpu_sections import attention, dpo, grpo_step, head, long_row, pretrain, sampling, sft

from common.memory import empty_caches  # isort: skip

import psutil
import torch
import transformers

SECTIONS = {  # and seconds at most
    "pretrain": (pretrain, 175),
    "sft": (sft, 85),
    "dpo": (dpo, 60),
    "sampling": (sampling, 125),
    "grpo": (grpo_step, 45),
    "head": (head, 25),
    "attention": (attention, 25),
    "long row": (long_row, 25),
}


def markdown(rows: list[Row]) -> str:
    lines = []
    for section in dict.fromkeys(row["section"] for row in rows):
        these = [row for row in rows if row["section"] == section]
        columns = list(dict.fromkeys(key for row in these for key in row if key != "section"))
        lines += [f"**{section}**", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        for row in these:
            cells = (row.get(c, "") for c in columns)
            lines.append("| " + " | ".join(f"{c:,}" if isinstance(c, int) and c > 9999 else str(c) for c in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def nvidia_smi() -> str:
    """Driver, clocks now and at most, power and its limit, temperature."""
    asked = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return repr(error)
    return " | ".join(done.stdout.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    args = parser.parse_args()
    imports = time.time() - psutil.Process().create_time()  # half a minute where the files are not in memory yet
    end = time.monotonic() + 60 * args.minutes - imports
    transformers.logging.set_verbosity_error()
    bench = Bench(args.device, args.tiny)
    try:
        facts = machine()
    except (OSError, KeyError) as error:  # no git there
        facts = {"machine": repr(error), "versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
    facts |= {"device": torch.cuda.get_device_name(bench.device) if bench.cuda else "cpu", "tiny": args.tiny}
    if bench.cuda:
        facts["nvidia-smi"] = nvidia_smi()
    facts["peers"] = "TRL's settings written out with transformers; TRL itself was not run"
    print(json.dumps(facts), flush=True)
    file = Path(os.environ.get("OUT", HERE)) / "gpu.json"
    if args.tiny and "OUT" not in os.environ:
        file = None

    def too_long(*_: Any) -> None:
        raise TimeIsOver

    signal.signal(signal.SIGALRM, too_long)
    times = {}
    for name in args.only:
        work, most = SECTIONS[name]
        left = min(most, end - time.monotonic())
        began = time.monotonic()
        print(f"{name}, at most {left:.0f} s", flush=True)
        try:
            if left < 5:
                raise TimeIsOver
            if args.tiny:
                torch.compiler.set_stance("force_eager")
            bench.deadline = time.monotonic() + left
            signal.setitimer(signal.ITIMER_REAL, left)
            work(bench)
        except TimeIsOver:
            print(f"    {name}: its time is over; what is missing was not measured", flush=True)
        except Exception as error:
            print(f"    {name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
            if os.environ.get("TRACEBACK"):
                traceback.print_exc()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        torch._dynamo.reset()
        empty_caches(bench.device)
        times[name] = round(time.monotonic() - began, 1)
        if file is not None:
            file.write_text(json.dumps({"machine": facts, "seconds": times, "rows": bench.rows}, indent=1) + "\n")
    print()
    print(markdown(bench.rows))
    print("seconds: " + ", ".join(f"{name} {took}" for name, took in times.items()))


if __name__ == "__main__":
    main()
