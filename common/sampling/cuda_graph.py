"""Sampling on a GPU: as many completions at once as its memory holds, and a step as one CUDA graph (launched
one by one, its few hundred kernels of microseconds each would leave the device waiting for the host)."""

from collections.abc import Callable, Iterator
import contextlib
import functools
import warnings

from common.errors import say
from common.memory import compute_dtype, is_oom
from common.model.flat_model import size_of_all_layers
import torch
from torch import Tensor

# tokens (n,) -> logits (n, V), on the same memory while the version stays the same
Step = Callable[[Tensor], Tensor]


def completions_at_once(lm: torch.nn.Module, tokens: int) -> int:
    """How many completions of up to `tokens` tokens, each with its prompt, to sample together: as many as
    half of the free memory of the GPU holds with their logits."""
    config = lm.config.get_text_config()
    weight = lm.get_input_embeddings().weight
    names = "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"
    L, H, Hkv, Dh, D = (size_of_all_layers(config, name) for name in names)
    cache = 2 * tokens * L * (Hkv or H or 1) * (Dh or D // max(H, 1)) * compute_dtype(weight).itemsize
    free, _ = torch.cuda.mem_get_info(weight.device)
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    # A draw takes logits, probabilities, and these in order with their places.
    return free // 2 // (cache + 32 * config.vocab_size)


class StepGraph:
    """A step as a graph, recaptured when its shapes change. It does not hold the step, whose owner holds it:
    such a cycle would keep a cache in memory after its use.

    The first step with new shapes runs eagerly, and the graph for the following ones is captured then. A step
    that synchronises with the device (RoPE that looks at the length, some experts) cannot be captured: this
    is detected by letting such a call fail once before any capture, because a capture that fails half way
    leaves older versions of PyTorch unusable.
    """

    def __init__(self):
        self.replay: Step | None = None
        self.version = -1  # of the captured shapes
        self.synchronises: bool | None = None  # whether the step waits for the device; None: not tested yet

    def __call__(self, step: Step, tokens: Tensor, version: int) -> Tensor:
        """The logits, which the next call overwrites. step: the same each time. version: changes with the
        shapes that it works on."""
        if self.replay is not None and self.version == version:
            return self.replay(tokens)
        logits = self._eager(step, tokens)
        if not self.synchronises and self.version != version:
            self.replay = None
            self.version = version
            try:
                self.replay = capture(step, tokens)
            except Exception as error:  # from a kernel, or the allocator
                self.synchronises = not is_oom(error)
                reason = "for this size: out of memory" if is_oom(error) else f"({error})"[:200]
                say(f"sampling: no CUDA graph {reason}")
        return logits

    def _eager(self, step: Step, tokens: Tensor) -> Tensor:
        if self.synchronises is None:
            try:
                with synchronising_is_an_error():
                    logits = step(tokens)
                self.synchronises = False
                return logits
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                self.synchronises = True  # the step rewrites whatever it has written
        return step(tokens)


@contextlib.contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    """Context in which a call that synchronises with the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # it may miss such calls; the capture finds those
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@functools.cache
def shared(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]:
    """The stream of all captures (cuBLAS keeps a workspace for each), and a graph that stays, whose pool all
    share: a pool without a graph cannot be captured into again, and its memory would stay reserved."""
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=device)
        graph.capture_end()
    return stream, graph


def capture(step: Step, tokens: Tensor) -> Step:
    """The step as a graph, on a copy of the tokens.

    torch.cuda.graph would synchronise, collect garbage and empty the caches each time.
    """
    tokens = tokens.clone()
    graph = torch.cuda.CUDAGraph()
    stream, first = shared(tokens.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=first.pool(), capture_error_mode="thread_local")
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
