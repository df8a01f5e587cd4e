"""LoRA: a frozen model with small trained adapters (Hu et al. 2021, arXiv 2106.09685), using peft.

A run with --use_peft starts from a model, which gets a new adapter, or from an adapter, which is trained
further: its base stays the one it names, so that the result can be loaded again. A frozen copy of the
starting adapter is kept under the name START: the reference of DPO and GRPO. Tokens that the tokenizer has
but the base does not know are trained, too.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
import contextlib
import logging
from pathlib import Path
import re
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any
import warnings

from common.args import CommonArgs
from common.errors import UserError
from common.model.files import hub_errors
from common.model.flat_model import FlatModel
import torch
from torch import Tensor, nn
import torch.nn.functional as F

if TYPE_CHECKING:
    from peft import LoraConfig

# Names of adapters within a model.
TRAINED = "default"
START = "start"  # a frozen copy of the adapter that the run started from
# Layers of an architecture that adapters do not fit, by model_type: fused kernels of Mamba's mixers read
# these weights directly, bypassing any adapter; a layer of DeepSeek-V4 holds several matrices.
MIXER = ("out_proj", "conv1d")
UNFIT = dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"), MIXER)
UNFIT |= dict.fromkeys(("mamba", "falcon_mamba"), (*MIXER, "x_proj", "dt_proj"))
UNFIT |= {"jamba": ("dt_proj",), "deepseek_v4": ("o_a_proj",)}
GATE = r"(.*\.)?(gate|router|shared_expert_gate)(\..*)?"  # the modules that choose the experts


def adapter_config(adapter: str | Path, revision: str | None = None) -> "LoraConfig":
    """The settings of an adapter, including its base. Raises UserError if it is not a LoRA adapter."""
    peft = import_peft(f"the adapter {adapter}")
    with hub_errors("adapter", str(adapter)):
        config = peft.PeftConfig.from_pretrained(str(adapter), revision=revision)
    if not isinstance(config, peft.LoraConfig) or config.task_type not in (None, "CAUSAL_LM"):
        kind = f"{type(config).__name__} ({config.task_type or 'of any model'})"
        raise UserError(f"{adapter} has a {kind}: only LoRA of causal language models is known here")
    return config


def add_lora(
    args: CommonArgs,
    model: FlatModel,
    checkpoint: str | Path | None = None,
    *,
    start: str | Path | None = None,
    new_tokens: Sequence[int] = (),
) -> FlatModel:
    """Freeze the model and add LoRA adapters: those of a checkpoint, those of the adapter `start`, or new
    ones.

    start: the adapter that the run started from, with the model as its base; a frozen copy is kept as START.
    new_tokens: ids unknown to the base, whose rows in the embedding and the head are trained. Raises
    UserError without peft, for layers that do not exist, and for new tokens beside `start`.
    """
    peft = import_peft("--use_peft")
    base = model.lm.config._name_or_path
    if start is not None and new_tokens:
        raise UserError(
            f"the adapter {start} was trained without {len(new_tokens)} of the tokenizer's tokens: merge it first "
            "(tools.merge_lora)"
        )
    try:
        if checkpoint is None and start is None:
            config = _new_config(args, model.lm, new_tokens)
            lm = peft.get_peft_model(model.lm, config, revision=args.model_revision)
        else:
            lm = peft.PeftModel.from_pretrained(model.lm, checkpoint or start, is_trainable=True)
    except ValueError as error:
        cause = "--lora_target_modules, --lora_dropout or --use_dora"
        if start is not None:
            cause = f"the adapter {start}"
        raise UserError(f"{cause}: {error}") from None
    if args.merge_lora:
        check_mergeable(lm)
        quantised_here = args.load_in_4bit or args.load_in_8bit
        if getattr(model.lm.config, "quantization_config", None) and not quantised_here:
            raise UserError(
                f"--merge_lora: {base} is quantised: merge later, by tools.merge_lora with --base THE_MODEL"
            )
    if start is not None:
        lm.load_adapter(str(start), START)
        lm.set_adapter(TRAINED)  # before peft 0.21, loading another adapter freezes this one
    if Path(base).exists():
        base = str(Path(base).resolve())  # a local base is found from any folder
    for config in lm.peft_config.values():
        config.base_model_name_or_path = base
    _use_token_rows(lm)
    model.lm = lm
    return model


def write_adapter(lm: nn.Module, folder: Path, weights: dict[str, Tensor]) -> None:
    """Write the trained adapter of a peft model, with what `generate()` needs to know."""
    trains_rows = lm.peft_config[TRAINED].trainable_token_indices is not None  # of the embedding
    whole_embedding = False if trains_rows else "auto"
    lm.save_pretrained(
        folder, state_dict=weights, selected_adapters=[TRAINED], save_embedding_layers=whole_embedding
    )
    lm.get_base_model().generation_config.save_pretrained(folder)


def check_mergeable(lm: nn.Module) -> None:
    """Raise UserError if a layer with an adapter shares its weight with another layer, which merging would
    change as well: Zamba2's shared blocks, an embedding with a tied head."""
    layers = Counter()  # that have a weight, by its id
    for module in lm.modules():
        layers.update(map(id, module._parameters.values()))
    for name, module in lm.named_modules():
        if not hasattr(module, "lora_A") or not hasattr(module, "base_layer"):
            continue
        weight_name = getattr(module, "parameter_name", "weight")  # parameter_name: of stacked experts
        weight = getattr(module.get_base_layer(), weight_name)
        if layers[id(weight)] > 1:
            raise UserError(
                f"{name} shares its weight with another layer: its adapter cannot be merged "
                "(others can: --lora_target_modules)"
            )


def _new_config(args: CommonArgs, lm: nn.Module, new_tokens: Sequence[int]) -> "LoraConfig":
    """The settings of a new adapter, excluding vision towers and, unless they are named, the routers of
    experts."""
    peft = import_peft("--use_peft")
    targets = args.lora_target_modules
    everything = targets is None or list(map(str.lower, targets)) in (["all-linear"], ["all"])
    unfit = UNFIT.get(lm.config.model_type, ())
    if not everything:
        _check_targets(lm, targets, unfit)
    left_out = [rf".*\.{name}" for name in unfit]
    names = {id(module): name for name, module in lm.named_modules()}
    prefix = names.get(id(lm.get_decoder()), "")
    head = lm.get_output_embeddings()
    # If a linear layer lies outside of the decoder (in a vision or audio tower), leave out all that do.
    for name, module in lm.named_modules():
        is_linear = isinstance(module, nn.Linear) and module is not head
        if is_linear and not name.startswith(prefix):
            left_out.append(rf"(?!{re.escape(prefix)}\.).*")
            break
    if everything and any("experts" in name.split(".") for name in names.values()):
        left_out.append(GATE)
    config = peft.LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        use_dora=args.use_dora,
        use_rslora=args.use_rslora,
        target_modules="all-linear" if everything else targets,
        exclude_modules="|".join(left_out) or None,
        trainable_token_indices=_rows_to_train(lm, new_tokens) if new_tokens else None,
        task_type="CAUSAL_LM",
    )
    # where peft adapts experts that are one parameter, keep it from adapting the router's as well
    if everything:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers as convert

        convert(config, lm, None)
        parameters = config.target_parameters or ()
        config.target_parameters = {name for name in parameters if not re.fullmatch(GATE, name)}
    return config


def _check_targets(lm: nn.Module, targets: list[str], unfit: Sequence[str]) -> None:
    """Raise UserError for a target that no layer has (peft ignores it if another one matches), or whose layer
    cannot take an adapter."""
    kind = type(lm).__name__
    names = [f".{name}" for name, _ in [*lm.named_modules(), *lm.named_parameters()]]
    for target in targets:
        if target in unfit:
            raise UserError(f"--lora_target_modules {target}: adapters do not fit this layer of {kind}")
        if not any(name.endswith(f".{target}") for name in names):
            raise UserError(f"--lora_target_modules {target}: no layer of {kind} has this name")


def import_peft(needed_for: str) -> ModuleType:
    # peft imports bitsandbytes, which warns about a kernel that is not needed
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # a warning of transformers that peft causes, and one of peft about pattern keys without a match
    warnings.filterwarnings("ignore", ".*(is_gradient_checkpointing|_pattern keys did not match)")
    try:
        import peft
    except ImportError:
        raise UserError(f"{needed_for} needs peft: pip install peft") from None
    return peft


# --- the adapter at the start -------------------------------------------------------------------------------


@contextlib.contextmanager
def at_start(lm: nn.Module) -> Iterator[None]:
    """Context in which the model is as it was at the start: with the adapter it started from, or with none.

    The trained adapter keeps requires_grad: peft's set_adapter would change it, which DDP and FSDP do not
    expect.
    """
    if START not in lm.peft_config:
        with lm.disable_adapter():
            yield
        return
    before = []
    try:
        for module in lm.modules():
            if hasattr(module, "_active_adapter"):
                before.append((module, module._active_adapter))
                module._active_adapter = [START]
        yield
    finally:
        for module, names in before:
            module._active_adapter = names


# --- rows of the embedding ----------------------------------------------------------------------------------


def _rows_to_train(lm: nn.Module, new_tokens: Sequence[int]) -> dict[str, list[int]]:
    """For peft: the ids of trained rows, for the embedding and, unless it is tied, the head."""
    embedding = lm.get_input_embeddings()
    head = lm.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise UserError(
            f"{len(new_tokens)} new tokens: the head of {type(lm).__name__} has a bias, so peft cannot train its rows"
        )
    is_tied = head.weight is embedding.weight
    rows = {}
    for name, module in lm.named_modules():
        if module is embedding or (module is head and not is_tied):
            rows[name] = sorted(new_tokens)
    return rows


def _use_token_rows(lm: nn.Module) -> None:
    """Substitute trained rows into the layer's output: peft would copy the whole matrix at every call."""
    for module in lm.modules():
        if type(module).__name__ == "TrainableTokensLayer":
            module.forward_adapters = MethodType(_forward_with_rows, module)


def _forward_with_rows(
    self: nn.Module, x: Tensor, active_adapters: list[str], *args: Any, **kwargs: Any
) -> Tensor:
    out = self.base_layer(x, *args, **kwargs)
    if self.disable_adapters or not active_adapters or self.merged:
        return out
    (adapter,) = active_adapters
    rows = self.trainable_tokens_delta[adapter]
    ids = torch.tensor(self.token_indices[adapter], device=x.device)
    if not isinstance(self.base_layer, nn.Embedding):  # a head
        logits = F.linear(x, rows.to(x.dtype))
        return out.index_copy(-1, ids, logits.to(out.dtype))
    order = ids.argsort()
    place = torch.searchsorted(ids[order], x).clamp(max=len(ids) - 1)
    row = order[place]  # of each token its row, or any one
    embedded = F.embedding(row, rows)
    scale = getattr(self.base_layer, "embed_scale", None)
    if scale is not None:  # Gemma
        embedded = embedded * torch.as_tensor(scale).to(embedded.dtype)
    is_trained = ids[row] == x
    return torch.where(is_trained[..., None], embedded.to(out.dtype), out)
