"""What the runs of a trial are compared by, and the verdicts: see tools/trial.py and docs/trials.md."""

import math
from pathlib import Path
import re
import statistics
from typing import Any, NamedTuple

from common.errors import UserError
from common.run.folder import read_args, read_object
from common.run.parts.report import asked, is_number, points_of
import numpy as np

from tools.report import Scores, read_scores
from tools.trial_statistics import (
    holm,
    interval,
    over_prompts,
    over_seeds,
    over_seeds_and_prompts,
    p_value,
    seeds_needed,
    sign_p_value,
    t_quantile,
)

Row = dict[str, Any]
COSTS = ("tokens_per_second", "cpu_seconds", "seconds", "peak_memory_gib")
HIGHER = ("accurac", "margins", "tokens_per_second")  # of metrics that are no scores of completions
LOWER = ("loss", "perplexity", "bits_per_byte", "seconds", "memory")
OF_A_SEED = ("seed", "output_dir")
OF_REWARDS = ("reward_funcs", "reward_weights")
OF_EVALUATION = ("eval_reward_funcs", "eval_temperatures", "eval_max_new_tokens", "regression_suite")
UNKNOWN = "not told apart"


class TrialRun(NamedTuple):
    """A complete run, as it is compared."""

    folder: Path
    values: dict[str, float]  # of the last evaluation, and COSTS
    scores: dict[str, Scores]  # of that evaluation, by metric
    samples: list[Row]  # of that evaluation
    settings: Row
    data: Row  # dataset.json
    inputs: Row  # hashes of the script, the rows and other code


def read_outcome(folder: Path) -> TrialRun:
    """With --save_best the evaluation of the model that was kept, else the last one."""
    summary, points = read_object(folder / "summary.json"), points_of(folder)
    best = (summary.get("best") or {}).get("step")
    values = {}
    for name, value in summary.get("final", {}).items():
        if name.startswith("eval_") and is_number(value):
            values[name] = float(value)
    if "reward" in points:
        rewards = points["reward"][:, 1]
        last = max(1, len(rewards) // 10)  # one rollout says little
        values["reward"] = float(rewards[-last:].mean())
    for name in COSTS:
        if name in points:
            column = points[name][:, 1]
            value = column.mean() if name == "tokens_per_second" else column.max()
            values[name] = float(value)

    samples, scores = read_scores(folder, best)
    data = read_object(folder / "dataset.json")
    inputs = read_object(folder / "inputs.json")
    return TrialRun(folder, values, scores, samples, read_args(folder), data, inputs)


# --- what must not differ -----------------------------------------------------------------------------------


def refuse_other_seed(first: TrialRun, other: TrialRun) -> None:
    """Raise UserError if two runs of a side differ in more than their seed: another script, setting, data."""
    then = first.settings | first.inputs
    now = other.settings | other.inputs
    differing = []
    for name in then | now:
        if name not in OF_A_SEED and then.get(name) != now.get(name):
            differing.append(name)
    if differing:
        raise UserError(
            f"{other.folder} is not {first.folder} with another seed ({', '.join(differing)} changed in between): "
            f"delete {first.folder.parent}, and its runs start anew"
        )


def refuse_other_evaluation(first: TrialRun, other: TrialRun, other_data: bool) -> None:
    """Raise UserError if two runs were evaluated in other ways, with a file or a model that was changed
    between them, or trained on other data (unless other_data)."""
    names = OF_EVALUATION
    if not first.settings.get("eval_reward_funcs"):
        names += ("reward_funcs",)  # then these score the evaluations
    for name in names:
        if first.settings.get(name) != other.settings.get(name):
            also = " (or the same --eval_reward_funcs)" if name == "reward_funcs" else ""
            raise UserError(
                f"{other.folder} has another --{name} than {first.folder}: all sides take the same{also}"
            )
    for name, digest in first.inputs.items():
        is_path = not name.startswith("the ")  # the others are the script, the precision, the data
        if is_path and other.inputs.get(name, digest) != digest:
            raise UserError(
                f"{name} was changed between {first.folder} and {other.folder}: delete the older runs, and they start anew"
            )
    if list(map(asked, first.samples)) != list(map(asked, other.samples)):
        raise UserError(
            f"{other.folder} was evaluated on other prompts than {first.folder} ({len(other.samples)} and "
            f"{len(first.samples)} completions): name one file as --eval_prompts for all sides"
        )
    then, now = (rows_of(outcome.data, "sources", "rows") for outcome in (first, other))
    if then != now and not other_data:
        raise UserError(
            f"{other.folder} was trained on {now}, and {first.folder} on {then}: --other_data if that is the idea"
        )


def rows_of(data: Row, sources: str, *counts: str) -> str:
    """Which data, and how much of it, in words."""
    found = []
    for source in data.get(sources) or []:
        sizes = [f"{source.get(count)} {count.replace('_', ' ')}" for count in counts]
        found.append(f"{', '.join(sizes)} of {source.get('path')}")
    return "; ".join(found)


# --- verdicts -----------------------------------------------------------------------------------------------


def choose_metric(wanted: str | None, parent: TrialRun) -> tuple[str, int]:
    """The metric that the verdict is about, and 1 if higher is better, else -1. Unset: the first score of
    completions, or else the loss. Raises UserError if the parent has none such."""
    evaluated = [name for name in parent.values if name.startswith("eval_")]
    if not evaluated:
        raise UserError(
            f"{parent.folder} was not evaluated: --eval_steps above 0, with held-out rows or --eval_prompts"
        )
    if wanted is None:
        order = [name for name in parent.scores if name in evaluated]
        order += [name for name in evaluated if direction(name, parent)]
        wanted = order[0] if order else evaluated[0]
    name = wanted.removeprefix("min:").removeprefix("max:")
    name = name if name in parent.values else f"eval_{name}"
    if name not in parent.values:
        raise UserError(f"--metric {wanted}: these runs have {', '.join(parent.values)}")
    sign = {"min:": -1, "max:": 1}.get(wanted[:4]) or direction(name, parent)
    if not sign:
        raise UserError(f"--metric {wanted}: is lower or higher better? Write min:{wanted} or max:{wanted}")
    return name, sign


def direction(name: str, outcome: TrialRun) -> int:
    """1 if higher values are better, -1 if lower ones are, 0 if the name does not say it."""
    if name in outcome.scores or name == "reward" or any(word in name for word in HIGHER):
        return 1
    return -1 if any(word in name for word in LOWER) else 0


def compare(metric: str, sign: int, parent: list[TrialRun], side: list[TrialRun]) -> Row:
    """A metric of two sides, seed by seed, before `judge` gives it a word. "estimate" is of the differences
    side - parent, None if one seed has only one number."""
    here = np.array([run.values[metric] for run in parent])  # (S,)
    there = np.array([run.values[metric] for run in side])
    scored = scored_differences(metric, parent, side)  # (S, P)
    seeds, prompts = scored.shape
    estimate, p = None, None
    if seeds > 1:
        estimate = over_seeds_and_prompts(scored) if prompts > 1 else over_seeds(there - here)
        p = p_value(estimate)
        if p is None and prompts > 1 and estimate.mean:  # all wrong against all right: by prompts alone
            p = sign_p_value(prompts, 0)
    elif prompts:
        estimate = over_prompts(scored[0])
        gained = int((scored == 1).sum())
        lost = int((scored == -1).sum())
        same = int((scored == 0).sum())
        p = sign_p_value(gained, lost) if gained + lost + same == prompts else p_value(estimate)
    difference = estimate.mean if estimate else float((there - here).mean())
    known = {"metric": metric, "sign": sign, "parent": here.tolist(), "side": there.tolist()}
    return known | {"difference": difference, "prompts": prompts, "p": p, "estimate": estimate}


def scored_differences(metric: str, parent: list[TrialRun], side: list[TrialRun]) -> np.ndarray:
    """(S, P) of a metric that is scored by prompt, else (S, 0); a prompt without a score in some run is left
    out."""
    tables = [run.scores.get(metric, {}) for run in [*parent, *side]]
    prompts = []
    for key in tables[0]:
        if all(table.get(key) is not None for table in tables):
            prompts.append(key)
    rows = []
    for table in tables:
        rows.append([table[key] for key in prompts])
    scores = np.array(rows, float)  # (2 S, P)
    return scores[len(parent) :] - scores[: len(parent)]


def judge(rows: list[Row], alpha: float) -> None:
    """Give the rows, which are corrected for their number, their words, intervals and the seeds that they
    need."""
    tested = [row for row in rows if row["p"] is not None]
    for row, p in zip(tested, holm(row["p"] for row in tested), strict=True):
        row["p"] = p
    for row in rows:
        estimate = row.pop("estimate")
        row["interval"], row["word"], row["needs"] = None, UNKNOWN, None
        if row["p"] is None:
            continue
        row["interval"] = interval(estimate)
        row["needs"] = seeds_needed(estimate, alpha / len(tested))
        if row["p"] < alpha and estimate.seeds > 1:
            words = ("better", "worse") if row["sign"] else ("higher", "lower")
            row["word"] = words[0] if row["difference"] * (row["sign"] or 1) > 0 else words[1]


def verdicts(
    parent: list[TrialRun], sides: dict[str, list[TrialRun]], metric: str, sign: int, alpha: float
) -> dict[str, list[Row]]:
    """{side: its metrics, the one of the verdict first}, without sides that do not have that one.

    The verdicts are corrected for the number of sides; the other metrics of all sides, together, for theirs.
    """
    table: dict[str, list[Row]] = {}
    first = parent[0]
    for name, runs in sides.items():
        shared = metrics_of_all([*parent, *runs])
        if metric not in shared:
            continue
        table[name] = [compare(metric, sign, parent, runs)]
        for key in shared:
            if key not in (metric, "eval_perplexity"):  # which says the same as the loss
                table[name].append(compare(key, direction(key, first), parent, runs))
    judge([rows[0] for rows in table.values()], alpha)
    judge([row for rows in table.values() for row in rows[1:]], alpha)
    return table


def metrics_of_all(runs: list[TrialRun]) -> list[str]:
    """The metrics that all runs have. A loss over other held-out tokens, as of an edit that trains others, is
    another metric; so is a sum of other rewards."""
    rewarded = {str([run.settings.get(name) for name in OF_REWARDS]) for run in runs}
    held_out = {rows_of(run.data, "eval_sources", "rows", "trained_tokens") for run in runs}
    found = []
    for name in runs[0].values:
        is_of_rows = name.startswith("eval_") and name not in runs[0].scores
        is_of_rewards = re.fullmatch(r"(eval_)?reward(_t[\d.]+)?", name)
        is_other = (is_of_rows and len(held_out) > 1) or (is_of_rewards and len(rewarded) > 1)
        if all(name in run.values for run in runs) and not is_other:
            found.append(name)
    return found


def noise_floor(runs: list[TrialRun], seeds: int) -> list[Row]:
    """Of runs that differ by their seed alone: the spread of each evaluated metric, and the differences that
    chance exceeds in 5 % of the comparisons: of two runs, and of two means of so many seeds, not paired."""
    found = []
    for metric in runs[0].values:
        values = [run.values[metric] for run in runs if metric in run.values]
        if not metric.startswith("eval_") or len(values) < len(runs):
            continue
        spread = statistics.stdev(values)
        if spread:
            two = t_quantile(0.05, len(values) - 1) * spread * math.sqrt(2)
            row = {"metric": metric, "mean": statistics.mean(values), "spread": spread}
            found.append(row | {"of_runs": two, "of_means": two / math.sqrt(seeds)})
    return found
