"""The best evaluation of a run so far, and whether to stop because no better one comes. Numbers in, decisions out."""

import math
from pathlib import Path
from typing import Any

from common.args import CommonArgs
from common.errors import UserError, say

LOWER = ("loss", "perplexity")  # in a metric's name: what is better
HIGHER = ("accurac", "reward", "exact", "margin", "regression")


class Best:
    """What --save_best, --early_stopping_patience and --early_stopping_delta ask for.

    The evaluation before the first step is no candidate: what is kept is a trained model.
    """

    def __init__(self, args: CommonArgs):
        """args.save_best: the name of a metric, or min:NAME, max:NAME where the name does not say which is better."""
        metric, patience, delta = args.save_best, args.early_stopping_patience, args.early_stopping_delta
        if patience and not metric:
            raise UserError("--early_stopping_patience: say with --save_best which metric has to improve")
        if metric and not args.eval_steps and not args.regression_suite:
            raise UserError(f"--save_best {metric}: there are no evaluations (--eval_steps 0)")
        self.patience, self.delta = patience, delta
        self.name, self.sign = _direction(metric) if metric else (None, 1)
        self.value: float | None = None
        self.step: int | None = None  # of the best evaluation
        self._mark: float | None = None  # the value from which an improvement by delta counts
        self._waited = 0  # evaluations since the last improvement that counts
        self._before: tuple[float | None, int | None] = (None, None)

    def update(self, step: int, values: dict[str, float]) -> None:
        """Take note of an evaluation. The values are the same on every process, and so is what follows from them."""
        if self.name is None:
            return
        if self.name not in values:
            found = ", ".join(sorted(values)) or "no metrics (is there a dataset for it?)"
            raise UserError(f"--save_best {self.name}: an evaluation of this run gives {found}")
        value = float(values[self.name])
        if step == 0:
            return
        self._waited += 1
        if not math.isfinite(value):
            return
        if self.value is None or self.sign * (value - self.value) > 0:
            self._before = (self.value, self.step)
            self.value, self.step = value, step
        gain = math.inf if self._mark is None else self.sign * (value - self._mark)
        if gain > 0 and gain >= self.delta:
            self._mark, self._waited = value, 0

    def withdraw(self, step: int) -> None:
        """The checkpoint of this step could not be written: the best one before it is the one that is kept."""
        if self.step == step:
            self.value, self.step = self._before

    def stops(self, step: int) -> bool:
        """Whether the run ends here, which is said."""
        if not self.patience or self._waited < self.patience:
            return False
        least = f" by at least {self.delta:g}" if self.delta else ""
        say(f"step {step}: the run ends: {self.name} has not improved{least} in {self._waited} evaluations")
        return True

    def folder(self, output_dir: str) -> Path | None:
        """The checkpoint of the best evaluation; None: there is none."""
        return None if self.step is None else Path(output_dir, f"checkpoint-{self.step}")

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        known = {"metric": self.name, "higher_is_better": self.sign > 0, "value": self.value, "step": self.step}
        return known | {"mark": self._mark, "waited": self._waited}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint. With another metric, the search begins anew."""
        saved = state.get("best") or {}
        if self.name and (saved.get("metric"), saved.get("higher_is_better")) == (self.name, self.sign > 0):
            self.value, self.step = saved["value"], saved["step"]
            self._mark, self._waited = saved["mark"], saved["waited"]


def _direction(metric: str) -> tuple[str, int]:
    """(its name, 1 where higher is better, else -1)."""
    if metric.startswith(("min:", "max:")):
        return metric[4:], 1 if metric.startswith("max:") else -1
    lower, higher = (any(word in metric for word in words) for words in (LOWER, HIGHER))
    if lower == higher:
        raise UserError(f"--save_best {metric}: is lower or higher better? Write min:{metric} or max:{metric}")
    return metric, 1 if higher else -1
