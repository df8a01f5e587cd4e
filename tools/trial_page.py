"""A trial for people: the tables on the console, and trial.html in the look of report.html."""

import difflib
from pathlib import Path
import shlex
import statistics

from common.run.parts.report import cut, describe_run, embedded, prompt_text, scores_of, write_page

from tools.report import differing
from tools.trial_verdict import UNKNOWN, Row, TrialRun

SCRIPT = Path(__file__).with_name("trial.js")  # of the page: what report.html does not have
TEXT, SIZE = 600, 1_000_000  # characters of a completion, bytes of all of them


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
        rows = [[side["name"], *cells(side["metrics"][0])] for side in sides]
        lines += table("side", rows)
    if len(sides) == 1:
        rows = [[row["metric"], *cells(row)] for row in sides[0]["metrics"][1:]]
        lines += ["", "other metrics, p corrected for their number", *table("metric", rows)]
    for row in trial.get("noise", []):
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
    seeds, sides = len(trial["seeds"]), trial["sides"]
    seen = f"{seeds} seeds" if seeds > 1 else "one seed, which says nothing about seeds: p is over prompts"
    prompts = max((side["metrics"][0]["prompts"] for side in sides if side["metrics"]), default=0)
    seen += f", {prompts} prompts" if prompts else ""
    return f"{seen}, p corrected for {len(sides)} sides" if len(sides) > 1 else seen


def because(side: Row) -> str:
    """What stands after the word of a side."""
    if side["failed"]:
        return f" ({side['failed']})"
    evaluated = [row for row in side["metrics"] if row["metric"].startswith("eval_")]
    if all(row["parent"] == row["side"] for row in evaluated):
        return "; every evaluation is the same"
    if side["verdict"] != UNKNOWN or len(side["metrics"][0]["side"]) < 2:
        return ""
    needs = side["metrics"][0]["needs"]
    if side["metrics"][0]["p"] is None:
        return "; all seeds differ alike, which leaves no spread to measure it by"
    if needs is None:
        return "; such a difference takes more prompts, not only seeds"
    return f"; such a difference takes about {needs} seeds"


def cells(row: Row) -> list[str]:
    low, high = row["interval"] or (0.0, 0.0)
    between = f"{short(low, '+', 3)} … {short(high, '+', 3)}" if row["interval"] else "–"
    p = "–" if row["p"] is None else f"{row['p']:.3f}"
    p = "< 0.001" if p == "0.000" else p
    means = [mean_of(row["parent"]), mean_of(row["side"])]
    return [*means, short(row["difference"], "+", 3), between, p, row["word"]]


def mean_of(values: list[float]) -> str:
    spread = f" ± {short(statistics.stdev(values), '', 2)}" if len(values) > 1 else ""
    return short(statistics.mean(values), "", 4) + spread


def short(value: float, sign: str, digits: int) -> str:
    return f"{value:{sign},.0f}" if abs(value) >= 100 else f"{value:{sign}.{digits}g}"


def table(first: str, rows: list[list[str]]) -> list[str]:
    head = [first, "parent", "here", "difference", "95 % interval", "p", ""]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        line = "  ".join(map(str.ljust, row, widths))
        lines.append(line.rstrip())
    return lines


# --- the page -----------------------------------------------------------------------------------------------


def write_trial(file: Path, trial: Row, outcomes: dict[str, list[TrialRun]]) -> None:
    """trial.html: a comparison of report.html, with a side, all of its seeds, in the place of a run."""
    room = SIZE / sum(map(len, outcomes.values()))
    merged = []
    for name, runs in outcomes.items():
        side = merge([describe_run(run.folder) for run in runs])
        merged.append(side | {"name": name, "samples": samples_of(runs, room)})
    parent = trial["parent"]
    original = script_of(parent, outcomes[parent["name"]])
    sides = []
    for side in trial["sides"]:
        runs = outcomes.get(side["name"])
        diff = diff_of(original, script_of(side, runs)) if runs else []
        sides.append(side | {"diff": diff, "because": because(side)})
    words = [side["verdict"] for side in sides]
    told = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    title = f"{sides[0]['name']} against {parent['name']}: {words[0]}"
    if len(sides) > 1:
        title = f"{len(sides)} sides against {parent['name']}: {told}"
    settings = [row for row in differing(merged) if row[0] != "seed"]
    about = trial | {"sides": sides, "asked": asked_of(trial)}
    write_page(file, merged, {"title": title, "settings": settings, "rates": [], "trial": about}, (SCRIPT,))


def merge(runs: list[Row]) -> Row:
    """Runs that differ by their seed as one: each curve is their mean, between the lowest and the highest."""
    curves = []
    for curve in runs[0]["curves"]:
        same = []
        for run in runs:
            same += [other["y"] for other in run["curves"] if other["name"] == curve["name"]]
        points = list(zip(*same, strict=False))  # of a run that ended early fewer
        parts = {"x": curve["x"][: len(points)], "y": [statistics.mean(values) for values in points]}
        parts |= {"low": [min(values) for values in points], "high": [max(values) for values in points]}
        curves.append(curve | parts)
    after = {}
    for name in runs[0]["after"]:
        after[name] = statistics.mean(run["after"][name] for run in runs if name in run["after"])
    return runs[0] | {"curves": curves, "after": after, "events": [], "completions": None, "regression": None}


def samples_of(runs: list[TrialRun], room: float) -> Row | None:
    """The completions of a side as samples of report.html: of a prompt those of all seeds, a line each, with
    their mean scores; as many prompts as there is room for, in bytes of a run."""
    prompts = []
    for number, row in enumerate(runs[0].samples):
        every = [run.samples[number] for run in runs]
        scores = {}
        for name in scores_of(row):
            known = [sample[name] for sample in every if sample.get(name) is not None]
            scores[name] = [statistics.mean(known) if known else None]
        texts = dict.fromkeys(cut(sample["completion"], TEXT) for sample in every)
        prompt = {"prompt": prompt_text(row), "temperature": row["temperature"], "scores": scores}
        prompts.append(prompt | {"texts": ["\n".join(texts)]})
        room -= len(embedded(prompts[-1])) / len(runs)
        if room < 0:
            break
    names = list(scores_of(runs[0].samples[0])) if prompts else []
    about = {"names": names, "prompts": prompts, "of": len(runs[0].samples)}
    return about | {"steps": [runs[0].samples[0]["step"]]} if prompts else None


def script_of(side: Row, runs: list[TrialRun]) -> list[str]:
    """The lines of the script that a side ran, from the copy that its run keeps."""
    name = Path(shlex.split(side["command"])[0]).name
    return (runs[0].folder / name).read_text(encoding="utf-8").splitlines()


def diff_of(before: list[str], after: list[str]) -> list[str]:
    lines = difflib.unified_diff(before, after, n=2, lineterm="")
    return list(lines)[2:]  # without names
