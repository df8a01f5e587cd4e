"""What training takes on a GPU, by size and method: the table of docs/memory.md, computed by the estimate of --dry_run.

    python benchmarks/memory.py                      # seconds for each model; no weights, no GPU, no network
    python benchmarks/memory.py --tokens 16384

The models are made without memory (torch's fake tensors), with the sizes of their config.json on the Hub: the estimate sends
rows through them as it does before a run. QLoRA is LoRA with the linear layers of the blocks at 4 bits and 8 bits for
the scale of 64 weights.
"""

import argparse
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.model.attention import FLAT, register
from common.model.flat_model import FlatModel, base_lm
from common.run.estimate import GIB, estimate, nbytes

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode

SIZES = {  # hidden, MLP, layers, heads, key/value heads, tied embeddings; of Qwen2.5 and, with 8B, of Llama 3.1
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False),
    "Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128256, False),
    "Qwen2.5-14B": (5120, 13824, 48, 40, 8, 152064, False),
}
FAKE = FakeTensorMode(allow_non_fake_inputs=True)
GPU = torch.device("cuda")


WAYS = {  # what is said on the command line, and the precision of the weights that it means
    "full": torch.float32,
    "full, --optim adamw_8bit": torch.float32,
    "LoRA": torch.float32,
    "LoRA, --dtype bfloat16": torch.bfloat16,
    "QLoRA, --dtype bfloat16": torch.bfloat16,
}


def make(name: str, dtype: torch.dtype, layers: int) -> torch.nn.Module:
    hidden, mlp, _, heads, kv_heads, vocabulary, tied = SIZES[name]
    cls = transformers.LlamaConfig if name.startswith("Llama") else transformers.Qwen2Config
    config = cls(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=32768,
        tie_word_embeddings=tied,
    )
    with FAKE:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def total(lm: torch.nn.Module, lengths: list[int], trained: float, **options: object) -> float:
    tokens = sum(lengths)
    options = {"device": GPU, "mixed_precision": "bf16", "lengths": lengths} | options
    register()
    lm.set_attn_implementation(FLAT)
    return estimate(FlatModel(lm), tokens, max(1, round(tokens * trained)), **options)["total"]


def of_layers(name: str, way: str, dtype: torch.dtype, layers: int, lengths: list[int], trained: float) -> float:
    """The same of a model with so many layers. Under LoRA each adds the same: what is highest there are activations."""
    lm = make(name, dtype, layers)
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if "LoRA" in way:
        with FAKE, mock.patch.object(torch.nn.Module, "to", lambda module, *place, **options: module):  # they cannot move
            lm = get_peft_model(lm, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"), "default", False)
        lm.enable_input_require_grads()
    needed = total(lm, lengths, trained, optim="adamw_8bit" if "8bit" in way else "adamw")
    if "QLoRA" in way:
        blocks = [m.base_layer.weight for m in base_lm(lm).modules() if hasattr(m, "lora_A")]
        needed -= (nbytes(blocks) - sum(w.numel() for w in blocks) * (4 + 8 / 64) / 8) / GIB
    return needed


def row(name: str, lengths: list[int], trained: float) -> dict[str, float]:
    """GiB by method."""
    found, layers = {}, SIZES[name][2]
    for way, dtype in WAYS.items():
        if "LoRA" not in way:
            found[way] = of_layers(name, way, dtype, layers, lengths, trained)
            continue
        few, more = (of_layers(name, way, dtype, count, lengths, trained) for count in (4, 8))
        found[way] = few + (more - few) / 4 * (layers - 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch, in sequences of 1,024")
    parser.add_argument("--only", nargs="+", default=list(SIZES))
    args = parser.parse_args()
    lengths = [1024] * max(1, args.tokens // 1024)
    first = True
    for name in args.only:
        found = row(name, lengths, 0.5)
        if first:
            print(f"| model | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
            first = False
        print(f"| {name} | {' | '.join(f'{gib:.1f}' for gib in found.values())} |", flush=True)


if __name__ == "__main__":
    main()
