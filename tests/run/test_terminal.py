"""What is printed, and terminals, pipes and logs that are gone: they end no run, and nothing hostile reaches
them."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time

from common.run.progress import Progress
from common.run.signals import EXIT_CODE
import pytest

from tests.conftest import ROOT, read_metrics, write_rows
from tests.run.test_folder import SFT

BASE = ROOT / "data" / "base_model"


# --- the terminal -------------------------------------------------------------------------------------------

EVIL = "\x1b[2J\x1b]0;owned\x07 a \x9b31m b \r c \u202e d \u2028 e \x7f"


@pytest.mark.slow
def test_nothing_from_data_file_names_or_completions_reaches_the_terminal_as_a_control_sequence(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"{EVIL} {i}"}, {"role": "assistant", "content": EVIL}]}
        for i in range(20)
    ]
    rows.append({"messages": [{"role": EVIL, "content": "x"}]})
    data = tmp_path / "\x1b[31mred.jsonl"
    write_rows(data, rows)
    command = [sys.executable, "train_sft.py", "--model_name_or_path", str(BASE), "--dataset_name", str(data)]
    command += [*"--max_steps 2 --eval_fraction 0.3 --output_dir".split(), str(tmp_path / "\x1b[32mout")]
    command += ["--eval_max_new_tokens", "4", "--dataset_cache_dir", str(tmp_path / "cache")]
    for more in ([], ["--learning_rat\x1b[5m", "1"], ["--dataset_name", "\x1b[6mmissing.jsonl"]):
        run = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, timeout=200)
        assert run.returncode == (1 if more else 0), run.stderr.decode()[-3000:]
        assert ("\\x1b]0;owned" in run.stdout.decode()) or more, "it was shown, spelled out"
        for shown in (run.stdout, run.stderr):
            text = shown.decode().replace("\x1b[A", "").replace("\r", "")  # of the progress bars
            assert not [
                c
                for c in text
                if ord(c) < 32 and c not in "\n\t" or 127 <= ord(c) < 160 or c in "\u202e\u2028"
            ]


def test_the_time_left_goes_by_the_steps_of_this_process(monkeypatch, capsys):
    """Of a run that was resumed at step 4: two steps in ten seconds, and four are left."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    progress = Progress("sft", 4, 10)
    now[0] = 10.0
    progress.on_log(6, {"loss": 1.0, "tokens_per_second": 5.0})
    assert capsys.readouterr().out == "step 6/10: loss 1.0000, rate 0, 5 tok/s, 00:20 left\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_log_has_a_line_for_each_logged_step_and_a_terminal_a_bar(terminal, launch, tmp_path, monkeypatch):
    ours, theirs = pty.openpty() if terminal else os.pipe()
    if terminal:
        termios.tcsetwinsize(theirs, (24, 100))
    parts = []

    def read():
        with contextlib.suppress(OSError):  # of a terminal at its end
            while part := os.read(ours, 65536):
                parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w", buffering=1) as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        patch.setattr(sys, "stderr", file)
        launch("sft", *SFT, *"--max_steps 4 --logging_steps 2 --eval_steps 0".split())
    reader.join()
    os.close(ours)
    shown = b"".join(parts)
    lines = re.findall(r"step (\d)/4: loss ([\d.]+), .* tok/s, \d\d:\d\d left", shown.decode())
    logged = [(str(row["step"]), f"{row['loss']:.4f}") for row in read_metrics(tmp_path / "out")]
    assert [step for step, _ in logged] == ["2", "4"]
    assert lines == ([] if terminal else logged)
    assert (b"\r" in shown.replace(b"\r\n", b"")) == terminal  # a bar is drawn over itself


# --- terminals that close -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("heeded", [True, False], ids=["SIGHUP", "nohup"])
def test_a_terminal_that_is_gone_takes_no_run_with_it(heeded, tmp_path, token_cache):
    """What is printed after that has nowhere to go (EIO)."""
    output = tmp_path / "out"
    words = [*SFT, "--max_steps", "60", "--dataset_cache_dir", str(token_cache), "--output_dir", str(output)]
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL if heeded else signal.SIG_IGN)
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "train_sft.py", *words])
    deadline = time.monotonic() + 100
    while not (output / "metrics.jsonl").exists() or len(read_metrics(output)) < 5:
        assert time.monotonic() < deadline
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 65536)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (EXIT_CODE if heeded else 0)
    assert (output / "summary.json").exists() != heeded and list(output.glob("checkpoint-*"))
