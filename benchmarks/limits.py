"""Where the time of a training step goes on a CPU, and so how much faster it could become at all.

    python benchmarks/limits.py [--rounds 3] [--only "SFT, 20M"]

Each of our runs of the other benchmarks, alone, twice: a few steps by the clock, and the same steps, of the
same rows, under torch's profiler. Matrix products and attention (SDPA) are counted by the profiler, with the
floating-point operations that the shapes of the products ask for; the rest of a step (norms, activations,
softmax of the head, gathers, autograd, Python) is what the clock has beyond them. Peak: the fastest of some
large products, in the profiled process. `at most`: how much faster a step would be if the rest took no time,
and if, besides, the products ran at the peak. The profiler counts time by the wall: the machine should be
otherwise idle. With --only the table is printed, and the saved one kept.
"""

from collections.abc import Iterator
import gc
import json
import os
from pathlib import Path
import runpy
import statistics
import sys
import time
from typing import Any

from compare import INPUTS, ROOT, WORK, arguments, our_words, run_process, save, wanted

LENGTH, BATCH = 1024, 8
STEPS, WARM_UP = 6, 2
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise")


def cases() -> dict[str, tuple[dict[str, str] | None, tuple[Any, ...]]]:
    """{title: (environment, words of the command)}."""
    bf16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}

    def run(script: str, model: str, rows: str, *words: Any) -> tuple[Any, ...]:
        return (
            script,
            "--model_name_or_path",
            INPUTS / model,
            "--dataset_name",
            INPUTS / f"{rows}.jsonl",
            *words,
        )

    chats = ("--max_length", LENGTH, "--per_device_train_batch_size", BATCH)
    pairs = ("--max_length", LENGTH, "--per_device_train_batch_size", 4)
    documents = ("--packing_strategy", "bfd", "--max_length", LENGTH, "--per_device_train_batch_size", 2)
    full = ("--max_length", 512, "--per_device_train_batch_size", BATCH)
    found = {
        "SFT, 1.3M": (None, run("train_sft.py", "tiny", "chats", *chats)),
        "SFT, 20M": (None, run("train_sft.py", "20m", "chats", *chats)),
        "DPO, 1.3M": (None, run("train_dpo.py", "tiny", "pairs", *pairs)),
        "pretrain, 1.3M, documents": (None, run("train_pretrain.py", "tiny", "pages", *documents)),
        "pretrain, 20M, documents": (None, run("train_pretrain.py", "20m", "pages", *documents)),
        "pretrain, 1.3M, full rows of 512": (None, run("train_pretrain.py", "tiny", "text", *full)),
        "pretrain, 20M, full rows of 512": (None, run("train_pretrain.py", "20m", "text", *full)),
    }
    cpu = Path("/proc/cpuinfo")
    if cpu.exists() and "avx512_bf16" in cpu.read_text():
        found["SFT, 20M, bfloat16 autocast"] = (bf16, run("train_sft.py", "20m", "chats", *chats))
        found["pretrain, 20M, full rows of 512, bfloat16 autocast"] = (
            bf16,
            run("train_pretrain.py", "20m", "text", *full),
        )
    return found


# --- in the process that is measured ------------------------------------------------------------------------


def peak(dtype: Any) -> float:
    """GFLOP/s of the fastest of some large matrix products."""
    import torch

    best = 0.0
    for n, k, m in ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 512, 2048)):
        a, b = torch.randn(n, k, dtype=dtype), torch.randn(k, m, dtype=dtype)
        for _ in range(8):
            begun = time.perf_counter()
            a @ b
            best = max(best, 2e-9 * n * k * m / (time.perf_counter() - begun))
    return best


def measured(words: list[str], is_profiled: bool) -> dict[str, Any]:
    """Run a script as `python words` would, and look at its steps after the first WARM_UP."""
    sys.argv, sys.path[0] = words, str(ROOT)
    from common.run import Run
    import torch
    from torch.profiler import ProfilerActivity, profile

    steps = Run.steps
    clock: list[float] = []
    events: list[Any] = []

    def watched(self: Run, *args: Any, **named: Any) -> Iterator[int]:
        for done, step in enumerate(steps(self, *args, **named)):
            if done in (WARM_UP, WARM_UP + STEPS):
                clock.append(time.perf_counter())
            if not (is_profiled and WARM_UP <= done < WARM_UP + STEPS):
                yield step
                continue
            # a step at a time: the events of several take memory that slows them down
            with profile(activities=[ProfilerActivity.CPU], with_flops=True, acc_events=True) as watch:
                yield step
            events.extend(watch.key_averages())
            del watch
            gc.collect()

    Run.steps = watched
    runpy.run_path(words[0], run_name="__main__")
    if not is_profiled:
        return {"step_s": (clock[1] - clock[0]) / STEPS}
    products = [event for event in events if event.key in PRODUCTS]
    attention = [
        event for event in events if "scaled_dot_product" in event.key or "flash_attention" in event.key
    ]
    bf16 = os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16"
    return {
        "products_s": sum(event.self_cpu_time_total for event in products) / 1e6 / STEPS,
        "attention_s": sum(event.self_cpu_time_total for event in attention) / 1e6 / STEPS,
        "gflop": sum(event.flops for event in products) / 1e9 / STEPS,
        "peak": peak(torch.bfloat16 if bf16 else torch.float32),
    }


# --- the table ----------------------------------------------------------------------------------------------


def one_round(words: tuple[Any, ...], env: dict[str, str] | None) -> dict[str, Any]:
    result, found = WORK / "limits.json", {}
    for how in ("clocked", "profiled"):
        run_process([__file__, str(result), how, *our_words(*words, "--max_steps", WARM_UP + STEPS)], env)
        found |= json.loads(result.read_text())
    return found


def entry(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Of a case: shares of a step, and the limits. The rates are 0 where no product was seen."""
    step, products, attention, gflop, best = (
        statistics.median(found[name] for found in rounds)
        for name in ("step_s", "products_s", "attention_s", "gflop", "peak")
    )
    at_peak = gflop / best
    return {
        "step_s": step,
        "products": products / step,
        "attention": attention / step,
        "rest": 1 - (products + attention) / step,
        "gflops": gflop / products if products else 0.0,
        "peak": best,
        "without_the_rest": step / (products + attention),
        "and_at_peak": step / (at_peak + attention),
    }


def table(found: dict[str, dict[str, float]], rounds: int) -> dict[str, Any]:
    lines = [
        f"**where a step goes**, medians of {rounds} rounds",
        "",
        "| run | a step | matrix products | attention | the rest | products, GFLOP/s | peak, GFLOP/s | at most, without the rest | and products at the peak |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        lines.append(
            f"| {name} | {row['step_s']:.2f} s | {row['products']:.0%} | {row['attention']:.0%} | {row['rest']:.0%} "
            f"| {row['gflops']:.0f} | {row['peak']:.0f} | {row['without_the_rest']:.2f}× | {row['and_at_peak']:.2f}× |"
        )
    return {
        "title": "where a step goes",
        "rounds": rounds,
        "cases": found,
        "markdown": "\n".join(lines) + "\n",
    }


def main() -> None:
    args = arguments(__doc__)
    unknown = [name for name in args.only or () if name not in cases()]
    if unknown:
        raise SystemExit(f"--only {unknown[0]}: one of {', '.join(cases())}")
    found = {}
    for name, (env, words) in cases().items():
        if wanted(args.only, name):
            print(name, file=sys.stderr, flush=True)
            found[name] = entry([one_round(words, env) for _ in range(args.rounds)])
    result = table(found, args.rounds)
    if args.only:
        print(result["markdown"])
    else:
        save("limits", [result])


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].endswith(".json"):  # a round
        Path(sys.argv[1]).write_text(json.dumps(measured(sys.argv[3:], sys.argv[2] == "profiled")))
    else:
        main()
