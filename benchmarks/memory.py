"""What training takes on a GPU, by size and method: the table of docs/memory.md, computed by the estimate of
--dry_run.

    python benchmarks/memory.py                      # seconds for each model; no weights, no GPU, no network
    python benchmarks/memory.py --tokens 16384
    python benchmarks/memory.py --measure            # on a GPU: the peak of a step of two micro-batches

The models have the sizes of their config.json on the Hub. Their weights are reserved and never written, so
that they take no memory. QLoRA is LoRA with the linear layers of the blocks at 4 bits and 8 bits for the
scale of 64 weights.
"""

import argparse
import gc
from pathlib import Path
import sys

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.args import CommonArgs
from common.collators import flat_batch
from common.data import all_trained
from common.model import make_optimizer
from common.model.attention import FLAT, register
from common.model.flat_model import FlatModel, base_lm
from common.model.quantised import use_plain_arithmetic
from common.run.dry_run import GIB, estimate, nbytes
import numpy as np
from peft import LoraConfig, get_peft_model
import torch
import transformers

# hidden, MLP, layers, heads, key/value heads, tied embeddings; of Qwen2.5 and, with 8B, of Llama 3.1
SIZES = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False),
    "Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128256, False),
    "Qwen2.5-14B": (5120, 13824, 48, 40, 8, 152064, False),
}
WAYS = {  # what is said on the command line, and the precision of the weights that it means
    "full": torch.float32,
    "full, --optim adamw_8bit": torch.float32,
    "LoRA": torch.float32,
    "LoRA, --dtype bfloat16": torch.bfloat16,
    "QLoRA, --dtype bfloat16": torch.bfloat16,
}


def make(name: str, dtype: torch.dtype, device: str) -> torch.nn.Module:
    hidden, mlp, layers, heads, kv_heads, vocabulary, tied = SIZES[name]
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
    with torch.device("meta"):
        lm = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    lm.to_empty(device=device).tie_weights()
    return lm


def quantise(lm: torch.nn.Module, device: str) -> None:
    """The linear layers of the blocks as --load_in_4bit loads them."""
    import bitsandbytes

    known = {"quant_type": "nf4", "compress_statistics": True}
    for parent in list(lm.model.layers.modules()):
        for name, linear in list(parent.named_children()):
            if isinstance(linear, torch.nn.Linear):
                has_bias = linear.bias is not None
                layer = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, has_bias, **known)
                layer.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, **known)
                setattr(parent, name, layer.to(device))
    lm.is_loaded_in_4bit = True  # read by peft
    use_plain_arithmetic(CommonArgs(load_in_4bit=True), lm)


def total(name: str, way: str, dtype: torch.dtype, lengths: list[int], measured_on: str | None) -> float:
    """GiB. measured_on: a device; None: the estimate for a GPU."""
    register()
    lm = make(name, dtype, measured_on or "cpu")
    if measured_on and "QLoRA" in way:
        quantise(lm, measured_on)
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lm.set_attn_implementation(FLAT)
    if "LoRA" in way:
        lm = get_peft_model(lm, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        lm.enable_input_require_grads()
    optim = "adamw_8bit" if "8bit" in way else "adamw"
    if measured_on:
        return peak(FlatModel(lm).train(), lengths, optim, torch.device(measured_on))
    needed = estimate(
        FlatModel(lm),
        lengths,
        mixed_precision="bf16",
        accumulation=2,
        optim=optim,
        device=torch.device("cuda"),
    )["total"]
    if "QLoRA" in way:
        blocks = [m.base_layer.weight for m in base_lm(lm).modules() if hasattr(m, "lora_A")]
        needed -= (nbytes(blocks) - sum(w.numel() for w in blocks) * (4 + 8 / 64) / 8) / GIB
    return needed


def peak(model: FlatModel, lengths: list[int], optim: str, device: torch.device) -> float:
    """GiB that CUDA's allocator has held at once in two steps of two micro-batches; 0 on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    optimizer = make_optimizer(CommonArgs(optim=optim), model)
    batch = flat_batch([[all_trained(np.arange(n))] for n in lengths], device)
    for step in range(4):
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(batch, nll_weights=batch["loss_mask"]).nll
        loss.backward()
        del loss
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch, in sequences of 1,024")
    parser.add_argument("--only", nargs="+", default=list(SIZES))
    parser.add_argument("--measure", action="store_true", help="on a GPU; nan: it does not fit")
    args = parser.parse_args()
    lengths = [1024] * max(1, args.tokens // 1024)
    first = True
    for name in args.only:
        found = {}
        for way, dtype in WAYS.items():
            try:
                found[way] = total(name, way, dtype, lengths, "cuda" if args.measure else None)
            except torch.OutOfMemoryError:
                found[way] = float("nan")
            gc.collect()  # a model and its parts know each other
            torch.cuda.empty_cache()
        if first:
            print(f"| model | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
            first = False
        print(f"| {name} | {' | '.join(f'{gib:.1f}' for gib in found.values())} |", flush=True)


if __name__ == "__main__":
    main()
