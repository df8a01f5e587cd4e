"""Sharded checkpoints, as far as the model goes: what is one, and a model whose weights follow from it.

Such a folder has the configuration and the tokenizer of a model, and `shards/`, which torch.distributed.checkpoint writes
and reads, each process its part: the weights by their names in the FlatModel, and the state of the optimizer. Reading and
writing them is of common/run/sharded.py.
"""

import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.model.fused_layers import fused_layers

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from transformers import PreTrainedConfig, PreTrainedModel

FOLDER, RECORD = "shards", "sharded.json"
MODEL, OPTIMIZER = "model.", "optimizer."  # what the names in the shards begin with


def holds_shards(folder: str | Path) -> bool:
    """Whether the weights of the model in this folder are in shards (those of an adapter never are)."""
    return Path(folder, RECORD).is_file()


def refuse_shards(folder: str | Path) -> None:
    """Raise UserError for a sharded checkpoint, which from_pretrained cannot read."""
    if holds_shards(folder):
        raise UserError(f"{folder} is a sharded checkpoint: python -m tools.consolidate {folder} OUT makes a model of it")


def write_frame(lm: "PreTrainedModel", padded: bool, folder: Path) -> None:
    """What a model is besides its weights: configuration, code of its own, and how it is called (see wrap)."""
    lm.config.dtype = str(lm.dtype).removeprefix("torch.")  # as save_pretrained has it
    lm.config.architectures = [type(lm).__name__.removeprefix("FSDP")]
    lm.config.save_pretrained(folder)
    lm.generation_config.save_pretrained(folder)
    if getattr(lm, "is_remote_code", lambda: lm._auto_class is not None)():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(lm, folder, config=lm.config)
    (folder / RECORD).write_text(json.dumps({"padded": padded, "fused": fused_layers(lm)}), encoding="utf-8")


def read_record(folder: str | Path) -> dict[str, Any]:
    """{"padded": bool, "fused": names of modules}: how the model of a sharded checkpoint is called."""
    try:
        found = json.loads(Path(folder, RECORD).read_text(encoding="utf-8"))
        return {"padded": bool(found["padded"]), "fused": [str(name) for name in found["fused"]]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{Path(folder, RECORD)} cannot be read ({type(error).__name__}: {error})") from None


def empty_model(folder: str | Path, *, trust_remote_code: bool = False) -> "PreTrainedModel":
    """The model of a sharded checkpoint, on the CPU, its parameters in memory that nobody has written to.

    Such memory is taken when it is written to, and so not at all where FSDP2 keeps a part of each parameter. Buffers have
    their values.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    options = {"trust_remote_code": trust_remote_code}
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder, **options)
    known = read_metadata(folder).state_dict_metadata
    with init_empty_weights(include_buffers=False):  # on the meta device, where initial values cost nothing
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
    """Reads what an index is made of, and nothing else: a pickle may otherwise run any code."""

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
    """The index of a checkpoint's shards: names, shapes, dtypes, and what lies in which file. Nothing in it is executed.

    Raises UserError where it is missing or no such index.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    path = Path(folder, FOLDER, ".metadata")
    try:
        with open(path, "rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
        return found
    except Exception as error:  # what lies in a folder may be anything
        raise UserError(f"{path} is no index of shards ({type(error).__name__}: {error})") from None
