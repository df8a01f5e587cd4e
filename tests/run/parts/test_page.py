"""What report.html shows, without a browser: its data, and what its script makes of them in node, where there
is one."""

import json
from pathlib import Path
import re
import shutil
import subprocess

from common.run.metrics import commit_of
from common.run.parts.report import PAGE, describe_run
import pytest

from tests.conftest import write_rows
from tests.run.parts.test_report import EVIL, a_run, data_of
from tools.report import write_report

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no node")
DRAW = Path(__file__).with_name("page_in_node.js")


def shown(folders, address=""):
    """{"text", "charts"} of a page of the runs."""
    page = folders[0].parent / "page.html"
    write_report(folders, page)
    run = subprocess.run([NODE, str(DRAW), str(page), address], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def logged(folder, **metrics):
    """A run of 20 steps whose metrics are functions of the step."""
    rows = []
    for step in range(1, 21):
        values = {name.replace("__", "/"): of(step) for name, of in metrics.items()}
        rows.append({"step": step, **values, "num_tokens": 100 * step, "seconds": 2.0 * step})
    write_rows(a_run(folder) / "metrics.jsonl", rows)
    return folder


def test_a_page_makes_nothing_but_text_of_its_data():
    code = "\n".join(path.read_text() for path in PAGE.glob("*.js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function", code)


@needs_node
def test_all_of_a_run_is_shown(tmp_path):
    folder = a_run(tmp_path / "run", evil=EVIL)
    row = {"step": 40, "groups": {"easy": {"passed": 3, "total": 4}}, "cases": {}}
    write_rows(
        folder / "regression.jsonl",
        [row | {"step": 0}, row | {"failed": {"c1": {"why": "no 7", "completion": "8"}}}],
    )
    text = shown([folder], "#settings=all")["text"]
    assert "cannot be drawn" not in text
    for part in (
        "run" + EVIL.replace("\ud800", "?"),
        "finished",
        "right 0.5 from 0",  # first and last value of an evaluation
        "steps 40 tokens 4,000, 50 / s time 80 s",
        "3 entries, 1 of trouble",
        "the loss jumps",
        "all 20",
        "better 8",
        "mean reward 0.5 of 16 completions",
        "left out: 1, empty",
        "learning_rate 0.1",
        "3 of 4 75 % from 75 %",
        "c1: no 7 · 8",
    ):
        assert part in text, part


@needs_node
def test_the_axis_of_a_share_ends_at_0_and_1(tmp_path):
    """And spans a tenth at least: one of 128 completions is no collapse. What is no share fills its plot."""
    folder = logged(
        tmp_path / "run",
        eval_exact=lambda step: 1 - (step == 9) / 128,
        completions__clipped_ratio=lambda step: (step == 9) / 128,
        frac_reward_zero_std=lambda step: 0.5 + step / 1000,
        entropy=lambda step: 0.5 + step / 1000,
        kl=lambda step: 0.0 if step < 20 else 1e-9,
    )
    charts = {chart["name"]: chart["axis"] for chart in shown([folder])["charts"]}
    for name in ("exact", "completions/clipped_ratio", "frac_reward_zero_std"):
        axis = charts[name]
        assert 0 <= axis["low"] and axis["high"] <= 1.02 and axis["high"] - axis["low"] >= 0.1, (name, axis)
    assert charts["completions/clipped_ratio"]["low"] == 0 and charts["exact"]["high"] == 1.02
    assert 0.49 < charts["entropy"]["low"] < charts["entropy"]["high"] < 0.53
    assert charts["kl"]["low"] == 0


@needs_node
@pytest.mark.parametrize("zoom", ["", "&zoom=3..5"])
def test_a_ratio_that_is_0_has_no_axis_below_it(zoom, tmp_path):
    """Nor where all that is chosen of it is 0."""
    folder = logged(
        tmp_path / "run", ratio=lambda step: float(step == 20), loss=lambda step: 0.0 + (step > 10)
    )
    for chart in shown([folder], f"#y=linear{zoom}")["charts"]:
        assert chart["axis"]["low"] == 0, chart["name"]


@needs_node
def test_axes_of_steps_epochs_tokens_and_time(tmp_path):
    folder = logged(tmp_path / "run", loss=lambda step: 1 / step)
    facts = json.loads((folder / "dataset.json").read_text())
    plan = {"steps": 20, "examples_per_step": 4, "tokens_per_step": 100, "steps_per_epoch": 8}
    (folder / "dataset.json").write_text(json.dumps(facts | {"plan": plan, "batched_as": "chat"}))
    for axis, last in (("steps", 20), ("epochs", 2.5), ("tokens", 2000), ("time", 40)):
        (chart,) = shown([folder], f"#x={axis}")["charts"]
        assert chart["curves"][0]["last"] == pytest.approx(last)
        assert chart["csv"].splitlines()[:3] == ["step,curve,value", "1,loss,1", "2,loss,0.5"]


@needs_node
def test_a_chart_is_found_by_its_name(tmp_path):
    folder = logged(
        tmp_path / "run", loss=lambda step: 1 / step, grad_norm=lambda step: step, mfu=lambda step: step
    )
    assert [chart["name"] for chart in shown([folder], "#find=GRAD")["charts"]] == ["grad_norm"]
    assert "no chart is called “lr”" in shown([folder], "#find=lr")["text"]


@needs_node
def test_a_column_of_a_comparison_holds_one_metric(tmp_path):
    """A run without evaluations does not show its training loss below the evaluated ones."""
    folders = [a_run(tmp_path / name, name=name) for name in ("one", "two")]
    folders.append(logged(tmp_path / "three", loss=lambda step: 7 / step))
    text = shown(folders)["text"]
    assert re.search(
        r"run eval loss eval right steps .* one 0.5 0.5 40 .* two 0.5 0.5 40 .* run – – 20 ", text
    ), text[:600]


def test_losses_of_different_scripts_have_plots_of_their_own(tmp_path):
    folders = [a_run(tmp_path / name, name=name) for name in ("one", "two")]
    begun = {"step": 0, "time": 1e9, "kind": "started", "text": "", "script": "train_dpo.py"}
    for script, frames in (
        ("train_sft.py", {"loss"}),
        ("train_dpo.py", {"loss of train_sft.py", "loss of train_dpo.py"}),
    ):
        write_rows(folders[1] / "events.jsonl", [begun | {"script": script}])
        write_report(folders, tmp_path / "both.html")
        runs = data_of((tmp_path / "both.html").read_text())["runs"]
        names = {frame["name"] for run in runs for frame in run["frames"]}
        assert {name for name in names if "loss" in name} == frames
        assert {curve["frame"] for run in runs for curve in run["curves"]} == names


def test_the_machine_is_told_without_what_is_not_so(tmp_path):
    folder = a_run(tmp_path / "run")
    begun = {
        "step": 0,
        "time": 1e9,
        "kind": "started",
        "text": "",
        "script": "train_sft.py",
        "distributed": "NO",
    }
    begun |= {"mixed_precision": "no", "processor": "Some CPU", "commit": "abc1234-dirty", "processes": 1}
    write_rows(folder / "events.jsonl", [begun])
    assert describe_run(folder)["about"] == [
        ["processor", "Some CPU"],
        ["processes", "1"],
        ["commit", "abc1234-dirty"],
    ]


def test_the_commit_is_that_of_the_scripts_repository(tmp_path):
    assert commit_of(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.example"]
    script = tmp_path / "train_mine.py"
    script.write_text("")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    assert len(commit_of(tmp_path)) >= 7 and head.startswith(commit_of(tmp_path))
    script.write_text("edited = True")
    assert commit_of(tmp_path).endswith("-dirty")
