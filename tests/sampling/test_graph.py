"""A step of sampling as a CUDA graph, where there is no CUDA: the logic around the capture, with a capture that is emulated.

What only a GPU shows is in tests marked `gpu`, at the end.
"""

import contextlib
from types import SimpleNamespace

from common.model.wrap import wrap
from common.sampling import graph
from common.sampling.generate import FlatDecoder, generating
from common.sampling.graph import StepGraph
from tests.tiny import tiny_lm

import numpy as np
import pytest
import torch

PROMPTS, OWNER, STEPS = [[3, 4, 5, 6], [7, 8, 9]], [0, 0, 1, 1], 9


class Device:
    """What of torch.cuda a capture asks for. Kernels are run when they are captured, which changes nothing: the step writes
    the same once more."""

    def __init__(self, monkeypatch):
        self.mode, self.capturing, self.captured, self.fails = 0, False, 0, None
        for name in ("get_sync_debug_mode", "set_sync_debug_mode", "graph_pool_handle", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "Stream", self.current_stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)

    def get_sync_debug_mode(self):
        return self.mode

    def set_sync_debug_mode(self, mode):
        self.mode = mode

    def graph_pool_handle(self):
        return 0, 1

    def current_stream(self):
        return SimpleNamespace(wait_stream=lambda other: None)

    def capture_begin(self, pool, capture_error_mode):
        assert pool == (0, 1) and capture_error_mode == "thread_local"
        self.capturing = True
        self.captured += 1

    def capture_end(self):
        self.capturing = False


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def replayable(step, tokens, pool):
    """Capture, and a replay that runs the step again, into the same memory."""
    tokens = tokens.clone()
    logits = step(tokens)

    def replay(newest):
        tokens.copy_(newest)
        logits.copy_(step(tokens))
        return logits

    return replay


def logits_of_steps(with_graph: bool, hook=None) -> list[torch.Tensor]:
    """Of each step; a completion leaves after the fourth. hook: before the second layer's MLP."""
    model = wrap(tiny_lm("llama"))
    found = []
    with generating(model) as lm:
        decoder = FlatDecoder(lm, PROMPTS, OWNER, 20, static=True)
        decoder.graph = StepGraph(decoder._next) if with_graph else None
        found.append(decoder.read_prompts())
        handle = hook and lm.model.layers[1].mlp.register_forward_pre_hook(hook)
        for t in range(STEPS):
            tokens = torch.tensor([10, 20, 30, 40])[: 4 if t < 4 else 3] + t
            if t == 4:
                decoder.keep(np.array([True, False, True, True]))
            found.append(decoder.next_logits(tokens).clone())
        if handle:
            handle.remove()
    return found


def test_a_graph_gives_the_logits_of_the_step_and_is_captured_once_per_shape(device, monkeypatch):
    captured = []
    monkeypatch.setattr(graph, "capture", lambda *args: captured.append(1) or replayable(*args))
    for one, other in zip(logits_of_steps(True), logits_of_steps(False), strict=True):
        torch.testing.assert_close(one, other)
    assert len(captured) == 2 and device.mode == 0


@pytest.mark.parametrize("error", ["CUDA error: operation not permitted when stream is capturing", "CUDA out of memory"])
def test_a_capture_that_dies_half_way_leaves_the_sampling_right(error, device, capsys):
    """Reproduced from an audit: from then on each layer read the cache of another, with logits off by 5 to 9."""

    def die(module, args):
        if device.capturing:
            raise (torch.OutOfMemoryError if "memory" in error else RuntimeError)(error)

    for one, other in zip(logits_of_steps(True, die), logits_of_steps(False), strict=True):
        torch.testing.assert_close(one, other)
    # Without memory the next size is tried again; any other error is the step's own.
    assert device.captured == (2 if "memory" in error else 1) and not device.capturing
    assert "sampling: no CUDA graph" in capsys.readouterr().out


def test_a_step_that_asks_the_device_for_a_value_is_never_captured(device):
    """RoPE that looks at the length, experts whose counts go to the host."""

    def ask(module, args):
        if device.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    for one, other in zip(logits_of_steps(True, ask), logits_of_steps(False), strict=True):
        torch.testing.assert_close(one, other)
    assert device.captured == 0 and device.mode == 0


def test_another_error_of_the_step_is_not_swallowed(device):
    def fail(module, args):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        logits_of_steps(True, fail)
    assert device.mode == 0 and device.captured == 0


# --- with a GPU -----------------------------------------------------------------------------------------------------


def on_gpu(with_graph: bool, steps: int = 130, hook=None) -> list[torch.Tensor]:
    """Logits of many steps, rows leaving at some, in float32."""
    model = wrap(tiny_lm("llama")).to("cuda")
    found, rows = [], np.arange(4)
    with generating(model) as lm:
        decoder = FlatDecoder(lm, PROMPTS, OWNER, steps + 1)
        decoder.graph = decoder.graph if with_graph else None
        found.append(decoder.read_prompts().clone())
        handle = hook and lm.model.layers[1].mlp.register_forward_pre_hook(hook)
        for t in range(steps):
            if t in (40, 90):
                keep = np.arange(len(rows)) != 1
                rows = rows[decoder.keep(keep).cpu().numpy()]
            tokens = torch.tensor([3 + (7 * t + 5 * int(row)) % 50 for row in rows], device="cuda")
            found.append(decoder.next_logits(tokens).clone())
        if handle:
            handle.remove()
    return found


@pytest.mark.gpu
def test_graphs_give_the_logits_of_the_steps_on_a_gpu():
    for one, other in zip(on_gpu(True), on_gpu(False), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_a_capture_that_fails_on_a_gpu_leaves_sampling_and_memory_usable():
    def ask(module, args):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("no")

    for one, other in zip(on_gpu(True, 20, ask), on_gpu(False, 20), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    torch.cuda.empty_cache()
    torch.ones(8, device="cuda").sum().item()


@pytest.mark.gpu
def test_a_step_that_waits_is_not_captured_on_a_gpu():
    def ask(module, args):
        args[0].sum().item()

    for one, other in zip(on_gpu(True, 20, ask), on_gpu(False, 20), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
