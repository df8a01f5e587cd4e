"""Nothing silent, nothing lost: hostile data, broken model folders, disks that are full, terminals that close."""

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


# --- special tokens -------------------------------------------------------------------------------------------------


# --- model folders --------------------------------------------------------------------------------------------------


def without(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def with_nan(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_config(folder: Path, **changes) -> None:
    edit(folder / "config.json", **changes)


def adapter(folder: Path, base: str | None) -> None:
    for file in folder.iterdir():
        file.unlink()
    settings = {"peft_type": "LORA", "base_model_name_or_path": base, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({"x": torch.zeros(1)}, folder / "adapter_model.safetensors")


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")


def with_more(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: torch.zeros(96)}, folder / "model.safetensors", {"format": "pt"})


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"  # what a clone without it has
BROKEN = {
    "a tensor is missing": (
        lambda f: without(f, "model.layers.0.mlp.up_proj.weight"),
        "its files lack model.layers.0.mlp.up_proj",
    ),
    "one layer more": (
        lambda f: edit_config(f, num_hidden_layers=1, layer_types=None),
        "no place for model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, ",
    ),
    "a bias": (
        lambda f: with_more(f, "model.layers.0.self_attn.q_proj.bias"),
        "no place for model.layers.0.self_attn.q_proj.bias",
    ),
    "NaN": (
        lambda f: with_nan(f, "model.layers.1.self_attn.q_proj.weight"),
        "model.layers.1.self_attn.q_proj.weight holds a NaN",
    ),
    "truncated": (lambda f: os.truncate(f / "model.safetensors", 70_000), "cannot load the model"),
    "empty": (lambda f: os.truncate(f / "model.safetensors", 0), "cannot load the model"),
    "junk": (lambda f: (f / "model.safetensors").write_bytes(os.urandom(9999)), "cannot load the model"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
    "pointers": (lambda f: (f / "model.safetensors").write_bytes(LFS), "cannot load the model"),
    "a pointer": (lambda f: (f / "tokenizer.json").write_bytes(LFS), "cannot load the tokenizer"),
    "no tokenizer": (
        lambda f: [file.unlink() for file in f.glob("tokenizer*")],
        "cannot load the tokenizer",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "cannot load the model"),
    "a file": (lambda f: (shutil.rmtree(f), f.write_text("x")), "cannot load the tokenizer"),
    "config is a list": (lambda f: (f / "config.json").write_text("[1, 2]"), "cannot load the"),
    "config is junk": (lambda f: (f / "config.json").write_text("{"), "cannot load the"),
    "hidden size is text": (lambda f: edit_config(f, hidden_size="wide"), "cannot load the"),
    "rope is a list": (lambda f: edit_config(f, rope_parameters=[1]), "cannot load the"),
    "another vocabulary": (lambda f: edit_config(f, vocab_size=77), "cannot load the model"),
    "tokenizer is junk": (lambda f: (f / "tokenizer.json").write_text('{"model": []}'), "cannot load the tokenizer"),
    "tokenizer config is a list": (lambda f: (f / "tokenizer_config.json").write_text("[]"), "cannot load the tokenizer"),
    "a pickle": (pickled, "cannot load the model"),
    "another size": (lambda f: edit_config(f, vocab_size=77), "embed_tokens.weight is (512, 96) in its files and (77, 96)"),
    "stop token": (lambda f: (f / "generation_config.json").write_text('{"eos_token_id": "x"}'), "eos_token_id 'x' is not"),
    "no unknown token": (
        lambda f: edit(f / "tokenizer_config.json", tokenizer_class="BertTokenizer"),
        "cannot load the tokenizer",
    ),
    "no angle": (
        lambda f: edit_config(f, rope_parameters={"rope_theta": 0, "rope_type": "default"}),
        "LlamaForCausalLM",
    ),
    "NaN in config": (lambda f: edit_config(f, rms_norm_eps=float("nan")), "a few tokens give NaN: look at *_eps"),
    "heads are text": (lambda f: edit_config(f, num_attention_heads="four"), "cannot load the tokenizer"),
    "config is empty": (lambda f: (f / "config.json").write_text(""), "cannot load the tokenizer"),
    "no base": (lambda f: adapter(f, "/no/such"), "cannot load the tokenizer"),
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
    assert "\n" not in str(error.value) and says in str(error.value) and "model" in str(error.value), error.value
    assert not (tmp_path / "owned").exists() and not (ROOT / "owned").exists()
    assert "LOAD REPORT" not in capfd.readouterr().err  # of transformers, in twenty lines


# --- nothing held out -----------------------------------------------------------------------------------------------


# --- templates and rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "outputs/never_trained"])
def test_a_missing_folder_is_no_hub_name(name, launch):
    with pytest.raises(UserError, match=f"{name}: no such folder"):
        launch("sft", *SFT, "--model_name_or_path", name)
