"""The estimate of the memory that training needs, against what PyTorch's profiler and the system measure."""

import copy
import gc
import json
import sys

from common.args import CommonArgs
from common.collators import flat_batch
from common.data.types import all_trained
from common.model.load import enable_gradient_checkpointing
from common.model.lora import add_lora
from common.model.wrap import wrap
from common.run import dry_run
from common.run.dry_run import estimate, nbytes
import numpy as np
import pytest
import torch
import transformers

from tests.conftest import run_script
from tests.data.rows import process
from tests.tiny import HYBRIDS, SIZE, V, tiny_family

GIB = 2**30
UNEQUAL = [50, 12, 31, 30, 44, 12, 47]
# Large enough that what kernels take inside a call, a few KiB, is small beside what a pass holds.
SIZES = SIZE | {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 500}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=500, n_embd=128, n_layer=2, n_head=4, n_positions=128),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=32, sliding_window=16),
    "experts": lambda: transformers.Qwen3MoeConfig(**SIZES, **MOE, head_dim=32),
}
# Three training steps in a process of their own: the estimate before them, and the peak.
TRAIN = """
import copy, json, sys
from common.args import CommonArgs
from common.collators import flat_batch
from common.data.types import all_trained
from common.memory import memory
from common.model.create import create_model
from common.model.load import enable_gradient_checkpointing, load_pretrained
from common.model.optimizer import make_optimizer
from common.run.dry_run import estimate
import numpy as np, torch, transformers

size, recompute, lengths = json.loads(sys.argv[1])
if size == "demo":
    model = load_pretrained(CommonArgs(), "data/base_model")
else:
    shape = dict(vocab_size=16000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12)
    model = create_model(transformers.LlamaConfig(**shape, tie_word_embeddings=True), seed=0)
if recompute:
    enable_gradient_checkpointing(model)
model.train()
needed = estimate(copy.deepcopy(model), lengths)["total"]
optimizer = make_optimizer(CommonArgs(learning_rate=1e-4), model)
batch = flat_batch([[all_trained(np.arange(n) % 500)] for n in lengths], torch.device("cpu"))
for _ in range(3):
    model(batch, nll_weights=batch["loss_mask"] / sum(lengths)).nll.backward()
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps([needed, memory(torch.device("cpu")).peak]))
"""


def make(kind="llama", *, lora=False, recompute=False):
    torch.manual_seed(0)
    model = wrap(
        tiny_family(kind)
        if kind in HYBRIDS
        else transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())
    )
    if lora:
        pytest.importorskip("peft")
        model = add_lora(CommonArgs(lora_r=4, lora_alpha=8), model)
    if recompute:
        enable_gradient_checkpointing(model)
    return model.train()


def measured(model, lengths, mixed_precision="no", steps=1):
    """Bytes that the CPU's allocator holds at most beside the model in a forward and backward pass, by
    PyTorch's profiler."""
    gc.collect()  # or earlier models would be freed meanwhile
    draw = np.random.default_rng(1)
    batch = flat_batch([[all_trained(draw.integers(V, size=n))] for n in lengths], torch.device("cpu"))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed_precision == "bf16"):
                loss = model(batch, nll_weights=batch["loss_mask"]).nll
            loss.backward()
            del loss
    now = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    model.zero_grad()
    return most


def estimated(model, lengths, **options):
    """The same by the estimate, which leaves a model that cannot be trained."""
    parts = estimate(copy.deepcopy(model), lengths, **options)
    return (parts["gradients"] + parts["activations"]) * GIB


PEAKS = [
    (kind, UNEQUAL, {"recompute": r}, p) for kind in CONFIGS for r in (False, True) for p in ("no", "bf16")
]
# With dropout PyTorch's attention keeps the weights of all pairs of tokens.
PEAKS += [(kind, lengths, {}, "no") for kind in ("llama", "gpt2") for lengths in ([120], [60] * 6)]
PEAKS += [
    (kind, UNEQUAL, {"lora": True, "recompute": r}, "no") for kind in ("llama", "gpt2") for r in (False, True)
]
PEAKS += [
    (kind, UNEQUAL, {}, "no") for kind in ("qwen3.5", "lfm2", "mamba2", "jamba", "zamba2") if kind in HYBRIDS
]
# Enough by default: all take a minute.
FAST = [
    ("llama", UNEQUAL, {"recompute": False}, "bf16"),
    ("llama", UNEQUAL, {"recompute": True}, "no"),
    ("llama", [120], {}, "no"),
    ("llama", UNEQUAL, {"lora": True, "recompute": True}, "no"),
    ("lfm2", UNEQUAL, {}, "no"),
]
PEAKS = [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in PEAKS]


@pytest.mark.parametrize(("kind", "lengths", "settings", "mixed_precision"), PEAKS, ids=str)
def test_the_peak_is_the_profiler_s(kind, lengths, settings, mixed_precision):
    model = make(kind, **settings)
    peak = measured(model, lengths, mixed_precision)
    assert estimated(model, lengths, mixed_precision=mixed_precision) == pytest.approx(peak, rel=0.1)


def test_the_estimate_is_of_the_largest_part(monkeypatch):
    """A micro-batch is computed in two parts here; a step has three on each of two processes."""
    estimates = []

    def estimate(_, lengths, **how):
        estimates.append((lengths, how))
        return {"total": 1.0}

    monkeypatch.setattr(dry_run, "tokens_at_once", lambda *_: 50)
    monkeypatch.setattr(dry_run, "estimate", estimate)
    accelerator = process(world=2, accumulation=3)
    accelerator.mixed_precision = "bf16"
    accelerator.distributed_type = "MULTI_CPU"
    dry_run.show_memory(CommonArgs(optim="muon"), accelerator, None, [20, 45, 40, 10], reference=True)
    how = {"mixed_precision": "bf16", "accumulation": 6, "optim": "muon", "reference": True, "ddp": True}
    assert estimates == [([20, 45], how | {"device": accelerator.device})]


def test_the_sequences_of_a_pair_may_have_more_tokens_than_positions_together():
    pairs = estimate(make("gpt2"), [140, 180])
    sequences = estimate(make("gpt2"), [70, 70, 90, 90])
    assert pairs["activations"] == sequences["activations"]


def test_later_micro_batches_start_with_gradients():
    model = make()
    peak = measured(model, [30, 20], steps=3)
    assert estimated(model, [30, 20], accumulation=3) == pytest.approx(peak, rel=0.05)
    assert estimated(model, [30, 20]) < 0.95 * peak


@pytest.mark.parametrize("lora", [False, True])
def test_weights_gradients_and_moments_are_exact(lora):
    model = make(lora=lora)
    parts = estimate(model, [20, 30], reference=True)
    trained = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    assert parts["gradients"] * GIB == trained and parts["optimizer"] * GIB == 2 * trained
    assert (
        parts["weights"] == parts["reference model"] == nbytes([*model.parameters(), *model.buffers()]) / GIB
    )
    assert parts["total"] == pytest.approx(sum(size for name, size in parts.items() if name != "total"))
    assert estimate(make(lora=lora), [20, 30], ddp=True)["gradients"] == 2 * parts["gradients"]


CASES = [("demo", False, [38, 51, 22, 40] * 4), ("demo", False, [512] * 8)]
CASES += [("100M", False, [512]), ("100M", True, [512] * 2), ("100M", False, [180, 90, 250, 128])]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_process_peaks_near_its_estimate(case):
    done = run_script([sys.executable, "-c", TRAIN, json.dumps(case)], timeout=600)
    assert done.returncode == 0, done.stderr
    needed, peak = json.loads(done.stdout.splitlines()[-1])
    assert 0.75 * peak < needed < 1.5 * peak
