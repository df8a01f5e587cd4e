"""One page for one or several runs: overlaid curves, settings that differ, and samples; or a table of many
runs.

python -m tools.report outputs/sft                          # rewrites outputs/sft/report.html
python -m tools.report outputs/sft outputs/sft_lr3e-3       # one page that compares them, comparison.html
python -m tools.report outputs/* --to pages/all.html
python -m tools.report outputs                              # prints a table of all runs below this folder
"""

import argparse
import hashlib
import itertools
from pathlib import Path
import socket
import statistics
from typing import Any

from common.errors import UserError, say
from common.run.folder import read_args, read_object
from common.run.parts.regression import wilson
from common.run.parts.report import (
    Row,
    asked,
    describe_run,
    frames_of,
    groups,
    last_of,
    lines,
    points_of,
    scores_of,
    settings_of,
    state_of,
    write_page,
)

from tools import as_command
from tools.trial_statistics import sign_p_value

Scores = dict[Any, float | None]  # {prompt or case: score}; None: not scored

MOST = 8  # runs on a page: more colours would be hard to tell apart
FIGURES = 3  # evaluated metrics in the table of all runs
OF_THE_FOLDER = ("output_dir", "overwrite_output_dir", "run_name", "resume_from_checkpoint", "accept_changes")


def main(words: list[str] | None = None) -> None:
    how = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser("python -m tools.report", **how)
    parser.add_argument(
        "folders", nargs="+", help="output folders, of which the first is what the others are compared with"
    )
    parser.add_argument(
        "--to", help="output file; unset: report.html in the folder, or for several comparison.html here"
    )
    args = parser.parse_args(words)
    folders = [Path(folder) for folder in args.folders]
    if len(folders) == 1 and not is_run(folders[0]) and (below := runs_below(folders[0])):
        return say("\n".join(index(folders[0], below)))
    if len(folders) > MOST:
        raise UserError(
            f"{len(folders)} folders: a page compares {MOST} at most; of the folder above them there is a table"
        )
    for folder in folders:
        if not is_run(folder):
            raise UserError(
                f"{folder} is not the output folder of a run: it has neither metrics.jsonl nor args.yaml"
            )
    file = Path(args.to or ("comparison.html" if len(folders) > 1 else folders[0] / "report.html"))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_report(folders, file)
    say(f"{file}: open it in a browser")


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("metrics.jsonl", "args.yaml", "summary.json"))


def write_report(folders: list[Path], file: Path) -> None:
    """Write one page for one or several output folders, of runs that may still be going on in other
    processes."""
    runs = [describe_run(folder) for folder in folders]
    for run, folder in zip(runs, folders, strict=True):
        if (folder / "metrics.jsonl").is_file():
            run["news"] = round((folder / "metrics.jsonl").stat().st_mtime)
        run["state"] = true_state(run["state"], folder)
    part_losses(runs)
    if len({run["name"] for run in runs}) < len(runs):  # folders with the same name in different places
        runs = [run | {"name": run["folder"]} for run in runs]
    write_page(
        file, runs, {"settings": differing(runs), "rates": compare_rates(folders)} if len(runs) > 1 else None
    )


def part_losses(runs: list[Row]) -> None:
    """Losses of different scripts are different quantities: give each script's a plot of its own."""
    if len({run["script"] for run in runs}) < 2:
        return
    for run in runs:
        renamed = {}
        for frame in run["frames"]:
            if "loss" in frame["name"]:
                renamed[frame["name"]] = f"{frame['name']} of {run['script']}"
        for frame in run["frames"]:
            frame["name"] = renamed.get(frame["name"], frame["name"])
        for curve in run["curves"]:
            curve["frame"] = renamed.get(curve["frame"], curve["frame"])
        run["constant"] = {renamed.get(name, name): value for name, value in run["constant"].items()}


def true_state(state: str, folder: Path) -> str:
    """The state by what a run has written; "killed" if nothing says that it has ended, and its lock, which
    was taken on this machine, is free. Locks of other machines are not always visible here."""
    try:
        import fcntl

        with open(folder / ".lock", encoding="utf-8") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            is_over = file.read(400).endswith(f" on {socket.gethostname()}")
    except (ImportError, OSError, ValueError):
        is_over = False
    return "killed" if state == "running" and is_over else state


# --- a page for several runs --------------------------------------------------------------------------------


def differing(runs: list[Row]) -> list[list[Any]]:
    """[name, [the value in each run]] of the settings that differ, the output folder excepted."""
    tables = []
    for run in runs:
        table = {
            name: value
            for group in run["settings"]
            for name, value, _ in group["rows"]
            if name not in OF_THE_FOLDER
        }
        tables.append(table | {"script": run["script"]})
    rows = [
        [name, [table.get(name, "") for table in tables]] for name in dict.fromkeys(itertools.chain(*tables))
    ]
    return [[name, values] for name, values in rows if len(set(values)) > 1]


def compare_rates(folders: list[Path]) -> list[Row]:
    """For each score that is pass or fail: the rate of each run with its interval, and tests against the
    first run."""
    tables = [outcomes_of(folder) for folder in folders]
    found = []
    for name in dict.fromkeys(itertools.chain(*tables)):
        rows: list[Row | None] = []
        for table in tables:
            here, first = table.get(name), tables[0].get(name)
            tested = difference(first, here) if first and here and rows else {}
            rows.append(rate_of(here) | tested if here else None)
        found.append({"name": name, "runs": rows})
    return found


def read_scores(folder: Path, step: int | None = None) -> tuple[list[Row], dict[str, Scores]]:
    """The samples of an evaluation, and {metric: {prompt or case: score}} of that and of a suite's evaluation.
    step: of the evaluations; None: the last ones."""
    samples: list[Row] = []
    for rows in groups(folder / "samples.jsonl"):
        if step in (None, rows[0]["step"]):
            samples = rows
    cases: Row = {}
    for line in lines(folder / "regression.jsonl"):
        if step in (None, line["step"]):
            cases = line["cases"]
    scores: dict[str, Scores] = {}
    for number, row in enumerate(samples):
        # as in metrics.jsonl, a metric ends in its temperature, but for the first one
        is_first = row["temperature"] == samples[0]["temperature"]
        suffix = "" if is_first else f"_t{row['temperature']:g}"
        for name, value in scores_of(row).items():
            column = scores.setdefault(f"eval_{name}{suffix}", {})
            column[number, asked(row)] = value
    for name, case in cases.items():
        for group in ("all", case["group"]):
            column = scores.setdefault(f"eval_regression/{group}", {})
            column[name, case["digest"]] = case["rate"]
    return samples, scores


def outcomes_of(folder: Path) -> dict[str, Scores]:
    """{score: {prompt or case: 0 or 1}} of the last evaluations. A score with any other value is left out."""
    _, scores = read_scores(folder)
    outcomes: dict[str, Scores] = {}
    for name, column in scores.items():
        known = {key: value for key, value in column.items() if value is not None}
        if known and set(known.values()) <= {0, 1}:
            outcomes[name.removeprefix("eval_")] = known
    return outcomes


def rate_of(outcomes: Scores) -> Row:
    passed, total = int(sum(outcomes.values())), len(outcomes)
    return {"passed": passed, "of": total, "interval": [round(end, 4) for end in wilson(passed, total)]}


def difference(first: Scores, here: Scores) -> Row:
    """The test of whether two rates for the same prompts, or cases, differ, by those on which the runs
    differ: each would win half of them by chance (McNemar 1947; exact, two-sided). {} if they are not the
    same."""
    if first.keys() != here.keys():
        return {}
    gained = sum(here[key] > first[key] for key in first)
    lost = sum(here[key] < first[key] for key in first)
    return {"p": sign_p_value(gained, lost), "test": "McNemar, exact", "gained": gained, "lost": lost}


# --- a table of many runs -----------------------------------------------------------------------------------


def runs_below(folder: Path) -> list[Path]:
    return sorted({path.parent for path in folder.rglob("metrics.jsonl")})


def index(folder: Path, below: list[Path]) -> list[str]:
    """A table for each script, as lines: its runs, first and last value of what they evaluated, the settings
    that differ.

    Runs that differ by their seed alone share a line, with the mean and, after ±, the standard deviation of
    the last value. A script that was edited in between is a setting, too: `code`, a hash of it.
    """
    by_script: dict[str, list[Row]] = {}
    for path in below:
        run = brief(path) | {"name": str(path.relative_to(folder))}
        by_script.setdefault(run["script"], []).append(run)
    return [
        line for script, runs in by_script.items() for line in ("", f"{script}: {len(runs)}", *table(runs))
    ][1:]


def brief(folder: Path) -> Row:
    """What the table has of a run."""
    events, points = list(lines(folder / "events.jsonl")), points_of(folder)
    begun = next((event for event in reversed(events) if event.get("script")), {"script": "?"})
    script = Path(str(begun["script"])).name
    state = true_state(state_of(events, read_object(folder / "summary.json")), folder)
    copy = folder / script
    code = hashlib.sha256(copy.read_bytes()).hexdigest()[:6] if copy.is_file() else ""
    settings = [*settings_of(read_args(folder), begun), {"rows": [["code", code, False]]}]
    return {
        "script": script,
        "settings": settings,
        "state": state,
        "points": points,
        "step": last_of(points, "step") or 0,
    }


def table(runs: list[Row]) -> list[str]:
    others = [row for row in differing(runs) if row[0] != "seed"]
    alike: dict[str, list[Row]] = {}
    for k, run in enumerate(runs):
        alike.setdefault(", ".join(f"{name} {values[k]}" for name, values in others if values[k]), []).append(
            run
        )
    frames = frames_of(dict.fromkeys(name for run in runs for name in run["points"]))
    evaluated = [[name for name in names if name.startswith("eval_")] for names in frames.values()]
    figures = [names[0] for names in evaluated if names][:FIGURES]
    rows = [["run", "steps", *(name.removeprefix("eval_") for name in figures), "settings that differ"]]
    for settings, group in alike.items():
        more = f" and {len(group) - 1} more" if len(group) > 1 else ""
        states = [
            f" ({state})" for state in dict.fromkeys(run["state"] for run in group) if state != "finished"
        ]
        steps = f"{max(run['step'] for run in group):g}"
        values = [first_and_last(name, [run["points"] for run in group]) for name in figures]
        rows.append([group[0]["name"] + more + "".join(states), steps, *values, settings])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def first_and_last(name: str, points: list[dict[str, Any]]) -> str:
    """Of a metric over runs that differ by their seed: "first -> last", means, with the deviation of the last
    value."""
    found = [(table[name][0, 1], table[name][-1, 1]) for table in points if name in table]
    if not found:
        return "–"
    first, last = (statistics.mean(values) for values in zip(*found, strict=True))
    spread = f" ± {statistics.stdev(values[1] for values in found):.2g}" if len(found) > 1 else ""
    return f"{first:.4g} -> {last:.4g}{spread}"


if __name__ == "__main__":
    as_command(main)
