"""The life of an adapter: base -> SFT -> DPO -> GRPO -> a merged model that stops."""

import json
import shutil

from common.model.merge import merge_adapter
import pytest
from safetensors.torch import load_file
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.conftest import ROOT, train_metrics

peft = pytest.importorskip("peft")

FEW = "--max_steps 2 --logging_steps 1 --eval_steps 0 --max_train_samples 8 --per_device_train_batch_size 8".split()
FEW += "--use_peft --lora_r 4 --save_steps 1 --save_total_limit 0 --learning_rate 1e-3".split()
ON = [*FEW, *"--sft_weight 0 --precompute_ref_log_probs false".split()]  # of DPO


def without_chatml(folder):
    """The demo's model in a folder, ignorant of chatml: its marks have other names."""
    shutil.copytree(ROOT / "data" / "base_model", folder)
    for path in folder.glob("*.j*"):
        path.write_text(path.read_text().replace("im_start|>", "b|>").replace("im_end|>", "e|>"))
    settings = json.loads((folder / "generation_config.json").read_text()) | {"eos_token_id": 0}
    # it would not stop at the end of a turn
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def base(tmp_path):
    return without_chatml(tmp_path / "base")


def stage(name):
    return ["--config", f"data/configs/{name}.yaml"]


def logits(lm):
    with torch.no_grad():
        return lm(torch.arange(3, 40)[None]).logits


def test_dpo_goes_on_with_an_adapter_whose_start_is_the_reference(launch, base, capsys):
    sft = launch(
        "sft", *stage("sft"), *FEW, "--model_name_or_path", base, "--chat_template", "chatml", output="sft"
    )
    said = capsys.readouterr().out
    assert "the rows of new tokens are trained: <|im_end|>, <|im_start|>" in said
    config = json.loads((sft / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    rows = load_file(sft / "adapter_model.safetensors")
    # of an embedding that is the head, too
    assert [w.shape[0] for n, w in rows.items() if "lora_" not in n] == [2]
    tokenizer = AutoTokenizer.from_pretrained(sft)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in GenerationConfig.from_pretrained(sft).eos_token_id

    dpo = launch("dpo", *stage("dpo"), *ON, "--model_name_or_path", sft, output="dpo")
    said = capsys.readouterr().out
    assert f"the adapter {sft} is trained further, as it is (r 4, alpha 32), on its base {base}" in said
    first, second = train_metrics(dpo)
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5) and second["loss"] != pytest.approx(
        0.693147, abs=1e-3
    )
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (sft, dpo))
    assert before.keys() == after.keys() and all(not torch.equal(before[n], after[n]) for n in before)
    # As it says, one loads it: the embedding grows to the tokenizer's size, and the adapter brings the new
    # rows.
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(
        dpo, generation_config=GenerationConfig.from_pretrained(dpo)
    )
    assert end in loaded.generation_config.eos_token_id
    grown = AutoModelForCausalLM.from_pretrained(base)
    grown.resize_token_embeddings(len(tokenizer))
    wanted = logits(loaded.eval())
    assert torch.equal(logits(peft.PeftModel.from_pretrained(grown, dpo).eval()), wanted)
    merge_adapter(str(dpo), str(dpo / "merged"))
    merged = AutoModelForCausalLM.from_pretrained(dpo / "merged")
    torch.testing.assert_close(logits(merged), wanted, atol=1e-4, rtol=1e-4)
    assert merged.generation_config.eos_token_id == GenerationConfig.from_pretrained(dpo).eos_token_id


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["--load_in_4bit", "--load_in_8bit"])
def test_every_stage_runs_on_a_quantised_base(bits, launch, base, capsys):
    pytest.importorskip("bitsandbytes")
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    words = [*FEW, bits, *"--gradient_checkpointing --lr_scheduler_type constant --warmup_steps 0".split()]
    tuned = [
        *stage("sft"),
        *words,
        "--model_name_or_path",
        base,
        *"--chat_template chatml --max_steps 4".split(),
    ]
    whole = launch("sft", *tuned, output="whole")
    assert train_metrics(whole)[-1]["loss"] < train_metrics(whole)[0]["loss"]
    for precomputed in ("false", "true"):
        flags = [
            "--precompute_ref_log_probs",
            precomputed,
            "--sft_weight",
            "0",
            "--model_name_or_path",
            whole,
        ]
        dpo = launch("dpo", *stage("dpo"), *words, *flags, output=f"dpo-{precomputed}")
        assert train_metrics(dpo)[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    flags = ["--beta", "0.1", "--model_name_or_path", dpo, "--merge_lora"]
    merged = launch("grpo", *stage("grpo"), *words, *flags, output="grpo")
    assert train_metrics(merged)[0]["kl"] == pytest.approx(0, abs=1e-6)
    adapter = load_file(merged / "checkpoint-2" / "adapter_model.safetensors")
    weights, plain = load_file(merged / "model.safetensors"), load_file(base / "model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.bfloat16} and weights.keys() == plain.keys()
    name = "model.layers.0.mlp.up_proj"
    parts = [adapter[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "BA"]
    # alpha 32, r 4: the base was not rounded
    wanted = plain[f"{name}.weight"].double() + 8 * parts[0] @ parts[1]
    assert ((weights[f"{name}.weight"].double() - wanted).abs() <= (2**-8 + 1e-5) * wanted.abs() + 1e-6).all()
    assert not (merged / "adapter_model.safetensors").exists() and not (merged / "adapter").exists()
