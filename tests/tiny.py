"""Tiny random models for the tests, and sequences of their tokens: no file, no network, milliseconds."""

import copy

from common.model import FlatModel
from common.model.wrap import wrap
import numpy as np
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
    # large, so that the most probable token stands out and differs from place to place
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
HEAD, MOE = {"head_dim": 8}, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FEW = {"vocab_size": V, "hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 1}
WINDOW = {**SIZE, **HEAD, "sliding_window": 6}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
# The name of the configuration's class, and its sizes.
TINY = {
    "llama": ("LlamaConfig", SIZE),
    "qwen3": ("Qwen3Config", {**SIZE, "head_dim": 12, "tie_word_embeddings": True}),
    "gpt2": (
        "GPT2Config",
        {
            **FEW,
            "n_positions": 128,
            "initializer_range": 0.3,
            "resid_pdrop": 0.5,
            "embd_pdrop": 0.5,
            "attn_pdrop": 0.5,
        },
    ),
    "mistral": ("MistralConfig", WINDOW),
}
FAMILIES = TINY | {
    "llama-tied": ("LlamaConfig", {**SIZE, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", WINDOW),
    "granite": ("GraniteConfig", {**SIZE, "logits_scaling": 3.0}),
    "mixtral": ("MixtralConfig", {**SIZE, "num_local_experts": 4}),
    "gpt-neox": ("GPTNeoXConfig", {name: SIZE[name] for name in SIZE if name != "num_key_value_heads"}),
    # Scores that soft-capping changes, and sinks that take a share.
    "gemma2": ("Gemma2Config", {**WINDOW, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 1.5}),
    "gpt-oss": ("GptOssConfig", {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    # These go through padded batches.
    "bloom": ("BloomConfig", FEW),
    "falcon": (
        "FalconConfig",
        {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}
        | {"bos_token_id": 0, "eos_token_id": 1},
    ),
    "phimoe": (
        "PhimoeConfig",
        {
            **SIZE,
            "sliding_window": 5,
            "num_local_experts": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {**SIZE, **HEAD, "intermediate_size_mlp": 64, "attention_chunk_size": 5, "num_local_experts": 4}
        | {"num_experts_per_tok": 1},
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {**SIZE, **LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 2},
    ),
    # Its layers choose four of the tokens before: among those of one prompt, sampled by itself.
    "deepseek-v32": (
        "DeepseekV32Config",
        {
            **SIZE,
            **LATENT,
            "num_key_value_heads": 4,
            "index_topk": 4,
            "index_n_heads": 16,
            "index_head_dim": 8,
        }
        | {"first_k_dense_replace": 2},
    ),
}


def tiny_config(kind: str) -> transformers.PreTrainedConfig:
    name, sizes = FAMILIES[kind]
    return getattr(transformers, name)(**sizes)


def tiny_lm(kind: str, seed: int = 0) -> transformers.PreTrainedModel:
    """A model as transformers makes it, in eval mode. gpt2 has dropout, mistral a sliding window of 6
    tokens."""
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(tiny_config(kind)).eval()


def tiny_pair(kind: str, seed: int = 0) -> tuple[FlatModel, transformers.PreTrainedModel]:
    """The same model twice: behind flat calls and in training mode, and as transformers has it."""
    lm = tiny_lm(kind, seed)
    return wrap(copy.deepcopy(lm)).train(), lm


# Models with layers that carry a state along a sequence: the name of the configuration's class, and its
# sizes.
FOUR = {**SIZE, "num_hidden_layers": 4, "num_key_value_heads": 4}
LINEAR = {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_conv_kernel_dim": 4}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
DELTA |= {**LINEAR, **HEAD}
CONV = {"layer_types": ["conv", "full_attention"]}
MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
SSM = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
PURE = {
    name: SIZE[name]
    for name in SIZE
    if name not in ("intermediate_size", "num_attention_heads", "num_key_value_heads")
}
PURE |= {"state_size": 8}
ZAMBA = {"mamba_d_state": 8, "mamba_expand": 2, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}
HYBRIDS = {
    "qwen3.5": ("Qwen3_5TextConfig", {**FOUR, **DELTA}),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**FOUR, **DELTA, **MOE, "shared_expert_intermediate_size": 24}),
    "qwen3-next": ("Qwen3NextConfig", {**FOUR, **DELTA, **MOE, "shared_expert_intermediate_size": 24}),
    "lfm2": ("Lfm2Config", {**SIZE, **CONV}),
    "lfm2-moe": ("Lfm2MoeConfig", {**SIZE, **CONV, **MOE, "num_dense_layers": 1}),
    "lfm3": ("Lfm3Config", {**SIZE, **CONV}),
    "falcon-h1": ("FalconH1Config", {**SIZE, **SSM, "mamba_d_ssm": 64, "mamba_proj_bias": True}),
    "nemotron-h": (
        "NemotronHConfig",
        {name: SIZE[name] for name in SIZE if name != "num_hidden_layers"}
        | {"hybrid_override_pattern": "M-M*-M", **HEAD}
        | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8},
    ),
    "bamba": ("BambaConfig", {**SIZE, **SSM, "attn_layer_indices": [1]}),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        {
            **SIZE,
            **SSM,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        }
        | {"shared_intermediate_size": 24, "mamba_expand": 2},
    ),
    "jamba": (
        "JambaConfig",
        {
            **SIZE,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        }
        | {"num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4, "mamba_proj_bias": True},
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
    "zamba": (
        "ZambaConfig",
        {**FOUR, **ZAMBA, "mamba_dt_rank": 4, "n_mamba_heads": 2, "attention_head_dim": 16},
    ),
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
FAMILIES |= HYBRIDS


def spread(name: str, sizes: dict, seed: int = 0, **options: str) -> transformers.PreTrainedModel:
    """In eval mode, with weights that set its distributions apart from place to place."""
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**sizes)
    lm = transformers.AutoModelForCausalLM.from_config(config, **options).eval()
    with torch.no_grad():
        for name, p in lm.named_parameters():
            if p.dim() >= 2 or "sinks" in name or name.endswith("proj.bias"):
                p.normal_(0, 0.2)
    return lm


def tiny_family(kind: str, seed: int = 0, **options: str) -> transformers.PreTrainedModel:
    return spread(*FAMILIES[kind], seed, **options)


def tokens(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, V, n).tolist()


def sequence(prompt: list[int], answer: list[int], **fields: object) -> dict:
    """Of which the answer is trained."""
    mask = np.array([0] * len(prompt) + [1] * len(answer), np.uint8)
    return {"input_ids": np.array([*prompt, *answer]), "loss_mask": mask, **fields}
