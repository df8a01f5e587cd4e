"""--regression_suite: can the model still do what it could? Prompts with checks of their answers, at their own interval.

A row is {"id", "group", "prompt" (plain text) or "messages" (a chat), and one or more of CHECKS}; a case passes if all its
checks do. Answers are greedy. Users read docs/regression.md. regression.jsonl has a line for each evaluation:

    {"step", "max_new_tokens", "groups": {group: {"passed", "total", "rate", "low", "high"}},
     "turned": {"since_last": {"step", "fell", "rose"}, "since_base": {"step", "fell", "rose"}},
     "failed": {id: {"why", "completion"}}, "cases": {id: {"rate", "digest", "group"}}}

groups holds "all", too; low and high are the 95 % interval of the rate. since_* is null where there is nothing to compare.
"""

from collections.abc import Callable, Sequence
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
from common.sampling.rewards import REWARD_SECONDS, Reward, final_number, load_rewards, must, score
import torch

PREFIX = "eval_regression/"  # of the metrics' names
ALL = "all"  # the group of all cases
PASSES = 0.5  # reward from which an answer passes
LARGEST = 1e300  # largest expected number
ALPHA = 0.05  # significance level of a fall
SHOWN = 8  # cases listed on the console
NEVER = 10**15
Z = 1.959963984540054  # 97.5 % quantile of the normal distribution, for a 95 % interval
Known = dict[str, dict[str, Any]]  # {id: {"rate", "digest", "group"}}: the outcomes of an earlier evaluation


# --- checks ---------------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    expected: str  # what its value has to be, in words
    fits: Callable[[Any], bool]  # whether a value is that
    passes: Callable[[Any, Completed], bool]  # (value, answer)


def _texts(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _are_texts(value: Any) -> bool:
    return bool(value) and all(isinstance(text, str) and text for text in _texts(value))


def _is_pattern(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(value) and re.compile(value, re.DOTALL) is not None
    except (re.error, RecursionError, OverflowError):
        return False


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


TEXTS = "text, or a list of texts, none of them empty"
CHECKS = {
    "equals": Check(TEXTS, _are_texts, lambda texts, a: a.text.strip() in [text.strip() for text in _texts(texts)]),
    "contains": Check(TEXTS, _are_texts, lambda texts, a: all(text in a.text for text in _texts(texts))),
    "not_contains": Check(TEXTS, _are_texts, lambda texts, a: not any(text in a.text for text in _texts(texts))),
    "regex": Check("a regular expression", _is_pattern, lambda p, a: re.search(p, a.text, re.DOTALL) is not None),
    "number": Check("a number of at most 1e300 in size", _is_number, lambda n, a: final_number(a.text) == n),
    "max_tokens": Check("a whole number from 1 on", _is_count, lambda n, a: a.finished),
    "reward": Check("a reward function", _are_texts, lambda name, a: True),
}
FIELDS = ("id", "group", "prompt", "messages", "tools", *CHECKS)


# --- cases ----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A prompt, and the checks of its answer."""

    id: str
    group: str
    row: dict[str, Any]  # all columns, with "prompt"
    checks: dict[str, Any]
    where: str
    digest: str  # of the row: an edited case counts as another one


class Result(NamedTuple):
    """The outcome of a case."""

    case: Case
    why: str  # the check that its answer fails; "": it passes
    completion: str


class Suite:
    """The cases of a file, their prompts as tokens, and the reward functions that they name."""

    def __init__(self, path: str, device: torch.device):
        """device: for reward models. Raises UserError, with file, row and field, for an invalid case."""
        self.cases: list[Case] = []
        self.rewards: dict[str, Reward] = {}
        self.prompts: list[list[int]] = []
        places: dict[str, str] = {}
        for row in load_rows(path):
            case = _case(row)
            if case.id in places:
                raise UserError(f"{row.where}: id: {quoted(case.id)} is that of {places[case.id]}, too")
            places[case.id] = row.where
            spec = case.checks.get("reward")
            if spec is not None and spec not in self.rewards:
                self.rewards[spec] = load_rewards([spec], device, f"{row.where}: reward:")[0]
            self.cases.append(case)

    def tokenize(self, tokenizer: Tokenizer, model: FlatModel, max_new_tokens: int) -> None:
        """max_new_tokens: of cases without a limit of their own. Raises UserError for a prompt that cannot be tokenized, or
        is too long for the model with its answer."""
        self.prompts = []
        for case in self.cases:
            try:
                self.prompts.append(tokenize_row(case.row, tokenizer)["prompt_ids"])
            except (BadRow, UserError) as error:
                raise UserError(f"{case.where}: {'messages' if case.row.get('messages') else 'prompt'}: {error}") from None
        self.limits = [case.checks.get("max_tokens", max_new_tokens) for case in self.cases]
        longest = max(len(ids) + limit for ids, limit in zip(self.prompts, self.limits, strict=True))
        check_positions(model, longest, "max_tokens or the prompts of the suite, or the limit of its answers")

    def run(self, model: FlatModel, tokenizer: Tokenizer, accelerator: Accelerator) -> list[Result]:
        """Answer every case, and judge the answers. Called on every process; the result is the same on each."""
        answers = complete(accelerator, model, tokenizer, self.prompts, max_new_tokens=self.limits, temperature=0.0)
        pairs = list(zip(self.cases, answers, strict=True))

        def judge() -> list[str]:
            return [must(case.where, self._judge, REWARD_SECONDS, case=case, answer=answer) for case, answer in pairs]

        reasons = on_main_process(accelerator, judge)
        return [Result(case, why, answer.text) for (case, answer), why in zip(pairs, reasons, strict=True)]

    def _judge(self, case: Case, answer: Completed) -> str:
        """The check that the answer fails; "" if none."""
        for name, wanted in case.checks.items():
            if name == "reward":
                reward = score([self.rewards[wanted]], [case.row], [answer.text], [answer.ids])[0][0]
                passes = reward is not None and reward >= PASSES
            else:
                passes = CHECKS[name].passes(wanted, answer)
            if not passes:
                return f"{name}: {quoted(wanted)}"
        return ""


def _case(row: Row) -> Case:
    """A row as a case. Raises UserError with the row and the field."""

    def require(condition: bool, name: str, expected: str) -> None:
        if not condition:
            raise UserError(f"{row.where}: {name}: expected {expected}, found {quoted(columns.get(name))}")

    columns = {name: value for name, value in row.items() if value is not None}  # a table gives each row all columns
    for name in columns:  # with a reward, other columns are its arguments
        require(name in FIELDS or "reward" in columns, name, f"one of the columns {', '.join(FIELDS)}")
    case_id, group = columns.get("id"), str(columns.get("group", ""))
    require(isinstance(case_id, str | int) and bool(str(case_id).strip()), "id", "a name")
    require(bool(re.fullmatch(r"[\w .:/-]{1,100}", group.strip())) and group != ALL, "group", "a name, other than all")
    require(("prompt" in columns) != ("messages" in columns), "prompt", "prompt (text) or messages (a chat), one of them")
    checks = {name: columns[name] for name in CHECKS if name in columns}
    require(bool(checks), "checks", f"one or more of {', '.join(CHECKS)}")
    for name, value in checks.items():
        require(CHECKS[name].fits(value), name, CHECKS[name].expected)
    name = "prompt" if "prompt" in columns else "messages"
    try:
        prompt = as_prompt(Row(columns, row.where, name))
    except (BadRow, UserError) as error:
        raise UserError(f"{row.where}: {name}: {error}") from None
    if name == "messages" and len(prompt["prompt"]) < len(columns["messages"]):
        raise UserError(f"{row.where}: messages: the last one is the assistant's, whose answer is asked for: leave it out")
    text = json.dumps(columns, sort_keys=True, ensure_ascii=False, default=str)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return Case(str(case_id), group, {**row, **prompt}, checks, row.where, digest)


# --- counting and comparing -----------------------------------------------------------------------------------------


def known(results: list[Result]) -> Known:
    """The part of the results that a later evaluation needs."""
    return {r.case.id: {"rate": float(not r.why), "digest": r.case.digest, "group": r.case.group} for r in results}


def by_group(results: list[Result]) -> dict[str, list[Result]]:
    """{ALL: everything}, then each group with its cases, in the order of the suite."""
    groups = {ALL: results}
    for result in results:
        groups.setdefault(result.case.group, []).append(result)
    return groups


def counts(results: list[Result]) -> dict[str, dict[str, float]]:
    """{group: {"passed", "total", "rate", "low", "high"}}, with the 95 % interval of the rate."""
    found = {}
    for group, own in by_group(results).items():
        passed = sum(not r.why for r in own)
        low, high = wilson(passed, len(own))
        rates = {"rate": round(passed / len(own), 6), "low": round(low, 6), "high": round(high, 6)}
        found[group] = {"passed": passed, "total": len(own)} | rates
    return found


def line_of(results: list[Result], max_new_tokens: int) -> dict[str, Any]:
    """What a file keeps of an evaluation."""
    failed = {r.case.id: {"why": r.why, "completion": r.completion} for r in results if r.why}
    return {"max_new_tokens": max_new_tokens, "groups": counts(results), "failed": failed, "cases": known(results)}


def shared(before: Known, results: Sequence[Result]) -> list[Result]:
    """The results whose case is unchanged in `before`."""
    return [r for r in results if before.get(r.case.id, {}).get("digest") == r.case.digest]


def turned(before: Known, results: Sequence[Result]) -> dict[str, list[str]]:
    """{"fell": ids, "rose": ids} of the cases that no longer pass, and that newly pass. Cases that `before` lacks in their
    current form are left out."""
    pairs = [(r.case.id, before[r.case.id]["rate"] >= PASSES, not r.why) for r in shared(before, results)]
    return {"fell": [i for i, then, now in pairs if then > now], "rose": [i for i, then, now in pairs if then < now]}


def falls(before: Known, results: list[Result]) -> dict[str, float]:
    """{group: p-value} by `fall_p_value`."""
    changes = {group: turned(before, own) for group, own in by_group(results).items()}
    return {group: fall_p_value(len(change["fell"]), len(change["rose"])) for group, change in changes.items()}


def wilson(passed: int, total: int) -> tuple[float, float]:
    """The 95 % interval of Wilson (1927) for the rate behind `passed` of `total`; (0, 1) if total is 0.

    Unlike p ± 1.96 sqrt(p (1-p) / n) it is accurate for few cases, and has a width at 0 of n and n of n.
    """
    if not total:
        return 0.0, 1.0
    p, z2 = passed / total, Z * Z / total
    half = Z * math.sqrt(p * (1.0 - p) / total + z2 / (4.0 * total))
    low, high = (p + z2 / 2.0 - half) / (1.0 + z2), (p + z2 / 2.0 + half) / (1.0 + z2)
    return (0.0 if passed == 0 else low), (1.0 if passed == total else high)


def fall_p_value(fell: int, rose: int) -> float:
    """The probability of at least `fell` falls among the `fell + rose` cases that changed, if either direction were equally
    likely. McNemar's test (1947) in its exact form, one-sided; 1 if nothing changed."""
    n = fell + rose
    return sum(math.comb(n, i) for i in range(fell, n + 1)) / 2**n


# --- in a run -------------------------------------------------------------------------------------------------------


class Regression:
    """The part of a run that evaluates the suite: when it is answered, what has turned since, and where that is written."""

    def __init__(self, args: CommonArgs, accelerator: Accelerator):
        """Reads the suite. Raises UserError with file, row and field."""
        self.args, self.accelerator = args, accelerator
        self.suite = Suite(args.regression_suite, accelerator.device)
        steps = args.eval_steps if args.regression_steps is None else args.regression_steps
        self.every = steps or NEVER  # 0: only before the first and after the last step
        self.base: dict[str, Any] = {}  # {"step", "cases"} of the first evaluation
        self.last: dict[str, Any] = {}
        self.fallen: list[str] = []  # groups whose decline has been reported

    def tokenize(self, tokenizer: Tokenizer, model: FlatModel) -> None:
        """Raises UserError for a prompt that cannot be tokenized, or is too long."""
        self.tokenizer = tokenizer
        self.suite.tokenize(tokenizer, model, self.args.eval_max_new_tokens)
        groups = list(dict.fromkeys(case.group for case in self.suite.cases))
        say(f"regression suite: {len(self.suite.cases)} cases in {len(groups)} groups ({', '.join(groups)})")

    def run(self, model: FlatModel, step: int, metrics: Any) -> dict[str, float]:
        """Evaluate the suite; write, print and report the outcome. Returns the metrics. Called on every process.

        metrics: the run's Metrics.
        """
        results = self.suite.run(model, self.tokenizer, self.accelerator)
        line = line_of(results, self.args.eval_max_new_tokens)
        groups, cases = line["groups"], line["cases"]
        values = {f"{PREFIX}{name}": group["rate"] for name, group in groups.items()}
        metrics.log_eval(step, values, [], show=0)
        changes, worse = {}, {}
        for name, then in (("since_last", self.last), ("since_base", self.base)):
            changes[name] = {"step": then["step"]} | turned(then["cases"], results) if then else None
            if then:
                worse |= {group: (then, p) for group, p in falls(then["cases"], results).items() if p < ALPHA}
        for word in ("fell", "rose") if self.last else ():
            if ids := changes["since_last"][word]:
                more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
                say(f"    {word} since step {self.last['step']}: {', '.join(ids[:SHOWN])}{more}")
        metrics.append("regression.jsonl", [{"step": step, "turned": changes} | line])
        for name, (then, p) in worse.items():
            if name not in self.fallen:
                now, total = groups[name]["passed"], groups[name]["total"]
                text = f"{name} has fallen since step {then['step']}, to {now} of {total} (p = {p:.2g})"
                say(f"regression: step {step}: {text}")
                metrics.event("regression", step, text)
        self.fallen = list(worse)
        self.last = {"step": step, "cases": cases}
        self.base = self.base or self.last
        return values

    def state(self) -> dict[str, Any]:
        """The state to store in a checkpoint."""
        return {"regression": {"base": self.base, "last": self.last, "fallen": self.fallen}}

    def restore(self, state: dict[str, Any]) -> None:
        kept = state.get("regression", {})
        self.base, self.last, self.fallen = kept.get("base", {}), kept.get("last", {}), kept.get("fallen", [])
