"""Models and tokenizers: loaded or made new, checked on a few tokens, and made ready to train."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.data.chat import read_chat_template
from common.errors import UserError, say
from common.model.attention import FLAT, first_places
from common.model.flat_model import LogProbModel, base_lm
from common.model.fused_layers import lighten
from common.model.lm_head import logits_of

import numpy as np
import torch
import transformers
from torch import Tensor, nn

transformers.utils.logging.disable_progress_bar()  # "Loading weights: 100%" for every model, on every process

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_model(model_name_or_path: str | None, previous_stage: str) -> str:
    """The model to start from, said aloud: what was asked for, else the last stage's output, else the shipped base."""
    if model_name_or_path is not None:
        return model_name_or_path
    if (Path(previous_stage) / "summary.json").exists():
        say(f"model: {previous_stage} (the finished run of the last stage)")
        return previous_stage
    base = "data/base_model"
    if not Path(base, "config.json").exists():
        raise UserError(f"no --model_name_or_path, and neither {previous_stage} nor {base} is here: name a model")
    stage = Path(previous_stage).name
    say(f"model: {base} (it ships here; there is no finished run in {previous_stage}, which train_{stage}.py would make)")
    return base


def load_tokenizer(name: str, chat_template: str | None = None, *, revision: str | None = None, trust: bool = False):
    """A tokenizer with, where asked, another chat template: `chatml`, `plain`, or a .jinja file."""
    with _hub_errors("tokenizer", name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust)
    if tokenizer.eos_token_id is None:
        raise UserError(f"tokenizer {name}: it has no end-of-text token (eos_token): a model would never stop")
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
        if chat_template == "chatml":
            tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def load_model(
    name: str,
    *,
    dtype: str = "float32",
    revision: str | None = None,
    trust: bool = False,
    vocab_size: int | None = None,
) -> LogProbModel:
    """A causal language model from a folder or the Hub, checked to be callable on flat rows.

    float32 is the default whatever the file holds: small updates vanish in bfloat16 weights. vocab_size: the number of
    token ids that the tokenizer can produce; the embedding grows when it has fewer rows.
    """
    adapter = Path(name, "adapter_config.json").exists()
    with _hub_errors("model", name):
        if adapter:  # merged, so that it is the starting point and, in DPO and GRPO, the reference
            auto = _peft(name).AutoPeftModelForCausalLM
            lm = auto.from_pretrained(name, dtype=_dtype(dtype), trust_remote_code=trust).merge_and_unload()
            lm.config._name_or_path = name
            say(f"model: the adapter {name}, merged into its base")
        else:
            lm = transformers.AutoModelForCausalLM.from_pretrained(
                name, dtype=_dtype(dtype), revision=revision, trust_remote_code=trust
            )
    if vocab_size is not None and vocab_size > lm.get_input_embeddings().weight.shape[0]:
        say(f"model: the embedding grows from {lm.get_input_embeddings().weight.shape[0]} to {vocab_size} tokens")
        with torch.random.fork_rng():  # the new rows are drawn: the same for the model and its reference, on every process
            torch.manual_seed(0)
            lm.resize_token_embeddings(vocab_size, mean_resizing=True)
    return wrap(lm)


def create_model(config: transformers.PretrainedConfig, *, dtype: str = "float32", seed: int) -> LogProbModel:
    """A new model with random weights: a pure function of (config, seed)."""
    torch.manual_seed(seed)
    return wrap(transformers.AutoModelForCausalLM.from_config(config).to(_dtype(dtype)))


def wrap(lm: nn.Module) -> LogProbModel:
    """Put the language model behind flat calls, after checking on a few tokens that they give what it gives itself."""
    lm.config.use_cache = True  # what is saved must generate quickly; training switches the cache off per call
    if lm.get_output_embeddings() is None:
        raise UserError(f"{type(lm).__name__} has no LM head (get_output_embeddings): it cannot be trained here")
    model = LogProbModel(lm)
    if any(p.is_meta for p in lm.parameters()):
        lm.set_attn_implementation(FLAT)  # weights arrive later (FSDP's efficient loading): nothing to check with
        return model
    lighten(lm)
    implementation = lm.config._attn_implementation
    V = lm.config.get_text_config().vocab_size
    ids, other = (torch.arange(start, start + 9, device=lm.device) * 7919 % V for start in (0, 100))
    other[5:] = ids[5:]  # two rows that differ in their first sequence only
    exact, rough = (1e-5, 1e-3) if lm.dtype == torch.float32 else (1e-2, 5e-2)
    lengths, places = [5, 3, 3], np.array([0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 8])  # the last one shares its first two tokens
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 2]], device=lm.device)
    rows = [
        {"input_ids": row[None], "position_ids": positions, "lengths": lengths, "places": places} for row in (ids, other)
    ]
    with torch.no_grad(), _eval_mode(lm):
        each = [lm(input_ids=part[None], use_cache=False).logits[0] for part in ids[places].split(lengths)]
        alone = torch.cat(each)[first_places(places)].float()
        try:
            lm.set_attn_implementation(FLAT)
            flat, after_other = (logits_of(lm, model._hidden_flat(row)).float() for row in rows)
            leaks = not _close(flat[5:], after_other[5:], exact)
            reason = "its sequences would see each other" if leaks or not _close(flat, alone, rough) else None
        except Exception as error:  # each architecture refuses in its own way; padded batches are checked below
            reason = " ".join(str(error).split())
        if reason is not None:
            lm.set_attn_implementation(implementation)
            model.padded = True
            if not _close(logits_of(lm, model._hidden_padded(rows[0])).float(), alone, rough):
                raise UserError(f"{type(lm).__name__}: its head does more than scale or cap the logits: unsupported")
            say(f"model: {type(lm).__name__} cannot be called on flat rows ({reason}); padded batches instead")
    return model


def add_lora(
    model: LogProbModel,
    r: int,
    alpha: int,
    dropout: float,
    target_modules: list[str] | None,
    checkpoint: Path | None = None,
) -> LogProbModel:
    """Freeze the model and put LoRA adapters on it (Hu et al. 2021, arXiv 2106.09685), new or those of a checkpoint.

    Raises UserError without peft, for layers that do not exist, or where the model is itself an adapter: one that stands
    on another could not be loaded again.
    """
    peft = _peft("--use_peft")
    base = model.lm.config._name_or_path
    if Path(base, "adapter_config.json").exists():
        raise UserError(f"--use_peft: {base} is an adapter itself; train it with --merge_lora to build on it")
    if checkpoint is not None:
        return LogProbModel(peft.PeftModel.from_pretrained(model.lm, checkpoint, is_trainable=True), padded=model.padded)
    config = peft.LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=target_modules or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        return LogProbModel(peft.get_peft_model(model.lm, config), padded=model.padded)
    except ValueError as error:
        raise UserError(f"--lora_target_modules: {error}") from None


def _peft(wanted_by: str) -> Any:
    try:
        import peft
    except ImportError:
        raise UserError(f"{wanted_by} needs peft: pip install peft") from None
    return peft


def enable_gradient_checkpointing(model: LogProbModel, offload: bool = False) -> None:
    """Recompute each layer in the backward pass. Non-reentrant, which LoRA's frozen embeddings need.

    offload: what the layers are recomputed from, T · D numbers each, waits in the memory of the host.
    """
    model.offload = offload
    base_lm(model.lm).gradient_checkpointing_enable({"use_reentrant": False})
    if hasattr(model.lm, "enable_input_require_grads"):
        model.lm.enable_input_require_grads()


def check_positions(model: LogProbModel, longest: int) -> None:
    """Raise UserError where the longest sequence has more tokens than the model has positions."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and longest > most:
        raise UserError(f"a sequence may have {longest} tokens, the model has {most} positions: lower the length limits")


def compile_layers(model: LogProbModel) -> None:
    """torch.compile on each transformer block: one small graph for all of them, names of the weights unchanged."""
    for module in model.modules():
        if type(module).__name__ in (model._no_split_modules or ()):
            module.compile(dynamic=True)


def set_stop_tokens(model: LogProbModel, stop_ids: list[int], tokenizer: Any) -> None:
    """Make `generate()` of the saved model stop where our sampling stops."""
    config = base_lm(model.lm).generation_config
    config.eos_token_id = stop_ids if len(stop_ids) > 1 else stop_ids[0]
    config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if not config.do_sample and any(getattr(config, name, None) not in (None, 1.0) for name in ("temperature", "top_p")):
        config.do_sample = True  # transformers refuses to save sampling settings without it, at the end of the run


def load_config(name: str, tokenizer: Any) -> transformers.PretrainedConfig:
    """The configuration of a model on the Hub or in a folder, for this tokenizer."""
    with _hub_errors("config", name):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    text = config.get_text_config()
    text.vocab_size = len(tokenizer)
    text.bos_token_id, text.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    text.pad_token_id = tokenizer.pad_token_id
    return config


def llama_config(
    tokenizer: Any,
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int | None,
    intermediate_size: int | None,
    max_position_embeddings: int,
    initializer_range: float,
    tie_word_embeddings: bool,
) -> transformers.PretrainedConfig:
    """A Llama-type configuration; intermediate_size defaults to 8/3 of hidden_size, rounded up to 32."""
    if hidden_size % num_heads:
        raise UserError(f"--hidden_size {hidden_size} is not divisible by --num_heads {num_heads}")
    if num_heads % (num_kv_heads or num_heads):
        raise UserError(f"--num_heads {num_heads} is not divisible by --num_kv_heads {num_kv_heads}")
    return transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or math.ceil(hidden_size * 8 / 3 / 32) * 32,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads or num_heads,
        max_position_embeddings=max_position_embeddings,
        initializer_range=initializer_range,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UserError(f"--dtype is float32 or bfloat16, not {name}")
    return DTYPES[name]


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool((a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-6))


@contextlib.contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    was_training = module.training
    module.eval()
    yield
    module.train(was_training)


@contextlib.contextmanager
def _hub_errors(kind: str, name: str) -> Iterator[None]:
    """Loading errors of transformers (often ten lines) as one."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        hint = "" if Path(name).exists() else " (not a local folder; is it a Hub name, and the Hub reachable?)"
        raise UserError(f"cannot load the {kind} {name}{hint}: {reason}") from None
