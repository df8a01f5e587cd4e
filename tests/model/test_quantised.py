"""A base in 4 or 8 bits: the same numbers as with the weights that it stands for, forward and backward."""

import copy
import json

from common.args import CommonArgs
from common.collators import flat_batch
from common.errors import UserError
from common.model.flat_model import FlatModel, count_parameters, is_quantised
from common.model.load import load_pretrained
from common.model.lora import add_lora
from common.model.quantised import check_quantisation, dequantised
from common.model.wrap import wrap
import numpy as np
import pytest
import torch

from tests.model.test_lora import ARGS, disturb
from tests.tiny import tiny_lm

BITS = {4: {"load_in_4bit": True}, 8: {"load_in_8bit": True}}


@pytest.fixture
def bitsandbytes():
    pytest.importorskip("peft")
    return pytest.importorskip("bitsandbytes")


def plain_like(lm, kind):
    """The same model with the numbers that the quantised weights stand for, without bitsandbytes."""
    plain = tiny_lm(kind)
    for name, module in lm.named_modules():
        if (
            hasattr(module.__dict__.get("_parameters", {}).get("weight"), "quant_state")
            or type(module).__name__ == "Linear8bitLt"
        ):
            weight = dequantised(module.weight)
            own = plain.get_submodule(name)
            with torch.no_grad():
                own.weight.copy_(weight.t() if type(own).__name__ == "Conv1D" else weight)
    return plain


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("bits", BITS)
def test_results_are_those_of_the_dequantised_weights(bits, kind, bitsandbytes, tmp_path):
    tiny_lm(kind).save_pretrained(tmp_path)
    model = load_pretrained(CommonArgs(**BITS[bits]), tmp_path)
    assert is_quantised(model.lm) and not model.padded
    plain = plain_like(model.lm, kind)
    exact = dict(tiny_lm(kind).named_parameters())
    # 16 levels up to the largest of 64 numbers, 255 up to that of a row
    for name, weight in plain.named_parameters():
        assert (weight - exact[name]).abs().max() <= (0.16 if bits == 4 else 0.006) * exact[
            name
        ].abs().max(), name
    changed = [name for name, weight in plain.named_parameters() if not torch.equal(weight, exact[name])]
    assert len(changed) == (14 if kind == "llama" else 8)
    model = add_lora(CommonArgs(**ARGS), model).eval()
    other = add_lora(CommonArgs(**ARGS), wrap(plain)).eval()
    disturb(model)
    other.load_state_dict(
        {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}, strict=False
    )
    sequences = [np.arange(2, 12), np.arange(20, 40)]
    batch = flat_batch(
        [[{"input_ids": ids, "loss_mask": np.ones(len(ids))}] for ids in sequences], torch.device("cpu")
    )
    for training in (False, True):
        found, wanted = (
            each.train(training)(batch, nll_weights=batch["loss_mask"]) for each in (model, other)
        )
        if kind == "llama" or not training:  # gpt2 has dropout
            torch.testing.assert_close(found.logps, wanted.logps, atol=1e-4, rtol=1e-4)
    for each in (model, other):
        each.zero_grad()
        each.eval()(batch, nll_weights=batch["loss_mask"]).nll.backward()
    for name, parameter in other.named_parameters():
        if parameter.requires_grad:
            grad = model.get_parameter(name).grad
            torch.testing.assert_close(
                grad, parameter.grad, atol=1e-4 * float(parameter.grad.abs().max()), rtol=1e-3, msg=name
            )
    trained, everything = count_parameters(model)
    assert (trained, everything) == count_parameters(other)


@pytest.mark.parametrize("bits", BITS)
def test_under_autocast_it_is_a_linear_layer(bits, bitsandbytes, tmp_path):
    tiny_lm("llama").save_pretrained(tmp_path)
    layer = load_pretrained(CommonArgs(**BITS[bits]), tmp_path).lm.model.layers[0].mlp.up_proj
    x = torch.randn(3, 32)
    weight = dequantised(layer.weight)
    with torch.autocast("cpu", torch.bfloat16):
        out, wanted = layer(x), torch.nn.functional.linear(x, weight)
    assert out.dtype == wanted.dtype == torch.bfloat16 and torch.equal(out, wanted)
    kept = copy.deepcopy(layer.weight.data)
    with torch.no_grad():
        layer.eval()(x)
    assert torch.equal(layer.weight.data, kept)  # bitsandbytes would pack it for inference


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"load_in_8bit": True}, "--load_in_8bit: quantised weights cannot be trained"),
        ({"load_in_4bit": True, "load_in_8bit": True, "use_peft": True}, "one of them"),
        ({"load_in_4bit": True, "use_peft": True, "use_dora": True}, "--load_in_4bit: not with --use_dora"),
        ({"load_in_4bit": True, "use_peft": True}, "--load_in_4bit: quantised weights are not sharded"),
    ],
)
def test_flags_that_conflict_are_refused(options, said, bitsandbytes):
    with pytest.raises(UserError, match=said):
        check_quantisation(CommonArgs(**options), sharded=True)
    check_quantisation(CommonArgs(load_in_4bit=True, use_peft=True), sharded=False)


def test_a_promise_of_quantised_weights_is_checked(bitsandbytes, tmp_path):
    tiny_lm("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="and model.*_proj of the files is plain: take out"):
        load_pretrained(CommonArgs(), tmp_path)
    model = FlatModel(tiny_lm("llama"))
    model.lm.config.quantization_config = config["quantization_config"]
    with pytest.raises(UserError, match="is quantised: merge later"):
        add_lora(CommonArgs(use_peft=True, merge_lora=True), model)
