"""The precision of the final model: training uses float32, and a bfloat16 base is exported as bfloat16."""

import json
from pathlib import Path

from common.args import CommonArgs
from common.errors import UserError, say
from common.model.flat_model import FlatModel, base_lm

import torch
from safetensors import safe_open
from safetensors.torch import save_file

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def base_dtype(model: FlatModel) -> str:
    """The dtype of the weight files that training started from; "float32" for a new model."""
    return getattr(base_lm(model.lm), "base_dtype", "float32")


def export_dtype(args: CommonArgs, base: str) -> str:
    """The dtype of the final model: args.export_dtype, where "auto" means the base's, or bfloat16 for bfloat16 weights."""
    if args.export_dtype != "auto":
        return args.export_dtype
    return args.dtype if args.dtype == "bfloat16" else base


def cast_weights(folder: Path, dtype: str, model: FlatModel) -> None:
    """Round the weights that `save_pretrained` wrote to a folder, and record the dtype in its config.json.

    Parts that transformers keeps in float32 stay so. Raises UserError if a number is too large for float16.
    """
    if all(p.dtype == DTYPES[dtype] for p in model.lm.parameters() if p.is_floating_point()):
        return
    files = sorted(folder.glob("model*.safetensors"))
    target, total = DTYPES[dtype], 0
    kept = {*(base_lm(model.lm)._keep_in_fp32_modules or ()), *(base_lm(model.lm)._keep_in_fp32_modules_strict or ())}
    changed = False
    for file in files:
        tensors = {}
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
            for name in opened.keys():
                tensor = opened.get_tensor(name)
                if tensor.is_floating_point() and tensor.dtype != target and not any(part in name for part in kept):
                    rounded = tensor.to(target)
                    if bool(rounded.isinf().any()) and not bool(tensor.isinf().any()):
                        raise UserError(f"--export_dtype {dtype}: {name} has a number too large for it; take bfloat16")
                    tensor, changed = rounded, True
                tensors[name] = tensor
                total += tensor.numel() * tensor.element_size()
        save_file(tensors, file, metadata)
    if not changed:
        return
    for name, entries in (("config.json", ("dtype", "torch_dtype")), ("model.safetensors.index.json", ())):
        if not (file := folder / name).exists():
            continue
        known = json.loads(file.read_text(encoding="utf-8"))
        for part in (known, *(value for value in known.values() if isinstance(value, dict))):
            part.update({entry: dtype for entry in entries if entry in part})
        if "metadata" in known and not entries:
            known["metadata"]["total_size"] = total
        file.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    say(f"the final model is written in {dtype} (--export_dtype)")
