"""A step of sampling as a CUDA graph, where there is no CUDA: the logic around the capture, with an emulated
device.

What only a GPU shows is in tests marked `gpu`, at the end.
"""

import contextlib
import itertools
from types import SimpleNamespace
import warnings
import weakref

from common.model.wrap import wrap
from common.sampling.cuda_graph import StepGraph, shared, synchronising_is_an_error
from common.sampling.generate import FlatDecoder, generating
import numpy as np
import pytest
import torch

from tests.tiny import tiny_lm

PROMPTS, OWNER, STEPS = [[3, 4, 5, 6], [7, 8, 9]], [0, 0, 1, 1], 140


class Device:
    """What a capture asks of torch.cuda. As PyTorch's allocator does, it refuses to capture into a pool whose
    graphs are all gone. A replay runs the step again, into the same memory."""

    def __init__(self, monkeypatch):
        self.mode, self.capturing, self.captured, self.replayed = 0, None, 0, 0
        self.pools: dict[tuple[int, int], int] = {}  # graphs alive in each
        handles, device = itertools.count(), self

        class Graph:
            ended = False

            def capture_begin(self, capture_error_mode, pool=None):
                assert pool is None or device.pools[pool] > 0, "use_count > 0"
                assert capture_error_mode == "thread_local"
                device.captured += pool is not None
                self.handle, device.capturing = pool or (0, next(handles)), self
                device.pools[self.handle] = device.pools.get(self.handle, 0) + 1

            def pool(self):
                return self.handle

            def capture_end(self):
                self.ended, device.capturing = True, None

            def replay(self):
                device.replayed += 1
                self.run()

            def __del__(self):
                if self.ended:
                    device.pools[self.handle] -= 1

        stream = SimpleNamespace(wait_stream=lambda other: None)
        emulated = {"CUDAGraph": Graph, "stream": contextlib.nullcontext}
        emulated |= {"current_stream": lambda: stream, "Stream": lambda: stream}
        emulated |= {"get_sync_debug_mode": lambda: self.mode, "set_sync_debug_mode": self.set_mode}
        shared.cache_clear()
        for name, value in emulated.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def set_mode(self, mode):
        self.mode = mode

    def run(self, step, tokens):
        logits = step(tokens)
        if self.capturing:
            self.capturing.run = lambda: logits.copy_(step(tokens))
        return logits

    def graph(self):
        """Of a step, which a captured graph can run again."""
        graph = StepGraph()
        return lambda step, *args: graph(lambda tokens: self.run(step, tokens), *args)


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def logits_of_steps(graph=None, hook=None, steps=STEPS, where="cpu") -> list[torch.Tensor]:
    """Of each step; a completion leaves after the 30th. graph: makes one of a step. hook: before the second
    layer's MLP."""
    model = wrap(tiny_lm("llama")).to(where)
    found = []
    with generating(model) as lm:
        decoder = FlatDecoder(lm, PROMPTS, OWNER, 256, static=True)
        decoder.graph = graph() if graph else None
        found.append(decoder.read_prompts().clone())
        handle = hook and lm.model.layers[1].mlp.register_forward_pre_hook(hook)
        for t in range(steps):
            tokens = torch.tensor([10, 20, 30, 40], device=where)[: 4 if t < 30 else 3] + t % 9
            if t == 30:
                decoder.keep(np.array([True, False, True, True]))
            found.append(decoder.next_logits(tokens).clone())
        if handle:
            handle.remove()
        gone = weakref.ref(decoder.cache)
        del decoder
    assert graph != StepGraph or gone() is None
    return found


@pytest.fixture(scope="module")
def eager():
    return logits_of_steps()


def assert_same(found, wanted, **tolerance):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def test_a_graph_is_captured_once_per_shape(device, eager):
    """Four shapes: at the start, after a completion has left, and as the cache grows to 128 and 256
    tokens."""
    assert_same(logits_of_steps(device.graph), eager)
    assert (device.captured, device.replayed) == (4, STEPS - 4) and device.mode == 0


@pytest.mark.parametrize(
    "error", ["CUDA error: operation not permitted when stream is capturing", "CUDA out of memory"]
)
def test_a_failed_capture_leaves_sampling_right(error, device, eager, capsys):
    """From then on each layer would read another one's cache, with logits off by 5 to 9."""

    def die(module, args):
        if device.capturing:
            raise (torch.OutOfMemoryError if "memory" in error else RuntimeError)(error)

    assert_same(logits_of_steps(device.graph, die), eager)
    # Without memory the next size is tried again; any other error is the step's own.
    assert device.captured == (4 if "memory" in error else 1) and not device.capturing
    reason = "for this size: out of memory" if "memory" in error else f"({error})"
    assert f"sampling: no CUDA graph {reason}\n" in capsys.readouterr().out


def test_a_step_that_waits_is_never_captured(device, eager):
    """RoPE that looks at the length, experts whose counts go to the host."""

    def ask(module, args):
        if device.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    assert_same(logits_of_steps(device.graph, ask), eager)
    assert device.captured == 0 and device.mode == 0


def test_a_cache_goes_with_its_decoder(device):
    """At once: the allocator, when memory runs out, collects no garbage."""
    logits_of_steps(StepGraph, steps=1)
    assert device.captured == 1


# --- with a GPU ---------------------------------------------------------------------------------------------


ON_GPU = {"atol": 1e-4, "rtol": 1e-4}


def test_torch_does_not_warn_of_its_mode(monkeypatch, recwarn):
    """Which says nothing to the user of a script."""

    def set_mode(mode):
        warnings.warn(f"Synchronization debug mode is a prototype feature ({mode})", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with synchronising_is_an_error():
        warnings.warn("another", stacklevel=1)
    assert [str(each.message) for each in recwarn][0] == "another"


@pytest.mark.gpu
def test_graphs_give_the_steps_logits_on_a_gpu(monkeypatch):
    """Captured for each of four shapes, replayed otherwise."""
    counts = {"capture_begin": 0, "replay": 0}

    class Counted(torch.cuda.CUDAGraph):
        def capture_begin(self, *args, **kwargs):
            counts["capture_begin"] += "pool" in kwargs  # not that of the pool itself
            super().capture_begin(*args, **kwargs)

        def replay(self):
            counts["replay"] += 1
            super().replay()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Counted)
    assert_same(logits_of_steps(StepGraph, where="cuda"), logits_of_steps(where="cuda"), **ON_GPU)
    assert counts == {"capture_begin": 4, "replay": STEPS - 4}
