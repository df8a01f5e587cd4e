"""Which evaluation is the best one, and when the search for a better one ends."""

import json

from common.args import CommonArgs
from common.errors import UserError
from common.run.parts.best import Best
import pytest


def best_by(metric, patience=0, delta=0.0, eval_steps=1, **more):
    names = {"save_best": metric, "early_stopping_patience": patience, "early_stopping_delta": delta}
    return Best(CommonArgs(**names, eval_steps=eval_steps, **more))


def test_the_direction_of_a_metric_is_known_or_asked_for():
    assert [best_by(name).sign for name in ("eval_loss", "a_loss", "eval_bits_per_byte", "min:reward")] == [
        -1
    ] * 4
    assert [
        best_by(n).sign
        for n in ("eval_mean_token_accuracy", "eval_rewards/margins", "eval_exact_number", "max:eval_x")
    ] == [1] * 4
    for name in ("eval_polite", "eval_exact_loss"):
        with pytest.raises(UserError, match=f"--save_best {name}: is .* Write min:{name} or max:{name}"):
            best_by(name)
    with pytest.raises(UserError, match="--save_best"):
        best_by(None, patience=2)
    with pytest.raises(UserError, match="--save_best eval_regression/all: that is measured with --reg"):
        Best(CommonArgs(save_best="eval_regression/all"))
    with pytest.raises(UserError, match="eval_steps"):
        Best(CommonArgs(save_best="eval_loss", regression_suite="suite.jsonl", eval_steps=0))
    with pytest.raises(UserError, match="--save_best eval_loss: there are no evaluations"):
        best_by("eval_loss", eval_steps=0)


def test_the_best_evaluation_and_the_end_of_patience(tmp_path, capsys):
    """By hand: 5, 4, 4.5, nan, 3.95 with a delta of 0.1 from 4. Where the best checkpoint is gone, the search
    starts over."""
    best = best_by("eval_loss", patience=3, delta=0.1)
    best.update(0, {"eval_loss": 1.0})  # before training: no candidate
    found = []
    for step, value in [(10, 5.0), (20, 4.0), (30, 4.5), (40, float("nan")), (50, 3.95)]:
        is_best = best.update(step, {"eval_loss": value})
        found.append((best.step, is_best, best.stops(step)))
        (tmp_path / f"checkpoint-{step}").mkdir()
        own = {"_before": 0, "output_dir": "", "_measured": {}, "_measured_at": 0}
        for folder, left in ((tmp_path, best.step), (tmp_path / "another", None)):
            again = best_by("eval_loss", patience=3, delta=0.1, output_dir=str(folder))
            again.restore(0, json.loads(json.dumps(best.state(0))))
            assert again.step == left and (
                vars(again) | own == vars(best) | own if left else again._waited == 0
            )
    said = capsys.readouterr().out
    assert f"checkpoint-50, so far the best, is not in {tmp_path}/another: the search starts over\n" in said
    assert "eval_loss has not improved by at least 0.1 in 3 evaluations\n" in said
    assert found == [
        (10, True, False),
        (20, True, False),
        (20, False, False),
        (20, False, False),
        (50, True, True),
    ]
    same = best_by("eval_loss", patience=2)
    assert [same.update(step, {"eval_loss": 1.0}) for step in (1, 2, 3)] == [True, False, False]
    assert same.stops(3)
    # an improvement is measured from the last one that counted, not from the best since
    slow = best_by("eval_loss", patience=2, delta=0.1)
    assert [slow.update(step, {"eval_loss": 2 - 0.06 * step}) for step in range(1, 6)] == [True] * 5
    assert not slow.stops(5)
    best.withdraw(50)
    assert (best.step, best.value) == (20, 4.0)
    other = best_by("max:eval_loss", output_dir=str(tmp_path))
    other.restore(0, best.state(0))
    assert other.step is None
    # the latter by another model than the best one
    last = {"loss": 1, "eval_loss": 9, "eval_regression/all": 1}
    assert (
        best.of_exported(last) == {"loss": 1, "eval_loss": 4.0}
        and len(best.of_exported(last | {"step": 20})) == 4
    )
    of_suite = Best(CommonArgs(save_best="eval_regression/all", regression_suite="suite.jsonl"))
    short = best_by("loss")  # as the console prints it
    assert (
        short.name == "eval_loss" and short.update(10, {"eval_loss": 2.0}) and short.update(20, {"loss": 1.0})
    )
    for metric in (best, of_suite):  # a suite has its own steps
        before = metric.step
        assert not metric.update(60, {"eval_regression/all": 0.9} if metric is best else {"eval_loss": 0.1})
        assert metric.step == before
    # both kinds at the best step are of the model that is exported
    for values in ({"eval_regression/all": 0.5}, {"eval_loss": 0.1}):
        of_suite.update(70, values)
    assert of_suite.of_exported({"step": 90, "eval_loss": 9}) == {
        "step": 90,
        "eval_regression/all": 0.5,
        "eval_loss": 0.1,
    }
    with pytest.raises(UserError, match="--save_best eval_loss: .*gives eval_a, eval_b"):
        best.update(0, {"eval_b": 1, "eval_a": 2})
