"""How arguments are read, that help and mistakes answer soon, and that a run imports nothing that it does not need."""

import json
import os
import re
import resource
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Literal, Optional, get_args

from common.args import CommonArgs, arg
from common.command_line import launch, parse_args
from common.errors import UserError
from tests.conftest import ROOT, run_script

import pytest
import yaml


@dataclass
class Args(CommonArgs):
    word: str = arg("a", help="100 %% of it")
    count: int = arg(3, help="x")
    rate: float = arg(0.5, help="x")
    on: bool = arg(True, help="x")
    off: bool = arg(False, help="x")
    maybe: Optional[bool] = arg(None, help="x")  # noqa: UP045
    kind: Literal["one", "two"] = arg("one", help="x")
    level: Literal[1, 2] | None = arg(None, help="x")
    words: list[str] = arg(["a", "b"], help="x")
    rates: list[float] | None = arg(None, help="x")


def parsed(*words):
    return parse_args(Args, "nowhere.yaml", argv=["--dataset_name", "d", *words])


@pytest.mark.parametrize("script", ["train_pretrain", "train_sft", "train_dpo", "train_grpo"])
@pytest.mark.parametrize(
    "words", [["--help"], ["--learning_rat", "1"], ["--lr_scheduler_type", "up"], ["--config", "no.yaml"]]
)
def test_help_and_mistakes_answer_in_less_than_three_seconds(script, words):
    """Of the processor; the least of a few, as other work on the machine makes caches cold."""
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run = subprocess.run([sys.executable, f"{script}.py", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if words == ["--help"]:
            assert run.returncode == 0 and not run.stderr
            assert "--learning_rate FLOAT" in run.stdout and "{cosine,linear,constant,wsd}" in run.stdout
        else:
            assert run.returncode == 1 and not run.stdout
            assert len(run.stderr.splitlines()) == 1 and run.stderr.startswith("error: ")
        if seconds < 3:
            return
    raise AssertionError(f"{seconds:.1f} s")


def test_a_run_on_a_file_imports_nothing_that_it_does_not_need_before_its_first_step(tmp_path):
    code = """
import os, sys
sys.path.insert(0, os.getcwd())
import train_sft
from common.command_line import launch
from common.run.retry import Retry
def stop(*args):
    print("IMPORTED", *{name.split(".")[0] for name in sys.modules})
    sys.stdout.flush()
    os._exit(0)
Retry._seed_dropout = stop
launch(train_sft.main, train_sft.Args, "nowhere.yaml")
"""
    (tmp_path / "rows.jsonl").write_text('{"instruction": "What is 1+1?", "output": "Answer: 2"}\n' * 8)
    words = ["--model_name_or_path", "data/base_model", "--dataset_name", str(tmp_path / "rows.jsonl"), "--eval_steps", "0"]
    words += ["--output_dir", str(tmp_path / "out"), "--dataset_cache_dir", str(tmp_path / "cache")]
    run = run_script([sys.executable, "-c", code, *words])
    assert run.returncode == 0, run.stderr[-3000:]
    imported = set(re.search("IMPORTED (.*)", run.stdout)[1].split())
    unneeded = {"datasets", "pyarrow", "pandas", "matplotlib", "peft", "sklearn", "scipy", "tensorboard", "torchvision"}
    assert "torch" in imported and not imported & unneeded


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--word=--x=1", "word", "--x=1"),
        ("--word ", "word", ""),
        ("--count -1", "count", -1),
        ("--rate 1e-4", "rate", 1e-4),
        ("--rate -1", "rate", -1.0),
        ("--off", "off", True),
        ("--off true", "off", True),
        ("--off=True", "off", True),
        ("--on false", "on", False),
        ("--on 0", "on", False),
        ("--no_on", "on", False),
        ("--no-on", "on", False),
        ("--off --no_off", "off", False),
        ("--maybe", "maybe", True),
        ("--maybe no", "maybe", False),
        ("--kind two", "kind", "two"),
        ("--level 2", "level", 2),
        ("--words c", "words", ["c"]),
        ("--words c d --word a", "words", ["c", "d"]),
        ("--rates 1 2.5", "rates", [1.0, 2.5]),
        ("--learning-rate 1", "learning_rate", 1.0),
        ("--learning-rate=1", "learning_rate", 1.0),
        ("--count 1 --count 2", "count", 2),
        ("--word a-b", "word", "a-b"),
    ],
)
def test_a_flag_becomes_a_value_of_its_type(words, name, value):
    args = parsed(*words.split(" "))
    assert getattr(args, name) == value and type(getattr(args, name)) is type(value)
    fresh = Args(dataset_name=["d"])
    assert {k: v for k, v in vars(args).items() if k != name} == {k: v for k, v in vars(fresh).items() if k != name}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--count 1.5", "--count: invalid int value: '1.5'"),
        ("--rate fast", "--rate: invalid float value: 'fast'"),
        ("--on perhaps", "--on: true or false, not perhaps"),
        ("--kind three", "--kind: invalid choice: 'three'"),
        ("--level 3", "--level: invalid choice: 3"),
        ("--rates", "--rates: expected at least one argument"),
        ("--word", "--word: expected one argument"),
        ("--wor a", "unknown flag --wor: did you mean --word"),
        ("--word a b", "unknown flag b"),
    ],
)
def test_a_wrong_flag_is_one_line(words, message):
    with pytest.raises(UserError) as error:
        parsed(*words.split(" "))
    assert message in str(error.value)


def test_a_yaml_file_goes_through_the_same_conversion_and_yields_to_the_command_line(tmp_path):
    values = {"rate": "1e-4", "on": False, "off": True, "word": "-x y", "words": ["1", "b c"], "level": 2, "count": 7}
    sources = ["a.jsonl", {"name": "b.jsonl", "columns": {"prompt": "question"}}]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values | {"dataset_name": sources, "rates": None}))
    (tmp_path / "run.yaml").write_text((tmp_path / "run.yaml").read_text().replace("'1e-4'", "1e-4"))  # a string in YAML 1.1
    args = parse_args(Args, "nowhere.yaml", argv=["--count", "8", "--config", str(tmp_path / "run.yaml")])
    assert (args.rate, args.on, args.off, args.word, args.words) == (1e-4, False, True, "-x y", ["1", "b c"])
    assert (args.level, args.count, args.rates) == (2, 8, None)
    assert args.dataset_name[0] == "a.jsonl" and json.loads(args.dataset_name[1]) == sources[1]
    (tmp_path / "run.yaml").write_text("kind: three\n")
    with pytest.raises(UserError, match="--kind: invalid choice: 'three'"):
        parse_args(Args, "nowhere.yaml", argv=[f"--config={tmp_path / 'run.yaml'}"])


def test_the_choices_are_those_that_common_knows():
    import train_dpo
    import train_grpo
    import train_sft
    from common.data.tokens import TRAIN_ON
    from common.losses import DPO_LOSS_TYPES, GRPO_LOSS_TYPES
    from common.model.load import DTYPES
    from common.model.optimizer import SCHEDULES

    def choices(args_class, name):
        return get_args(next(f.type for f in args_class.__dataclass_fields__.values() if f.name == name))

    assert get_args(*choices(train_dpo.Args, "loss_type")) == DPO_LOSS_TYPES  # one or several
    assert choices(train_grpo.Args, "loss_type") == GRPO_LOSS_TYPES
    assert choices(train_sft.Args, "train_on") == TRAIN_ON
    assert choices(train_sft.Args, "dtype") == tuple(DTYPES)
    assert choices(train_grpo.Args, "lr_scheduler_type") == choices(CommonArgs, "lr_scheduler_type")
    assert set(choices(CommonArgs, "lr_scheduler_type")) == set(SCHEDULES)


def test_a_mistake_found_in_main_is_one_line(capsys, monkeypatch):
    def main(args):
        raise UserError("what is wrong")

    left = []
    monkeypatch.setattr(os, "_exit", lambda code: left.append(code))
    monkeypatch.setattr(sys, "argv", ["train.py", "--dataset_name", "d"])
    launch(main, CommonArgs, "nowhere.yaml")
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())  # which would end this process
    assert left[0] == 1 and capsys.readouterr().err == "error: what is wrong\n"
