"""Models and tokenizers: loaded from a folder or the Hub, checked, ready for training; and new ones."""

from collections.abc import Iterator
import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from common.args import CommonArgs
from common.data.chat import read_chat_template, set_defaults, stop_token_ids
from common.data.types import Tokenizer
from common.errors import UserError, say
from common.extras import extra
from common.memory import SHARDED, is_oom
from common.model import attention
from common.model.flat_model import FlatModel, base_lm, is_quantised, routes_tokens
from common.model.save import SHARDS
from common.model.wrap import wrap
import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@contextlib.contextmanager
def hub_errors(kind: str, name: str) -> Iterator[None]:
    """Load without progress bars and reports, and turn any exception of a library into one line with the
    folder's name."""
    import transformers

    is_path = name.startswith(("/", ".", "~", "outputs/")) or name.count("/") > 1  # a Hub name is OWNER/NAME
    if is_path and not Path(name).exists():
        raise UserError(
            f"cannot load the {kind} {name}: no such folder; if an earlier stage writes it, run that first"
        )
    # "Loading weights: 100%" for every model, on every process
    transformers.utils.logging.disable_progress_bar()
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # a long report with raw tensor names
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a folder may hold anything
        if is_oom(error):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        hint = (
            "" if Path(name).exists() else " (not a local folder; is it a Hub name, and the Hub reachable?)"
        )
        raise UserError(f"cannot load the {kind} {name}{hint}: {reason}") from None
    finally:
        transformers.utils.logging.set_verbosity(verbosity)


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
    adapter. The weights of a sharded checkpoint follow in `run.prepare` (extras/sharded.py): until then they
    are those of the start. Gradient checkpointing, compilation and the dtype of the weights follow args. The
    model is on the accelerator's device, except for a dry run or sharded weights, which `accelerator.prepare`
    moves piece by piece.
    """
    if checkpoint and Path(checkpoint, SHARDS).is_dir():
        checkpoint = None
    name = checkpoint or args.model_name_or_path
    if args.use_peft:
        device = torch.device("cpu") if args.dry_run else accelerator.device
        model = extra("lora").load_adapted(args, tokenizer, checkpoint, device)
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
    if routes_tokens(model.lm) or args.router_aux_loss_coef:
        model.experts = extra("experts").add_experts(args, base_lm(model.lm))
    model.stop_ids = stop_token_ids(tokenizer, base_lm(model.lm).generation_config)
    set_stop_tokens(model, model.stop_ids, tokenizer)
    if not args.dry_run and accelerator.distributed_type not in SHARDED:
        align(model.to(accelerator.device))
    return model


def is_adapter(name: str | Path | None, revision: str | None = None) -> bool:
    """Whether a folder, or a repository on the Hub, holds an adapter rather than a model."""
    if name is None or Path(name).exists():
        return name is not None and Path(name, "adapter_config.json").exists()
    from transformers.utils import find_adapter_config_file

    try:
        return find_adapter_config_file(str(name), revision=revision) is not None
    except Exception:  # no such repository, or no network: reported on loading
        return False


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
    in the files, but float32 for float16, which gradients leave). vocab_size: the number of token ids that
    the tokenizer can produce; a smaller embedding grows to it. revision: for a model other than
    args.model_name_or_path. device: where a model is quantised, and stays (--load_in_4bit, --load_in_8bit).
    """
    name = str(name)
    revision = args.model_revision if name == args.model_name_or_path else revision
    options = {"dtype": DTYPES.get(args.dtype, "auto"), "trust_remote_code": args.trust_remote_code}
    if args.load_in_4bit or args.load_in_8bit:
        options |= extra("quantised").loading_options(args, device)
    with hub_errors("model", name):
        if is_adapter(name, revision):  # merged: it is the starting point and, in DPO and GRPO, the reference
            lm, config = extra("lora").load_merged(name, revision, **options)
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
        extra("quantised").use_plain_arithmetic(args, lm)
    return wrap(lm)


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


def first_of(names: list[str]) -> str:
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)


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
    """Extend the embedding and the head to at least vocab_size rows."""
    known = lm.get_input_embeddings().weight.shape[0]
    if vocab_size > known:
        say(f"model: the embedding grows from {known} to {vocab_size} tokens")
        with torch.random.fork_rng(devices=[]):  # the same random rows for the reference and on every process
            torch.manual_seed(0)
            lm.resize_token_embeddings(vocab_size, mean_resizing=True)


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
    recomputed = {"context_fn": extra("hybrids").recompute_contexts} if model.hybrid else {}
    base_lm(model.lm).gradient_checkpointing_enable({"use_reentrant": False} | recomputed)
    if hasattr(model.lm, "enable_input_require_grads"):
        model.lm.enable_input_require_grads()


def compile_layers(model: FlatModel) -> None:
    """torch.compile each transformer block: one small graph for all of them, with unchanged weight names."""
    attention.exclude_from_compilation()
    if model.hybrid:
        extra("hybrids").exclude_from_compilation()
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            module.compile(dynamic=True)


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


def file_config(args: CommonArgs, name: str, revision: str | None) -> "PreTrainedConfig":
    """A model's config.json as in its files, for a loaded model that is only a part of it, or has another
    dtype."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)


def dtype_of(config: "PreTrainedConfig") -> str:
    """The dtype of a model's files; "float32" if its config does not say."""
    dtype = str(config.dtype or config.get_text_config().dtype).removeprefix("torch.")
    return dtype if dtype in ("bfloat16", "float16") else "float32"


def _freeze_all_but_text(lm: nn.Module) -> None:
    """Freeze vision and audio towers: text gives them no gradient, so they are exported unchanged."""
    if lm.config.get_text_config() is lm.config:
        return
    text = {id(p) for part in (lm.get_decoder(), lm.get_output_embeddings()) for p in part.parameters()}
    for parameter in lm.parameters():
        if id(parameter) not in text:
            parameter.requires_grad_(False)


# --- new models ---------------------------------------------------------------------------------------------


def create_model(config: "PreTrainedConfig", *, dtype: str = "float32", seed: int) -> FlatModel:
    """A new model with random weights: a pure function of (config, seed)."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return wrap(AutoModelForCausalLM.from_config(config).to(DTYPES.get(dtype, torch.float32)))


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


def llama_config(
    tokenizer: Tokenizer,
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int | None,
    intermediate_size: int | None,
    num_experts: int = 0,
    num_experts_per_tok: int = 2,
    moe_intermediate_size: int | None = None,
    **more: Any,
) -> "PreTrainedConfig":
    """A Llama-type configuration; intermediate_size defaults to 8/3 of hidden_size, rounded up to a multiple
    of 32.

    With num_experts each MLP becomes a mixture of experts (Mixtral) of moe_intermediate_size; by default a
    token's experts are together as wide as the MLP would be. more: further fields of the configuration.
    """
    from transformers import LlamaConfig

    if hidden_size % num_heads:
        raise UserError(f"--hidden_size {hidden_size} is not divisible by --num_heads {num_heads}")
    if num_heads % (num_kv_heads or num_heads):
        raise UserError(f"--num_heads {num_heads} is not divisible by --num_kv_heads {num_kv_heads}")
    width = intermediate_size or math.ceil(hidden_size * 8 / 3 / 32) * 32
    shape = dict(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads or num_heads,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **more,
    )
    if num_experts:
        return extra("experts").mixtral_config(shape, num_experts, num_experts_per_tok, moe_intermediate_size)
    return LlamaConfig(**shape)
