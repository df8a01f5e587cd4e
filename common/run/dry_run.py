"""--dry_run: every fact about the data and the plan on the console, and the memory that training needs.

The memory is that of a forward and a backward pass at the run's true size, on tensors without numbers.
PyTorch's fake tensors have a shape and a dtype but no memory, so nothing is allocated and nothing
extrapolated. The bytes of the tensors that live at once are counted as they come and go; the memory that
kernels take inside a call is not.
"""

from collections.abc import Iterable, Iterator
import contextlib
import json
import math
from typing import Any
from unittest import mock
import weakref

from accelerate import Accelerator
from common.args import CommonArgs
from common.collators import Batch, flat_batch
from common.data.types import all_trained
from common.errors import say
from common.memory import GIB, SHARDED, memory, tokens_at_once
from common.model import fused_head
from common.model.flat_model import FlatModel, num_positions
from common.model.optimizer import matrices
import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
import yaml

HALF = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}  # Accelerate's names
# On a CPU: space between live tensors that malloc cannot use again, as a share of these. With it, models of 0.4M and
# 100M parameters peaked at 1.01 to 1.05 times the estimate in three steps (tests/run/test_dry_run.py, slow).
LOST_OF_ACTIVATIONS, LOST_OF_GRADIENTS = 0.5, 0.25


def show_facts(facts: dict[str, Any]) -> None:
    """Print what dataset.json would hold; the lengths as a histogram."""
    facts = json.loads(json.dumps(facts))  # without numpy's numbers
    histogram = facts["lengths"].pop("histogram")
    facts = {title: value for title, value in facts.items() if value}
    text = yaml.safe_dump(facts, default_flow_style=None, sort_keys=False, allow_unicode=True, width=120)
    say(text.rstrip())
    most = max(count for _, _, count in histogram)
    for low, high, count in histogram:
        say(f"    {low:>7,} - {high:<7,} {'#' * round(40 * count / most):40} {count:,}")


def show_memory(
    args: CommonArgs, accelerator: Accelerator, model: FlatModel, lengths: list[int], reference: bool
) -> None:
    """Print what a process would need, by part. lengths: of the examples of the largest micro-batch. The model
    cannot be trained afterwards."""
    num_parts = max(1, int(sum(lengths) / tokens_at_once(accelerator, model)))
    size = math.ceil(len(lengths) / num_parts)  # sequences in each part
    parts = [lengths[i : i + size] for i in range(0, len(lengths), size)]
    try:
        gib = estimate(
            model,
            max(parts, key=sum),
            mixed_precision=accelerator.mixed_precision,
            accumulation=num_parts * accelerator.gradient_accumulation_steps,
            optim=args.optim,
            reference=reference,
            ddp=accelerator.num_processes > 1,
            device=accelerator.device,
        )
    except Exception as error:  # layers whose shapes depend on numbers fail in different ways
        reason = " ".join(str(error).split())[:120]
        return say(f"memory: it cannot be estimated for this model ({reason})")
    say("memory, GiB: " + ", ".join(f"{part} {size:.3g}" for part, size in gib.items()))
    if accelerator.distributed_type in SHARDED:
        return say("memory: that of a process which holds the whole model; FSDP and ZeRO divide it")
    limit = memory(accelerator.device).limit
    hint = "; docs/memory.md says what helps" if gib["total"] > limit else ""
    say(f"memory: this run needs about {gib['total']:.2f} GiB, and there are {limit:.1f}{hint}")


# --- the memory ---------------------------------------------------------------------------------------------


def moments_bytes(model: nn.Module, optim: str) -> float:
    """Bytes of the optimizer state for the trained parameters."""
    with_one_moment = set(map(id, matrices(model))) if optim == "muon" else set()
    total = 0.0
    for p in model.parameters():
        moments = 1 if id(p) in with_one_moment else 2
        size = p.element_size()
        if optim == "adamw_8bit":  # a byte each, and a scale per 256; small tensors in float32
            size = 1 + 4 / 256 if p.numel() >= 4096 else 4
        if p.requires_grad:
            total += moments * p.numel() * size
    return total


def estimate(
    model: FlatModel,
    lengths: list[int],
    *,
    mixed_precision: str = "no",
    accumulation: int = 1,
    optim: str = "adamw",
    reference: bool = False,
    ddp: bool = False,
    device: torch.device | None = None,
) -> dict[str, float]:
    """Peak memory of a process that trains the whole model, in GiB by part, and the sum as `total`.

    Call it before `accelerator.prepare`, with LoRA and gradient checkpointing already set up. Afterwards the
    model cannot be trained: its gradients, and tensors that its modules keep from a call, are fake.
    lengths: of the examples of a micro-batch, in which every token is trained; accumulation: micro-batches
    per step (all but the first start with gradients); optim: as in --optim; reference: a second, frozen model
    is loaded; ddp: a second copy of the gradients in DistributedDataParallel's buckets; device: where
    training runs (None: where the model is). Raises whatever PyTorch raises if a layer needs numbers to know
    its shapes.
    """
    device = device or next(model.parameters()).device
    half = HALF.get(mixed_precision)
    tensors = [*model.parameters(), *model.buffers()]
    gradients = nbytes(p for p in model.parameters() if p.requires_grad)
    held = _peak(model, _row(model, lengths), half, passes=min(2, accumulation), device=device)
    parts = {
        "weights": nbytes(tensors),
        "gradients": gradients * (2 if ddp else 1),
        "optimizer": moments_bytes(model, optim),
        "activations": max(0, held - gradients),
    }
    if reference:
        parts["reference model"] = nbytes(tensors)
    if device.type == "cpu":
        lost = LOST_OF_ACTIVATIONS * parts["activations"] + LOST_OF_GRADIENTS * parts["gradients"]
        parts["lost by malloc"] = lost
        loaded = nbytes(t for t in tensors if t.device.type == "cpu")
        parts["process"] = max(0.0, memory(device).current * GIB - loaded)
    gib = {name: size / GIB for name, size in parts.items()}
    return gib | {"total": sum(gib.values())}


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors made under it: of those that are alive (`now`), and the most so far
    (`most`). Views of the tensors in `known`, and tensors changed in place, are not new."""

    def __init__(self, known: Iterable[Tensor]):
        super().__init__()
        self.now = 0
        self.most = 0
        self.known = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default and isinstance(args[0], FakeTensor):
            func = _grouped_mm
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._subtract, key, size).atexit = False

    def _subtract(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    """The shape of a product of experts' matrices: PyTorch's own fake kernel refuses float32."""
    if b.dim() == 2:
        return a.new_empty(len(offs), a.shape[0], b.shape[1])
    return a.new_empty(a.shape[0], b.shape[2])


def _row(model: FlatModel, lengths: list[int]) -> Batch:
    """A micro-batch of sequences that share no beginning. lengths: of its examples; one with more tokens than the
    model has positions holds several sequences, as a pair does."""
    vocab_size = model.config.get_text_config().vocab_size
    draw = np.random.default_rng(0)
    example = []
    for n in lengths:
        num_sequences = max(1, math.ceil(n / num_positions(model)))
        for ids in np.array_split(draw.integers(vocab_size, size=n), num_sequences):
            example.append(all_trained(ids))
    return flat_batch([example], next(model.parameters()).device)


def _peak(model: FlatModel, batch: Batch, half: torch.dtype | None, passes: int, device: torch.device) -> int:
    """The most bytes that so many forward and backward passes hold at once beside the weights, gradients
    included."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # Kept until the end: the mode would make each weight anew for each use, and count it as a new tensor.
    weights = [fake.from_tensor(t) for t in (*model.parameters(), *model.buffers())]
    batch = {name: fake.from_tensor(x) if isinstance(x, Tensor) else x for name, x in batch.items()}
    where = next(model.parameters()).device.type
    with _training(model, device), fake, Live(weights) as live:
        for _ in range(passes):
            with torch.autocast(where, half, enabled=half is not None):
                loss = model(batch, nll_weights=batch["loss_mask"]).nll
            loss.backward()
            del loss
    return live.most


@contextlib.contextmanager
def _training(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Training mode, without gradients, and with the LM head's chunks as large as on this device."""
    where = next(model.parameters()).device.type
    with contextlib.ExitStack() as stack:
        for sizes in (fused_head.BLOCK_ELEMENTS, fused_head.HEAD_CHUNK_ROWS, fused_head.ROW_MULTIPLE):
            stack.enter_context(mock.patch.dict(sizes, {where: fused_head.of_device(sizes, device)}))
        elements = {where: fused_head.chunk_rows(device, 1)}
        stack.enter_context(mock.patch.dict(fused_head.HEAD_CHUNK_ELEMENTS, elements))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # the compiler would look for numbers
        model.train().zero_grad(set_to_none=True)
        yield
