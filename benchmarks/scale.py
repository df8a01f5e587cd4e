"""The order and the balance of windows over 8, 64 and 1,024 processes, on one CPU; and the bytes that a
window sends.

    python benchmarks/scale.py  # 1 and 10 million chats, about five minutes, 2 GiB; writes scale.json
    python benchmarks/scale.py --traffic  # the table of what windows send
    python benchmarks/scale.py --quick  # 100,000 chats, half a minute, writes nothing

The planning is the project's own (`Order`, `pack`, `Windows`); a stub stands for Accelerate, which says which
process of how many this is. Lengths are log-normal (median 245 tokens, at most 4,096), the tokens a sparse
file, mapped as the cache maps its own. Nothing is trained and nothing is sent: `traffic` is arithmetic.
"""

import argparse
from datetime import date
import json
import os
from pathlib import Path
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from common.args import CommonArgs  # noqa: E402
from common.collators import Windows  # noqa: E402
from common.data.encode import Layout  # noqa: E402
from common.data.examples import Examples, TokenFile, pack  # noqa: E402
from common.data.order import Order, Shuffled  # noqa: E402
from common.sampling.generate import Sampled  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.clock import reset_peak, resident  # noqa: E402

PROCESSES, MAX_LENGTH, MAX_TOKENS = (8, 64, 1024), 4096, 8192
MODES = {  # per process and micro-batch: examples, or tokens
    "8 chats": {"batch_size": 8},
    "8,192 tokens": {"max_tokens": MAX_TOKENS},
    "2 packs of 4,096": {"batch_size": 2, "packed": True},
}
MODELS = {"8B": 8e9, "70B": 70e9}
KINDS = ("ddp", "fsdp2", "fsdp2 without reshard", "hsdp")


# --- what a window sends ------------------------------------------------------------------------------------


def traffic(
    parameters: float,
    gpus: int,
    kind: str,
    micro_batches: int = 1,
    machine: int = 8,
    weight_bytes: int = 2,
    gradient_bytes: int = 4,
) -> dict[str, float]:
    """Bytes of one window: `gpu`: sent by each GPU, and as many received; `machine`: sent by each machine to
    others.

    parameters: all of them are trained. gpus: in machines of `machine` GPUs each. kind: one of KINDS; with
    hsdp, weights are shared out inside each machine. weight_bytes: in which FSDP gathers (2: bf16);
    gradient_bytes: in which they are summed.

    By rings (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations";
    that NCCL's figures are computed so: nccl-tests, doc/PERFORMANCE.md): over n GPUs an all-gather or a
    reduce-scatter of M bytes sends (n-1)/n M from each of them, an all-reduce twice as much. A ring enters
    and leaves each machine once, so what one GPU sends to the next is what a machine sends to the next.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r}: one of {', '.join(KINDS)}")
    weights, gradients = parameters * weight_bytes, parameters * gradient_bytes
    shards = min(gpus, machine) if kind == "hsdp" else gpus
    replicas = gpus // shards
    alone, between = (shards - 1) / shards, (replicas - 1) / replicas
    # gradients once a window: Accelerate's `accumulate` does not synchronise before the last micro-batch
    if kind == "ddp":
        sent = 2 * alone * gradients
    # every micro-batch gathers its weights: forward, and again backward where they were given up in between
    else:
        gathers = micro_batches * (1 if kind == "fsdp2 without reshard" else 2)
        sent = alone * (gathers * weights + gradients)
    summed = 2 * between * gradients / shards  # each shard over the machines
    outside = summed * shards if kind == "hsdp" else sent * (gpus > machine)
    return {"gpu": sent + summed, "machine": outside}


def traffic_table() -> str:
    """The table of docs/parallel.md, in GB (1e9 bytes): with one micro-batch for each GPU, and with eight."""
    lines = [
        "| model | GPUs | a GPU sends: DDP | FSDP2 | FSDP2 without reshard | HSDP "
        "| 8 micro-batches, out of a machine: DDP | FSDP2 | HSDP |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, parameters in MODELS.items():
        for gpus in PROCESSES:
            figures = [traffic(parameters, gpus, kind)["gpu"] for kind in KINDS]
            figures += [traffic(parameters, gpus, kind, 8)["machine"] for kind in ("ddp", "fsdp2", "hsdp")]
            lines.append(
                f"| {name} | {gpus:,} | {' | '.join(f'{figure / 1e9:,.1f}' for figure in figures)} |"
            )
    return "\n".join(lines)


# --- windows over many processes ----------------------------------------------------------------------------


def process(rank: int, world: int) -> Any:
    """What `Windows` asks of an Accelerator."""
    return SimpleNamespace(
        process_index=rank,
        num_processes=world,
        gradient_accumulation_steps=1,
        device=torch.device("cpu"),
        step=0,
    )


def chats(count: int, folder: Path) -> Examples:
    """Examples of one chat each: lengths log-normal, tokens and mask in files with nothing but holes."""
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1.0, count), 2, MAX_LENGTH).astype(np.int64)
    ends = np.cumsum(lengths)
    mapped = {}
    for name, dtype in (("input_ids", "uint16"), ("loss_mask", "uint8")):
        with open(folder / name, "wb") as file:
            file.truncate(int(ends[-1]) * np.dtype(dtype).itemsize)
        mapped[name] = np.asarray(np.memmap(folder / name, dtype, "r"))
    layout = Layout({name: ("token", str(values.dtype)) for name, values in mapped.items()}, "")
    ones, numbers, nothing = np.ones(count, np.int64), np.arange(count), np.full(count, np.nan)
    file = TokenFile(layout, ends - lengths, ends, ones, lengths, numbers, nothing, mapped, {})
    return Examples([file], [SimpleNamespace(path="chats")])


def median_time(function: Any, arguments: Any) -> float:
    """Seconds of a call."""
    seconds = []
    for argument in arguments:
        start = time.perf_counter()
        function(argument)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(count: int, mode: str, worlds: tuple[int, ...] = PROCESSES) -> dict[str, Any]:
    """One mode on so many chats: what planning costs a process, and how even the windows are."""
    how = MODES[mode]
    with tempfile.TemporaryDirectory() as folder:
        before = resident()
        examples = chats(count, Path(folder))
        reset_peak()
        start = time.perf_counter()
        data = pack(examples, MAX_LENGTH) if how.get("packed") else examples
        packing = time.perf_counter() - start
        train = Shuffled(data, Order(data.counts, seed=0))
        start = time.perf_counter()
        train.order.epoch(0)
        result: dict[str, Any] = {
            "chats": count,
            "mode": mode,
            "tokens": int(data.lengths.sum()),
            "pack_s": packing,
        }
        result |= {
            "order_s": time.perf_counter() - start,
            "mib": resident() - before,
            "peak_mib": resident("VmHWM") - before,
        }
        squares = examples.lengths.astype(np.float64) ** 2
        if how.get("packed"):
            squares = np.array([squares[pack].sum() for pack in data.members])
        result["worlds"] = [over(world, train, how, squares) for world in worlds]
    return result


def over(world: int, train: Shuffled, how: dict[str, Any], squares: np.ndarray) -> dict[str, Any]:
    """One epoch over `world` processes. squares: of the lengths of an example's sequences, added up."""
    args = CommonArgs(per_device_train_batch_size=how.get("batch_size", 1), num_train_epochs=1.0)

    def windows_of(rank: int) -> Windows:
        return Windows(args, process(rank, world), train, max_tokens=how.get("max_tokens", 0))

    start = time.perf_counter()
    windows = windows_of(0)
    steps = len(windows)
    result: dict[str, Any] = {"processes": world, "windows": steps, "len_s": time.perf_counter() - start}

    order, seen = train.order.epoch(0), np.zeros(len(train), np.int64)
    found: dict[str, list[float]] = {"tokens": [], "squares": [], "cost": []}
    full = 0
    for step in range(steps):
        first, parts = windows.start(step), windows.dealt(step)
        owner = np.repeat(np.arange(len(parts)) % world, [len(part) for part in parts])
        members = order[first + np.concatenate([np.array(part, np.int64) for part in parts])]
        np.add.at(seen, members, 1)
        if step < steps - 1 or steps == 1:  # the last one is short
            tokens = np.bincount(owner, train.examples.lengths[members], world)  # of each process
            squared = np.bincount(owner, squares[members], world)
            for name, own in (("tokens", tokens), ("squares", squared), ("cost", tokens + squared / 12288)):
                found[name].append(own.max() / own.mean())
            full += int(tokens.sum())
    result["each_once"] = bool((seen == 1).all())
    for name, ratios in found.items():
        result[f"{name}_max_over_mean"] = {"median": statistics.median(ratios), "worst": max(ratios)}
    result["tokens_per_window"] = round(full / len(found["tokens"]))

    # What the processes themselves take from a window, in the middle of the epoch, is all that is dealt out
    # in it.
    step = steps // 2
    parts = windows.dealt(step)
    for rank in range(world) if world <= 64 else (0, 1, world // 2, world - 1):
        own = windows_of(rank)
        own._budget = windows._budget  # what it knows already
        if own[step]._mine != parts[rank::world]:
            raise RuntimeError(f"process {rank} of {world} does not take its part of window {step}")

    some = range(min(steps, 8))
    made = [windows[step] for step in some]
    result["deal_s"] = median_time(windows.dealt, some)
    result["window_s"] = median_time(windows.__getitem__, some)
    result["total_s"] = median_time(lambda window: window.total("loss_mask"), made)
    result["rows_s"] = median_time(list, made)
    return result


def rollout(world: int, each: int = 8, tokens: int = 1000) -> dict[str, float]:
    """GRPO gives every process the completions of all, pickled: their MB, and the seconds in which one reads
    them."""
    rng = np.random.default_rng(0)
    text = "word " * (tokens * 4 // 5)
    one = [
        (
            Sampled(rng.integers(0, 150_000, tokens).tolist(), rng.normal(-1, 1, tokens).tolist(), True),
            text + str(i),
            [0.0],
        )
        for i in range(each)
    ]
    pickled = pickle.dumps(one)
    start = time.perf_counter()
    everyones = [completion for _ in range(world) for completion in pickle.loads(pickled)]
    return {
        "completions": len(everyones),
        "MB": world * len(pickled) / 1e6,
        "seconds": time.perf_counter() - start,
    }


def markdown(results: list[dict[str, Any]], rollouts: list[dict[str, float]], about: dict[str, Any]) -> str:
    """The tables of a measurement."""
    lines = [
        f"`{about['command']}`, {about['date']}, {about['machine']}; Python {about['python']}, numpy {about['numpy']}. One",
        "process plans for one of so many; all of them plan alike. Times are of a shared machine: noisy.",
        "",
        "What planning costs a process at its start: seconds to pack and to draw an epoch's order; memory kept (lengths, borders,",
        "rows, packs, order), and at most.",
        "",
        "| chats | micro-batch | tokens | pack | order | kept | peak |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        packing = f"{r['pack_s']:.1f} s" if "packs" in r["mode"] else "–"
        cells = (f"{r['chats']:,}", r["mode"], f"{r['tokens'] / 1e9:.2f} G", packing, f"{r['order_s']:.2f} s")
        lines.append(f"| {' | '.join(cells)} | {r['mib']:,.0f} MiB | {r['peak_mib']:,.0f} MiB |")
    most = max(r["chats"] for r in results)
    each_once = all(w["each_once"] for r in results for w in r["worlds"])
    lines += [
        "",
        f"What a window of {most:,} chats costs a process (milliseconds). deal: which micro-batch has which example; window: that,",
        "and a view of each example of all processes; trained: their trained tokens added up, which reads pages of the file for",
        "the first time; row: the process's own batch. count: the windows of an epoch, once. Then the busiest process over the mean",
        "(median window, worst window) in tokens n, in n² of the sequences, and in n + n²/12288, the cost that windows are balanced",
        f"by (hidden size 1024). Each example of an epoch was seen exactly once: {'yes, always' if each_once else '**no**'}.",
        "",
        "| micro-batch | processes | windows | count | deal | window | trained | row | tokens | squares | cost |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in (r for r in results if r["chats"] == most):
        for w in r["worlds"]:
            cells = [r["mode"], f"{w['processes']:,}", f"{w['windows']:,}", f"{w['len_s']:.1f} s"]
            cells += [f"{1000 * w[name]:.1f}" for name in ("deal_s", "window_s", "total_s", "rows_s")]
            ratios = [w[f"{name}_max_over_mean"] for name in ("tokens", "squares", "cost")]
            cells += [f"{ratio['median']:.2f}, {ratio['worst']:.2f}" for ratio in ratios]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Completions of a GRPO rollout, 8 of 1,000 tokens from each process, as every process gets them:",
        "",
        "| processes | completions | pickled | read by a process in |",
        "|---|---|---|---|",
    ]
    for world, found in zip(PROCESSES, rollouts, strict=True):
        lines.append(
            f"| {world:,} | {found['completions']:,} | {found['MB']:.1f} MB | {found['seconds']:.2f} s |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few chats, and nothing is written")
    parser.add_argument(
        "--one", nargs=2, metavar=("CHATS", "MODE"), help="one measurement, as JSON: a process of its own"
    )
    parser.add_argument("--traffic", action="store_true", help="only the table of what windows send")
    parser.add_argument("--show", action="store_true", help="measure nothing: the tables of scale.json")
    args = parser.parse_args()
    file = ROOT / "benchmarks" / "scale.json"
    if args.show:
        kept = json.loads(file.read_text())
        print(markdown(kept["results"], kept["rollouts"], kept))
        return
    if args.traffic:
        print(traffic_table())
        return
    if args.one:
        print(json.dumps(measure(int(args.one[0]), args.one[1])))
        return
    results = []
    for count in (100_000,) if args.quick else (1_000_000, 10_000_000):
        for mode in MODES:
            command = [sys.executable, __file__, "--one", str(count), mode]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results.append(json.loads(done.stdout))
            print(f"{count:,} chats, {mode}: done", file=sys.stderr, flush=True)
    model = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ": ?"
    ).split(": ")[1]
    about = {
        "command": " ".join(["python", "benchmarks/scale.py", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "machine": f"{model}, {os.cpu_count()} core(s), shared with other work",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    rollouts = [rollout(world) for world in PROCESSES]
    text = markdown(results, rollouts, about)
    print(text)
    if not args.quick:
        file.write_text(json.dumps({**about, "results": results, "rollouts": rollouts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
