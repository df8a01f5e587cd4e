"""Writing a model for from_pretrained, however it is wrapped, sharded, adapted or quantised."""

import json
from pathlib import Path
import shutil

from accelerate import Accelerator
from common.args import CommonArgs
from common.data.types import Tokenizer
from common.memory import SHARDED
from common.model.flat_model import FlatModel, base_lm
from common.model.lora import write_adapter
from safetensors.torch import save_file
import torch
from torch import Tensor, nn

CARD = "README.md"
EXTRA = "extra.safetensors"  # a script's own modules in model.extra
# Accelerate's folder for the weights of a sharded checkpoint (run/sharded.py)
SHARDS = "pytorch_model_fsdp_0"


def base_dtype(model: FlatModel) -> str:
    """The dtype of the weight files that training started from; "float32" for a new model."""
    return getattr(base_lm(model.lm), "base_dtype", "float32")


def final_dtype(args: CommonArgs, base: str) -> str:
    """The dtype of the final model: bfloat16 with --dtype bfloat16, or else `base`, that of the files that
    training started from, even where it was trained in float32. Adapters that are not merged stay float32."""
    if args.use_peft and not args.merge_lora:
        return "float32"
    return args.dtype if args.dtype == "bfloat16" else base


def gather_weights(accelerator: Accelerator, model: nn.Module, *, frozen: bool = False) -> dict[str, Tensor]:
    """The weights by their names in the FlatModel; of a model with an adapter at least those that are
    trained, unless `frozen`. If processes share the weights, the main one gets them, and the others {}.
    Called on every process."""
    wrapper = accelerator.unwrap_model(model, keep_torch_compile=False)
    if accelerator.distributed_type not in SHARDED:
        return wrapper.state_dict()
    only_trained = hasattr(wrapper.lm, "peft_config") and not frozen
    if only_trained and accelerator.is_fsdp2:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        return get_model_state_dict(wrapper, options=options)
    return accelerator.get_state_dict(model) or {}


def write_model(
    folder: Path,
    wrapper: FlatModel,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer,
    dtype: str | None = None,
) -> None:
    """Write the model, or the trained adapter, with tokenizer and `model.extra`. On the main process.

    weights: see gather_weights. dtype: what a model's weights are rounded to, if they are.
    """
    lm = wrapper.lm
    part = part_of(wrapper, weights, "lm.")
    if hasattr(lm, "peft_config"):
        write_adapter(lm, folder, part)
        (folder / CARD).unlink(missing_ok=True)  # peft's says little, and contains the base's local path
    else:
        save_rounded(lm, folder, part, dtype)
    tokenizer.save_pretrained(folder)
    extra = {}
    for name, w in part_of(wrapper, weights, "extra.").items():
        extra[name] = w.detach().cpu().clone().contiguous()
    if extra:
        save_file(extra, folder / EXTRA)


def save_rounded(lm: nn.Module, folder: Path, weights: dict[str, Tensor], dtype: str | None) -> None:
    """lm.save_pretrained with the weights rounded to a dtype, if given, which config.json then names.

    What transformers keeps in float32 stays so.
    """
    if dtype is None:
        lm.save_pretrained(folder, state_dict=weights)
        return
    target = getattr(torch, dtype)
    kept = {*(lm._keep_in_fp32_modules or ()), *(lm._keep_in_fp32_modules_strict or ())}
    rounded = {}
    changed = False
    for name, w in weights.items():
        if w.is_floating_point() and not any(part in name for part in kept):
            changed = changed or w.dtype != target
            w = w.to(target)
        rounded[name] = w
    lm.save_pretrained(folder, state_dict=rounded)
    if changed:
        _name_dtype(folder / "config.json", dtype)


def _name_dtype(path: Path, dtype: str) -> None:
    """Write the dtype of the weights into a config.json, for the model and its parts."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for part in [config, *config.values()]:
        if not isinstance(part, dict):
            continue
        for name in ("dtype", "torch_dtype"):
            if name in part:
                part[name] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def copy_model(checkpoint: Path, folder: Path, dtype: str | None, *, trust_remote_code: bool = False) -> None:
    """Write the model, or the adapter, of a checkpoint to a folder, without tokenizer and `model.extra`. dtype: as
    in write_model."""
    from transformers import AutoModelForCausalLM

    names = []
    if (checkpoint / "adapter_config.json").exists():
        names = ["adapter_config.json", "adapter_model.safetensors", "generation_config.json"]
    else:
        lm = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype="auto", trust_remote_code=trust_remote_code
        )
        save_rounded(lm, folder, part_of(lm, lm.state_dict(), ""), dtype)
    for name in names:
        if (checkpoint / name).exists():
            shutil.copyfile(checkpoint / name, folder / name)


def part_of(model: nn.Module, weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights under a name prefix, with the prefix removed; a tied weight, listed under each of its
    names, only once."""
    once = dict(model.named_parameters())
    all_names = dict(model.named_parameters(remove_duplicate=False))
    part = {}
    for name, w in weights.items():
        is_repeated = name in all_names and name not in once
        if name.startswith(prefix) and not is_repeated:
            part[name.removeprefix(prefix)] = w
    return part
