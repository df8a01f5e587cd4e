"""Estimate the memory that training will need, in GiB by part, and which changes would reduce it.

The estimate is independent of the architecture: a few short rows go through the model, forward and backward, while every
tensor created is counted. At each point of the pass memory is `a + b · tokens + c · Σ length²`; three rows determine a, b
and c, and these give the run's micro-batch. Recurrent layers work in chunks of tokens: for such models one longer row is
scaled in proportion to its tokens.
"""

import contextlib
import importlib.util
import math
import os
import platform
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from common.extras import extra
from common.memory import GIB, SHARDED, memory, tokens_at_once
from common.model.flat_model import FlatModel, base_lm, is_quantised
from common.model.lm_head import head_bytes, weight_of
from common.model.optimizer import moments_bytes
from common.run.gpu_memory import BUCKET, gathered_layers, kept, sharing, varlen_workspace, whole_gradients

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

MIB = 2**20
# Three rows that determine a, b and c, for each way attention may handle the run's row.
PROBES = {
    "one sequence": ([4], [8], [12]),
    "equal": ([4] * 2, [4] * 4, [8] * 2),  # views, no copies
    "unequal": ([2, 3] * 2, [2, 3] * 4, [4, 6] * 2),  # buckets, out of order
}
CHUNKED = 256  # tokens of the probe row for models with recurrent layers
# glibc's heap cannot reuse a block freed between live tensors for an aligned request of the same size. So this share of the
# bytes allocated in such a stretch is lost: measured, from 0.3 where sizes differ to 0.6 where they are alike (models of 2M
# to 120M parameters, glibc 2.36). Blocks of 32 MiB and more are mapped individually and lose nothing.
HEAP_LOSS, HEAP_LARGEST = 0.5, 32 * MIB


def estimate(
    model: FlatModel,
    tokens: int,
    targets: int,
    *,
    lengths: list[int] | None = None,
    device: torch.device | None = None,
    mixed_precision: str = "no",
    accumulation: int = 1,
    reference: bool = False,
    shards: int = 1,
    fsdp: bool = False,
    reshard: bool = True,
    zero: int = 0,
    bucket: int = BUCKET,
    ddp: bool = False,
    optim: str = "adamw",
) -> dict[str, float]:
    """Peak memory of a training process, in GiB by part, and the sum as `total`.

    Call it before `accelerator.prepare`, with LoRA and gradient checkpointing already set up. The model and the random
    number state are left unchanged.

    tokens, targets: tokens of a micro-batch, and how many of them are trained; lengths: its sequences (None: one sequence).
    device: where training runs (None: where the model is); mixed_precision: as Accelerate names it; accumulation:
    micro-batches per step (all but the first start with gradients allocated); reference: a second, frozen, unsharded model
    is loaded; shards: processes that share weights, gradients and optimizer state; fsdp: they do so with FSDP2, which
    reduces gradients only at the end of a step and keeps them whole until then (reshard: its reshard_after_forward); zero,
    bucket: DeepSpeed's ZeRO stage and its bucket size in elements; ddp: DistributedDataParallel's buckets, a second copy of
    the gradients; optim: as in --optim.
    """
    device = device or next(model.parameters()).device
    lengths = lengths or [tokens]
    trained = [p for p in model.parameters() if p.requires_grad]
    tensors = [*model.parameters(), *model.buffers(), *(extra("quantised").scales(model) if is_quantised(model.lm) else [])]
    autocast = _autocast_dtype(mixed_precision)
    moments = moments_bytes(model, optim)  # in the parameters' dtype; fused kernels need no temporaries
    weights, gradients, optimizer, stepping = kept(
        model, nbytes(tensors), moments, autocast, shards=shards, fsdp=fsdp, zero=zero
    )
    share = gradients / max(1, nbytes(trained))
    if fsdp and accumulation > 1:
        gradients = whole_gradients(trained, autocast)
    output = weight_of(base_lm(model.lm).get_output_embeddings())
    tied = output is weight_of(base_lm(model.lm).get_input_embeddings())

    extent = torch.tensor([1, *_extent(model, lengths)], dtype=torch.float64)
    if model.hybrid and model.hybrid.mixers:  # they pad a short row to a whole chunk
        probes = (_beginning(lengths, CHUNKED),)
        wanted = extent[1:2] / _extent(model, probes[0])[0]
    else:
        probes = PROBES["unequal" if len(set(lengths)) > 1 else "equal" if len(lengths) > 1 else "one sequence"]
        extents = torch.tensor([[1, *_extent(model, probe)] for probe in probes], dtype=torch.float64)
        wanted = extent @ extents.inverse()  # weight of each probe
    with _untouched(model):
        runs = [_probe_body(model, probe, mixed_precision, float(extent[1])) for probe in probes]

    def of_the_run(*bytes_of_probes: float) -> float:
        return float(wanted @ torch.tensor(bytes_of_probes, dtype=torch.float64))

    forward = of_the_run(*(run.forward.most for run in runs))
    end = of_the_run(*(run.end for run in runs))
    stages = list(zip(*(run.backward for run in runs), strict=True))
    backward = [of_the_run(*(stretch.most for stretch in stage)) for stage in stages]
    activations = max(forward, *backward)

    grad_head = nbytes([output]) if output.requires_grad else 0
    head = head_bytes(base_lm(model.lm), targets, device, autocast)

    # Held at once: in the backward pass gradients grow as activations shrink; a later micro-batch starts with all gradients
    # allocated. Tied input and output embeddings briefly hold two gradients and their sum.
    found = gradients if accumulation > 1 else 0
    together = max(forward + found, end + head + found)
    arrived = grad_head
    for held, stage in zip(backward, stages, strict=True):
        arrived += stage[0].gradients * share
        together = max(together, held + (found + tied * grad_head if found else arrived))
    together = max(together, gradients + (3 if found else 2) * tied * grad_head, gradients + stepping)

    parts = {
        "weights": weights,
        "gradients": gradients * (2 if ddp else 1),
        "optimizer": optimizer,
        "activations": activations,
        "logits chunk": head,
        "not at once": together - gradients - activations - head,
    }
    if reference:
        parts["reference model"] = nbytes(tensors)
    if shards > 1 and zero in (0, 3):
        parts["gathered layers"] = gathered_layers(model, _blocks(model), autocast, reshard, zero)
    if zero and device.type != "cpu":
        parts["buckets"] = bucket * (autocast.itemsize if autocast else 4)
    if device.type == "cuda" and (workspace := varlen_workspace(model, lengths, autocast)):
        parts["attention workspace"] = workspace
    if device.type == "cpu":
        if platform.libc_ver()[0] == "glibc" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
            made = of_the_run(*(run.forward.made for run in runs))
            if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
                # Little survives between the blocks, so only one block's share is lost: its forward, recomputed forward and
                # backward, and its gradients, which cannot reuse the space of activations.
                made /= max(1, len(stages) - 1)
                made += max(of_the_run(*(stretch.made for stretch in stage)) for stage in stages)
                made += sum(size for size in (nbytes([p]) for p in trained) if size < HEAP_LARGEST) / shards
            parts["heap loss"] = HEAP_LOSS * made
        loaded = nbytes(t for t in tensors if t.device.type == "cpu")
        parts["process"] = max(0.0, memory(device).current * GIB - loaded)
    parts = {name: size / GIB for name, size in parts.items()}
    return parts | {"total": sum(parts.values())}


def needs(
    accelerator: Accelerator,
    model: FlatModel,
    lengths: list[int],
    share: float,
    reference: bool = False,
    always_help: bool = False,
    optim: str = "adamw",
) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """(estimate, savings) for a micro-batch of sequences of these lengths, with this Accelerator's settings.

    share: the fraction of tokens that are trained. savings is empty if the run fits, unless always_help is set.
    """
    pieces = max(1, int(sum(lengths) / tokens_at_once(accelerator, model)))
    size = math.ceil(len(lengths) / pieces)  # sequences in each part that the micro-batch will be split into
    lengths = max((lengths[i : i + size] for i in range(0, len(lengths), size)), key=sum)
    sharded = accelerator.distributed_type in SHARDED
    options = {
        "lengths": lengths,
        "device": accelerator.device,
        "mixed_precision": accelerator.mixed_precision,
        "accumulation": pieces * accelerator.gradient_accumulation_steps,
        "reference": reference,
        **sharing(accelerator),
        "ddp": accelerator.num_processes > 1 and not sharded,
        "optim": optim,
    }
    tokens = sum(lengths)
    targets = max(1, round(tokens * share))
    parts = estimate(model, tokens, targets, **options)
    fits = not always_help and parts["total"] <= memory(accelerator.device).limit
    return parts, [] if fits else savings(model, parts, tokens, targets, **options)


def show_memory(parts: dict[str, float], device_limit: float) -> str:
    """The parts of an estimate as a table, and whether they fit into the device's device_limit GiB."""
    width = max(len(name) for name in parts)
    lines = ["memory that training needs, estimated:"]
    shown = {name: size for name, size in parts.items() if name == "total" or round(size * 1024)}
    lines += [f"    {name:{width}}  {show_size(size):>9}" for name, size in shown.items()]
    total = parts["total"]
    if math.isnan(device_limit):
        return "\n".join([*lines, "    whether it fits cannot be said: the device does not tell what it has"])
    lines[-1] += f"  of {show_size(device_limit)}"
    spare = show_size(abs(device_limit - total))
    lines.append(f"    it fits, with {spare} to spare" if total <= device_limit else f"    too much by {spare}")
    return "\n".join(lines)


def savings(
    model: FlatModel,
    parts: dict[str, float],
    tokens: int,
    targets: int,
    *,
    lengths: list[int] | None = None,
    **options: Any,
) -> list[tuple[str, float]]:
    """Changes that would reduce memory, and by how many GiB, largest saving first.

    parts: the estimate with the same arguments. Each change is estimated alone: two together save less than their sum.
    """

    def saved(*changed: Any, **others: Any) -> float:
        new = estimate(model, *changed[:2], **options | {"lengths": changed[2]} | others)
        return sum(size - new.get(name, 0.0) for name, size in parts.items() if name not in ("process", "total"))

    lengths = lengths or [tokens]
    half = lengths[::2] if len(lengths) > 1 else [max(1, tokens // 2)]
    found = [("half the micro-batch (--per_device_train_batch_size) or --max_length", saved(sum(half), targets // 2, half))]
    layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    if base_lm(model.lm).supports_gradient_checkpointing and not any(layer.gradient_checkpointing for layer in layers):
        try:
            for layer in layers:  # set directly: transformers' method would also leave hooks behind
                layer.gradient_checkpointing = True
                contexts = {"context_fn": extra("hybrids").recompute_contexts} if model.hybrid else {}
                layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, **contexts)
            found.append(("--gradient_checkpointing", saved(tokens, targets, lengths)))
        finally:
            for layer in layers:
                layer.gradient_checkpointing = False
    if all(p.requires_grad for p in model.parameters()):  # LoRA's own weights are about one percent
        beside = max(0.0, parts["gradients"] + parts["not at once"])  # of gradients, on top of the activations
        found.append(("LoRA (--use_peft)", parts["optimizer"] + beside))
    matrices = [m.base_layer.weight for m in model.modules() if isinstance(getattr(m, "base_layer", None), nn.Linear)]
    wide = [w for w in matrices if w.is_floating_point() and not w.requires_grad]
    if wide and importlib.util.find_spec("bitsandbytes") is not None:  # 4 bits, plus an 8-bit scale for every 64 weights
        found.append(("QLoRA (--load_in_4bit)", (nbytes(wide) - sum(w.numel() for w in wide) * (4 + 8 / 64) / 8) / GIB))
    if (options.get("device") or next(model.parameters()).device).type != "cpu":
        shards = 2 * options.get("shards", 1)
        fsdp = {"shards": shards, "fsdp": True, "zero": 0, "ddp": False}
        found.append((f"FSDP over {shards} processes", saved(tokens, targets, lengths, **fsdp)))
    if "heap loss" in parts:
        found.append(("MALLOC_MMAP_THRESHOLD_=1048576 in the environment (slower)", parts["heap loss"]))
    return sorted(((name, size) for name, size in found if size > 0), key=lambda saving: -saving[1])


def show_size(gib: float) -> str:
    return f"{gib:.2f} GiB" if abs(gib) >= 1 else f"{gib * 1024:.0f} MiB"


# --- the probe ------------------------------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """One stretch of a row's way through the model, in bytes; the first two fields exclude weights and gradients."""

    most: int  # peak
    made: int  # allocated by new tensors that glibc takes from its heap
    gradients: int = 0  # of weights whose gradients are computed here


class Body(NamedTuple):
    """Memory of one row on its way through the model without the LM head."""

    forward: Stretch
    end: int  # bytes still held after the forward pass
    backward: list[Stretch]  # after the last block first, then the blocks from last to first


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Total bytes of the tensors; for meta tensors, what they would take."""
    return sum(t.numel() * t.element_size() for t in tensors)


class _Live(TorchDispatchMode):
    """Counts the bytes of live tensors created under it on the model's device.

    largest: allocations of tensors with more bytes than this are left out of `made`.
    """

    def __init__(self, model: nn.Module, largest: float = float("inf")):
        super().__init__()
        self.device = next(model.parameters()).device.type
        self.known = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}
        self.now = self.most = self.made = 0
        self.largest = largest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == self.device:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:  # otherwise a view, or changed in place
            self.known.add(key)
            self.now += size
            self.made += size if size < self.largest else 0
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key, size).atexit = False

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size

    def stretch(self, gradients: int = 0) -> Stretch:
        """The counts since the last call."""
        done = Stretch(self.most, self.made, gradients)
        self.most, self.made = self.now, 0
        return done


def _probe_body(model: FlatModel, lengths: list[int], mixed_precision: str, tokens: float) -> Body:
    """Send a row through the model without its LM head, forward and backward, standing in for a row of `tokens` tokens."""
    device = next(model.parameters()).device
    T, V = sum(lengths), model.config.get_text_config().vocab_size
    row = {
        "input_ids": (torch.arange(T, device=device) * 7919 % V)[None],
        "position_ids": torch.cat([torch.arange(n, device=device) for n in lengths])[None],
        "lengths": lengths,
    }
    backward, arriving, embedded = [], [0], []

    def start(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        embedded.append(out if out.requires_grad else out.requires_grad_())  # frozen under LoRA
        return out

    def leave(block: nn.Module, args: Any, out: Any) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        size = nbytes(p for p in block.parameters() if p.requires_grad)

        def reached(gradient: Tensor) -> None:  # the backward pass has come to this block
            backward.append(live.stretch(arriving[-1]))
            arriving.append(size)

        if hidden.requires_grad:
            hidden.register_hook(reached)

    hooks = [base_lm(model.lm).get_input_embeddings().register_forward_hook(start)]
    hooks += [block.register_forward_hook(leave) for block in _blocks(model)]
    try:
        with _Live(model, HEAP_LARGEST * _extent(model, lengths)[0] / tokens) as live:
            with _autocast(device, mixed_precision):
                hidden = model.hidden(row)
            forward, end = live.stretch(), live.now
            torch.autograd.grad(hidden, embedded[0], torch.zeros_like(hidden))  # computes no weight gradients
            backward.append(live.stretch(arriving[-1]))
    finally:
        for hook in hooks:
            hook.remove()
    return Body(forward, end, backward)


def _blocks(model: FlatModel) -> list[nn.Module]:
    """The transformer blocks, found by the class names that the architecture declares."""
    return [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]


def _beginning(lengths: list[int], tokens: int) -> list[int]:
    """The first sequences, up to `tokens` tokens: at least one, the last one truncated."""
    taken: list[int] = []
    for n in lengths:
        if sum(taken) < tokens:
            taken.append(min(n, tokens - sum(taken)))
    return taken


def _extent(model: FlatModel, lengths: list[int]) -> tuple[int, int]:
    """(tokens of a row, sum of its squared lengths), including padding if the model runs on padded batches."""
    if model.padded:
        lengths = [max(lengths)] * len(lengths)
    return sum(lengths), sum(n * n for n in lengths)


def _autocast_dtype(mixed_precision: str) -> torch.dtype | None:
    return {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision)


def _autocast(device: torch.device, mixed_precision: str) -> contextlib.AbstractContextManager:
    dtype = _autocast_dtype(mixed_precision)
    return torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Training mode with gradients enabled; modes, gradients and random state are restored afterwards."""
    device = next(model.parameters()).device
    modes = [(module, module.training) for module in model.modules()]
    drops = [
        (module, module.layerdrop) for module in model.modules() if isinstance(getattr(module, "layerdrop", None), float)
    ]
    forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
    try:
        # Dynamo skips frames under a dispatch mode, and would go on skipping the same code for the rest of the run.
        with torch.enable_grad(), forked, torch.compiler.set_stance("force_eager"):
            model.train()
            for module, _ in drops:  # each probe uses all layers
                module.layerdrop = 0.0
            yield
    finally:
        for module, training in modes:
            module.training = training
        for module, drop in drops:
            module.layerdrop = drop
