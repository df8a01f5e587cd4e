"""When a Run saves, evaluates and ends: step by step, with what it asks put in by hand."""

import math
from types import SimpleNamespace

from common.run import Run
from common.run.nonfinite import _by_kind, weight_norm

import pytest
import torch


def a_run(save_steps=0, save_every=1, last_step=9, resumed_at=-1, best=None, asked=None):
    """A Run in its loop, of which nothing was started. asked: what signals and the clock want, by step; `possible` of each
    question is kept in run.possible."""
    run = Run.__new__(Run)
    run.script, run.inputs, run.base_dtype = "train_sft.py", {}, "float32"
    run.args = SimpleNamespace(save_steps=save_steps, eval_steps=4)
    run.save_every, run.last_step, run.resumed_at, run.first_step = save_every, last_step, resumed_at, max(resumed_at, 0)
    run.best, run.save_wanted, run.possible = SimpleNamespace(step=best), False, []
    run.regression = SimpleNamespace(suite=None, state=lambda: {})
    run.told, run.public, run.push = [], {"a base"}, None
    run.alerts = SimpleNamespace(close=lambda event, text: run.told.append(event))
    run.events, run.metrics = [], SimpleNamespace(event=lambda *words: run.events.append(words), write_report=lambda: None)

    def asked_for(possible):
        run.possible.append(possible)
        return (asked or {}).get(run.step, "") if possible else ""

    run.signals = SimpleNamespace(asked_for=asked_for)
    return run


def saved_at(run):
    saved = []
    for step in range(run.first_step, run.last_step + 1):
        run.step = step
        if run.save_due(step):
            saved.append(step)
            run.save_wanted = False
    return saved


@pytest.mark.parametrize(
    "settings, wanted",
    [
        ({}, []),
        ({"save_steps": 1, "last_step": 3}, [1, 2, 3]),  # nothing at 0, where nothing has been trained
        ({"save_steps": 4}, [4, 8]),  # not at the last step, for the final model is written there
        ({"save_steps": 4, "resumed_at": 4}, [8]),  # what was saved is not saved again
        ({"save_steps": 3, "save_every": 2}, [4, 6, 10]),  # what is due between two rollouts waits
        ({"best": 5}, [5]),
        ({"best": 5, "resumed_at": 5}, []),
        ({"best": 5, "save_steps": 4}, [4, 5, 8]),
        ({"asked": {3: "save"}}, [3]),
        ({"asked": {3: "save"}, "save_every": 2}, []),  # not asked in the middle of a rollout: the signals keep it
        ({"asked": {9: "stop"}}, []),  # nor at the end, where there is nothing left to stop
    ],
    ids=str,
)
def test_a_checkpoint_is_saved_where_it_is_due_and_can_be(settings, wanted):
    if settings.get("save_every"):
        settings = settings | {"last_step": 10}
    run = a_run(**settings)
    assert saved_at(run) == wanted
    steps = range(run.first_step, run.last_step + 1)
    assert run.possible == [step % run.save_every == 0 and step < run.last_step for step in steps]


def test_an_evaluation_comes_before_the_first_update_and_after_the_last_and_not_twice():
    for resumed_at, wanted in ((-1, [0, 4, 8, 9]), (4, [8, 9]), (5, [8, 9]), (9, [])):
        run = a_run(resumed_at=resumed_at)
        assert [step for step in range(run.first_step, 10) if run.eval_due(step)] == wanted
    run.args.eval_steps, run.resumed_at = 0, -1
    assert not any(run.eval_due(step) for step in range(10))


def test_a_stopped_run_leaves_and_one_without_better_evaluations_ends():
    run, left = a_run(last_step=9), []
    run.args.output_dir = "out"
    run.signals = SimpleNamespace(leave=lambda folder, step: left.append((folder, step)), reason="SIGTERM")
    run.best = SimpleNamespace(stops=lambda step: step == 4)
    for run.asked_for in ("", "save"):
        assert [step for step in range(10) if run.ends(step)] == [4, 9] and not left
    run.asked_for = "stop"
    run.ends(2)
    assert left == [("out", 2)] and run.told == ["stopped"]
    assert [event[:2] for event in run.events] == [("stopped", 2)]


def test_norms_under_zero_3_are_those_of_the_shares_without_what_fills_them_up():
    """Seven numbers on two processes: shares of four, the last number of which is none. What is gathered is not looked at."""
    whole = torch.arange(1.0, 8.0)
    norms = []
    for process, share in enumerate((whole[:4], torch.cat([whole[4:], torch.tensor([1e30])]))):
        matrix, vector = (torch.nn.Parameter(torch.zeros(0)) for _ in range(2))
        for p, shape in ((matrix, (7, 1)), (vector, (7,))):
            p.ds_tensor, p.ds_shape, p.ds_numel = share, shape, 7
        norms.append([weight_norm(kind) for kind in _by_kind(torch.nn.ParameterList([matrix, vector]), process)])
    assert [math.hypot(*shares) for shares in zip(*norms, strict=True)] == pytest.approx([math.sqrt(140)] * 2)
