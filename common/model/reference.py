"""The reference of DPO and GRPO: the model as it was at the start, and what it says of all pairs, kept on disk."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.collators import flat_batch
from common.data.examples import Units
from common.errors import say
from common.evaluate import gather_lists
from common.losses import segment_sum
from common.model.flat_model import LogProbModel

import numpy as np
import torch
from torch import Tensor, nn


def reference_of(model: LogProbModel, frozen: LogProbModel | None) -> Callable[..., Tensor]:
    """(batch, temperature) -> log-probabilities (T,) of the model as it was at the start, without gradients.

    frozen: a second model with those weights; None: the model itself with its LoRA adapter off.
    """

    @torch.no_grad()
    def reference(batch: dict[str, Any], temperature: float = 1.0) -> Tensor:
        if frozen is not None:
            return frozen(batch, temperature)
        with model.lm.disable_adapter():
            return model(batch, temperature)

    return reference


def precompute(
    accelerator: Any,
    reference: Callable[..., Tensor],
    weights: nn.Module,
    pairs: Units,
    batch_size: int,
    cache_dir: str,
) -> None:
    """Give every sequence its log-probability under the reference, as the per-sequence field ref_logps.

    weights: the module behind `reference`. Its values, the tokens and the precision are the key of the file in cache_dir.
    Called on every process; each scores its share.
    """
    if not len(pairs):
        return
    path = Path(cache_dir, f"ref_logps-{fingerprint(weights, pairs, accelerator.mixed_precision)}.npy")
    known = [np.load(path) if accelerator.is_main_process and path.exists() else None]
    if accelerator.num_processes > 1:  # another node may have another disk
        torch.distributed.broadcast_object_list(known)
    if known[0] is not None:
        say(f"reference: the scores of {len(pairs):,} pairs are in {path}")
        pairs.add_field("ref_logps", known[0])
        return
    say(f"reference: scoring {len(pairs):,} pairs")
    ours = list(range(accelerator.process_index, len(pairs), accelerator.num_processes))
    ours.sort(key=lambda i: int(pairs.lengths[i]))  # batches of like size
    found = []
    for at in range(0, len(ours), batch_size):
        batch = flat_batch([pairs[i] for i in ours[at : at + batch_size]], accelerator.device)
        with accelerator.autocast():
            found += segment_sum(reference(batch), batch["cu_seqlens"]).view(-1, 2).tolist()
    scores = np.array(
        [both for _, both in sorted(gather_lists(accelerator, list(zip(ours, found, strict=True))))], np.float32
    )
    if accelerator.is_main_process:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with open(temporary, "wb") as file:
            np.save(file, scores.flatten())
        os.replace(temporary, path)
    pairs.add_field("ref_logps", scores.flatten())


def fingerprint(weights: nn.Module, pairs: Units, mixed_precision: str) -> str:
    """A hash of everything that the scores depend on: 16 hexadecimal digits. Called on every process."""
    digest = hashlib.sha256(mixed_precision.encode())
    for name, tensor in weights.state_dict().items():
        if "lora_" not in name:  # off in the reference
            tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    if any(hasattr(p, "ds_id") for p in weights.parameters()):  # ZeRO-3 keeps the values elsewhere
        digest.update(os.urandom(16))
    for file in pairs.files:
        for array in (file.ids, file.mask, file.starts, file.ends):
            if array is not None:
                digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()[:16]
