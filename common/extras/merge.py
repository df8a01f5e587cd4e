"""Merging an adapter into its base: a finished one in the base's own dtype, and one in training for rollout servers."""

from collections.abc import Callable
import contextlib
import copy
from pathlib import Path
import shutil
import warnings

from accelerate import Accelerator
from common.errors import UserError, is_of_the_disk, say
from common.extras import extra
from common.extras.lora import TRAINED, adapter_config, check_mergeable, import_peft
from common.model.flat_model import base_lm, is_quantised
from common.model.load import grow_embedding, hub_errors, make_savable
from common.model.save import EXTRA, gather_weights, part_of, save_rounded
import torch
from torch import Tensor, nn


def write_merged(adapter: str | Path, folder: Path, base: str | None = None, *, trust_remote_code: bool = False) -> None:
    """Write the merged model of an adapter to a folder, with the adapter's tokenizer and extra modules.

    Sums are computed in float32; each weight of the result has its dtype in the base's files. base: replaces the one that
    the adapter names. Raises UserError if it is not a LoRA adapter, or if the base is missing or itself quantised.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    adapter = str(adapter)
    config, peft = adapter_config(adapter), import_peft(f"the adapter {adapter}")
    name, revision = (base, None) if base else (config.base_model_name_or_path, config.revision)
    with hub_errors("model", name):
        lm = AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype="auto", trust_remote_code=trust_remote_code)
    if getattr(lm.config, "quantization_config", None) is not None:
        raise UserError(f"the base {name} is quantised: name the model that it was made of, in its own dtype, with --base")
    tensors = dict(lm.named_parameters()) | dict(lm.named_buffers())
    dtypes = {tensor_name: tensor.dtype for tensor_name, tensor in tensors.items()}
    lm.float()
    tokenizer = None
    with contextlib.suppress(Exception):  # there may be none beside the adapter
        tokenizer = AutoTokenizer.from_pretrained(adapter, trust_remote_code=trust_remote_code)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        grow_embedding(lm, len(tokenizer))
    with hub_errors("adapter", adapter):
        adapted = peft.PeftModel.from_pretrained(lm, adapter)
        check_mergeable(adapted)
        lm = adapted.merge_and_unload()
        for tensor_name, tensor in (dict(lm.named_parameters()) | dict(lm.named_buffers())).items():
            tensor.data = tensor.data.to(dtypes[tensor_name])
        if Path(adapter, "generation_config.json").exists():
            lm.generation_config = GenerationConfig.from_pretrained(adapter)
    make_savable(lm)
    lm.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):  # they are the owner's alone
        shutil.copymode(folder / "config.json", file)
    if Path(adapter, EXTRA).exists():
        shutil.copyfile(Path(adapter, EXTRA), Path(folder, EXTRA))


def merge_adapter(adapter: str, out: str, base: str | None = None, *, trust_remote_code: bool = False) -> None:
    """Write the merged model to the folder `out`, all of it or nothing."""
    if Path(out).exists():
        raise UserError(f"{out} is there already: name a folder that is not")
    temporary = Path(out).with_name(f".{Path(out).name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write_merged(adapter, temporary, base, trust_remote_code=trust_remote_code)
        temporary.rename(out)
    except Exception as error:
        if not is_of_the_disk(error):
            raise
        raise UserError(f"{out} could not be written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    say(f"{adapter}, merged into its base: {out}")


# --- the model in training ------------------------------------------------------------------------------------------


def policy_writer(accelerator: Accelerator, model: nn.Module, dtype: torch.dtype | None = None) -> Callable[[Path], None]:
    """A function that writes the current language model alone, with the trained adapter merged into it, in a dtype.

    Called on every process; the function is called on the main process. The model stays bitwise unchanged.
    """
    wrapper = accelerator.unwrap_model(model, keep_torch_compile=False)
    weights = gather_weights(accelerator, model, frozen=True)

    def write(folder: Path) -> None:
        lm, part = wrapper.lm, part_of(wrapper, weights, "lm.")
        if hasattr(lm, "peft_config"):
            every = {name.removeprefix("lm."): w for name, w in weights.items() if name.startswith("lm.")}
            if is_quantised(lm):
                every |= extra("quantised").dequantised_layers(lm)
            lm = _merged(lm, every)
            part = part_of(lm, lm.state_dict(), "")
        save_rounded(lm, folder, part, dtype and str(dtype).removeprefix("torch."))

    return write


def _merged(lm: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
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
    with warnings.catch_warnings():  # a warning about a head untied from the embedding: it is tied again below
        warnings.simplefilter("ignore")
        merged = twin.merge_and_unload(safe_merge=True, adapter_names=[TRAINED])
    merged.config.tie_word_embeddings = plain.tie_word_embeddings = inner.config.tie_word_embeddings
    merged.tie_weights()
    return merged
