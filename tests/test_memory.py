"""The monitor of the memory, and the forms in which running out of it shows."""

import ctypes

from common import memory as room
from common.memory import is_oom, memory, relieve
import psutil
import pytest
import torch

CPU = torch.device("cpu")


def test_the_peak_is_at_least_what_is_in_use():
    now = memory(CPU)
    assert 0 < now.current <= now.peak * 1.01 and now.peak < now.limit
    mapped = psutil.Process().memory_info().vms  # with what was never used
    assert now.peak * 2**30 < mapped


def test_the_limit_is_that_of_the_container(tmp_path, monkeypatch):
    file, total = tmp_path / "memory.max", psutil.virtual_memory().total
    monkeypatch.setattr("common.memory.CONTAINER", (str(tmp_path / "missing"), str(file)))
    for text, limit in ((f"{2**20}\n", 2**20), ("max\n", total), (f"{2**62}\n", total)):
        file.write_text(text)
        assert memory(CPU).limit * 2**30 == limit


def test_a_system_that_tells_no_peak_ends_no_run(monkeypatch):
    """As gVisor's, whose /proc/self/status has no VmHWM."""
    monkeypatch.setattr("pathlib.Path.read_text", lambda path: "VmRSS:\t1000 kB\n")
    now = memory(CPU)
    assert now.peak == now.current > 0


def real_cpu_error():
    try:
        torch.empty(2**60, dtype=torch.int8)
    except RuntimeError as error:
        return error


RAN_OUT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError("Unable to allocate 7.28 TiB for an array"),
    real_cpu_error(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
    ),
    # Windows
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4398046511104 bytes."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError(
        "MPS backend out of memory (MPS allocated: 17.94 GB, other allocations: 1.13 GB, max allowed: 18.13 GB)"
    ),
    RuntimeError("std::bad_alloc"),
]


@pytest.mark.parametrize("error", RAN_OUT, ids=lambda error: f"{type(error).__name__}: {str(error)[:40]}")
def test_running_out_is_recognised(error):
    assert is_oom(error)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDA error: device-side assert triggered"), ValueError("out of memory"), KeyError()],
)
def test_another_error_is_not_taken_for_it(error):
    assert not is_oom(error)


def test_caches_are_emptied_above_the_threshold():
    now = memory(CPU)
    share = now.current / now.limit
    assert relieve(CPU, above=0.5 * share) and not relieve(CPU, above=min(1.0, 2 * share))


def test_on_cuda_caches_count_and_are_emptied_only_if_asked(monkeypatch):
    found = {
        "mem_get_info": (0, 100),
        "memory_allocated": 40,
        "max_memory_allocated": 95,
        "memory_reserved": 95,
    }
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, lambda device=None, value=value: value)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert [relieve(torch.device("cuda"), above) for above in (None, 0.9, 0.96)] == [False, True, False]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc only")
def test_emptying_gives_memory_back_to_the_system():
    blocks = [torch.ones(2**12) for _ in range(2**14)]  # 256 MB, each below the size that is mapped by itself
    kept = [torch.ones(2**12)]
    del blocks
    before = memory(CPU).current
    room.empty_caches(CPU)
    assert memory(CPU).current < before - 0.15 and kept  # GiB; without it, glibc keeps all of it
