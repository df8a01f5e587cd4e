"""Fused norms and MLPs give what the modules' own code gives, forward and backward, and keep less."""

import copy

from common.extras.fused_layers import use_fused_layers
import pytest
import torch
from torch import nn
import torch.nn.functional as F
import transformers
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tests.tiny import tiny_lm


def norm(dtype=torch.float32):
    module = LlamaRMSNorm(24, eps=1e-5)
    nn.init.uniform_(module.weight, 0.5, 1.5)
    return module.to(dtype)


def mlp(dtype=torch.float32, **settings):
    torch.manual_seed(0)
    return LlamaMLP(transformers.LlamaConfig(hidden_size=24, intermediate_size=40, num_attention_heads=4, **settings)).to(
        dtype
    )


def run(module, x, weights, autocast=False):
    """Output, and the gradients of x and of all parameters, for a weighted sum of the output."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = module(x)
    (out * weights).sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters() if p.requires_grad)]


@pytest.mark.parametrize("make", [norm, mlp])
@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [
        (torch.float64, False, 1e-6),
        (torch.float32, False, 2e-6),
        (torch.bfloat16, False, 0.03),
        (torch.float32, True, 0.03),
    ],
)
def test_results_are_those_of_the_plain_module(make, dtype, autocast, tolerance):
    plain, fused = make(dtype), make(dtype)
    fused.load_state_dict(plain.state_dict())
    use_fused_layers(nn.ModuleList([fused]))
    assert "forward" in vars(fused) and "forward" not in vars(plain)
    x, weights = torch.randn(2, 1, 7, 24, dtype=torch.float64).to(dtype).unbind()
    for ours, theirs in zip(run(fused, x, weights, autocast), run(plain, x, weights, autocast), strict=True):
        if ours.dtype != theirs.dtype:  # see below
            assert autocast and make is norm and ours.dtype == torch.bfloat16
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=tolerance, atol=tolerance)


def test_a_copy_computes_with_its_own_weights_and_hooks():
    module, calls = mlp(), []
    use_fused_layers(nn.ModuleList([module]))
    other = copy.deepcopy(module)
    other.down_proj.register_forward_hook(lambda *args: calls.append(1))
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
        assert not other(torch.ones(1, 24)).any() and module(torch.ones(1, 24)).any()
    assert calls == [1]


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast"])
def test_a_gelu_written_out_is_one_kernel(name):
    plain, fused = ACT2FN[name], ACT2FN[name]
    use_fused_layers(nn.ModuleList([fused]))
    x = torch.linspace(-30, 30, 2001, dtype=torch.float64)
    with torch.profiler.profile() as seen:
        fused(x)
    operations = {event.name for event in seen.events() if event.name.startswith("aten::")}
    assert operations == {"aten::gelu"}
    for a, b in zip(run(fused, x, x), run(plain, x, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)  # gelu_fast has ten digits of sqrt(2 / pi)


def saved_by(function):
    """The result of a function, and the number of elements that autograd saves for it, each tensor once."""
    saved = {}

    def note(x):
        saved[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = function()
    return out, sum(x.numel() for x in saved.values())


def test_under_autocast_layers_share_one_norm():
    """A module's own code hands over float32, of which every linear layer keeps a copy."""
    plain = tiny_lm("llama")
    fused = copy.deepcopy(plain)
    use_fused_layers(fused)
    ids, kept = torch.arange(2, 30)[None], []
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(1, 5, 32)
        before, after = plain.model.norm(x), fused.model.norm(x)
        assert after.dtype == torch.bfloat16 and torch.equal(before.to(torch.bfloat16), after)
        assert fused.model.norm(x.bfloat16()).dtype == before.dtype  # only of a float32 hidden state
        for lm in (plain, fused):
            loss, numbers = saved_by(lambda lm=lm: lm(ids, labels=ids).loss)
            kept.append(numbers)
            loss.backward()
    assert kept[1] < 0.8 * kept[0]
    for (name, ours), theirs in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() < 0.02 * theirs.grad.norm(), name


@pytest.mark.parametrize(("make", "fused", "plain"), [(norm, 25, 49), (mlp, 24 + 2 * 40, 24 + 4 * 40)])
def test_less_is_kept_per_token(make, fused, plain):
    """Of the norm its input and a scale, of the MLP its input and two vectors of the inner width."""
    found, x = [], torch.randn(1000, 24)
    for use in (use_fused_layers, lambda _: None):
        module = make()
        use(nn.ModuleList([module]))
        _, numbers = saved_by(lambda module=module: module(x.requires_grad_()))
        found.append((numbers - sum(p.numel() for p in module.parameters())) / 1000)
    assert found[0] == pytest.approx(fused, abs=0.1) and found[1] >= plain


class Gated(nn.Module):
    """An MLP by the names of a SwiGLU, with something else in it."""

    def __init__(self, kind, size=1.0):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.down_proj, self.kind = nn.Linear(24, 16, bias=False), kind
        for p in self.parameters():
            nn.init.normal_(p, std=size) if size else nn.init.zeros_(p)

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.kind == "clamp":
            gate, up = gate.clamp(max=10), up.clamp(-10, 10)
        act = {"gelu": F.gelu, "relu": F.relu}.get(self.kind, F.silu)
        made = act(gate) * (up + 1 if self.kind == "up + 1" else up)
        return self.down_proj(made) * (2 if self.kind == "scaled" else 1)


@pytest.mark.parametrize("size", [1.0, 1e-4, 0.0], ids=["usual", "tiny", "zero"])
@pytest.mark.parametrize("kind", ["silu", "gelu", "relu", "clamp", "up + 1", "scaled"])
def test_only_a_swiglu_mlp_is_replaced(kind, size):
    """A clamp shows on large inputs only, and another activation under a small or a zero matrix hardly or not at all."""
    module = Gated(kind, size)
    before = list(module._modules)
    use_fused_layers(nn.Sequential(module))
    assert ("forward" in vars(module)) == (kind == "silu") and list(module._modules) == before


class AnotherRMSNorm(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.weight, self.variance_epsilon, self.kind = nn.Parameter(torch.ones(16)), 1e-5, kind

    def forward(self, x):
        scale = (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        if self.kind == "epsilon outside":
            scale = 1 / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
        if self.kind == "clamped":
            x = x.clamp(-100, 100)
        return x * scale * (self.weight + (1 if self.kind == "1 + w" else 0))


@pytest.mark.parametrize("kind", ["plain", "epsilon outside", "1 + w", "clamped"])
def test_only_an_equal_norm_is_replaced(kind):
    module = AnotherRMSNorm(kind)
    use_fused_layers(nn.Sequential(module))
    assert ("forward" in vars(module)) == (kind == "plain")
