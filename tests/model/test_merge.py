"""A finished adapter merged into its base, in the dtype of the base."""

import json
import resource
import sys

from common.args import CommonArgs
from common.errors import UserError
from common.extras.lora import add_lora
from common.extras.merge import merge_adapter
from common.model.load import load_pretrained
import pytest
from safetensors.torch import load_file
import torch
import transformers

from tests.conftest import run_script
from tests.model.test_lora import ARGS, disturb
from tests.tiny import tiny_lm

pytest.importorskip("peft")


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


def test_the_sum_is_made_exactly_and_rounded_once_to_the_dtype_of_the_base(adapter):
    base = load_file(adapter.with_name("base") / "model.safetensors")
    parts = load_file(adapter / "adapter_model.safetensors")
    merge_adapter(str(adapter), str(adapter.with_name("out")))
    merged = load_file(adapter.with_name("out") / "model.safetensors")
    assert len({file.stat().st_mode for file in adapter.with_name("out").glob("*.*")}) == 1  # all as readable as others
    assert merged.keys() == base.keys() and {w.dtype for w in merged.values()} == {torch.bfloat16}
    changed = 0
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        wanted = weight.double()
        if f"{stem}.lora_A.weight" in parts:
            wanted += 2 * parts[f"{stem}.lora_B.weight"].double() @ parts[f"{stem}.lora_A.weight"].double()  # alpha / r
            changed += 1
        same = merged[name] == wanted.bfloat16()  # rounded once: all but what float32 loses before that
        assert same.float().mean() > 0.995, name
    assert changed == 14
    assert (adapter.with_name("out") / "extra.safetensors").read_bytes() == b"modules of one's own"
    lm = transformers.AutoModelForCausalLM.from_pretrained(adapter.with_name("out"))
    assert lm.generation_config.eos_token_id == [1, 7] and lm.dtype == torch.bfloat16


def test_what_cannot_be_merged_is_said_in_a_line_and_leaves_nothing(adapter, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="cannot load the adapter .*nowhere"):
        merge_adapter(str(tmp_path / "nowhere"), str(out))
    with pytest.raises(UserError, match="cannot load the adapter .*base"):
        merge_adapter(str(tmp_path / "base"), str(out))
    with pytest.raises(UserError, match="is there already"):
        merge_adapter(str(adapter), str(tmp_path / "base"))
    moved = tmp_path / "moved"
    (tmp_path / "base").rename(moved)
    with pytest.raises(UserError, match="cannot load the model .*/base"):
        merge_adapter(str(adapter), str(out))
    merge_adapter(str(adapter), str(tmp_path / "found"), str(moved))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="cannot load the adapter"):
        merge_adapter(str(adapter), str(out), str(moved))
    assert not out.exists()


def test_a_full_disk_leaves_nothing(adapter, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(UserError, match="out could not be written"):
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
