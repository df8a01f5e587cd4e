"""The suite of a run (--regression_suite): when it is answered, what has turned since, and where that is written.

regression.jsonl has a line for each time:

    {"step", "samples", "pass_at", "temperature", "max_new_tokens",
     "groups": {group: {"passed", "total", "rate", "low", "high"}},
     "turned": {"since_last": {"step", "fell", "rose"}, "since_base": {"step", "fell", "rose"}},
     "failed": {id: {"why", "completion"}}, "cases": {id: {"rate", "digest", "group"}}}

groups holds "all", too; low and high are the 95 % interval of the rate. since_* is null where there is nothing to compare.
"""

from typing import Any

from common.args import CommonArgs
from common.data.types import Tokenizer
from common.errors import UserError, say
from common.model import FlatModel
from common.model.flat_model import check_positions
from common.run.metrics import Metrics
from common.sampling.suite import ALPHA, counts, falls, known, load_suite, run_suite, turned

from accelerate import Accelerator

FILE, PREFIX = "regression.jsonl", "eval_regression/"
SHOWN = 8  # cases listed on the console


class Regression:
    """Runs --regression_suite during training. Without the flag it is never due."""

    def __init__(self, args: CommonArgs, accelerator: Accelerator):
        """Reads the suite. Raises UserError with file, row and field."""
        self.args, self.accelerator = args, accelerator
        self.suite = self.tokenizer = None
        if args.regression_suite:
            self.suite = load_suite(
                args.regression_suite,
                accelerator.device,
                samples=args.regression_samples,
                pass_at=args.regression_pass_at,
                temperature=args.regression_temperature,
                max_new_tokens=args.eval_max_new_tokens,
                timeout=args.reward_timeout,
            )
        others = ("regression_steps", "regression_samples", "regression_pass_at", "regression_temperature")
        asked = [name for name in others if getattr(args, name) != getattr(CommonArgs, name)]
        if asked and not self.suite:
            raise UserError(f"--{asked[0]}: there is no --regression_suite")
        if args.save_best and self.is_ours(args.save_best) and not self.suite:
            raise UserError(f"--save_best {args.save_best}: there is no --regression_suite")
        # an unreachable number: only before the first and after the last step
        every = args.eval_steps if args.regression_steps is None else args.regression_steps
        self.every = (every or 10**15) if self.suite else 0
        self.base: dict[str, Any] = {}  # {"step", "cases"} of the first evaluation
        self.last: dict[str, Any] = {}
        self.fallen: list[str] = []  # groups whose decline has been reported

    @staticmethod
    def is_ours(metric: str) -> bool:
        return metric.removeprefix("min:").removeprefix("max:").startswith(PREFIX)

    def tokenize(self, tokenizer: Tokenizer, model: FlatModel) -> None:
        """Tokenize the prompts. Raises UserError for one that cannot be tokenized, or is too long."""
        if self.suite and self.tokenizer is None:
            self.tokenizer = tokenizer
            longest = self.suite.tokenize(tokenizer)
            check_positions(model, longest, "max_tokens or the prompts of --regression_suite, or --eval_max_new_tokens")
            cases, groups = len(self.suite.cases), len(self.suite.groups)
            say(f"regression suite: {cases} cases in {groups} groups ({', '.join(self.suite.groups)})")

    def run(self, model: FlatModel, step: int, metrics: Metrics) -> dict[str, float]:
        """Evaluate the suite; write, print and report the outcome. Returns the metrics. Called on every process."""
        results = run_suite(self.suite, model, self.tokenizer, self.accelerator, self.args.seed)
        groups, cases = counts(results), known(results)
        values = {f"{PREFIX}{name}": group["rate"] for name, group in groups.items()}
        metrics.log_eval(step, values, [], show=0)
        since = {"last": self.last, "base": self.base}
        changes = {
            f"since_{name}": {"step": then["step"]} | turned(then["cases"], results) if then else None
            for name, then in since.items()
        }
        if not self.suite.temperature:
            self._say(changes["since_last"])
        failed = {r.case.id: {"why": r.why, "completion": r.completion} for r in results if r.why}
        line = {"step": step, **self.suite.asked(), "groups": groups, "turned": changes, "failed": failed, "cases": cases}
        metrics.append(FILE, [line])
        worse = {}
        for then in filter(None, since.values()):
            worse |= {name: (then, p) for name, p in falls(then["cases"], results).items() if p < ALPHA}
        for name, (then, p) in worse.items():
            if name not in self.fallen:
                now, total = groups[name]["passed"], groups[name]["total"]
                text = f"{name} has fallen since step {then['step']}, to {now:g} of {total} (p = {p:.2g})"
                say(f"regression: step {step}: {text}")
                metrics.event("regression", step, text)
        self.fallen = list(worse)
        self.last = {"step": step, "cases": cases}
        self.base = self.base or self.last
        return values

    def _say(self, changes: dict[str, Any] | None) -> None:
        """Print the cases that turned since the last evaluation."""
        for word in ("fell", "rose"):
            ids = changes[word] if changes else []
            if ids:
                more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
                say(f"    {word} since step {changes['step']}: {', '.join(ids[:SHOWN])}{more}")

    def state(self) -> dict[str, Any]:
        """The state to store in a checkpoint."""
        return {"regression": {"base": self.base, "last": self.last, "fallen": self.fallen}} if self.suite else {}

    def restore(self, state: dict[str, Any]) -> None:
        kept = state.get("regression", {})
        self.base, self.last, self.fallen = kept.get("base", {}), kept.get("last", {}), kept.get("fallen", [])
