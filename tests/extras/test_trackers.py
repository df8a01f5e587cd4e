"""A run that goes on is one run for its tracker, too: the same folder or id, and no step twice."""

import sys

from common.run.metrics import Metrics
import pytest

from tests.conftest import read_metrics, read_rows, run_script
from tests.run.test_resume import COMMON, STAGES, Stop

SFT = [*STAGES["sft"], *COMMON, "--eval_steps", "0"]
# Writes down what it is called with, and dies where it is told to, as the machine under it might.
WANDB = """
import json, os, signal
def note(*what):
    with open(os.environ["NOTES"], "a") as file:
        file.write(json.dumps(what) + "\\n")
class Run:
    def log(self, values, step):
        note("log", step, values)
        if str(step) == os.environ["DIE_AT"]:
            os.kill(os.getpid(), signal.SIGKILL)
    def finish(self):
        note("finish")
class config:
    update = staticmethod(lambda values, allow_val_change: note("config", allow_val_change, values["max_steps"]))
def init(**settings):
    note("init", settings)
    return Run()
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """Puts a wandb of ours where Python finds it; wandb() gives its notes so far."""
    folder, notes = tmp_path / "packages", tmp_path / "notes.jsonl"
    (folder / "wandb-0.0.dist-info").mkdir(parents=True)
    (folder / "wandb-0.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: wandb\nVersion: 0.0\n")
    (folder / "wandb.py").write_text(WANDB)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("NOTES", str(notes))
    return lambda: read_rows(notes)


@pytest.mark.slow
def test_a_killed_run_goes_on_in_wandb(wandb, tmp_path, token_cache, monkeypatch):
    command = [sys.executable, "train_sft.py", *SFT, "--output_dir", str(tmp_path / "out"), "--report_to", "wandb"]
    command += ["--dataset_cache_dir", str(token_cache), "--run_name", "mine"]
    monkeypatch.setenv("DIE_AT", "5")
    assert run_script(command).returncode == -9
    monkeypatch.setenv("DIE_AT", "never")
    run = run_script(command)
    assert run.returncode == 0, run.stderr[-4000:]
    [first, second] = [settings for what, settings, *_ in filter(lambda note: note[0] == "init", wandb())]
    assert first == second == {"project": "plainloop", "name": "mine", "id": first["id"], "resume": "allow"}
    assert len(first["id"]) == 21
    logged = [(step, values) for what, step, values in filter(lambda note: note[0] == "log", wandb())]
    assert [step for step, _ in logged] == [1, 2, 3, 4, 5] + [4, 5, 6, 7, 8]  # of which wandb keeps the first 5 and then 6
    assert all(logged[3 + i][1]["loss"] == logged[5 + i][1]["loss"] for i in range(2))
    assert wandb()[-1] == ["finish"]


def test_tensorboard_shows_each_step_once(launch, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words, log = [*SFT, "--report_to", "tensorboard"], Metrics.log

    def log_and_stop(self, step, *args, **kwargs):
        log(self, step, *args, **kwargs)
        if step == 5:
            raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Metrics, "log", log_and_stop)
        launch("sft", *words)
    output = launch("sft", *words)
    folder = output / "plainloop"
    assert len(list(folder.glob("events*"))) == 2 and len([path for path in folder.iterdir() if path.is_dir()]) <= 2
    events = EventAccumulator(str(folder)).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [
        (row["step"], pytest.approx(row["loss"])) for row in read_metrics(output)
    ]
