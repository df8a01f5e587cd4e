"""Load models and tokenizers from a folder or the Hub, ready for training."""

from pathlib import Path
from typing import TYPE_CHECKING

from common.args import CommonArgs
from common.data.chat import read_chat_template, stop_token_ids
from common.data.types import Tokenizer
from common.errors import UserError, say
from common.extras import extra
from common.memory import SHARDED
from common.model import attention, mixers
from common.model.checks import check_numbers, check_weights, hub_errors, make_savable
from common.model.create import DTYPES, create_model
from common.model.flat_model import FlatModel, base_lm, routes_tokens
from common.model.lora import adapter_config, add_lora, advise, import_peft, is_adapter
from common.model.quantised import is_quantised, quantisation, use_plain_arithmetic
from common.model.shards import empty_model, holds_shards, read_record
from common.model.wrap import wrap

import torch
from accelerate import Accelerator

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def load_tokenizer(args: CommonArgs, name: str | Path | None = None) -> Tokenizer:
    """The tokenizer of `name`, else args.tokenizer_name, else the model's, with the chat template of args.

    Raises UserError if it cannot be loaded, or has no end-of-text token.
    """
    if args.model_revision and args.model_name_or_path and Path(args.model_name_or_path).exists():
        raise UserError(f"--model_revision {args.model_revision}: {args.model_name_or_path} is a folder, not a Hub model")
    name = str(name or args.tokenizer_name or args.model_name_or_path)
    revision = args.model_revision if name == args.model_name_or_path else None
    with hub_errors("tokenizer", name):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)
        tokenizer("a Test 1")  # some fail only on their first text
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer {name}: it has no end-of-text token (eos_token): a model would never stop")
    if args.chat_template is not None:
        tokenizer.chat_template = read_chat_template(args.chat_template)
        if args.chat_template == "chatml":
            tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def load_config(name: str, tokenizer: Tokenizer) -> "PreTrainedConfig":
    """The configuration of a model on the Hub or in a folder, adapted to a new model with this tokenizer."""
    with hub_errors("config", name):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    text = config.get_text_config()
    text.vocab_size = len(tokenizer)
    text.bos_token_id, text.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    text.pad_token_id = tokenizer.pad_token_id
    return config


def load_model(
    args: CommonArgs,
    accelerator: Accelerator,
    tokenizer: Tokenizer,
    checkpoint: str | Path | None = None,
    config: "PreTrainedConfig | None" = None,
) -> FlatModel:
    """The model to train: from the checkpoint, else args.model_name_or_path, else new from the configuration.

    With LoRA the checkpoint holds only the adapters; the base is args.model_name_or_path, or the base of that adapter. The
    weights of a sharded checkpoint follow in `run.prepare` (common/run/sharded.py). Gradient checkpointing, compilation and
    the dtype of the weights follow args. The model is on the accelerator's device, except for a dry run or sharded weights,
    which `accelerator.prepare` moves piece by piece.
    """
    name = checkpoint or args.model_name_or_path
    if args.use_peft:
        model = _load_adapted(args, tokenizer, checkpoint, torch.device("cpu") if args.dry_run else accelerator.device)
    elif checkpoint and holds_shards(checkpoint):
        model = _load_frame(args, checkpoint)
    elif name:
        model = load_pretrained(args, name, len(tokenizer))
        if is_quantised(model):
            raise UserError(f"the weights of {name} are quantised and cannot be trained, adapters on them can: --use_peft")
    elif config is not None:
        model = create_model(config, dtype=args.dtype, seed=args.seed)
    else:
        raise UserError("no model to train: name one with --model_name_or_path")
    if args.gradient_checkpointing or args.activation_offloading:
        enable_gradient_checkpointing(model, args.activation_offloading)
    if args.torch_compile:
        compile_layers(model)
    if routes_tokens(model.lm) or args.router_aux_loss_coef:
        model.experts = extra("experts").add_experts(args, base_lm(model.lm))
    model.stop_ids = stop_token_ids(tokenizer, base_lm(model.lm).generation_config)
    set_stop_tokens(model, model.stop_ids, tokenizer)
    if not args.dry_run and accelerator.distributed_type not in SHARDED:
        align(model.to(accelerator.device))
    return model


def _load_frame(args: CommonArgs, checkpoint: str | Path) -> FlatModel:
    """The model of a sharded checkpoint, with its weights still uninitialised."""
    with hub_errors("sharded checkpoint", str(checkpoint)):
        lm = empty_model(checkpoint, trust_remote_code=args.trust_remote_code)
        check_numbers(str(checkpoint), lm)
    lm.base_dtype, lm.left_out = _dtype_of(lm.config), ""
    _freeze_all_but_text(lm)
    return wrap(lm, read_record(checkpoint))


def _load_adapted(args: CommonArgs, tokenizer: Tokenizer, checkpoint: str | Path | None, device: torch.device) -> FlatModel:
    """args.model_name_or_path with a new adapter; if it is an adapter itself, its base with that adapter trained further."""
    name = args.model_name_or_path
    if not name:
        raise UserError("--use_peft adapts an existing model: name it with --model_name_or_path")
    advise(args)
    if not is_adapter(name, args.model_revision):
        model = load_pretrained(args, name, len(tokenizer), device=device)
        return add_lora(args, model, checkpoint, new_tokens=_new_tokens(args, tokenizer, name))
    config = adapter_config(name, args.model_revision)
    base = config.base_model_name_or_path
    say(f"model: training goes on with the adapter {name} (r {config.r}, alpha {config.lora_alpha}), on its base {base}")
    model = load_pretrained(args, base, len(tokenizer), revision=config.revision, device=device)
    return add_lora(args, model, checkpoint, start=name, new_tokens=_new_tokens(args, tokenizer, name))


def _new_tokens(args: CommonArgs, tokenizer: Tokenizer, name: str) -> list[int]:
    """Token ids of the tokenizer that the model or adapter `name` does not know, for instance a chat template's markers."""
    from transformers import AutoTokenizer

    try:
        options = {"revision": args.model_revision, "trust_remote_code": args.trust_remote_code}
        known = AutoTokenizer.from_pretrained(name, **options).get_vocab()
    except Exception:  # no tokenizer of its own (--tokenizer_name): new ids are those without an embedding row
        if is_adapter(name, args.model_revision):
            return []
        rows = _file_config(args, name, args.model_revision).get_text_config().vocab_size
        known = {token for token, i in tokenizer.get_vocab().items() if i < rows}
    found = {token: i for token, i in tokenizer.get_vocab().items() if token not in known}
    if found:
        shown = ", ".join(sorted(found)[:4]) + f" and {len(found) - 4} more" * (len(found) > 4)
        say(f"LoRA: beside the adapter the rows of new tokens are trained: {shown}")
    return sorted(found.values())


def load_pretrained(
    args: CommonArgs,
    name: str | Path,
    vocab_size: int = 0,
    *,
    revision: str | None = None,
    device: torch.device | None = None,
) -> FlatModel:
    """A causal language model from a folder or the Hub, checked to be callable on flat rows. An adapter is merged into its
    base.

    Its weights have args.dtype whatever the files hold: small updates vanish in bfloat16 weights. vocab_size: the number of
    token ids that the tokenizer can produce; a smaller embedding grows to it. revision: for a model other than
    args.model_name_or_path. device: where a model is quantised, and stays (--load_in_4bit, --load_in_8bit).
    """
    name = str(name)
    revision = args.model_revision if name == args.model_name_or_path else revision
    options = {"dtype": DTYPES[args.dtype], "trust_remote_code": args.trust_remote_code}
    if (quantised := quantisation(args)) is not None:
        options |= {"quantization_config": quantised, "device_map": {"": str(device or "cpu")}}
    with hub_errors("model", name):
        if is_adapter(name, revision):  # merged: it is the starting point and, in DPO and GRPO, the reference
            auto_peft = import_peft(f"the adapter {name}").AutoPeftModelForCausalLM
            base = adapter_config(name, revision)
            lm = auto_peft.from_pretrained(name, revision=revision, **options).merge_and_unload().requires_grad_(True)
            config = _file_config(args, base.base_model_name_or_path, base.revision)
            lm.config._name_or_path = name
            say(f"model: the adapter {name}, merged into its base")
        else:
            from transformers import AutoModelForCausalLM

            lm, found = AutoModelForCausalLM.from_pretrained(
                name, revision=revision, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
            check_weights(name, lm, found)
            config = _file_config(args, name, revision)
        check_numbers(name, lm)
    lm.base_dtype = _dtype_of(config)  # restored at export
    lm.left_out = ""
    if config.get_text_config() is not config and lm.config.get_text_config() is lm.config:
        lm.left_out = f"what {config.model_type} has beside its text model (it is exported as {lm.config.model_type})"
    _freeze_all_but_text(lm)
    if quantised is not None and (lm.config.model_type in ("mamba", "falcon_mamba") or not is_quantised(lm)):
        flag = "--load_in_4bit" if args.load_in_4bit else "--load_in_8bit"
        raise UserError(f"{flag}: {type(lm).__name__} has no layers that can be quantised here")
    grow_embedding(lm, vocab_size)
    use_plain_arithmetic(lm)
    return wrap(lm)


def grow_embedding(lm: "PreTrainedModel", vocab_size: int) -> None:
    """Extend the embedding and the head to at least vocab_size rows."""
    known = lm.get_input_embeddings().weight.shape[0]
    if vocab_size > known:
        say(f"model: the embedding grows from {known} to {vocab_size} tokens")
        with torch.random.fork_rng(devices=[]):  # the same random rows for the reference and on every process
            torch.manual_seed(0)
            lm.resize_token_embeddings(vocab_size, mean_resizing=True)


def align(model: torch.nn.Module) -> None:
    """Copy CPU weights that do not start at a multiple of 64 bytes, as freshly allocated ones do.

    Loaded weights start wherever the file has them, and MKL's rounding in matrix products depends on that: a resumed run
    would differ from an uninterrupted one.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu" and tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone()


def enable_gradient_checkpointing(model: FlatModel, offload: bool = False) -> None:
    """Recompute each layer in the backward pass. Non-reentrant, which LoRA's frozen embeddings need.

    offload: keep the layers' inputs, T · D numbers each, in host memory.
    """
    model.offload = offload
    recomputed = {"context_fn": mixers.recompute_contexts} if mixers.recurrent_mixers(model.lm) else {}
    base_lm(model.lm).gradient_checkpointing_enable({"use_reentrant": False} | recomputed)
    if hasattr(model.lm, "enable_input_require_grads"):
        model.lm.enable_input_require_grads()


def compile_layers(model: FlatModel) -> None:
    """torch.compile each transformer block: one small graph for all of them, with unchanged weight names."""
    attention.exclude_from_compilation()
    mixers.exclude_from_compilation()
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            module.compile(dynamic=True)


def set_stop_tokens(model: FlatModel, stop_ids: list[int], tokenizer: Tokenizer) -> None:
    """Make `generate()` of the saved model stop at the same tokens as our sampling."""
    config = base_lm(model.lm).generation_config
    config.eos_token_id = stop_ids if len(stop_ids) > 1 else stop_ids[0]
    config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    make_savable(config)


def _file_config(args: CommonArgs, name: str, revision: str | None) -> "PreTrainedConfig":
    """A model's config.json as in its files, for a loaded model that is only a part of it, or has another dtype."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)


def _dtype_of(config: "PreTrainedConfig") -> str:
    """The dtype of a model's files; "float32" if its config does not say."""
    dtype = str(config.dtype or config.get_text_config().dtype).removeprefix("torch.")
    return dtype if dtype in ("bfloat16", "float16") else "float32"


def _freeze_all_but_text(lm: torch.nn.Module) -> None:
    """Freeze vision and audio towers: text gives them no gradient, so they are exported unchanged."""
    if lm.config.get_text_config() is lm.config:
        return
    text = {id(p) for part in (lm.get_decoder(), lm.get_output_embeddings()) for p in part.parameters()}
    for parameter in lm.parameters():
        if id(parameter) not in text:
            parameter.requires_grad_(False)
