"""Help is help, a mistake is one line, and a run imports nothing that it does not need."""

import re
import sys

import pytest

from tests.conftest import run_script


@pytest.mark.parametrize(("words", "code", "said"), [
    (["train_grpo.py", "--help"], 0, "--learning_rate FLOAT"),
    ("train_sft.py --learning_rat 1".split(), 1, "error: "),
])  # fmt: skip
def test_help_is_on_one_side_and_a_mistake_one_line_on_the_other(words, code, said):
    run = run_script([sys.executable, *words])
    told, silent = (run.stderr, run.stdout) if code else (run.stdout, run.stderr)
    assert run.returncode == code and said in told and not silent and (not code or told.count("\n") == 1)


@pytest.mark.parametrize("variables", [{"ACCELERATE_MIXED_PRECISION": "int3"}, {"WORLD_SIZE": "2"}], ids=str)
def test_an_environment_that_accelerate_cannot_use_is_one_line(variables, tmp_path):
    command = [sys.executable, *"train_sft.py --max_steps 1 --output_dir".split(), str(tmp_path / "out")]
    run = run_script(command, **variables)
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert run.stderr.splitlines()[-1].startswith("error: ")


STOP_AT_THE_FIRST_STEP = """
import os, sys
sys.path.insert(0, os.getcwd())
import train_sft
import torch
from common.command_line import launch
def stop(*args):
    print("IMPORTED", *sys.modules)
    sys.stdout.flush()
    os._exit(0)
torch.optim.AdamW.step = stop
launch(train_sft.main, train_sft.Args, "nowhere.yaml")
"""


def test_a_plain_run_imports_only_what_it_needs(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"instruction": "What is 1+1?", "output": "Answer: 2"}\n' * 8)
    words = f"--model_name_or_path data/base_model --dataset_name {tmp_path}/rows.jsonl --eval_steps 0 --report_to none"
    words += f" --output_dir {tmp_path}/out --dataset_cache_dir {tmp_path}/cache"
    run = run_script([sys.executable, "-c", STOP_AT_THE_FIRST_STEP, *words.split()])
    assert run.returncode == 0, run.stderr[-3000:]
    imported = set(re.search("IMPORTED (.*)", run.stdout)[1].split())
    large = {
        "datasets",
        "pyarrow",
        "pandas",
        "matplotlib",
        "peft",
        "sklearn",
        "scipy",
        "tensorboard",
        "torchvision",
    }
    assert "torch" in imported and not imported & large
