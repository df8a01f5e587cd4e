"""Memory on CUDA, MPS and CPU, in GiB: what is used and what there is, and how running out of it shows; and how much to
compute at once."""

import contextlib
import ctypes
import gc
import math
import platform
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

GIB = 2**30
SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)  # each process holds a part of the weights
WITHOUT_FLOAT64 = ("mps",)
# What running out says, where it is not an exception of its own: CUDA and its libraries, MPS, the allocators of the CPU.
MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "std::bad_alloc",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


# On a CPU: numbers of a hidden state of the row that its cache holds, and the tokens below which matrix products are slow.
# Autocast converts the weights for each part anew.
CACHED_NUMBERS, LEAST_TOKENS, LEAST_TOKENS_AUTOCAST = 2**18, 512, 1024


class Memory(NamedTuple):
    current: float  # in use now
    peak: float  # the most since the start
    limit: float  # what there is; NaN where the system does not tell


def memory(device: torch.device) -> Memory:
    """Memory of the device that the model is on; for the CPU, resident memory of this process."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return Memory(torch.cuda.memory_allocated(device) / GIB, torch.cuda.max_memory_allocated(device) / GIB, total / GIB)
    if device.type == "mps":
        current = torch.mps.driver_allocated_memory() / GIB  # MPS keeps no record of the peak
        return Memory(current, current, torch.mps.recommended_max_memory() / GIB)
    status = Path("/proc/self/status")
    if not status.exists():
        return _memory_without_proc()
    # Not ru_maxrss, which a process has from the one that started it. The values are in kB.
    found = dict(line.split(":") for line in status.read_text().splitlines() if ":" in line and line.count(":") == 1)
    return Memory(int(found["VmRSS"].split()[0]) / 2**20, int(found["VmHWM"].split()[0]) / 2**20, _limit_of_linux())


def _memory_without_proc() -> Memory:
    """macOS and Windows."""
    import psutil

    used = psutil.Process().memory_info()
    peak = getattr(used, "peak_wset", 0)  # of Windows
    with contextlib.suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS
    return Memory(used.rss / GIB, max(peak, used.rss) / GIB, psutil.virtual_memory().total / GIB)


def _limit_of_linux() -> float:
    """What the machine has, or what the container leaves of it."""
    limits = [int(Path("/proc/meminfo").read_text().split()[1]) / 2**20]  # first line: MemTotal
    for place in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int(Path(place).read_text()) / GIB)
    return min(limits)


def tokens_at_once(accelerator: Any, model: nn.Module) -> float:
    """How many tokens of a micro-batch are worth sending through the model (a FlatModel) together.

    On a GPU, all of them. On a CPU twice as many are no faster, and take twice the memory. With several processes all of
    them, too: these wait for one another at each micro-batch.
    """
    if accelerator.device.type != "cpu" or accelerator.num_processes > 1:
        return math.inf
    least = LEAST_TOKENS if accelerator.mixed_precision == "no" else LEAST_TOKENS_AUTOCAST
    return max(least, CACHED_NUMBERS // model.config.get_text_config().hidden_size)


def relieve(device: torch.device, above: float = 0.9) -> bool:
    """Empty the caches of the allocator where more than this share of the memory is used. Returns whether there was need.

    CUDA's allocator does it by itself when it needs to; done at each line of the log, its blocks would be asked for anew.
    """
    if device.type == "cuda" or not memory(device).current > above * memory(device).limit:
        return False
    empty_caches(device)
    return True


def empty_caches(device: torch.device) -> None:
    """Give back what no tensor uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    elif platform.libc_ver()[0] == "glibc":  # which keeps what was freed for the next request
        ctypes.CDLL(None).malloc_trim(0)


def is_oom(error: BaseException) -> bool:
    """Whether memory has run out, in any of the forms in which it shows.

    torch.OutOfMemoryError and MemoryError; else a RuntimeError with one of a few messages: of CUDA outside of PyTorch's
    allocator, cuBLAS, cuDNN, MPS, or the allocator of the CPU.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)


def finest_dtype(device: torch.device) -> torch.dtype:
    """What sums over many numbers are made in: float64, where the device has it."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on the device.

    From ordinary memory CUDA would copy with the host waiting until the device has done all that it was asked for before:
    hence pinned memory, which PyTorch keeps until the copy has been made.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class AsyncScalar:
    """A number on the device that is asked for later: by then it is on the host.

    Taking it from the device when it is wanted would wait for all that the device has been asked for in between.
    """

    def __init__(self, value: Tensor):
        """value: (); it may be changed afterwards."""
        self._value = value.to("cpu", non_blocking=value.is_cuda, copy=True)  # into pinned memory
        self._arrived = torch.cuda.Event() if value.is_cuda else None
        if self._arrived:
            self._arrived.record()

    def value(self) -> Tensor:
        """On the CPU."""
        if self._arrived:
            self._arrived.synchronize()
        return self._value
