"""What both sides are measured with: the end of each step by three clocks, and the memory of the process and
of its GPU."""

import json
import os
from pathlib import Path
import sys
import time
from typing import Any


def resident(field: str = "VmRSS") -> float:
    """MiB. VmHWM: the most since the process began. Not ru_maxrss, which a process has from the one that
    started it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return float("nan")


def reset_peak() -> None:
    """VmHWM starts anew from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


class Clock:
    """Steps of a run: `begin` before the first, `step` at the end of each, `write` after the last."""

    def __init__(self) -> None:
        self.result: dict[str, Any] = {
            "pid": os.getpid(),
            "wall": [],
            "cpu": [],
            "epoch": [],
            "loss": [],
            "batches": [],
        }

    def begin(self) -> None:
        self._stamp()

    def step(self) -> None:
        self._stamp()
        self.result["peak_mib"] = resident("VmHWM")

    def _stamp(self) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # else it would be the end of asking, not of doing
            self.result["peak_gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.result["wall"].append(time.perf_counter())
        self.result["cpu"].append(time.process_time())
        self.result["epoch"].append(time.time())

    def write(self, path: str) -> None:
        Path(path).write_text(json.dumps(self.result))
