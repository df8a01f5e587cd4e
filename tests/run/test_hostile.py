"""Broken model folders are one line that says what, and nothing in them is executed."""

import json
import os
from pathlib import Path
import shutil

from common.errors import UserError
import pytest
from safetensors.torch import load_file, save_file
import torch

from tests.conftest import ROOT, SFT

BASE = ROOT / "data" / "base_model"


def changed(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def adapter(folder: Path, base: str | None) -> None:
    for file in folder.iterdir():
        file.unlink()
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "target_modules": ["q_proj"],
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({"x": torch.zeros(1)}, folder / "adapter_model.safetensors")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")


BROKEN = {
    "a tensor is missing": (
        lambda f: changed(f, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight")),
        "its files lack model.layers.0.mlp.up_proj",
    ),
    "one layer more": (
        lambda f: edit_config(f, num_hidden_layers=1, layer_types=None),
        "no place for model.layers.1.input_layernorm.weight, ",
    ),
    "NaN": (
        lambda f: changed(
            f, lambda tensors: tensors["model.layers.1.self_attn.q_proj.weight"][0, 3].fill_(float("nan"))
        ),
        "/model: model.layers.1.self_attn.q_proj.weight holds a NaN",
    ),
    "truncated": (lambda f: os.truncate(f / "model.safetensors", 70_000), "cannot load the model"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
    "no tokenizer": (lambda f: [file.unlink() for file in f.glob("tokenizer*")], "cannot load the tokenizer"),
    "no config": (lambda f: (f / "config.json").unlink(), "cannot load the model"),
    "config is junk": (lambda f: (f / "config.json").write_text("{"), "cannot load the"),
    "a pickle": (pickled, "cannot load the model"),
    "another size": (
        lambda f: edit_config(f, vocab_size=77),
        "embed_tokens.weight, or have it in another size",
    ),
    "NaN in config": (
        lambda f: edit_config(f, rms_norm_eps=float("nan")),
        "the model (LlamaForCausalLM): a few tokens give NaN: look at *_eps",
    ),
    "its own base": (lambda f: adapter(f, str(f)), "cannot load the tokenizer"),
    "null as base": (lambda f: adapter(f, None), "cannot load the tokenizer"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_model_folder_is_one_line_that_says_what(kind, launch, tmp_path, capfd):
    damage, says = BROKEN[kind]
    folder = tmp_path / "model"
    shutil.copytree(BASE, folder)
    damage(folder)
    words = [*SFT, "--model_name_or_path", str(folder)]
    with pytest.raises(UserError) as error:
        launch("sft", *words, "--max_steps", "1")
    assert "\n" not in str(error.value) and says in str(error.value) and "model" in str(error.value), (
        error.value
    )
    assert not (tmp_path / "owned").exists() and not (ROOT / "owned").exists()
    assert "LOAD REPORT" not in capfd.readouterr().err  # of transformers, in twenty lines


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "outputs/never_trained"])
def test_a_missing_folder_is_no_hub_name(name, launch):
    with pytest.raises(UserError, match=f"{name}: no such folder"):
        launch("sft", *SFT, "--model_name_or_path", name)
