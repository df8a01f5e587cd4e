"""A model in a folder, as from_pretrained reads it, whatever it is wrapped in and however its weights are dealt out."""

from collections.abc import Callable
from pathlib import Path

from common.data.types import Tokenizer
from common.memory import SHARDED
from common.model.flat_model import base_lm
from common.model.lora import TRAINED

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn

CARD = "README.md"  # peft's, which says little, and where the base lies
EXTRA = "extra.safetensors"  # the modules that a script has put into model.extra


def model_writer(
    accelerator: Accelerator, model: nn.Module, tokenizer: Tokenizer, merged: dict[str, torch.Tensor] | None = None
) -> Callable[[Path], None]:
    """What writes the model (or LoRA adapter) and tokenizer as from_pretrained reads them, and `model.extra` beside them.

    Called on every process. merged: the weights by name, where they are known already.
    """
    wrapper, weights = accelerator.unwrap_model(model, keep_torch_compile=False), None
    lm, extra = wrapper.lm, wrapper.extra.state_dict()
    if accelerator.distributed_type in SHARDED:
        tied = dict(wrapper.named_parameters(remove_duplicate=False)).keys() - dict(wrapper.named_parameters()).keys()
        if merged is None:
            merged = accelerator.get_state_dict(model) or {}  # ZeRO-3 gives them to the main process only
        # A tied weight stands under each of its names.
        weights = {name.removeprefix("lm."): w for name, w in merged.items() if name.startswith("lm.") and name not in tied}
        extra = {name.removeprefix("extra."): w for name, w in merged.items() if name.startswith("extra.")}

    def write(folder: Path) -> None:
        save_model(lm, folder, weights)
        tokenizer.save_pretrained(folder)
        if extra:
            save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in extra.items()}, folder / EXTRA)

    return write


def save_model(lm: nn.Module, folder: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """A model, or the adapter that is trained, as from_pretrained reads it, with its generation_config.json.

    weights: by name, where the model does not hold them itself.
    """
    if not hasattr(lm, "peft_config"):
        lm.save_pretrained(folder, state_dict=weights)
        return
    rows = lm.peft_config[TRAINED].trainable_token_indices is not None  # all that there is new in the embedding
    options = {"selected_adapters": [TRAINED], "save_embedding_layers": False if rows else "auto"}
    lm.save_pretrained(folder, state_dict=weights, **options)
    base_lm(lm).generation_config.save_pretrained(folder)
    (folder / CARD).unlink(missing_ok=True)
