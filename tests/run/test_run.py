"""When a run saves, evaluates and ends."""

import itertools
import json
import math
import textwrap
from types import SimpleNamespace

from accelerate import Accelerator
from common import processes
from common.args import CommonArgs
from common.errors import LAST_WORDS, OutsideError, UserError
from common.processes import on_main_process
from common.run import Run
from common.run.folder import lock
from common.run.metrics import Metrics
from common.sampling import Reward
import pytest

from tests.conftest import GRPO, events_of, read_metrics, read_rows
from tests.data.rows import process

SFT = "--model_name_or_path data/base_model --max_train_samples 60 --max_eval_samples 8".split()
SFT += "--per_device_train_batch_size 2 --max_length 64 --num_samples 0 --eval_max_new_tokens 2".split()


def steps_of(output, kind):
    return [event["step"] for event in events_of(output, kind)]


@pytest.mark.parametrize(
    "words, saved, evaluated",
    [
        ("--save_steps 0 --eval_steps 4".split(), [], [0, 4, 8, 9]),
        # not at the last step: the final model is written there
        ("--save_steps 4 --eval_steps 0".split(), [4, 8], []),
        ("--save_steps 3 --eval_steps 5".split(), [3, 6, 9], [0, 5, 9]),
        (
            "--save_steps 0 --eval_steps 2 --save_best min:eval_loss".split(),
            [2, 4, 6, 8, 9],
            [0, 2, 4, 6, 8, 9],
        ),
    ],
)
def test_saves_and_evaluations_at_their_steps(words, saved, evaluated, launch):
    output = launch("sft", *SFT, *words, "--max_steps", "9", "--learning_rate", "1e-4")
    if "--save_best" in words:
        saved = steps_of(output, "best")  # a new best one is saved at once
        assert set(saved) <= set(evaluated) and saved
    assert steps_of(output, "saved") == saved
    assert [row["step"] for row in read_metrics(output) if "eval_loss" in row] == evaluated
    before = json.loads((output / "summary.json").read_text())["before"]
    assert before == {name: value for name, value in read_metrics(output)[0].items() if name in before}


@pytest.mark.parametrize(("step", "saved"), [(2, [2]), (3, [])])
def test_what_fails_outside_costs_at_most_a_rollout(step, saved, launch, monkeypatch, tmp_path):
    """A checkpoint is written, but not in the middle of a rollout: no run can go on from there."""
    steps = itertools.count()

    def fails(*_):
        if next(steps) == step:
            raise OutsideError("the server is gone")

    monkeypatch.setattr("train_grpo.set_lr", fails)
    with pytest.raises(OutsideError) as error:
        launch("grpo", *GRPO, "--save_steps", "0", "--steps_per_generation", "2", "--max_steps", "4")
    LAST_WORDS.pop()(error.value)
    assert steps_of(tmp_path / "out", "saved") == saved


def test_a_line_holds_what_was_done_since_the_last_one(tmp_path, monkeypatch):
    """By hand, over checkpoints and a resume: means by weight, and tokens a second without evaluations."""
    lock(tmp_path)
    state, now = {}, [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    for done, start in ((0, 0.0), (2, 1000.0)):
        now[0] = start
        metrics = Metrics(Accelerator(cpu=True), CommonArgs(output_dir=str(tmp_path)))
        metrics.restore(done, state)
        for step in (1, 2):
            now[0] += 10.0 * step
            metrics.add(2.0, loss=step)
            metrics.close_window(50)
            metrics.state(step)  # a checkpoint between two lines
            metrics.add(1.0, loss=7.0)
            metrics.close_window(50)
            metrics.log(step)
            now[0] += 5.0
            metrics.log_eval(step, {"eval_loss": 1.0}, [], show=0)
        metrics.add(1.0, loss=10.0)
        metrics.close_window()
        state = json.loads(json.dumps(metrics.state(2)))
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["loss"] for row in rows if "loss" in row] == [3, 11 / 3, (2 + 7 + 10) / 4, 11 / 3]
    assert [row["tokens_per_second"] for row in rows if "loss" in row] == [10, 5, 10, 5]
    assert [row["seconds"] for row in rows] == [10, 15, 35, 40, 50, 55, 75, 80]
    assert rows[-2]["num_tokens"] == 400


def test_twenty_rollouts_in_a_row_without_a_reward_end_the_run(tmp_path, capsys):
    """And completions that are all cut are said, once."""
    run = Run.__new__(Run)
    run.unjudged = 0
    run.all_cut = False
    run.metrics = Metrics(Accelerator(cpu=True), CommonArgs(output_dir=str(tmp_path)))

    def log(number, reward, finished=True):
        same = {"ids": [1], "finished": finished, "prompt": {"prompt": ""}, "text": "", "reward": math.nan}
        for _ in range(number):
            run.log_rollout(1, [SimpleNamespace(rewards=[reward], **same)], [Reward("r", None)], 1)

    log(19, None)
    log(1, 0.0)
    assert "all completions were cut" not in capsys.readouterr().out
    log(2, 0.0, finished=False)
    assert capsys.readouterr().out.count("all completions were cut at --max_completion_length") == 1
    log(19, None)
    with pytest.raises(UserError, match="in 20 rollouts in a row"):
        log(1, None)


def test_a_reward_that_fails_costs_no_step(launch, tmp_path):
    """The updates before are saved, and the same command resumes the run once the function is mended."""
    file, calls = tmp_path / "mine.py", tmp_path / "calls"
    source = f"""
    def mine(completions, **columns):
        with open({str(calls)!r}, "a+") as file:
            file.write("x")
            file.seek(0)
            if len(file.read()) == 3:
                raise ValueError("the judge is asleep")
        return [float(len(text)) for text in completions]
    """
    file.write_text(textwrap.dedent(source))
    words = [
        *GRPO,
        *"--save_steps 0 --max_steps 3 --reward_funcs".split(),
        f"{file}:mine",
        "--reward_weights",
        "1",
    ]
    with pytest.raises(OutsideError, match="mine raised ValueError: the judge is asleep") as error:
        launch("grpo", *words)
    LAST_WORDS.pop()(error.value)
    assert steps_of(tmp_path / "out", "saved") == [2]
    assert launch("grpo", *words) and steps_of(tmp_path / "out", "finished") == [3]


@pytest.mark.parametrize("error", [UserError("a"), OSError("b"), SystemExit(0)])
def test_what_ends_the_main_process_ends_all(error, monkeypatch):
    """A complete run, too, which is exit code 0 everywhere."""
    told = []

    def broadcast(values):
        told.append(values)
        return told[0]  # by the main process

    def end():
        raise error

    monkeypatch.setattr(processes, "broadcast_object_list", broadcast)
    for rank in range(2):
        with pytest.raises(type(error)) as raised:
            on_main_process(process(rank, 2), end)
        assert raised.value is error and len(told) == rank + 1
