"""The memory that training needs: a forward and a backward pass at the run's true size, on tensors without numbers.

PyTorch's fake tensors have a shape and a dtype but no memory, so nothing is allocated and nothing extrapolated. The bytes of
the tensors that live at once are counted as they come and go; what kernels take inside a call is not.
"""

from collections.abc import Iterable, Iterator
import contextlib
import math
from typing import Any
from unittest import mock
import weakref

from accelerate import Accelerator
from common.collators import Batch, flat_batch
from common.extras import extra
from common.memory import GIB, memory, tokens_at_once
from common.model.flat_model import FlatModel, base_lm, is_quantised
from common.model.fused_head import BLOCK_ELEMENTS, COMPILED_FROM, HEAD_CHUNK_ELEMENTS, HEAD_CHUNK_ROWS, ROW_MULTIPLE
from common.model.lm_head import weighted_nll
from common.model.optimizer import moments_bytes
import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HALF = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}  # Accelerate's names
# Of gradients and activations, on a CPU: space between live tensors that malloc cannot use again. With it, models of 0.4M
# and 100M parameters peaked at 1.00 to 1.09 times the estimate in three steps (tests/run/test_estimate.py, slow).
LOST_BY_MALLOC = 0.5


def estimate(
    model: FlatModel,
    lengths: list[int],
    trained_share: float = 1.0,
    *,
    mixed_precision: str = "no",
    accumulation: int = 1,
    optim: str = "adamw",
    reference: bool = False,
    ddp: bool = False,
    device: torch.device | None = None,
) -> dict[str, float]:
    """Peak memory of a process that trains the whole model, in GiB by part, and the sum as `total`.

    Call it before `accelerator.prepare`, with LoRA and gradient checkpointing already set up. The model is left unchanged.
    lengths: of the sequences of a micro-batch; trained_share: of their tokens; accumulation: micro-batches per step (all but
    the first start with gradients); optim: as in --optim; reference: a second, frozen model is loaded; ddp: a second copy of
    the gradients in DistributedDataParallel's buckets; device: where training runs (None: where the model is). Raises
    whatever PyTorch raises if a layer needs numbers to know its shapes.
    """
    device, half = device or next(model.parameters()).device, HALF.get(mixed_precision)
    tensors = [*model.parameters(), *model.buffers(), *(extra("quantised").scales(model) if is_quantised(model.lm) else [])]
    gradients = nbytes(p for p in model.parameters() if p.requires_grad)
    held = _peak(model, _row(model, lengths, trained_share), half, passes=min(2, accumulation), device=device)
    parts = {
        "weights": nbytes(tensors),
        "gradients": gradients * (2 if ddp else 1),
        "optimizer": moments_bytes(model, optim),
        "activations": max(0, held - gradients),
    }
    if reference:
        parts["reference model"] = nbytes(tensors)
    if device.type == "cpu":
        parts["lost by malloc"] = LOST_BY_MALLOC * (parts["gradients"] + parts["activations"])
        parts["process"] = max(0.0, memory(device).current * GIB - nbytes(t for t in tensors if t.device.type == "cpu"))
    parts = {name: size / GIB for name, size in parts.items()}
    return parts | {"total": sum(parts.values())}


def estimate_run(
    accelerator: Accelerator, model: FlatModel, lengths: list[int], trained_share: float, **options: Any
) -> dict[str, float]:
    """`estimate` for micro-batches of these lengths, with this Accelerator's settings."""
    pieces = max(1, int(sum(lengths) / tokens_at_once(accelerator, model)))
    size = math.ceil(len(lengths) / pieces)  # sequences in each part
    return estimate(
        model,
        max((lengths[i : i + size] for i in range(0, len(lengths), size)), key=sum),
        trained_share,
        mixed_precision=accelerator.mixed_precision,
        accumulation=pieces * accelerator.gradient_accumulation_steps,
        ddp=accelerator.num_processes > 1,
        device=accelerator.device,
        **options,
    )


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors made under it, those that are alive (`now`) and the most there were (`most`). Views of
    the tensors in `known`, and tensors changed in place, are nothing new."""

    def __init__(self, known: Iterable[Tensor] = ()):
        super().__init__()
        self.now = self.most = 0
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
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key, size).atexit = False

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    """The shape of a product of experts' matrices: PyTorch's own fake kernel refuses float32."""
    return a.new_empty(len(offs), a.shape[0], b.shape[1]) if b.dim() == 2 else a.new_empty(a.shape[0], b.shape[2])


def _row(model: FlatModel, lengths: list[int], trained_share: float) -> Batch:
    """A micro-batch of sequences that share no beginning and whose last tokens are trained."""
    V, draw = model.config.get_text_config().vocab_size, np.random.default_rng(0)
    masks = [(np.arange(n) >= n - round(trained_share * n)).astype(np.uint8) for n in lengths]
    rows = [{"input_ids": draw.integers(V, size=len(mask)), "loss_mask": mask} for mask in masks]
    return flat_batch([rows], next(model.parameters()).device)


def _peak(model: FlatModel, batch: Batch, half: torch.dtype | None, passes: int, device: torch.device) -> int:
    """The most bytes that so many forward and backward passes hold at once beside the weights, gradients included."""
    kind, fake = next(model.parameters()).device.type, FakeTensorMode(allow_non_fake_inputs=True)
    # Kept until the end: the mode would make each weight anew for each use, and count it as a new tensor.
    weights = [fake.from_tensor(t) for t in (*model.parameters(), *model.buffers())]
    batch = {name: fake.from_tensor(x) if isinstance(x, Tensor) else x for name, x in batch.items()}
    with _training(model, device), fake, Live(weights) as live:
        for _ in range(passes):
            with torch.autocast(kind, half, enabled=half is not None):
                hidden, tokens = model.predicting(batch), batch["input_ids"][0, batch["targets"]]
                loss, _ = weighted_nll(base_lm(model.lm), hidden, tokens, batch["loss_mask"][batch["targets"]])
            del hidden
            loss.backward()
            del loss
    return live.most


@contextlib.contextmanager
def _training(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Training mode, without gradients, and with the LM head's chunks as large as on this device. Afterwards gradients, and
    all that modules note while they are called, are as before: they may be fake tensors."""
    gradients = [(p, p.grad) for p in model.parameters()]
    noted = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    here = next(model.parameters()).device.type
    with contextlib.ExitStack() as stack:
        for sizes in (BLOCK_ELEMENTS, HEAD_CHUNK_ELEMENTS, HEAD_CHUNK_ROWS, ROW_MULTIPLE):
            stack.enter_context(mock.patch.dict(sizes, {here: sizes.get(device.type, sizes["cpu"])}))
        stack.enter_context(mock.patch.dict(COMPILED_FROM, {here: 2**62}))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng([]))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # the compiler would skip this code from then on
        model.train().zero_grad(set_to_none=True)
        try:
            yield
        finally:
            for module, attributes, buffers in noted:
                vars(module).clear()
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)
            for p, gradient in gradients:
                p.grad = gradient
