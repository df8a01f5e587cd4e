"""Tiny random models for the tests: no file, no network, milliseconds."""

import copy

from common.model import FlatModel
from common.model.wrap import wrap

import torch
import transformers

V = 61  # tokens of every tiny model
SIZE = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # large, so that the most probable token stands out and differs from place to place
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
TINY = {
    "llama": lambda: transformers.LlamaConfig(**SIZE),
    "qwen3": lambda: transformers.Qwen3Config(**SIZE, head_dim=12, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=V,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.3,
        resid_pdrop=0.5,
        embd_pdrop=0.5,
        attn_pdrop=0.5,
        bos_token_id=0,
        eos_token_id=1,
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZE, head_dim=8, sliding_window=6),
}


def tiny_lm(kind: str, seed: int = 0) -> transformers.PreTrainedModel:
    """A model as transformers makes it, in eval mode. gpt2 has dropout, mistral a sliding window of 6 tokens."""
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(TINY[kind]()).eval()


def tiny_pair(kind: str, seed: int = 0) -> tuple[FlatModel, transformers.PreTrainedModel]:
    """The same model twice: behind flat calls and in training mode, and as transformers has it."""
    lm = tiny_lm(kind, seed)
    return wrap(copy.deepcopy(lm)).train(), lm
