"""Paths for GPUs without one: which kernel is asked for, compiled blocks, and the model on a device without
numbers.

Kernels, captures and NCCL are for tests marked `gpu`.
"""

from contextlib import nullcontext
import shutil
from types import SimpleNamespace

from common.args import CommonArgs
from common.collators import flat_batch
from common.model import attention, load
from common.model.experts import make_experts
from common.model.load import compile_layers
from common.model.varlen import Ragged
from common.model.wrap import wrap
from common.run.parts.mfu import peak_flops
from common.sampling.generate import FlatDecoder, SamplingMethod, default_batch_size, generating
from common.sampling.kv_cache import CACHED
import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
import transformers

from tests.conftest import assert_same, losses, run_script, torchrun
from tests.run.test_health import STAGES
from tests.scripts.test_equivalence import arguments
from tests.tiny import V, sequence, tiny_config, tiny_lm, tokens

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
FAMILIES = ("llama", "gemma3", pytest.param("gpt-neox", marks=pytest.mark.slow))


@pytest.fixture
def gpu(monkeypatch):
    """gpu(capability): CUDA as PyTorch describes it, on a machine that has none."""

    def pretend(capability=(9, 0), name="NVIDIA H100 80GB HBM3"):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)

    return pretend


# --- which kernel -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, masked, head, capability, knows, varlen",
    [
        (torch.float32, False, 64, (9, 0), False, False),
        (torch.bfloat16, False, 64, (9, 0), True, True),
        (torch.bfloat16, True, 64, (9, 0), False, True),
        (torch.bfloat16, False, 12, (9, 0), True, False),
        (torch.bfloat16, False, 256, (9, 0), True, True),
        (torch.bfloat16, False, 256, (8, 6), True, False),  # its gradient does not fit
        (torch.bfloat16, False, 192, (8, 6), True, True),
        (torch.bfloat16, False, 512, (9, 0), False, False),
        (torch.float16, False, 64, (7, 5), False, None),
    ],
)
def test_which_kernel_a_gpu_is_asked_for(dtype, masked, head, capability, knows, varlen, gpu):
    """Key heads shared by 16 bits, no mask, Ampere or later; else the kernel that keeps all scores would be
    all that is left."""
    gpu(capability)
    query = SimpleNamespace(device=CUDA, dtype=dtype, shape=(2, 8, 6, head))
    assert attention._kernel_knows_groups(query, masked) == knows
    value = SimpleNamespace(device=CUDA, dtype=dtype, shape=(1, 1, head))
    assert varlen is None or Ragged(None, None, (1, 1), None).dtype(value) == (dtype if varlen else None)
    with torch.autocast("cpu", torch.bfloat16):  # rotary embeddings and norms may hand over float32 here
        assert Ragged(None, None, (1, 1), None).dtype(torch.zeros(1, 1, 64)) == torch.bfloat16


@pytest.mark.parametrize(
    "capability, lengths, window, first",
    [
        ((9, 0), (512, 512), None, True),
        ((9, 0), (1024,), None, True),
        ((9, 0), (500, 500), None, False),  # a length that may not come again
        ((9, 0), (512, 1024), None, False),
        ((9, 0), (512, 512), 64, False),  # a mask, which the varlen kernel does without
        ((8, 0), (512, 512), None, False),
        ((10, 0), (512, 512), None, False),
    ],
)
def test_a_hopper_asks_cudnn_first_for_equal_sequences(capability, lengths, window, first, monkeypatch):
    asked, with_kernels = [], attention.sdpa_kernel

    def watched(backends, set_priority):
        asked.append((backends[0].name, set_priority))
        return with_kernels(backends, set_priority)

    monkeypatch.setattr(attention, "sdpa_kernel", watched)
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, sum(lengths), 8) for heads in (4, 2, 2)]
    outputs = []
    for kind in ((0, 0), capability):
        monkeypatch.setattr(attention, "capability", lambda device, kind=kind: kind)
        row = attention.plan_flat_row(lengths, CPU)
        assert not asked
        outputs.append(attention.flat_attention(None, *inputs, None, sliding_window=window, flat_row=row)[0])
    assert asked == [("CUDNN_ATTENTION", True)] * first
    torch.testing.assert_close(*outputs)


def test_no_buckets_are_planned_for_the_varlen_kernel(monkeypatch):
    """But for what it does not take, here float32."""
    inputs = [torch.randn(1, 2, 12, 8) for _ in range(3)]
    wanted = attention.flat_attention(None, *inputs, None, flat_row=attention.plan_flat_row([3, 9], CPU))
    monkeypatch.setattr(attention, "capability", lambda device: (8, 0))
    row = attention.plan_flat_row([3, 9], CPU)
    assert row.ragged is not None and row.buckets is None
    assert torch.equal(attention.flat_attention(None, *inputs, None, flat_row=row)[0], wanted[0])


@pytest.mark.parametrize(
    "free, tokens, wanted",
    [(100, 500, range(700, 1000)), (100, 4000, range(128, 129)), (1, 500, range(128, 129))],
)
def test_a_gpu_samples_as_many_as_fit(free, tokens, wanted, monkeypatch):
    """Of a model of 0.6B: 28 layers, 8 key heads of 128, 152k tokens in bfloat16. GiB free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: ((free - 2) * 2**30, 140 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**30)
    config = transformers.Qwen3Config(
        num_hidden_layers=28, num_key_value_heads=8, head_dim=128, vocab_size=151936
    )
    weight = SimpleNamespace(device=CUDA, dtype=torch.bfloat16)
    embedding = SimpleNamespace(weight=weight)
    lm = SimpleNamespace(config=config, device=CUDA, get_input_embeddings=lambda: embedding)
    model, method = SimpleNamespace(lm=lm), SamplingMethod(FlatDecoder, CACHED)
    assert default_batch_size(model, method, tokens) in wanted
    lm.config = transformers.Gemma4TextConfig()  # whose layers have heads of two sizes
    assert default_batch_size(model, method, tokens) >= 128


def test_repeated_heads_give_the_attention_of_shared_ones(monkeypatch):
    torch.manual_seed(0)
    model, batch = wrap(tiny_lm("llama")), batch_of((9, 9, 4))
    shared = model(batch).logps
    monkeypatch.setattr(attention, "_kernel_knows_groups", lambda q, masked: False)
    torch.testing.assert_close(model(batch).logps, shared)


def test_a_gpu_is_known_by_the_words_of_its_name(gpu):
    names = {
        "H100 80GB HBM3": 989e12,
        "H100 PCIe": 756e12,
        "H100 NVL": 835e12,
        "L4": 121e12,
        "L40": 181e12,
        "L40S": 362e12,
    }
    names |= {
        "A100-SXM4-80GB": 312e12,
        "A10": 125e12,
        "H200": 989e12,
        "GeForce RTX 4090": 165e12,
        "A4000": None,
    }
    for name, flops in names.items():
        gpu(name=f"NVIDIA {name}")
        assert peak_flops(CUDA) == flops, name
    assert peak_flops(CPU) is None


# --- autocast -----------------------------------------------------------------------------------------------


class Casts(TorchDispatchMode):
    """Counts casts of matrices to bfloat16."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default) and args[0].numel() in SIZES:
            self.count += args[0].dtype == torch.float32 and out.dtype == torch.bfloat16
        return out


SIZES = {p.numel() for kind in ("llama", "mixtral") for p in tiny_lm(kind).parameters() if p.dim() > 1}


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_are_cast_once_while_sampling(kind, frozen):
    """They were cast anew for each token. What autocast keeps has no gradient, and is not for training."""
    model = wrap(tiny_lm(kind)).requires_grad_(not frozen)
    make_experts(CommonArgs(), model.lm)
    model.lm.model.norm.weight.requires_grad_(True)
    trained = [name for name, p in model.lm.named_parameters() if p.requires_grad]
    with torch.autocast("cpu", torch.bfloat16):
        with generating(model) as lm:
            decoder = FlatDecoder(lm, [[3, 4, 5], [6, 7]], [0, 0, 1], 9)
            with Casts() as first:
                decoder.read_prompts()
            with Casts() as later:
                for t in range(3):
                    decoder.next_logits(torch.tensor([8, 9, 10]) + t)
        model.train()(batch_of((9, 7))).logps.sum().backward()
    assert first.count > 0 and later.count == 0
    assert [name for name, p in model.lm.named_parameters() if p.requires_grad] == trained
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for p in model.lm.parameters() if p.requires_grad
    )
    assert {p.dtype for p in model.lm.parameters()} == {torch.float32}


# --- compiled blocks ----------------------------------------------------------------------------------------


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that a run has compiled, which run as they are."""
    found, compile_module = [], torch.nn.Module.compile

    def keep(graph, inputs, options):
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **words: compile_module(self, backend=keep, **words)
    )
    torch.compiler.reset()
    yield found
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_blocks_are_compiled_once_for_all_windows(stage, graphs, launch):
    """Windows differ in the number of their sequences, in their lengths and in what these share."""
    words = [*STAGES[stage], *"--max_steps 8 --save_steps 0".split()]
    plain = launch(stage, *words, output="plain")
    assert not graphs
    compiled = launch(stage, *words, "--torch_compile", output="compiled")
    assert 1 <= len(graphs) <= 6  # of a block: attention is called between them
    assert_same(losses(plain), losses(compiled), tolerance=1e-4)


@pytest.mark.parametrize(
    "device, hidden_size, at_a_time",
    [
        pytest.param("cpu", 64, 1, marks=[NEEDS_COMPILER, pytest.mark.slow]),
        pytest.param("cuda", 1024, 100, marks=pytest.mark.gpu),
    ],
)
def test_the_compiler_makes_no_graph_for_other_numbers_of_tokens(device, hidden_size, at_a_time):
    """Inductor, which on a GPU would make one for each of the ranges between 2,560, 4,096 and 5,120 tokens."""
    torch.compiler.reset()
    counters.clear()
    chooses = []  # between kernels, by the number of tokens
    config = tiny_config("qwen3")
    config.update({"hidden_size": hidden_size, "head_dim": 64, "max_position_embeddings": 4096})
    model = wrap(transformers.AutoModelForCausalLM.from_config(config)).to(device).train()
    compile_layers(model)

    def look(graph):
        chooses.append(torch._inductor.config.triton.mix_order_reduction)

    def graphs_after(*rows):
        for lengths in rows:
            batch = batch_of([n * at_a_time for n in lengths], device)
            with torch._inductor.config.patch(post_grad_custom_post_pass=look):
                with torch.autocast(device, torch.bfloat16):
                    loss = model(batch, nll_weights=batch["loss_mask"]).nll
                loss.backward()
        return counters["stats"]["unique_graphs"]

    # rows of equal sequences have graphs of their own: no break at the attention
    made = graphs_after((9, 12), (10,) * 6)
    assert made == graphs_after((5, 7, 5), (7,) * 7, (30, 31), (12, 30, 7, 3))
    assert len(chooses) >= 2 and not any(chooses)  # forward and backward
    torch.compiler.reset()


def test_a_line_says_that_a_block_has_too_many_graphs(graphs, capfd):
    """From then on it runs as it stands for what fits none of them."""
    load._say_once.cache_clear()
    model = wrap(tiny_lm("llama")).train()
    compile_layers(model)
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled = model(batch_of((9, 12))).logps
        made = len(graphs)
        with torch.no_grad():  # needs a graph of its own
            uncompiled = model(batch_of((9, 12))).logps
    assert len(graphs) == made
    torch.testing.assert_close(compiled.detach(), uncompiled)
    out, err = capfd.readouterr()
    (line,) = [line for line in out.splitlines() if "--torch_compile" in line]
    assert "more than 1 graph" in line and "recompile_limit" in line and "hit config" not in err


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize("stage", ["pretrain", "sft", "dpo", "grpo"])
def test_two_processes_with_compiled_blocks_are_one_without(stage, launch, tmp_path):
    """By the real compiler."""
    whole = losses(launch(stage, *arguments(stage, 8, 1)))
    command = torchrun()
    command += [
        f"train_{stage}.py",
        *arguments(stage, 2, 2),
        "--torch_compile",
        "--output_dir",
        str(tmp_path / "two"),
    ]
    run = run_script(command)
    assert run.returncode == 0, run.stderr[-6000:]
    assert_same(whole, losses(tmp_path / "two"), tolerance=1e-4)


# --- a device without numbers -------------------------------------------------------------------------------


def batch_of(lengths, device="cpu"):
    examples = [[sequence(tokens(2, n), tokens(n - 2, i))] for i, n in enumerate(lengths)]
    return flat_batch(examples, torch.device(device))


@pytest.fixture
def without_autocast(monkeypatch):
    """Which the device without numbers does not know."""
    enabled = torch.is_autocast_enabled
    monkeypatch.setattr(
        torch, "is_autocast_enabled", lambda device="cuda": device != "meta" and enabled(device)
    )
    autocast = torch.autocast
    monkeypatch.setattr(
        torch,
        "autocast",
        lambda device, *a, **k: nullcontext() if device == "meta" else autocast(device, *a, **k),
    )


@pytest.mark.usefixtures("without_autocast")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_training_asks_the_device_for_nothing(family):
    """A value asked of a tensor without numbers is an error, and so is a tensor on another device."""
    model = wrap(tiny_lm(family)).to("meta").train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batch = batch_of((12, 30, 7), "meta")
    out = model(batch, nll_weights=batch["loss_mask"] / 7)
    (out.nll + model(batch).logps.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@pytest.mark.usefixtures("without_autocast")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_sampling_asks_the_device_for_nothing(family):
    """So it can be a CUDA graph."""
    model = wrap(tiny_lm(family)).to("meta")
    with generating(model) as lm:
        decoder = FlatDecoder(lm, [[3, 4, 5], [6, 7]], [0, 0, 1], 70, static=True)
        decoder.read_prompts()
        for t in range(66):  # past the first capacity
            if t == 5:
                decoder.keep(np.array([True, False, True]))
            logits = decoder.next_logits(torch.zeros(3 if t < 5 else 2, dtype=torch.long, device="meta"))
    assert logits.shape == (2, V)
