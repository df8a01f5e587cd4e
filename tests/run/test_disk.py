"""Disks that do not take a file for a while, folders that vanish in a run, files that no run has left."""

import json
import resource

from accelerate import Accelerator
from common.args import CommonArgs
from common.errors import UserError
from common.run.folder import lock
from common.run.metrics import Metrics
from common.run.parts.report import lines
import pytest
import torch

from tests.conftest import SFT, read_metrics

# --- a disk that does not take it ---------------------------------------------------------------------------


def test_numbers_that_json_does_not_know_are_null_with_the_reason(tmp_path):
    lock(tmp_path)
    metrics = Metrics(Accelerator(cpu=True), CommonArgs(output_dir=str(tmp_path)))
    metrics.log(1, loss=float("nan"), grad_norm=torch.tensor(float("inf")), rate=0.5)
    metrics.log_eval(
        1, {"eval_loss": float("-inf")}, [{"prompt": "a", "completion": "b", "score": float("nan")}], show=0
    )
    metrics.finish()

    def refuse(word):
        raise ValueError(word)

    def read(name):
        return [
            json.loads(line, parse_constant=refuse) for line in (tmp_path / name).read_text().splitlines()
        ]

    first, second = read("metrics.jsonl")
    assert first["loss"] is first["grad_norm"] is None and first["rate"] == 0.5
    assert first["not_finite"] == {"loss": "nan", "grad_norm": "inf"} and second["not_finite"] == {
        "eval_loss": "-inf"
    }
    assert read("samples.jsonl")[0]["score"] is None
    json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)


def test_a_disk_that_is_full_for_a_while_costs_a_few_lines(tmp_path, capsys):
    lock(tmp_path)
    metrics = Metrics(Accelerator(cpu=True), CommonArgs(output_dir=str(tmp_path)))
    file, limits = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in range(1, 8):
        if step == 3:  # room for half a line
            resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 40, limits[1]))
        if step == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        metrics.log(step, loss=1.0)
    metrics.finish()
    assert [row["step"] for row in lines(file)] == [1, 2, 6, 7]  # half of line 3 stands before 5
    assert capsys.readouterr().out.count("cannot be written") == 2


# --- a folder that vanishes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["dataset.json", "inputs.json", "summary.json"])
def test_a_file_that_the_run_needs_and_the_disk_does_not_take_is_one_line_and_the_run_goes_on_later(
    what, launch, tmp_path
):
    words = [*SFT, *"--max_steps 4 --save_steps 2".split()]
    whole = launch("sft", *words, output="whole")
    (tmp_path / "out").mkdir()
    blocked = tmp_path / "out" / (f".{what}.tmp" if what == "summary.json" else what)
    blocked.mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        launch("sft", *words)
    blocked.rmdir()
    assert read_metrics(launch("sft", *words)) == read_metrics(whole)
