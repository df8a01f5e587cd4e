"""What a flag may be, what YAML may hold, and what a mistake in them says. (How they are read: tests/scripts/test_startup.py.)"""

import dataclasses
import importlib
import math
import re
import sys
from pathlib import Path
from types import NoneType
from typing import Literal, get_args, get_origin, get_type_hints

from common.args import CommonArgs, arg, first_definition, is_within
from common.command_line import parse_args
from common.errors import UserError
from common.flags import ALIASES, ELSEWHERE
from tests.conftest import run_script

import pytest

SCRIPTS = ("train_pretrain", "train_sft", "train_dpo", "train_grpo")
DEMO = {script: f"data/configs/{script.removeprefix('train_')}.yaml" for script in SCRIPTS}
STRANGE = ["-1", "0", "1", "nan", "inf", "-inf", "1e308", "-1e308", str(10**18), "0.5", "abc", ""]


def numeric_flags(args_class):
    """(name, int or float, how it is declared) of all flags that are numbers or lists of numbers."""
    for name, kind in get_type_hints(args_class).items():
        parts = [part for part in get_args(kind) if part is not NoneType]
        kind = parts[0] if parts and get_origin(kind) is not list else kind
        kind = get_args(kind)[0] if get_origin(kind) is list else kind
        if kind in (int, float):
            yield name, kind, first_definition(args_class, name)[1].metadata


ALL = [(script, name) for script in SCRIPTS for name, _, _ in numeric_flags(importlib.import_module(script).Args)]


def parse(script, *words):
    return parse_args(importlib.import_module(script).Args, DEMO[script], argv=["--config", DEMO[script], *words])


def inside(number, within):
    """`is_within`, by another way: on the endpoints as text."""
    for part in within.split(" or "):
        if part[0] not in "[(":
            found = number == float(part)
        else:
            low, high = map(float, part[1:-1].split(", "))
            found = low < number < high or (part[0] == "[" and number == low) or (part[-1] == "]" and number == high)
        if found:
            return True
    return False


def test_there_are_flags_to_walk_over():
    assert len(ALL) > 150 and {"learning_rate", "reward_weights", "num_kv_heads", "max_hours"} <= {name for _, name in ALL}


@pytest.mark.parametrize("script, name", ALL)
def test_a_number_says_beside_the_flag_what_it_may_be_and_others_are_refused_in_one_line(script, name):
    args_class = importlib.import_module(script).Args
    _, kind, metadata = next(flag for flag in numeric_flags(args_class) if flag[0] == name)
    assert metadata["within"], f"{name}: arg(..., within=...) says which numbers make sense"
    default = getattr(parse(script), name)
    for number in default if isinstance(default, list) else [default]:
        assert number is None or inside(number, metadata["within"])
    for word in STRANGE:
        try:
            number = kind(word)
        except ValueError:
            number = math.nan
        try:
            value = getattr(parse(script, f"--{name}={word}"), name)
        except UserError as error:
            refused = str(error).startswith((f"--{name} ", f"argument --{name}: "))
            others = not str(error).startswith("--") or "argument" in str(error)
            assert refused or (inside(number, metadata["within"]) and not others), f"--{name}={word}: {error}"
        else:
            assert inside(number, metadata["within"]) and value in (number, [number]) and not math.isinf(number)


@pytest.mark.parametrize(
    "number, within, expected",
    [
        (0, "[0, 1)", True),
        (1, "[0, 1)", False),
        (0, "(0, 1]", False),
        (1, "(0, 1]", True),
        (-1, "-1 or [1, 1e12]", True),
        (0, "-1 or [1, 1e12]", False),
        (7, "-1 or [1, 1e12]", True),
        (math.nan, "(-inf, inf)", False),
        (math.inf, "[0, inf)", False),
        (-math.inf, "(-inf, inf)", False),
        (1e308, "[0, inf)", True),
    ],
)
def test_intervals_are_read_as_in_mathematics(number, within, expected):
    assert is_within(number, within) is inside(number, within) is expected


def test_each_number_of_a_list_is_looked_at():
    with pytest.raises(UserError, match=re.escape("--reward_weights nan is out of range, which is (-inf, inf)")):
        parse("train_grpo", "--reward_funcs", "length:9", "length:8", "--reward_weights", "1", "nan")
    with pytest.raises(UserError, match=re.escape("--dataset_weights 0.0 is out of range, which is (0, inf)")):
        parse("train_sft", "--dataset_name", "a", "b", "--dataset_weights", "1", "0")


def test_a_flag_of_ones_own_need_not_say_what_it_may_be():
    @dataclasses.dataclass
    class Args(CommonArgs):
        learning_rate: float = 3.0  # another default of a shared one, of which the range stays
        gamma: float = 0.5

    assert parse_args(Args, "no.yaml", argv=["--dataset_name", "d", "--gamma", "-3"]).gamma == -3
    for words in (["--gamma", "nan"], ["--learning_rate", "-1"]):
        with pytest.raises(UserError, match="is out of range"):
            parse_args(Args, "no.yaml", argv=["--dataset_name", "d", *words])


@pytest.mark.parametrize(
    "text, expected",
    [
        ("seed: 1\nmax_steps: 2\nseed: 2\n", "seed stands there twice"),
        ("learning_rate: [1, 2]\n", "learning_rate takes one value, not a list"),
        ("learning_rate: {a: 1}\n", "learning_rate takes a value or a list, not a mapping"),
        ("dataset_name:\n  - path: a\n    path: b\n", "path stands there twice"),
        ("seed: 1\n\tmax_steps: 2\n", "cannot be read as YAML"),
        ("seed: true\n", "invalid int value: 'True'"),
        ("max_steps: 1.5\n", "invalid int value: '1.5'"),
        ("bf16: true\n", "unknown key bf16: the precision is Accelerate's"),
        ("3: 4\n", "unknown key 3"),
        ("- a\n", "expected `name: value` lines"),
        ("beta: .nan\n", "--beta nan is out of range"),
        (f"seed: {'9' * 5000}\n", "cannot be read as YAML"),
        (f"dataset_name: {'[' * 5000}{']' * 5000}\n", "cannot be read as YAML"),
    ],
)
def test_yaml_that_means_something_else_than_it_says_is_one_line(tmp_path, text, expected):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError, match=re.escape(expected)) as error:
        words = ["--config", str(tmp_path / "run.yaml"), "--model_name_or_path", "m"]
        parse_args(importlib.import_module("train_dpo").Args, DEMO["train_dpo"], argv=words)
    assert "\n" not in str(error.value)


def bare(script, *words):
    """As `parse`, without --config."""
    return parse_args(importlib.import_module(script).Args, DEMO[script], argv=list(words))


def test_a_date_in_a_source_is_text(tmp_path):
    (tmp_path / "run.yaml").write_text("dataset_name:\n  - {path: d, split: 2024-01-01}\n")
    assert bare("train_sft", "--config", str(tmp_path / "run.yaml")).dataset_name == ['{"path": "d", "split": "2024-01-01"}']


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(CommonArgs) if f.metadata["is_path"]] + ["config"])
def test_what_no_file_can_be_called_is_one_line_that_names_the_flag(name, tmp_path):
    for word in ("x" * 256, f"a/{'é' * 200}.jsonl", "x/" * 3000):
        with pytest.raises(UserError, match=f"--{name} .*… cannot be the name of a file or a folder"):
            bare("train_sft", f"--{name}", word)


def test_longer_patterns_and_sources_are_no_names():
    assert bare("train_grpo", "--dataset_name", "d", "--reward_funcs", f"regex:{'a|' * 200}b").reward_funcs[0].endswith("b")
    source = '{"path": "d", "columns": ["' + "a" * 300 + '=b"]}'
    assert bare("train_grpo", "--dataset_name", source, "--reward_funcs", "mine.py:f").dataset_name == [source]


def test_the_demos_weights_are_for_the_demos_rewards():
    """The README's own `--reward_funcs my.py:f`, and weights for the rewards that the demo has."""
    demo = bare("train_grpo")
    assert len(demo.reward_weights) == len(demo.reward_funcs) == 2
    mine = bare("train_grpo", "--reward_funcs", "my.py:f")
    assert (mine.reward_funcs, mine.reward_weights) == (["my.py:f"], None)
    assert bare("train_grpo", "--reward_funcs=my.py:f").reward_weights is None
    assert bare("train_grpo", "--reward_weights", "0", "2").reward_weights == [0, 2]
    with pytest.raises(UserError, match="--reward_weights: 3 for 2 --reward_funcs"):
        bare("train_grpo", "--reward_weights", "1", "2", "3")


@pytest.mark.slow
def test_threads_that_never_end_are_not_waited_for_and_libraries_warnings_are_theirs(tmp_path):
    code = """import threading, time, warnings, common.command_line as c
leave = c._leave_within
c._leave_within = lambda seconds: leave(0.5)
def main(args):
    warnings.warn("of a library", FutureWarning)
    threading.Thread(target=time.sleep, args=(60,)).start()
c.launch(main, c.CommonArgs, "no.yaml")"""
    run = run_script([sys.executable, "-c", code, "--dataset_name", "d"], timeout=50)
    assert (run.returncode, run.stderr) == (0, "") and "a thread of this process still runs" in run.stdout


@pytest.mark.parametrize("name", ALIASES)
def test_a_flag_by_another_name_is_proposed_where_the_script_has_it(name):
    own = {script: get_type_hints(importlib.import_module(script).Args) for script in SCRIPTS}
    assert all(any(flag in flags for flags in own.values()) for flag in ALIASES[name])
    for script, flags in own.items():
        assert name not in flags
        wanted = next((flag for flag in ALIASES[name] if flag in flags), None)
        with pytest.raises(UserError, match=f"did you mean --{wanted}\\?$" if wanted else "unknown flag"):
            parse(script, f"--{name}", "1")


def test_a_flag_that_does_nothing_without_another_one_is_said_and_with_it_is_not(capsys):
    idle = ["--lora_r", "64", "--use_rslora", "--lora_target_modules", "q_proj", "v_proj", "--lr_decay_fraction", "0.5"]
    parse("train_sft", "--dataset_name", "x", *idle)
    said = capsys.readouterr().out
    for line in (
        "--lora_r 64 has no effect without --use_peft",
        "--use_rslora has no effect without --use_peft",
        "--lora_target_modules q_proj v_proj has no effect without --use_peft",
        "--lr_decay_fraction 0.5 has no effect without --lr_scheduler_type wsd",
    ):
        assert f"{line}\n" in said
    parse("train_sft", "--dataset_name", "x", *idle, "--use_peft", "--lr_scheduler_type", "wsd")
    assert "no effect" not in capsys.readouterr().out
    for script in SCRIPTS:
        parse(script)
    assert "no effect" not in capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_flag_needs_is_a_flag(script):
    fields = dataclasses.fields(importlib.import_module(script).Args)
    needs = [need for f in fields for need in (f.metadata.get("needs") or "").split(", ") if need]
    assert len(needs) > 20
    assert {need.removeprefix("no ").split("=")[0] for need in needs} <= {f.name for f in fields}


def test_a_flag_of_a_script_beside_one_that_makes_it_idle_is_told(capsys):
    parse("train_pretrain", "--dataset_name", "x", "--model_name_or_path", "y", "--hidden_size", "64", "--num_layers", "2")
    said = capsys.readouterr().out
    assert "--hidden_size 64 has no effect with --model_name_or_path\n" in said and "--num_layers 2 has no effect" in said
    parse("train_pretrain", "--dataset_name", "x", "--config_name", "y", "--num_heads", "2")
    assert "--num_heads 2 has no effect with --config_name\n" in capsys.readouterr().out
    parse(
        "train_pretrain", "--dataset_name", "x", "--tokenizer_name", "y", "--vocab_size", "9", "--moe_intermediate_size", "8"
    )
    said = capsys.readouterr().out
    assert "--vocab_size 9 has no effect with --tokenizer_name\n" in said
    assert "--moe_intermediate_size 8 has no effect without --num_experts\n" in said
    parse("train_dpo", "--dataset_name", "x", "--simpo_gamma", "1")
    assert "--simpo_gamma 1.0 has no effect without --loss_type simpo\n" in capsys.readouterr().out
    parse("train_dpo", "--dataset_name", "x", "--simpo_gamma", "1", "--loss_type", "sigmoid", "simpo")
    parse("train_pretrain", "--dataset_name", "x", "--hidden_size", "64", "--vocab_size", "9")
    assert "no effect" not in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["output_dir", "dataset_name", "run_name"])
def test_bytes_that_are_no_utf8_are_refused_before_a_file_has_to_hold_them(flag):
    with pytest.raises(
        UserError, match=rf"^--{flag} .*is no UTF-8 text: rename what is called so, or start with PYTHONUTF8=1"
    ):
        parse("train_sft", f"--{flag}", b"/tmp/\xe4".decode("utf-8", "surrogateescape"))


@pytest.mark.parametrize("words", [[], ["--model_name_or_path", "x"]])
def test_in_another_folder_it_is_the_demo_that_is_missed_and_no_config(words, tmp_path, monkeypatch):
    args_class = importlib.import_module("train_sft").Args
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^no --dataset_name, and the embedded demo, data/configs/sft.yaml, is not here"):
        parse_args(args_class, DEMO["train_sft"], argv=words)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_flag_of_other_libraries_says_what_there_is_here_and_that_exists(name):
    with pytest.raises(UserError, match=f"unknown flag --{name}") as error:
        parse("train_sft", f"--{name}", "x")
    said = str(error.value)
    flags = {flag for script in SCRIPTS for flag in get_type_hints(importlib.import_module(script).Args)}
    proposed = set(re.findall(r"--(\w+)", said)) - {name}
    assert proposed <= flags | {"mixed_precision", "config_file", "num_processes"} and name not in flags
    for path in re.findall(r"\S+\.yaml", said):
        assert open(path).read()


@pytest.mark.parametrize(
    "variables",
    [
        {"ACCELERATE_MIXED_PRECISION": "int3"},
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"},
    ],
)
def test_an_environment_that_accelerate_cannot_use_is_one_line(variables, tmp_path):
    words = ["--max_steps", "1", "--output_dir", str(tmp_path / "out")]
    run = run_script([sys.executable, "train_sft.py", *words], **variables)
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert run.stderr.splitlines()[-1].startswith("error: ")


@dataclasses.dataclass
class Odd(CommonArgs):
    share: float = arg(0.5, help="keep 50% of the rows, or 100 %% of them")
    yes: Literal[True, False] = arg(True)
    each: list[bool] = arg([True])
    offset: float = arg(0.0)
    offsets: list[float] = arg([0.0])


def odd(*words):
    return parse_args(Odd, "no.yaml", argv=["--dataset_name", "d", *words])


def test_flags_of_ones_own_of_every_kind(capsys, tmp_path):
    assert odd("--yes", "False").yes is False and odd("--each", "false", "true").each == [False, True]
    assert odd("--offset", "-1e-3", "--offsets", "1", "-2.5E+1", "-.5").offsets == [1, -25, -0.5]
    (tmp_path / "run.yaml").write_text("offset: -1.0e-5\noffsets: [-1.0e-5, 1]\n")
    assert odd("--config", str(tmp_path / "run.yaml")).offset == -1e-5
    with pytest.raises(SystemExit):
        odd("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "keep 50% of the rows, or 100 % of them (default: 0.5)" in shown


@pytest.mark.parametrize("name, kind", [("no_strict_data", bool), ("config", str), ("help", str), ("where", Path)])
def test_a_flag_that_cannot_be_is_named(name, kind):
    made = dataclasses.make_dataclass("Mine", [(name, kind, None)], bases=(CommonArgs,))
    with pytest.raises(TypeError, match=f"Mine.{name}: "):
        parse_args(made, "no.yaml", argv=["--dataset_name", "d"])


def test_the_flag_that_was_given_is_the_one_that_is_blamed(launch, tmp_path):
    words = ["--config", DEMO["train_sft"], "--model_name_or_path", "data/base_model", "--max_steps", "1"]
    with pytest.raises(UserError, match="--eval_reward_funcs exact_nmber: did you mean exact_number"):
        launch("sft", *words, "--eval_reward_funcs", "exact_nmber")
    with pytest.raises(UserError, match="^/nowhere.jsonl: there is no such file"):
        launch("sft", *words, "--eval_prompts", "/nowhere.jsonl")


FEW = {
    "pretrain": "--max_train_samples 40 --max_length 32 --hidden_size 16 --num_layers 1 --num_heads 2 --vocab_size 300",
    "sft": "--max_train_samples 12 --max_length 64",
    "dpo": "--max_train_samples 12 --max_length 64 --precompute_ref_log_probs false",
    "grpo": "--max_train_samples 12 --max_completion_length 4 --num_generations 2 --beta 0.01",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_what_is_in_its_range_trains_or_ends_in_one_line(script, launch, tmp_path):
    """Each numeric flag at its strangest values, by itself: no traceback, and nothing exported that is no model."""
    from transformers import AutoModelForCausalLM

    stage, ran = script.removeprefix("train_"), 0
    words = [*FEW[stage].split(), "--max_steps", "2", "--eval_steps", "1", "--max_eval_samples", "2", "--save_steps", "1"]
    words += ["--eval_max_new_tokens", "4", "--logging_steps", "1", "--per_device_train_batch_size", "2"]
    words += [] if stage == "pretrain" else ["--model_name_or_path", "data/base_model"]
    for number, (name, _, _) in enumerate(numeric_flags(importlib.import_module(script).Args)):
        for word in ("-1", "0", "1e308"):  # the others of STRANGE are out of every range, or usual
            try:
                parse(script, f"--{name}={word}")
            except UserError:
                continue
            output = f"{number}-{ran}"
            try:
                launch(stage, "--config", DEMO[script], *words, f"--{name}={word}", output=output)
            except UserError as error:
                assert "\n" not in str(error)
            else:
                lm = AutoModelForCausalLM.from_pretrained(tmp_path / output)
                assert all(p.isfinite().all() for p in lm.parameters()), f"--{name}={word}"
            ran += 1
    assert ran > 20
