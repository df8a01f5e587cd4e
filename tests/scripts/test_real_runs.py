"""The four scripts on real files with real tokenizers, a few steps each. Skipped where the folder of real data is absent."""

import json
import math
import os
from pathlib import Path

from common.errors import UserError
import pytest

from tests.conftest import ROOT, train_metrics

DATA = Path(os.environ.get("PLAINLOOP_DATA", ROOT.parent / "shared" / "data"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DATA.is_dir(), reason="the folder of real data is not here")]
RUN = "--max_steps 2 --logging_steps 1 --eval_steps 0 --save_steps 0 --max_train_samples 30".split()
SMALL = "--hidden_size 32 --num_layers 2 --num_heads 4 --max_length 128 --per_device_train_batch_size 4".split()
CHATS = [("minimind", ""), ("phi3_mini", ""), ("gpt2", "--chat_template plain"), ("gpt2", "--chat_template chatml")]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """base("gpt2"): a small model with that tokenizer, pretrained for two steps on tiny Shakespeare."""
    made = {}

    def base_with(tokenizer, launch):
        if tokenizer not in made:
            words = [
                "--dataset_name",
                DATA / "pretrain" / "tinyshakespeare.txt",
                "--tokenizer_name",
                DATA / "tokenizers" / tokenizer,
            ]
            words += [*SMALL, *RUN, *"--eval_fraction 0.02 --max_train_samples 100 --eval_steps 2".split()]
            made[tokenizer] = launch("pretrain", *words, output=str(tmp_path_factory.mktemp(tokenizer) / "base"))
        return made[tokenizer]

    return base_with


def check(output):
    rows = train_metrics(output)
    assert len(rows) == 2 and all(math.isfinite(row["loss"]) and row["grad_norm"] >= 0 for row in rows)
    assert (output / "model.safetensors").exists()
    return rows


def files(stage):
    return sorted(path.name for path in (DATA / stage).iterdir()) if DATA.is_dir() else []


@pytest.mark.parametrize("tokenizer, template", CHATS)
@pytest.mark.parametrize("stage, file", [(stage, file) for stage in ("sft", "dpo", "grpo") for file in files(stage)])
def test_every_file_is_trained_on_with_every_tokenizer(stage, file, tokenizer, template, launch, base):
    words = ["--model_name_or_path", base(tokenizer, launch), "--dataset_name", DATA / stage / file, *template.split(), *RUN]
    if stage == "sft":
        output = launch("sft", *words, *"--max_length 256 --per_device_train_batch_size 4 --learning_rate 1e-3".split())
        assert 0 < check(output)[0]["mean_token_accuracy"] + 1e-9 <= 1
        (source,) = json.loads((output / "dataset.json").read_text())["sources"]
        assert source["examples"] + sum(found["count"] for found in source["dropped"].values()) == source["rows"] == 30
        if "glaive" in file:  # of these templates, only minimind's writes tools
            assert any("tools" in reason for reason in source["dropped"]) == (tokenizer != "minimind")
    elif stage == "dpo":
        rows = check(launch("dpo", *words, *"--max_length 384 --per_device_train_batch_size 2 --beta 0.1".split()))
        assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)  # policy = reference at the first step
    else:
        words += (
            "--reward_funcs length:8 --num_generations 4 --per_device_train_batch_size 8 --max_completion_length 8".split()
        )
        if old := {"bbh": "input", "cmath": "question", "gsm8k": "question"}.get(file.split("_")[0]):
            with pytest.raises(UserError, match="--columns"):
                launch("grpo", *words)
            words += ["--columns", f"prompt={old}"]
        check(launch("grpo", *words))
