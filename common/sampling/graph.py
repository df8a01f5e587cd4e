"""A step of sampling as one CUDA graph: a few hundred kernels of microseconds each, started by the host one by one, would
leave the device waiting for it."""

import contextlib
from collections.abc import Callable, Iterator

from common.errors import say
from common.memory import is_oom

import torch
from torch import Tensor

Step = Callable[[Tensor], Tensor]  # tokens (n,) -> logits (n, V), on the same memory as long as the version is the same


class StepGraph:
    """`step` as a graph, captured anew where its shapes change.

    The first step of new shapes runs as it is, and the graph for those after it is captured then. A step that asks the
    device for a value (RoPE that looks at the length, some experts) can be no graph: it is seen by letting such a call fail
    once, before anything is captured, because a capture that dies half way leaves older versions of PyTorch unusable.
    """

    def __init__(self, step: Step):
        self.step = step
        self.replay: Step | None = None
        self.version = -1  # of the shapes that it was captured for
        self.waits: bool | None = None  # whether the step asks the device for a value; None: not tried yet
        self.pool: tuple[int, int] | None = None  # memory, which one graph leaves to the next

    def __call__(self, tokens: Tensor, version: int) -> Tensor:
        """The logits; they are overwritten by the next call. version: changes with the shapes of what `step` works on."""
        if self.replay is not None and self.version == version:
            return self.replay(tokens)
        logits = self._as_it_is(tokens)
        if not self.waits and self.version != version:
            self.replay, self.version = None, version
            try:
                self.pool = self.pool or torch.cuda.graph_pool_handle()
                self.replay = capture(self.step, tokens, self.pool)
            except Exception as error:  # of a kernel, or the allocator
                self.waits = not is_oom(error)
                say("sampling: no CUDA graph " + ("for this size: out of memory" if is_oom(error) else f"({error})"[:200]))
        return logits

    def _as_it_is(self, tokens: Tensor) -> Tensor:
        if self.waits is None:
            try:
                with waiting_is_an_error():
                    logits = self.step(tokens)
                self.waits = False
                return logits
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                self.waits = True  # what the step has written it writes again
        return self.step(tokens)


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """While it lasts, a call that makes the host wait for the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def capture(step: Step, tokens: Tensor, pool: tuple[int, int]) -> Step:
    """The step as a graph, on a copy of the tokens.

    torch.cuda.graph would wait for the device, collect garbage and empty the caches each time.
    """
    tokens, graph, stream = tokens.clone(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            logits = step(tokens)
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)

    def replay(newest: Tensor) -> Tensor:
        tokens.copy_(newest)
        graph.replay()
        return logits

    return replay
