"""Memory on GPUs that a probe on the CPU cannot measure: attention's workspace, and the model state that processes shard,
gather and keep whole."""

from typing import Any, NamedTuple

from common.memory import SHARDED
from common.model.flat_model import FlatModel, size_of_all_layers

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

BUCKET = 500_000_000  # default of DeepSpeed's reduce_bucket_size, in elements
LIVE = 1_000_000_000  # default of stage3_max_live_parameters


class Kept(NamedTuple):
    """Bytes that one process keeps of the trained model."""

    weights: float
    gradients: float  # from one micro-batch to the next
    optimizer: float
    stepping: float = 0.0  # in addition, during the optimizer step


def sharing(accelerator: Accelerator) -> dict[str, Any]:
    """How processes shard a model, as keyword arguments of `estimate`: shards, fsdp, reshard, zero, bucket."""
    kind, found = accelerator.distributed_type, {"shards": processes_of_a_copy(accelerator)}
    if kind == DistributedType.FSDP:
        return found | {"fsdp": True, "reshard": bool(accelerator.state.fsdp_plugin.reshard_after_forward)}
    if kind == DistributedType.DEEPSPEED:
        plugin = accelerator.state.deepspeed_plugin
        bucket = plugin.deepspeed_config.get("zero_optimization", {}).get("reduce_bucket_size")
        found |= {"zero": plugin.zero_stage or 1, "bucket": int(bucket) if isinstance(bucket, int | float) else BUCKET}
        return found if plugin.zero_stage else found | {"shards": 1}  # stage 0 shards nothing
    return found


def kept(
    model: nn.Module, weights: float, moments: float, autocast: torch.dtype | None, *, shards: int, fsdp: bool, zero: int
) -> Kept:
    """weights, moments: bytes of the whole model, and of AdamW's moments in the dtype of the weights.

    FSDP2 and ZeRO-3 shard weights, gradients and optimizer state, ZeRO-2 the last two, ZeRO-1 the last. With mixed precision
    Accelerate casts trained weights to float32 for FSDP2 (fsdp2_prepare_model), and DeepSpeed's engine casts all weights to
    16 bits. ZeRO's optimizer holds a float32 copy of its share of the weights (single_partition_of_fp32_groups,
    fp32_partitioned_groups_flat) besides AdamW's moments, and during a step their gradients: counted on two CPU processes
    (deepspeed 0.19.8).
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    size, numbers = sum(p.numel() * p.element_size() for p in trained), sum(p.numel() for p in trained)
    if zero:
        low = autocast.itemsize if autocast else 4
        weights += sum(p.numel() * (low - p.element_size()) for p in model.parameters() if p.is_floating_point())
        weights, gradients = weights / (shards if zero == 3 else 1), low * numbers / (shards if zero >= 2 else 1)
        return Kept(weights, gradients, 12 * numbers / shards, 4 * numbers / shards)
    if fsdp and autocast:
        weights, moments, size = weights + 4 * numbers - size, moments * 4 * numbers / max(size, 1), 4 * numbers
    return Kept(weights / shards, size / shards, moments / shards)


def processes_of_a_copy(accelerator: Accelerator) -> int:
    """Processes that share one copy of weights, gradients and optimizer state: all of them under FSDP2 and ZeRO, the shard
    group under HSDP (Accelerate's parallelism_config), else 1."""
    if accelerator.distributed_type not in SHARDED:
        return 1
    sizes = getattr(accelerator, "parallelism_config", None)
    copies = sizes.dp_replicate_size if sizes is not None else 1
    return accelerator.num_processes // copies


def varlen_workspace(model: FlatModel, lengths: list[int], autocast: torch.dtype | None) -> int:
    """Bytes that the backward pass of varlen_attn allocates per layer besides inputs, outputs and their gradients; 0 if that
    kernel is not used.

    lengths: of the row's sequences, S sequences with T tokens in total. FlashAttention 2 in PyTorch (mha_varlen_bwd in
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp) allocates, in float32, sums of dQ, (T + 128 S, H, Dh
    rounded up to a multiple of 32, above 128 of 64), and the row sums of dO · O, (H, T + 128 S); and if heads share keys, dK
    and dV for each query head, twice (T, H, Dh) in 16 bits.
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
    """Bytes of the gradients that FSDP2 keeps on each process between the micro-batches of a window.

    Without synchronisation (Accelerate's no_sync) FSDPParamGroup.post_backward does not reduce gradients: it keeps them
    whole, in the reduction's dtype (FSDPParam.to_accumulated_grad_if_needed), which is float32 with mixed precision here.
    """
    return sum(p.numel() * (4 if autocast else p.element_size()) for p in trained)


def gathered_layers(
    model: FlatModel, blocks: list[nn.Module], autocast: torch.dtype | None, reshard: bool = True, zero: int = 0
) -> int:
    """Bytes that FSDP2 gathers at once: everything outside the blocks, permanently; the current block and the next one
    (without reshard_after_forward all blocks, each until its backward pass); and one block's whole gradients with the buffer
    they are reduced from (foreach_reduce). ZeRO-3 keeps up to LIVE elements that it will use again."""

    def size(parameters: list[Tensor]) -> int:
        cast = [autocast if autocast and p.is_floating_point() else p.dtype for p in parameters]
        return sum(p.numel() * dtype.itemsize for p, dtype in zip(parameters, cast, strict=True))

    if zero == 3:
        numbers = sum(p.numel() for p in model.parameters())
        return round(size(list(model.parameters())) * min(1.0, LIVE / max(numbers, 1)))
    parts = [list(block.parameters()) for block in blocks]
    outside = size(list(model.parameters())) - sum(size(part) for part in parts)
    at_work = 0
    for part in parts:
        trained = [p for p in part if p.requires_grad]
        at_work = max(at_work, 2 * size(part) * reshard + size(trained) + whole_gradients(trained, autocast))
    return outside + at_work + (0 if reshard else sum(size(part) for part in parts))
