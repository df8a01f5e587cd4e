"""--regression_suite: can the model still do what it could? Prompts with checks of their answers, at their
own interval.

A row is {"id", "group", "prompt" (plain text) or "messages" (a chat), and one or more of CHECKS}; a case
passes if all its checks do. Answers are greedy. Users read docs/regression.md. regression.jsonl has a line
for each evaluation:

    {"step", "max_new_tokens", "groups": {group: {"passed", "total", "rate", "low", "high"}},
     "turned": {"since_last": {"step", "fell", "rose"}, "since_base": {"step", "fell", "rose"}},
     "failed": {id: {"why", "completion"}}, "cases": {id: {"rate", "digest", "group"}}}

groups holds "all", too; low and high are the 95 % interval of the rate. since_* is null where there is
nothing to compare.
"""

from collections.abc import Callable
import hashlib
import json
import math
import re
from typing import Any, NamedTuple

from accelerate import Accelerator
from common.args import CommonArgs
from common.data.formats import as_prompt
from common.data.sources import load_rows
from common.data.tokens import tokenize_row
from common.data.types import BadRow, Row, Tokenizer
from common.errors import UserError, quoted, say
from common.evaluate import Completed, complete
from common.model import FlatModel
from common.model.flat_model import check_positions
from common.processes import on_main_process
from common.sampling.rewards import REWARD_SECONDS, Reward, call_user_code, final_number, load_rewards, score
import torch

ALL = "all"  # the group of all cases
PASSES = 0.5  # reward from which an answer passes
ALPHA = 0.05  # significance level of a fall
ONLY_AT_THE_ENDS = 10**15  # steps between two evaluations
Z = 1.959963984540054  # 97.5 % quantile of the normal distribution, for a 95 % interval
Cases = dict[str, dict[str, Any]]  # {id: {"rate", "digest", "group"}}
Outcome = dict[str, Any]  # {"groups", "failed", "cases"}, as above


# --- checks -------------------------------------------------------------------------------------------------


def _texts(value: Any) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("expected a text, or several")
    return texts


def _whole(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError("expected a whole number above 0")
    return value


# (value, answer) -> whether the answer passes. `_case` calls each once with an empty answer: it raises an error for a
# value that it cannot read.
CHECKS: dict[str, Callable[[Any, Completed], bool]] = {
    "equals": lambda texts, answer: answer.text.strip() in [text.strip() for text in _texts(texts)],
    "contains": lambda texts, answer: all(text in answer.text for text in _texts(texts)),
    "not_contains": lambda texts, answer: not any(text in answer.text for text in _texts(texts)),
    "regex": lambda pattern, answer: re.search(pattern, answer.text, re.DOTALL) is not None,
    "number": lambda number, answer: final_number(answer.text) == float(number),
    "max_tokens": lambda most, answer: _whole(most) > 0 and answer.finished,
    # only whether it is a text: Suite._judge calls the reward
    "reward": lambda spec, answer: bool(_texts([spec])),
}
FIELDS = ("id", "group", "prompt", "messages", "tools", *CHECKS)


# --- cases --------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A prompt, and the checks of its answer."""

    id: str
    group: str
    row: dict[str, Any]  # all columns, with "prompt"
    checks: dict[str, Any]
    where: str
    digest: str  # of the row: an edited case counts as another one


class Change(NamedTuple):
    """The ids of cases that no longer pass, newly pass, and have not turned."""

    fell: list[str]
    rose: list[str]
    same: list[str]

    @property
    def p(self) -> float:
        return fall_p_value(len(self.fell), len(self.rose))


class Suite:
    """The cases of a file, their prompts as tokens, and the reward functions that they name."""

    def __init__(self, path: str, device: torch.device):
        """device: for reward models. Raises UserError, with file, row and field, for an invalid case."""
        self.cases: list[Case] = []
        self.rewards: dict[str, Reward] = {}
        self.prompts: list[list[int]] = []
        ids = set()
        for row in load_rows(path):
            case = _case(row)
            if case.id in ids:
                raise UserError(f"{row.where}: id: another row has {quoted(case.id)}, too")
            ids.add(case.id)
            spec = case.checks.get("reward")
            if spec is not None and spec not in self.rewards:
                self.rewards[spec] = load_rewards([spec], device, f"{row.where}: reward:")[0]
            self.cases.append(case)

    def tokenize(self, tokenizer: Tokenizer, model: FlatModel, max_new_tokens: int) -> None:
        """max_new_tokens: of cases without a limit of their own. Raises UserError for a prompt that cannot be
        tokenized, or is too long for the model with its answer."""
        self.prompts = []
        self.limits = []
        longest = 0
        for case in self.cases:
            try:
                prompt = tokenize_row(case.row, tokenizer)["prompt_ids"]
            except (BadRow, UserError) as error:
                raise UserError(f"{case.where}: {error}") from None
            limit = case.checks.get("max_tokens", max_new_tokens)
            longest = max(longest, len(prompt) + limit)
            self.prompts.append(prompt)
            self.limits.append(limit)
        check_positions(model, longest, "max_tokens or the prompts of the suite, or the limit of its answers")

    def run(self, model: FlatModel, tokenizer: Tokenizer, accelerator: Accelerator) -> Outcome:
        """Answer every case, and judge the answers. Called on every process; the result is the same on
        each."""
        answers = complete(
            accelerator, model, tokenizer, self.prompts, max_new_tokens=self.limits, temperature=0.0
        )

        def judge() -> list[str]:
            reasons = []
            for case, answer in zip(self.cases, answers, strict=True):
                reasons.append(
                    call_user_code(case.where, self._judge, REWARD_SECONDS, case=case, answer=answer)
                )
            return reasons

        reasons = on_main_process(accelerator, judge)
        texts = [answer.text for answer in answers]
        return outcome(list(zip(self.cases, reasons, texts, strict=True)))

    def _judge(self, case: Case, answer: Completed) -> str:
        """The check that the answer fails; "" if none."""
        for name, value in case.checks.items():
            if name == "reward":
                ((reward,),) = score([self.rewards[value]], [case.row], [answer.text], [answer.ids])
                passes = reward is not None and reward >= PASSES
            else:
                passes = CHECKS[name](value, answer)
            if not passes:
                return f"{name}: {quoted(value)}"
        return ""


def _case(row: Row) -> Case:
    """A row as a case. Raises UserError with the row and the field."""
    # a table gives each row all columns
    columns = {name: value for name, value in row.items() if value is not None}
    checks = {name: columns[name] for name in CHECKS if name in columns}
    unknown = []
    if "reward" not in checks:  # a reward function gets other columns, too
        unknown = [name for name in columns if name not in FIELDS]
    if unknown or not checks or str(columns.get("group", "")) in ("", ALL) or "id" not in columns:
        fields = f"id, group (not {ALL}), prompt or messages, and checks: {', '.join(CHECKS)}"
        raise UserError(
            f"{row.where}: {', '.join(unknown) or 'a column'}: expected {fields}; found {', '.join(columns)}"
        )
    try:
        prompt = as_prompt(Row(columns, row.where))
    except (BadRow, UserError) as error:
        raise UserError(f"{row.where}: {error}") from None
    for name, value in checks.items():
        try:
            CHECKS[name](value, Completed([], "", False))
        except Exception as error:  # a value that its check cannot read
            raise UserError(f"{row.where}: {name}: {error}") from None
    text = json.dumps(columns, sort_keys=True, ensure_ascii=False, default=str)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return Case(str(columns["id"]), str(columns["group"]), {**row, **prompt}, checks, row.where, digest)


# --- counting and comparing ---------------------------------------------------------------------------------


def outcome(judged: list[tuple[Case, str, str]]) -> Outcome:
    """What regression.jsonl has of an evaluation. judged: (case, the check that its answer fails or "", the
    answer)."""
    passes: dict[str, list[bool]] = {ALL: []}
    failed = {}
    cases = {}
    for case, why, text in judged:
        passes[ALL].append(not why)
        passes.setdefault(case.group, []).append(not why)
        cases[case.id] = {"rate": float(not why), "digest": case.digest, "group": case.group}
        if why:
            failed[case.id] = {"why": why, "completion": text}
    groups = {group: rate_of(sum(passed), len(passed)) for group, passed in passes.items()}
    return {"groups": groups, "failed": failed, "cases": cases}


def rate_of(passed: int, total: int) -> dict[str, float]:
    low, high = wilson(passed, total)
    rate = round(passed / total, 6)
    return {"passed": passed, "total": total, "rate": rate, "low": round(low, 6), "high": round(high, 6)}


def compare(before: Cases, now: Cases) -> dict[str, Change]:
    """{group: which of its cases have turned}. A case that is new or was edited is left out."""
    changes = {ALL: Change([], [], [])}
    for name, case in now.items():
        changes.setdefault(case["group"], Change([], [], []))
        if before.get(name, {}).get("digest") != case["digest"]:
            continue
        passed = before[name]["rate"] >= PASSES
        passes = case["rate"] >= PASSES
        for group in (ALL, case["group"]):
            if passed == passes:
                changes[group].same.append(name)
            elif passes:
                changes[group].rose.append(name)
            else:
                changes[group].fell.append(name)
    return changes


def wilson(passed: int, total: int) -> tuple[float, float]:
    """The 95 % interval of Wilson (1927) for the rate behind `passed` of `total`, which is not 0.

    Unlike p ± 1.96 sqrt(p (1-p) / n) it is accurate for few cases, and has a width at 0 of n and n of n.
    """
    p = passed / total
    z2 = Z * Z / total
    half = Z * math.sqrt(p * (1.0 - p) / total + z2 / (4.0 * total))
    low = 0.0 if passed == 0 else (p + z2 / 2.0 - half) / (1.0 + z2)
    high = 1.0 if passed == total else (p + z2 / 2.0 + half) / (1.0 + z2)
    return low, high


def fall_p_value(fell: int, rose: int) -> float:
    """The probability of at least `fell` falls among the `fell + rose` cases that changed, if either
    direction were equally likely. McNemar's test (1947) in its exact form, one-sided; 1 if nothing
    changed."""
    n = fell + rose
    return sum(math.comb(n, i) for i in range(fell, n + 1)) / 2**n


# --- in a run -----------------------------------------------------------------------------------------------


class Regression:
    """The part of a run that evaluates the suite: when it is answered, what has turned since, and where that
    is written."""

    def __init__(self, args: CommonArgs, accelerator: Accelerator):
        """Reads the suite. Raises UserError with file, row and field."""
        self.args = args
        self.accelerator = accelerator
        self.suite = Suite(args.regression_suite, accelerator.device)
        steps = args.eval_steps if args.regression_steps is None else args.regression_steps
        self.every = steps or ONLY_AT_THE_ENDS  # 0: only before the first and after the last step
        self.base: dict[str, Any] = {}  # {"step", "cases"} of the first evaluation
        self.last: dict[str, Any] = {}
        self.fallen: list[str] = []  # groups whose fall has been reported

    def tokenize(self, tokenizer: Tokenizer, model: FlatModel) -> None:
        """Raises UserError for a prompt that cannot be tokenized, or is too long."""
        self.tokenizer = tokenizer
        self.suite.tokenize(tokenizer, model, self.args.eval_max_new_tokens)
        groups = list(dict.fromkeys(case.group for case in self.suite.cases))
        say(f"regression suite: {len(self.suite.cases)} cases in {len(groups)} groups ({', '.join(groups)})")

    def run(self, model: FlatModel, step: int, metrics: Any) -> dict[str, float]:
        """Evaluate the suite; write, print and report the outcome. Returns the metrics. Called on every
        process.

        metrics: the run's Metrics.
        """
        result = self.suite.run(model, self.tokenizer, self.accelerator)
        groups = result["groups"]
        values = {f"eval_regression/{name}": group["rate"] for name, group in groups.items()}
        metrics.log_eval(step, values, [], show=0)
        turned = {}
        fallen = {}  # {group: the report of its fall}
        for name, earlier in (("since_last", self.last), ("since_base", self.base)):
            if not earlier:
                turned[name] = None
                continue
            then = earlier["step"]
            changes = compare(earlier["cases"], result["cases"])
            turned[name] = {"step": then, "fell": changes[ALL].fell, "rose": changes[ALL].rose}
            for group, change in changes.items():
                if change.p < ALPHA:
                    rate = f"{groups[group]['passed']} of {groups[group]['total']}"
                    fallen[group] = f"{group} has fallen since step {then}, to {rate} (p = {change.p:.2g})"
        line = {"step": step, "max_new_tokens": self.args.eval_max_new_tokens, "turned": turned}
        metrics.append("regression.jsonl", [line | result])
        for group, text in fallen.items():
            if group not in self.fallen:
                say(f"regression: step {step}: {text}")
                metrics.event("regression", step, text)
        self.fallen = list(fallen)
        self.last = {"step": step, "cases": result["cases"]}
        self.base = self.base or self.last
        return values

    def state(self, step: int) -> dict[str, Any]:
        """The state to store in a checkpoint."""
        return {"base": self.base, "last": self.last, "fallen": self.fallen}

    def restore(self, step: int, state: dict[str, Any]) -> None:
        self.base = state.get("base", {})
        self.last = state.get("last", {})
        self.fallen = state.get("fallen", [])
