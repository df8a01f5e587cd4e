"""Memory on CUDA, MPS and CPU, in GiB: usage and limits, detecting that it ran out, and how much to compute
at once."""

import contextlib
import ctypes
import math
from pathlib import Path
import platform
from typing import Any, NamedTuple

from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache
import numpy as np
import psutil
import torch
from torch import Tensor, nn

GIB = 2**30
SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)  # each process holds a part of the weights
CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
HALF = (torch.bfloat16, torch.float16)  # what the fast kernels of a GPU compute in
WITHOUT_FLOAT64 = ("mps",)
# Messages of out-of-memory errors without their own exception class: CUDA and its libraries, MPS, the CPU's
# allocators.
MESSAGES = (
    "out of memory",
    "not enough memory",
    "allocate memory",  # can't, cannot, failed to
    "std::bad_alloc",
    "_STATUS_ALLOC_FAILED",  # of cuBLAS, cuDNN
)

# On a CPU: the size of a row's hidden states that fits its cache, and the tokens below which matrix products
# are slow. Autocast converts the weights again for each part.
CACHED_NUMBERS, LEAST_TOKENS, LEAST_TOKENS_AUTOCAST = 2**18, 512, 2048


class Memory(NamedTuple):
    current: float  # in use now
    peak: float  # since the start
    limit: float  # total


def memory(device: torch.device) -> Memory:
    """Memory of the model's device; for the CPU, resident memory of this process."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return Memory(
            torch.cuda.memory_allocated(device) / GIB,
            torch.cuda.max_memory_allocated(device) / GIB,
            total / GIB,
        )
    if device.type == "mps":
        current = torch.mps.driver_allocated_memory() / GIB  # MPS does not record the peak
        return Memory(current, current, torch.mps.recommended_max_memory() / GIB)
    now = psutil.Process().memory_info().rss
    limits = [psutil.virtual_memory().total]
    peak = now  # where the system does not tell
    with contextlib.suppress(OSError, IndexError):  # no /proc, or one without a peak (gVisor's)
        # not ru_maxrss, which is inherited from the parent process
        status = Path("/proc/self/status").read_text()
        peak = max(now, int(status.split("VmHWM:")[1].split()[0]) * 1024)
    for file in CONTAINER:
        with contextlib.suppress(OSError, ValueError):  # missing, or "max"
            limits.append(int(Path(file).read_text()))
    return Memory(now / GIB, peak / GIB, min(limits) / GIB)


def tokens_at_once(accelerator: Any, model: nn.Module) -> float:
    """How many tokens of a micro-batch are worth sending through the model (a FlatModel) together.

    On a GPU all of them. On a CPU larger parts are no faster, and take more memory. With several processes
    also all of them, as processes wait for one another at each micro-batch.
    """
    if accelerator.device.type != "cpu" or accelerator.num_processes > 1:
        return math.inf
    least = LEAST_TOKENS if accelerator.mixed_precision == "no" else LEAST_TOKENS_AUTOCAST
    return max(least, CACHED_NUMBERS // model.config.get_text_config().hidden_size)


def relieve(device: torch.device, above: float | None) -> bool:
    """Empty the allocator's caches if they and the tensors take more than this share of the memory. Returns
    whether they were emptied.

    above: None means 0.9, and on CUDA never: its allocator empties them itself when memory runs out, and
    emptied earlier it would have to allocate its blocks again.
    """
    now, is_cuda = memory(device), device.type == "cuda"
    used = torch.cuda.memory_reserved(device) / GIB if is_cuda else now.current
    if (is_cuda and above is None) or used <= (above or 0.9) * now.limit:
        return False
    empty_caches(device)
    return True


def empty_caches(device: torch.device) -> None:
    """Release memory that no tensor uses."""
    clear_device_cache(garbage_collection=True)
    # glibc keeps freed memory for the next request
    if device.type == "cpu" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def is_oom(error: BaseException) -> bool:
    """Whether an error means that memory has run out.

    torch.OutOfMemoryError and MemoryError; else a RuntimeError with one of a few messages: of CUDA outside of
    PyTorch's allocator, cuBLAS, cuDNN, MPS, or the CPU's allocator.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)


def finest_dtype(device: torch.device) -> torch.dtype:
    """The dtype for sums over many numbers: float64, if the device supports it."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on the device.

    From pageable memory CUDA would block the host until the device has finished all earlier work: hence
    pinned memory, which PyTorch keeps until the copy is done.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a matrix product of x is computed in."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
