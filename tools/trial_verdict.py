"""What the runs of a trial are compared by, and the verdicts: see tools/trial.py and docs/trials.md."""

import math
from pathlib import Path
import statistics
from typing import Any, NamedTuple

from common.errors import UserError
from common.run.folder import read_args, read_json
from common.run.parts.report import asked, groups, lines, points_of, scores_of
import numpy as np

from tools.trial_statistics import (
    Estimate,
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
COSTS = ("num_tokens", "tokens_per_second", "cpu_seconds", "seconds", "peak_memory_gib")
LEFT_OUT = ("eval_perplexity",)  # the loss says the same
HIGHER = ("accurac", "margins", "tokens_per_second")  # of metrics that are no scores of completions
LOWER = ("loss", "bits_per_byte", "seconds", "memory")
OF_A_SEED = ("seed", "output_dir", "run_name", "resume_from_checkpoint")
OF_EVALUATION = ("eval_reward_funcs", "eval_temperatures", "eval_max_new_tokens", "regression_suite")
UNKNOWN = "not told apart"


# --- what a run leaves --------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """A complete run, as it is compared."""

    folder: Path
    values: dict[str, float]  # of the last evaluation, and COSTS
    scores: dict[str, dict[Any, float | None]]  # {metric: {prompt or case: score}} of that evaluation
    samples: list[Row]  # of that evaluation
    settings: Row
    data: Row  # dataset.json
    inputs: Row  # hashes of the script, the rows and other code


def read_outcome(folder: Path) -> Outcome:
    """With --save_best the evaluation of the model that was kept, else the last one."""
    summary = read_json(folder / "summary.json")
    final, points = summary.get("final") or {}, points_of(folder)
    best = (summary.get("best") or {}).get("step")
    values = {}
    for name, value in final.items():
        if name.startswith("eval_") and value is not None and name not in LEFT_OUT:
            values[name] = float(value)
    if "reward" in points:
        rewards = points["reward"][:, 1]
        values["reward"] = float(rewards[-max(1, len(rewards) // 10) :].mean())  # one rollout says little
    for name in COSTS:
        if name in points:
            column = points[name][:, 1]
            values[name] = float(column.mean() if name == "tokens_per_second" else column.max())
    samples: list[Row] = []
    for rows in groups(folder / "samples.jsonl"):
        if best in (None, rows[0]["step"]):
            samples = rows
    cases: Row = {}
    for line in lines(folder / "regression.jsonl"):
        if best in (None, line["step"]):
            cases = line["cases"]
    inputs, data = (read_json(folder / name) for name in ("inputs.json", "dataset.json"))
    scores = scores_by_prompt(samples, cases)
    return Outcome(folder, values, scores, samples, read_args(folder), data, inputs)


def scores_by_prompt(samples: list[Row], cases: Row) -> dict[str, dict[Any, float | None]]:
    """{metric: {what was asked: score}}: as in metrics.jsonl a metric ends in its temperature, but for the
    first one."""
    found: dict[str, dict[Any, float | None]] = {}
    for number, row in enumerate(samples):
        is_first = row["temperature"] == samples[0]["temperature"]
        suffix = "" if is_first else f"_t{row['temperature']:g}"
        for name, value in scores_of(row).items():
            found.setdefault(f"eval_{name}{suffix}", {})[number, asked(row)] = value
    for name, case in cases.items():
        for group in ("all", case["group"]):
            found.setdefault(f"eval_regression/{group}", {})[name, case["digest"]] = case["rate"]
    return found


# --- what must not differ -----------------------------------------------------------------------------------


def refuse_other_seed(first: Outcome, other: Outcome) -> None:
    """Raise UserError if two runs of a side differ in more than their seed: another script, setting, data."""
    differing = []
    for then, now in ((first.settings, other.settings), (first.inputs, other.inputs)):
        for name in {**then, **now}:
            if then.get(name) != now.get(name) and name not in OF_A_SEED:
                differing.append(name)
    if differing:
        raise UserError(
            f"{other.folder} is not {first.folder} with another seed ({', '.join(differing)} changed in between): "
            f"delete {first.folder.parent}, and its runs start anew"
        )


def refuse_other_evaluation(first: Outcome, other: Outcome, other_data: bool) -> None:
    """Raise UserError if two sides were asked other prompts, or trained on other data (unless other_data)."""
    for name in OF_EVALUATION:
        if first.settings.get(name) != other.settings.get(name):
            raise UserError(
                f"{other.folder} has another --{name} than {first.folder}: sides are evaluated alike, or not compared"
            )
    then, now = ([asked(row) for row in outcome.samples] for outcome in (first, other))
    if then != now:
        raise UserError(
            f"{other.folder} was evaluated on other prompts than {first.folder} ({len(now)} and {len(then)} "
            "completions): name one file as --eval_prompts for all sides"
        )
    then, now = (trained_on(outcome) for outcome in (first, other))
    if then != now and not other_data:
        raise UserError(
            f"{other.folder} was trained on {now}, and {first.folder} on {then}: --other_data if that is the idea"
        )


def trained_on(outcome: Outcome) -> str:
    sources = outcome.data.get("sources") or []
    return ", ".join(f"{source.get('rows')} rows of {source.get('path')}" for source in sources)


def held_out_of(outcome: Outcome) -> list[tuple[Any, ...]]:
    """What losses are means over: an edit may train, and so evaluate, other tokens."""
    sources = outcome.data.get("eval_sources") or []
    return [tuple(source.get(name) for name in ("path", "rows", "trained_tokens")) for source in sources]


# --- verdicts -----------------------------------------------------------------------------------------------


def choose_metric(wanted: str | None, parent: Outcome) -> tuple[str, int]:
    """The metric that the verdict is about, and 1 if higher is better, else -1. Unset: the first score of
    completions, or else the loss. Raises UserError if the parent has none such."""
    values = [name for name in parent.values if name not in COSTS]
    evaluated = [name for name in values if name.startswith("eval_")]
    if not evaluated:
        raise UserError(
            f"{parent.folder} was not evaluated: --eval_steps above 0, with held-out rows or --eval_prompts"
        )
    scored = [name for name in parent.scores if name in values]
    order = [*scored, *(name for name in evaluated if name == "eval_loss"), *evaluated]
    if wanted is None:
        known = [name for name in order if direction(name, parent)]
        if not known:
            raise UserError(
                f"--metric: which of {', '.join(evaluated)}? min:NAME if lower is better, else max:NAME"
            )
        return known[0], direction(known[0], parent)
    name = wanted.removeprefix("min:").removeprefix("max:")
    name = name if name in parent.values else f"eval_{name}"
    if name not in parent.values:
        raise UserError(f"--metric {wanted}: these runs have {', '.join(parent.values)}")
    sign = {"min:": -1, "max:": 1}.get(wanted[:4]) or direction(name, parent)
    if not sign:
        raise UserError(f"--metric {wanted}: is lower or higher better? Write min:{wanted} or max:{wanted}")
    return name, sign


def direction(name: str, outcome: Outcome) -> int:
    """1 if higher values are better, -1 if lower ones are, 0 if the name does not say it."""
    if name in outcome.scores or name == "reward" or any(word in name for word in HIGHER):
        return 1
    return -1 if any(word in name for word in LOWER) else 0


def differences(metric: str, parent: list[Outcome], side: list[Outcome]) -> np.ndarray:
    """side - parent with the same seed: (S, P) of a metric that is scored by prompt, else (S,)."""
    pairs = list(zip(parent, side, strict=True))
    tables = [outcome.scores.get(metric, {}) for pair in pairs for outcome in pair]
    scored = [key for key in tables[0] if all(table.get(key) is not None for table in tables)]
    if not scored:
        return np.array([there.values[metric] - here.values[metric] for here, there in pairs])
    return np.array(
        [[there.scores[metric][key] - here.scores[metric][key] for key in scored] for here, there in pairs],
        float,
    )


def compare(metric: str, sign: int, parent: list[Outcome], side: list[Outcome]) -> Row:
    """A metric of two sides, seed by seed, before `judge` gives it a word."""
    table = differences(metric, parent, side)
    is_scored, several = table.ndim == 2, len(table) > 1
    estimate, p = None, None
    if several:
        estimate = (
            over_seeds_and_prompts(table) if is_scored and table.shape[1] > 1 else over_seeds(by_seed(table))
        )
        p = p_value(estimate)
    elif is_scored:
        estimate = over_prompts(table[0])
        gained, lost = int((table > 0).sum()), int((table < 0).sum())
        p = sign_p_value(gained, lost) if set(np.unique(table)) <= {-1.0, 0.0, 1.0} else p_value(estimate)
    return {
        "metric": metric,
        "sign": sign,
        "parent": [outcome.values[metric] for outcome in parent],
        "side": [outcome.values[metric] for outcome in side],
        "difference": float(by_seed(table).mean()),
        "prompts": table.shape[1] if is_scored else 0,
        "p": p,
        "estimate": estimate,
    }


def by_seed(table: np.ndarray) -> np.ndarray:
    """(S, P) or (S,) -> (S,)."""
    return table.mean(axis=1) if table.ndim == 2 else table


def judge(rows: list[Row], alpha: float) -> None:
    """Give the rows, which are corrected for their number, their words, intervals and the seeds that they
    need."""
    tested = [row for row in rows if row["p"] is not None]
    for row, p in zip(tested, holm(row["p"] for row in tested), strict=True):
        row["p"] = p
    for row in rows:
        estimate: Estimate | None = row.pop("estimate")
        row["interval"] = interval(estimate) if estimate and row["p"] is not None else None
        row["word"], row["needs"] = UNKNOWN, None
        if row["p"] is None or len(row["side"]) < 2:
            continue
        if row["p"] < alpha:
            gain = row["difference"] * (row["sign"] or 1)
            words = ("better", "worse") if row["sign"] else ("higher", "lower")
            row["word"] = words[0] if gain > 0 else words[1]
        else:
            row["needs"] = seeds_needed(estimate, alpha / len(tested))


def verdicts(
    parent: list[Outcome], sides: dict[str, list[Outcome]], metric: str, sign: int, alpha: float
) -> dict[str, list[Row]]:
    """{side: its metrics, the one of the verdict first}.

    The verdicts are corrected for the number of sides; the other metrics of all sides, together, for theirs.
    """
    table: dict[str, list[Row]] = {}
    for name, runs in sides.items():
        first = parent[0]
        shared = [key for key in first.values if all(key in run.values for run in [*parent, *runs])]
        if held_out_of(first) != held_out_of(runs[0]):  # a loss of other tokens is another metric
            shared = [key for key in shared if key in first.scores or not key.startswith("eval_")]
        if metric not in shared:
            raise UserError(
                f"--metric {metric}: {runs[0].folder} does not have it, or over other held-out rows than {first.folder}"
            )
        others = [key for key in shared if key not in (metric, "num_tokens")]
        table[name] = [compare(metric, sign, parent, runs)]
        table[name] += [compare(key, direction(key, first), parent, runs) for key in others]
    judge([rows[0] for rows in table.values()], alpha)
    judge([row for rows in table.values() for row in rows[1:]], alpha)
    return table


def noise_floor(runs: list[Outcome], seeds: int) -> list[Row]:
    """Of runs that differ by their seed alone: the spread of each metric, and the differences that chance
    exceeds in 5 % of the comparisons: of two runs, and of two means of so many seeds each, not paired."""
    found = []
    for metric in runs[0].values:
        values = [run.values[metric] for run in runs if metric in run.values]
        if len(values) < len(runs) or metric == "num_tokens":
            continue
        spread = statistics.stdev(values)
        two = t_quantile(0.05, len(values) - 1) * spread * math.sqrt(2)
        means = two / math.sqrt(seeds)
        row = {"metric": metric, "mean": statistics.mean(values), "spread": spread, "of_runs": two}
        found.append(row | {"of_means": means})
    return found
