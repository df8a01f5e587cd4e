"""A run that is told to stop saves at the step reached, leaves with code 75, and loses and repeats nothing
when it goes on."""

import json
import os
from pathlib import Path
import signal
import time

from accelerate import Accelerator
from common import START
from common.args import CommonArgs
from common.run.folder import checkpoints
from common.run.retry import Retry
from common.run.signals import EXIT_CODE, Clock, Signals
import psutil
import pytest
from safetensors.torch import load_file
import torch

from tests.conftest import events_of, read_metrics
from tests.run.script import Script
from tests.run.test_resume import COMMON, STAGES

SFT = [*STAGES["sft"], *COMMON, *"--eval_steps 0 --save_steps 0".split()]
LONG = ["--max_steps", "100000"]


def same_weights(one: Path, other: Path) -> bool:
    one, other = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def signal_in_step(monkeypatch, at: int, number: int) -> None:
    """The process sends itself a signal in the middle of the step that makes `at` updates out of at - 1."""
    retry = Retry.__call__

    def send_and_retry(self, gradients, step, window):
        if step == at - 1:
            signal.raise_signal(number)
        retry(self, gradients, step, window)

    monkeypatch.setattr(Retry, "__call__", send_and_retry)


@pytest.mark.parametrize(
    ("stage", "at"),
    [
        pytest.param("pretrain", 5, marks=pytest.mark.slow),
        ("sft", 4),
        pytest.param("dpo", 3, marks=pytest.mark.slow),
        ("grpo", 5),
    ],
)
def test_a_stopped_run_saves_once_and_goes_on_bit_for_bit(stage, at, launch, monkeypatch, capsys):
    """At 4 an evaluation is due, at 3 a checkpoint; GRPO at 5 is in the middle of a rollout that serves the
    steps 4 and 5."""
    words, stage = [*STAGES[stage], *COMMON, "--save_total_limit", "0"], stage.split()[0]
    whole = launch(stage, *words, output="whole")
    capsys.readouterr()
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as left:
        signal_in_step(patch, at, signal.SIGTERM)
        launch(stage, *words, output="stopped")
    stopped, step = whole.parent / "stopped", 6 if stage == "grpo" else at
    assert left.value.code == EXIT_CODE and not (stopped / "summary.json").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    # With --save_steps 3; GRPO's pending checkpoint of step 3 is written between rollouts, at 4.
    before = [] if step <= 3 else [4] if stage == "grpo" else [3]
    assert [folder.name for folder in checkpoints(stopped)] == [f"checkpoint-{n}" for n in [*before, step]]
    line = f"stopped at step {step} by SIGTERM; the same command resumes it\n"
    assert line in capsys.readouterr().out
    resumed = launch(stage, *words, output="stopped")
    assert read_metrics(resumed) == read_metrics(whole) and same_weights(resumed, whole)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
def test_sigusr1_saves_and_the_run_goes_on(tmp_path, token_cache):
    with Script(tmp_path, *SFT, *LONG, "--dataset_cache_dir", str(token_cache)) as run:
        run.until(lambda: run.steps() >= 1)
        run.process.send_signal(signal.SIGUSR1)
        run.until(lambda: checkpoints(run.output))
        reached = run.steps()
        assert checkpoints(run.output)[0].name == f"checkpoint-{reached}"
        run.until(lambda: run.steps() > reached)


@pytest.mark.slow
def test_two_processes_agree_on_a_signal_that_one_of_them_had(tmp_path, token_cache):
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29641")
    words = [*SFT, *LONG, "--dataset_cache_dir", str(token_cache)]
    with Script(tmp_path, *words, launcher=torchrun) as run:
        run.until(lambda: run.steps() >= 3)
        ranks = [p for p in psutil.Process(run.process.pid).children() if "train_sft.py" in p.cmdline()]
        assert len(ranks) == 2
        next(p for p in ranks if p.environ()["RANK"] == "1").terminate()
        assert run.process.wait(30) == 1  # what torchrun makes of 75
        said, step = run.log.read_text(), run.steps()
        assert [folder.name for folder in checkpoints(run.output)] == [f"checkpoint-{step}"]
        assert said.count(f"stopped at step {step} by SIGTERM") == 1
        # torchrun may end the second one, which has nothing left to do, when the first has left.
        assert f"exitcode  : {EXIT_CODE}" in said and "exitcode  : -9" not in said, said[-3000:]


@pytest.mark.slow
def test_a_run_whose_launcher_was_killed_stops(tmp_path, token_cache):
    accelerate = ("-m", "accelerate.commands.launch", "--num_processes", "1")
    with Script(tmp_path, *SFT, *LONG, "--dataset_cache_dir", str(token_cache), launcher=accelerate) as run:
        run.until(lambda: run.steps() >= 3)
        [child] = psutil.Process(run.process.pid).children()
        run.process.kill()
        child.wait(30)
        assert checkpoints(run.output) and "by its launcher's end" in run.log.read_text()


def test_a_short_limit_of_time_stops_after_a_step_each_time(launch, tmp_path):
    words = [*STAGES["sft"], *COMMON, *"--max_hours 1e-6 --max_steps 3".split()]
    for step in (1, 2):
        with pytest.raises(SystemExit) as left:
            launch("sft", *words)
        assert left.value.code == EXIT_CODE and checkpoints(tmp_path / "out")[-1].name == f"checkpoint-{step}"
    output = launch("sft", *words, "--max_hours", "1")  # the limit is no part of what makes a run the same
    assert [row["step"] for row in read_metrics(output) if "loss" in row] == [1, 2, 3]
    texts = [event["text"] for event in events_of(output, "stopped")]
    assert texts == 2 * ["by --max_hours; the same command resumes it"]


def test_the_clock_leaves_room_for_a_save(monkeypatch):
    """In minutes: a step takes up to 3 of the 60, a save 2, every 20; 1.25 times both and ten seconds are
    kept."""
    said, minutes = {}, 0
    monkeypatch.setattr("common.run.signals.time.monotonic", lambda: START + 60 * minutes)
    clock = Clock(CommonArgs(max_hours=1.0, save_minutes=20.01))
    for minutes in [*range(1, 22), *range(24, 45), *range(47, 55)]:
        if what := clock.due():
            said[minutes] = what
            minutes += 2
            clock.saved()
    assert said == {21: "save", 44: "save", 54: "stop"}


def test_of_several_requests_the_largest_counts():
    signals = Signals(Accelerator(cpu=True), CommonArgs(save_minutes=1e-9))
    told = ["", signals.poll()]  # the first time nothing has been trained
    for numbers in ([], [signal.SIGTERM], [signal.SIGTERM, signal.SIGUSR1], []):
        for number in numbers:
            signal.raise_signal(number)
        told.append(signals.poll())
    signals.close()
    assert told == ["", "", "save", "stop", "stop", "save"]


def test_a_run_stops_when_its_launcher_has_ended(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # as `accelerate launch` does
    signals = Signals(Accelerator(cpu=True), CommonArgs())
    told = [signals.poll(), signals.poll()]
    monkeypatch.setattr("os.getppid", lambda: 1)
    told.append(signals.poll())
    signals.close()
    assert told == ["", "", "stop"] and signals.reason == "its launcher's end"


def test_the_clock_saves(launch):
    output = launch(
        "sft", *STAGES["sft"], *COMMON, *"--save_steps 0 --save_total_limit 0 --save_minutes 1e-6".split()
    )
    assert [folder.name for folder in checkpoints(output)] == [f"checkpoint-{step}" for step in range(1, 8)]


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_is_one_line(tmp_path):
    row = {
        "messages": [
            {"role": "user", "content": "What is 1+1?"},
            {"role": "assistant", "content": "Answer: 2"},
        ]
    }
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 60_000)
    words = [
        *SFT,
        "--max_train_samples",
        "60000",
        "--dataset_name",
        str(tmp_path / "rows.jsonl"),
        "--dataset_num_proc",
        "2",
    ]
    with Script(tmp_path, *words, "--dataset_cache_dir", str(tmp_path / "cache")) as run:
        run.until(lambda: len(psutil.Process(run.process.pid).children()) == 2)  # tokenising
        time.sleep(0.5)
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal sends it
        assert run.process.wait(10) == 130
        said = run.log.read_text()
        assert "stopped before the first step" in said and "Traceback" not in said, said
