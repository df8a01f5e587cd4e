"""The reference of DPO and GRPO: the model as it was at the start, and its log-probabilities, cached on disk."""

import hashlib
import inspect
import json
import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from common.args import CommonArgs
from common.collators import Batch, flat_batch
from common.data.examples import Examples
from common.data.order import Shuffled
from common.data.types import Tokenizer
from common.errors import say
from common.losses import segment_sum
from common.model.flat_model import FlatModel, Output
from common.model.load import align, load_pretrained
from common.model.lora import START, at_start, is_trained_part
from common.processes import gather_lists
import numpy as np
import torch
from torch import Tensor


class Reference:
    """A frozen model, such as the policy as it was at the start. Called like a FlatModel, without gradients and under the
    run's autocast."""

    def __init__(self, accelerator: Accelerator, model: FlatModel, *, without_adapter: bool = False):
        """model: a frozen one; with without_adapter, the trained model, used here with its LoRA adapter off, or with the
        adapter that the run started from."""
        self.accelerator, self.model, self.without_adapter = accelerator, model, without_adapter

    @torch.no_grad()
    def __call__(self, batch: Batch, **options: Any) -> Output:
        with self.accelerator.autocast():
            if not self.without_adapter:
                return self.model(batch, **options)
            with at_start(self.model.lm):
                return self.model(batch, **options)

    def sums(self, batch: Batch) -> Tensor:
        """The log-probability of each sequence, summed over its trained tokens: (S,), without gradient."""
        return segment_sum(self(batch).logps, batch["cu_seqlens"]) if self.model is not None else batch["ref_logps"]

    def precompute(self, args: CommonArgs, *data: Shuffled | Examples) -> None:
        """Give each sequence its log-probability under the reference, as the field ref_logps. Then drop the model: only
        `sums` can be used afterwards.

        data: Examples, or the training data made from them (its `data`). Called on every process; each scores a share. The
        scores are cached in args.dataset_cache_dir, in a file named by a hash of everything they depend on.
        """
        for examples in data:
            examples = getattr(examples, "data", examples)
            if len(examples):
                examples.add_field("ref_logps", _scores(args, self, examples))
        self.model = None


def load_reference(args: CommonArgs, accelerator: Accelerator, model: torch.nn.Module, tokenizer: Tokenizer) -> Reference:
    """A second model with the weights of args.model_name_or_path; with LoRA none, but the trained model without its adapter,
    or with the one it started from.

    model: the trained one, as `run.prepare` returned it.
    """
    if args.use_peft:
        return Reference(accelerator, accelerator.unwrap_model(model), without_adapter=True)
    return load_frozen(args, accelerator, tokenizer, args.model_name_or_path)


def load_frozen(args: CommonArgs, accelerator: Accelerator, tokenizer: Tokenizer, name: str) -> Reference:
    """A second, frozen model beside the trained one, by its name or folder: another reference, or a teacher."""
    frozen = load_pretrained(args, name, len(tokenizer), device=accelerator.device).to(accelerator.device)
    align(frozen)
    return Reference(accelerator, frozen.eval())


def _scores(args: CommonArgs, reference: Reference, examples: Examples) -> np.ndarray:
    """The log-probability of each sequence, (sequences,) float32, from the cache or computed."""
    accelerator = reference.accelerator
    path = Path(args.dataset_cache_dir, f"ref_logps-{fingerprint(reference, examples, accelerator.mixed_precision)}.npz")
    known = None
    if accelerator.is_main_process and path.exists():
        known = np.load(path)["scores"]
    (scores,) = broadcast_object_list([known])  # another node may have another disk
    if scores is not None:
        say(f"reference: the scores of {len(examples):,} pairs are in {path}")
        return scores
    say(f"reference: scoring {len(examples):,} pairs")
    scores = _score(args, accelerator, reference, examples)
    if accelerator.is_main_process:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with open(temporary, "wb") as file:
            np.savez(file, scores=scores)
        os.replace(temporary, path)
    return scores


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
            tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    if any(hasattr(p, "ds_id") for p in model.parameters()):  # ZeRO-3 keeps the values elsewhere
        digest.update(os.urandom(16))
    for file in examples.files:
        for array in (file.ids, file.mask, file.starts, file.ends):
            if array is not None:
                digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()[:16]
