"""report.html as a browser shows it: headless Chromium, where there is one."""

import http.server
import os
from pathlib import Path
import re
import shutil
import subprocess
import threading

from common.extras.report import page
from common.extras.report_data import describe_run
import pytest

from tests.conftest import write_rows
from tests.extras.test_report import EVIL, a_run
from tools.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


@pytest.fixture
def browse(tmp_path):
    """browse(address): the page as it is drawn, as markup. No page may say anything on the console."""

    def drawn(address, *flags, wait=3000):
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--log-level=0"]
        command += [f"--virtual-time-budget={wait}", *flags, "--dump-dom", str(address)]
        environ = os.environ | {"HOME": str(tmp_path), "TZ": "UTC"}
        shown = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environ)
        said = [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
        assert not said and shown.returncode == 0, said
        return shown.stdout

    return drawn


def address_of(file, state=""):
    return Path(file).resolve().as_uri() + state


def visible(markup):
    """The markup without the data and the script, and its text."""
    body = re.sub(r"<(script|style)\b.*?</\1>", "", markup, flags=re.S)
    return body, re.sub(r"<[^>]+>", " ", body)


def test_hostile_text_on_a_page_stays_text(tmp_path, browse):
    folder = a_run(tmp_path / "run", evil=EVIL)
    write_report([folder], folder / "report.html")
    markup, text = visible(browse(address_of(folder / "report.html", "#x=tokens&y=log&settings=all")))
    assert 'data-drawn="yes"' in markup
    for name in ("loss", "eval", "Samples", "Data", "Settings", "learning_rate", "answer 0", "left out", "the loss jumps"):
        assert name in text, name
    assert "<img" not in markup and "<title>run&lt;/script&gt;" in markup and "&lt;img src=x" in markup
    assert markup.count('<figure class="frame') == 3 and len(re.findall(r'class="line"', markup)) >= 2
    assert 'data-switch="x=tokens" aria-pressed="true"' in markup and "4,000 tokens" in text
    assert "mean reward 0.5 of 16 completions" in text and "try 1 at 3" in text and "cut" in text
    assert markup.count('class="completion"') == 12 and len(re.findall(r'class="column( current)?"', markup)) == 3


@pytest.mark.slow
def test_switches_change_what_is_drawn(tmp_path, browse):
    folder = a_run(tmp_path / "run", steps=200)
    write_report([folder], folder / "report.html")

    def at(state):
        markup = visible(browse(address_of(folder / "report.html", state)))[0]
        return markup, re.findall(r'<path class="line"[^>]* d="([^"]+)"', markup)[0]

    plain, linear, smooth, zoomed = map(
        at, ("#smooth=0", "#smooth=0&y=linear", "#smooth=1&x=time", "#zoom=10..40&theme=dark")
    )
    assert len({curve for _, curve in (plain, linear, smooth)}) == 3
    assert 'class="raw"' in smooth[0] and 'class="raw"' not in plain[0]
    assert "200 steps" in plain[0] and "6 min" in smooth[0] and "40 steps" in zoomed[0] and 'data-theme="dark"' in zoomed[0]
    changed = at("#show=changed&prompt=1&rollout=0")[0]
    assert "try 1 at 1" in changed
    assert changed.count('class="prompt"') == 10 and "<mark>200</mark>" in changed


@pytest.mark.slow
def test_a_comparison_lays_runs_side_by_side(tmp_path, browse):
    folders = [a_run(tmp_path / name, name=name + EVIL, better=better) for name, better in (("one", 0), ("two", 6))]
    write_rows(folders[1] / "metrics.jsonl", [{"step": step, "eval_right": 0.0, "loss": 1 / (step + 1)} for step in (0, 9)])
    write_report(folders, tmp_path / "both.html")
    markup, text = visible(browse(address_of(tmp_path / "both.html")))
    assert "2 runs compared" in text and "McNemar, exact: 6 gained, 0 lost" in text and "p = 0.031" in text
    assert "Settings that differ" in text and "6.1" in text and "<img" not in markup
    frame = next(frame for frame in markup.split('<figure class="frame') if '<b title="right">' in frame)
    assert "--run0" in frame and "--run1" in frame, "constant in one run: still drawn"
    hidden = visible(browse(address_of(tmp_path / "both.html", "#hide=1")))[0].split('<figure class="frame')[1]
    assert "--run0" in hidden and "--run1" not in hidden


@pytest.mark.slow
@pytest.mark.parametrize("state", ["running", "finished"])
def test_a_page_renews_itself_until_the_end(state, tmp_path, browse):
    """The server has a newer page for whoever asks again."""
    folder = a_run(tmp_path / "run")
    older = describe_run(folder) | {"state": state, "name": "older", "written": 1}
    newest = describe_run(folder) | {"state": "finished", "name": "newest", "written": 2}
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200 if "report" in self.path else 404)
            self.end_headers()
            if "report" in self.path:
                self.wfile.write(page([newest if "?data" in self.path else older]).encode())

        def log_message(self, *words):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        markup, text = visible(browse(f"http://127.0.0.1:{server.server_port}/report.html#y=log", wait=60_000))
    finally:
        server.shutdown()
    renewed = [path for path in asked if "?data" in path]
    assert len(renewed) == (1 if state == "running" else 0), "once: the run had ended then"
    assert ("newest" in text) == (state == "running") and 'data-switch="y=log" aria-pressed="true"' in markup
