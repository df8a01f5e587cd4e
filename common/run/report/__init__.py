"""report.html: a run as one page, which needs no network and no server, and renews itself while the run goes on."""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from common.errors import quoted, say
from common.run.output_dir import is_held, is_over
from common.run.report.compare import compare_runs
from common.run.report.describe import describe_run
from common.run.report.read import Folder

PARTS = Path(__file__).parent / "page"
SCRIPTS = ("chart", "switches", "top", "curves", "samples", "completions", "facts", "compare", "page")  # one after another
SECONDS = 20  # between two pages where nothing was evaluated
SHARE = 50  # and at least so many times what it took to write the last one


class Report:
    """The report of a run that is under way, in its output folder. Where it cannot be written that costs a line, not the
    run."""

    def __init__(self, output_dir: Path):
        self.folder = Folder(output_dir)
        self.next, self.failed = time.monotonic() + SECONDS, False

    def write_if_due(self) -> None:
        """Between evaluations, so that it takes a small share of the time."""
        if time.monotonic() >= self.next:
            self.write()

    def write(self, summary: dict[str, Any] | None = None) -> None:
        """summary: that of a run which is just ending."""
        begun = time.monotonic()
        try:
            if is_held(self.folder.path):
                write_page(self.folder.path / "report.html", page([describe_run(self.folder, summary)]))
        except Exception as error:  # the disk, or a folder that somebody has changed: a page is not worth a run
            if not self.failed:
                say(f"report.html was not written: {quoted(error, 200, str)}", sys.stderr)
            self.failed = True
        now = time.monotonic()
        self.next = now + max(SECONDS, SHARE * (now - begun))


def write_report(folders: list[str | Path], file: Path) -> None:
    """One page of one or several output folders."""
    read = [Folder(folder) for folder in folders]
    runs = [_from_outside(describe_run(folder), folder.path) for folder in read]
    if len({run["name"] for run in runs}) < len(runs):  # each is in a folder of its own
        runs = [run | {"name": run["folder"]} for run in runs]
    write_page(file, page(runs, compare_runs(runs, read) if len(runs) > 1 else None))


def _from_outside(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A run that may be under way in another process: when it was last heard of, and whether it was killed."""
    metrics = folder / "metrics.jsonl"
    if metrics.is_file():
        run["news"] = round(metrics.stat().st_mtime)
    return run | {"state": "killed"} if run["state"] == "running" and is_over(folder) else run


def page(runs: list[dict[str, Any]], compared: dict[str, Any] | None = None) -> str:
    """The page as text. All that comes from the runs is one JSON text in it, which cannot end the element it stands in."""
    text = (PARTS / "page.html").read_text(encoding="utf-8")
    title = " · ".join(run["name"] for run in runs)
    scripts = "\n".join((PARTS / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    text = text.replace("/* page.css */", (PARTS / "page.css").read_text(encoding="utf-8")).replace("/* scripts */", scripts)
    text = text.replace("@@title@@", "".join(f"&#{ord(c)};" for c in title))
    return text.replace("@@data@@", embedded({"runs": runs, "compared": compared}))


def embedded(value: Any) -> str:
    """JSON that may stand in a <script>: no "<" is left by which an element, or a comment, could begin or end."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def finite(value: Any) -> Any:
    """What JSON can hold of a value that was read from a file: a NaN or an infinity is null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): finite(part) for name, part in value.items()}
    return [finite(part) for part in value] if isinstance(value, list | tuple) else value


def write_page(path: Path, text: str) -> None:
    """So that whoever reads meanwhile sees the old page or the new one. Half of a pair of surrogates, which is no
    character, becomes a question mark."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(text.encode("utf-8", "replace"))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
