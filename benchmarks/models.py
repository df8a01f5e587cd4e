"""Which models run how, and how exactly: `python benchmarks/models.py [FAMILY ...]`.

A tiny random model of each causal language model that transformers knows (or of those named), in float32: how
it is called (flat rows, padded batches, refused), and the largest differences from the model of transformers
called on each sequence alone: of the logits of a row, of the gradients, as a share of the largest number
there, and of the greedy completions that differ from generate(). The sequences are of unequal length, longer
than the sliding window and than the positions that RoPE was made for; two share a start. Writes models.json
and models.md.
"""

import argparse
from collections.abc import Iterator
import contextlib
import copy
import io
import json
import logging
from pathlib import Path
import re
import sys
import time
from typing import Any
import warnings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.collators import flat_batch
from common.errors import UserError
from common.model import FlatModel
from common.model.wrap import wrap
from common.sampling import sample
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

HERE = Path(__file__).resolve().parent
V, WINDOW, ORIGINAL = 61, 6, 8
# Sizes by the names that configurations give them.
TINY = {
    "vocab_size": V, "hidden_size": 32, "n_embd": 32, "d_model": 32, "word_embed_proj_dim": 32, "embedding_size": 32,
    "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "ffn_hidden_size": 48, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "decoder_ffn_dim": 48, "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4,
    "num_layers": 4, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "max_position_embeddings": 128, "n_positions": 128,
    "max_seq_len": 128, "n_ctx": 128, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.3,
    "init_std": 0.3, "sliding_window": WINDOW, "sliding_window_size": WINDOW, "attention_chunk_size": WINDOW,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "n_group": 1, "topk_group": 1, "moe_topk": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8, "mamba_d_ssm": 64,
    "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_mamba_heads": 2, "state_size": 8, "chunk_size": 8,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": V, "rotary_dim": 8, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "conv_dim": 32, "time_step_rank": 8, "lightning_head_dim": 8, "index_head_dim": 8,
    "index_n_heads": 16, "index_topk": 4, "index_block_size": 4, "index_topk_blocks": 2, "keep_window_size": WINDOW,
    "o_lora_rank": 16, "block_dim": 32, "block_ff_dim": 48, "altup_num_inputs": 2, "unpadded_vocab_size": V,
}  # fmt: skip
# What else a family needs to be tiny.
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dots3_note_text": {"per_layer_config": {}, "shared_experts_intermediate_size": 16},
    "falcon": {"new_decoder_architecture": False},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [48] * 4,
        "laurel_rank": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"n_groups": 2, "num_heads": 8},
    "minimax_m3_vl_text": {"index_n_heads": 2, "layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "phimoe": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": WINDOW, "num_hidden_layers": 3},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "num_mem_blocks": 1,
        "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
MORE["gemma3n"], MORE["dots3_note"] = MORE["gemma3n_text"], MORE["dots3_note_text"]
# Variants of a family.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, "max_position_embeddings": ORIGINAL, "original_max_position_embeddings": ORIGINAL},
    "phi3 longrope": {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0],
            "original_max_position_embeddings": ORIGINAL,
        },
        "original_max_position_embeddings": ORIGINAL,
    },
}  # fmt: skip
LENGTHS = [24, 3, 17, 5]
# Registered as causal language models, and none that one would train here: encoders, decoders of
# encoder-decoder models, parts of vision and speech models, drafts of speculative decoding.
OTHERS = """
bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text electra emu3 ernie fuyu
gemma4_assistant gemma4_unified_assistant git got_ocr2 marian mbart megatron-bert mllama moshi moss_transcribe_diarize
musicgen musicgen_melody mvp pegasus phi4_multimodal plbart prophetnet reformer rembert roberta roberta-prelayernorm roc_bert
roformer trocr whisper xlm xlm-roberta xlm-roberta-xl xlnet xmod
"""


def families() -> list[str]:
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS} - {*OTHERS.split()})


def tiny_config(family: str) -> transformers.PreTrainedConfig:
    kind = family.split()[0]
    cls = CONFIG_MAPPING[kind]
    with quiet():
        default = cls()
    text = default.get_text_config()
    fixed = {
        name
        for cls in type(text).__mro__
        for name, member in vars(cls).items()
        if isinstance(member, property) and not member.fset
    }
    fixed |= {name for name, other in text.attribute_map.items() if other in fixed}
    sizes = {name: value for name, value in TINY.items() if name not in fixed and has(text, name)}
    if (
        isinstance(getattr(text, "num_hidden_layers", None), int)
        and "layer_types" not in fixed
        and getattr(text, "layer_types", None)
    ):
        kinds = list(dict.fromkeys(text.layer_types))
        sizes["layer_types"] = (kinds * 4)[:4]
    if "kv_lora_rank" in sizes:  # keys of latent attention are as many as queries
        sizes["num_key_value_heads"] = 4
    sizes |= MORE.get(kind, {}) | VARIANTS.get(family, {})
    if text is default:
        return cls(**sizes)
    return type(text)(**sizes)


def has(config: transformers.PreTrainedConfig, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # a value of each layer
        return True


def tiny_model(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    with quiet():
        config = tiny_config(family)
        with torch.device("meta"):
            size = sum(
                p.numel() for p in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters()
            )
        if size > 2e7:
            raise ValueError(f"not tiny: {size:,} parameters")
        model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not torch.isfinite(parameter).all():
                parameter.normal_(std=0.1)
    model.generation_config.eos_token_id = V + 5  # never: completions of full length
    model.generation_config.pad_token_id = 0
    return model


def measure(family: str) -> dict[str, Any]:
    found: dict[str, Any] = {"family": family}
    try:
        plain = tiny_model(family)
    except Exception as error:
        return found | {"how": "not built", "why": short(error)}
    found["class"] = type(plain).__name__
    found["parameters"] = sum(p.numel() for p in plain.parameters())
    try:
        with quiet() as said:
            model = wrap(copy.deepcopy(plain))
    except UserError as error:
        return found | {"how": "refused", "why": short(error)}
    except Exception as error:
        return found | {"how": "CRASH", "why": short(error)}
    found["how"] = "padded" if model.padded else "flat"
    if model.padded:
        found["why"] = re.sub(
            r".*cannot be called on flat rows \((.*)\); padded.*", r"\1", said.getvalue().strip()
        )[:200]
    measures = {
        "logits": logits_differ,
        "gradients": gradients_differ,
        "greedy": greedy_differs,
        "sampled": sampled_differ,
    }
    for name, function in measures.items():
        try:
            with quiet():
                found[name] = function(model, plain)
        except Exception as error:
            found[name] = short(error)
    return found


def sequences() -> list[list[dict[str, np.ndarray]]]:
    """Four of unequal length; the third begins with the tokens of the first... of the second, which are
    shared."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(2, V, n) for n in LENGTHS]
    rows[3][:2] = rows[2][:2]
    masks = [np.r_[0, np.ones(n - 1, int)] for n in LENGTHS]
    masks[2][:2] = masks[3][:2] = 0
    return [[{"input_ids": ids, "loss_mask": mask}] for ids, mask in zip(rows, masks, strict=True)]


def logits_differ(model: FlatModel, plain: torch.nn.Module) -> float:
    """Of the trained tokens' log-probabilities, all of a row, from each sequence alone: the largest
    difference, in nats."""
    batch = flat_batch(sequences(), torch.device("cpu"))
    with torch.no_grad():
        model.eval()
        ours = model(batch).logps
        alone = alone_logps(plain, sequences())
    return float((ours[batch["targets"]] - alone).abs().max())


def alone_logps(plain: torch.nn.Module, rows: list[list[dict[str, np.ndarray]]]) -> torch.Tensor:
    found = []
    for (row,) in rows:
        ids = torch.tensor(row["input_ids"])
        logps = plain(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        of_tokens = logps[:-1].gather(-1, ids[1:, None])[:, 0]
        found.append(of_tokens[torch.tensor(row["loss_mask"][1:], dtype=torch.bool)])
    return torch.cat(found)


def gradients_differ(model: FlatModel, plain: torch.nn.Module) -> float:
    """The largest difference of a gradient, as a share of the largest one of that parameter."""
    batch = flat_batch(sequences(), torch.device("cpu"))
    model.eval()
    model.zero_grad(), plain.zero_grad()
    model(batch).logps.sum().backward()
    alone_logps(plain, sequences()).sum().backward()
    theirs, worst = dict(plain.named_parameters()), 0.0
    scale = max(float(p.grad.abs().max()) for p in theirs.values() if p.grad is not None)
    for name, parameter in model.lm.named_parameters():
        other = theirs[name].grad
        if parameter.grad is None and other is None:
            continue
        one = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        two = torch.zeros_like(parameter) if other is None else other
        worst = max(worst, float((one - two).abs().max()) / max(float(two.abs().max()), 1e-3 * scale))
    return worst


def greedy_differs(model: FlatModel, plain: torch.nn.Module) -> str:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, V, n).tolist() for n in (5, 3, 9, 5)]
    model.stop_ids = [V + 5]
    ours = sample(model, prompts, [(i,) for i in range(4)], max_new_tokens=12, stop_ids=[], temperature=0.0)
    wrong = 0
    for prompt, completion in zip(prompts, ours, strict=True):
        # Without a cache: with one, keys keep the positions of a shorter text where RoPE depends on the
        # length, xLSTM's fails, and HRM's gives other logits than the whole text does.
        options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "use_cache": False}
        out = plain.generate(torch.tensor([prompt]), **options)
        wrong += out[0, len(prompt) :].tolist() != completion.ids
    return f"{wrong} of 4"


def sampled_differ(model: FlatModel, plain: torch.nn.Module) -> float:
    """Of the log-probabilities that sampling gives for its tokens, from those of the whole text: the largest,
    in nats."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(2, V, n).tolist() for n in (5, 3, 9, 5)]
    found = sample(model, prompts, [(i,) for i in range(4)], max_new_tokens=16, stop_ids=[])
    rows = [np.array(prompt + completion.ids) for prompt, completion in zip(prompts, found, strict=True)]
    masks = [np.arange(len(row)) >= len(prompt) for row, prompt in zip(rows, prompts, strict=True)]
    with torch.no_grad():
        alone = alone_logps(
            plain, [[{"input_ids": row, "loss_mask": m}] for row, m in zip(rows, masks, strict=True)]
        )
    return float(
        (alone - torch.tensor([logp for completion in found for logp in completion.logps])).abs().max()
    )


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    with (
        contextlib.redirect_stdout(io.StringIO()) as said,
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield said


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:4000].replace("\n", " ")[:160]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("family", nargs="*")
    parser.add_argument("--out", default=str(HERE / "models"))
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    results = []
    for family in asked.family or families():
        begun = time.time()
        found = measure(family)
        results.append(found)
        print(json.dumps(found), f"{time.time() - begun:.1f}s", flush=True)
    if not asked.family:
        Path(f"{asked.out}.json").write_text(json.dumps(results, indent=1) + "\n")
        Path(f"{asked.out}.md").write_text(table(results))


def table(results: list[dict[str, Any]]) -> str:
    """The results as a page: families without a difference in two lists, the others in a table."""
    fine = [found for found in results if found.get("greedy") == "0 of 4" and found["sampled"] < 1e-4]
    lines = [
        "# Models",
        "",
        f"`python benchmarks/models.py`: tiny random models, float32, CPU, transformers {transformers.__version__}, torch "
        f"{torch.__version__}. All figures: models.json.",
        "",
        "*logits*: largest difference of a trained token's log-probability, in a row of four sequences beside each alone, in nats;",
        "*gradients*: largest difference, as a share of the largest number; *greedy*: completions that are not those of `generate()`",
        "without its cache; *sampled*: largest difference of the log-probability that sampling gives for a token from that in the whole",
        "text. Weights are large, so that differences show.",
        "",
    ]
    for how in ("flat", "padded"):
        usual = [found for found in fine if found["how"] == how]
        worst = {name: max(found[name] for found in usual) for name in ("logits", "gradients", "sampled")}
        lines += [
            f"{how.capitalize()}, {len(usual)} of {len(results)} families, at most {worst['logits']:.0e} (logits), "
            f"{worst['gradients']:.0e} (gradients) and {worst['sampled']:.0e} (sampled), all greedy completions the same: "
            f"{', '.join(found['family'] for found in usual)}.",
            "",
        ]
    lines += [
        "| other families | called on | logits | gradients | greedy | sampled | why not flat |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in results:
        if found not in fine:
            numbers = [found.get(name, "") for name in ("logits", "gradients", "greedy", "sampled")]
            shown = [f"{n:.0e}" if isinstance(n, float) else str(n) for n in numbers]
            lines.append(
                f"| {found['family']} | {found['how']} | {' | '.join(shown)} | {found.get('why', '')} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
