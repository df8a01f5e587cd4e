"""Models whose layers carry a state along a sequence, in all four stages, as a user runs them."""

import json

import pytest
import torch
import transformers

from tests.conftest import train_metrics
from tests.tiny import HYBRIDS

pytestmark = pytest.mark.slow


@pytest.fixture
def hybrid(tmp_path):
    """hybrid(name) makes a tiny model with the demo's tokenizer, and returns its folder."""

    def make(name):
        if name not in HYBRIDS:
            pytest.skip("transformers does not have it")
        tokenizer = transformers.AutoTokenizer.from_pretrained("data/base_model")
        kind, sizes = HYBRIDS[name]
        ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
        sizes = sizes | ids | {"vocab_size": len(tokenizer), "initializer_range": 0.02, "max_position_embeddings": 1024}
        torch.manual_seed(0)
        lm = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes))
        lm.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


def test_all_four_stages_run_and_write_samples(hybrid, launch):
    few = ["--max_steps", 3, "--eval_steps", 3, "--eval_max_new_tokens", 4, "--max_train_samples", 16]
    few += ["--max_eval_samples", 4, "--logging_steps", 1, "--save_steps", 0, "--per_device_train_batch_size", 4]
    model = hybrid("lfm2")
    for stage in ("pretrain", "sft", "dpo", "grpo"):
        more = {"pretrain": ["--max_length", 64], "grpo": ["--max_completion_length", 8, "--num_generations", 4]}
        data = ["--dataset_name", "data/pretrain/train.txt" if stage == "pretrain" else f"data/{stage}"]
        model = launch(stage, "--model_name_or_path", model, *data, *few, *more.get(stage, []), output=stage)
        assert len(train_metrics(model)) == 3
        samples = [json.loads(line) for line in (model / "samples.jsonl").read_text().splitlines()]
        assert samples and all(sample["completion"] is not None for sample in samples)
    lm = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert type(lm).__name__ == "Lfm2ForCausalLM" and lm.config._attn_implementation != "flat"
