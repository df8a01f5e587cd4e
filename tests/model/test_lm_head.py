"""The LM head in chunks, against full logits in float64: values and gradients by both ways, and the memory
that they take."""

from functools import partial
import shutil
from types import SimpleNamespace

from common.collators import flat_batch
from common.model import compiled_head, fused_head
from common.model.flat_model import disable_dropout
from common.model.fused_head import BLOCK_ELEMENTS, HEAD_CHUNK_ELEMENTS, HEAD_CHUNK_ROWS
from common.model.lm_head import log_probs, logits_of, weighted_nll
from common.model.wrap import wrap
from common.run.dry_run import Live
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
import transformers

from tests.model.test_model import LENGTHS, alone_in_float64, examples
from tests.tiny import FAMILIES, LATENT, SIZE, SSM, spread

CPU = torch.device("cpu")
# Factors, caps and scales as released, where the defaults of transformers are 1 or none: config class,
# values.
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
SCALED = {
    "cohere": ("CohereConfig", {"logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": ("Cohere2Config", {"logit_scale": 0.25, "head_dim": 8, "sliding_window": 5}),
    "deepseek-v3": (
        "DeepseekV3Config",
        {"num_key_value_heads": 4, **LATENT}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
        | {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
        | {"num_local_experts": 4, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "falcon-h1": (
        "FalconH1Config",
        {
            **SSM,
            "mamba_d_ssm": 64,
            "lm_head_multiplier": 0.0195,
            "embedding_multiplier": 5.66,
            "key_multiplier": 0.4,
        }
        | {"attention_in_multiplier": 1.5, "attention_out_multiplier": 0.9, "mlp_multipliers": [0.9, 0.6]}
        | {
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.7,
            "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35],
        },
    ),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 144}),
    "gpt2-layer-scale": (
        "GPT2Config",
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": False},
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.0078,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "hyperclovax": (
        "HyperCLOVAXConfig",
        {
            "logits_scaling": 0.125,
            "embedding_multiplier": 10.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.0078,
        },
    ),
    "minicpm3": (
        "MiniCPM3Config",
        {"num_key_value_heads": 4, **LATENT} | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 8},
    ),
    "nemotron": ("NemotronConfig", {"partial_rotary_factor": 0.5, "head_dim": 8}),
    "olmo": ("OlmoConfig", {"clip_qkv": 0.5}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "vaultgemma": ("VaultGemmaConfig", {"head_dim": 8, "final_logit_softcapping": 3.0, "sliding_window": 5}),
    "yarn": ("Qwen2Config", {"rope_parameters": YARN | {"attention_factor": 1.2}}),
}
SCALED = {name: (cls, SIZE | values) for name, (cls, values) in SCALED.items() if hasattr(transformers, cls)}
NAMES = "llama llama-tied qwen3 gpt2 mistral gemma3 mixtral gpt-oss mamba lfm2 bloom".split()
CURVES = {
    "plain": {},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 2.5},
    "gemma": {"final_logit_softcapping": 3.0},
}


class Toy(nn.Module):
    """What the head reads of a transformers model."""

    def __init__(self, V=37, D=5, bias=False, frozen=False, dtype=torch.float64, std=0.5, **config):
        super().__init__()
        torch.manual_seed(0)
        self.lm_head = nn.Linear(D, V, bias=bias, dtype=dtype).requires_grad_(not frozen)
        if frozen == "weight":
            self.lm_head.bias.requires_grad_()
        nn.init.normal_(self.lm_head.weight, std=std)
        self.config = SimpleNamespace(
            get_text_config=lambda: SimpleNamespace(vocab_size=V, model_type="toy", **config)
        )

    def get_output_embeddings(self):
        return self.lm_head


def positions(toy, N=11, dtype=torch.float64):
    """hidden (N, D), tokens (N,), and two kinds of weights (N,)."""
    generator = torch.Generator().manual_seed(1)
    V, D = toy.lm_head.weight.shape
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    tokens = torch.randint(0, V, (N,), generator=generator)
    tokens[::3] = toy.lm_head(hidden.to(toy.lm_head.weight.dtype)).argmax(-1)[::3]  # what the model says, too
    w, u = torch.randn(2, N, generator=generator, dtype=torch.float64).to(
        torch.promote_types(dtype, torch.float32)
    )
    return hidden, tokens, w, u


def full(
    toy, hidden, tokens, temperature=1.0, logit_scale=1.0, logits_scaling=1.0, final_logit_softcapping=None
):
    """(logps, entropy, correct) of the full logits, written out."""
    logits = toy.lm_head(hidden) * logit_scale / logits_scaling
    if final_logit_softcapping:
        logits = final_logit_softcapping * torch.tanh(logits / final_logit_softcapping)
    logps = (logits / temperature).log_softmax(-1)
    return logps.gather(1, tokens[:, None])[:, 0], -(logps.exp() * logps).sum(-1), logps.argmax(-1) == tokens


def leaves(toy, hidden):
    return [hidden, *(p for p in toy.parameters() if p.requires_grad)]


@pytest.fixture
def chunks(monkeypatch):
    """chunks(rows, elements): so many rows of logits at a time, so many elements of them in one pass."""

    def set_sizes(rows, elements=2**18):
        monkeypatch.setattr(fused_head, "MOST_ELEMENTS", 1)
        for device in ("cpu", "cuda"):
            monkeypatch.setitem(HEAD_CHUNK_ELEMENTS, device, 1)
            monkeypatch.setitem(HEAD_CHUNK_ROWS, device, rows)
            monkeypatch.setitem(BLOCK_ELEMENTS, device, elements)

    return set_sizes


# --- equal to the full logits -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("curve", "bias", "frozen", "elements", "rows"),
    [  # elements of one pass, rows of one chunk
        ("plain", False, False, 80, 4),
        ("plain", False, False, 10**6, 100),
        ("plain", True, False, 1, 4),
        ("plain", False, True, 80, 4),
        ("plain", True, True, 1, 100),
        ("cohere", True, False, 80, 100),
        ("granite", False, False, 10**6, 4),
        ("gemma", False, False, 80, 4),
        ("gemma", True, False, 1, 100),
        ("gemma", True, True, 10**6, 4),
        ("plain", True, "weight", 80, 4),
        ("plain", True, "weight", 80, 100),
    ],
)
def test_results_are_those_of_full_logits(curve, bias, frozen, elements, rows, chunks):
    chunks(rows, elements)
    toy = Toy(bias=bias, frozen=frozen, **CURVES[curve])
    hidden, tokens, w, u = positions(toy)
    logps, entropy, correct = wanted = full(toy, hidden, tokens, 0.7, **CURVES[curve])
    assert 0 < correct.sum() < len(correct)

    loss, found = weighted_nll(toy, hidden, tokens, w, 0.7)
    assert not any(s.requires_grad for s in found)
    by_logps = log_probs(toy, hidden, tokens, 0.7)[0]
    by_both = log_probs(toy, hidden, tokens, 0.7, entropy=True, entropy_grad=True)
    without = log_probs(toy, hidden, tokens, 0.7, entropy=True)
    assert not without[1].requires_grad and not without[2].requires_grad and not by_both[2].requires_grad
    for scores in (found, by_both, without, (by_logps,)):
        for a, b in zip(scores, wanted, strict=False):
            torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(loss, -(w * logps).sum(), rtol=1e-9, atol=1e-9)

    pairs = [
        (3 * loss, -3 * (w * logps).sum()),
        ((w * by_logps).sum(), (w * logps).sum()),
        ((w * without[0]).sum(), (w * logps).sum()),
        ((w * by_both[0] + u * by_both[1]).sum(), (w * logps + u * entropy).sum()),
    ]
    for ours, theirs in pairs:
        ours, theirs = (
            torch.autograd.grad(x, leaves(toy, hidden), retain_graph=x is theirs) for x in (ours, theirs)
        )
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "chunk"), [*((name, 7) for name in [*NAMES, *SCALED]), ("llama", 10**6)])
def test_a_model_is_that_of_full_logits(name, chunk, chunks):
    chunks(chunk)
    made = (FAMILIES | SCALED)[name]
    weights = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(1))
    models = [disable_dropout(wrap(spread(*made)).train()) for _ in range(2)]
    assert models[0].padded == (name in ("bloom", "nemotron"))
    batch = flat_batch(examples(), CPU)
    out = models[0](batch, temperature=0.7, nll_weights=weights)
    again = models[1](batch, temperature=0.7, entropy=True)
    loss = out.nll
    for a, b in zip(out[:3], again[:3], strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-5)
    (2 * loss).backward()
    (-2 * (weights * again.logps).sum()).backward()

    lm = spread(*made)
    parts = [alone_in_float64(lm, example, 0.7) for example in examples()]
    logps = torch.cat([nn.functional.pad(part[1:], (1, 0)) for part in parts])
    torch.testing.assert_close(again.logps.double(), logps.double(), atol=3e-4, rtol=1e-4)
    assert loss.item() == pytest.approx(-(weights * logps).sum().item(), rel=1e-4)
    (-2 * (weights * logps).sum()).backward()
    for (key, p), q, naive in zip(
        models[0].lm.named_parameters(), models[1].parameters(), lm.parameters(), strict=True
    ):
        if naive.grad is None:
            continue
        scale = naive.grad.abs().max().clamp(min=1e-5)
        assert (p.grad - naive.grad).abs().max() / scale < 1e-3, key
        assert (q.grad - naive.grad).abs().max() / scale < 1e-3, key


def test_without_gradients_and_without_targets():
    toy = Toy()
    hidden, tokens, w, _ = positions(toy)
    with torch.no_grad():
        loss, (logps, *_) = weighted_nll(toy, hidden, tokens, w)
        assert not loss.requires_grad and not logps.requires_grad
    assert loss == -(w * full(toy, hidden, tokens)[0]).sum().detach()
    loss, _ = weighted_nll(toy, hidden, tokens, w)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()
    toy.zero_grad()
    hidden.grad = None
    loss, scores = weighted_nll(toy, hidden[:0], tokens[:0], w[:0])
    (loss + log_probs(toy, hidden[:0], tokens[:0])[0].sum()).backward()
    assert loss == 0 and all(len(s) == 0 for s in scores)
    assert not toy.lm_head.weight.grad.any() and not hidden.grad.any()  # zeros, which DDP waits for


# --- heads that are more than a matrix ----------------------------------------------------------------------


class Wrapped(nn.Module):
    """An adapted head, as far as we can tell."""

    def __init__(self, linear):
        super().__init__()
        self.inside = linear

    weight = property(lambda self: self.inside.weight)

    def forward(self, hidden):
        return self.inside(hidden) + 0.5 * hidden.sum(-1, keepdim=True).tanh()


def hooked(linear):
    linear.register_forward_hook(lambda module, args, out: out.clone())
    return linear


def zero_3(linear):
    linear.weight.ds_id = 0
    return linear


@pytest.mark.parametrize("change", [Wrapped, hooked, zero_3])
@pytest.mark.parametrize("rows", [4, 100])
def test_other_heads_are_called_as_modules(rows, change, chunks, monkeypatch):
    chunks(rows)
    toy = Toy(logit_scale=0.3)
    toy.lm_head = change(toy.lm_head)
    calls = []
    toy.lm_head.register_forward_pre_hook(lambda *_: calls.append(1))
    hidden, tokens, w, u = positions(toy)
    wanted = full(toy, hidden, tokens, 0.7, logit_scale=0.3)
    want = torch.autograd.grad(-(w * wanted[0]).sum(), leaves(toy, hidden), retain_graph=True)
    want_both = torch.autograd.grad((w * wanted[0] + u * wanted[1]).sum(), leaves(toy, hidden))
    calls.clear()
    loss, scores = weighted_nll(toy, hidden, tokens, w, 0.7)
    assert calls and not any(s.requires_grad for s in scores)
    for a, b in zip(torch.autograd.grad(loss, leaves(toy, hidden)), want, strict=True):
        torch.testing.assert_close(a, b)
    logps, entropy, correct = log_probs(toy, hidden, tokens, 0.7, entropy=True, entropy_grad=True)
    for a, b in zip((logps, entropy, correct), wanted, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-5, atol=1e-5)
    both = torch.autograd.grad((w * logps + u * entropy).sum(), leaves(toy, hidden))
    for a, b in zip(both, want_both, strict=True):
        torch.testing.assert_close(a, b)


class Dropped(Wrapped):
    """An adapter with dropout."""

    def __init__(self, linear):
        super().__init__(linear)
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden):
        return super().forward(self.dropout(hidden))


@pytest.mark.parametrize("rows", [4, 100])
def test_an_adapted_head_drops_the_same_in_both_passes(rows, chunks):
    chunks(rows)
    toy = Toy()
    toy.lm_head = Dropped(toy.lm_head)
    hidden, tokens, w, u = positions(toy)

    def loss(hidden):
        torch.manual_seed(3)
        logps, entropy, _ = log_probs(toy, hidden, tokens, 0.7, entropy=True, entropy_grad=True)
        return (w * logps + u * entropy).sum()

    (gradient,) = torch.autograd.grad(loss(hidden), hidden)
    towards = torch.randn_like(gradient)
    with torch.no_grad():
        slope = (loss(hidden + 0.01 * towards) - loss(hidden - 0.01 * towards)) / 0.02
    torch.testing.assert_close((gradient * towards).sum(), slope, rtol=0.01, atol=0.01)


# --- precision ----------------------------------------------------------------------------------------------


def relative_error(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize("rows", [16, 1000], ids=["chunks", "one chunk"])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bfloat16 weights"])
def test_bfloat16_rounds_products_and_nothing_else(autocast, rows, chunks):
    chunks(rows)
    toy = Toy(V=200, D=32)
    hidden, tokens, w, _ = positions(toy, N=300)
    rounded = toy.lm_head.weight.data.bfloat16(), hidden.detach().bfloat16()
    toy.lm_head.weight.data.copy_(rounded[0])  # so that only the arithmetic differs
    hidden = rounded[1].double().requires_grad_()
    logps, *_ = full(toy, hidden, tokens)
    wanted = torch.autograd.grad(-(w * logps).sum(), leaves(toy, hidden))
    toy.to(torch.float32 if autocast else torch.bfloat16)
    hidden = rounded[1].clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, scores = weighted_nll(toy, hidden, tokens, w.float())
        by_logps = log_probs(toy, hidden, tokens)[0]
    assert loss.dtype == by_logps.dtype == torch.float32 and all(s.dtype == torch.float32 for s in scores)
    torch.testing.assert_close(scores[0].double(), logps.detach(), atol=0.1, rtol=0.01)
    for value in (loss, -(w.float() * by_logps).sum()):
        for a, b, leaf in zip(
            torch.autograd.grad(value, leaves(toy, hidden)), wanted, leaves(toy, hidden), strict=True
        ):
            assert a.dtype == leaf.dtype and relative_error(a, b) < 0.01


@pytest.mark.parametrize("rows", [16, 1000], ids=["chunks", "one chunk"])
@pytest.mark.parametrize("frozen", [False, True])
def test_float16_keeps_small_gradients_of_a_scaled_loss(frozen, rows, chunks):
    """Weights of 1e-6 lie below what float16 holds with any precision; the scaler lifts the loss into its
    range."""
    chunks(rows)
    toy = Toy(V=200, D=32, frozen=frozen)
    hidden, tokens, *_ = positions(toy, N=300)
    hidden = hidden.detach().half().double().requires_grad_()
    wanted = torch.autograd.grad(-(1e-6 * full(toy, hidden, tokens)[0]).sum(), leaves(toy, hidden))
    toy.float()
    hidden = hidden.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        loss, _ = weighted_nll(toy, hidden, tokens, torch.full((300,), 1e-6))
    for a, b in zip(torch.autograd.grad(loss * 65536, leaves(toy, hidden)), wanted, strict=True):
        assert a.dtype == torch.float32 and relative_error(a / 65536, b) < 0.01


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("curve", CURVES)
def test_a_sampler_has_the_logits_of_training(curve, device):
    """16 bits round the product alone, on CUDA not even that, and not what the model makes of it."""
    toy = Toy(V=256, D=32, dtype=torch.float32, std=4.0, **CURVES[curve])
    hidden, tokens, _, _ = positions(toy, N=300, dtype=torch.float32)
    toy, hidden, tokens = toy.to(device), hidden.detach().to(device), tokens.to(device)
    with torch.autocast(device, torch.bfloat16), torch.no_grad():
        logits = logits_of(toy, hidden)
        (trained,) = log_probs(toy, hidden, tokens)
    sampled = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert logits.dtype == trained.dtype == torch.float32
    torch.testing.assert_close(sampled, trained, atol=2e-5, rtol=1e-6)

    product = hidden.bfloat16().double() @ toy.lm_head.weight.detach().bfloat16().double().t()
    product = product if device == "cuda" else product.bfloat16().double()
    toy.lm_head = nn.Identity()
    wanted, _, _ = full(toy, product, tokens, **CURVES[curve])
    torch.testing.assert_close(trained.double(), wanted, atol=1e-4, rtol=1e-5)


# --- compiled -----------------------------------------------------------------------------------------------


def scores_and_gradients(curve, device="cpu", temperature=0.7):
    """By both ways, under autocast to each of the dtypes of 16 bits."""
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        toy = Toy(V=256, D=32, dtype=torch.float32, **CURVES[curve]).to(device)
        hidden, tokens, w, _ = positions(toy.cpu(), N=300, dtype=torch.float32)
        hidden, tokens, w = hidden.detach().to(device).requires_grad_(), tokens.to(device), w.to(device)
        toy.to(device)
        with torch.autocast(device, dtype):
            loss, scores = weighted_nll(toy, hidden, tokens, w, temperature)
            others = log_probs(toy, hidden, tokens, temperature, entropy=True)
        found += [loss, *scores, *others, *torch.autograd.grad(loss, leaves(toy, hidden))]
        found += torch.autograd.grad((w * others[0]).sum(), leaves(toy, hidden))
    return [x.detach().cpu() for x in found]


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(compiled_head, "works", True)
    torch._dynamo.reset()
    compiled_head.compiled.cache_clear()
    counters.clear()
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(fused_head.COMPILED_FROM, device, 1)
    return monkeypatch


NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
WAYS = [
    "not compiled",
    "a compiler that fails",
    pytest.param("cpu", marks=[pytest.mark.slow, NEEDS_COMPILER]),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("way", WAYS)
def test_the_softmax_for_a_compiler_is_the_other(way, curve, chunks, compiler, capsys):
    def fail(*_):
        raise RuntimeError("no compiler")

    chunks(128)
    device = "cuda" if way == "cuda" else "cpu"
    with compiler.context() as plainly:
        plainly.setattr(compiled_head, "works", False)
        wanted = scores_and_gradients(curve, device)
    if way not in ("cpu", "cuda"):
        compiler.setattr(
            compiled_head, "compiled", lambda: compiled_head.plain_softmax if way == "not compiled" else fail
        )
    for a, b in zip(scores_and_gradients(curve, device), wanted, strict=True):
        assert relative_error(a, b) < 1e-3
    said = capsys.readouterr().out.count("the loss head is not compiled: RuntimeError: no compiler")
    assert said == (not compiled_head.works) == (way == "a compiler that fails")  # which is not tried again


def test_graphs_do_not_follow_the_rows(chunks, compiler):
    """Beyond 8 of them new ones would be computed as they stand, without a word."""
    compiler.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    chunks(64)
    toy = Toy(V=256, D=32, dtype=torch.float32)
    for N in (100, 200, 193, 33, 65, 1, 130):
        hidden, tokens, w, _ = positions(toy, N=N, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = weighted_nll(toy, hidden, tokens, w)
            (loss + log_probs(toy, hidden, tokens, entropy=True)[0].sum()).backward()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            log_probs(toy, hidden, tokens, entropy=True)
    assert compiled_head.works and 0 < counters["stats"]["unique_graphs"] <= 4


# --- memory -------------------------------------------------------------------------------------------------


def peak(way, N, V, D=16, frozen=False, autocast=False):
    """Bytes beside the inputs, forward and backward."""
    toy = Toy(V, D, frozen=frozen, dtype=torch.float32)
    hidden = torch.zeros(N, D, requires_grad=True)
    tokens, weights = torch.arange(N) % V, torch.full((N,), 1 / N)
    with Live([*toy.parameters(), hidden, tokens, weights]) as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if way == "nll":
                loss, _ = weighted_nll(toy, hidden, tokens, weights)
            else:
                logps, entropy, _ = log_probs(
                    toy, hidden, tokens, entropy=True, entropy_grad=way == "entropy"
                )
                loss = -(weights * (logps + entropy)).sum()
        loss.backward()
    return live.most


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("way", ["nll", "logps", "entropy"])
def test_memory_does_not_grow_with_the_logits(way, frozen):
    V, D = 20_000, 16
    one, two, four = (peak(way, N, V, frozen=frozen) for N in (512, 1024, 2048))
    per_token = (four - two) / 1024
    assert per_token < 4 * (3 * D + 24)  # hidden states and their gradient, a few numbers: not V
    assert two - one < 1.1 * 512 * per_token + 4096
    gradient = 0 if frozen else 4 * V * D
    assert four - gradient < 2048 * V * 4 / 6  # of the full logits; at 4,096 positions a twelfth


def test_full_logits_and_masks_never_exist():
    V, T = 20_000, 4096
    model = wrap(
        transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZE | {"vocab_size": V}))
    ).train()
    batch = flat_batch(examples((128,) * (T // 128)), CPU)
    with Live(model.parameters()) as live:
        model(batch, entropy=True).logps.sum().backward()
    assert live.most < T * T * 4 < T * V * 4 / 4
