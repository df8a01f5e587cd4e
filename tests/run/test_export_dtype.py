"""The final model goes out in the precision of its base; checkpoints keep what was trained."""

import json
import shutil

from common.errors import UserError
from common.run.export_dtype import cast_weights
from tests.conftest import demo
from tests.tiny import tiny_pair

import pytest
import torch
import transformers
from safetensors.torch import load_file

SHORT = ["--max_steps", "2", "--eval_steps", "0", "--per_device_train_batch_size", "2", "--learning_rate", "1e-3"]


@pytest.fixture(scope="module")
def bf16_base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bf16_base")
    lm = transformers.AutoModelForCausalLM.from_pretrained("data/base_model", dtype=torch.bfloat16)
    lm.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained("data/base_model").save_pretrained(folder)
    return folder


def sft(base, *more):
    return ["sft", "--config", demo("sft"), "--model_name_or_path", str(base), *SHORT, *more]


def weights(folder):
    return load_file(folder / "model.safetensors")


def config_dtype(folder):
    return json.loads((folder / "config.json").read_text())["dtype"]


@pytest.mark.slow
def test_a_bfloat16_base_goes_out_as_bfloat16_and_its_checkpoints_are_exact(launch, bf16_base):
    """Also from a checkpoint, which is float32, and asked otherwise."""
    out = launch(*sft(bf16_base, "--save_steps", "1"))
    trained, final = weights(out / "checkpoint-2"), weights(out)
    assert all(tensor.dtype == torch.float32 for tensor in trained.values())
    assert any((tensor != tensor.bfloat16().float()).any() for tensor in trained.values())
    assert final.keys() == trained.keys()
    assert all(torch.equal(final[name], tensor.bfloat16()) for name, tensor in trained.items())
    assert config_dtype(out) == "bfloat16" and config_dtype(out / "checkpoint-2") == "float32"
    assert transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch.bfloat16

    shutil.rmtree(out / "checkpoint-2")
    for name in ("summary.json", "model.safetensors"):
        (out / name).unlink()
    again = launch(*sft(bf16_base, "--save_steps", "1"))
    assert all(torch.equal(final[name], tensor) for name, tensor in weights(again).items())

    for name in ("summary.json", "model.safetensors"):
        (out / name).unlink()
    again = launch(*sft(bf16_base, "--save_steps", "1", "--export_dtype", "float32"))
    assert all(torch.equal(trained[name], tensor) for name, tensor in weights(again).items())
    assert config_dtype(again) == "float32"


@pytest.mark.slow
def test_the_best_checkpoint_and_a_merged_adapter_go_out_as_their_base(launch, bf16_base):
    best = launch(*sft(bf16_base, "--eval_steps", "1", "--save_best", "min:eval_loss"), output="best")
    assert config_dtype(best) == "bfloat16" and weights(best)["model.embed_tokens.weight"].dtype == torch.bfloat16
    pytest.importorskip("peft")
    merged = launch(*sft(bf16_base, "--use_peft", "--merge_lora"), output="merged")
    assert config_dtype(merged) == "bfloat16" and weights(merged)["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_what_float16_cannot_hold_is_one_line(tmp_path):
    model, _ = tiny_pair("llama")
    with torch.no_grad():
        model.lm.model.embed_tokens.weight[0, 0] = 1e6
    model.lm.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="embed_tokens.weight has a number too large"):
        cast_weights(tmp_path, "float16", model)
    cast_weights(tmp_path, "bfloat16", model)
    assert weights(tmp_path)["model.embed_tokens.weight"].dtype == torch.bfloat16
