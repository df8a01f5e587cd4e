"""report.html: a run as one page that needs no network or server, and renews itself while the run goes on.

The page is page/ (HTML, style, scripts) with what report_data finds in the output folder as one JSON text.
"""

import html
import itertools
from pathlib import Path
import re
import sys
import time
from typing import Any

from common.errors import quoted, say
from common.extras.regression import fall_p_value, wilson
from common.extras.report_data import Row, asked, attempt, describe_run, embedded, groups, lines, scores_of
from common.files import replace_text
from common.run.folder import is_held, is_over

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("chart", "switches", "top", "curves", "samples", "completions", "facts", "compare", "page")  # in this order
SECONDS = 20  # between two pages, if nothing was evaluated
SHARE = 50  # and always this many times the time that the last page took
OF_THE_FOLDER = ("output_dir", "overwrite_output_dir", "run_name", "resume_from_checkpoint", "accept_changes")


class Report:
    """The page of a running run, in its output folder: a part of a `Run`. A page that cannot be written is a line, and does
    not stop the run."""

    def __init__(self, folder: str | Path):
        self.folder, self.written, self.took, self.failed = Path(folder), time.monotonic(), 0.0, False

    def on_log(self, step: int, values: Row) -> None:
        """Write the page after an evaluation, and now and then; never for more than a small share of the time."""
        evaluated = any(name.startswith("eval_") for name in values)
        if time.monotonic() - self.written >= max(SHARE * self.took, 0 if evaluated else SECONDS):
            self.close()

    def close(self) -> None:
        """Write the page in any case."""
        begun = time.monotonic()
        try:
            if is_held(self.folder):
                write_page(self.folder / "report.html", [describe_run(self.folder)])
        except Exception as error:  # the disk, or a folder that somebody changed: a page may not fail a run
            if not self.failed:
                say(f"report.html was not written: {quoted(error, 200, str)}", sys.stderr)
            self.failed = True
        self.written = time.monotonic()
        self.took = self.written - begun


def write_report(folders: list[str | Path], file: Path) -> None:
    """Write one page for one or several output folders, of runs that may still be going on in other processes."""
    paths = [Path(folder) for folder in folders]
    runs = [describe_run(path) for path in paths]
    for run, path in zip(runs, paths, strict=True):
        if (path / "metrics.jsonl").is_file():
            run["news"] = round((path / "metrics.jsonl").stat().st_mtime)
        if run["state"] == "running" and is_over(path):
            run["state"] = "killed"
    if len({run["name"] for run in runs}) < len(runs):  # folders with the same name in different places
        runs = [run | {"name": run["folder"]} for run in runs]
    write_page(file, runs, {"settings": differing(runs), "rates": compare_rates(paths)} if len(runs) > 1 else None)


def write_page(path: Path, runs: list[Row], compared: Row | None = None) -> None:
    """Write the page atomically. A lone surrogate, which is not a character, becomes a question mark."""
    replace_text(path, page(runs, compared).encode("utf-8", "replace").decode())


def page(runs: list[Row], compared: Row | None = None) -> str:
    """The page as text."""
    parts = {
        "title": html.escape(" · ".join(run["name"] for run in runs)),
        "style": (PAGE / "page.css").read_text(encoding="utf-8"),
        "scripts": "\n".join((PAGE / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS),
        "data": embedded({"runs": runs, "compared": compared}),
    }
    text = (PAGE / "page.html").read_text(encoding="utf-8")
    return re.sub(f"@@({'|'.join(parts)})@@", lambda found: parts[found[1]], text)


# --- several runs ---------------------------------------------------------------------------------------------------


def differing(runs: list[Row]) -> list[list[Any]]:
    """[name, [the value in each run]] of the settings that differ, the output folder excepted."""
    tables = []
    for run in runs:
        table = {name: value for group in run["settings"] for name, value, _ in group["rows"] if name not in OF_THE_FOLDER}
        tables.append(table | {"script": run["script"]})
    rows = [[name, [table.get(name, "") for table in tables]] for name in dict.fromkeys(itertools.chain(*tables))]
    return [[name, values] for name, values in rows if len(set(values)) > 1]


def compare_rates(folders: list[Path]) -> list[Row]:
    """For each score that is pass or fail: the rate of each run with its interval, and tests against the first run."""
    tables = [attempt(lambda folder=folder: outcomes_of(folder)) or {} for folder in folders]
    found = []
    for name in dict.fromkeys(itertools.chain(*tables)):
        rows: list[Row | None] = []
        for table in tables:
            here, first = table.get(name), tables[0].get(name)
            tested = difference(first, here) if first and here and rows else {}
            rows.append(rate_of(here) | tested if here else None)
        found.append({"name": name, "runs": rows})
    return found


def outcomes_of(folder: Path) -> dict[str, dict[Any, float]]:
    """{score: {prompt: 0 or 1}} of the last evaluation, at its first temperature, and {suite: {case: 0 or 1}} of the last
    evaluation of a suite. A score with any other value is left out."""
    found: dict[str, dict[Any, float]] = {}
    *_, rows = [[], *groups(folder / "samples.jsonl")]
    for number, row in enumerate(rows):
        if row.get("temperature") == rows[0].get("temperature"):
            for name, value in scores_of(row).items():
                found.setdefault(name, {})[number, asked(row)] = value
    *_, suite = [{}, *lines(folder / "regression.jsonl")]
    for name, case in (suite.get("cases") or {}).items():
        for group in ("all", case["group"]):
            found.setdefault(f"suite: {group}", {})[name, case["digest"]] = case["rate"]
    known = {name: {key: value for key, value in table.items() if value is not None} for name, table in found.items()}
    return {name: table for name, table in known.items() if table and set(table.values()) <= {0, 1}}


def rate_of(outcomes: dict[Any, float]) -> Row:
    passed, total = int(sum(outcomes.values())), len(outcomes)
    return {"passed": passed, "of": total, "interval": [round(end, 4) for end in wilson(passed, total)]}


def difference(first: dict[Any, float], here: dict[Any, float]) -> Row:
    """The test of whether two rates for the same prompts, or cases, differ, by those on which the runs differ: each would
    win half of them by chance (McNemar 1947; exact, two-sided). {} if they are not the same."""
    if first.keys() != here.keys():
        return {}
    gained = sum(here[key] > first[key] for key in first)
    lost = sum(here[key] < first[key] for key in first)
    p = min(1.0, 2 * fall_p_value(max(gained, lost), min(gained, lost)))
    return {"p": p, "test": "McNemar, exact", "gained": gained, "lost": lost}
