"""A suite of prompts with checks of their answers: read, answered, judged, and compared with an earlier evaluation.

A row is {"id", "group", "prompt" (plain text) or "messages" (a chat), and one or more of CHECKS}; a case passes if all its
checks do. Users read docs/regression.md.
"""

import difflib
import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from common.data.formats import as_prompt
from common.data.sources import load_rows
from common.data.tokens import tokenize_row
from common.data.types import BadRow, Row, Tokenizer
from common.errors import UserError, quoted
from common.model.flat_model import FlatModel
from common.processes import gather_lists
from common.sampling.counts import fall_p_value, pass_at_k, wilson
from common.sampling.generate import sample
from common.sampling.rewards import Reward, final_number, load_rewards, score
from common.time_limit import TimeLimitReached, time_limit

import torch
from accelerate import Accelerator

CHECKS = ("equals", "contains", "not_contains", "regex", "number", "max_tokens", "reward")
FIELDS = ("id", "group", "prompt", "messages", "tools", *CHECKS)
ALL = "all"  # the group of all cases
PASSES = 0.5  # rate from which a case counts as passed, and reward from which an answer does
LARGEST = 1e300  # largest expected number: a larger one may overflow a float
ALPHA = 0.05  # significance level of a fall
Known = dict[str, dict[str, Any]]  # {id: {"rate", "digest", "group"}}: the outcomes of an earlier evaluation


@dataclass
class Case:
    """A prompt, and the checks of its answer."""

    id: str
    group: str
    row: dict[str, Any]  # all columns, with "prompt" and, after tokenize, "prompt_ids"
    checks: dict[str, Any]
    where: str
    digest: str  # of the row: an edited case counts as another one

    @property
    def limit(self) -> int | None:
        return self.checks.get("max_tokens")


@dataclass
class Suite:
    """The cases, the reward functions that they name, and sampling settings."""

    cases: list[Case]
    rewards: dict[str, Reward]
    samples: int  # answers per case
    pass_at: int  # k of pass@k
    temperature: float
    max_new_tokens: int  # for cases without their own limit
    timeout: float  # seconds for a pattern, or a reward call
    groups: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.groups = list(dict.fromkeys(case.group for case in self.cases))

    def asked(self) -> dict[str, float]:
        """The settings that must agree for rates to be comparable."""
        names = ("samples", "pass_at", "temperature", "max_new_tokens")
        return {name: getattr(self, name) for name in names}

    def tokenize(self, tokenizer: Tokenizer) -> int:
        """Tokenize each case's prompt. Returns the largest number of tokens, including the answer."""
        longest = 0
        for case in self.cases:
            try:
                case.row = tokenize_row(case.row, tokenizer)
            except (BadRow, UserError) as error:
                raise UserError(f"{case.where}: {'messages' if case.row.get('messages') else 'prompt'}: {error}") from None
            longest = max(longest, len(case.row["prompt_ids"]) + (case.limit or self.max_new_tokens))
        return longest


class Result(NamedTuple):
    """The outcome of a case."""

    case: Case
    rate: float  # 1 or 0 for one answer, pass@k for several
    why: str  # the check that the first failing answer fails; "": all pass
    completion: str  # that answer, or the first one


# --- reading --------------------------------------------------------------------------------------------------------


def load_suite(
    path: str,
    device: torch.device,
    *,
    samples: int = 1,
    pass_at: int = 1,
    temperature: float = 0.0,
    max_new_tokens: int = 128,
    timeout: float = 0.0,
    flag: str = "--regression_",
) -> Suite:
    """The suite in a file. device: for reward models. flag: prefix of the flags with these values, for messages. Raises
    UserError, with file, row and field, for invalid cases."""
    if samples > 1 and temperature == 0:
        raise UserError(f"{flag}samples: answers of temperature 0 are all the same: {flag}temperature 1")
    if pass_at > samples:
        raise UserError(f"{flag}pass_at {pass_at}: there are only {samples} answers ({flag}samples)")
    rows = load_rows(path)
    cases, places = [], {}
    for row in rows:
        case = _case(row)
        if case.id in places:
            raise UserError(f"{row.where}: id: {quoted(case.id)} is that of {places[case.id]}, too")
        places[case.id] = row.where
        cases.append(case)
    rewards = {}
    for case in cases:
        spec = case.checks.get("reward")
        if spec is not None and spec not in rewards:
            rewards[spec] = load_rewards([spec], device, timeout, f"{case.where}: reward:")[0]
    return Suite(cases, rewards, samples, pass_at, temperature, max_new_tokens, timeout)


def _case(row: Row) -> Case:
    """A row as a case. Raises UserError with the row and the field."""

    def bad(name: str, problem: str) -> UserError:
        return UserError(f"{row.where}: {name}: {problem}")

    columns = {name: value for name, value in row.items() if value is not None}  # a table gives each row all columns
    for name in columns:
        near = difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.8)
        if name not in FIELDS and (near or "reward" not in columns):  # other columns are for the reward
            raise bad(name, f"unknown; {f'did you mean {near[0]}?' if near else 'known: ' + ', '.join(FIELDS)}")
    for name in ("id", "group"):
        value = columns.get(name)
        if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
            raise bad(name, "missing" if value is None else f"expected a name, found {quoted(value)}")
    if not re.fullmatch(r"[\w .:/-]{1,100}", str(columns["group"])):
        raise bad("group", f"letters, digits and . : / - are what trackers take in a name, found {quoted(columns['group'])}")
    if columns["group"] == ALL:
        raise bad("group", f"{ALL} is the name of all cases together: choose another")
    if ("prompt" in columns) == ("messages" in columns):
        raise bad("prompt", "expected prompt (text) or messages (a chat), one of them")
    checks = {name: columns[name] for name in CHECKS if name in columns}
    if not checks:
        raise bad("checks", f"none; expected one or more of {', '.join(CHECKS)}")
    for name, value in checks.items():
        if problem := _problem(name, value):
            raise bad(name, f"{problem}, found {quoted(value)}")
    if "regex" in checks:
        try:
            checks["regex"] = re.compile(checks["regex"], re.DOTALL)
        except (re.error, RecursionError, OverflowError) as error:
            raise bad("regex", f"{error}: {quoted(checks['regex'])}") from None
    name = "prompt" if "prompt" in columns else "messages"
    try:
        prompt = as_prompt(Row(columns, row.where, "prompt" if name == "prompt" else "messages"))
    except (BadRow, UserError) as error:
        raise bad(name, str(error)) from None
    if name == "messages" and columns["messages"] and prompt["prompt"] and len(prompt["prompt"]) < len(columns["messages"]):
        raise bad("messages", "the last one is the assistant's, whose answer is asked for: leave it out")
    text = json.dumps(columns, sort_keys=True, ensure_ascii=False, default=str)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return Case(str(columns["id"]), str(columns["group"]), {**row, **prompt}, checks, row.where, digest)


def _problem(name: str, value: Any) -> str:
    """The required form of a check's value, if it does not have it; else ""."""
    if name in ("regex", "reward"):
        return "" if isinstance(value, str) and value else "expected text"
    if name == "number":
        if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
            return "expected a number"
        return "" if abs(value) <= LARGEST else f"expected a number of at most {LARGEST:g} in size"
    if name == "max_tokens":
        return (
            ""
            if isinstance(value, int) and not isinstance(value, bool) and value >= 1
            else "expected a whole number from 1 on"
        )
    texts = value if isinstance(value, list) else [value]
    fits = bool(texts) and all(isinstance(text, str) and (text or name == "equals") for text in texts)
    return "" if fits else "expected text, or a list of texts, none of them empty"


# --- answering and judging ------------------------------------------------------------------------------------------


def run_suite(suite: Suite, model: FlatModel, tokenizer: Tokenizer, accelerator: Accelerator, seed: int) -> list[Result]:
    """Answer every case, and judge the answers. Called on every process; the result is the same on each.

    The random numbers of an answer are a function of (seed, id of the case, its number), whoever samples it and in which
    batch.
    """
    jobs = [(case, j) for case in suite.cases for j in range(suite.samples)]
    mine = range(accelerator.process_index, len(jobs), accelerator.num_processes)
    judged: list[tuple[int, str, str]] = []  # (job, why it fails, text)
    for limit in sorted({case.limit or suite.max_new_tokens for case in suite.cases}):
        here = [i for i in mine if (jobs[i][0].limit or suite.max_new_tokens) == limit]
        with accelerator.autocast():  # also on a process without a case: all of them gather sharded weights
            answers = sample(
                model,
                [jobs[i][0].row["prompt_ids"] for i in here],
                [(seed, _number(jobs[i][0].id), jobs[i][1]) for i in here],
                max_new_tokens=limit,
                temperature=suite.temperature,
            )
        texts = [tokenizer.decode(answer.ids, skip_special_tokens=True) for answer in answers]
        ids, cases = [answer.ids for answer in answers], [jobs[i][0] for i in here]
        values = _rewards(suite, cases, texts, ids)
        for i, case, answer, text, value in zip(here, cases, answers, texts, values, strict=True):
            judged.append((i, _judge(case, text, answer.finished, value, suite.timeout), text))
    everyones = sorted(gather_lists(accelerator, judged))
    results = []
    for at, case in enumerate(suite.cases):
        own = everyones[at * suite.samples : (at + 1) * suite.samples]
        passed = sum(not why for _, why, _ in own)
        _, why, text = next((answer for answer in own if answer[1]), own[0])
        results.append(Result(case, pass_at_k(suite.samples, passed, suite.pass_at), why, text))
    return results


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:4], "big")


def _rewards(suite: Suite, cases: list[Case], texts: list[str], ids: list[list[int]]) -> list[float | None]:
    """The reward of each answer, for cases with a reward check."""
    values: list[float | None] = [None] * len(cases)
    for spec, reward in suite.rewards.items():
        own = [i for i, case in enumerate(cases) if case.checks.get("reward") == spec]
        names = dict.fromkeys(name for i in own for name in cases[i].row)
        rows = [{name: cases[i].row.get(name) for name in names} for i in own]
        found = score([reward], rows, [texts[i] for i in own], [ids[i] for i in own])[0]
        for i, value in zip(own, found, strict=True):
            values[i] = value
    return values


def _judge(case: Case, text: str, finished: bool, reward: float | None, timeout: float) -> str:
    """The check that the answer fails, in words; "" if none."""
    for name, wanted in case.checks.items():
        several = wanted if isinstance(wanted, list) else [wanted]
        if name == "equals" and text.strip() not in [value.strip() for value in several]:
            return f"equals: not {' or '.join(map(quoted, several))}"
        if name == "contains" and (missing := [value for value in several if value not in text]):
            return f"contains: without {quoted(missing[0])}"
        if name == "not_contains" and (found := [value for value in several if value in text]):
            return f"not_contains: has {quoted(found[0])}"
        if name == "number" and (number := final_number(text)) != wanted:
            return f"number: {'none' if number is None else f'{number:g}'}, not {wanted:g}"
        if name == "max_tokens" and not finished:
            return f"max_tokens: goes on after {wanted}"
        if name == "reward" and not (reward is not None and reward >= PASSES):
            return f"reward: {'none' if reward is None else f'{reward:g}'}"
        if name == "regex":
            try:
                with time_limit(timeout):
                    found = wanted.search(text)
            except TimeLimitReached:
                raise UserError(f"{case.where}: regex: takes more than {timeout:g} s (--reward_timeout)") from None
            if not found:
                return f"regex: {quoted(wanted.pattern)} does not match"
    return ""


# --- counting and comparing -----------------------------------------------------------------------------------------


def known(results: list[Result]) -> Known:
    """The part of the results that a later evaluation needs."""
    return {r.case.id: {"rate": round(r.rate, 6), "digest": r.case.digest, "group": r.case.group} for r in results}


def by_group(results: list[Result]) -> Iterator[tuple[str, list[Result]]]:
    """Yield (ALL, everything), then each group with its cases, in the order of the suite."""
    yield ALL, results
    for group in dict.fromkeys(r.case.group for r in results):
        yield group, [r for r in results if r.case.group == group]


def counts(results: list[Result]) -> dict[str, dict[str, float]]:
    """{group: {"passed", "total", "rate", "low", "high"}}, with the 95 % interval of the rate."""
    found = {}
    for group, own in by_group(results):
        passed = round(math.fsum(r.rate for r in own), 6)
        low, high = wilson(passed, len(own))
        passed = int(passed) if passed == int(passed) else passed
        rate, low, high = (round(value, 6) for value in (passed / len(own), low, high))
        found[group] = {"passed": passed, "total": len(own), "rate": rate, "low": low, "high": high}
    return found


def turned(before: Known, results: Sequence[Result]) -> dict[str, list[str]]:
    """{"fell": ids, "rose": ids} of the cases that no longer pass, and that newly pass. Cases that `before` lacks in their
    current form are left out."""
    pairs = [(r.case.id, before[r.case.id]["rate"] >= PASSES, r.rate >= PASSES) for r in shared(before, results)]
    return {"fell": [i for i, then, now in pairs if then > now], "rose": [i for i, then, now in pairs if then < now]}


def falls(before: Known, results: list[Result]) -> dict[str, float]:
    """{group: p-value} by `fall_p_value`."""
    found = {}
    for group, own in by_group(results):
        change = [r.rate - before[r.case.id]["rate"] for r in shared(before, own)]
        found[group] = fall_p_value(sum(c < -1e-5 for c in change), sum(c > 1e-5 for c in change))
    return found


def shared(before: Known, results: Sequence[Result]) -> list[Result]:
    """The results whose case is unchanged in `before`."""
    return [r for r in results if before.get(r.case.id, {}).get("digest") == r.case.digest]
