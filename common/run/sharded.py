"""Sharded checkpoints (--sharded_checkpoints): each process writes and reads its own part, using
torch.distributed.checkpoint.

No process holds more of the model than its part and one tensor. Names are those of the FlatModel's state dict, independent
of the number of processes: a checkpoint of 2 processes can be read by 4, or by one. With LoRA the shards hold only the
optimizer; the adapter, which is small, is saved beside them for from_pretrained.
"""

import contextlib
import json
import math
import socket
import struct
import uuid
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.args import CommonArgs
from common.errors import UserError
from common.model.flat_model import FlatModel
from common.model.shards import FOLDER, MODEL, OPTIMIZER, holds_shards, read_metadata
from common.processes import gather_lists

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # prefixes that Accelerate's config may add to names
AT_ONCE = 2**26  # elements read at once when a checkpoint is turned into a model folder
NUMBER = "#"  # suffix of names in the optimizer's state that are not tensors
# The dtype names of safetensors: https://huggingface.co/docs/safetensors
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def check_sharded(args: CommonArgs, accelerator: Accelerator) -> None:
    """Raise UserError if --sharded_checkpoints is not possible. Called on every process, once the output folder exists."""
    if not args.sharded_checkpoints:
        return
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise UserError("--sharded_checkpoints: not with DeepSpeed, whose checkpoints have a form of their own: FSDP2")
    if args.push_to_hub and args.hub_strategy == "every_save" and not args.use_peft:
        raise UserError("--hub_strategy every_save sends checkpoints, which --sharded_checkpoints leaves in shards: end")
    if accelerator.num_processes > 1 and not args.dry_run:
        check_shared(accelerator, Path(args.output_dir), "--sharded_checkpoints: every process writes to --output_dir")


def check_shared(accelerator: Accelerator, folder: Path, why: str) -> None:
    """Raise UserError if a process does not see the main process's files in a folder. Called on every process."""
    name = broadcast_object_list([f".shared-{uuid.uuid4().hex}"])[0]
    if accelerator.is_main_process:
        (folder / name).touch()
    accelerator.wait_for_everyone()
    blind = [] if (folder / name).exists() else [(accelerator.process_index, socket.gethostname())]
    blind = gather_lists(accelerator, blind)
    if accelerator.is_main_process:
        (folder / name).unlink(missing_ok=True)
    if blind:
        process, host = blind[0]
        raise UserError(
            f"{why}, and process {process} on {host} does not see in {folder} what the main process writes there: "
            "it has to be on a disk that all machines share"
        )


# --- saving and loading ---------------------------------------------------------------------------------------------


def save_shards(model: FlatModel, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Write the weights (except for a model with an adapter) and the optimizer's state. Called on every process; a failure
    of one, such as a full disk, raises on all."""
    import torch.distributed.checkpoint as dcp

    weights = _weights(model)
    state = {} if hasattr(model.lm, "peft_config") else weights
    names = {id(p): name for name, p in _named_parameters(model)}
    for p, values in optimizer.state.items():
        for kind, value in values.items():
            key = f"{OPTIMIZER}{kind}.{names[id(p)]}"
            state |= {key: value} if isinstance(value, Tensor) else {key + NUMBER: torch.tensor(value)}
    with _errors_of_one():
        writer = dcp.FileSystemWriter(checkpoint / FOLDER)  # one flushed file per process
        dcp.save(state, storage_writer=writer, no_dist=not torch.distributed.is_initialized())


def load_shards(model: FlatModel, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Load the weights (if the shards have them) and the optimizer's state in place. Called on every process; their number
    may differ from that of the save. Nothing in the files is executed."""
    known = read_metadata(checkpoint).state_dict_metadata
    weights, state = _weights(model), {}
    if holds_shards(checkpoint):
        state = dict(weights)
        saved = {name: tuple(entry.size) for name, entry in known.items() if name.startswith(MODEL)}
        ours = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if differing := sorted(name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name)):
            name = differing[0]
            raise UserError(
                f"{checkpoint / FOLDER} is of another model: {name} is {saved.get(name, 'not there')}, "
                f"and would be {ours.get(name, 'left over')} in this one"
            )
    parameters = dict(_named_parameters(model))
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    places: list[tuple[nn.Parameter, str, str]] = []
    for key, entry in known.items():
        if not key.startswith(OPTIMIZER):
            continue
        kind, name = key.removeprefix(OPTIMIZER).split(".", 1)
        p = parameters.get(name.removesuffix(NUMBER))
        if p is None or id(p) not in groups:
            raise UserError(f"{checkpoint / FOLDER} is of another run: it has moments of {name}, which is not trained here")
        dtype = entry.properties.dtype
        if entry.size == p.shape and p.dim() > 0 and kind != "step":
            state[key] = torch.empty_like(p.detach(), dtype=dtype)  # sharded like the parameter
        else:  # step counts are kept where torch's optimizers expect them
            host = kind == "step" and not (groups[id(p)].get("fused") or groups[id(p)].get("capturable"))
            state[key] = torch.empty(entry.size, dtype=dtype, device="cpu" if host or name.endswith(NUMBER) else p.device)
        places.append((p, kind, key))
    _read(checkpoint, state)
    optimizer.state.clear()
    for p, kind, key in places:
        optimizer.state[p][kind] = state[key].item() if key.endswith(NUMBER) else state[key]


def _read(checkpoint: Path, state: dict[str, Any], alone: "Metadata | None" = None) -> None:
    """Fill the tensors of `state` from the shards. Called on every process, or with `alone`, the index, by a single one.
    Raises UserError if that fails."""
    import torch.distributed.checkpoint as dcp

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:  # torch's would execute code from the file
            found = alone or read_metadata(checkpoint)
            found.storage_meta.load_id = self.load_id
            return found

    try:
        with _errors_of_one():
            reader = Reader(checkpoint / FOLDER)
            dcp.load(state, storage_reader=reader, no_dist=alone is not None or not torch.distributed.is_initialized())
    except Exception as error:  # a missing or damaged file
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(f"{checkpoint / FOLDER} cannot be read: {reason}") from None


@contextlib.contextmanager
def _errors_of_one() -> Iterator[None]:
    """Context that raises the first process's error instead of torch.distributed.checkpoint's collection of all errors."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # single process
            yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise first from None


def _canonical(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _named_parameters(model: FlatModel) -> list[tuple[str, nn.Parameter]]:
    """Each parameter once. Call it after `state_dict`, which makes FSDP2 reshard what it has gathered."""
    return [(_canonical(name), p) for name, p in model.named_parameters()]


def _weights(model: FlatModel) -> dict[str, Tensor]:
    """The state dict under the shards' names, with each tied weight once."""
    state = model.state_dict()
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - dict(model.named_parameters()).keys()
    return {MODEL + _canonical(name): tensor.detach() for name, tensor in state.items() if name not in tied}


# --- in one file ----------------------------------------------------------------------------------------------------


def gather_adapter(accelerator: Accelerator, model: FlatModel) -> dict[str, Tensor]:
    """The trained weights of a model with an adapter, by name, and the extra modules; {} except on the main process. Called
    on every process."""
    state = model.state_dict()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    gathered = {name: _whole(state[name]) for name in state if name in trained or name.startswith("extra.")}
    return gathered if accelerator.is_main_process else {}


def gather_in_file(accelerator: Accelerator, model: FlatModel, file: Path) -> None:
    """Write the weights, gathered tensor by tensor, to a safetensors file on the main process, under their names in the
    FlatModel. Called on every process. On the main process, raises OSError if the disk refuses the write."""
    state = _weights(model)
    entries = {name.removeprefix(MODEL): (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    tensors = (_whole(state[MODEL + name]) for name in _in_order(entries))
    try:
        if accelerator.is_main_process:
            _write_file(file, entries, tensors)
    finally:
        for _ in tensors:  # gathered by all processes together, even if the file could not be written
            pass


def read_in_file(checkpoint: Path, file: Path) -> None:
    """The same for the weights in a checkpoint's shards, on one process."""
    index = read_metadata(checkpoint)
    entries = {
        name.removeprefix(MODEL): (tuple(entry.size), entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
        if name.startswith(MODEL)
    }

    def tensors() -> Iterator[Tensor]:
        batch: dict[str, Tensor] = {}
        for name in [*_in_order(entries), None]:
            if batch and (name is None or sum(tensor.numel() for tensor in batch.values()) > AT_ONCE):
                _read(checkpoint, batch, alone=index)
                yield from batch.values()
                batch = {}
            if name is not None:
                shape, dtype = entries[name]
                batch[MODEL + name] = torch.empty(shape, dtype=dtype)

    _write_file(file, entries, tensors())


def _whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on the host; one sharded by FSDP2 is gathered. Called on every process."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()  # from the host, with fsdp_offload_params
    return tensor.detach().cpu()


def _in_order(entries: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> list[str]:
    """The order in the file: larger dtypes first, so that each tensor is aligned to the size of its numbers."""
    return sorted(entries, key=lambda name: -entries[name][1].itemsize)


def _write_file(file: Path, entries: dict[str, tuple[tuple[int, ...], torch.dtype]], tensors: Iterable[Tensor]) -> None:
    """Write a safetensors file with one tensor in memory at a time. tensors: in the order of `_in_order`."""
    header, at = {}, 0
    for name in _in_order(entries):
        shape, dtype = entries[name]
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": (at, end)}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            opened.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
