"""Help is shown, a mistake is one line, and a run imports nothing that it does not need."""

import re
import sys

from tests.conftest import run_script


def test_help_and_a_mistake_are_all_that_is_printed():
    """Soon: tests/test_house.py has that no large library is loaded before."""
    shown = run_script([sys.executable, "train_grpo.py", "--help"])
    assert shown.returncode == 0 and not shown.stderr
    assert "--learning_rate FLOAT" in shown.stdout and "{cosine,linear,constant,wsd}" in shown.stdout
    refused = run_script([sys.executable, "train_sft.py", "--learning_rat", "1"])
    assert refused.returncode == 1 and not refused.stdout
    assert len(refused.stderr.splitlines()) == 1 and refused.stderr.startswith("error: ")


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
    large = {"datasets", "pyarrow", "pandas", "matplotlib", "peft", "sklearn", "scipy", "tensorboard", "torchvision"}
    assert "torch" in imported and not imported & large
    extras = {name.removeprefix("common.extras.") for name in imported if name.startswith("common.extras.")}
    assert extras <= {"fused_layers", "report", "report_data"}  # the report of a run, and what it shows
    assert len([name for name in imported if name.startswith("common")]) <= 60
