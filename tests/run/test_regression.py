"""A suite within a run: every stage answers it, training does not notice, and what is written stands there once."""

import json
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

from common.args import CommonArgs
from common.errors import UserError
from common.run import regression as module
from common.sampling.suite import Result
from tests.conftest import EXPERIMENTS, demo, read_metrics, run_script, teacher
from tests.run.test_fsdp import LAUNCHER
from tests.run.test_resume import Stop, stop_after_save
from tests.scripts.test_equivalence import free_port

import pytest
import torch
from safetensors.torch import load_file

TINY = ["--max_steps", "6", "--max_train_samples", "16", "--per_device_train_batch_size", "2", "--logging_steps", "1"]
TINY += [
    "--model_name_or_path",
    "data/base_model",
    "--max_eval_samples",
    "2",
    "--eval_steps",
    "4",
    "--eval_max_new_tokens",
    "4",
]
ROWS = [
    {"id": "short", "group": "ends", "messages": [{"role": "user", "content": "Is 4 even or odd?"}], "max_tokens": 3},
    {"id": "text", "group": "words", "prompt": "Tom has 3 nuts. He", "regex": "[a-z]"},
    {"id": "sum", "group": "words", "messages": [{"role": "user", "content": "What is 2+2?"}], "number": 4},
    {"id": "none", "group": "words", "prompt": "Question: What is 7-3?\n", "not_contains": ["Working", "Answer"]},
]


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "suite.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    few = {"prompt": ROWS[2]["messages"], "answer": "4", "kind": "sym", "steps": 1}
    (tmp_path / "few.jsonl").write_text(json.dumps(few) + "\n")
    return str(path)


def lines(folder):
    return [json.loads(line) for line in (folder / "regression.jsonl").read_text().splitlines()]


def words(stage, suite, *more):
    prompts = suite.replace("suite.jsonl", "few.jsonl")
    return ["--config", demo(stage), *TINY, "--eval_prompts", prompts, "--regression_suite", suite, *more]


@pytest.mark.slow
def test_training_does_not_notice_it_and_its_counts_are_metrics(launch, suite, capsys):
    drawn = ["--regression_samples", "3", "--regression_temperature", "1", "--regression_pass_at", "2"]
    plain = launch("sft", *words("sft", suite)[:-2], output="plain")
    with_suite = launch("sft", *words("sft", suite, "--regression_steps", "3", *drawn), output="with")
    rows = read_metrics(with_suite)
    assert [row for row in rows if "eval_regression/all" not in row] == read_metrics(plain)
    a, b = (load_file(folder / "model.safetensors") for folder in (plain, with_suite))
    assert all(torch.equal(a[name], b[name]) for name in a)
    found = lines(with_suite)
    assert [line["step"] for line in found] == [0, 3, 6]
    for line, row in zip(found, [row for row in rows if "eval_regression/all" in row], strict=True):
        assert (line["samples"], line["pass_at"], line["temperature"], line["max_new_tokens"]) == (3, 2, 1.0, 4)
        assert row == {"step": line["step"]} | {f"eval_regression/{k}": v["rate"] for k, v in line["groups"].items()}
        assert {name: group["total"] for name, group in line["groups"].items()} == {"all": 4, "ends": 1, "words": 3}
        assert line["cases"].keys() == {row["id"] for row in ROWS} and line["failed"].keys() <= line["cases"].keys()
        assert line["groups"]["all"]["passed"] == pytest.approx(sum(case["rate"] for case in line["cases"].values()))
    assert found[0]["turned"] == {"since_last": None, "since_base": None}
    assert [line["turned"]["since_last"]["step"] for line in found[1:]] == [0, 3]
    assert [line["turned"]["since_base"]["step"] for line in found[1:]] == [0, 0]
    out = capsys.readouterr().out
    assert "regression suite: 4 cases in 2 groups (ends, words)" in out and "regression.jsonl, summary.json" in out


def stopped_at_3(launch, monkeypatch, arguments):
    """A run that is stopped by its save at step 3, and gone on with."""
    with monkeypatch.context() as patch:
        stop_after_save(patch, 3)
        with pytest.raises(Stop):
            launch("sft", *arguments, output="stopped")
    return launch("sft", *arguments, output="stopped")


BEST = ["--regression_steps", "2", "--save_steps", "3", "--save_best", "eval_regression/words", "--save_total_limit", "0"]


def test_a_resumed_run_writes_no_line_twice_and_a_group_chooses_the_best_checkpoint(launch, suite, monkeypatch):
    stopped = stopped_at_3(launch, monkeypatch, words("sft", suite, *BEST, "--eval_steps", "0"))
    found = lines(stopped)
    assert [line["step"] for line in found] == [0, 2, 4, 6]
    assert [line["turned"]["since_last"]["step"] for line in found[1:]] == [0, 2, 4]
    best = json.loads((stopped / "summary.json").read_text())["best"]
    rates = {line["step"]: line["groups"]["words"]["rate"] for line in found[1:]}
    assert best["step"] == max(rates, key=rates.get) and best["value"] == rates[best["step"]] and best["higher_is_better"]


@pytest.mark.slow
def test_a_resumed_run_writes_what_an_uninterrupted_one_does(launch, suite, monkeypatch):
    whole = launch("sft", *words("sft", suite, *BEST), output="whole")
    stopped = stopped_at_3(launch, monkeypatch, words("sft", suite, *BEST))
    assert lines(stopped) == lines(whole) and read_metrics(stopped) == read_metrics(whole)
    one, other = (json.loads((folder / "summary.json").read_text())["best"] for folder in (whole, stopped))
    assert one == other


def test_what_cannot_be_is_said_at_the_start(launch, suite, tmp_path):
    with pytest.raises(UserError, match="--save_best eval_regression/words: there is no --regression_suite"):
        launch("sft", "--config", demo("sft"), *TINY, "--save_best", "eval_regression/words")
    with pytest.raises(UserError, match="--regression_samples: there is no --regression_suite"):
        launch("sft", "--config", demo("sft"), *TINY, "--regression_samples", "3")
    with pytest.raises(UserError, match="suite.jsonl:1: messages: the tokenizer has no chat template"):
        launch(
            "pretrain",
            *words(
                "pretrain",
                suite,
                "--dry_run",
                "--eval_prompts",
                "data/prompts/base_test.jsonl",
                "--model_name_or_path",
                without_template(tmp_path),
            ),
        )
    odd = ["--save_best", "eval_regression/all", "--num_iterations", "2", "--regression_steps", "3"]
    with pytest.raises(UserError, match="--regression_steps has to be a multiple of 2"):
        launch("grpo", *words("grpo", suite, *odd, "--per_device_train_batch_size", "8"))
    with pytest.raises(UserError, match="a sequence may have .* lower max_tokens or the prompts of --regression_suite"):
        launch("sft", *words("sft", suite, "--eval_max_new_tokens", "100000", "--dry_run"))


def without_template(tmp_path):
    folder = shutil.copytree("data/base_model", tmp_path / "plain")
    for file in folder.glob("chat_template*"):
        file.unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_fall_is_told_once(suite, monkeypatch, capsys):
    """Eight cases pass, then fail twice, then pass: McNemar's p is 1/256, and 1/64 for the group of six."""
    told, written, measured = [], [], []
    part = module.Regression(CommonArgs(regression_suite=suite, regression_steps=2), SimpleNamespace(device="cpu"))
    cases = [replace(case, id=f"{case.id}{i}") for case in part.suite.cases for i in (1, 2)]
    metrics = SimpleNamespace(
        append=lambda file, rows: written.extend(rows), log_eval=lambda step, values, samples, show: measured.append(values)
    )
    alerts = SimpleNamespace(send=lambda event, text: told.append((event, text)))
    for step, rate in ((0, 1.0), (2, 0.0), (4, 0.0), (6, 1.0)):
        results = [Result(case, rate, "" if rate else "no", "text") for case in cases]
        monkeypatch.setattr(module, "run_suite", lambda *_, results=results: results)
        assert part.run(None, step, metrics, alerts) == dict.fromkeys(part_names(), rate)
        kept, part = part, module.Regression(part.args, part.accelerator)  # as after a resumption
        part.restore(json.loads(json.dumps(kept.state())))
    assert told == [
        ("regression", "step 2: all has fallen since step 0, to 0 of 8 (p = 0.0039)"),
        ("regression", "step 2: words has fallen since step 0, to 0 of 6 (p = 0.016)"),
    ]
    said = capsys.readouterr().out
    assert "fell since step 0: short1, short2" in said and said.count("has fallen") == 2
    assert [len(line["turned"]["since_last"]["fell"]) for line in written[1:]] == [8, 0, 0]
    assert [len(line["turned"]["since_base"]["fell"]) for line in written[1:]] == [8, 8, 0]
    assert [len(line["turned"]["since_last"]["rose"]) for line in written[1:]] == [0, 0, 8]
    assert [len(line["failed"]) for line in written] == [0, 8, 8, 0] and len(measured) == 4


def part_names():
    return [f"eval_regression/{name}" for name in ("all", "ends", "words")]


@pytest.mark.slow
def test_a_checkpoint_alone_knows_how_the_cases_went(launch, suite):
    """In a folder that has no lines of its own."""
    more = ["--regression_steps", "2", "--save_steps", "3", "--save_total_limit", "0"]
    whole = launch("sft", *words("sft", suite, *more), output="whole")
    more += ["--resume_from_checkpoint", whole / "checkpoint-3"]
    assert lines(launch("sft", *words("sft", suite, *more), output="elsewhere")) == lines(whole)[2:]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["pretrain", "dpo", "grpo", *EXPERIMENTS])
def test_every_stage_has_it_without_a_line_of_its_own(launch, suite, stage, monkeypatch):
    more = ["--regression_steps", "2", "--save_steps", "2"]
    more += ["--per_device_train_batch_size", "16" if stage in ("grpo", "tools") else "2"]
    more += ["--teacher_model_name_or_path", teacher()] if stage == "distill" else []
    whole = launch(stage, *words(stage, suite, *more), output="whole")
    assert [line["step"] for line in lines(whole)] == [0, 2, 4, 6]
    with monkeypatch.context() as patch:
        stop_after_save(patch, 4)
        with pytest.raises(Stop):
            launch(stage, *words(stage, suite, *more), output="stopped")
    assert lines(launch(stage, *words(stage, suite, *more), output="stopped")) == lines(whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("cases", [1, 4])
def test_two_processes_answer_as_one_does(launch, suite, tmp_path, token_cache, kind, cases):
    """Also where the second one has no case; nothing else is evaluated, and a checkpoint is saved right after it."""
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:cases]))
    more = words("sft", str(tmp_path / "some.jsonl"), "--eval_steps", "0", "--regression_steps", "2", "--save_steps", "2")
    more += ["--regression_samples", "2", "--regression_temperature", "1", "--max_steps", "4"]
    one = lines(launch("sft", *more, "--per_device_train_batch_size", "4", output="one"))
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    if kind == "fsdp2":
        command += [str(tmp_path / "launcher.py"), "sft", "no"]
    else:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu_ddp.yaml"]
        command += ["--main_process_port", str(free_port()), "train_sft.py"]
    command += [*more, "--output_dir", str(tmp_path / "two"), "--dataset_cache_dir", str(token_cache)]
    run = run_script(command, timeout=150)
    assert run.returncode == 0, run.stderr[-3000:]
    assert lines(tmp_path / "two") == one and (tmp_path / "two" / "checkpoint-2").is_dir()
