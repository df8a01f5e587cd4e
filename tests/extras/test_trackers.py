"""A run that goes on is one run for its tracker, too: the same folder or id, and no step twice."""

from types import SimpleNamespace

from common.args import CommonArgs
from common.extras.trackers import Tracker
from common.run.metrics import Metrics
import pytest

from tests.conftest import read_metrics
from tests.run.test_resume import COMMON, STAGES, Stop

SFT = [*STAGES["sft"], *COMMON, "--eval_steps", "0"]


def test_a_tracker_goes_on_where_the_checkpoint_is():
    started = []
    accelerator = SimpleNamespace(init_trackers=lambda *_, init_kwargs, **config: started.append(init_kwargs))
    first = Tracker(accelerator, CommonArgs(run_name="mine"))
    first.restore(0, {})
    Tracker(accelerator, CommonArgs(run_name="mine")).restore(4, first.state(4))
    assert [each["wandb"] for each in started] == [{"name": "mine", "id": first.id, "resume": "allow"}] * 2
    assert [each["tensorboard"]["purge_step"] for each in started] == [0, 5]


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
