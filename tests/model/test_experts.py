"""The losses of a mixture's routers are those of the whole window at once, as a naive sum in float64 has
them."""

import copy

from accelerate import Accelerator
from common.args import CommonArgs
from common.collators import Window, flat_batch
from common.errors import UserError
from common.model.create import create_model, llama_config
from common.model.experts import Experts, make_experts, routing_size
from common.model.flat_model import count_parameters
from common.model.load import enable_gradient_checkpointing
from common.model.wrap import wrap
from common.run.parts.mfu import flops_per_token
import numpy as np
import pytest
import torch
import transformers

from tests.tiny import SIZE, tiny_lm

SIZES = SIZE | {"num_key_value_heads": 2}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
CONFIGS = {
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(  # padded
        **SIZES,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "granite": lambda: transformers.GraniteMoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    # The choice is by sigmoids, a bias and groups of experts; the first layer has none.
    "glm4-moe": lambda: transformers.Glm4MoeConfig(
        **SIZES, **GROUPS, head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **(SIZES | {"num_key_value_heads": 4}), **LATENT, **GROUPS, n_routed_experts=4, num_experts_per_tok=2
    ),
}
SPLITS = [
    [[0, 1, 2, 3, 4]],
    [[0], [1, 2], [3, 4]],
    [[4], [2], [0], [1], [3]],
    [[0, 1, 2, 3, 4], []],  # and a filler
]


SHOWN_LATER = ("granite", "glm4-moe", "deepseek-v3")  # not yet by transformers 5.17


def make_lm(kind):
    torch.manual_seed(0)
    lm = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), experts_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    for name, buffer in lm.named_buffers():
        if "bias" in name:  # 0 in a new model
            buffer += 0.2 * torch.randn(buffer.shape, generator=generator)
    if kind in SHOWN_LATER and routing_size(lm) is None:
        pytest.skip("this version of transformers does not show this model's routing")
    return lm


@pytest.fixture(scope="module")
def accelerator():
    return Accelerator(cpu=True)


def examples():
    """Six sequences of unequal lengths, of which the first two are a pair; the first three begin with the same 9
    tokens."""
    rng = np.random.default_rng(3)
    start = rng.integers(2, 61, 9)
    found = []
    for i, n in enumerate([4, 11, 1, 3, 12, 7]):
        ids = np.concatenate([start if i < 3 else start[:0], rng.integers(2, 61, n)])
        found.append({"input_ids": ids, "loss_mask": np.array([0] * (len(ids) - n) + [1] * n, np.float32)})
    return [found[:2], *([sequence] for sequence in found[2:])]


def through(model, accelerator, split, parts=1):
    """The router's loss of a window, its gradient, what is logged, and how many passes it took."""
    window = Window(accelerator, examples(), split).split(parts)
    passes = []
    hook = model.register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    model.zero_grad()
    model.experts.begin(accelerator, model, window)
    total = 0.0
    for batch in window:
        out = model(batch, nll_weights=batch["loss_mask"])
        (out.aux_loss + 0.0 * out.nll).backward()
        total += out.aux_loss.item()
    hook.remove()
    gradient = {name: p.grad.clone() for name, p in model.lm.named_parameters() if p.grad is not None}
    return total, gradient, model.experts.finish(), passes


def naive(lm):
    """Each sequence alone, in float64, by loops over tokens, layers and experts."""
    lm = copy.deepcopy(lm).double().train()
    logits, chosen = [], []
    for _, module in ((n, m) for n, m in lm.named_modules() if n.endswith(".experts")):
        module.register_forward_pre_hook(lambda _, args: chosen.append(args[1]))
    sequences = sum(examples(), [])
    for sequence in sequences:
        ids = torch.from_numpy(sequence["input_ids"])[None]
        logits += lm.base_model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
    E, L = logits[0].shape[-1], len(logits) // len(sequences)
    T = sum(len(x) for x in logits[::L])
    times, aux = [[0] * E for _ in range(L)], 0.0
    for layer in range(L):
        probability = [0.0] * E
        for rows, indices in zip(logits[layer::L], chosen[layer::L], strict=True):
            for row, picks in zip(rows, indices.tolist(), strict=True):
                for e in picks:
                    times[layer][e] += 1
                exps = [x.exp() for x in row]
                for e in range(E):
                    probability[e] = probability[e] + exps[e] / sum(exps)
        aux = aux + E * sum(times[layer][e] / T * probability[e] / T for e in range(E)) / L
    parameters = dict(lm.named_parameters())
    found = torch.autograd.grad(aux, list(parameters.values()), allow_unused=True)
    gradient = {
        n: torch.zeros_like(p) if g is None else g
        for (n, p), g in zip(parameters.items(), found, strict=True)
    }
    return aux.item(), gradient, times


def assert_close(found, wanted):
    """float32 through two layers: rounding is some 1e-6 of the gradient's size."""
    scale = max(g.abs().max().item() for g in wanted.values())
    assert scale > 1e-3
    for name, gradient in found.items():
        torch.testing.assert_close(gradient.double(), wanted[name], rtol=1e-3, atol=1e-4 * scale, msg=name)
    assert {n for n, g in wanted.items() if g.abs().max() > 1e-4 * scale} <= found.keys()


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_loss_does_not_depend_on_the_split(kind, accelerator):
    lm = make_lm(kind)
    wanted, gradient, times = naive(lm)
    model = wrap(copy.deepcopy(lm)).train()
    model.experts = Experts(model.lm, aux_coef=1.0)
    for split, parts in [*((split, 1) for split in SPLITS), (SPLITS[0], 3)]:
        total, found, shown, passes = through(model, accelerator, split, parts)
        n = len(Window(accelerator, examples(), split).split(parts))
        assert passes == [False] * (n - 1) + [True] * n  # one pass without gradient for all but the first
        assert total == pytest.approx(wanted, rel=1e-5)
        assert_close(found, gradient)
        assert shown["moe/aux_loss"].item() == pytest.approx(wanted, rel=1e-5)
        assert model.experts.counts.tolist() == times
        counts = model.experts.counts
        assert shown["moe/max_load"].item() == pytest.approx((counts.amax(1) / counts.mean(1)).max().item())
        assert shown["moe/unused_experts"].item() == pytest.approx((counts == 0).double().mean().item())


def test_processes_share_the_loss_and_log_that_of_the_window(accelerator, monkeypatch):
    """Two with the same rows: each adds half."""
    model = wrap(make_lm("mixtral")).train()
    model.experts = Experts(model.lm, aux_coef=1.0)
    total, _, shown, _ = through(model, accelerator, SPLITS[1])
    monkeypatch.setattr(accelerator, "reduce", lambda sums, _: 2 * sums)
    half, _, shown_by_two, _ = through(model, accelerator, SPLITS[1])
    assert half == pytest.approx(total / 2)
    for name, value in shown.items():
        assert shown_by_two[name].item() == pytest.approx(value.item()), name


def test_recomputed_blocks_count_once(accelerator):
    found = []
    for recompute in (False, True):
        model = wrap(make_lm("mixtral")).train()
        if recompute:
            enable_gradient_checkpointing(model)
        model.experts = Experts(model.lm, aux_coef=1.0)
        found.append(through(model, accelerator, SPLITS[1]))
    (total, gradient, shown, _), (total2, gradient2, shown2, _) = found
    assert total == total2 and shown == shown2
    assert all(torch.equal(gradient[name], gradient2[name]) for name in gradient)


def test_nothing_is_added_outside_of_a_window(accelerator):
    model = wrap(make_lm("mixtral")).train()
    model.experts = Experts(model.lm, aux_coef=1.0)
    window = Window(accelerator, examples(), SPLITS[0])
    (batch,) = window
    assert model(batch).aux_loss == 0.0
    model.experts.begin(accelerator, model, window)
    with torch.no_grad():
        assert model(batch).aux_loss == 0.0 and model.experts.calls == 0
    with pytest.raises(ValueError, match="0 calls of the model with gradient on 1 micro-batches"):
        model.experts.finish()
    assert model(batch).aux_loss == 0.0


# --- what is asked for --------------------------------------------------------------------------------------


def test_the_config_may_ask_for_the_loss(capsys):
    config = CONFIGS["mixtral"]()
    config.router_aux_loss_coef = 0.25
    for shown, flag, wanted in ((False, None, 0.0), (True, None, 0.25), (True, 0.5, 0.5), (True, 0.0, 0.0)):
        config.output_router_logits = shown
        lm = transformers.AutoModelForCausalLM.from_config(config)
        assert make_experts(CommonArgs(router_aux_loss_coef=flag), lm).aux_coef == wanted
    assert "0.25 · load-balancing loss" in capsys.readouterr().out


def test_the_flag_is_refused_without_experts():
    with pytest.raises(UserError, match="--router_aux_loss_coef: LlamaForCausalLM is no mixture of experts"):
        make_experts(CommonArgs(router_aux_loss_coef=0.1), tiny_lm("llama"))
    assert make_experts(CommonArgs(), tiny_lm("llama")) is None


# --- new ones -----------------------------------------------------------------------------------------------


class Words:
    bos_token_id, eos_token_id, pad_token_id = 0, 1, 0

    def __len__(self):
        return 61


NEW = {"hidden_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": None, "intermediate_size": None}
NEW |= {"max_position_embeddings": 64, "initializer_range": 0.1, "tie_word_embeddings": True}


def test_a_new_mixture_counts_a_tokens_experts():
    dense, mixture = (create_model(llama_config(Words(), **NEW, num_experts=n), seed=0) for n in (0, 8))
    # two of 128 together
    assert mixture.lm.config.num_local_experts == 8 and mixture.lm.config.intermediate_size == 64
    routers = 2 * 8 * 48
    assert count_parameters(mixture)[1] == count_parameters(dense)[1] + routers + 2 * 3 * 48 * (8 * 64 - 128)
    assert flops_per_token(mixture, 32) == pytest.approx(flops_per_token(dense, 32) + 6 * routers)
    assert llama_config(Words(), **NEW, num_experts=8, moe_intermediate_size=20).intermediate_size == 20
    with pytest.raises(UserError, match="--num_experts_per_tok 3: there are only 2"):
        llama_config(Words(), **NEW, num_experts=2, num_experts_per_tok=3)
    assert mixture.lm.config.rope_parameters == dense.lm.config.rope_parameters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_experts_follow_autocast(dtype, monkeypatch):
    """In float32 a GPU has no kernel for all of them at once. Weights and gradients stay float32."""
    model, seen, grouped_mm = wrap(tiny_lm("mixtral")), set(), torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        torch.nn.functional,
        "grouped_mm",
        lambda x, w, **k: seen.add((x.dtype, w.dtype)) or grouped_mm(x, w, **k),
    )
    assert make_experts(CommonArgs(), model.lm)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
        logps = model(flat_batch(examples(), torch.device("cpu"))).logps
    logps.sum().backward()
    assert seen == {(dtype, dtype)} and {p.grad.dtype for p in model.parameters() if p.grad is not None} == {
        torch.float32
    }
