"""Which metrics share a plot, the order of the plots, and curves.png, which shows them."""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from common.errors import printable, say

NOT_DRAWN = ("step", "num_tokens", "epoch", "seconds")  # axes, and what they determine
FIRST = ("reward", "rewards/margins", "rewards/accuracies", "loss", "mean_token_accuracy")
LAST = ("perplexity", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "memory_gib", "bad_steps")
MACHINE = LAST[1:]
SCORE = re.compile(r"rewards/(.+)/mean")
FEW = 12  # up to so many points are drawn as markers; a line would suggest values nobody measured


def frame_of(name: str) -> str:
    """The plot that a metric belongs to: training and evaluation share one, as do all temperatures, a reward and its
    evaluation, and memory and its peak."""
    frame = re.sub(r"_t[\d.]+$", "", name.removeprefix("eval_")) if name.startswith("eval_") else name
    score = SCORE.fullmatch(frame)
    return score[1] if score else "memory_gib" if frame == "peak_memory_gib" else frame


def frames_of(names: Iterable[str]) -> dict[str, list[str]]:
    """{plot: its metrics, training first}, in order of importance: rewards, margins and the loss first, then scores of
    completions, machine statistics last."""
    frames: dict[str, list[str]] = {}
    drawn = [name for name in names if name not in NOT_DRAWN]
    for name in sorted(drawn, key=lambda name: name.startswith("eval_")):
        frames.setdefault(frame_of(name), []).append(name)
    rewarded = "reward" in frames  # then the loss is centred on 0 by construction
    losses = [frame for frame in frames if frame.endswith("loss")]

    def place(frame: str) -> tuple[int, int, str]:
        if frame in LAST:
            return 5, LAST.index(frame), frame
        if frame in FIRST and not (rewarded and frame == "loss"):
            return (1 if frame == "reward" or not rewarded else 3), FIRST.index(frame), frame
        if any(SCORE.fullmatch(name) for name in frames[frame]):
            return 2, 0, frame
        if all(name.startswith("eval_") for name in frames[frame]) and frame not in losses:
            return 2, 1, frame
        if frame in ("completions/mean_length", "entropy", "kl"):
            return 3, 0, frame
        return 4, int(frame.startswith(("clip_ratio", "sampling"))), frame

    return {frame: frames[frame] for frame in sorted(frames, key=place)}


def draw_curves(output_dir: Path, title: str = "") -> None:
    """Write curves.png from metrics.jsonl: metrics that change over the steps, training and evaluation in one plot."""
    try:
        from matplotlib.figure import Figure  # pyplot loads more slowly, and looks for a display
    except ImportError:
        say("curves.png was not drawn: pip install matplotlib", sys.stderr)
        return
    curves: dict[str, tuple[list[int], list[float]]] = {}
    metrics = output_dir / "metrics.jsonl"
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        for name, value in row.items():
            if name not in NOT_DRAWN and isinstance(value, int | float):
                steps, values = curves.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(value)
    constant = {name for name, (_, values) in curves.items() if len(values) > 1 and min(values) == max(values)}
    frames = frames_of(curves)
    frames = {frame: names for frame, names in frames.items() if not constant.issuperset(names)} or frames
    if not frames:  # nothing was logged or evaluated
        return
    columns = min(4, len(frames))
    rows = -(-len(frames) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.6 * rows + 0.3))
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(frames) :]:
        axis.axis("off")
    for axis, (frame, names) in zip(axes.flat, frames.items(), strict=False):
        evaluated = [name for name in names if name.startswith("eval_")]
        colours = [name for name in names if name not in evaluated] + [""] * (len(evaluated) == len(names)) + evaluated
        for name in names:
            few = len(curves[name][0]) <= FEW
            style = {"color": f"C{colours.index(name)}", "markersize": 4, "linewidth": 1.2, "zorder": 3 if few else 2}
            axis.plot(*curves[name], "o" if few else "-", label=_label(name), **style)
        values = [value for name in names for value in curves[name][1]]
        if is_logarithmic(frame, min(values), max(values)):
            axis.set_yscale("log")
        axis.set_title(_label(frame), fontsize=9)
        axis.set_xlabel("step", fontsize=7)
        axis.tick_params(labelsize=7, which="both")
        axis.grid(alpha=0.3)
        if len(names) > 1:
            axis.legend(fontsize=7)
    figure.suptitle(_label(title), fontsize=11)
    figure.tight_layout()
    figure.savefig(output_dir / "curves.png", dpi=110)


def is_logarithmic(frame: str, least: float, greatest: float) -> bool:
    """Whether a plot reads better on a logarithmic scale: a loss that falls to a small fraction of its start."""
    return bool(re.search("loss|perplexity", frame)) and least > 0 and greatest > 8 * least


def _label(text: str) -> str:
    """A name escaped for matplotlib, which reads text between dollars as a formula."""
    return printable(text).replace("$", "\\$")
