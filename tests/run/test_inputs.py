"""A run goes on only with what it began with: its script, its data, files with code. And one run has a folder at a time."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys

from common.args import CommonArgs
from common.errors import UserError
from common.run.inputs import _model_digest, compare_rest, hub_commits
from tests.conftest import ROOT, read_metrics
from tests.run.test_folder import GRPO, SFT
from tests.run.test_signals import Script

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

HALF, WHOLE = ["--max_steps", "3"], ["--max_steps", "5"]


def rows_of(path, n=20):
    return [json.loads(line) for line in (ROOT / path).read_text().splitlines()[:n]]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# --- the script -----------------------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch, tmp_path):
    """script(edit, name): from now on train_sft.py is this copy of itself."""

    def use(edit=lambda text: text, name="train_sft.py"):
        (tmp_path / "scripts").mkdir(exist_ok=True)
        path = tmp_path / "scripts" / name
        path.write_text(edit((ROOT / "train_sft.py").read_text()))
        monkeypatch.setattr(importlib.import_module("train_sft"), "__file__", str(path))

    return use


def edited(text):
    assert "loss = out.nll" in text
    return text.replace("loss = out.nll", "loss = 5 * out.nll")


@pytest.mark.parametrize("steps", [HALF, WHOLE], ids=["complete", "made longer"])
def test_an_edited_script_is_another_run(steps, script, launch, capsys):
    script()
    launch("sft", *SFT, *HALF)
    script(edited)
    with pytest.raises(UserError, match=r"train_sft.py has been edited: .*--accept_changes") as error:
        launch("sft", *SFT, *steps)
    assert "--overwrite_output_dir" in str(error.value)
    if steps == WHOLE:
        capsys.readouterr()
        launch("sft", *SFT, *steps, "--save_steps", "1", "--accept_changes")
        assert "train_sft.py has been edited (--accept_changes)" in capsys.readouterr().out
        launch("sft", *SFT, "--max_steps", "7")  # its checkpoint is of the edited one
    launch("sft", *SFT, *steps, "--overwrite_output_dir")


def test_comments_docstrings_and_layout_are_no_other_script(script, launch):
    script()
    launch("sft", *SFT, *HALF)
    script(
        lambda text: (
            "# mine\n" + text.replace('"""Supervised fine-tuning', '"""My own fine-tuning').replace("(T,)\n", "(T,)\n\n")
        )
    )
    launch("sft", *SFT, *WHOLE)


def test_a_copy_with_another_idea_does_not_go_on_in_the_folder_of_the_first(script, launch):
    script()
    launch("sft", *SFT, *HALF)
    script(edited, "train_idea.py")
    for steps in (HALF, WHOLE):
        with pytest.raises(UserError, match="it is a run of train_sft.py, and this is train_idea.py"):
            launch("sft", *SFT, *steps)
    script(name="train_renamed.py")
    launch("sft", *SFT, *WHOLE)


# --- the data -------------------------------------------------------------------------------------------------------


CHANGES = {
    "another order": lambda rows: rows[1:] + rows[:1],
    "another row": lambda rows: [*rows[:-1], rows[0]],
    "fewer rows": lambda rows: rows[:-1],
}


@pytest.mark.parametrize(
    "stage, change",
    [
        pytest.param(stage, change, marks=[] if change == "another row" and stage == "sft" else pytest.mark.slow)
        for stage in ("sft", "grpo", "sft streamed")
        for change in CHANGES
    ],
)
def test_changed_rows_are_noticed(stage, change, launch, tmp_path, capsys):
    stage, *streamed = stage.split()
    rows = rows_of(f"data/{stage}/train.jsonl")
    words = [*(SFT if stage == "sft" else GRPO), "--dataset_name", write(tmp_path / "mine.jsonl", rows), "--save_steps", "1"]
    words += ["--dataset_streaming"] if streamed else []
    whole = launch(stage, *words, "--max_steps", "2", output="whole")
    launch(stage, *words, "--max_steps", "1")
    write(tmp_path / "mine.jsonl", CHANGES[change](rows))
    with pytest.raises(UserError, match="checkpoint-1: the rows of mine are not those that it had: .*--accept_changes"):
        launch(stage, *words, "--max_steps", "2")
    write(tmp_path / "mine.jsonl", rows)  # written again, the same
    assert read_metrics(launch(stage, *words, "--max_steps", "2")) == read_metrics(whole)
    write(tmp_path / "mine.jsonl", CHANGES[change](rows))
    capsys.readouterr()
    launch(stage, *words, "--max_steps", "3", "--accept_changes")
    assert "the rows of mine are not those that it had (--accept_changes)" in capsys.readouterr().out


@pytest.mark.slow
def test_another_chat_template_and_another_reward_are_noticed(launch, tmp_path):
    reward, template = tmp_path / "reward.py", tmp_path / "mine.jinja"
    reward.write_text("def score(completions, **columns):\n    return [len(c) / 100 for c in completions]\n")
    template.write_text((ROOT / "data/base_model/chat_template.jinja").read_text())
    words = [*GRPO, "--reward_funcs", f"{reward}:score", "--reward_weights", "1", "--chat_template", str(template)]
    for file in (reward, template):
        launch("grpo", *words, "--max_steps", "1", output=f"out-{file.name}")
        before = file.read_text()
        file.write_text(before + "\n# {# another #}\n")
        with pytest.raises(UserError, match=f"{file.name} has been edited"):
            launch("grpo", *words, "--max_steps", "2", output=f"out-{file.name}")
        file.write_text(before)
        launch("grpo", *words, "--max_steps", "2", output=f"out-{file.name}")


OTHERS = [pytest.param(how, marks=pytest.mark.slow) for how in ("base", "base, named by an adapter", "tokenizer")]


@pytest.mark.parametrize("how", ["reference", *OTHERS])
def test_another_model_under_the_same_name_is_noticed(how, launch, tmp_path, capsys):
    """The reference of DPO, and the base under an adapter, are loaded again by a run that goes on."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "data/base_model", model)
    stage, words = ("dpo", [*SFT[2:], "--config", "data/configs/dpo.yaml"]) if how == "reference" else ("sft", SFT)
    words, lora = [*words, "--model_name_or_path", str(model), "--save_steps", "1"], ["--use_peft"]
    if "named" in how:
        adapter = launch("sft", *words, *lora, "--max_steps", "1", output="adapter")
        words += ["--model_name_or_path", str(adapter)]
    elif how == "base":
        words += lora
    launch(stage, *words, "--max_steps", "1")
    file, key = model / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    if how == "tokenizer":
        (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + " ")
    else:
        save_file(tensors | {key: tensors[key] + 0.1}, file, {"format": "pt"})
    with pytest.raises(UserError, match=f"{adapter if 'named' in how else model} has been edited: .*--accept_changes"):
        launch(stage, *words, "--max_steps", "2")
    launch(stage, *words, "--max_steps", "2", "--accept_changes")
    assert "has been edited (--accept_changes)" in capsys.readouterr().out
    launch(stage, *words, "--max_steps", "3")  # its checkpoint is of the new one


def test_of_a_large_file_each_megabyte_is_looked_at(tmp_path):
    file = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text("{}")
    data = np.random.default_rng(0).integers(0, 256, 70 * 2**20, dtype=np.uint8)
    data.tofile(file)
    before = _model_digest(tmp_path)
    assert before == _model_digest(tmp_path)
    for at in (5, 2**20 - 1, 33 * 2**20, 69 * 2**20 + 4000):
        data[at] ^= 1
        data.tofile(file)
        assert _model_digest(tmp_path) != before, at
        data[at] ^= 1
    assert _model_digest(tmp_path / "none") is None


def test_another_commit_on_the_hub_is_noticed(tmp_path, monkeypatch):
    cache, names = tmp_path / "models--org--tiny", ("config.json", "tokenizer_config.json")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    args = CommonArgs(model_name_or_path="org/tiny")

    def update(commit, *files):
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / "main").write_text(commit)
        for name in files:
            (cache / "snapshots" / commit / name).write_text("{}")

    assert hub_commits(args) == {}
    update("a" * 40, *names)
    inputs = {"data": {}, "code": {}, "hub": hub_commits(args)}
    assert inputs["hub"] == {"org/tiny": "a" * 40}
    (tmp_path / "inputs.json").write_text(json.dumps(inputs))
    compare_rest(args, inputs, tmp_path)
    update("b" * 40, "tokenizer_config.json")  # what is loaded first
    with pytest.raises(UserError, match="org/tiny has another commit on the Hub"):
        compare_rest(args, inputs | {"hub": hub_commits(args)}, tmp_path)


@pytest.mark.slow
def test_an_edited_file_that_a_reward_imports_is_noticed(launch, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "plainloop_points.py").write_text("def points(text):\n    return len(text) / 100\n")
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import plainloop_points\ndef score(completions, **columns):\n    return [plainloop_points.points(c) for c in completions]\n"
    )
    words = [*GRPO, "--reward_funcs", f"{reward}:score", "--reward_weights", "1"]
    launch("grpo", *words, "--max_steps", "1")
    launch("grpo", *words, "--max_steps", "2")
    (tmp_path / "plainloop_points.py").write_text("def points(text):\n    return -len(text) / 100\n")
    with pytest.raises(UserError, match="plainloop_points.py has been edited: .*--accept_changes"):
        launch("grpo", *words, "--max_steps", "3")
    sys.modules.pop("plainloop_points")
    launch("grpo", *words, "--max_steps", "3", "--accept_changes")


def test_a_flipped_bit_in_the_token_cache_is_found_and_the_data_made_anew(launch, tmp_path, capsys):
    words = [*SFT, "--dataset_cache_dir", str(tmp_path / "cache")]
    first = launch("sft", *words, output="first")
    ids = sorted((tmp_path / "cache").glob("*/ids.bin"))[0]
    with open(ids, "r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    capsys.readouterr()
    again = launch("sft", *words, output="again")
    assert "ids.bin is damaged: it is made anew" in capsys.readouterr().out
    assert read_metrics(first) == read_metrics(again)
    launch("sft", *words, output="third")
    assert "damaged" not in capsys.readouterr().out


# --- one run for a folder -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_folder_is_held_by_one_run_as_long_as_it_lives(tmp_path, token_cache):
    words = [*SFT, "--max_steps", "100000", "--dataset_cache_dir", str(token_cache)]
    with Script(tmp_path, *words) as run:
        run.until(lambda: run.steps() >= 2)
        for more in ([], ["--learning_rate", "1"], ["--overwrite_output_dir"]):
            command = [sys.executable, "train_sft.py", *words, *more, "--output_dir", str(run.output)]
            second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
            assert second.returncode == 1, second.stdout + second.stderr
            [said] = [line for line in second.stderr.splitlines() if "error" in line]
            assert f"{run.output} is in use by process {run.process.pid} on " in said
        assert run.process.poll() is None
        reached = run.steps()
        run.until(lambda: run.steps() > reached)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
    with Script(tmp_path, *words) as run:  # at once: the kernel has let go
        reached = run.steps()
        run.until(lambda: run.steps() != reached)


def test_a_lock_that_another_host_or_an_old_boot_has_left_does_not_block(launch, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").write_text("process 1 on elsewhere, since 1999-12-31 23:59:59")
    launch("sft", *SFT, "--max_steps", "1")
