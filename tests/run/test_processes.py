"""Two processes: when one of them fails all end, soon and with its error; when they have unlike work none waits for ever."""

import json
import sys
import time

import pytest

from tests.conftest import assert_same, free_port, losses, read_metrics, run_script, train_metrics

pytestmark = pytest.mark.slow

BASE = "--model_name_or_path data/base_model --logging_steps 1 --save_steps 2 --eval_steps 2 --eval_max_new_tokens 4"
BASE += " --max_eval_samples 6 --max_steps 4 --per_device_train_batch_size 2"
SFT = f"--config data/configs/sft.yaml --max_train_samples 20 {BASE}".split()
GRPO = f"--config data/configs/grpo.yaml {BASE} --num_generations 4 --max_completion_length 8 --max_train_samples 12"
GRPO = f"{GRPO} --per_device_train_batch_size 8".split()
LAUNCHER = """
import os, sys
sys.path.insert(0, os.getcwd())
import train_{stage} as script
from common.command_line import launch
RANK = int(os.environ["RANK"])
def fail(*args, **kwargs):
    open(os.environ["FAILED"], "w").close()
    raise RuntimeError(f"process {{RANK}} has had enough")
{change}
launch(script.main, script.Args, "data/configs/{stage}.yaml")
"""


@pytest.fixture
def two(tmp_path, token_cache, monkeypatch):
    """two(stage, words, change): train_<stage>.py on two processes, after some lines that change it; (process, output
    folder, seconds from the failure of one of them to the end of all)."""
    failed = tmp_path / "failed"
    monkeypatch.setenv("FAILED", str(failed))

    def launch(stage, words, change=""):
        launcher, output = tmp_path / "launcher.py", tmp_path / "two"
        launcher.write_text(LAUNCHER.format(stage=stage, change=change))
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu_ddp.yaml"]
        command += ["--main_process_port", str(free_port()), str(launcher), *map(str, words), "--output_dir", str(output)]
        run = run_script([*command, "--dataset_cache_dir", str(token_cache)], timeout=150)
        return run, output, time.time() - failed.stat().st_mtime if failed.exists() else None

    return launch


FORWARD = """
from common.model import FlatModel
forward, calls = FlatModel.forward, iter(range(1000))
def broken(self, *args, **kwargs):
    if self.training and next(calls) == 2 and RANK == 1:
        fail()
    return forward(self, *args, **kwargs)
FlatModel.forward = broken
"""
PREPARING = """
if RANK == 0:
    script.load_data = fail
"""
SAVING = """
import torch
torch.save = fail
"""


@pytest.mark.parametrize(
    ("change", "rank"), [(FORWARD, 1), (PREPARING, 0), (SAVING, 0)], ids=["step", "preparing", "saving"]
)
def test_an_exception_on_one_process_ends_both_with_its_traceback(change, rank, two):
    """In a step, while the other one waits for the prepared data (whose limit is of hours), or for a checkpoint."""
    run, output, seconds = two("sft", SFT, change)
    assert run.returncode != 0 and seconds < 60
    assert f"RuntimeError: process {rank} has had enough" in run.stderr, run.stderr[-4000:]
    assert not (output / "summary.json").exists()


def test_completions_that_end_at_once_on_one_process_and_never_on_the_other(two):
    change = """
sample = script.sample
def uneven(model, prompts, keys, **options):
    return sample(model, prompts, keys, stop_ids=list(range(512)) if RANK == 0 else [], **options)
script.sample = uneven
"""
    run, output, _ = two("grpo", [*GRPO, "--beta", "0.04", "--num_iterations", "2"], change)
    assert run.returncode == 0, run.stderr[-4000:]
    rows = train_metrics(output)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [rows[0][f"completions/{which}_length"] for which in ("min", "mean", "max")] == [1, 4.5, 8]
    assert rows[0]["completions/clipped_ratio"] == 0.5


def test_three_rows_on_two_processes_are_trained_as_on_one(two, launch, tmp_path):
    """Windows of 4, 4 and 1 out of 9 rows (three epochs): in the last one the second process has nothing of its own."""
    rows = [
        [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": "Answer: 2. " * n}] for n in (1, 4, 9)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    (tmp_path / "one.jsonl").write_text(json.dumps({"messages": rows[0]}) + "\n")
    words = f"--dataset_name {tmp_path}/rows.jsonl --eval_dataset_name {tmp_path}/one.jsonl --max_steps -1 --eval_steps 1"
    words = [*SFT, *words.split(), *"--num_train_epochs 3 --eval_reward_funcs length:8 --max_grad_norm 0".split()]
    words += ["--eval_prompts", ""]
    one = launch("sft", *words, "--per_device_train_batch_size", "4")
    run, both, _ = two("sft", words)
    assert run.returncode == 0, run.stderr[-4000:]
    assert len(losses(one)) == 3
    assert_same(losses(one), losses(both), tolerance=1e-6)
    evaluations = [[row["eval_loss"] for row in read_metrics(output) if "eval_loss" in row] for output in (one, both)]
    assert len(evaluations[0]) == 4 and evaluations[0] == pytest.approx(evaluations[1], rel=1e-6)
