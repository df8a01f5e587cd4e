"""Memory: what the process uses and what the device has, in GiB, on CUDA, MPS and CPU."""

import resource
import sys
from pathlib import Path
from typing import NamedTuple

import torch

GIB = 2**30


class Memory(NamedTuple):
    current: float  # in use now
    peak: float  # the most since the start
    limit: float  # what there is


def memory(device: torch.device) -> Memory:
    """Memory of the device that the model is on; for the CPU, resident memory of this process, in GiB."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return Memory(torch.cuda.memory_allocated(device) / GIB, torch.cuda.max_memory_allocated(device) / GIB, total / GIB)
    if device.type == "mps":
        current = torch.mps.driver_allocated_memory() / GIB  # MPS keeps no record of the peak
        return Memory(current, current, torch.mps.recommended_max_memory() / GIB)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / GIB
    if not Path("/proc/self/statm").exists():
        return Memory(peak, peak, float("nan"))
    page = resource.getpagesize()
    current = int(Path("/proc/self/statm").read_text().split()[1]) * page / GIB
    total = int(Path("/proc/meminfo").read_text().split()[1]) / 2**20  # first line: MemTotal in kB
    return Memory(current, peak, total)
