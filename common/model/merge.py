"""Merging an adapter into its base: a finished one in the base's own dtype, and one in training for rollout
servers."""

from collections.abc import Callable
import contextlib
import copy
from pathlib import Path
import shutil
import warnings

from accelerate import Accelerator
from common.errors import UserError, say
from common.files import new_folder, writing
from common.model.files import dtype_of, hub_errors
from common.model.flat_model import base_lm, is_quantised
from common.model.load import load_merged, make_savable
from common.model.lora import TRAINED, import_peft
from common.model.quantised import dequantised_layers
from common.model.save import EXTRA, gather_weights, part_of, save_rounded
import torch
from torch import Tensor, nn


def write_merged(
    adapter: str | Path, folder: Path, base: str | None = None, *, trust_remote_code: bool = False
) -> None:
    """Write the merged model of an adapter to a folder, with the adapter's tokenizer and extra modules.

    Sums are computed in float32, and rounded to the dtype of the base's files. base: replaces the one that
    the adapter names. Raises UserError if it is not a LoRA adapter, or if the base is missing or itself
    quantised.
    """
    from transformers import AutoTokenizer, GenerationConfig

    adapter = str(adapter)
    with hub_errors("adapter", adapter):
        lm, config = load_merged(adapter, base=base, dtype=torch.float32, trust_remote_code=trust_remote_code)
        with contextlib.suppress(OSError, ValueError):  # there may be none beside the adapter
            AutoTokenizer.from_pretrained(adapter, trust_remote_code=trust_remote_code).save_pretrained(
                folder
            )
        if Path(adapter, "generation_config.json").exists():
            lm.generation_config = GenerationConfig.from_pretrained(adapter)
    make_savable(lm)
    save_rounded(lm, folder, part_of(lm, lm.state_dict(), ""), dtype_of(config))
    if Path(adapter, EXTRA).exists():
        shutil.copyfile(Path(adapter, EXTRA), Path(folder, EXTRA))


def merge_adapter(
    adapter: str, out: str, base: str | None = None, *, trust_remote_code: bool = False
) -> None:
    """Write the merged model to the folder `out`, all of it or nothing."""
    if Path(out).exists():
        raise UserError(f"{out} is there already: name a folder that is not")
    with writing(Path(out)), new_folder(Path(out)) as folder:
        write_merged(adapter, folder, base, trust_remote_code=trust_remote_code)
    say(f"{adapter}, merged into its base: {out}")


# --- the model in training ----------------------------------------------------------------------------------


def policy_writer(
    accelerator: Accelerator, model: nn.Module, dtype: torch.dtype | None
) -> Callable[[Path], None]:
    """A function that writes the current language model alone, with the trained adapter merged into it, in a
    dtype.

    Called on every process; the function is called on the main process. The model stays bitwise unchanged.
    """
    wrapper = accelerator.unwrap_model(model, keep_torch_compile=False)
    weights = gather_weights(accelerator, model, frozen=True)

    def write(folder: Path) -> None:
        lm = wrapper.lm
        if hasattr(lm, "peft_config"):
            lm_weights = {}
            for name, w in weights.items():
                if name.startswith("lm."):
                    lm_weights[name.removeprefix("lm.")] = w
            if is_quantised(lm):
                lm_weights |= dequantised_layers(lm)
            lm = _merged(lm, lm_weights)
            part = part_of(lm, lm.state_dict(), "")
        else:
            part = part_of(wrapper, weights, "lm.")
        save_rounded(lm, folder, part, dtype and str(dtype).removeprefix("torch."))

    return write


def _merged(lm: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """The merged transformers model of a peft model with these weights, on the CPU; weights that an adapter
    changes are copies."""
    inner = base_lm(lm)
    config = copy.deepcopy(lm.peft_config[TRAINED])
    plain = copy.deepcopy(inner.config)
    plain._attn_implementation = "eager"  # only its weights are used
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(plain, name):
            delattr(plain, name)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model has no name here
        twin = import_peft("--use_peft").get_peft_model(type(inner)(plain), config, adapter_name=TRAINED)
    twin.load_state_dict({name: w.detach().cpu() for name, w in weights.items()}, strict=False, assign=True)
    # a warning about a head untied from the embedding: it is tied again below
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = twin.merge_and_unload(safe_merge=True, adapter_names=[TRAINED])
    merged.config.tie_word_embeddings = plain.tie_word_embeddings = inner.config.tie_word_embeddings
    merged.tie_weights()
    return merged
