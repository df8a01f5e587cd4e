"""Two processes: when one of them fails all end, soon and with its error; when they have unlike work none
waits for ever."""

import json
import sys
import time

import pytest

from tests.conftest import assert_same, free_port, losses, run_script, train_metrics

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
import torch
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
    """two(stage, words, change): train_<stage>.py on two processes, after some lines that change it;
    (process, output folder, seconds from the failure of one of them to the end of all)."""
    failed = tmp_path / "failed"
    monkeypatch.setenv("FAILED", str(failed))

    def launch(stage, words, change=""):
        launcher, output = tmp_path / "launcher.py", tmp_path / "two"
        launcher.write_text(LAUNCHER.format(stage=stage, change=change))
        command = [
            sys.executable,
            *"-m accelerate.commands.launch --config_file accelerate_configs/cpu_ddp.yaml".split(),
        ]
        command += [
            "--main_process_port",
            str(free_port()),
            str(launcher),
            *map(str, words),
            "--output_dir",
            str(output),
        ]
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
torch.save = fail
"""


@pytest.mark.parametrize(
    ("change", "rank"), [(FORWARD, 1), (PREPARING, 0), (SAVING, 0)], ids=["step", "preparing", "saving"]
)
def test_an_exception_on_one_process_ends_both_with_its_traceback(change, rank, two):
    """In a step, while the other one waits for the prepared data (whose limit is of hours), or for a
    checkpoint."""
    run, output, seconds = two("sft", SFT, change)
    assert run.returncode != 0 and seconds < 60
    assert f"RuntimeError: process {rank} has had enough" in run.stderr, run.stderr[-4000:]
    assert not (output / "summary.json").exists()


def test_completions_that_end_at_once_on_one_process_and_never_on_the_other(two):
    change = """
from common.sampling import sampler
sample = sampler.sample
def uneven(model, prompts, keys, **options):
    return sample(model, prompts, keys, stop_ids=list(range(512)) if RANK == 0 else [], **options)
sampler.sample = uneven
"""
    run, output, _ = two("grpo", [*GRPO, *"--beta 0.04 --num_iterations 2".split()], change)
    assert run.returncode == 0, run.stderr[-4000:]
    rows = train_metrics(output)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [rows[0][f"completions/{which}_length"] for which in ("min", "mean", "max")] == [1, 4.5, 8]
    assert rows[0]["completions/clipped_ratio"] == 0.5


INFINITE = """
from common.model import FlatModel
forward, calls = FlatModel.forward, iter(range(1000))
def wrong(*args, **kwargs):
    out = forward(*args, **kwargs)
    bad = torch.is_grad_enabled() and next(calls) == 1 and RANK == 1
    return out._replace(logps=out.logps - (float("inf") if bad else 0.0))
FlatModel.forward = wrong
"""


def test_all_processes_pass_over_the_same_step(two):
    """One of them meets an infinite loss; all gradients are finite."""
    run, output, _ = two("sft", [*SFT, "--eval_steps", "0"], INFINITE)
    assert run.returncode == 0, run.stderr[-4000:]
    assert json.loads((output / "summary.json").read_text())["bad_steps"] == [2]


LIMITED = """
from common.model import FlatModel
forward = FlatModel.forward
def limited(self, batch, *args, **kwargs):
    if RANK == 1 and torch.is_grad_enabled() and len(batch["lengths"]) > 2:
        raise MemoryError
    return forward(self, batch, *args, **kwargs)
FlatModel.forward = limited
"""


def test_one_of_two_processes_runs_out_of_memory(launch, two):
    words = [*SFT, *"--per_device_train_batch_size 4 --eval_steps 0".split()]
    whole = losses(launch("sft", *words, "--per_device_train_batch_size", "8"))
    run, output, _ = two("sft", [*words, "--auto_micro_batch"], LIMITED)
    assert run.returncode == 0, run.stderr[-6000:]
    assert_same(whole, losses(output))
    run, *_ = two("sft", [*words, "--overwrite_output_dir"], LIMITED)
    assert run.returncode != 0 and "--auto_micro_batch" in run.stderr
