"""New models: their configuration, and random weights."""

import math
from typing import TYPE_CHECKING

from common.data.types import Tokenizer
from common.errors import UserError
from common.model.flat_model import FlatModel
from common.model.wrap import wrap

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def create_model(config: "PreTrainedConfig", *, dtype: str = "float32", seed: int) -> FlatModel:
    """A new model with random weights: a pure function of (config, seed)."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return wrap(AutoModelForCausalLM.from_config(config).to(DTYPES[dtype]))


def llama_config(
    tokenizer: Tokenizer,
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int | None,
    intermediate_size: int | None,
    max_position_embeddings: int,
    initializer_range: float,
    tie_word_embeddings: bool,
    num_experts: int = 0,
    num_experts_per_tok: int = 2,
    moe_intermediate_size: int | None = None,
) -> "PreTrainedConfig":
    """A Llama-type configuration; intermediate_size defaults to 8/3 of hidden_size, rounded up to a multiple of 32.

    With num_experts each MLP becomes a mixture of experts (Mixtral) of moe_intermediate_size; by default a token's experts
    are together as wide as the MLP would be.
    """
    from transformers import LlamaConfig, MixtralConfig

    if hidden_size % num_heads:
        raise UserError(f"--hidden_size {hidden_size} is not divisible by --num_heads {num_heads}")
    if num_heads % (num_kv_heads or num_heads):
        raise UserError(f"--num_heads {num_heads} is not divisible by --num_kv_heads {num_kv_heads}")
    width, experts = intermediate_size or math.ceil(hidden_size * 8 / 3 / 32) * 32, {}
    if num_experts:
        if num_experts_per_tok > num_experts:
            raise UserError(f"--num_experts_per_tok {num_experts_per_tok}: there are only {num_experts} (--num_experts)")
        width = moe_intermediate_size or math.ceil(width / num_experts_per_tok / 32) * 32
        experts = {"num_local_experts": num_experts, "num_experts_per_tok": num_experts_per_tok}
        experts |= {"rope_parameters": LlamaConfig().rope_parameters}  # Mixtral's defaults are for 32k tokens
    return (MixtralConfig if num_experts else LlamaConfig)(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads or num_heads,
        max_position_embeddings=max_position_embeddings,
        initializer_range=initializer_range,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **experts,
    )
