"""Checkpoints against what happens to them: full disks, kills, damaged files; the best one is kept."""

import errno
import json
import os
from pathlib import Path
import pickle
import random
import shutil
import tracemalloc
from types import SimpleNamespace

from accelerate import Accelerator
from common.args import CommonArgs
from common.errors import UserError
from common.files import find_damage, write_manifest
from common.model.load import load_tokenizer
from common.run.checkpoint import export, resume, save_checkpoint
from common.run.folder import checkpoints, lock, newest_intact
from common.run.metrics import Metrics
import pytest
from safetensors.torch import load_file
import torch
import transformers
import yaml

from tests.conftest import SFT, read_metrics, train_metrics
from tests.run.kills import Kill, killed_at
from tests.run.test_folder import resume_point
from tests.tiny import tiny_pair

# --- saving -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    """A tiny model with an optimizer that has taken a step, and a tokenizer."""
    model, _ = tiny_pair("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    tokenizer = load_tokenizer(CommonArgs(), "data/base_model")
    return SimpleNamespace(
        model=model, optimizer=optimizer, tokenizer=tokenizer, accelerator=Accelerator(cpu=True)
    )


def save(tiny, output, step, limit=2, best=None, **state):
    args = CommonArgs(output_dir=str(output), save_total_limit=limit)
    for name in ("args.yaml", "inputs.json"):  # as `begin` leaves them
        (Path(output) / name).touch()
    return save_checkpoint(
        args, tiny.accelerator, tiny.model, tiny.optimizer, tiny.tokenizer, step, state, best
    )


def names(output):
    return [path.name for path in checkpoints(output)]


def test_pruning_keeps_the_newest_and_the_best(tiny, tmp_path):
    for step in (5, 90, 100, 1000):
        assert save(tiny, tmp_path, step, best=90 if step >= 90 else None)
    assert names(tmp_path) == ["checkpoint-90", "checkpoint-100", "checkpoint-1000"]
    save(tiny, tmp_path, 1001, limit=1, best=90)
    assert names(tmp_path) == ["checkpoint-90", "checkpoint-1001"]
    save(tiny, tmp_path, 1002, limit=1)
    assert names(tmp_path) == ["checkpoint-1002"]
    save(tiny, tmp_path, 1003, limit=0)
    assert names(tmp_path) == ["checkpoint-1002", "checkpoint-1003"]


def test_a_checkpoint_is_on_disk_under_its_name(tiny, tmp_path, monkeypatch):
    """Flushed: its files before it gets its name, and after that the folder which lists it."""
    done, rename, fsync = [], os.rename, os.fsync
    monkeypatch.setattr(os, "rename", lambda old, new: (done.append(str(new)), rename(old, new)))
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.fstat(file).st_ino), fsync(file)))
    assert save(tiny, tmp_path, 1)
    named = done.index(str(tmp_path / "checkpoint-1"))
    assert (tmp_path / "checkpoint-1" / "optimizer.pt").stat().st_ino in done[:named]
    assert tmp_path.stat().st_ino in done[named:]


@pytest.mark.parametrize("limit", [1, 2])
def test_damaged_checkpoints_do_not_push_out_new_ones(limit, tiny, tmp_path, capsys):
    for step in (3, 6, 9):
        save(tiny, tmp_path, step, limit=0)
    (tmp_path / "checkpoint-9" / "optimizer.pt").write_bytes(b"")
    (tmp_path / "checkpoint-6" / "optimizer.pt").write_bytes(b"")
    capsys.readouterr()
    assert newest_intact(tmp_path).name == "checkpoint-3"
    assert f"{tmp_path}/checkpoint-9 is passed over: optimizer.pt " in capsys.readouterr().out
    save(tiny, tmp_path, 4, limit=limit)
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"][-limit:]
    assert newest_intact(tmp_path).name == "checkpoint-4"


def disk_full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def rust_disk_full(*args, **kwargs):
    raise Exception("No space left on device (os error 28)")  # what tokenizers and safetensors raise


def torch_disk_full(*args, **kwargs):
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")


PLACES = {
    "folder": (Path, "mkdir", disk_full),
    "model": ("lm", "save_pretrained", disk_full),
    "tokenizer": ("tokenizer", "save_pretrained", rust_disk_full),
    "optimizer": (torch, "save", torch_disk_full),
    "state and manifest": (Path, "write_text", disk_full),
    "flush": (os, "fsync", disk_full),
    "rename": (os, "rename", disk_full),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_full_disk_costs_one_checkpoint(place, tiny, tmp_path, monkeypatch, capsys):
    assert save(tiny, tmp_path, 3)
    with monkeypatch.context() as patch:
        target, name, fault = PLACES[place]
        target = {"lm": tiny.model.lm, "tokenizer": tiny.tokenizer}.get(target, target)
        patch.setattr(target, name, fault)
        assert not save(tiny, tmp_path, 6, limit=1)
        if place == "model":
            with pytest.raises(UserError, match="cannot be written.*the same command resumes"):
                export(CommonArgs(output_dir=str(tmp_path)), tiny.accelerator, tiny.model, tiny.tokenizer)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "the next save tries again: " in said[0]
    assert "checkpoint-6 could not be written" in said[0]
    assert names(tmp_path) == ["checkpoint-3"] and newest_intact(tmp_path).name == "checkpoint-3"
    assert not list(tmp_path.glob(".*"))
    assert save(tiny, tmp_path, 9, limit=1, best=3)
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-9"]


def test_kills_at_any_file_operation(tiny, tmp_path, monkeypatch):
    """Each call that touches the disk is the last one, in turn, before or after it has done its work."""
    output = tmp_path / "out"
    output.mkdir()
    ended, at, seen = False, 0, []
    while not ended:
        for folder in checkpoints(output):
            shutil.rmtree(folder)
        save(tiny, output, 3)
        save(tiny, output, 6)
        with killed_at(monkeypatch, at) as was_killed:
            try:
                save(tiny, output, 9, limit=1)
                ended = not was_killed()  # else somebody has caught the kill
            except Kill:
                seen.append(newest_intact(output).name)
        at += 1
    assert at > 40 and {"checkpoint-6", "checkpoint-9"} == set(seen) and seen == sorted(seen)
    save(tiny, output, 12, limit=1)
    assert sorted(path.name for path in output.iterdir()) == ["args.yaml", "checkpoint-12", "inputs.json"]


# --- loading ------------------------------------------------------------------------------------------------


def test_settings_of_the_optimizer_are_those_of_this_run(tiny, tmp_path):
    save(tiny, tmp_path, 3)
    own = {"lr": 0.5, "betas": (0.5, 0.6), "eps": 0.1, "weight_decay": 0.3}
    optimizer = torch.optim.AdamW(tiny.model.parameters(), **own)
    resume(tiny.accelerator, tmp_path / "checkpoint-3", optimizer)
    assert own.items() <= optimizer.param_groups[0].items() and optimizer.state


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickled_optimizer_is_not_run(tiny, tmp_path):
    save(tiny, tmp_path, 3)
    folder, trace = tmp_path / "checkpoint-3", tmp_path / "trace"
    for write in (torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))):
        write({"state": Evil(trace), "param_groups": []}, folder / "optimizer.pt")
        assert find_damage(folder) == "optimizer.pt is damaged"
        write_manifest(folder)  # by the same hand
        with pytest.raises(
            UserError, match=r"checkpoint-3/optimizer.pt does not hold the optimizer"
        ) as refused:
            resume(tiny.accelerator, folder, tiny.optimizer)
        assert not trace.exists() and "\n" not in str(refused.value)


def damaged(content, rng):
    """The content cut off somewhere, or with one bit turned over."""
    at = rng.randrange(len(content))
    rest = b"" if rng.random() < 0.5 else bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    return content[:at] + rest


def test_damaged_files_are_never_trusted(launch):
    """90 cases. What is in a checkpoint is passed over; arguments are compared."""
    output, rng = launch("sft", *SFT, "--max_steps", "2", "--save_steps", "1"), random.Random(0)
    (output / "summary.json").unlink()
    args = yaml.safe_load((output / "args.yaml").read_text())
    inside = ["manifest.json", "trainer_state.json", "model.safetensors", "optimizer.pt", "args.yaml"]
    for name in [*(f"checkpoint-2/{name}" for name in inside), "args.yaml"]:
        original = (output / name).read_bytes()
        for _ in range(15):
            (output / name).write_bytes(damaged(original, rng))
            if (output / name).read_bytes() == original:
                continue
            try:
                checkpoint = resume_point(args)
            except UserError as refused:
                assert "of another run" in str(refused) or "cannot be read" in str(refused)
                assert name == "args.yaml"
                continue
            if name == "checkpoint-2/manifest.json" and checkpoint.name == "checkpoint-2":
                changed = json.loads((output / name).read_text())
                assert changed == json.loads(original)  # a space that has become another
            else:
                assert checkpoint.name == ("checkpoint-2" if name == "args.yaml" else "checkpoint-1")
        (output / name).write_bytes(original)
    assert resume_point(args).name == "checkpoint-2"


def test_lines_that_go_on_are_those_before_the_checkpoint(tmp_path):
    """With U+2028 and others that splitlines takes for the end of a line; one that was half written is left
    out."""
    lock(tmp_path)
    metrics = Metrics(Accelerator(cpu=True), CommonArgs(output_dir=str(tmp_path)))
    metrics.append(
        "samples.jsonl", [{"step": 1, "completion": "a\u2028b\x85c"}, {"step": 2, "completion": "d"}]
    )
    metrics.append("samples.jsonl", [{"step": 3, "completion": "later"}])
    before = (tmp_path / "samples.jsonl").read_text().split("\n")
    with open(tmp_path / "samples.jsonl", "a") as file:
        file.write('{"step": 2, "comp\n[1]\n{"step": 1')
    metrics.restore(2, {})
    assert (tmp_path / "samples.jsonl").read_text().split("\n") == [*before[:2], ""]
    metrics.append("samples.jsonl", [{"step": 0}])
    metrics.restore(0, {})  # the run starts over, and evaluates once more
    assert not (tmp_path / "samples.jsonl").read_text()


def test_lines_that_go_on_may_be_larger_than_the_memory(tmp_path):
    lock(tmp_path)
    metrics = Metrics(Accelerator(cpu=True), CommonArgs(output_dir=str(tmp_path)))
    for step in range(1, 9):
        metrics.append("completions.jsonl", [{"step": step, "completion": "x" * 2**20}])
    tracemalloc.start()
    metrics.restore(6, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "completions.jsonl").stat().st_size > 6 * 2**20
    assert peak < 5 * 2**20


# --- what is exported ---------------------------------------------------------------------------------------


def logits(folder):
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(torch.arange(3, 40)[None]).logits


def test_weights_of_an_earlier_export_in_another_format_go(tiny, tmp_path):
    for name in ("adapter_model.safetensors", "model-00001-of-00002.safetensors", "mine.safetensors"):
        (tmp_path / name).touch()
    export(CommonArgs(output_dir=str(tmp_path)), tiny.accelerator, tiny.model, tiny.tokenizer)
    left = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert left == ["mine.safetensors", "model.safetensors"]


LORA = "--use_peft --lora_r 4 --lora_dropout 0.1".split()
KINDS = [
    ("peft", LORA),
    ("peft", [*LORA, "--use_dora", "--use_rslora"]),
    ("torch", ["--optim", "muon"]),
    ("bitsandbytes", ["--optim", "adamw_8bit"]),
]


@pytest.mark.parametrize(
    ("package", "kind"), [KINDS[0], *(pytest.param(*kind, marks=pytest.mark.slow) for kind in KINDS[1:])]
)
def test_adapters_and_other_optimizers_resume_exactly(package, kind, launch):
    pytest.importorskip(package)
    words = [*SFT, *kind, *"--max_steps 4 --save_steps 2 --save_total_limit 0 --learning_rate 1e-3".split()]
    words += "--lr_scheduler_type constant --warmup_steps 0".split()
    whole = launch("sft", *words, output="whole")
    assert train_metrics(whole)[-1]["loss"] < train_metrics(whole)[0]["loss"] - (
        0.5 if "--optim" in kind else 0
    )
    if package == "peft":
        assert not (whole / "checkpoint-2" / "model.safetensors").exists()
        assert all(
            "lora_" in name for name in load_file(whole / "checkpoint-2" / "adapter_model.safetensors")
        )
    launch("sft", *words, "--max_steps", "2", output="resumed")
    if "--optim" in kind:
        with pytest.raises(UserError, match=f"optim {kind[1]} -> adamw"):
            launch("sft", *words, "--optim", "adamw", output="resumed")
    resumed = launch("sft", *words, output="resumed")  # the complete run of two steps becomes one of four
    assert read_metrics(resumed) == read_metrics(whole)
    assert torch.equal(logits(resumed), logits(whole)) and torch.equal(
        logits(resumed), logits(resumed / "checkpoint-4")
    )


# --- in the scripts -----------------------------------------------------------------------------------------


SEARCH = [*SFT, *"--eval_steps 2 --learning_rate 1e-2 --warmup_steps 0 --lr_scheduler_type constant".split()]


def evaluations(output):
    return {row["step"]: row["eval_loss"] for row in read_metrics(output) if "eval_loss" in row}


def test_the_best_is_kept_exported_and_ends_early(launch, capsys):
    # The highest loss is taken for the best one: it is the first, and the run ends when it has fallen twice.
    words = (
        "--save_best max:eval_loss --early_stopping_patience 2 --save_total_limit 1 --max_steps 20".split()
    )
    output = launch("sft", *SEARCH, *words)
    said = capsys.readouterr().out
    assert (
        list(evaluations(output)) == [0, 2, 4, 6]
        and "step 6: the run ends: eval_loss has not improved" in said
    )
    assert names(output) == ["checkpoint-2", "checkpoint-6"] and "final model is that of" in said
    one, other = (
        load_file(output / "model.safetensors"),
        load_file(output / "checkpoint-2" / "model.safetensors"),
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["best"]["step"], summary["best"]["value"]) == (2, evaluations(output)[2])
    assert summary["final"]["eval_loss"] == evaluations(output)[2] and summary["final"]["step"] == 6
    left = {path.name for path in output.iterdir()}
    assert not left & {"optimizer.pt", "manifest.json", "trainer_state.json"} and "tokenizer.json" in left
    with pytest.raises(SystemExit):
        launch("sft", *SEARCH, *words)
    launch("sft", *SEARCH, *words, "--early_stopping_patience", "3")
    assert list(evaluations(output)) == [0, 2, 4, 6, 8] and names(output) == ["checkpoint-2", "checkpoint-6"]


def test_a_best_one_that_was_not_written_is_not_the_best(launch, monkeypatch):
    monkeypatch.setattr(torch, "save", torch_disk_full)
    output = launch("sft", *SEARCH, "--save_best", "max:eval_loss", "--max_steps", "4")
    assert (
        json.loads((output / "summary.json").read_text())["best"] is None
        and (output / "model.safetensors").exists()
    )


def test_a_merged_export_is_that_of_the_best_adapter(launch):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    words = "--use_peft --lora_r 4 --merge_lora --max_steps 4".split()
    # which falls before it rises: the best is not the last
    words += ["--save_best", "max:eval_mean_token_accuracy"]
    output = launch("sft", *SEARCH, *words)
    assert names(output)[0] == "checkpoint-2"
    base = AutoModelForCausalLM.from_pretrained("data/base_model")
    merged = peft.PeftModel.from_pretrained(base, output / "checkpoint-2").merge_and_unload()
    exported = load_file(output / "model.safetensors")
    known = merged.state_dict()
    assert all(torch.allclose(exported[name], known[name], atol=1e-6) for name in exported)


@pytest.mark.slow
def test_a_longer_run_equals_an_uninterrupted_one(launch):
    constant = [*SFT, *"--lr_scheduler_type constant --warmup_steps 0 --save_steps 2".split()]
    whole = launch("sft", *constant, output="whole")
    launch("sft", *constant, "--max_steps", "4", output="longer")
    longer = launch("sft", *constant, output="longer")
    assert read_metrics(longer) == read_metrics(whole)
    assert json.loads((longer / "summary.json").read_text())["final"]["step"] == 8
    with pytest.raises(UserError, match="holds a complete run"):
        launch("sft", *constant, "--max_steps", "3", output="longer")
    (longer / "summary.json").unlink()
    with pytest.raises(UserError, match="checkpoint-8 lies beyond step 3"):
        launch("sft", *constant, "--max_steps", "3", output="longer")
    launch("sft", *constant, output="longer")  # nothing is left but its end
    assert read_metrics(longer) == read_metrics(whole)
    assert json.loads((longer / "summary.json").read_text())["final"]["step"] == 8


def test_a_run_that_goes_on_with_other_libraries_says_so(launch, capsys):
    folder = launch("sft", *SFT, "--max_steps", "2", "--save_steps", "2")
    state = folder / "checkpoint-2" / "trainer_state.json"
    facts = json.loads(state.read_text())
    facts["versions"]["transformers"] = "5.1.0"
    state.write_text(json.dumps(facts))
    write_manifest(state.parent)
    launch("sft", *SFT, "--max_steps", "3", "--save_steps", "2")
    assert f"transformers was 5.1.0, now {transformers.__version__}: the run" in capsys.readouterr().out
