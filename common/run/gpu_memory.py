"""What training holds on GPUs that a probe on the CPU does not show: attention's workspace, and what FSDP2 gathers."""

from common.memory import SHARDED
from common.model.flat_model import FlatModel, size_of_all_layers

import torch
from accelerate import Accelerator
from torch import Tensor, nn


def processes_of_a_copy(accelerator: Accelerator) -> int:
    """Processes that share one copy of weights, gradients and optimizer state: all of them under FSDP2 and ZeRO, under HSDP
    (Accelerate's parallelism_config) those of a copy; else 1."""
    if accelerator.distributed_type not in SHARDED:
        return 1
    sizes = getattr(accelerator, "parallelism_config", None)
    copies = sizes.dp_replicate_size if sizes is not None else 1
    return accelerator.num_processes // copies


def varlen_workspace(model: FlatModel, lengths: list[int], autocast: torch.dtype | None) -> int:
    """Bytes that the backward pass of varlen_attn takes in a layer, beside inputs, outputs and their gradients; 0 where that
    kernel is not used.

    lengths: of the sequences of the row, T tokens and S sequences. FlashAttention 2 in PyTorch (mha_varlen_bwd in
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp) allocates, in float32, sums of dQ, (T + 128 S, H, Dh
    rounded up to 32, above 128 to 64), and the row sums of dO · O, (H, T + 128 S); and where heads share keys, dK and dV of
    each query head, (T, H, Dh) twice in 16 bits.
    """
    config = model.config.get_text_config()
    H, shared, hidden = (
        size_of_all_layers(config, name) for name in ("num_attention_heads", "num_key_value_heads", "hidden_size")
    )
    head_dim = size_of_all_layers(config, "head_dim") or hidden // max(H, 1)
    dtype = autocast or next(model.parameters()).dtype
    if model.padded or dtype.itemsize != 2 or not H or head_dim not in range(8, 257, 8):
        return 0
    T, S, step = sum(lengths), len(lengths), 32 if head_dim <= 128 else 64
    sums = 4 * (T + 128 * S) * H * (-(-head_dim // step) * step + 1)
    return sums + (2 * T * H * head_dim * dtype.itemsize if shared not in (0, H) else 0)


def whole_gradients(trained: list[Tensor], autocast: torch.dtype | None) -> int:
    """Bytes of the gradients that FSDP2 keeps on each process from one micro-batch of a window to the next.

    Without synchronisation (Accelerate's no_sync) FSDPParamGroup.post_backward reduces nothing: it keeps them whole, in the
    dtype of the reduction (FSDPParam.to_accumulated_grad_if_needed), which is float32 with mixed precision here.
    """
    return sum(p.numel() * (4 if autocast else p.element_size()) for p in trained)


def gathered_layers(model: FlatModel, blocks: list[nn.Module], autocast: torch.dtype | None) -> int:
    """Bytes that FSDP2 gathers at once: what lies outside the blocks, for good; the block at work, the next one; and of one
    the whole gradients, beside the buffer from which they are shared out (foreach_reduce)."""

    def size(parameters: list[Tensor]) -> int:
        cast = [autocast if autocast and p.is_floating_point() else p.dtype for p in parameters]
        return sum(p.numel() * dtype.itemsize for p, dtype in zip(parameters, cast, strict=True))

    parts = [list(block.parameters()) for block in blocks]
    outside = size(list(model.parameters())) - sum(size(part) for part in parts)
    at_work = 0
    for part in parts:
        trained = [p for p in part if p.requires_grad]
        at_work = max(at_work, 2 * size(part) + size(trained) + whole_gradients(trained, autocast))
    return outside + at_work
