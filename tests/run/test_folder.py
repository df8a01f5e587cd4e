"""Whose the output folder is: another run is refused with the difference, an unfinished one goes on, nothing
else is lost."""

import dataclasses
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys

from common.args import may_change
from common.errors import UserError
from common.files import find_damage, write_manifest
from common.run import folder as module
from common.run.folder import checkpoints, delete_run
from common.run.run import Run
import pytest
from safetensors.torch import load_file, save_file
import torch
import yaml

from tests.conftest import ROOT, SFT, read_metrics
from tests.run.script import Script
import train_grpo

BASE = ROOT / "data" / "base_model"
HALF, WHOLE = ["--max_steps", "3"], ["--max_steps", "5"]


def args_of(stage):
    return importlib.import_module(f"train_{stage}").Args


def folder_of_a_run(tmp_path, *, steps=(3, 6), complete=False, **changed):
    """An output folder as a run leaves it, with checkpoints of one small file; returns its arguments."""
    args = dataclasses.asdict(args_of("sft")()) | {
        "output_dir": str(tmp_path / "out"),
        "max_steps": 8,
        **changed,
    }
    args |= {"model_name_or_path": "data/base_model", "dataset_name": ["data/sft"]}
    output = tmp_path / "out"
    output.mkdir(parents=True)
    (output / "args.yaml").write_text(yaml.safe_dump(args))
    (output / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    for step in steps:
        folder = output / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"step": step}))
        (folder / "args.yaml").write_text(yaml.safe_dump(args))
        write_manifest(folder)
    if complete:
        (output / "summary.json").write_text(json.dumps({"final": {"step": 8}}))
    return args


def resume_point(args):
    return module.resume_point(args_of("sft")(**args), {})


# --- arguments ----------------------------------------------------------------------------------------------


CHANGES = [
    ({"seed": 1}, r"out/checkpoint-6 is of another run \(seed 0 -> 1\)"),
    ({"dataset_name": ["data/dpo"]}, r"dataset_name \['data/sft'\] -> \['data/dpo'\]"),
    (
        {"model_name_or_path": "gpt2", "dtype": "bfloat16"},
        "data/base_model -> gpt2, dtype float32 -> bfloat16",
    ),
    ({"lora_r": 8, "learning_rate": 1.0}, "lora_r 16 -> 8"),
    ({"resume_from_checkpoint": "none"}, "out holds an earlier run"),
    ({"save_best": "eval_loss", "eval_temperatures": [1.0]}, r"eval_temperatures \[0.0\] -> \[1.0\]"),
]


@pytest.mark.parametrize(("change", "shown"), CHANGES)
def test_other_runs_are_refused_with_the_difference(change, shown, tmp_path):
    # the same metric
    args = folder_of_a_run(tmp_path, save_best="min:loss" if "save_best" in change else None)
    expected = rf"^{tmp_path}/.*{shown}.*: choose another --output_dir, or start over"
    with pytest.raises(UserError, match=expected) as refused:
        resume_point(args | change)
    assert "learning_rate" not in str(refused.value)


def test_changed_arguments_that_may_change_are_said(tmp_path, capsys):
    args = folder_of_a_run(tmp_path)
    changed = {"learning_rate": 0.5, "max_steps": 20, "eval_steps": 7, "report_to": "wandb"}
    # args.yaml has the new values as soon as the run starts; the checkpoint is still of the old ones
    for _ in range(2):
        assert resume_point(args | changed) == tmp_path / "out" / "checkpoint-6"
        said = {
            "learning_rate: 2e-05 -> 0.5",
            "max_steps: 8 -> 20",
            "eval_steps: 100 -> 7",
            "report_to: None -> wandb",
        }
        assert set(capsys.readouterr().out.splitlines()) == said
        (tmp_path / "out" / "args.yaml").write_text(yaml.safe_dump(args | changed))


def test_a_scripts_own_flags_belong_to_the_run():
    """Unless they say otherwise: another value is another run."""
    found = may_change(train_grpo.Args)
    own = {
        name: found[name] for name in ("beta", "num_generations", "generation_batch_size", "learning_rate")
    }
    assert own == {
        "beta": "no",
        "num_generations": "no",
        "generation_batch_size": "execution",
        "learning_rate": "training",
    }


def test_a_complete_run_ends_or_gets_longer(tmp_path, capsys):
    args = folder_of_a_run(tmp_path, complete=True)
    for same in ({}, {"num_samples": 9}, {"push_to_hub": True, "hub_model_id": "a/b"}):
        with pytest.raises(SystemExit) as done:
            resume_point(args | same)
        said = capsys.readouterr().out
        assert done.value.code == 0 and "complete" in said
    for other, shown in (
        ({"learning_rate": 0.5}, "learning_rate 2e-05 -> 0.5"),
        ({"max_steps": 7}, "max_steps 8 -> 7"),
        ({"max_steps": 8, "num_train_epochs": 2.0}, "num_train_epochs 1.0 -> 2.0"),
    ):
        longer = "a larger --max_steps goes on with it; choose another --output_dir"
        with pytest.raises(UserError, match=rf"^{tmp_path}/out holds a complete run \({shown}\): {longer}"):
            resume_point(args | other)
    with pytest.raises(UserError, match="seed 0 -> 1"):
        resume_point(args | {"seed": 1, "max_steps": 20})
    assert resume_point(args | {"max_steps": 20, "learning_rate": 0.5}) == tmp_path / "out" / "checkpoint-6"
    assert "max_steps: 8 -> 20" in capsys.readouterr().out
    assert resume_point(args | {"max_steps": -1, "num_train_epochs": 3.0})
    for folder in checkpoints(args["output_dir"]):
        shutil.rmtree(folder)
    expected = f"^{tmp_path}/out holds a complete run, and no checkpoint to go on from: choose another"
    with pytest.raises(UserError, match=expected):
        resume_point(args | {"max_steps": 20})
    module.write_settings(args_of("sft")(**args | {"max_steps": 20}), __file__, {})
    assert not (tmp_path / "out" / "summary.json").exists()  # until the longer run is complete, too


def test_a_run_goes_on_from_its_newest_checkpoint_or_a_named_one(tmp_path):
    args = folder_of_a_run(tmp_path)
    newest, copy = tmp_path / "out" / "checkpoint-6", tmp_path / "new" / "checkpoint-3"
    assert (
        resume_point(args) == resume_point(args | {"resume_from_checkpoint": "True"}) == newest
    )  # as for transformers
    named = {
        "resume_from_checkpoint": str(tmp_path / "out" / "checkpoint-3"),
        "output_dir": str(tmp_path / "new"),
    }
    assert resume_point(args | named) == tmp_path / "out" / "checkpoint-3"
    shutil.copytree(tmp_path / "out" / "checkpoint-3", copy)  # of this run, one step further
    (tmp_path / "new" / "args.yaml").write_text(yaml.safe_dump(args | named))
    assert resume_point(args | named) == copy  # the same command once more
    with pytest.raises(UserError, match=f"^{tmp_path}/out holds an earlier run: choose another"):
        resume_point(args | {"resume_from_checkpoint": str(copy)})
    with pytest.raises(UserError, match="checkpoint latest: manifest.json cannot be read .*expected auto"):
        resume_point(args | {"output_dir": str(tmp_path / "fresh"), "resume_from_checkpoint": "latest"})


def test_an_unreadable_run_is_not_overwritten(tmp_path):
    args = folder_of_a_run(tmp_path)
    (tmp_path / "out" / "metrics.jsonl").unlink()
    (tmp_path / "out" / "args.yaml").write_text("seed: [")
    assert resume_point(args) == tmp_path / "out" / "checkpoint-6"  # which has the arguments, too
    for folder in checkpoints(args["output_dir"]):
        (folder / "args.yaml").unlink()
        write_manifest(folder)
    expected = f"^{tmp_path}/out/checkpoint-6 is of a run whose args.yaml cannot be read: choose another"
    with pytest.raises(UserError, match=expected):
        resume_point(args)
    assert resume_point(args | {"overwrite_output_dir": True}) is None
    (tmp_path / "out" / "mine.txt").write_text("")
    (tmp_path / "out" / "bad_batches").mkdir()
    delete_run(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_smaller_micro_batches_go_on_as_before(launch, capsys):
    constant = "--lr_scheduler_type constant --warmup_steps 0".split()
    whole = launch("sft", *SFT, *constant, output="whole")
    launch("sft", *SFT, *constant, *HALF, output="split")
    elastic = "--per_device_train_batch_size 2 --gradient_accumulation_steps 2".split()
    resumed = launch("sft", *SFT, *constant, *elastic, output="split")
    said = capsys.readouterr().out
    assert "per_device_train_batch_size: 4 -> 2" in said and "order of the samples" not in said
    for one, other in zip(read_metrics(whole), read_metrics(resumed), strict=True):
        assert one["num_tokens"] == other["num_tokens"] and one["loss"] == pytest.approx(
            other["loss"], rel=1e-4
        )


# --- inputs -------------------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch, tmp_path):
    """script(edit, name): from now on train_sft.py is this copy of itself."""

    def use(edit=lambda text: text, name="train_sft.py"):
        (tmp_path / "scripts").mkdir(exist_ok=True)
        path = tmp_path / "scripts" / name
        path.unlink(missing_ok=True)
        path.write_text(edit((ROOT / "train_sft.py").read_text()))
        path.chmod(0o444)  # as in a read-only checkout
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
    with pytest.raises(
        UserError, match=r"the script: .*--accept_changes.*--output_dir.*--overwrite_output_dir"
    ):
        launch("sft", *SFT, *steps)
    # comments and layout
    script(lambda text: "# mine\n" + text.replace("(T,)\n", "(T,)\n\n"), "train_renamed.py")
    if steps == HALF:
        with pytest.raises(SystemExit):
            launch("sft", *SFT, *steps)
        return
    script(edited)
    capsys.readouterr()
    launch("sft", *SFT, *steps, "--save_steps", "1", "--accept_changes")
    assert "the script (--accept_changes)" in capsys.readouterr().out
    launch("sft", *SFT, "--max_steps", "7")  # its checkpoint is of the edited one


REWARD = """import plainloop_points
def score(completions, **columns):
    return [plainloop_points.points(c) for c in completions]
"""


@pytest.mark.parametrize("more", [[], pytest.param(["--dataset_streaming"], marks=pytest.mark.slow)], ids=str)
def test_edited_inputs_are_noticed(more, launch, tmp_path, monkeypatch):
    """Rows in another order, one of as many tokens, one fewer; a reward and its import, a template, a
    tokenizer, a base; with --save_best what its evaluations are of."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "plainloop_points", raising=False)
    monkeypatch.setattr("common.data.stream.BLOCK_ROWS", 9)
    shutil.copytree(BASE, tmp_path / "model")
    shutil.copy(BASE / "chat_template.jinja", tmp_path / "mine.jinja")
    rows = (ROOT / "data/sft/train.jsonl").read_bytes().splitlines(True)[:20]
    held = "held-out rows for eval_loss.jsonl"
    for name in ("rows.jsonl", held, "prompts.json"):
        (tmp_path / name).write_bytes(b"".join(rows))
    (tmp_path / "plainloop_points.py").write_text("def points(text):\n    return len(text) / 100\n")
    (tmp_path / "reward.py").write_text(REWARD)
    words = [
        *SFT,
        *more,
        "--dataset_name",
        f"{tmp_path}/rows.jsonl",
        "--eval_reward_funcs",
        f"{tmp_path}/reward.py:score",
    ]
    words += [f"regex:{'a|' * 200}"]  # too long for the name of a file
    words += [
        "--chat_template",
        f"{tmp_path}/mine.jinja",
        "--model_name_or_path",
        f"{tmp_path}/model",
        "--use_peft",
    ]
    words += "--save_steps 1 --save_best eval_loss --eval_steps 1 --eval_max_new_tokens 1".split()
    words += ["--eval_dataset_name", f"{tmp_path}/{held}", "--eval_prompts", f"{tmp_path}/prompts.json"]
    whole = launch("sft", *words, "--max_steps", "2", output="whole")
    launch("sft", *words, "--max_steps", "1")
    files = "reward.py plainloop_points.py mine.jinja model/tokenizer.json model/model.safetensors prompts.json".split()
    edits = [
        ("rows.jsonl", b"".join(r))
        for r in (rows[1:] + rows[:1], [rows[0].replace(b"3", b"2"), *rows[1:]], rows[:-1])
    ]
    edits += [(held, b"".join(rows[1:])), *((name, (tmp_path / name).read_bytes()) for name in files)]
    for name, content in edits:
        file = tmp_path / name
        before, kept = file.read_bytes(), shutil.copy2(file, tmp_path / "kept")
        changed = {".safetensors": content[:-1] + b"@", ".json": content + b" ", ".jsonl": content}
        file.write_bytes(changed.get(file.suffix, content + b"\n# {# another #}\n"))
        with pytest.raises(
            UserError, match=f"{name.split('/')[0].removesuffix('.jsonl')}: .*--accept_changes"
        ):
            launch("sft", *words, "--max_steps", "2", "--save_best", "min:loss")  # the same metric
        # a stream sees that a file is newer, too
        shutil.move(kept, file) if more else file.write_bytes(before)
    assert read_metrics(launch("sft", *words, "--max_steps", "2")) == read_metrics(whole)


@pytest.mark.parametrize(
    "how", ["reference", pytest.param("base, named by an adapter", marks=pytest.mark.slow)]
)
def test_an_edited_model_is_another_run_unless_accepted(how, launch, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(BASE, model)
    stage, words = (
        ("dpo", [*SFT[2:], "--config", "data/configs/dpo.yaml"]) if how == "reference" else ("sft", SFT)
    )
    words = [*words, "--model_name_or_path", str(model), "--save_steps", "1"]
    if how != "reference":
        adapter = launch("sft", *words, "--use_peft", "--max_steps", "1", output="adapter")
        words += ["--model_name_or_path", str(adapter)]
    launch(stage, *words, "--max_steps", "1")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] += 0.1
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"{model}: .*--accept_changes"):
        launch(stage, *words, "--max_steps", "2")
    launch(stage, *words, "--max_steps", "2", "--accept_changes")
    assert "(--accept_changes)" in capsys.readouterr().out
    launch(stage, *words, "--max_steps", "3")  # its checkpoint is of the new one


# --- one run for a folder -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_folder_belongs_to_one_living_run(tmp_path, token_cache):
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
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
    with Script(tmp_path, *words) as run:  # at once: the kernel has let go
        reached = run.steps()
        run.until(lambda: run.steps() != reached)


@pytest.mark.parametrize("taken", [False, True], ids=["deleted", "deleted and taken by another run"])
def test_a_deleted_folder_ends_the_run(taken, launch, tmp_path, monkeypatch):
    out, update, steps = tmp_path / "out", torch.optim.AdamW.step, iter(range(99))

    def delete(self, *args, **kwargs):
        if next(steps) == 2:
            shutil.rmtree(out)
            if taken:
                out.mkdir()
                (out / ".lock").write_text("another run's")
        return update(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", delete)
    with pytest.raises(UserError, match=f"^{out} was deleted while this run was writing to it"):
        launch("sft", *SFT, "--save_steps", "4")
    assert not out.exists() or os.listdir(out) == [".lock"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_is_not_the_run(tmp_path):
    """One that goes on after a reward function, for instance, writes nothing beside its parent."""
    module.lock(tmp_path)
    child = os.fork()
    if child == 0:
        os._exit(1 if module.is_held(tmp_path) else 7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert module.is_held(tmp_path)


def test_a_script_that_changes_the_working_directory_writes_nowhere_else(launch, tmp_path, monkeypatch):
    """Where another run may have a folder of the same relative path."""
    out = os.path.relpath(tmp_path / "out")
    monkeypatch.chdir(".")  # put back at the end
    describe = Run.describe

    def describe_elsewhere(*args, **kwargs):
        os.chdir(tmp_path)
        describe(*args, **kwargs)

    monkeypatch.setattr(Run, "describe", describe_elsewhere)
    with pytest.raises(UserError, match="the working directory has changed"):
        launch("sft", *SFT, "--output_dir", out)
    assert not os.path.exists(out)


# --- what no run has written --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "samples.jsonl", "args.yaml", "metrics.jsonl"]
)
def test_foreign_files_are_not_written_over(name, launch, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    out = f"{tmp_path}/out"
    with pytest.raises(UserError, match=f"_dir {out} holds {name}, but no run|^{out} is of a run whose"):
        launch("sft", *SFT, "--max_steps", "1")
    assert (tmp_path / "out" / name).read_text() == "mine"


def test_the_model_of_a_checkpoint_or_a_copy_is_not_written_over(launch):
    output = launch("sft", *SFT, *"--max_steps 2 --save_steps 2".split())
    checkpoint = output / "checkpoint-2"
    before = sorted(os.listdir(checkpoint))
    with pytest.raises(UserError, match="holds model.safetensors, but no run"):
        launch("sft", *SFT, "--max_steps", "1", "--output_dir", str(checkpoint))
    assert find_damage(checkpoint) is None and sorted(os.listdir(checkpoint)) == before


def test_what_is_read_does_not_lie_in_the_folder(launch, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(BASE, out)
    shutil.copy(ROOT / "data/sft/train.jsonl", out / "samples.jsonl")
    before = sorted(os.listdir(out))
    reads = [
        ("sft", "model_name_or_path", out),
        ("sft", "dataset_name", out / "samples.jsonl"),
        ("sft", "eval_prompts", out),
    ]
    for stage, flag, path in [*reads, ("distill", "teacher_model_name_or_path", out)]:
        with pytest.raises(UserError, match=f"--output_dir {out} holds the {path} of --{flag}"):
            launch(stage, *SFT[2:], f"--{flag}", str(path), "--overwrite_output_dir")
    assert sorted(os.listdir(out)) == before


def test_a_finished_run_is_whole_until_it_is_replaced(launch, tmp_path):
    words = [*SFT, *"--max_steps 2 --save_steps 1".split()]
    output = launch("sft", *words)

    def content():
        return {
            path: path.read_bytes() for path in output.rglob("*") if path.is_file() and path.name != ".lock"
        }

    before = content()
    wrong = [
        (["--overwrite_output_dir", "--dataset_name", tmp_path / "typo.jsonl"], "typo.jsonl"),
        (["--max_steps", "3", "--eval_prompts", tmp_path / "typo.jsonl"], "typo.jsonl"),  # would go on
        (
            "--max_steps -1 --num_train_epochs 0.1".split(),
            f"^{output}/checkpoint-2 lies beyond step 1, at which this run would end",
        ),
    ]
    for more, line in wrong:
        with pytest.raises(UserError, match=line):
            launch("sft", *words, *more)
        assert content() == before, more
    launch("sft", *words, "--overwrite_output_dir", "--max_steps", "1")
    assert json.loads((output / "dataset.json").read_text())["plan"]["steps"] == 1
    assert not (output / "checkpoint-2").exists() and (output / "summary.json").exists()


@pytest.mark.parametrize("existing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_that_fails_at_its_start_leaves_no_folder(existing, tmp_path):
    words = [sys.executable, "train_sft.py", *SFT, "--model_name_or_path", "no/such/model", "--output_dir"]
    output = tmp_path / "out"
    if existing:
        output.mkdir()
        (output / "notes.txt").write_text("mine")
    done = subprocess.run([*words, str(output)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "no/such/model" in done.stderr
    assert output.exists() == existing and (not existing or (output / "notes.txt").read_text() == "mine")


def test_a_run_that_is_refused_leaves_the_lock_of_the_other(tmp_path):
    """Which may not have written anything else yet."""
    held = "import sys, time; from pathlib import Path; from common.run.folder import lock; lock(Path(sys.argv[1]))"
    other = subprocess.Popen(
        [sys.executable, "-c", f"{held}; print('held', flush=True); time.sleep(100)", str(tmp_path / "out")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    try:
        assert other.stdout.readline() == b"held\n"
        expected = f"^{tmp_path}/out is in use by process {other.pid} on .*: stop it, or choose another"
        with pytest.raises(UserError, match=expected):
            module.lock(tmp_path / "out")
        module.remove_if_unused(tmp_path / "out")
        assert (tmp_path / "out" / ".lock").exists()
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
