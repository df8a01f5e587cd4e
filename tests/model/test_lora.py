"""LoRA: which layers are adapted, what is trained beside them, and what the model was at the start."""

import contextlib
import inspect
import re
from types import SimpleNamespace

from common.args import CommonArgs
from common.collators import flat_batch
from common.errors import UserError
from common.model.flat_model import FlatModel
from common.model.load import grow_embedding, load_pretrained
from common.model.lora import START, adapter_config, add_lora, at_start, write_adapter
from common.model.reference import Reference
from common.model.wrap import wrap
import pytest
import torch
import transformers

from tests.tiny import HYBRIDS, SIZE, V, sequence, tiny_family, tiny_lm

peft = pytest.importorskip("peft")
ARGS = {"lora_r": 4, "lora_alpha": 8}


def batch_of(ids):
    """A sequence, trained from its third token on."""
    return flat_batch([[sequence(ids[:2], ids[2:])]], torch.device("cpu"))


def disturb(model, seed=0, scale=0.1):
    """Adapters that do something, and rows that are not the mean of the others."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn_like(parameter))


# --- which layers -------------------------------------------------------------------------------------------

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA = {
    "text_config": SIZE | {"head_dim": 8},
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28, "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
}  # fmt: skip
MIXED = {  # class of the model, its config
    "fused experts": ("Qwen3MoeForCausalLM", lambda: transformers.Qwen3MoeConfig(**SIZE, **EXPERTS)),
    "a gate before the shared expert": (
        "Qwen2MoeForCausalLM",
        lambda: transformers.Qwen2MoeConfig(**SIZE, **EXPERTS, shared_expert_intermediate_size=16),
    ),
    "a linear router": ("PhimoeForCausalLM", lambda: transformers.PhimoeConfig(**SIZE, num_local_experts=4)),
    "a router of its own": (
        "GptOssForCausalLM",
        lambda: transformers.GptOssConfig(**SIZE, num_local_experts=4, head_dim=8),
    ),
    "a vision tower": ("Gemma3ForConditionalGeneration", lambda: transformers.Gemma3Config(**GEMMA)),
}


def adapted(model):
    names = [name.removeprefix("base_model.model.") for name, _ in model.lm.named_parameters()]
    return {name.split(".lora_A")[0] for name in names if ".lora_A." in name}


@pytest.mark.parametrize("kind", MIXED)
def test_all_linear_layers_but_routers_are_adapted(kind):
    name, config = MIXED[kind]
    asked = ["all-linear"] if kind == "a vision tower" else None
    torch.manual_seed(0)
    lm = getattr(transformers, name)(config())
    wanted = {
        n
        for n, m in lm.named_modules()
        if isinstance(m, torch.nn.Linear) and m is not lm.get_output_embeddings()
    }
    wanted -= {n for n in wanted if "vision" in n or "router" in n or "shared_expert_gate" in n}
    names = adapted(add_lora(CommonArgs(**ARGS, lora_target_modules=asked), FlatModel(lm)))
    assert wanted <= names
    for n in names:
        assert "vision" not in n and "router" not in n and ("gate." not in f"{n}." or "gate_proj" in n)
    if kind == "fused experts":  # as one parameter of the layer, by peft
        assert any(".experts" in n for n in names)
    if kind == "a linear router":  # unless it is named
        lm = getattr(transformers, name)(config())
        names = adapted(add_lora(CommonArgs(**ARGS, lora_target_modules=["router", "q_proj"]), FlatModel(lm)))
        assert {n.split(".")[-1] for n in names} == {"router", "q_proj"}


def test_layers_of_several_matrices_are_left_out():
    """DeepSeek-V4 projects the heads of a group by a matrix of their own, in a subclass of nn.Linear."""
    v4 = getattr(transformers, "DeepseekV4Config", None)
    if v4 is None:
        pytest.skip("transformers has no DeepSeek-V4")
    sizes = SIZE | {
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "q_lora_rank": 16,
    }
    sizes |= {
        "o_groups": 2,
        "o_lora_rank": 8,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "num_key_value_heads": 1,
    }
    model = add_lora(
        CommonArgs(**ARGS), FlatModel(transformers.AutoModelForCausalLM.from_config(v4(**sizes)))
    )
    names = {name.split(".")[-1] for name in adapted(model)}
    assert "o_b_proj" in names and "o_a_proj" not in names
    assert model.lm(input_ids=torch.arange(8)[None]).logits.isfinite().all()


@pytest.mark.parametrize("name", HYBRIDS)
def test_no_weight_that_is_read_past_its_layer_is_adapted(name):
    """In a kernel, for one, where there is a GPU: an adapter would not be seen."""
    model = add_lora(CommonArgs(**ARGS), FlatModel(tiny_family(name)))
    for layer in adapted(model):
        owner, _, child = layer.rpartition(".")
        methods = vars(type(model.lm.base_model.model.get_submodule(owner))).items()
        code = "".join(
            inspect.getsource(inspect.unwrap(method)) for key, method in methods if "forward" in key
        )
        assert not re.search(rf"self\.{child}\.weight(?!\.(device|dtype|shape))\b", code), layer


# --- kinds of adapters --------------------------------------------------------------------------------------


def answer_logps(plain, ids):
    """By peft's model, of the tokens that batch_of trains."""
    logps = plain(torch.tensor([ids])).logits[0, 1:-1].log_softmax(-1)
    return logps.gather(-1, torch.tensor(ids)[2:, None])[:, 0]


def assert_pefts(model, plain, ids):
    """The same log-probabilities, and gradients of their sum; returns those of peft by name."""
    batch = batch_of(ids)
    out, wanted = model(batch, nll_weights=batch["loss_mask"]), answer_logps(plain, ids)
    torch.testing.assert_close(out.logps[2:], wanted, atol=1e-4, rtol=1e-4)
    out.nll.backward()
    (-wanted.sum()).backward()
    known = {n: p.grad for n, p in plain.named_parameters() if p.requires_grad}
    found = {n: p.grad for n, p in model.lm.named_parameters() if p.requires_grad}
    assert known.keys() == found.keys()
    for name, grad in known.items():
        atol = min(2e-4, 1e-4 * float(grad.abs().max()) + 1e-6)
        torch.testing.assert_close(found[name], grad, atol=atol, rtol=1e-3, msg=name)
    return known


@pytest.mark.parametrize(
    "kind", [{}, {"use_dora": True}, {"use_rslora": True}, {"lora_dropout": 0.2}], ids=str
)
def test_adapters_have_pefts_gradients(kind):
    torch.manual_seed(1)
    model = add_lora(CommonArgs(**ARGS, **kind), wrap(tiny_lm("llama"))).eval()
    ids = [3, 9, 5, 4, 7, 1, 2, 11]
    with torch.no_grad():
        # B is 0
        assert torch.allclose(model(batch_of(ids)).logps[2:], answer_logps(tiny_lm("llama"), ids), atol=1e-5)
    disturb(model)
    plain = peft.PeftModelForCausalLM(tiny_lm("llama"), model.lm.peft_config["default"]).eval()
    plain.load_state_dict(model.lm.state_dict())
    known = assert_pefts(model, plain, ids)
    assert model.lm.peft_config["default"].lora_dropout == kind.get("lora_dropout", 0)
    assert any("magnitude" in n for n in known) == ("use_dora" in kind)
    layer = plain.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == (8 / 2 if "use_rslora" in kind else 8 / 4)


def test_every_named_layer_exists():
    """peft passes over a misspelt one, if another is right."""
    with pytest.raises(UserError, match="--lora_target_modules v_prj: no layer of LlamaForCausalLM"):
        add_lora(CommonArgs(**ARGS, lora_target_modules=["q_proj", "v_prj"]), wrap(tiny_lm("llama")))


# --- rows of new tokens -------------------------------------------------------------------------------------


def grown(kind, **args):
    """A tiny model of two more tokens with an adapter that trains them, and peft's own of the same
    numbers."""
    lm = tiny_lm(kind)
    grow_embedding(lm, V + 2)
    for module in lm.modules():  # gpt2
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model = add_lora(CommonArgs(**ARGS, **args), wrap(lm), new_tokens=[V, V + 1])
    plain = tiny_lm(kind)
    grow_embedding(plain, V + 2)
    plain = peft.PeftModelForCausalLM(plain, model.lm.peft_config["default"])
    disturb(model)
    found = plain.load_state_dict(model.lm.state_dict(), strict=True)
    assert not found.missing_keys
    return model.eval(), plain.eval()


def test_new_rows_are_the_same_in_every_model():
    """In the policy and its reference, and on all processes."""
    models = [tiny_lm("llama"), tiny_lm("llama")]
    for seed, lm in enumerate(models):
        torch.manual_seed(seed)
        grow_embedding(lm, V + 2)
    one, other = (lm.get_input_embeddings().weight for lm in models)
    assert torch.equal(one, other) and one[V:].std(0).min() > 0


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_new_tokens_in_rows_that_pad_the_embedding_start_as_grown_ones(kind, capsys):
    """Phi-3 has 32,064 rows and 32,011 tokens: an added one finds a row of zeros, which says nothing."""
    lm = tiny_lm(kind)
    parts = [lm.get_input_embeddings(), lm.get_output_embeddings()]
    with torch.no_grad():
        for part in parts:
            part.weight[V - 4 :] = 0
    before = [part.weight.detach().clone() for part in parts]
    grow_embedding(lm, V - 2)
    assert "model: 2 tokens have rows of zeros: they start as the mean" in capsys.readouterr().out
    for part, old in zip(parts, before, strict=True):
        weight = part.weight.detach()
        mean = old[: V - 4][old[: V - 4].any(1)].mean(0)  # without the token that pads texts
        assert torch.equal(weight[: V - 4], old[: V - 4]) and not weight[V - 2 :].any()
        torch.testing.assert_close(weight[V - 4 : V - 2], mean.expand(2, -1))


# All but llama have one matrix for embedding and head.
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gemma3"])
def test_rows_of_new_tokens_have_pefts_gradients(kind):
    model, plain = grown(kind)
    ids = [3, V, 5, V + 1, 7, V, V + 1, 2]
    known = assert_pefts(model, plain, ids)
    rows = [grad for name, grad in known.items() if "trainable_tokens_delta" in name]
    assert rows and all((grad.abs().sum(-1) > 0).all() for grad in rows)
    with torch.no_grad(), at_start(model.lm), plain.disable_adapter():
        wanted = answer_logps(plain.base_model.model, ids)
        torch.testing.assert_close(model(batch_of(ids)).logps[2:], wanted, atol=1e-4, rtol=1e-4)


def test_a_head_with_a_bias_cannot_train_single_rows():
    config = transformers.PhiConfig(**{**SIZE, "num_key_value_heads": 4})
    lm = transformers.AutoModelForCausalLM.from_config(config)
    grow_embedding(lm, V + 2)
    with pytest.raises(UserError, match="2 new tokens: the head of PhiForCausalLM has a bias"):
        add_lora(CommonArgs(**ARGS), wrap(lm), new_tokens=[V, V + 1])


# --- the adapter at the start -------------------------------------------------------------------------------


@pytest.fixture(params=["llama", "mixtral"])
def adapter(tmp_path, request):
    """The folder of a trained adapter of a tiny model, which lies beside it."""
    tiny_lm(request.param).save_pretrained(tmp_path / "base")
    model = add_lora(CommonArgs(**ARGS), load_pretrained(CommonArgs(), tmp_path / "base"))
    disturb(model)
    model.lm.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def from_adapter(adapter, checkpoint=None, **options):
    base = load_pretrained(CommonArgs(), adapter.with_name("base"))
    return add_lora(CommonArgs(**options), base, checkpoint, start=adapter)


def test_a_starting_adapter_is_the_reference(adapter, tmp_path):
    model, batch = from_adapter(adapter).eval(), batch_of(range(3, 13))
    merged = load_pretrained(CommonArgs(), adapter).eval()
    with torch.no_grad():
        before = merged(batch).logps
        torch.testing.assert_close(model(batch).logps, before, atol=1e-4, rtol=1e-4)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in model.named_parameters() if "lora_" in n and START not in n.split(".")}
    reference = Reference(SimpleNamespace(autocast=contextlib.nullcontext), model, without_adapter=True)
    first = reference(batch).logps
    disturb(model, seed=1)
    assert torch.equal(reference(batch).logps, first)
    torch.testing.assert_close(first, before, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        assert not torch.allclose(model(batch).logps, before, atol=1e-2)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == trained  # for DDP and FSDP
    write_adapter(model.lm, tmp_path / "out", model.lm.state_dict())  # the trained one alone
    assert not [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
    with torch.no_grad():
        found = load_pretrained(CommonArgs(), tmp_path / "out").eval()(batch).logps
        torch.testing.assert_close(found, model(batch).logps, atol=1e-4, rtol=1e-4)
    resumed = from_adapter(adapter, tmp_path / "out").eval()  # as a resumed run has it
    with torch.no_grad():
        torch.testing.assert_close(resumed(batch).logps, model(batch).logps, atol=1e-4, rtol=1e-4)
    reference.model = resumed
    torch.testing.assert_close(reference(batch).logps, before, atol=1e-4, rtol=1e-4)


def test_only_lora_adapters_are_read(tmp_path):
    for kind, task in ((peft.IA3Config, "CAUSAL_LM"), (peft.LoraConfig, "SEQ_CLS")):
        kind(task_type=task, base_model_name_or_path="x").save_pretrained(tmp_path / task)
        found = rf"^{tmp_path}/{task} has a {kind.__name__} \({task}\): only LoRA of causal"
        with pytest.raises(UserError, match=found):
            adapter_config(tmp_path / task)
