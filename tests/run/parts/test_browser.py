"""report.html as a browser shows it: headless Chromium, where there is one."""

import os
import re
import shutil
import subprocess

import pytest

from tests.run.parts.test_report import EVIL, a_run
from tools.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking".split()


def drawn(address, home):
    """The markup of the page as it is drawn, without its data and script. It may say nothing on the
    console."""
    command = [
        CHROMIUM,
        *FLAGS,
        f"--user-data-dir={home / 'profile'}",
        "--enable-logging=stderr",
        "--log-level=0",
    ]
    command += ["--virtual-time-budget=3000", "--dump-dom", address]
    environ = os.environ | {"HOME": str(home), "TZ": "UTC"}
    shown = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environ)
    said = [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
    assert not said and shown.returncode == 0, said
    return re.sub(r"<(script|style)\b.*?</\1>", "", shown.stdout, flags=re.S)


def test_hostile_text_on_a_page_stays_text(tmp_path):
    folder = a_run(tmp_path / "run", evil=EVIL)
    write_report([folder], folder / "report.html")
    markup = drawn((folder / "report.html").as_uri() + "#x=tokens&y=log&settings=all", tmp_path)
    text = re.sub(r"<[^>]+>", " ", markup)
    assert 'data-drawn="yes"' in markup
    for name in (
        "loss",
        "eval",
        "Samples",
        "Data",
        "Settings",
        "learning_rate",
        "answer 0",
        "left out",
        "the loss jumps",
    ):
        assert name in text, name
    assert "<img" not in markup and "<title>run&lt;/script&gt;" in markup and "&lt;img src=x" in markup
    assert markup.count('<figure class="frame') == 3 and len(re.findall(r'class="line"', markup)) >= 2
    assert 'data-switch="x=tokens" aria-pressed="true"' in markup and "4,000 tokens" in text
    assert "mean reward 0.5 of 16 completions" in text and "try 1 at 3" in text and "cut" in text
    assert (
        markup.count('class="completion"') == 12
        and len(re.findall(r'class="column( current)?"', markup)) == 3
    )
