"""report.html: a run as one page that needs no network or server, and renews itself while the run goes on.

The page is page/ (HTML, style, scripts) with what report_data finds in the output folder as one JSON text.
"""

import html
from pathlib import Path
import re
import sys
import time

from common.errors import quoted, say
from common.extras.report_data import Row, describe_run, embedded
from common.files import replace_text
from common.run.folder import is_held

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("chart", "switches", "top", "curves", "samples", "completions", "facts", "compare", "page")  # in this order
SECONDS = 20  # between two pages, if nothing was evaluated
SHARE = 50  # and always this many times the time that the last page took


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
