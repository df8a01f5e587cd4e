"""A script as a process of its own, which is told things by signals."""

import os
from pathlib import Path
import signal
import subprocess
import sys
import time

from tests.conftest import ROOT


def usual_signals() -> None:
    """In a child: not those of a shell's background job, or of nohup, which would be passed on."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Script:
    """train_sft.py as a process of its own, with what it prints in a file."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        launcher: tuple[str, ...] = (),
        prefix: str = "out",
        script: str = "train_sft.py",
    ):
        self.output, log = folder / prefix, folder / f"{prefix}.log"
        command = [sys.executable, *launcher, script, *words, "--output_dir", str(self.output)]
        env = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONUNBUFFERED": "1"}
        with open(log, "w") as file:
            options = {"cwd": ROOT, "env": env, "start_new_session": True, "preexec_fn": usual_signals}
            self.process = subprocess.Popen(command, stdout=file, stderr=file, **options)
        self.log = log

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def steps(self) -> int:
        """Steps logged so far."""
        file = self.output / "metrics.jsonl"
        return file.read_text().count("\n") if file.exists() else 0

    def until(self, condition, seconds: float = 100) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.02)
