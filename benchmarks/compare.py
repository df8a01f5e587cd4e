"""Sides that run alternately, each time in a fresh process, and the tables made of them.

A benchmark names its sides (`ours` first) and how many steps each runs; `alternate` runs A B C, A B C, ...; a
figure of a side is the median over the rounds; a ratio is taken within each round, between neighbours in
time, and shown as `median (lowest to highest)`. This module imports nothing heavy: what it measures are other
processes.
"""

import argparse
from collections.abc import Callable
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WORK = ROOT / "outputs" / "benchmarks"
INPUTS = WORK / "inputs"
RESULTS = HERE / "results"
WARM_UP = 2  # steps of each process that are not timed
LOSSES = 5  # of the first steps, compared where the maths is the same
TOLERANCE = 1e-3

Result = dict[str, Any]


def arguments(description: str | None, rounds: int = 3, **more: dict[str, Any]) -> argparse.Namespace:
    """more: flags of this benchmark, with what argparse is to know of each."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="how often each side runs")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each side")
    parser.add_argument("--only", nargs="+", help="only these tables")
    for name, settings in more.items():
        parser.add_argument(f"--{name}", **settings)
    args = parser.parse_args()
    os.environ.update(
        OMP_NUM_THREADS=str(args.threads),
        MKL_NUM_THREADS=str(args.threads),
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
        HF_DATASETS_DISABLE_PROGRESS_BARS="1",
        HF_DATASETS_CACHE=str(WORK / "datasets"),
    )
    made_by = hashlib.sha256((HERE / "prepare.py").read_bytes()).hexdigest()
    if not (INPUTS / "done").exists() or (INPUTS / "done").read_text() != made_by:
        run_process([str(HERE / "prepare.py"), str(INPUTS)])
    return args


def failure(printed: str) -> RuntimeError:
    """Of a process that failed: its last line that names an exception. What it printed before is shown."""
    print(printed[-3000:], file=sys.stderr, flush=True)
    return RuntimeError(
        (re.findall(r"^[\w.]+: .*", printed, re.M) or printed.splitlines() or ["no output"])[-1]
    )


def run_process(words: list[str], env: dict[str, str] | None = None) -> float:
    """Seconds that a Python process took; its output if it failed."""
    began = time.perf_counter()
    found = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=os.environ | (env or {}), capture_output=True, text=True
    )
    if found.returncode:
        raise SystemExit(f"{' '.join(words)}\n{found.stdout[-2000:]}\n{found.stderr[-4000:]}")
    return time.perf_counter() - began


# --- sides --------------------------------------------------------------------------------------------------


def our_words(script: str, *words: Any, cache: Path = WORK / "cache") -> list[str]:
    """One of our scripts, with settings that are the same on all sides."""
    common = "--learning_rate 1e-4 --lr_scheduler_type constant --warmup_steps 0 --weight_decay 0 --adam_beta2 0.999"
    common += " --eval_steps 0 --save_steps 0 --logging_steps 1 --num_samples 0 --dataset_num_proc 1 --overwrite_output_dir"
    folders = ["--output_dir", str(WORK / "run"), "--dataset_cache_dir", str(cache)]
    return [script, *common.split(), *folders, *map(str, words)]


def ours(script: str, *words: Any, env: dict[str, str] | None = None) -> Callable[[], Result]:
    """A side: see ours.py."""

    def side(cache: Path = WORK / "cache") -> Result:
        result = WORK / "result.json"
        return _measured(["ours.py", str(result), *our_words(script, *words, cache=cache)], result, env)

    return side


def peer(
    kind: str,
    model: str | Path,
    rows: str,
    steps: int,
    batch: int,
    script: str = "peers.py",
    work: Path = WORK / "peer",
    **options: Any,
) -> Callable[[], Result]:
    """A side: see peers.py, or the script. work: what it writes, deleted at the end if it is the default."""

    def side() -> Result:
        spec = {
            "kind": kind,
            "model": str(INPUTS / model),
            "rows": str(INPUTS / rows),
            "steps": steps,
            "batch": batch,
        }
        spec |= {"options": options, "work": str(work)}
        (WORK / "spec.json").write_text(json.dumps(spec))
        result = WORK / "result.json"
        return _measured([script, str(result), str(WORK / "spec.json")], result)

    return side


def _measured(words: list[str], result: Path, env: dict[str, str] | None = None) -> Result:
    result.unlink(missing_ok=True)
    began = time.time()
    run_process([str(HERE / words[0]), *words[1:]], env)
    found = json.loads(result.read_text())
    found["to_first_step_s"] = found["epoch"][1] - began
    found["in_all_s"] = time.time() - began
    for folder in ("run", "peer"):
        shutil.rmtree(WORK / folder, ignore_errors=True)
    return found


def alternate(sides: dict[str, Callable[[], Result]], rounds: int) -> dict[str, list[Result]]:
    """{side: a result per round}, the sides one after the other in each round."""
    found: dict[str, list[Result]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name, side in sides.items():
            found[name].append(side())
            seconds = found[name][-1].get("in_all_s", float("nan"))
            print(f"    round {turn + 1} of {rounds}: {name}, {seconds:.0f} s", file=sys.stderr, flush=True)
    return found


# --- figures ------------------------------------------------------------------------------------------------


def rate(result: Result, amounts: list[float], clock: str = "wall", last: int | None = None) -> float:
    """Amount per second over the timed steps; amounts: of each step, warm-up included. last: steps from there
    on are left out."""
    stamps = result[clock]
    last = min(len(stamps) - 1, len(amounts), last or len(stamps))
    return sum(amounts[WARM_UP:last]) / (stamps[last] - stamps[WARM_UP])


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratios(numerators: list[float], denominators: list[float]) -> dict[str, float]:
    """Of one round each: the median, with the lowest and the highest."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def losses_agree(ours: list[Result], peers: list[Result]) -> dict[str, Any]:
    """The losses of the first steps, side by side. Raises SystemExit where they differ by more than
    TOLERANCE."""
    pairs = list(zip(ours[0]["loss"][:LOSSES], peers[0]["loss"][:LOSSES], strict=True))
    worst = max(abs(a - b) for a, b in pairs)
    if worst > TOLERANCE:
        raise SystemExit(f"the losses of the first steps differ by {worst:.2g}: {pairs}")
    return {"ours": [a for a, _ in pairs], "peer": [b for _, b in pairs], "largest_difference": worst}


def shown(ratio: dict[str, float], several: bool = True) -> str:
    text = f"**{ratio['median']:.2f}×**"
    return f"{text} ({ratio['low']:.2f} to {ratio['high']:.2f})" if several else text


def compare(
    title: str,
    unit: str,
    sides: dict[str, Callable[[], Result]],
    rounds: int,
    *,
    amounts: Callable[[str, Result], list[float]],
    same_maths: tuple[str, ...] = (),
    best_of: tuple[str, ...] = (),
    against: dict[str, str] | None = None,
) -> dict[str, Any]:
    """A table: rates, memory and ratios of `ours` to each peer.

    amounts(side, result): what each step of the side did, in `unit`. same_maths: peers whose first losses
    must be ours. best_of: peers of which the fastest is marked as the best. against: for a peer, which of our
    sides it is compared with.
    """
    print(title, file=sys.stderr, flush=True)
    found = alternate(sides, rounds)
    table: dict[str, Any] = {"title": title, "unit": unit, "rounds": rounds, "sides": {}}
    for name, results in found.items():
        mine = (against or {}).get(name, "ours")
        entry: dict[str, Any] = {
            "rate": spread([rate(r, amounts(name, r)) for r in results]),
            "cpu_rate": spread([rate(r, amounts(name, r), "cpu") for r in results]),
            "steps": len(results[0]["wall"]) - 1,
            "peak_mib": spread([r["peak_mib"] for r in results]),
            "to_first_step_s": spread([r["to_first_step_s"] for r in results]),
        }
        batches = results[0]["batches"]
        if batches:
            entry["useful_share"] = sum(b["useful"] for b in batches) / sum(b["padded"] for b in batches)
        if name.startswith("ours"):
            entry["useful_share"] = 1.0
        else:
            for clock, key in (("wall", "speedup"), ("cpu", "speedup_cpu")):
                # Over the same steps where the rows are the same, or over all where a side has its own order.
                last = entry["steps"] if name in same_maths else None
                own = [rate(r, amounts(mine, r), clock, last) for r in found[mine]]
                entry[key] = ratios(own, [rate(r, amounts(name, r), clock) for r in results])
            entry["memory"] = ratios([r["peak_mib"] for r in found[mine]], [r["peak_mib"] for r in results])
            entry["compared_with"] = mine
        if name in same_maths:
            entry["losses"] = losses_agree(found[mine], results)
        table["sides"][name] = entry
    if best_of:
        table["best"] = max(best_of, key=lambda name: table["sides"][name]["rate"]["median"])
    return table


def markdown(table: dict[str, Any]) -> str:
    """The table of `compare` as Markdown."""
    several = table["rounds"] > 1
    rounds = f"medians of {table['rounds']} alternating rounds" if several else "one round"
    lines = [
        f"**{table['title']}**, {rounds}",
        "",
        f"| side | {table['unit']} | ours is faster by | by CPU time | peak memory | ours needs | useful | losses |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, entry in table["sides"].items():
        best = " (best)" if table.get("best") == name else ""
        rate = entry["rate"]
        number = f"{rate['median']:,.0f}" if rate["median"] >= 100 else f"{rate['median']:.2f}"
        cells = [name + best, number]
        cells += (
            [shown(entry["speedup"], several), f"{entry['speedup_cpu']['median']:.2f}×"]
            if "speedup" in entry
            else ["", ""]
        )
        cells.append(f"{entry['peak_mib']['median']:,.0f} MiB")
        cells.append(f"{entry['memory']['median']:.2f}×" if "memory" in entry else "")
        cells.append(f"{entry['useful_share']:.0%}" if "useful_share" in entry else "")
        difference = entry.get("losses", {}).get("largest_difference")
        cells.append(f"{difference:.0e}" if difference is not None else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


# --- results ------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        fields = dict(
            line.split(":", 1) for line in info.read_text().split("\n\n")[0].splitlines() if ":" in line
        )
        fields = {key.strip(): value.strip() for key, value in fields.items()}
        cpu = (
            f"{fields.get('model name', cpu)}, family {fields.get('cpu family')} model {fields.get('model')}"
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = {}
    for name in ("torch", "transformers", "accelerate", "trl", "datasets"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory, 1), "python": platform.python_version(),
        "threads": int(os.environ["OMP_NUM_THREADS"]), "load": os.getloadavg(), "date": time.strftime("%Y-%m-%d"),
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        "versions": versions,
    }  # fmt: skip


def save(name: str, tables: list[dict[str, Any]], only: list[str] | None = None) -> None:
    """results/<name>.json and .md; with `only`, the tables that did not run now are kept as they were."""
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"{name}.json"
    if only and file.exists():
        new = {table["title"] for table in tables}
        tables = [t for t in json.loads(file.read_text())["tables"] if t["title"] not in new] + tables
    for table in tables:
        table.setdefault("machine", machine())
    file.write_text(json.dumps({"tables": tables}, indent=1) + "\n")
    print("\n".join(table.get("markdown") or markdown(table) for table in tables))


def wanted(only: list[str] | None, name: str) -> bool:
    return only is None or name in only
