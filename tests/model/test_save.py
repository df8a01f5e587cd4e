"""The language model alone in a folder: what a server loads after each update of the policy."""

import importlib.util

from accelerate import Accelerator
from common.args import CommonArgs
from common.extras.lora import add_lora
from common.extras.merge import policy_writer
from common.model.load import load_pretrained
from common.model.save import EXTRA
from common.model.wrap import wrap
from common.run.checkpoint import load_extra
import pytest
from safetensors.torch import load_file, save_file
import torch
import transformers

from tests.model.test_lora import ARGS, MIXED, batch_of, disturb, grown
from tests.tiny import tiny_lm

IDS = [3, 9, 5, 20, 7, 50, 33, 2]
LORA = [{}, {"use_dora": True}, {"use_rslora": True}]


def written(model, folder, dtype=None):
    """Loaded by transformers; the model that was written is what it was, at the same place in memory."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    before = {name: (w, w.data_ptr(), w.detach().clone()) for name, w in tensors.items()}
    policy_writer(Accelerator(cpu=True), model, dtype)(folder)
    for name, w in [*model.named_parameters(), *model.named_buffers()]:
        assert w is before[name][0] and w.data_ptr() == before[name][1] and torch.equal(w, before[name][2]), name
    assert not list(folder.glob("adapter*"))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32)


def assert_same(model, plain, ids=IDS, atol=2e-5):
    model.eval()
    with torch.no_grad():
        wanted = plain(input_ids=torch.tensor([ids])).logits[0, 1:-1].float().log_softmax(-1)
        found = model(batch_of(ids)).logps[2:]
    torch.testing.assert_close(found, wanted.gather(-1, torch.tensor(ids)[2:, None])[:, 0], atol=atol, rtol=1e-4)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_model_is_written_as_it_is(kind, dtype, tmp_path):
    model = wrap(tiny_lm(kind))
    disturb(model)
    plain = written(model, tmp_path, dtype)
    weights = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in weights) == (kind == "llama")  # qwen3's is the embedding
    if dtype is None:
        assert_same(model, plain)
    else:
        rounded = {name: w.bfloat16() for name, w in model.lm.state_dict().items() if name in weights}
        assert all(torch.equal(w, rounded[name]) and w.dtype == rounded[name].dtype for name, w in weights.items())


@pytest.mark.parametrize("options", LORA, ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_adapter_is_merged_and_the_model_stays_what_it_is(kind, options, tmp_path):
    model = add_lora(CommonArgs(**ARGS, **options), wrap(tiny_lm(kind)))
    disturb(model)
    assert_same(model, written(model, tmp_path))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_rows_of_new_tokens_are_merged(kind, tmp_path):
    model, _ = grown(kind)
    V = model.config.vocab_size
    assert_same(model, written(model, tmp_path), [3, V - 1, 5, V - 2, 7, V - 1, 2])


@pytest.mark.parametrize("kind", ["fused experts", "a gate before the shared expert"])
def test_adapters_on_experts_are_merged(kind, tmp_path):
    torch.manual_seed(0)
    lm = getattr(transformers, MIXED[kind][0])(MIXED[kind][1]()).eval()
    model = add_lora(CommonArgs(**ARGS), wrap(lm))
    disturb(model, scale=0.3)
    assert_same(model, written(model, tmp_path))


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("bits", [{"load_in_4bit": True}, {"load_in_8bit": True}], ids=str)
def test_a_quantised_base_is_written_as_the_numbers_that_it_stands_for(bits, tmp_path):
    tiny_lm("llama").save_pretrained(tmp_path / "base")
    model = add_lora(CommonArgs(**ARGS), load_pretrained(CommonArgs(**bits), tmp_path / "base"))
    disturb(model)
    plain = written(model, tmp_path / "out")
    assert getattr(plain.config, "quantization_config", None) is None
    assert_same(model, plain, atol=1e-4)


def test_a_later_stage_goes_on_with_its_modules(tmp_path, capsys):
    """If it makes the same; else it says that they are left out."""
    first, same, other = (wrap(tiny_lm("llama")) for _ in range(3))
    for model, size in ((first, 3), (same, 3), (other, 4)):
        model.extra["head"] = torch.nn.Linear(32, size)
    save_file(first.extra.state_dict(), tmp_path / EXTRA)
    load_extra(same, None, str(tmp_path)), load_extra(other, None, str(tmp_path))
    assert torch.equal(same.extra["head"].weight, first.extra["head"].weight)
    said = capsys.readouterr().out.splitlines()
    assert "training goes on" in said[-2] and "left out" in said[-1]
