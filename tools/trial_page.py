"""A trial for people: the tables on the console, and trial.html in the look of report.html."""

import difflib
from pathlib import Path
import shlex
import statistics
from typing import Any

from common.run.parts.report import cut, describe_run, embedded, prompt_text, scores_of, write_page

from tools.report import differing
from tools.trial_statistics import MORE_PROMPTS, POWER
from tools.trial_verdict import Outcome, Row

SCRIPT = Path(__file__).with_name("trial.js")  # of the page: what report.html does not have
PROMPTS, SIZE = 200, 1_000_000  # of the page, at most; bytes
EVALUATED = "eval_"


# --- the console --------------------------------------------------------------------------------------------


def console(trial: Row) -> list[str]:
    """The verdicts as lines; of a single side also its other metrics."""
    sides = [side for side in trial["sides"] if side["metrics"]]
    better = "higher" if trial["higher_is_better"] else "lower"
    lines = [
        "",
        f"{trial['metric']}, {better} is better, against {trial['parent']['name']}: {asked_of(trial)}",
    ]
    if sides:
        lines += table("side", [[side["name"], *cells(side["metrics"][0])] for side in sides])
    if len(sides) == 1:
        rows = sides[0]["metrics"][1:]
        lines += [
            "",
            f"other metrics, p corrected for their number ({sum(row['p'] is not None for row in rows)})",
        ]
        lines += table("metric", [[row["metric"], *cells(row)] for row in rows])
    for row in trial.get("noise", []):
        if row["metric"].startswith(EVALUATED):
            lines.append(
                f"noise of {row['metric']}: {row['mean']:.4g} ± {row['spread']:.2g}; by chance two runs are up to "
                f"{row['of_runs']:.2g} apart, two means of {len(trial['seeds'])} up to {row['of_means']:.2g} (95 %)"
            )
    lines.append("")
    for side in trial["sides"]:
        lines.append(f"{side['name']}: {side['verdict']}{because(side)}")
    return lines


def asked_of(trial: Row) -> str:
    """How much the trial has seen."""
    seeds = len(trial["seeds"])
    parts = [f"{seeds} seeds" if seeds > 1 else "one seed, which says nothing about seeds: p is over prompts"]
    prompts = {side["metrics"][0]["prompts"] for side in trial["sides"] if side["metrics"]} - {0}
    parts += [f"{count} prompts" for count in prompts]
    sides = len(trial["sides"])
    parts += [f"p corrected for {sides} sides"] if sides > 1 else []
    return ", ".join(parts)


def because(side: Row) -> str:
    """What stands after the word of a side."""
    if side["failed"]:
        return f" ({side['failed']})"
    evaluated = [row for row in side["metrics"] if row["metric"].startswith(EVALUATED)]
    if all(row["parent"] == row["side"] for row in evaluated):
        return "; every evaluation is the same: does the edit do anything?"
    needs = side["metrics"][0]["needs"]
    if needs is None:
        return ""
    how = "more prompts" if needs == MORE_PROMPTS else f"{needs} seeds"
    return f"; a difference like this one needs {how} (found {POWER:.0%} of the time)"


def cells(row: Row) -> list[str]:
    ends = row["interval"]
    between = f"{ends[0]:+.3g} … {ends[1]:+.3g}" if ends else "–"
    p = "–" if row["p"] is None else "< 0.001" if row["p"] < 0.001 else f"{row['p']:.3f}"
    return [
        mean_of(row["parent"]),
        mean_of(row["side"]),
        f"{row['difference']:+.3g}",
        between,
        p,
        row["word"],
    ]


def mean_of(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4g}{spread}"


def table(first: str, rows: list[list[str]]) -> list[str]:
    head = [first, "parent", "here", "difference", "95 % interval", "p", ""]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]


# --- the page -----------------------------------------------------------------------------------------------


def write_trial(file: Path, trial: Row, outcomes: dict[str, list[Outcome]]) -> None:
    """trial.html: a comparison of report.html, with a side, all of its seeds, in the place of a run."""
    sides = []
    samples = samples_of(outcomes)
    for name, runs in outcomes.items():
        sides.append(
            side_of([describe_run(run.folder) for run in runs]) | {"name": name, "samples": samples[name]}
        )
    parent = outcomes[trial["parent"]["name"]][0]
    shown = []
    for side in trial["sides"]:
        runs = outcomes.get(side["name"])
        diff = diff_of(parent, script_of(trial["parent"]), runs[0], script_of(side)) if runs else []
        shown.append(side | {"diff": diff, "needs": because(side)})
    about = trial | {"sides": shown, "asked": asked_of(trial)}
    settings = [row for row in differing(sides) if row[0] != "seed"]
    copies = shown[0]["name"] if len(shown) == 1 else f"{len(shown)} sides"
    words = [side["verdict"] for side in shown]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    told = words[0] if len(shown) == 1 else counts
    title = f"{copies} against {trial['parent']['name']}: {told}"
    write_page(file, sides, {"title": title, "settings": settings, "rates": [], "trial": about}, (SCRIPT,))


def script_of(side: Row) -> str:
    return Path(shlex.split(side["command"])[0]).name


def side_of(runs: list[Row]) -> Row:
    """Runs that differ by their seed as one: each curve is their mean, between the lowest and the highest."""
    first = runs[0]
    curves = []
    for curve in first["curves"]:
        same = []
        for run in runs:
            same += [other for other in run["curves"] if other["name"] == curve["name"]]
        points = min(len(other["y"]) for other in same)
        columns = list(zip(*(other["y"][:points] for other in same), strict=True))
        lows = list(zip(*(other.get("low", other["y"])[:points] for other in same), strict=True))
        highs = list(zip(*(other.get("high", other["y"])[:points] for other in same), strict=True))
        mean = [statistics.mean(column) for column in columns]
        band = {"low": [min(column) for column in lows], "high": [max(column) for column in highs]}
        curves.append(curve | {"x": curve["x"][:points], "y": mean} | band)
    constant = {}
    for name, value in first["constant"].items():
        if all(run["constant"].get(name) == value for run in runs):
            constant[name] = value
    merged = {"curves": curves, "constant": constant, "events": [], "completions": None, "regression": None}
    for name in ("before", "after"):
        merged[name] = {
            key: statistics.mean(run[name].get(key, value) for run in runs)
            for key, value in first[name].items()
        }
    for name in ("seconds", "tokens", "step"):
        known = [run[name] for run in runs if run[name] is not None]
        merged[name] = statistics.mean(known) if known else None
    return first | merged


def samples_of(outcomes: dict[str, list[Outcome]]) -> dict[str, Row | None]:
    """For each side the completions of all its seeds, as samples of report.html; the prompts on which sides
    differ most come first."""
    every = [run for runs in outcomes.values() for run in runs]
    numbers = range(len(every[0].samples))
    if not numbers:
        return dict.fromkeys(outcomes)
    names = list(scores_of(every[0].samples[0]))
    columns = {name: [] for name in outcomes}
    for number in numbers:
        for side, runs in outcomes.items():
            columns[side].append(sample(number, runs, names))

    def apart(number: int) -> float:
        spread = 0.0
        for name in names[:1]:
            means = [columns[side][number]["scores"][name][0] or 0.0 for side in outcomes]
            spread = max(means) - min(means)
        return -spread

    kept, left = [], SIZE
    for number in sorted(numbers, key=apart)[:PROMPTS]:
        left -= sum(len(embedded(columns[side][number])) for side in outcomes)
        if left < 0 and kept:
            break
        kept.append(number)
    steps = [every[0].samples[0]["step"]]
    found: dict[str, Row | None] = {}
    for side in outcomes:
        prompts = [columns[side][number] for number in kept]
        found[side] = {"steps": steps, "names": names, "prompts": prompts, "of": len(numbers)}
    return found


def sample(number: int, runs: list[Outcome], names: list[str]) -> Row:
    """A prompt with the completions of all seeds, a line each, and their mean scores."""
    row = runs[0].samples[number]
    texts = dict.fromkeys(run.samples[number]["completion"] for run in runs)
    scores: dict[str, list[Any]] = {}
    for name in names:
        values = [run.samples[number].get(name) for run in runs]
        known = [value for value in values if value is not None]
        scores[name] = [statistics.mean(known) if known else None]
    return {
        "prompt": prompt_text(row),
        "temperature": row["temperature"],
        "texts": ["\n".join(cut(text, 600) for text in texts)],
        "scores": scores,
    }


def diff_of(parent: Outcome, parent_script: str, run: Outcome, script: str) -> list[str]:
    """The lines of the diff between the copies of their scripts that two runs keep."""
    texts = []
    for folder, name in ((parent.folder, parent_script), (run.folder, script)):
        texts.append((folder / name).read_text(encoding="utf-8").splitlines())
    lines = list(difflib.unified_diff(*texts, n=2, lineterm=""))
    return lines[2:]  # without the names
