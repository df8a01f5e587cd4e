"""report.html as a browser shows it: headless Chromium, where there is one."""

import os
from pathlib import Path
import re
import shutil
import subprocess

import pytest

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
