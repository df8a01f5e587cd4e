"""Models and tokenizers: loaded from a folder or the Hub, checked, ready for training."""

import contextlib
import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from common.args import CommonArgs
from common.data.chat import stop_token_ids
from common.data.chat_template import read_chat_template, set_defaults
from common.data.types import Tokenizer
from common.errors import UserError, say
from common.memory import SHARDED
from common.model import attention, hybrids
from common.model.create import create_model
from common.model.experts import make_experts
from common.model.files import DTYPES, dtype_of, file_config, first_of, hub_errors, is_adapter
from common.model.flat_model import FlatModel, base_lm, is_quantised
from common.model.lora import adapter_config, add_lora, check_mergeable, import_peft
from common.model.quantised import loading_options, use_plain_arithmetic
from common.model.save import SHARDS
from common.model.wrap import wrap
import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Otherwise Inductor picks one of two kernels for reductions by the number of tokens on a GPU, and compiles a
# graph for each range of it.
COMPILE_OPTIONS = {"triton.mix_order_reduction": False}


def load_tokenizer(args: CommonArgs, name: str | Path | None = None) -> Tokenizer:
    """The tokenizer of `name`, else args.tokenizer_name, else the model's, with the chat template of args.

    Raises UserError if it cannot be loaded, or has no end-of-text token.
    """
    if args.model_revision and args.model_name_or_path and Path(args.model_name_or_path).exists():
        raise UserError(
            f"--model_revision {args.model_revision}: {args.model_name_or_path} is a folder, not a Hub model"
        )
    name = str(name or args.tokenizer_name or args.model_name_or_path)
    revision = args.model_revision if name == args.model_name_or_path else None
    with hub_errors("tokenizer", name):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=revision, trust_remote_code=args.trust_remote_code
        )
        tokenizer("a Test 1")  # some fail only on their first text
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer {name}: it has no end-of-text token (eos_token): a model would never stop"
        )
    if args.chat_template is not None:
        tokenizer.chat_template = read_chat_template(args.chat_template)
        if args.chat_template == "chatml":
            tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    if args.template_kwargs:
        set_defaults(tokenizer, args.template_kwargs)
    return tokenizer


# --- the model to train -------------------------------------------------------------------------------------


def load_model(
    args: CommonArgs,
    accelerator: Accelerator,
    tokenizer: Tokenizer,
    checkpoint: str | Path | None = None,
    config: "PreTrainedConfig | None" = None,
) -> FlatModel:
    """The model to train: from the checkpoint, else args.model_name_or_path, else new from the configuration.

    With LoRA the checkpoint holds only the adapters; the base is args.model_name_or_path, or the base of that
    adapter. The weights of a sharded checkpoint follow in `run.prepare` (run/sharded.py): until then they
    are those of the start. Gradient checkpointing, compilation and the dtype of the weights follow args. The
    model is on the accelerator's device, except for a dry run or sharded weights, which `accelerator.prepare`
    moves piece by piece.
    """
    if checkpoint and Path(checkpoint, SHARDS).is_dir():
        checkpoint = None
    name = checkpoint or args.model_name_or_path
    if args.use_peft:
        device = torch.device("cpu") if args.dry_run else accelerator.device
        model = load_adapted(args, tokenizer, checkpoint, device)
    elif name:
        model = load_pretrained(args, name, len(tokenizer))
        if is_quantised(model.lm):
            raise UserError(
                f"the weights of {name} are quantised and cannot be trained, adapters on them can: --use_peft"
            )
    elif config is not None:
        model = create_model(config, dtype=args.dtype, seed=args.seed)
    else:
        raise UserError("no model to train: name one with --model_name_or_path")
    if args.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    if args.torch_compile:
        compile_layers(model)
    model.experts = make_experts(args, base_lm(model.lm))
    model.stop_ids = stop_token_ids(tokenizer, base_lm(model.lm).generation_config)
    set_stop_tokens(model, model.stop_ids, tokenizer)
    if not args.dry_run and accelerator.distributed_type not in SHARDED:
        align(model.to(accelerator.device))
    return model


def load_adapted(
    args: CommonArgs, tokenizer: Tokenizer, checkpoint: str | Path | None, device: torch.device
) -> FlatModel:
    """args.model_name_or_path with a new adapter; if it is an adapter itself, its base with that adapter
    trained further."""
    name = args.model_name_or_path
    base = name
    revision = args.model_revision
    start = None  # an adapter that is trained further
    if is_adapter(name, revision):
        config = adapter_config(name, revision)
        start = name
        base = config.base_model_name_or_path
        revision = config.revision
        settings = f"r {config.r}, alpha {config.lora_alpha}"
        say(f"model: the adapter {name} is trained further, as it is ({settings}), on its base {base}")
    model = load_pretrained(args, base, len(tokenizer), revision=revision, device=device)
    return add_lora(args, model, checkpoint, start=start, new_tokens=_new_tokens(args, tokenizer, name))


def _new_tokens(args: CommonArgs, tokenizer: Tokenizer, name: str) -> list[int]:
    """Token ids of the tokenizer that the model or adapter `name` does not know, for instance a chat
    template's markers."""
    from transformers import AutoTokenizer

    try:
        options = {"revision": args.model_revision, "trust_remote_code": args.trust_remote_code}
        known = AutoTokenizer.from_pretrained(name, **options).get_vocab()
    # no tokenizer of its own (--tokenizer_name): new ids are those without an embedding row
    except Exception:
        if is_adapter(name, args.model_revision):
            return []
        rows = file_config(args, name, args.model_revision).get_text_config().vocab_size
        known = {token for token, i in tokenizer.get_vocab().items() if i < rows}
    found = {token: i for token, i in tokenizer.get_vocab().items() if token not in known}
    if found:
        say(f"LoRA: beside the adapter the rows of new tokens are trained: {first_of(sorted(found))}")
    return sorted(found.values())


def load_pretrained(
    args: CommonArgs,
    name: str | Path,
    vocab_size: int = 0,
    *,
    revision: str | None = None,
    device: torch.device | None = None,
) -> FlatModel:
    """A causal language model from a folder or the Hub, checked to be callable on flat rows. An adapter is
    merged into its base.

    Its weights have args.dtype whatever the files hold: small updates vanish in bfloat16 weights ("auto": as
    in the files, but float32 for float16, whose range gradients leave). vocab_size: the number of token ids that
    the tokenizer can produce; a smaller embedding grows to it. revision: for a model other than
    args.model_name_or_path. device: where a model is quantised, and stays (--load_in_4bit, --load_in_8bit).
    """
    name = str(name)
    revision = args.model_revision if name == args.model_name_or_path else revision
    options = {"dtype": DTYPES.get(args.dtype, "auto"), "trust_remote_code": args.trust_remote_code}
    if args.load_in_4bit or args.load_in_8bit:
        options |= loading_options(args, device)
    with hub_errors("model", name):
        if is_adapter(name, revision):  # merged: it is the starting point and, in DPO and GRPO, the reference
            lm, config = load_merged(name, revision, **options)
        else:
            from transformers import AutoModelForCausalLM

            lm, found = AutoModelForCausalLM.from_pretrained(
                name, revision=revision, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
            check_weights(name, lm, found)
            config = file_config(args, name, revision)
    lm.base_dtype = dtype_of(config)  # restored at export
    if config.get_text_config() is not config and lm.config.get_text_config() is lm.config:
        say(
            f"model: what {config.model_type} has beside its text model is left out (exported as {lm.config.model_type})"
        )
    if lm.dtype == torch.float16 and not is_quantised(lm):
        lm = lm.float()
    _freeze_all_but_text(lm)
    grow_embedding(lm, vocab_size)
    if is_quantised(lm):
        use_plain_arithmetic(args, lm)
    return wrap(lm)


def load_merged(
    adapter: str, revision: str | None = None, base: str | None = None, **options: Any
) -> "tuple[PreTrainedModel, PreTrainedConfig]":
    """The model of an adapter merged into its base, and the config in the base's files. base: replaces the
    one that the adapter names. options: of from_pretrained."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    peft, config = import_peft(f"the adapter {adapter}"), adapter_config(adapter, revision)
    name, at = (base, None) if base else (config.base_model_name_or_path, config.revision)
    trust = {"trust_remote_code": options.get("trust_remote_code", False)}
    with hub_errors("model", name):
        files = AutoConfig.from_pretrained(name, revision=at, **trust)
    if getattr(files, "quantization_config", None) is not None:
        other = f"python -m tools.merge_lora {adapter} OUT --base THE_MODEL"
        raise UserError(
            f"the base {name} is quantised: merge into the model that it was made of, in its own dtype: {other}"
        )
    with hub_errors("model", name):
        lm = AutoModelForCausalLM.from_pretrained(name, revision=at, **options)
    with contextlib.suppress(OSError, ValueError):  # there may be no tokenizer beside the adapter
        grow_embedding(lm, len(AutoTokenizer.from_pretrained(adapter, revision=revision, **trust)))
    adapted = peft.PeftModel.from_pretrained(lm, adapter, revision=revision)
    check_mergeable(adapted)
    lm = adapted.merge_and_unload().requires_grad_(True)
    lm.config._name_or_path = adapter
    say(f"model: the adapter {adapter}, merged into its base")
    return lm, files


def check_weights(name: str, lm: "PreTrainedModel", found: dict[str, Any]) -> None:
    """Raise UserError for tensors that are missing in the files or have another size, and would be random;
    for unexpected ones within a layer, which would be dropped; and for a NaN or an infinity. Whole unused
    parts (a vision tower, a head for another task) are left out with a message."""
    if missing := sorted({*found["missing_keys"], *(tensor for tensor, *_ in found["mismatched_keys"])}):
        raise UserError(
            f"cannot load the model {name}: its files lack {first_of(missing)}, or have it in another size"
        )
    unexpected = sorted(found["unexpected_keys"])
    if cut := [tensor for tensor in unexpected if _within_a_part(lm, tensor)]:
        raise UserError(
            f"cannot load the model {name}: its config.json has no place for {first_of(cut)} of its files"
        )
    if unexpected:
        say(f"model: {type(lm).__name__} has no place for {first_of(unexpected)} of {name}: left out")
    for tensor, parameter in lm.named_parameters():
        if not torch.isfinite(parameter.detach()).all():
            raise UserError(f"cannot load the model {name}: {tensor} holds a NaN or an infinity")


def _within_a_part(lm: "PreTrainedModel", tensor: str) -> bool:
    """Whether an unexpected tensor belongs inside the model: one more layer, a bias missing from config.json.
    (The layers that predict further tokens, of DeepSeek and GLM, are not reported as unexpected.)"""
    part: nn.Module = lm
    for name in tensor.split(".")[:-1]:
        inner = getattr(part, name, None)
        if not isinstance(inner, nn.Module):
            break
        part = inner
    return part is not lm and part is not lm.base_model and part is not lm.get_decoder()


def grow_embedding(lm: "PreTrainedModel", vocab_size: int) -> None:
    """Extend the embedding and the head to at least vocab_size rows. Rows of zeros below that
    (padding that new tokens now use) become the mean of the others, much like the rows that are added."""
    num_rows = lm.get_input_embeddings().weight.shape[0]
    if vocab_size > num_rows:
        say(f"model: the embedding grows from {num_rows} to {vocab_size} tokens")
        with torch.random.fork_rng(devices=[]):  # the same random rows for the reference and on every process
            torch.manual_seed(0)
            lm.resize_token_embeddings(vocab_size, mean_resizing=True)
    padding = getattr(lm.get_input_embeddings(), "padding_idx", None)
    for part in (lm.get_input_embeddings(), lm.get_output_embeddings()):
        if part is None or not part.weight.is_floating_point():
            continue
        weight = part.weight.detach()
        is_empty = (weight == 0).all(1)
        filled = weight[~is_empty]
        if padding is not None:
            is_empty[padding] = False
        is_empty[vocab_size:] = False
        if is_empty.any() and len(filled):
            weight[is_empty] = filled.float().mean(0).to(weight.dtype)
            say(
                f"model: {int(is_empty.sum())} tokens have rows of zeros: they start as the mean of the others"
            )


def align(model: nn.Module) -> None:
    """Copy CPU weights that do not start at a multiple of 64 bytes, as freshly allocated ones do.

    Loaded weights start wherever the file has them, and MKL's rounding in matrix products depends on that: a
    resumed run would differ from an uninterrupted one.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if (
            type(tensor) in (torch.Tensor, nn.Parameter)
            and tensor.device.type == "cpu"
            and tensor.data_ptr() % 64
        ):
            tensor.data = tensor.data.clone()


def enable_gradient_checkpointing(model: FlatModel) -> None:
    """Recompute each layer in the backward pass. Non-reentrant, which LoRA's frozen embeddings need."""
    lm = base_lm(model.lm)
    if not lm.supports_gradient_checkpointing:
        raise UserError(f"--gradient_checkpointing: {type(lm).__name__} has none")
    options: dict[str, Any] = {"use_reentrant": False}
    if model.hybrid.mixers or model.hybrid.rotaries:
        options["context_fn"] = hybrids.recompute_contexts
    older_name = lm.gradient_checkpointing_enable
    enable = getattr(lm, "activation_checkpointing_enable", older_name)
    enable(options)
    if hasattr(model.lm, "enable_input_require_grads"):
        model.lm.enable_input_require_grads()


def compile_layers(model: FlatModel) -> None:
    """torch.compile each transformer block: one small graph for all of them, with unchanged weight names."""
    attention.exclude_from_compilation()
    hybrids.exclude_from_compilation()
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_in_one_line)
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            module.compile(dynamic=True, options=COMPILE_OPTIONS)


def _in_one_line(record: logging.LogRecord) -> bool:
    """A filter of torch's log: its five lines on each part of a block with too many graphs become one of ours."""
    if "hit config." not in str(record.msg):
        return True
    limit, most, *_ = record.args
    _say_once(limit, most)
    return False


@functools.cache
def _say_once(limit: str, most: int) -> None:
    say(
        f"--torch_compile: a block needs more than {most} graphs ({limit}): what fits none of them runs uncompiled; "
        'TORCH_LOGS="recompiles" shows why'
    )


def set_stop_tokens(model: FlatModel, stop_ids: list[int], tokenizer: Tokenizer) -> None:
    """Make `generate()` of the saved model stop at the same tokens as our sampling."""
    config = base_lm(model.lm).generation_config
    config.eos_token_id = stop_ids if len(stop_ids) > 1 else stop_ids[0]
    config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    make_savable(base_lm(model.lm))


def make_savable(lm: "PreTrainedModel") -> None:
    """Keep only the tokens of generation settings that transformers would refuse to save at the first
    checkpoint."""
    config = lm.generation_config
    try:
        config.validate(strict=True)
    except ValueError:
        lm.generation_config = type(config)(
            **{name: v for name, v in vars(config).items() if name.endswith("token_id")}
        )


def _freeze_all_but_text(lm: nn.Module) -> None:
    """Freeze vision and audio towers: text gives them no gradient, so they are exported unchanged."""
    if lm.config.get_text_config() is lm.config:
        return
    text = {id(p) for part in (lm.get_decoder(), lm.get_output_embeddings()) for p in part.parameters()}
    for parameter in lm.parameters():
        if id(parameter) not in text:
            parameter.requires_grad_(False)
