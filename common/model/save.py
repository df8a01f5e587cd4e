"""Saving a model in from_pretrained's format, however it is wrapped and its weights are sharded."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

from common.data.types import Tokenizer
from common.errors import UserError
from common.extras import extra
from common.memory import SHARDED
from common.model.flat_model import base_lm, is_quantised
from common.model.lora import TRAINED, import_peft

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn

CARD = "README.md"  # peft's says little, and contains the base's local path
EXTRA = "extra.safetensors"  # a script's own modules in model.extra


def model_writer(
    accelerator: Accelerator, model: nn.Module, tokenizer: Tokenizer, merged: dict[str, torch.Tensor] | None = None
) -> Callable[[Path], None]:
    """A function that writes the model (or LoRA adapter) and tokenizer for from_pretrained, and `model.extra` beside them.

    Called on every process. merged: the weights by name, if already known.
    """
    wrapper, weights = accelerator.unwrap_model(model, keep_torch_compile=False), None
    lm, extra = wrapper.lm, wrapper.extra.state_dict()
    if accelerator.distributed_type in SHARDED:
        if merged is None:
            merged = accelerator.get_state_dict(model) or {}  # ZeRO-3 returns them on the main process only
        weights = _part(wrapper, merged, "lm.")
        extra = {name.removeprefix("extra."): w for name, w in merged.items() if name.startswith("extra.")}

    def write(folder: Path) -> None:
        save_model(lm, folder, weights)
        tokenizer.save_pretrained(folder)
        if extra:
            save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in extra.items()}, folder / EXTRA)

    return write


def save_model(lm: nn.Module, folder: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write a model, or the trained adapter, for from_pretrained, with its generation_config.json.

    weights: by name, if the model does not hold them itself.
    """
    if not hasattr(lm, "peft_config"):
        lm.save_pretrained(folder, state_dict=weights)
        return
    rows = lm.peft_config[TRAINED].trainable_token_indices is not None  # the only new rows of the embedding
    options = {"selected_adapters": [TRAINED], "save_embedding_layers": False if rows else "auto"}
    lm.save_pretrained(folder, state_dict=weights, **options)
    base_lm(lm).generation_config.save_pretrained(folder)
    (folder / CARD).unlink(missing_ok=True)


def policy_writer(accelerator: Accelerator, model: nn.Module, dtype: torch.dtype | None = None) -> Callable[[Path], None]:
    """A function that writes the current language model alone, with the trained adapter merged into it.

    Called on every process; the function is called on the main process. The model stays bitwise unchanged. dtype: of the
    matrices, to write them in a lower precision.
    """
    wrapper = accelerator.unwrap_model(model, keep_torch_compile=False)
    lm, weights, is_adapted = wrapper.lm, None, hasattr(wrapper.lm, "peft_config")
    if accelerator.distributed_type in SHARDED:
        weights = accelerator.get_state_dict(model) or {}
    elif is_adapted or dtype is not None:
        weights = wrapper.state_dict()

    def write(folder: Path) -> None:
        written, found = lm, None if weights is None else _part(wrapper, weights, "lm.")
        if is_adapted:
            every = {name.removeprefix("lm."): w for name, w in weights.items() if name.startswith("lm.")}
            if is_quantised(lm):
                every |= extra("quantised").dequantised_layers(lm)
            written = _merged(lm, every)
            found = _part(written, written.state_dict(), "")
        if dtype is not None:
            small = {name for name, w in found.items() if not w.is_floating_point() or w.dim() < 2}
            found = {name: w if name in small else w.to(dtype).cpu() for name, w in found.items()}
        written.save_pretrained(folder, state_dict=found)

    return write


def _part(model: nn.Module, weights: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The weights under a name prefix, with the prefix removed; a tied weight, listed under each of its names, only once."""
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - dict(model.named_parameters()).keys()
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix) and name not in tied}


def _merged(lm: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    """The merged transformers model of a peft model with these weights, on the CPU; weights that an adapter changes are
    copies."""
    inner, config = base_lm(lm), copy.deepcopy(lm.peft_config[TRAINED])
    plain = copy.deepcopy(inner.config)
    plain._attn_implementation = "eager"  # only its weights are used
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(plain, name):
            delattr(plain, name)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model has no name here
        twin = import_peft("--use_peft").get_peft_model(type(inner)(plain), config, adapter_name=TRAINED)
    twin.load_state_dict({name: w.detach().cpu() for name, w in weights.items()}, strict=False, assign=True)
    try:
        with warnings.catch_warnings():  # a warning about a head untied from the embedding: it is tied again below
            warnings.simplefilter("ignore")
            merged = twin.merge_and_unload(safe_merge=True, adapter_names=[TRAINED])
    except ValueError as error:
        raise UserError(f"the adapter cannot be merged: {error}") from None
    merged.config.tie_word_embeddings = plain.tie_word_embeddings = inner.config.tie_word_embeddings
    merged.tie_weights()
    return merged
