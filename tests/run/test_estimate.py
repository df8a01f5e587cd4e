"""The estimate of the memory that training needs: against what a micro-batch holds at its true size, and measured peaks."""

import copy
import json
import sys
from types import SimpleNamespace

from common.args import CommonArgs
from common.collators import flat_batch
from common.data.types import whole
from common.model.flat_model import FlatModel
from common.model.load import enable_gradient_checkpointing
from common.model.lora import add_lora
from common.model.wrap import wrap
from common.run.estimate import _Live, estimate, nbytes, savings, show_memory, show_size
from common.run.gpu_memory import processes_of_a_copy, sharing, varlen_workspace
from tests.conftest import run_script
from tests.tiny import SIZE, tiny_pair

import numpy as np
import pytest
import torch
import transformers
from accelerate.utils import DistributedType, ParallelismConfig

GIB = 2**30
CPU = torch.device("cpu")
LENGTHS = {"one sequence": [96], "equal": [40] * 6, "unequal": [50, 12, 31, 30, 44, 12, 47]}
# Real training steps in a process of their own: its peak, and what was estimated before them.
TRAIN = """
import json, sys
from common.args import CommonArgs
from common.collators import flat_batch
from common.data.types import whole
from common.losses import nll
from common.run.estimate import estimate
from common.memory import memory
from common.model.load import create_model
from common.model.load import enable_gradient_checkpointing, load_pretrained
from common.model.optimizer import make_optimizer
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
targets = sum(lengths) - len(lengths)
parts = estimate(model, sum(lengths), targets, lengths=lengths)
optimizer = make_optimizer(CommonArgs(learning_rate=1e-4), model)
batch = flat_batch([[whole(np.arange(n) % 500)] for n in lengths], torch.device("cpu"))
for _ in range(3):
    out = model(batch, entropy=True)
    (nll(out.logps, batch["loss_mask"]) / targets).backward()
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps([parts["total"], memory(torch.device("cpu")).peak]))
"""


def tiny(kind="llama", *, lora=False, recompute=False):
    model = tiny_pair(kind)[0]
    if lora:
        model = add_lora(CommonArgs(lora_r=4, lora_alpha=8), model)
    if recompute:
        enable_gradient_checkpointing(model)
    return model.train()


def deep():
    """Enough layers that recomputing them is worth it."""
    config = transformers.LlamaConfig(**SIZE | {"num_hidden_layers": 10})
    return wrap(transformers.AutoModelForCausalLM.from_config(config)).train()


def parts_of(model, lengths, **options):
    return estimate(model, sum(lengths), sum(lengths) - len(lengths), lengths=lengths, **options)


def held(model, lengths):
    """What a micro-batch of true size holds at most, in GiB: the body of the model, forward and backward."""
    batch = flat_batch([[whole(np.arange(n) % 61)] for n in lengths], CPU)
    with _Live(model) as live:
        hidden = model.hidden(batch)
        hidden.backward(torch.zeros_like(hidden))
        return live.most / GIB


# --- the parts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True])
def test_weights_gradients_and_moments_are_exact_and_the_parts_add_up(lora):
    model = tiny(lora=lora)
    parts = parts_of(model, [20, 30])
    trained = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    assert trained < sum(4 * p.numel() for p in model.parameters()) or not lora
    assert parts["gradients"] == trained / GIB
    assert parts["optimizer"] == 2 * trained / GIB
    assert parts["weights"] == nbytes([*model.parameters(), *model.buffers()]) / GIB
    assert list(parts)[-1] == "total"
    assert parts["total"] == pytest.approx(sum(size for name, size in parts.items() if name != "total"))


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_a_few_tokens_tell_what_a_whole_row_holds(kind, lengths):
    model = tiny(kind)
    before = held(model, lengths)  # with the gradients of this tiny model, which are small beside it
    model.zero_grad()
    assert parts_of(model, lengths)["activations"] == pytest.approx(before, rel=0.15)


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_grow_with_the_tokens(recompute):
    model = tiny(recompute=recompute)
    one, two, four = (parts_of(model, [64] * n)["activations"] for n in (8, 16, 32))
    assert two / one == pytest.approx(2, rel=0.01)
    assert four - two == pytest.approx(2 * (two - one), rel=0.01)


def test_attention_with_dropout_holds_the_square_of_the_length():
    model = tiny("gpt2")  # PyTorch's attention keeps the weights of every pair of tokens, as it drops some
    short, long = parts_of(model, [64] * 16)["activations"], parts_of(model, [1024])["activations"]
    assert long > 3 * short
    model = tiny("llama")
    assert parts_of(model, [1024])["activations"] == pytest.approx(parts_of(model, [64] * 16)["activations"], rel=0.01)


def test_recomputed_layers_are_held_one_at_a_time():
    assert parts_of(tiny(recompute=True), [64] * 8)["activations"] < 0.75 * parts_of(tiny(), [64] * 8)["activations"]
    both = tiny(lora=True, recompute=True)
    assert 0 < parts_of(both, [64] * 8)["activations"] < 0.75 * parts_of(tiny(lora=True), [64] * 8)["activations"]


def test_later_micro_batches_find_the_gradients_of_the_first():
    model = tiny()
    once, again = (parts_of(model, [8], accumulation=n) for n in (1, 4))
    assert once["not at once"] < again["not at once"]
    assert once["gradients"] == again["gradients"]


def test_processes_share_or_copy():
    model = tiny()
    alone, ddp, shared = (parts_of(model, [64], **options) for options in ({}, {"ddp": True}, {"shards": 4}))
    assert ddp["gradients"] == 2 * alone["gradients"]
    assert all(shared[name] == alone[name] / 4 for name in ("weights", "gradients", "optimizer"))
    blocks = sum(4 * p.numel() for name, p in model.named_parameters() if ".layers." in name)
    assert shared["gathered layers"] == pytest.approx(alone["weights"] - blocks / GIB + 4 * blocks / 2 / GIB, rel=0.01)
    half = parts_of(model, [64], shards=4, mixed_precision="bf16")[
        "gathered layers"
    ]  # 2 bytes a weight; of a block 2 + 2 and
    assert half == pytest.approx(
        (alone["weights"] - blocks / GIB) / 2 + 10 / 4 * blocks / 2 / GIB, rel=0.01
    )  # gradients 2 + 4
    for options in ({}, {"shards": 4, "fsdp": True}, {"shards": 4, "zero": 3}):  # it is not prepared: whole on each process
        assert parts_of(model, [64], reference=True, **options)["reference model"] == alone["weights"]


@pytest.mark.parametrize(("mixed_precision", "bytes_of_each"), [("no", 4), ("bf16", 4)])
def test_fsdp_keeps_whole_gradients_between_micro_batches(mixed_precision, bytes_of_each):
    """tests/run/test_fsdp.py sees them on two processes."""
    model, options = tiny(), {"shards": 4, "mixed_precision": mixed_precision}
    numbers = sum(p.numel() for p in model.parameters())
    whole = parts_of(model, [64], accumulation=2, fsdp=True, **options)
    assert whole["gradients"] == bytes_of_each * numbers / GIB
    for other in ({"accumulation": 1, "fsdp": True}, {"accumulation": 2}):
        parts = parts_of(model, [64], **options | other)
        assert parts["gradients"] == numbers / GIB
        assert parts["total"] < whole["total"]


SMALL = (
    2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 2 * 61 * 32 + 32
)  # parameters: 2 blocks, embedding and head, the last norm


def small():
    """Two blocks of 10,304 parameters each; 3,936 outside of them."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=61, tie_word_embeddings=False)
    return wrap(transformers.AutoModelForCausalLM.from_config(config)).train()


@pytest.mark.parametrize(
    ("options", "weights", "gradients", "optimizer", "gathered"),
    [
        # Bytes of a parameter, of four processes that share a model.
        ({"fsdp": True}, 4 / 4, 4 / 4, 8 / 4, "4 4"),
        ({"fsdp": True, "mixed_precision": "bf16"}, 4 / 4, 4 / 4, 8 / 4, "2 4"),
        ({"fsdp": True, "mixed_precision": "bf16", "reshard": False}, 4 / 4, 4 / 4, 8 / 4, "2 4 whole"),
        ({"zero": 1, "mixed_precision": "bf16"}, 2, 2, 12 / 4, ""),  # AdamW's averages, and weights in float32
        ({"zero": 2, "mixed_precision": "bf16"}, 2, 2 / 4, 12 / 4, ""),
        ({"zero": 3, "mixed_precision": "bf16"}, 2 / 4, 2 / 4, 12 / 4, "all"),
        ({"zero": 2}, 4, 4 / 4, 12 / 4, ""),
    ],
    ids=str,
)
def test_what_each_way_of_sharing_keeps_is_worked_by_hand(options, weights, gradients, optimizer, gathered):
    model = small()
    assert sum(p.numel() for p in model.parameters()) == SMALL == 24544
    buffers = nbytes(model.buffers())
    parts = parts_of(model, [64], shards=4, **options)
    whole = options.get("zero") in (1, 2)
    assert parts["weights"] * GIB == weights * SMALL + buffers / (1 if whole else 4)
    assert parts["gradients"] * GIB == gradients * SMALL and parts["optimizer"] * GIB == optimizer * SMALL
    block, outside = 10304, 3936
    # A block at work and the next one, or all of them; the gradients of one, whole, and the buffer of their reduction.
    known = {
        "4 4": 4 * outside + 2 * 4 * block + 4 * block + 4 * block,
        "2 4": 2 * outside + 2 * 2 * block + 2 * block + 4 * block,
        "2 4 whole": 2 * outside + 2 * 2 * block + 2 * block + 4 * block,  # of two blocks, two are all
        "all": 2 * SMALL,
        "": 0,
    }
    assert parts.get("gathered layers", 0) * GIB == known[gathered]
    on_gpu = parts_of(model, [64], shards=4, device=torch.device("cuda"), **options)
    low = 2 if "mixed_precision" in options else 4
    assert on_gpu.get("buckets", 0) * GIB == (low * 500_000_000 if "zero" in options else 0)


def test_without_resharding_every_block_stays_whole():
    model = deep()  # ten blocks
    block = sum(p.numel() for p in model.lm.model.layers[0].parameters())
    options = {"shards": 8, "fsdp": True, "mixed_precision": "bf16"}
    two, ten = (parts_of(model, [64], **options, reshard=reshard)["gathered layers"] for reshard in (True, False))
    assert (ten - two) * GIB == pytest.approx(8 * 2 * block)  # eight more, in bfloat16


def test_bfloat16_weights_are_float32_under_fsdp_with_mixed_precision():
    model = small()
    model.lm.to(torch.bfloat16)
    parts = parts_of(model, [64], shards=4, fsdp=True, mixed_precision="bf16")
    assert [parts[name] * GIB for name in ("gradients", "optimizer")] == [SMALL, 2 * SMALL]
    assert parts["weights"] * GIB == SMALL + nbytes(model.buffers()) / 4


def test_a_step_of_zero_has_its_share_of_the_gradients_in_float32():
    """Where activations are few, that is when most is held: 2/4 and 4/4 bytes a parameter, at once."""
    parts = parts_of(small(), [2], shards=4, zero=2, mixed_precision="bf16")
    at_once = sum(parts[name] for name in ("gradients", "activations", "logits chunk", "not at once"))
    assert at_once * GIB >= (2 / 4 + 4 / 4) * SMALL


def test_the_workspace_of_varlen_attention_is_what_its_sources_allocate():
    """Worked by hand for Llama-3.1-8B's attention: 4,096 tokens in 4 sequences, 32 heads of 128, 8 of keys."""
    config = transformers.LlamaConfig(**SIZE | {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8})
    config.head_dim = 128
    with torch.device("meta"):
        model = FlatModel(transformers.LlamaForCausalLM(config))
    rows = 4096 + 128 * 4
    by_hand = rows * 32 * 128 * 4 + rows * 32 * 4 + 2 * 4096 * 32 * 128 * 2
    assert varlen_workspace(model, [1024] * 4, torch.bfloat16) == by_hand == 143196160
    model.config.num_key_value_heads = 32  # nothing is expanded
    assert varlen_workspace(model, [1024] * 4, torch.bfloat16) == by_hand - 2 * 4096 * 32 * 128 * 2
    model.config.head_dim = 160  # rounded up to 192
    assert varlen_workspace(model, [1024] * 4, torch.bfloat16) == rows * 32 * (192 + 1) * 4
    assert varlen_workspace(model, [1024] * 4, None) == 0  # float32 has no such kernel
    model.config.head_dim = 100
    assert varlen_workspace(model, [1024] * 4, torch.bfloat16) == 0


def test_a_gpu_is_told_of_the_workspace_and_a_cpu_is_not():
    for device, kind in (("cuda", "bf16"), ("cuda", "no"), ("cpu", "bf16")):
        parts = parts_of(tiny(), [64], device=torch.device(device), mixed_precision=kind)
        assert ("attention workspace" in parts) == ((device, kind) == ("cuda", "bf16"))


@pytest.mark.parametrize(
    ("kind", "sizes", "expected"),
    [("FSDP", None, 16), ("DEEPSPEED", None, 16), ("FSDP", (2, 8), 8), ("MULTI_GPU", None, 1), ("NO", None, 1)],
)
def test_the_processes_of_a_copy(kind, sizes, expected):
    sizes = sizes and ParallelismConfig(dp_replicate_size=sizes[0], dp_shard_size=sizes[1])
    run = SimpleNamespace(distributed_type=DistributedType[kind], num_processes=16, parallelism_config=sizes)
    assert processes_of_a_copy(run) == expected


def test_how_the_accelerate_config_shares():
    run = SimpleNamespace(distributed_type=DistributedType.FSDP, num_processes=8, parallelism_config=None)
    for reshard in (True, False):
        run.state = SimpleNamespace(fsdp_plugin=SimpleNamespace(reshard_after_forward=reshard))
        assert sharing(run) == {"shards": 8, "fsdp": True, "reshard": reshard}
    run.distributed_type = DistributedType.DEEPSPEED
    for stage, config, known in (
        (2, {}, {"shards": 8, "zero": 2, "bucket": 500_000_000}),
        (3, {"reduce_bucket_size": 1e6}, {"shards": 8, "zero": 3, "bucket": 1_000_000}),
        (1, {"reduce_bucket_size": "auto"}, {"shards": 8, "zero": 1, "bucket": 500_000_000}),
        (0, {}, {"shards": 1, "zero": 1, "bucket": 500_000_000}),  # nothing is shared
    ):
        plugin = SimpleNamespace(zero_stage=stage, deepspeed_config={"zero_optimization": config})
        run.state = SimpleNamespace(deepspeed_plugin=plugin)
        assert sharing(run) == known
    run.distributed_type = DistributedType.MULTI_GPU
    assert sharing(run) == {"shards": 1}


def test_a_gpu_is_estimated_without_one():
    parts = parts_of(tiny(), [64], device=torch.device("cuda"), mixed_precision="bf16")
    assert "process" not in parts and "heap loss" not in parts


# --- the probe ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"lora": True}, {"recompute": True}], ids=str)
def test_the_probe_changes_nothing(options):
    model = tiny("gpt2", **options)  # it has dropout, which draws random numbers
    next(model.parameters()).grad = marked = torch.ones_like(next(model.parameters()))
    model.lm.eval()
    modes = [module.training for module in model.modules()]
    weights, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    hooks = [len(module._forward_hooks) for module in model.modules()]
    with torch.no_grad():  # whoever calls it
        parts = parts_of(model, [30, 20])
        savings(model, parts, 50, 48, lengths=[30, 20])
    assert [p.grad is None for p in model.parameters()] == [False] + [True] * (len(list(model.parameters())) - 1)
    assert next(model.parameters()).grad is marked and bool((marked == 1).all())
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert model.lm.is_gradient_checkpointing == bool(options.get("recompute"))
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


# --- what is shown --------------------------------------------------------------------------------------------------


def test_one_table_with_the_limit_beside_the_total():
    parts = {"weights": 0.25, "activations": 2.5, "not at once": 0.0, "process": 0.5, "total": 3.25}
    assert show_memory(parts, 4.0).splitlines() == [
        "memory that training needs, estimated:",
        "    weights        256 MiB",
        "    activations   2.50 GiB",
        "    process        512 MiB",
        "    total         3.25 GiB  of 4.00 GiB",
        "    it fits, with 768 MiB to spare",
    ]
    assert show_memory(parts, 2.0).splitlines()[-1] == "    too much by 1.25 GiB"
    assert "cannot be said" in show_memory(parts, float("nan")).splitlines()[-1]
    assert show_size(-0.5) == "-512 MiB"


def test_savings_name_what_is_not_on_yet():
    model = deep()
    found = savings(model, parts_of(model, [64] * 32), 2048, 2016, lengths=[64] * 32)
    names = " ".join(name for name, _ in found)
    assert "--gradient_checkpointing" in names and "--use_peft" in names and "--max_length" in names
    assert [size for _, size in found] == sorted((size for _, size in found), reverse=True)
    both = tiny(lora=True, recompute=True)
    names = " ".join(name for name, _ in savings(both, parts_of(both, [64] * 32), 2048, 2016, lengths=[64] * 32))
    assert "--gradient_checkpointing" not in names and "--use_peft" not in names


def test_a_saving_is_what_the_change_saves():
    model, lengths = deep(), [64] * 32
    parts = parts_of(model, lengths)
    wanted = dict(savings(model, parts, 2048, 2016, lengths=lengths))["--gradient_checkpointing"]
    enable_gradient_checkpointing(model)
    after = parts_of(model, lengths)
    assert wanted == pytest.approx(parts["total"] - parts["process"] - after["total"] + after["process"], rel=0.02)


# --- measured -------------------------------------------------------------------------------------------------------


def measured(size, lengths, recompute=False):
    """(estimated, measured) peak of three training steps, in GiB."""
    done = run_script([sys.executable, "-c", TRAIN, json.dumps([size, recompute, lengths])], timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


LENGTHS = [pytest.param([38, 51, 22, 40] * 4, id="16x40"), pytest.param([512] * 8, id="8x512", marks=pytest.mark.slow)]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_demo_model_peaks_where_it_was_estimated(lengths):
    estimated, peak = measured("demo", lengths)
    assert estimated == pytest.approx(peak, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(("lengths", "recompute"), [([512] * 2, False), ([256] * 8, True), ([180, 90, 250, 128], False)])
def test_a_model_of_100_million_parameters_peaks_where_it_was_estimated(lengths, recompute):
    estimated, peak = measured("100M", lengths, recompute)
    assert estimated == pytest.approx(peak, rel=0.2)
