"""The model's side of sharded checkpoints: recognising one, and building a model whose weights are loaded later.

Such a folder has the configuration and the tokenizer of a model, and `shards/`, which torch.distributed.checkpoint writes
and reads, each process its part: the weights by their names in the FlatModel, and the optimizer state. common/run/sharded.py
reads and writes them.
"""

import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.extras import extra

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from transformers import PreTrainedConfig, PreTrainedModel

FOLDER, RECORD = "shards", "sharded.json"
MODEL, OPTIMIZER = "model.", "optimizer."  # name prefixes in the shards


def holds_shards(folder: str | Path) -> bool:
    """Whether the weights of the model in this folder are sharded (an adapter's never are)."""
    return Path(folder, RECORD).is_file()


def refuse_shards(folder: str | Path) -> None:
    """Raise UserError for a sharded checkpoint, which from_pretrained cannot read."""
    if holds_shards(folder):
        raise UserError(f"{folder} is a sharded checkpoint: python -m tools.consolidate {folder} OUT makes a model of it")


def write_frame(lm: "PreTrainedModel", padded: bool, folder: Path) -> None:
    """Write everything of a model but its weights: configuration, its own code, and calling convention (see wrap)."""
    lm.config.dtype = str(lm.dtype).removeprefix("torch.")  # as save_pretrained does
    lm.config.architectures = [type(lm).__name__.removeprefix("FSDP")]
    lm.config.save_pretrained(folder)
    lm.generation_config.save_pretrained(folder)
    if getattr(lm, "is_remote_code", lambda: lm._auto_class is not None)():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(lm, folder, config=lm.config)
    (folder / RECORD).write_text(
        json.dumps({"padded": padded, "fused": extra("fused_layers").fused_layers(lm)}), encoding="utf-8"
    )


def read_record(folder: str | Path) -> dict[str, Any]:
    """{"padded": bool, "fused": names of modules}: how the model of a sharded checkpoint is called."""
    try:
        found = json.loads(Path(folder, RECORD).read_text(encoding="utf-8"))
        return {"padded": bool(found["padded"]), "fused": [str(name) for name in found["fused"]]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{Path(folder, RECORD)} cannot be read ({type(error).__name__}: {error})") from None


def empty_model(folder: str | Path, *, trust_remote_code: bool = False) -> "PreTrainedModel":
    """The model of a sharded checkpoint, on the CPU, with uninitialised parameters.

    Untouched memory is not really allocated, so parameters of which FSDP2 keeps only a part cost nothing in full. Buffers
    have their values.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    options = {"trust_remote_code": trust_remote_code}
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder, **options)
    known = read_metadata(folder).state_dict_metadata
    with init_empty_weights(include_buffers=False):  # on the meta device, where initialisation is free
        lm = AutoModelForCausalLM.from_config(config, **options)
    made: dict[int, nn.Parameter] = {}
    for prefix, module in lm.named_modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                entry = known.get(f"{MODEL}lm.{prefix}{'.' * bool(prefix)}{name}")
                dtype = p.dtype if entry is None else entry.properties.dtype
                made.setdefault(id(p), nn.Parameter(torch.empty(p.shape, dtype=dtype), requires_grad=p.requires_grad))
                module._parameters[name] = made[id(p)]
    lm.tie_weights()
    lm.config._name_or_path = str(folder)
    lm.generation_config = GenerationConfig.from_pretrained(folder)
    return lm.eval()


# --- the index of the shards ----------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    """Unpickles only what an index is made of: an ordinary pickle may run any code."""

    def find_class(self, module: str, name: str) -> Any:
        known = module == "torch.serialization" and name == "_get_layout"
        known |= module.startswith("pathlib") and name in ("PosixPath", "WindowsPath", "PurePosixPath", "Path")
        known |= module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))
        ours = module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        if known or (ours and "." not in name):
            found = super().find_class(module, name)
            if known or (isinstance(found, type) and found.__module__ == module):
                return found
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


def read_metadata(folder: str | Path) -> "Metadata":
    """The index of a checkpoint's shards: names, shapes, dtypes, and their places in the files. Nothing in it is executed.

    Raises UserError if it is missing or invalid.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    path = Path(folder, FOLDER, ".metadata")
    try:
        with open(path, "rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
        return found
    except Exception as error:  # a folder may hold anything
        raise UserError(f"{path} is no index of shards ({type(error).__name__}: {error})") from None
