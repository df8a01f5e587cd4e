"""The figures that need a GPU: one command, under nine minutes on an H200, no network.

    python benchmarks/gpu.py [--minutes 9] [--only sft dpo] [--wheels wheels]    # writes $OUT/gpu.json, else gpu.json beside this file
    python benchmarks/gpu.py --device cpu --tiny                                 # every section at toy sizes: to see that it runs

Random weights and random tokens, but for the fixed GRPO task (grpo_task.py). Beside ours stands what TRL computes, written out
with transformers (gpu_train.py, gpu_grpo.py), and TRL itself where it is installed or its wheels are carried (carry_trl.sh).
What is measured is saved after each side. A side that fails is one line, and the next one begins; each section has a share of
the time. This process only watches: where one that measures dies, hangs or loses the GPU, another goes on with the next
section. TRACEBACK=1 shows where it failed.
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

SECTIONS = {  # module, function, and seconds at most
    "pretrain": ("gpu_train", "pretrain", 100),
    "sft": ("gpu_train", "sft", 50),
    "sft 8k": ("gpu_train", "sft_8k", 30),
    "dpo": ("gpu_train", "dpo", 35),
    "sampling": ("gpu_grpo", "sampling", 75),
    "grpo": ("gpu_grpo", "grpo_step", 35),
    "head": ("gpu_parts", "head", 30),
    "attention": ("gpu_parts", "attention", 15),
    "long row": ("gpu_train", "long_row", 20),
    "task": ("gpu_trl", "task", 60),
    "trl": ("gpu_trl", "sft_trl", 70),
}
LOST, GRACE = 70, 15  # exit status of a process that has lost its GPU; seconds that a section may be late before it is ended
LEAST = 5


def markdown(rows: list[dict[str, Any]]) -> str:
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


def nvidia_smi(asked: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return repr(error)
    return " | ".join(done.stdout.splitlines())


def write(file: Path, state: dict[str, Any]) -> None:
    """Whole or not at all."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(state, indent=1) + "\n")
    os.replace(temporary, file)


# --- the process that watches -------------------------------------------------------------------------------------------


def supervise(args: argparse.Namespace, file: Path) -> dict[str, Any]:
    """The state when all sections are done, or the time is over."""
    end = time.time() + 60 * args.minutes
    write(file, {"rows": [], "seconds": {}, "ended": {}, "now": None})
    names = list(args.only)
    while names and end - time.time() > LEAST:
        command = [
            sys.executable,
            __file__,
            "--worker",
            str(file),
            "--end",
            str(end),
            "--device",
            args.device,
            "--only",
            *names,
        ]
        command += ["--tiny"] * args.tiny + (["--wheels", str(args.wheels)] if args.wheels else [])
        process = subprocess.Popen(command, start_new_session=True)
        try:
            died = watch(process, file, end)
        finally:
            end_family(process)
        state = json.loads(file.read_text())
        if state["now"] is None:
            if process.returncode:  # before its first section: another would die as well
                print(f"the process that measures ended with {process.returncode}", flush=True)
            break
        name = state["now"]["name"]
        reason = died or f"its process ended with {process.returncode}"
        print(f"    {name}: {reason}; another process goes on", flush=True)
        state["ended"][name], state["now"] = reason, None
        write(file, state)
        names = names[names.index(name) + 1 :]
    return json.loads(file.read_text())


def watch(process: subprocess.Popen, file: Path, end: float) -> str | None:
    """Wait for it. Why it was not waited for any longer: its section hangs, where no signal reaches it."""
    while process.poll() is None:
        time.sleep(0.5)
        now = json.loads(file.read_text())["now"]
        if time.time() > min(end, now["until"] if now else end) + GRACE:
            return "it hung"
    return None


def end_family(process: subprocess.Popen) -> None:
    """With the processes that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


# --- the process that measures ------------------------------------------------------------------------------------------


def work(args: argparse.Namespace, file: Path) -> None:
    import importlib

    from compare import machine
    from gpu_bench import Bench, DeviceIsLost, TimeIsOver  # which sets what torch reads when it is imported
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    state = json.loads(file.read_text())
    bench = Bench(args.device, args.tiny, wheels=args.wheels)
    if "machine" not in state:
        try:
            facts = machine()
        except (OSError, KeyError) as error:  # no git there
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            facts = {"machine": repr(error), "versions": versions}
        facts |= {"device": torch.cuda.get_device_name(bench.device) if bench.cuda else "cpu", "tiny": args.tiny}
        if bench.cuda:
            facts["cuda"] = torch.version.cuda
            facts["nvidia-smi"] = nvidia_smi("driver_version,clocks.max.sm,clocks.mem,power.limit,temperature.gpu")
        state["machine"] = facts
        print(json.dumps(facts), flush=True)
    bench.rows = state["rows"]
    bench.save = lambda: write(file, state)

    def too_long(*_: Any) -> None:
        raise TimeIsOver

    signal.signal(signal.SIGALRM, too_long)
    if args.tiny:
        torch.compiler.set_stance("force_eager")
    for name in args.only:
        module, function, most = SECTIONS[name]
        left = min(most * (4 if args.tiny else 1), args.end - time.time())  # a busy CPU is no matter then
        if left < LEAST:
            state["ended"][name] = "no time was left for it"
            continue
        print(f"{name}, at most {left:.0f} s", flush=True)
        began, bench.deadline = time.time(), time.monotonic() + left
        state["now"] = {"name": name, "until": began + left}
        bench.save()
        try:
            signal.setitimer(signal.ITIMER_REAL, left)
            getattr(importlib.import_module(module), function)(bench)
        except TimeIsOver:
            state["ended"][name] = "its time is over; what is missing was not measured"
        except DeviceIsLost as error:
            bench.save()
            print(f"    {name}: the GPU is lost: {error}", flush=True)
            os._exit(LOST)
        except Exception as error:
            state["ended"][name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if os.environ.get("TRACEBACK"):
                import traceback

                traceback.print_exc()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if name in state["ended"]:
            print(f"    {name}: {state['ended'][name]}", flush=True)
        state["seconds"][name] = round(time.time() - began, 1)
        if bench.cuda:
            state.setdefault("clocks", {})[name] = nvidia_smi("clocks.sm,power.draw,temperature.gpu")
        bench.clear()
        state["now"] = None
        bench.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="", help="cuda where there is one, else cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--wheels", type=Path, help="a folder of carry_trl.sh")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1"}
    if args.worker:
        work(args, args.worker)
        return
    kept = "OUT" in os.environ or not args.tiny
    folder = Path(os.environ.get("OUT", Path(__file__).resolve().parent)) if kept else Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    state = supervise(args, folder / "gpu.json")
    print()
    print(markdown(state["rows"]))
    print("seconds: " + ", ".join(f"{name} {took}" for name, took in state["seconds"].items()))
    if state["ended"]:
        print("not whole: " + "; ".join(f"{name}: {reason}" for name, reason in state["ended"].items()))


if __name__ == "__main__":
    main()
