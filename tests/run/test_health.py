"""A NaN or an infinity changes no weight: the step is passed over, its batch is kept, and a run of them ends
the run."""

import json
import math
from types import SimpleNamespace

from accelerate import Accelerator
from common.args import CommonArgs
from common.errors import UserError
from common.model import FlatModel
from common.run import nonfinite
from common.run.folder import checkpoints, lock
from common.run.metrics import Metrics, short
from common.run.nonfinite import NonFinite
import numpy as np
import pytest
from safetensors.torch import load_file
import torch

from tests.conftest import ROOT, events_of, read_metrics, read_rows
from tests.data.rows import process

STAGES = {
    stage: [
        "--config",
        f"data/configs/{stage}.yaml",
        *"--model_name_or_path data/base_model --eval_steps 0".split(),
    ]
    + [*"--save_steps 1 --save_total_limit 9 --logging_steps 1 --eval_prompts".split(), ""]
    + "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_samples 0".split()
    for stage in ("pretrain", "sft", "dpo", "grpo")
}
STAGES["dpo"] += "--max_train_samples 100 --max_eval_samples 8".split()  # of which the reference scores all
STAGES["grpo"] += "--num_generations 4 --max_completion_length 8 --beta 0.02".split()


def break_calls(monkeypatch, which, add=float("nan"), fields=("nll", "logps")):
    """Let what the model gives be NaN, or infinite, at these of its training calls (0 is the first)."""
    right, calls = FlatModel.forward, iter(range(10**6))

    def wrong(*args, **kwargs):
        out = right(*args, **kwargs)
        if not torch.is_grad_enabled() or next(calls) not in which:
            return out
        return out._replace(
            **{name: getattr(out, name) + add for name in fields if getattr(out, name) is not None}
        )

    monkeypatch.setattr(FlatModel, "forward", wrong)


def calls_of_step(step):
    """The call in the first of the two micro-batches."""
    return {(step - 1) * 2}


def test_fp16_whose_scale_never_recovers_ends_the_run(tmp_path):
    """Its scaler skips a step that overflows and halves its scale, here until the end."""
    accelerator, scales = Accelerator(cpu=True), iter([2.0**k for k in range(16, -9, -1)])
    accelerator.scaler = SimpleNamespace(get_scale=lambda: next(scales))
    watch = NonFinite(Metrics(accelerator, CommonArgs(output_dir=str(tmp_path))), None)
    with pytest.raises(UserError, match="step 20: .*3 in a row"):
        for step in range(25):
            assert watch.check(torch.tensor(math.inf), step, SimpleNamespace(examples=[], origins=None))


def test_weights_that_are_nan_on_another_process_end_this_one_too(tmp_path):
    accelerator = process(1, 2)
    accelerator.reduce = lambda norm, _: norm + math.nan
    watch = NonFinite(Metrics(accelerator, CommonArgs(output_dir=str(tmp_path))), None)
    with pytest.raises(UserError, match="step 3: weights are NaN"):
        watch.check_weights(torch.nn.Linear(2, 1), 3)


def test_the_batches_of_so_many_steps_are_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(nonfinite, "MOST_KEPT", 2)
    lock(tmp_path)
    metrics = Metrics(Accelerator(cpu=True), CommonArgs(output_dir=str(tmp_path)))
    watch = NonFinite(metrics, SimpleNamespace(decode=str))
    sequence = {"input_ids": np.arange(3), "loss_mask": np.ones(3)}
    for step in (0, 2, 4, 6):
        assert not watch.check(
            torch.tensor(math.nan), step, SimpleNamespace(examples=[[sequence]], origins=None)
        )
    kept = sorted(path.name for path in (tmp_path / "bad_batches").iterdir())
    assert kept == ["step-1.jsonl", "step-3.jsonl"]
    lines = capsys.readouterr().out.splitlines()
    assert "step-3.jsonl" in lines[1] and "not kept" in lines[3]
    assert lines[2].endswith("its batch is not kept: those of 2 other steps are there")


@pytest.mark.parametrize("stage", STAGES)
def test_a_nan_in_one_micro_batch_passes_over_the_step_and_keeps_its_batch(
    stage, launch, monkeypatch, capsys
):
    break_calls(monkeypatch, calls_of_step(3))
    output = launch(stage, *STAGES[stage], "--max_steps", "4")
    assert "step 3: " in (said := capsys.readouterr().out) and "step-3.jsonl" in said
    before, after, end = (
        load_file(output / name / "model.safetensors") for name in ("checkpoint-2", "checkpoint-3", ".")
    )
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(not torch.equal(after[name], end[name]) for name in before)  # and the run goes on
    rows = {row["step"]: row for row in read_metrics(output)}
    assert "loss" not in rows[3] and ("reward" in rows[3]) == (stage == "grpo")  # of its rollout
    assert rows[3]["bad_steps"] == rows[4]["bad_steps"] == 1 and "bad_steps" not in rows[2]
    assert rows[3]["num_tokens"] > rows[2]["num_tokens"]
    assert all(value == value for row in rows.values() for name, value in row.items() if name != "grad_norm")
    assert json.loads((output / "summary.json").read_text())["bad_steps"] == [3]
    assert [event["step"] for event in events_of(output, "bad")] == [3]
    (kept,) = (output / "bad_batches").iterdir()
    lines = read_rows(kept)
    assert kept.name == "step-3.jsonl" and len(lines) >= 4
    assert all(line["trained"] and line["text"] for line in lines)
    if stage == "sft":
        rows = read_rows(ROOT / "data" / "sft" / "train.jsonl")
        for line in lines:
            row = rows[int(line["where"].rpartition(" ")[2]) - 1]
            assert row["messages"][-1]["content"] in line["text"]


def test_an_infinite_loss_passes_over_the_step_whatever_its_gradient(launch, monkeypatch):
    break_calls(monkeypatch, calls_of_step(2), -float("inf"), ("logps",))
    output = launch("sft", *STAGES["sft"], "--save_steps", "0", "--max_steps", "3")
    assert json.loads((output / "summary.json").read_text())["bad_steps"] == [2]


def test_three_bad_steps_in_a_row_end_the_run(launch, tmp_path, monkeypatch):
    bad = [calls_of_step(step) for step in (2, 4, 5, 6)]  # the third is good, and starts the count anew
    break_calls(monkeypatch, set().union(*bad))
    what = "a NaN or infinite loss, gradient norm .*, 3 in a row"
    with pytest.raises(UserError, match=f"step 6: {what}; the batches are in {tmp_path}/out/bad_batches;"):
        launch("sft", *STAGES["sft"], "--max_steps", "9")


def test_weights_that_are_not_finite_are_not_saved(launch, tmp_path, monkeypatch):
    import torch.optim

    step = torch.optim.AdamW.step

    def breaks(self, *args, **kwargs):
        step(self, *args, **kwargs)
        with torch.no_grad():
            self.param_groups[0]["params"][0].view(-1)[0] = float("inf")

    monkeypatch.setattr(torch.optim.AdamW, "step", breaks)
    for words in (["--save_steps", "1"], ["--save_steps", "0"]):  # before a save, before the export
        with pytest.raises(UserError, match="step 1: weights are NaN or infinite"):
            launch("sft", *STAGES["sft"], *words, "--max_steps", "1", "--overwrite_output_dir")
        assert not (tmp_path / "out" / "model.safetensors").exists() and not checkpoints(
            str(tmp_path / "out")
        )


def test_a_jump_of_the_loss_is_said_once(tmp_path, capsys):
    metrics = Metrics(Accelerator(cpu=True), CommonArgs(output_dir=str(tmp_path)))
    for step in range(7):
        metrics.log(step + 1, loss=0.5)
        # the run was stopped, and goes on
        metrics, before = Metrics(metrics.accelerator, metrics.args), metrics
        metrics.restore(step + 1, json.loads(json.dumps(before.state(step + 1))))
    for step in range(20):
        metrics.log(step + 8, loss=9.0 if step == 12 else 0.5 + 0.01 * (step % 2))
    said = capsys.readouterr().out
    assert said.count("the loss jumps") == said.count("[step 20] the loss jumps to 9, 1779 standard dev") == 1


def test_what_rounding_keeps_from_zero_is_shown_as_zero():
    assert [short(value) for value in (3.576e-10, -1e-9, 0.0, 0.53512, -125.06, 2e-5)] == [
        "0",
        "0",
        "0",
        "0.5351",
        "-125.1",
        "2e-05",
    ]
