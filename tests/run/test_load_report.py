"""What a run says of its model at the start; a checkpoint with more than text keeps it, frozen, or says that
it is gone."""

import json

import pytest
from safetensors.torch import load_file
import torch
import transformers

from tests.conftest import demo

SIZE = {
    "vocab_size": 1024,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SIZE |= {"num_key_value_heads": 2, "head_dim": 8}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
SHORT = "--max_steps 2 --eval_steps 0 --per_device_train_batch_size 2 --learning_rate 1e-3".split()


def gemma3():
    text = transformers.Gemma3TextConfig(**SIZE, sliding_window=64)
    vision = transformers.SiglipVisionConfig(**VISION, image_size=28, patch_size=14)
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=4
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def qwen3_5():
    text = SIZE | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    text |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
    vision = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 4, "out_hidden_size": 32}
    return transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    )


@pytest.fixture
def folder(tmp_path, request):
    """A multimodal checkpoint with the demo's tokenizer."""
    torch.manual_seed(0)
    request.param().save_pretrained(tmp_path / "base")
    transformers.AutoTokenizer.from_pretrained("data/base_model").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def words(folder):
    return ["--config", demo("sft"), "--model_name_or_path", str(folder), *SHORT]


def kept(folder, output):
    """Names of the tensors that are as in the base, and those that are not."""
    before, after = load_file(folder / "model.safetensors"), load_file(output / "model.safetensors")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    return same, before.keys() - same


@pytest.mark.parametrize("folder", [gemma3], indirect=True)
def test_a_tower_that_is_loaded_is_frozen_and_goes_out_as_it_came(folder, launch):
    output = launch("sft", *words(folder))
    same, changed = kept(folder, output)
    assert same and all("vision_tower" in name or "multi_modal_projector" in name for name in same)
    assert changed and not any("vision_tower" in name or "multi_modal_projector" in name for name in changed)
    report = json.loads((output / "dataset.json").read_text())["model"]
    assert report["class"] == "Gemma3ForConditionalGeneration"
    assert report["parameters"]["trained"] < report["parameters"]["all"]


@pytest.mark.parametrize("folder", [pytest.param(qwen3_5, marks=pytest.mark.slow)], indirect=True)
def test_a_tower_that_is_left_out_is_said(folder, launch, capsys):
    output = launch("sft", *words(folder))
    said = capsys.readouterr().out
    assert "what qwen3_5 has beside its text model is left out (exported as qwen3_5_text)" in said
    assert json.loads((output / "config.json").read_text())["model_type"] == "qwen3_5_text"
    transformers.AutoModelForCausalLM.from_pretrained(output)
