"""Log-probabilities under a frozen reference, computed before training and cached on disk."""

import hashlib
import inspect
import json
import os
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from common.args import CommonArgs
from common.collators import flat_batch
from common.data.examples import Examples
from common.errors import say
from common.extras.lora import START, is_trained_part
from common.model.flat_model import FlatModel
from common.model.reference import Reference
from common.processes import gather_lists, whole
import numpy as np
import torch


def scores(args: CommonArgs, reference: Reference, examples: Examples) -> np.ndarray:
    """The log-probability of each sequence, (sequences,) float32, from the cache or computed."""
    accelerator = reference.accelerator
    path = Path(args.dataset_cache_dir, f"ref_logps-{fingerprint(reference, examples, accelerator.mixed_precision)}.npz")
    known = None
    if accelerator.is_main_process and path.exists():
        known = np.load(path)["scores"]
    (known,) = broadcast_object_list([known])  # another node may have another disk
    if known is not None:
        say(f"reference: the scores of {len(examples):,} pairs are in {path}")
        return known
    say(f"reference: scoring {len(examples):,} pairs")
    computed = _score(args, accelerator, reference, examples)
    if accelerator.is_main_process:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with open(temporary, "wb") as file:
            np.savez(file, scores=computed)
        os.replace(temporary, path)
    return computed


def _score(args: CommonArgs, accelerator: Accelerator, reference: Reference, examples: Examples) -> np.ndarray:
    """The log-probability of each sequence, summed over its trained tokens: (sequences,) float32."""
    mine = list(range(accelerator.process_index, len(examples), accelerator.num_processes))
    mine.sort(key=lambda i: int(examples.lengths[i]))  # batches of similar lengths
    found: list[tuple[int, list[float]]] = []
    for start in range(0, len(mine), args.per_device_eval_batch_size):
        members = mine[start : start + args.per_device_eval_batch_size]
        batch = flat_batch([examples[i] for i in members], accelerator.device)
        sums = reference.sums(batch)
        found += zip(members, sums.view(len(members), -1).tolist(), strict=True)
    return np.array([values for _, values in sorted(gather_lists(accelerator, found))], np.float32).flatten()


def fingerprint(reference: Reference, examples: Examples, mixed_precision: str) -> str:
    """A hash of the weights, the settings of the model (and of the adapter it started from), the code of the reference's
    class, tokens and precision: 16 hexadecimal digits. Called on every process.

    reference.model: all weights that it depends on, in a FlatModel or several in an nn.ModuleList.
    """
    model = reference.model
    configs = [m.config.to_json_string(use_diff=False) for m in model.modules() if isinstance(m, FlatModel)]
    adapters = [m.peft_config.get(START) for m in model.modules() if hasattr(m, "peft_config")]
    configs += [str(sorted(vars(adapter).items(), key=lambda item: item[0])) for adapter in adapters if adapter]
    digest = hashlib.sha256(json.dumps([mixed_precision, inspect.getsource(type(reference)), configs]).encode())
    for name, tensor in model.state_dict().items():
        if not is_trained_part(name) and not name.startswith("extra."):  # not part of the reference
            tensor = whole(tensor)
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    if any(hasattr(p, "ds_id") for p in model.parameters()):  # ZeRO-3 keeps the values elsewhere
        digest.update(os.urandom(16))
    for file in examples.files:
        for array in (file.fields["input_ids"], file.fields["loss_mask"], file.starts, file.ends):
            digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()[:16]
