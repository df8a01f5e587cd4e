"""One model folder, as from_pretrained reads it, of shards: of a checkpoint, or of a run that ends. And what a sharded
checkpoint has of such a folder. No process holds more than a few tensors, and one file of a model, at a time."""

import shutil
from collections.abc import Callable
from pathlib import Path

from common.args import CommonArgs
from common.data.types import Tokenizer
from common.model.checks import hub_errors
from common.model.save import EXTRA, model_writer, save_model
from common.model.shards import RECORD, empty_model, write_frame
from common.run.inputs import FILE
from common.run.output_dir import CARD, GATHERED
from common.run.sharded import gather_adapter, gather_in_file, read_in_file

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch import nn

# What a checkpoint has beside the model.
OURS = ("optimizer.pt", "trainer_state.json", "manifest.json", "args.yaml", FILE, RECORD)
FILE_SIZE = "4GB"  # of a file of the model


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
    """What copies the model and tokenizer out of a checkpoint."""

    def write(folder: Path) -> None:
        for path in checkpoint.iterdir():
            if path.is_file() and path.name not in (*OURS, CARD) and path.suffix != ".py":
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
    is read of the file lies in memory that the system may take back."""
    tensors = load_file(file)
    weights = {name.removeprefix("lm."): tensor for name, tensor in tensors.items() if name.startswith("lm.")}
    save_model(lm, folder, weights, FILE_SIZE)
    if extra := {name.removeprefix("extra."): tensor for name, tensor in tensors.items() if name.startswith("extra.")}:
        save_file(extra, folder / EXTRA)
