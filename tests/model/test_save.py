"""The language model alone in a folder, for a server after each update of the policy, and adapters merged
into their base."""

import importlib.util
import json
import resource
import sys

from accelerate import Accelerator
from common.args import CommonArgs
from common.errors import UserError
from common.model.load import load_pretrained
from common.model.lora import add_lora
from common.model.merge import merge_adapter, policy_writer
from common.model.save import EXTRA, final_dtype
from common.model.wrap import wrap
from common.run.checkpoint import load_extra
import pytest
from safetensors.torch import load_file, save_file
import torch
import transformers

from tests.conftest import run_script
from tests.model.test_lora import ARGS, MIXED, answer_logps, batch_of, disturb, grown
from tests.tiny import tiny_lm

IDS = [3, 9, 5, 20, 7, 50, 33, 2]
LORA = [{}, {"use_dora": True}, {"use_rslora": True}]


def written(model, folder, dtype=None):
    """Loaded by transformers; the model that was written is what it was, at the same place in memory."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    before = {name: (w, w.data_ptr(), w.detach().clone()) for name, w in tensors.items()}
    policy_writer(Accelerator(cpu=True), model, dtype)(folder)
    for name, w in [*model.named_parameters(), *model.named_buffers()]:
        assert w is before[name][0] and w.data_ptr() == before[name][1] and torch.equal(w, before[name][2]), (
            name
        )
    assert not list(folder.glob("adapter*"))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32)


def assert_same(model, plain, ids=IDS, atol=2e-5):
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(
            model(batch_of(ids)).logps[2:], answer_logps(plain, ids), atol=atol, rtol=1e-4
        )


def test_the_dtype_of_the_final_model():
    """That of the files it was made of, whatever it was trained in; bfloat16 if it was asked for."""
    for settings, base, wanted in [
        ({}, "bfloat16", "bfloat16"),
        ({"dtype": "bfloat16"}, "float32", "bfloat16"),
        ({"dtype": "float32"}, "bfloat16", "bfloat16"),
        ({"use_peft": True, "dtype": "bfloat16"}, "bfloat16", "float32"),
        ({"use_peft": True, "merge_lora": True}, "bfloat16", "bfloat16"),
    ]:
        assert final_dtype(CommonArgs(**settings), base) == wanted


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
        assert all(
            torch.equal(w, rounded[name]) and w.dtype == rounded[name].dtype for name, w in weights.items()
        )
        model.lm._keep_in_fp32_modules_strict = {"norm"}
        written(model, tmp_path, dtype)
        kept = {
            name for name, w in load_file(tmp_path / "model.safetensors").items() if w.dtype == torch.float32
        }
        assert kept == {name for name in weights if "norm" in name}


@pytest.mark.parametrize("options", LORA, ids=str)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_adapter_is_merged_and_the_model_stays(kind, options, tmp_path):
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
def test_a_quantised_base_is_written_as_its_numbers(bits, tmp_path):
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
    assert "training goes on" in said[-2]
    assert said[-1] == f"{tmp_path / EXTRA}: left out, this script has other modules"


# --- a finished adapter -------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path):
    """A trained adapter on a bfloat16 base, with a norm in float32."""
    lm = tiny_lm("qwen3").bfloat16()
    lm.save_pretrained(tmp_path / "base")
    model = add_lora(CommonArgs(**ARGS), load_pretrained(CommonArgs(), tmp_path / "base"))
    disturb(model)
    model.lm.save_pretrained(tmp_path / "adapter")
    config = {"eos_token_id": [1, 7], "pad_token_id": 0}
    (tmp_path / "adapter" / "generation_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter" / "extra.safetensors").write_bytes(b"modules of one's own")
    return tmp_path / "adapter"


def test_a_merged_sum_is_rounded_once(adapter):
    base = load_file(adapter.with_name("base") / "model.safetensors")
    parts = load_file(adapter / "adapter_model.safetensors")
    merge_adapter(str(adapter), str(adapter.with_name("out")))
    merged = load_file(adapter.with_name("out") / "model.safetensors")
    # all as readable as others
    assert len({file.stat().st_mode for file in adapter.with_name("out").glob("*.*")}) == 1
    assert merged.keys() == base.keys() and {w.dtype for w in merged.values()} == {torch.bfloat16}
    changed = 0
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        wanted = weight.double()
        if f"{stem}.lora_A.weight" in parts:
            # alpha / r
            wanted += 2 * parts[f"{stem}.lora_B.weight"].double() @ parts[f"{stem}.lora_A.weight"].double()
            changed += 1
        same = merged[name] == wanted.bfloat16()  # rounded once: all but what float32 loses before that
        assert same.float().mean() > 0.995, name
    assert changed == 14
    assert (adapter.with_name("out") / "extra.safetensors").read_bytes() == b"modules of one's own"
    lm = transformers.AutoModelForCausalLM.from_pretrained(adapter.with_name("out"))
    assert lm.generation_config.eos_token_id == [1, 7] and lm.dtype == torch.bfloat16


def test_what_cannot_be_merged_leaves_nothing(adapter, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="cannot load the adapter .*nowhere"):
        merge_adapter(str(tmp_path / "nowhere"), str(out))
    with pytest.raises(UserError, match="cannot load the adapter .*base"):
        merge_adapter(str(tmp_path / "base"), str(out))
    moved = tmp_path / "moved"
    (tmp_path / "base").rename(moved)
    with pytest.raises(UserError, match="cannot load the model .*/base"):
        merge_adapter(str(adapter), str(out))
    merge_adapter(str(adapter), str(tmp_path / "found"), str(moved))
    quantised = json.loads((moved / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "bitsandbytes"}
    }
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(quantised))
    with pytest.raises(UserError, match=f"base is quantised: .*merge_lora {adapter} OUT --base THE_MODEL"):
        merge_adapter(str(adapter), str(out))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="cannot load the adapter"):
        merge_adapter(str(adapter), str(out), str(moved))
    assert not out.exists()


def test_a_full_disk_leaves_nothing(adapter, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(UserError, match="out cannot be written"):
            merge_adapter(str(adapter), str(tmp_path / "out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.slow
def test_the_command(adapter, tmp_path):
    command = [sys.executable, "-m", "tools.merge_lora", str(adapter), str(tmp_path / "out")]
    run = run_script(command)
    assert run.returncode == 0 and "merged into its base" in run.stdout, run.stderr[-2000:]
    again = run_script(command)
    assert again.returncode == 1 and again.stderr.count("\n") == 1 and "is there already" in again.stderr
