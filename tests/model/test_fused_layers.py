"""Fused norms and MLPs give what the modules' own code gives, forward and backward, and keep less."""

import copy
import inspect

from common.model.fused_layers import use_fused_layers
import pytest
import torch
from torch import nn
import transformers
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from tests.tiny import tiny_lm


def norm(dtype=torch.float32):
    module = LlamaRMSNorm(24, eps=1e-5)
    nn.init.uniform_(module.weight, 0.5, 1.5)
    return module.to(dtype)


def mlp(dtype=torch.float32, **settings):
    torch.manual_seed(0)
    return LlamaMLP(
        transformers.LlamaConfig(hidden_size=24, intermediate_size=40, num_attention_heads=4, **settings)
    ).to(dtype)


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


class Clamped(LlamaMLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=10)) * self.up_proj(x))


def test_only_modules_with_code_of_one_form_are_replaced():
    """Whatever their class is called: code that comes with a model has copies of transformers' classes."""
    code, scope = inspect.getsource(LlamaRMSNorm).replace("LlamaRMSNorm", "Copied").partition("\n")[2], {}
    exec(f"import torch\nfrom torch import nn\n{code}", scope)
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=24, num_attention_heads=4)
    own = [LlamaRMSNorm(16), Olmo2RMSNorm(16), GptOssRMSNorm(16), scope["Copied"](16), mlp()]
    others = [GemmaRMSNorm(16), nn.RMSNorm(16), Clamped(config), mlp(hidden_act="gelu"), nn.Linear(16, 16)]
    use_fused_layers(nn.ModuleList([*own, *others]))
    assert all("forward" in vars(module) for module in own)
    assert not any("forward" in vars(module) for module in others)
