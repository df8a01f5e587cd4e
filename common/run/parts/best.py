"""--save_best: the best evaluation of a run so far, and early stopping when no better one follows."""

import math
from typing import Any

from common.args import CommonArgs
from common.errors import UserError, say
from common.run.folder import checkpoint_at

# Metrics whose name contains one of these are better when lower.
LOWER = ("loss", "perplexity", "bits_per_byte")
SUITE = "eval_regression/"  # the start of its metrics' names
HIGHER = ("accurac", "reward", "exact", "margin", "regression")


class Best:
    """A part of a `Run`: --save_best, --early_stopping_patience and --early_stopping_delta.

    The evaluation before the first step does not count: only a trained model is kept.
    """

    def __init__(self, args: CommonArgs):
        """args.save_best: a metric's name, with or without eval_, or min:NAME or max:NAME if the name does
        not say which direction is better."""
        metric = args.save_best
        if metric is None:
            raise UserError("--early_stopping_patience: say with --save_best which metric has to improve")
        self.patience = args.early_stopping_patience
        self.delta = args.early_stopping_delta
        self.output_dir = args.output_dir
        self.name, self.sign = _direction(metric)
        extreme = "highest" if self.sign > 0 else "lowest"
        say(f"--save_best: the best checkpoint has the {extreme} {self.name}")
        if self.name.startswith(SUITE) and not args.regression_suite:
            raise UserError(f"--save_best {metric}: that is measured with --regression_suite")
        if not self.name.startswith(SUITE) and not args.eval_steps:
            raise UserError(f"--save_best {metric}: there are no evaluations (--eval_steps 0)")
        self.value: float | None = None
        self.step: int | None = None  # of the best evaluation
        self.values: dict[str, float] = {}  # all its metrics
        self._mark: float | None = None  # the value that an improvement by delta is measured from
        self._measured: dict[str, float] = {}  # by both kinds of evaluations of the last step that had one
        self._measured_at = -1  # that step
        self._waited = 0  # evaluations since the last improvement that counts
        self._before = (self.value, self.step, self.values)  # of the best evaluation before that

    def update(self, step: int, values: dict[str, float]) -> bool:
        """Record an evaluation; returns whether it is the best so far. For a metric of --regression_suite only
        the suite's evaluations count, which have steps of their own; for any other one only the others. The
        values, and so the decisions, are the same on every process."""
        values = {_full(name): value for name, value in values.items()}
        if step != self._measured_at:
            self._measured_at = step
            self._measured = {}
        self._measured = self._measured | values
        if step == self.step:  # the other evaluation of the best step
            self.values = self._measured
        is_of_suite = any(name.startswith(SUITE) for name in values)
        if self.name.startswith(SUITE) != is_of_suite:
            return False
        if self.name not in values:
            names = ", ".join(sorted(values)) or "no metrics (is there a dataset for it?)"
            raise UserError(f"--save_best {self.name}: an evaluation of this run gives {names}")
        value = float(values[self.name])
        if step == 0:
            return False
        self._waited += 1
        if not math.isfinite(value):
            return False
        is_best = self.value is None or self.sign * (value - self.value) > 0
        if is_best:
            self._before = (self.value, self.step, self.values)
            self.value, self.step, self.values = value, step, self._measured
        gain = math.inf if self._mark is None else self.sign * (value - self._mark)
        if gain > 0 and gain >= self.delta:
            self._mark, self._waited = value, 0
        return is_best

    def withdraw(self, step: int) -> None:
        """The checkpoint of this step could not be written: fall back to the previous best one."""
        if self.step == step:
            self.value, self.step, self.values = self._before

    def stops(self, step: int) -> bool:
        """Whether the run stops early at this step; prints why."""
        if not self.patience or self._waited < self.patience:
            return False
        least = f" by at least {self.delta:g}" if self.delta else ""
        say(f"step {step}: the run ends: {self.name} has not improved{least} in {self._waited} evaluations")
        return True

    def of_exported(self, last: dict[str, float]) -> dict[str, float]:
        """The last values of a run, with the evaluations of the exported model in place of the last ones."""
        if last.get("step") != self.step:
            last = {name: value for name, value in last.items() if not name.startswith("eval_")}
        return last | self.values

    def state(self, step: int) -> dict[str, Any]:
        """The state to store in a checkpoint."""
        return {
            "metric": self.name,
            "higher_is_better": self.sign > 0,
            "value": self.value,
            "step": self.step,
            "mark": self._mark,
            "waited": self._waited,
            "values": self.values,
        }

    def restore(self, step: int, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint. If the metric has changed, the search starts over."""
        if state.get("metric") == self.name and state["higher_is_better"] == (self.sign > 0):
            self.value = state["value"]
            self.step = state["step"]
            self.values = state.get("values", {})
            self._mark = state["mark"]
            self._waited = state["waited"]
        if self.step and not checkpoint_at(self.output_dir, self.step).exists():
            say(
                f"--save_best: checkpoint-{self.step}, so far the best, is not in {self.output_dir}: the search starts over"
            )
            self.value = self.step = self._mark = None
            self.values = {}
            self._waited = 0


def _full(name: str) -> str:
    """The name in metrics.jsonl; the console leaves eval_ out."""
    return f"eval_{name.removeprefix('eval_')}"


def _direction(metric: str) -> tuple[str, int]:
    """(the metric's name, 1 if higher is better, else -1)."""
    if metric.startswith(("min:", "max:")):
        return _full(metric[4:]), 1 if metric.startswith("max:") else -1
    lower = any(word in metric for word in LOWER)
    higher = any(word in metric for word in HIGHER)
    if lower == higher:
        raise UserError(
            f"--save_best {metric}: is lower or higher better? Write min:{metric} or max:{metric}"
        )
    return _full(metric), 1 if higher else -1
