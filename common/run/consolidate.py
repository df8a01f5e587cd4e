"""One model folder, as from_pretrained reads it, of shards: of a checkpoint, or of a run that ends. And what a sharded
checkpoint has of such a folder. No process holds more than a few tensors, and one file of a model, at a time."""

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
from common.run.inputs import kept_in
from common.run.output_dir import CARD, GATHERED
from common.run.sharded import gather_adapter, gather_in_file, read_in_file

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

# What a checkpoint has beside the model.
OURS = ("optimizer.pt", "trainer_state.json", "manifest.json", "args.yaml", RECORD)
FILE_SIZE = 4 * 10**9  # bytes of a file of the model


def frame_writer(accelerator: Accelerator, model: nn.Module, tokenizer: Tokenizer) -> Callable[[Path], None]:
    """What writes that part of a sharded checkpoint that is not in the shards: all but the weights, or the adapter. Called
    on every process."""
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
    """What writes the present model (see model_writer), with --sharded_checkpoints gathered in a file on the disk."""
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
    """What copies the model, with code of its own if it has some, and the tokenizer out of a checkpoint."""

    def write(folder: Path) -> None:
        ours = (*OURS, CARD, *kept_in(checkpoint))
        for path in checkpoint.iterdir():
            if path.is_file() and path.name not in ours:
                shutil.copy(path, folder)

    return write


def consolidate(checkpoint: Path, folder: Path, *, trust_remote_code: bool = False) -> None:
    """Write the model of a sharded checkpoint to a folder as from_pretrained reads it, with what lies beside it.

    By one process; on the disk it takes the weights twice while it lasts. Raises UserError where shards cannot be read.
    """
    with hub_errors("sharded checkpoint", str(checkpoint)):
        lm = empty_model(checkpoint, trust_remote_code=trust_remote_code)
    file = folder / GATHERED
    read_in_file(checkpoint, file)
    _write_model(lm, file, folder)
    file.unlink()
    model_copier(checkpoint)(folder)


def _write_model(lm: nn.Module, file: Path, folder: Path) -> None:
    """Write the model whose weights are in a safetensors file, by their names in the FlatModel. They stay on the disk: what
    is read of the file lies in memory that the system may take back.

    Where transformers names or shapes them otherwise in its files (experts), it holds all that it is given: so it is given
    a few layers at a time.
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
    """The weights in parts of about FILE_SIZE, those of a layer together."""
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
