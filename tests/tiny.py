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


# Models with layers that carry a state along a sequence: the name of the configuration's class, and its sizes.
HEAD, MOE = {"head_dim": 8}, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FOUR = {**SIZE, "num_hidden_layers": 4, "num_key_value_heads": 4}
LINEAR = {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_conv_kernel_dim": 4}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
DELTA |= {**LINEAR, **HEAD}
CONV = {"layer_types": ["conv", "full_attention"]}
MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
SSM = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
PURE = {name: SIZE[name] for name in SIZE if name not in ("intermediate_size", "num_attention_heads", "num_key_value_heads")}
PURE |= {"state_size": 8}
ZAMBA = {"mamba_d_state": 8, "mamba_expand": 2, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}
HYBRIDS = {
    "qwen3.5": ("Qwen3_5TextConfig", {**FOUR, **DELTA}),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**FOUR, **DELTA, **MOE, "shared_expert_intermediate_size": 24}),
    "qwen3-next": ("Qwen3NextConfig", {**FOUR, **DELTA, **MOE, "shared_expert_intermediate_size": 24}),
    "lfm2": ("Lfm2Config", {**SIZE, **CONV}),
    "lfm2-moe": ("Lfm2MoeConfig", {**SIZE, **CONV, **MOE, "num_dense_layers": 1}),
    "lfm3": ("Lfm3Config", {**SIZE, **CONV}),
    "falcon-h1": ("FalconH1Config", {**SIZE, **SSM, "mamba_d_ssm": 64}),
    "nemotron-h": (
        "NemotronHConfig",
        {name: SIZE[name] for name in SIZE if name != "num_hidden_layers"}
        | {"hybrid_override_pattern": "M-M*-M", **HEAD}
        | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8},
    ),
    "bamba": ("BambaConfig", {**SIZE, **SSM, "attn_layer_indices": [1]}),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        {**SIZE, **SSM, "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"shared_intermediate_size": 24, "mamba_expand": 2},
    ),
    "jamba": (
        "JambaConfig",
        {**SIZE, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
    "mamba": ("MambaConfig", PURE),
    "mamba2": ("Mamba2Config", {**PURE, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8}),
    "falcon-mamba": ("FalconMambaConfig", PURE),
    "kimi-linear": (
        "KimiLinearConfig",
        {**FOUR, **LINEAR, **MLA, "linear_num_heads": 4, "linear_head_dim": 8, "moe_intermediate_size": 24}
        | {"mlp_layer_types": ["dense"] + ["sparse"] * 3},
    ),
    "olmo-hybrid": ("OlmoHybridConfig", {**FOUR, **DELTA}),
    "zamba": ("ZambaConfig", {**FOUR, **ZAMBA, "mamba_dt_rank": 4, "n_mamba_heads": 2, "attention_head_dim": 16}),
    "zamba2": (
        "Zamba2Config",
        {**FOUR, **ZAMBA, "n_mamba_heads": 4, "mamba_headdim": 16, "mamba_ngroups": 1, "chunk_size": 8}
        | {"num_mem_blocks": 1, "use_mem_rope": True},
    ),
    "bailing-hybrid": ("BailingHybridConfig", {**FOUR, **LINEAR}),
    "recurrent-gemma": (
        "RecurrentGemmaConfig",
        {name: SIZE[name] for name in SIZE if name not in ("max_position_embeddings", "initializer_range")}
        | {"lru_width": 32, "attention_window_size": 16, "block_types": ["recurrent", "attention"], **HEAD},
    ),
    "minimax": (
        "MiniMaxConfig",
        {**SIZE, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8, **HEAD}
        | {"layer_types": ["linear_attention", "full_attention"]},
    ),
}
HYBRIDS = {name: made for name, made in HYBRIDS.items() if hasattr(transformers, made[0])}


def tiny_hybrid(name: str, seed: int = 0) -> transformers.PreTrainedModel:
    """In eval mode, with weights that set its distributions apart from place to place."""
    kind, sizes = HYBRIDS[name]
    torch.manual_seed(seed)
    lm = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes)).eval()
    with torch.no_grad():
        for p in lm.parameters():
            if p.dim() >= 2:
                p.normal_(0, 0.2)
    return lm
