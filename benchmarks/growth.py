"""Cost as the work grows: time and peak memory of a training step, along the sizes that a user can turn up.

    python benchmarks/growth.py [--device cuda] [--only sequence] [--quick]

A tiny Llama, float32; one step is the forward pass, the backward pass and AdamW. Memory is the most bytes of
tensors that lived at once beside the weights and the optimizer's moments, counted tensor by tensor and so
without noise (what a kernel takes inside a call is not seen). Time is the median CPU time of this process (on
a GPU: the wall clock, synchronised).

Along each size the exponent `k` of `cost ~ size^k` is fitted to the upper half of the points; for the length
of sequences, time is fitted as `a · Σ n + b · Σ n²`. Writes growth.json and growth.png beside this file.
"""

import argparse
from collections.abc import Callable
import json
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from compare import HERE, ROOT, machine

sys.path.insert(0, str(ROOT))

from common.args import CommonArgs  # noqa: E402
from common.collators import flat_batch  # noqa: E402
from common.data import all_trained  # noqa: E402
from common.losses import grpo_loss, segment_ids  # noqa: E402
from common.model import FlatModel, create_model, make_optimizer  # noqa: E402
from common.run.dry_run import Live, nbytes  # noqa: E402
from common.sampling import sample  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

MIB = 2**20
SECONDS = 1.0  # at least so long are the steps of a point timed
Point = dict[str, float]


class Step:
    """A tiny Llama with its optimizer, and what a step of it costs."""

    def __init__(self, device: str, V: int = 512, longest: int = 32768):
        config = transformers.LlamaConfig(
            vocab_size=V, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=longest, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
        self.V, self.device = V, torch.device(device)
        self.model: FlatModel = create_model(config, seed=0).to(self.device).train()
        self.optimizer = make_optimizer(CommonArgs(learning_rate=1e-4), self.model)
        self.train(self.row([8]))  # the moments come into being

    def row(self, lengths: list[int], seed: int = 0) -> dict[str, Any]:
        draw = np.random.default_rng(seed)
        return flat_batch([[all_trained(draw.integers(2, self.V, size=n))] for n in lengths], self.device)

    def train(self, batch: dict[str, Any]) -> None:
        """A step of pretraining and SFT."""
        weights = batch["loss_mask"] / batch["loss_mask"].sum()
        self.update(self.model(batch, nll_weights=weights).nll)

    def update(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def memory(self, work: Callable[[], Any]) -> float:
        """MiB: the most that lives at once in the work, beside the weights and the moments."""
        moments = [x for state in self.optimizer.state.values() for x in state.values()]
        with Live([*self.model.parameters(), *self.model.buffers(), *moments]) as live:
            work()
            return live.most / MIB

    def seconds(self, work: Callable[[], Any]) -> float:
        """Median over so many repetitions as fill SECONDS; at least one."""
        cpu, found = self.device.type == "cpu", []
        while not found or (sum(found) < SECONDS and len(found) < 9):
            began = time.process_time() if cpu else time.perf_counter()
            work()
            if not cpu:
                torch.cuda.synchronize(self.device)
            found.append((time.process_time() if cpu else time.perf_counter()) - began)
        return statistics.median(found)

    def point(self, size: int, lengths: list[int]) -> Point:
        """The cost of a row with sequences of these lengths. Memory comes first: its step is also the
        warm-up."""
        batch = self.row(lengths)
        costs = {
            "memory": self.memory(lambda: self.train(batch)),
            "time": self.seconds(lambda: self.train(batch)),
        }
        return {"size": size, "tokens": sum(lengths), "squares": sum(n * n for n in lengths)} | costs


# --- what grows ---------------------------------------------------------------------------------------------


def doubled(first: int, last: int) -> list[int]:
    return [first * 2**i for i in range((last // first).bit_length())]


def tokens(device: str, quick: bool) -> dict[str, list[Point]]:
    """Rows of 256 tokens, more and more of them in a micro-batch."""
    step = Step(device)
    return {"": [step.point(n, [256] * (n // 256)) for n in doubled(1024, 8192 if quick else 32768)]}


def sequence(device: str, quick: bool) -> dict[str, list[Point]]:
    """Longer sequences: one alone, and so many that the tokens are the same."""
    longest = 4096 if quick else 32768
    step = Step(device)
    sizes = doubled(256, longest)
    return {
        "one sequence": [step.point(n, [n]) for n in sizes],
        f"{longest:,} tokens": [step.point(n, [n] * (longest // n)) for n in sizes],
    }


def sequences(device: str, quick: bool) -> dict[str, list[Point]]:
    """The same tokens as more and more sequences, of uneven (log-normal) lengths."""
    step, total = Step(device), 4096 if quick else 16384
    found = []
    for S in doubled(4, 128 if quick else 1024):
        shares = np.random.default_rng(S).lognormal(0.0, 0.8, S)
        borders = np.round(np.cumsum(shares / shares.sum()) * (total - 2 * S)).astype(int)
        found.append(step.point(S, (np.diff(borders, prepend=0) + 2).tolist()))
    return {f"{total:,} tokens": found}


def vocabulary(device: str, quick: bool) -> dict[str, list[Point]]:
    """Larger vocabularies; the memory is also given without the gradient of the embedding, which is the
    head's, too."""
    found: dict[str, list[Point]] = {}
    for V in [512, 2048, 8192] if quick else [512, 2048, 8192, 32768, 65536, 151936]:
        step = Step(device, V)
        for N in (1024, 2048):
            point = step.point(V, [256] * (N // 256))
            point["beside"] = point["memory"] - nbytes([step.model.lm.get_input_embeddings().weight]) / MIB
            found.setdefault(f"{N:,} tokens", []).append(point)
    return found


def completions(device: str, quick: bool) -> dict[str, list[Point]]:
    """GRPO: 4 prompts of 256 tokens, G completions of 64 for each: sampling them, and the update on them."""
    P, Lp, new = 4, 256, 64
    step = Step(device)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(2, step.V, size=Lp).tolist() for _ in range(P)]
    found: dict[str, list[Point]] = {"sampling": [], "update": []}
    for G in doubled(2, 8 if quick else 32):
        each = [prompt for prompt in prompts for _ in range(G)]
        keys = [(0, i) for i in range(len(each))]

        def draw_completions(each=each, keys=keys) -> list[Any]:
            # a token that does not exist ends a completion: all have the same length
            return sample(step.model, each, keys, stop_ids=[step.V], max_new_tokens=new, batch_size=len(each))

        examples = [
            [
                {
                    "input_ids": np.array(prompt + sampled.ids),
                    "loss_mask": np.array([0] * Lp + [1] * len(sampled.ids), np.uint8),
                    "advantage": (-1.0) ** i,
                }
            ]
            for i, (prompt, sampled) in enumerate(zip(each, draw_completions(), strict=True))
        ]
        batch = flat_batch(examples, step.device)

        def update(batch=batch) -> None:
            logps = step.model(batch, entropy=True).logps
            of = segment_ids(batch["cu_seqlens"], len(logps))
            mask, borders = batch["loss_mask"], batch["cu_seqlens"]
            losses, _ = grpo_loss(logps, logps.detach(), None, batch["advantage"][of], mask, borders)
            step.update(losses.sum() / mask.sum())

        for name, work in (("sampling", draw_completions), ("update", update)):
            size = {"size": G, "tokens": P * (Lp + G * new)}
            found[name].append(size | {"memory": step.memory(work), "time": step.seconds(work)})
    return found


AXES = {
    "tokens": (tokens, "tokens of a micro-batch", 1, 1),
    "sequence": (sequence, "tokens of a sequence", None, 1),
    "sequences": (sequences, "sequences", 0, 0),
    "vocabulary": (vocabulary, "tokens of the vocabulary", 1, 1),
    "completions": (completions, "completions of a prompt", 1, 1),
}  # function, label, and the exponents of the reference lines of time and memory


# --- figures ------------------------------------------------------------------------------------------------


def exponent(points: list[Point], cost: str) -> float:
    """k of cost ~ size^k, by least squares over the upper half of the points."""
    upper = points[len(points) // 2 :] if len(points) > 3 else points
    return float(
        np.polyfit(np.log([p["size"] for p in upper]), np.log([max(p[cost], 1e-9) for p in upper]), 1)[0]
    )


def per_token_and_square(points: list[Point]) -> dict[str, float]:
    """Seconds per token and per square of a length: `time = a · Σ n + b · Σ n²`, by least squares of the
    relative error."""
    times = np.array([p["time"] for p in points])
    sizes = np.array([[p["tokens"], p["squares"]] for p in points], float)
    (a, b), *_ = np.linalg.lstsq(sizes / times[:, None], np.ones(len(points)), rcond=None)
    worst = float(np.abs(sizes @ [a, b] / times - 1).max())
    return {
        "per_token": float(a),
        "per_square": float(b),
        "largest_relative_error": worst,
        "length_of_equal_shares": a / b,
    }


def fits(axis: str, points: list[Point]) -> dict[str, Any]:
    found: dict[str, Any] = {
        cost: round(exponent(points, cost), 3) for cost in ("time", "memory", "beside") if cost in points[0]
    }
    if axis == "sequence":
        found["time_fit"] = per_token_and_square(points)
    return found


def say_table(axis: str, curves: dict[str, list[Point]], fitted: dict[str, Any]) -> None:
    print(f"\n{axis}: {AXES[axis][0].__doc__}")
    for name, points in curves.items():
        print(f"  {name or AXES[axis][1]}")
        for p in points:
            beside = (
                f"   {p['beside']:10.3f} MiB beside the gradient of the embedding" if "beside" in p else ""
            )
            print(f"    {p['size']:>9,}   {p['time']:9.4f} s   {p['memory']:10.3f} MiB{beside}")
        fit = fitted[name]
        text = f"    time ~ size^{fit['time']:.2f}, memory ~ size^{fit['memory']:.2f}"
        if "beside" in fit:
            text += f" (beside the gradient: size^{fit['beside']:.2f})"
        if "time_fit" in fit:
            t = fit["time_fit"]
            text += f"; time = {t['per_token'] * 1e6:.1f} us a token + {t['per_square'] * 1e9:.2f} ns a squared length"
            text += f" (within {t['largest_relative_error']:.0%}; equal at {t['length_of_equal_shares']:,.0f} tokens)"
        print(text, flush=True)


def draw(found: dict[str, Any], file: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, len(found), figsize=(3.1 * len(found), 5.6), squeeze=False)
    for column, (axis, data) in enumerate(found.items()):
        _, label, *slopes = AXES[axis]
        for row, (cost, unit, slope) in enumerate((("time", "s", slopes[0]), ("memory", "MiB", slopes[1]))):
            panel = panels[row][column]
            for name, points in data["curves"].items():
                sizes = np.array([p["size"] for p in points])
                panel.loglog(sizes, [p[cost] for p in points], "o-", markersize=3, linewidth=1, label=name)
            panel.set_title(f"{cost}, {unit}", fontsize=8)
            panel.set_xlabel(label, fontsize=8)
            panel.tick_params(labelsize=7, which="both")
            low, high = panel.get_ylim()
            for k in (1, 2) if slope is None else (slope,):
                last = points[-1][cost] if k else points[0][cost]
                panel.loglog(
                    sizes, last * (sizes / sizes[-1]) ** k, ":", color="grey", linewidth=1, label=f"size^{k}"
                )
            panel.set_xscale("log", base=2)
            panel.set_ylim(min(low, high / 30), max(high, 30 * low) if slope == 0 else high)
            panel.legend(fontsize=6, frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=75)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to see that it runs; nothing is written"
    )
    args = parser.parse_args()
    found = {}
    for axis in args.only:
        curves = AXES[axis][0](args.device, args.quick)
        fitted = {name: fits(axis, points) for name, points in curves.items()}
        say_table(axis, curves, fitted)
        found[axis] = {"curves": curves, "fits": fitted}
    if args.quick or args.only != list(AXES):
        return
    suffix = "" if args.device == "cpu" else f"_{args.device}"
    (HERE / f"growth{suffix}.json").write_text(
        json.dumps({"machine": machine(), "axes": found}, indent=1) + "\n"
    )
    draw(found, HERE / f"growth{suffix}.png")


if __name__ == "__main__":
    main()
