"""The output of a run: metrics.jsonl, console lines, samples, events, summary.json."""

from collections.abc import Callable
import contextlib
import json
import math
from pathlib import Path
import platform
import statistics
import subprocess
import sys
import time
from typing import Any

from accelerate import Accelerator
from common.args import CommonArgs
from common.errors import UserError, quoted, say, without_secrets
from common.files import replace_text, replacing, writing
from common.memory import finest_dtype, memory, relieve
from common.processes import gather_lists, unsharded
from common.run.folder import LINES, is_held
from common.sampling.rewards import text_of
import torch
from torch import Tensor

# Names that a script's metric must not have: lines of metrics.jsonl have values of their own by these names.
RESERVED = {"step", "seconds", "cpu_seconds", "grad_norm", "learning_rate", "num_tokens", "tokens_per_second"}
RESERVED |= {"mfu", "memory_gib", "peak_memory_gib", "bad_steps", "not_finite"}
STATE = ("carry", "num_tokens", "first_eval", "last", "bad_steps", "losses")  # in a checkpoint
SPIKE = 6.0  # standard deviations above the mean of recent losses
# Nats a token between the log-probabilities at sampling and in training; rounding to bfloat16 gives 0.01.
MOST_LOGP_DIFFERENCE = 0.1


class Metrics:
    """Sums and weights kept on the device until they are logged, then reduced over the processes at once.

    A metric is `sum of weighted values / sum of weights` over the micro-batches and processes since it was
    last logged, so that each token (or pair, or completion) counts once. One whose name ends in _max is the
    largest value.
    """

    def __init__(self, accelerator: Accelerator, args: CommonArgs, mfu_per_token: float | None = None):
        """mfu_per_token: gives `mfu` = tokens per second · mfu_per_token."""
        self.accelerator = accelerator
        self.args = args
        self.mfu_per_token = mfu_per_token
        self.output_dir = Path(args.output_dir)
        # {name: [total, weight]} of finished windows, and of the current one; of a maximum [value, 1].
        self.sums: dict[str, Tensor] = {}
        self.window: dict[str, Tensor] = {}
        self.carry: dict[str, list[float]] = {}  # reduced sums that a checkpoint kept for the next log line
        self.window_is_bad = False  # not trained on, so its values do not count
        self.bad_steps: list[int] = []  # steps that were skipped
        # passes events and lines on to the parts of the run
        self.notify: Callable[..., Any] = lambda *_: None
        self.losses: list[float] = []  # recent logged losses, to detect a spike
        self.num_tokens = 0  # of the windows so far, over all processes
        self.first_eval: dict[str, float] = {}  # the first value of each metric of an evaluation
        self.last: dict[str, float] = {}  # the last value of each metric
        self.started = time.perf_counter()
        self.seconds_before = 0.0  # run time before the checkpoint it resumed from
        self.cpu_seconds_before = 0.0
        self._restart_clock()

    def add(self, weights: float | Tensor = 1.0, **values: float | Tensor) -> None:
        """Add values to the current window: each metric is their weighted mean; one whose name ends in _max
        is their maximum.

        weights: of the values' shape, for instance the mask of the tokens that count; or one number for all
        of them. A value of weight 0 cannot be the maximum. Raises UserError for a reserved name.
        """
        for name, value in values.items():
            if name.endswith("_max"):
                value = torch.as_tensor(value).detach()
                if isinstance(weights, Tensor) and weights.shape == value.shape:
                    value = value.masked_fill(weights == 0, -math.inf)
                largest = value.amax()
                self._add(name, largest, largest != -math.inf)
            elif isinstance(value, Tensor):
                by = weights
                if not isinstance(by, Tensor):
                    by = torch.full((), weights, device=value.device)
                if by.dim() and value.dim() and by.shape != value.shape:
                    raise ValueError(
                        f"metrics.add: {name} is {tuple(value.shape)}, and its weights are {tuple(by.shape)}"
                    )
                if not by.dim():
                    by = by.expand(value.shape)
                self._add(name, (value.detach() * by).sum(), by.sum())
            else:
                total = weights.sum() if isinstance(weights, Tensor) else weights
                self._add(name, value * total, total)

    def add_sum(self, **values: float | Tensor) -> None:
        """Add scalars that are this micro-batch's share of the window's value, such as a loss already divided
        by the window's tokens: the metric is their sum over micro-batches and processes."""
        micro_batches = self.accelerator.num_processes * self.accelerator.gradient_accumulation_steps
        for name, value in values.items():
            self._add(name, torch.as_tensor(value).detach(), 1.0 / micro_batches)

    def window_means(self) -> dict[str, float]:
        """The metrics of the current window so far, over all processes. Called on every process."""
        return _means(self._over_processes(self.window, {}))

    def _add(self, name: str, total: float | Tensor, weight: float | Tensor) -> None:
        if name in RESERVED:
            raise UserError(f"a metric is called {name}, as a value that each line has already: rename it")
        _combine(self.window, name, self._pair(total, weight))

    def _pair(self, total: float | Tensor, weight: float | Tensor) -> Tensor:
        pair = torch.zeros(2, dtype=finest_dtype(self.accelerator.device), device=self.accelerator.device)
        pair[0] += total  # not torch.tensor(total, device=...), which would wait for a GPU
        pair[1] += weight
        return pair

    def close_window(self, num_tokens: int = 0) -> None:
        """End the window: its values count, unless it was bad."""
        if not self.window_is_bad:
            for name, pair in self.window.items():
                _combine(self.sums, name, pair)
        self.window = {}
        self.window_is_bad = False
        self.num_tokens += num_tokens

    def reduce(self) -> dict[str, list[float]]:
        """{name: [total, weight]} over all processes, including the carry; resets the sums."""
        carry = {name: torch.tensor(pair, dtype=torch.float64) for name, pair in self.carry.items()}
        reduced = self._over_processes(self.sums, carry)
        self.sums = {}
        self.carry = {}
        return reduced

    def _over_processes(self, sums: dict[str, Tensor], reduced: dict[str, Tensor]) -> dict[str, list[float]]:
        """{name: [total, weight]} of `reduced`, and of the sums of all processes."""
        # Processes may have different metrics.
        names = sorted(set(gather_lists(self.accelerator, list(sums))))
        if names:
            rows = []
            for name in names:
                nothing = self._pair(-math.inf if name.endswith("_max") else 0.0, 0.0)
                rows.append(sums.get(name, nothing))
            table = torch.stack(rows)  # (metrics, 2)
            for of_a_process in self.accelerator.gather(table[None]).cpu().double():
                for name, pair in zip(names, of_a_process, strict=True):
                    _combine(reduced, name, pair)
        return {name: pair.tolist() for name, pair in reduced.items()}

    def state(self, step: int) -> dict[str, Any]:
        """The state to store in a checkpoint. Called on every process."""
        self.carry = self.reduce()
        times = {"seconds": self.seconds(), "cpu_seconds": self.cpu_seconds()}
        return {name: getattr(self, name) for name in STATE} | times

    def seconds(self) -> float:
        """Run time so far, excluding the time between a stop and its resume."""
        return self.seconds_before + time.perf_counter() - self.started

    def cpu_seconds(self) -> float:
        """The CPU time of this process, with all its threads and what it did before the loop; of a resumed
        run together with that before its checkpoint."""
        return self.cpu_seconds_before + time.process_time()

    def _restart_clock(self) -> None:
        """Tokens per second are measured from here on."""
        self.clock = time.perf_counter()
        self.clock_tokens = self.num_tokens

    def restore(self, step: int, state: dict[str, Any]) -> None:
        """Resume from a checkpoint: drop the lines that were written after it."""
        for name in STATE:
            if name in state:
                setattr(self, name, state[name])
        self.clock_tokens = self.num_tokens
        self.seconds_before = state.get("seconds", 0.0)
        self.cpu_seconds_before = state.get("cpu_seconds", 0.0)
        if self.accelerator.is_main_process:
            with writing(self.output_dir):
                last_kept = step if step > 0 else -1  # a new run keeps none, not even those of step 0
                for name in LINES:
                    if (self.output_dir / name).exists():
                        _drop_lines_after(last_kept, self.output_dir / name)

    def log(self, step: int, **now: float | Tensor | None) -> None:
        """Write the means since the last call, and the values given here. step: updates done so far."""
        values = _means(self.reduce())
        seconds = time.perf_counter() - self.clock
        for name, value in now.items():
            if value is not None:  # DeepSpeed does not return the norm
                values[name] = unsharded(value)
        values["num_tokens"] = self.num_tokens
        values["tokens_per_second"] = (self.num_tokens - self.clock_tokens) / max(seconds, 1e-9)
        if self.mfu_per_token:
            values["mfu"] = values["tokens_per_second"] * self.mfu_per_token
        relieve(self.accelerator.device, self.args.empty_cache_above)
        values["memory_gib"], values["peak_memory_gib"], _ = memory(self.accelerator.device)
        if self.bad_steps:
            values["bad_steps"] = len(self.bad_steps)
        difference = values.get("sampling/logp_difference", 0.0)
        if difference > MOST_LOGP_DIFFERENCE and "loss" not in self.last:
            say(
                f"[step {step}] the completions' log-probabilities differ by {difference:.2g} nats a token from those at "
                "sampling: is the temperature missing in a call of the model?"
            )
        if "loss" in values and "reward" not in values:  # GRPO's loss is centred on 0
            self._warn_of_spike(step, values["loss"])
        self._restart_clock()
        values = self._write(step, values)
        self.notify("on_log", step, values)

    def _warn_of_spike(self, step: int, loss: float) -> None:
        if len(self.losses) >= 10:
            z = (loss - statistics.mean(self.losses)) / (statistics.stdev(self.losses) + 1e-12)
            if z > SPIKE:
                warning = f"the loss jumps to {loss:.4g}, {z:.0f} standard deviations"
                say(f"[step {step}] {warning}")
                self.event("spike", step, warning)
        self.losses = [*self.losses, loss][-50:]

    def log_eval(self, step: int, values: dict[str, float], samples: list[dict[str, Any]], show: int) -> None:
        """Write an evaluation: its metrics and all samples to files, and the first `show` samples to the
        console."""
        if not values and not samples:
            return
        values = self._write(step, values)
        self.first_eval = values | self.first_eval
        text = "  ".join(f"{name.removeprefix('eval_')} {short(value)}" for name, value in values.items())
        say(f"[step {step}] eval: {text or 'no held-out rows (--eval_fraction 0.05), only samples'}")
        for sample in samples[:show]:
            say(f"    {quoted(text_of(sample['prompt']), 60)} -> {quoted(sample['completion'], 90)}")
        self.append("samples.jsonl", [{"step": step, **sample} for sample in samples])
        self.notify("on_log", step, values)
        self._restart_clock()  # evaluation does not count as training time

    def event(self, kind: str, step: int, text: str, **more: Any) -> None:
        """Append an event to events.jsonl, for the timeline of report.html. Events stay there when a run
        resumes from an earlier checkpoint."""
        row = {
            "step": step,
            "time": round(time.time(), 1),
            "kind": kind,
            "text": without_secrets(text),
            **more,
        }
        self.append("events.jsonl", [row])
        self.notify("on_event", kind, step, text)

    def append(self, file: str, rows: list[dict[str, Any]]) -> None:
        """Append rows to a JSON-lines file of the run (main process).

        JSON has no NaN or infinity: such a value becomes null, and not_finite records which it was. If the
        disk refuses a line, or the folder has become another run's, a message says so, and training
        continues.
        """
        if not self.accelerator.is_main_process or not rows:
            return
        text = ""
        for row in rows:
            text += json.dumps(_finite(row), ensure_ascii=False, allow_nan=False) + "\n"
        path = self.output_dir / file
        try:
            if not is_held(self.output_dir):
                raise FileNotFoundError("the folder is not the one that this run has locked")
            path.parent.mkdir(exist_ok=True)
            with open(path, "ab") as out:
                out.write(text.encode("utf-8", "backslashreplace"))
        except OSError as error:
            say(f"{path} cannot be written ({error}): training goes on, and {len(rows)} lines are lost")

    def finish(self, text: str = "", best: dict[str, Any] | None = None) -> None:
        """Write summary.json, which marks a complete run. text: of the event "finished". best: facts about
        the best evaluation."""
        if not self.accelerator.is_main_process:
            return
        self.event("finished", int(self.last.get("step", 0)), text)
        summary = {
            "final": self.last,
            "before": self.first_eval,
            "best": best,
            "bad_steps": self.bad_steps,
            "seconds": round(self.seconds(), 1),
        }
        summary = _finite(summary | machine(self.accelerator))
        with writing(self.output_dir):
            replace_text(self.output_dir / "summary.json", json.dumps(summary, indent=2, allow_nan=False))

    def _write(self, step: int, values: dict[str, float]) -> dict[str, float]:
        values = {name: float(value) for name, value in values.items()}
        self.last = self.last | {"step": step} | values
        times = {"seconds": round(self.seconds(), 2), "cpu_seconds": round(self.cpu_seconds(), 2)}
        self.append("metrics.jsonl", [{"step": step, **values, **times}])
        return values


def short(value: float) -> str:
    """For the console: four digits; 0 for rounding errors, below 1e-6, such as DPO's first rewards."""
    return "0" if abs(value) < 1e-6 else f"{value:.4g}"


def _means(sums: dict[str, list[float]]) -> dict[str, float]:
    """{name: total / weight} of those that have a weight."""
    means = {}
    for name, (total, weight) in sums.items():
        if weight:
            means[name] = total / weight
    return means


def _combine(sums: dict[str, Tensor], name: str, pair: Tensor) -> None:
    """Add [total, weight] to the metric's sum, or keep the larger of two maxima."""
    if name not in sums:
        sums[name] = pair
    elif name.endswith("_max"):
        sums[name] = torch.maximum(sums[name], pair)
    else:
        sums[name] = sums[name] + pair


def _drop_lines_after(step: int, path: Path) -> None:
    """Keep the lines of a file that are of this step or before. It may be larger than the memory."""
    # In bytes lines end at \n alone, and not at characters inside a sample, such as U+2028.
    with open(path, "rb") as lines, replacing(path) as kept:
        for line in lines:
            # A line may be damaged, or truncated by a kill.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                if json.loads(line)["step"] <= step:
                    kept.write(line.rstrip(b"\n") + b"\n")


# --- the machine --------------------------------------------------------------------------------------------


def machine(accelerator: Accelerator) -> dict[str, Any]:
    """What a run was executed on."""
    device = str(accelerator.device)
    if accelerator.device.type == "cuda":
        device = torch.cuda.get_device_name()
    return {
        "device": device,
        "processor": processor(),
        "processes": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "distributed": accelerator.distributed_type.value,
        "memory_limit_gib": memory(accelerator.device).limit,
        "versions": versions(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Of the libraries that affect results."""
    found = {}
    for name in ("torch", "transformers", "accelerate"):
        if name in sys.modules:
            found[name] = sys.modules[name].__version__
    return found


def processor() -> str:
    """The model of the CPU: as Linux names it, or as Python does."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def commit_of(folder: Path) -> str | None:
    """The commit of the git repository that a folder is in, with "-dirty" if files of it were changed since.
    None: there is no repository, or no git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        git = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return git.stdout.strip() or None


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """A row as valid JSON: see Metrics.append."""
    finite = {}
    not_finite = {}
    for name, value in row.items():
        if isinstance(value, dict):
            value = _finite(value)
        elif isinstance(value, float) and not math.isfinite(value):
            not_finite[name] = str(value)
            value = None
        finite[name] = value
    if not_finite:
        finite["not_finite"] = not_finite
    return finite
