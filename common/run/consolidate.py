"""Turning shards (of a checkpoint, or of a run that ends) into one model folder for from_pretrained, and writing the
unsharded files of a sharded checkpoint. No process holds more than a few tensors and one model file at a time."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from common.args import CommonArgs
from common.data.types import Tokenizer
from common.model.checks import hub_errors
from common.model.save import EXTRA, model_writer, save_model
from common.model.shards import RECORD, empty_model, write_frame
from common.run.folder import CARD, read_json
from common.run.sharded import gather_adapter, gather_in_file, read_in_file

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

# A checkpoint's files other than the model.
OURS = ("optimizer.pt", "trainer_state.json", "manifest.json", "args.yaml", RECORD)
GATHERED = ".export.weights.tmp"
FILE_SIZE = 4 * 10**9  # bytes per model file


def frame_writer(accelerator: Accelerator, model: nn.Module, tokenizer: Tokenizer) -> Callable[[Path], None]:
    """A function that writes the part of a sharded checkpoint outside the shards: everything but the weights, or the
    adapter. Called on every process."""
    wrapper = accelerator.unwrap_model(model, keep_torch_compile=False)
    if hasattr(wrapper.lm, "peft_config"):
        sharded = accelerator.distributed_type == DistributedType.FSDP
        return model_writer(accelerator, model, tokenizer, gather_adapter(accelerator, wrapper) if sharded else None)

    def write(folder: Path) -> None:
        write_frame(wrapper.lm, wrapper.padded, folder)
        tokenizer.save_pretrained(folder)

    return write


def final_writer(
    args: CommonArgs,
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: Tokenizer,
    merged: dict[str, torch.Tensor] | None = None,
) -> Callable[[Path], None]:
    """A function that writes the current model (see model_writer); with --sharded_checkpoints it is gathered on disk."""
    wrapper = accelerator.unwrap_model(model, keep_torch_compile=False)
    if merged is not None or accelerator.distributed_type != DistributedType.FSDP or not args.sharded_checkpoints:
        return model_writer(accelerator, model, tokenizer, merged)
    if hasattr(wrapper.lm, "peft_config"):
        return frame_writer(accelerator, model, tokenizer)
    file, problem = Path(args.output_dir, GATHERED), None
    try:
        gather_in_file(accelerator, wrapper, file)
    except OSError as error:
        problem = error

    def write(folder: Path) -> None:
        if problem is not None:
            raise problem
        _write_model(wrapper.lm, file, folder)
        tokenizer.save_pretrained(folder)

    return write


def model_copier(checkpoint: Path) -> Callable[[Path], None]:
    """A function that copies the model (with its own code, if any) and the tokenizer out of a checkpoint."""

    def write(folder: Path) -> None:
        ours = (*OURS, CARD, "inputs.json", read_json(checkpoint / "inputs.json").get("script"))
        for path in checkpoint.iterdir():
            if path.is_file() and path.name not in ours:
                shutil.copy(path, folder)

    return write


def consolidate(checkpoint: Path, folder: Path, *, trust_remote_code: bool = False) -> None:
    """Write the model of a sharded checkpoint to a folder for from_pretrained, with the files beside it.

    Runs on one process and temporarily needs twice the weights' size on disk. Raises UserError if shards cannot be read.
    """
    with hub_errors("sharded checkpoint", str(checkpoint)):
        lm = empty_model(checkpoint, trust_remote_code=trust_remote_code)
    file = folder / GATHERED
    read_in_file(checkpoint, file)
    _write_model(lm, file, folder)
    file.unlink()
    model_copier(checkpoint)(folder)


def _write_model(lm: nn.Module, file: Path, folder: Path) -> None:
    """Write the model whose weights are in a safetensors file under their names in the FlatModel. The file is memory-mapped,
    so the system can reclaim what has been read.

    Where transformers' files use other names or shapes (experts), save_pretrained holds everything it is given, so it is
    given a few layers at a time.
    """
    tensors = load_file(file)
    parts = _parts({name.removeprefix("lm."): tensor for name, tensor in tensors.items() if name.startswith("lm.")})
    if extra := {name.removeprefix("extra."): tensor for name, tensor in tensors.items() if name.startswith("extra.")}:
        save_file(extra, folder / EXTRA)
    if len(parts) == 1:
        save_model(lm, folder, parts[0])
        return
    places, size, part = {}, 0, folder / "part"
    for number, weights in enumerate(parts, start=1):
        save_model(lm, part, weights)
        (part / "model.safetensors").rename(part / f"model-{number:05}-of-{len(parts):05}.safetensors")
        for path in part.glob("model*.safetensors"):
            with safe_open(path, "pt") as opened:
                places |= dict.fromkeys(opened.keys(), path.name)
        size += sum(tensor.nbytes for tensor in weights.values())
        for path in part.iterdir():
            path.replace(folder / path.name)
    part.rmdir()
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _parts(weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Split the weights into parts of about FILE_SIZE, keeping each layer together."""
    layers: dict[str, list[str]] = {}
    for name in weights:
        layer = re.match(r".*?\.\d+\.", name)
        layers.setdefault(layer[0] if layer else name, []).append(name)
    parts: list[dict[str, torch.Tensor]] = [{}]
    for names in layers.values():
        if parts[-1] and sum(weights[name].nbytes for name in (*parts[-1], *names)) > FILE_SIZE:
            parts.append({})
        parts[-1] |= {name: weights[name] for name in names}
    return parts
