"""New models: a configuration, and random weights from a seed."""

import math
from typing import TYPE_CHECKING, Any

from common.data.types import Tokenizer
from common.errors import UserError
from common.model.experts import mixtral_config
from common.model.files import DTYPES, hub_errors
from common.model.flat_model import FlatModel
from common.model.wrap import wrap
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


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
        return mixtral_config(shape, num_experts, num_experts_per_tok, moe_intermediate_size)
    return LlamaConfig(**shape)
