"""report.html: a run as one page that needs no network or server and refreshes itself while the run continues."""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from common.errors import quoted, say
from common.run.folder import is_held, is_over
from common.run.report.compare import compare_runs
from common.run.report.describe import describe_run
from common.run.report.read import Folder

PARTS = Path(__file__).parent / "page"
SCRIPTS = ("chart", "switches", "top", "curves", "samples", "completions", "facts", "compare", "page")  # in this order
SECONDS = 20  # between two pages, if nothing was evaluated
SHARE = 50  # and at least this many times the time that writing the last page took


class Report:
    """The report of a running run, in its output folder. A failure to write it prints a line and does not stop the run."""

    def __init__(self, output_dir: Path):
        self.folder = Folder(output_dir)
        self.next, self.failed = time.monotonic() + SECONDS, False

    def write_if_due(self) -> None:
        """Write the page between evaluations, rarely enough to take a small share of the time."""
        if time.monotonic() >= self.next:
            self.write()

    def write(self, summary: dict[str, Any] | None = None) -> None:
        """Write the page. summary: that of a run that is ending."""
        begun = time.monotonic()
        try:
            if is_held(self.folder.path):
                write_page(self.folder.path / "report.html", page([describe_run(self.folder, summary)]))
        except Exception as error:  # the disk, or a folder that somebody changed: a page may not fail a run
            if not self.failed:
                say(f"report.html was not written: {quoted(error, 200, str)}", sys.stderr)
            self.failed = True
        now = time.monotonic()
        self.next = now + max(SECONDS, SHARE * (now - begun))


def write_report(folders: list[str | Path], file: Path) -> None:
    """Write one page for one or several output folders."""
    read = [Folder(folder) for folder in folders]
    runs = [_from_outside(describe_run(folder), folder.path) for folder in read]
    if len({run["name"] for run in runs}) < len(runs):  # folders with the same name in different places
        runs = [run | {"name": run["folder"]} for run in runs]
    write_page(file, page(runs, compare_runs(runs, read) if len(runs) > 1 else None))


def _from_outside(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A run seen from another process, where it may still be running: when it last wrote, and whether it was killed."""
    metrics = folder / "metrics.jsonl"
    if metrics.is_file():
        run["news"] = round(metrics.stat().st_mtime)
    return run | {"state": "killed"} if run["state"] == "running" and is_over(folder) else run


def page(runs: list[dict[str, Any]], compared: dict[str, Any] | None = None) -> str:
    """The page as text. Everything from the runs is one JSON text in it, which cannot end its enclosing element."""
    text = (PARTS / "page.html").read_text(encoding="utf-8")
    title = " · ".join(run["name"] for run in runs)
    scripts = "\n".join((PARTS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    text = text.replace("/* page.css */", (PARTS / "page.css").read_text(encoding="utf-8")).replace("/* scripts */", scripts)
    text = text.replace("@@title@@", "".join(f"&#{ord(c)};" for c in title))
    return text.replace("@@data@@", embedded({"runs": runs, "compared": compared}))


def embedded(value: Any) -> str:
    """JSON that is safe in a <script>: no "<" remains that could begin or end an element or a comment."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def finite(value: Any) -> Any:
    """A value from a file as valid JSON: NaN and infinity become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): finite(part) for name, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value


def write_page(path: Path, text: str) -> None:
    """Write the page atomically, so that a reader sees the old page or the new one. A lone surrogate, which is not a
    character, becomes a question mark."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(text.encode("utf-8", "replace"))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
