"""A run that goes on is one run for its tracker, too: the same folder or id, and no step twice."""

from types import SimpleNamespace

from common.args import CommonArgs
from common.run.parts.trackers import Tracker


def test_a_tracker_goes_on_where_the_checkpoint_is():
    started = []
    accelerator = SimpleNamespace(init_trackers=lambda *_, init_kwargs, **config: started.append(init_kwargs))
    first = Tracker(accelerator, CommonArgs(run_name="mine"))
    first.restore(0, {})
    Tracker(accelerator, CommonArgs(run_name="mine")).restore(4, first.state(4))
    assert [each["wandb"] for each in started] == [{"name": "mine", "id": first.id, "resume": "allow"}] * 2
    assert [each["tensorboard"]["purge_step"] for each in started] == [0, 5]
