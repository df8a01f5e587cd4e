"""What a flag, a variable and a line of YAML may be, which of them counts, and what a mistake in them
names."""

import dataclasses
import importlib
import json
import math
import shutil
from types import NoneType
from typing import Literal, Optional, get_args, get_origin, get_type_hints

from common.args import CommonArgs, arg, declared, is_within
from common.command_line import launch, parse_args
from common.data.chat_template import read_chat_template
from common.errors import UserError
import pytest
import yaml

from tests.conftest import DEFAULT_MODEL, ROOT, demo

SCRIPTS = ("train_pretrain", "train_sft", "train_dpo", "train_grpo")
STRANGE = ["-1", "0", "1", "nan", "inf", "-inf", "1e308", "-1e308", str(10**18), "0.5", "abc", ""]
DATA = ["--dataset_name", "d.jsonl"]


@dataclasses.dataclass
class Args(CommonArgs):
    learning_rate: float = 3.0  # another default of a shared one, of which the range stays
    word: str = arg("a", help="keep 50% of it")
    count: int = arg(3)
    rate: float = 0.5
    on: bool = arg(True)
    off: bool = arg(False)
    maybe: Optional[bool] = arg(None)  # noqa: UP045
    kind: Literal["one", "two"] = arg("one")
    level: Literal[1, 2] | None = arg(None)
    words: list[str] = arg(["a", "b"])
    rates: list[float] | None = arg(None)


def args_of(script):
    return importlib.import_module(script).Args


def parse(*words, script="train_sft"):
    """As a user starts a script; without words it is the demo."""
    return parse_args(args_of(script), demo(script.removeprefix("train_")), argv=list(words))


def own(*words):
    return parse_args(Args, "no.yaml", argv=[*DATA, *words])


def refused(call, *words):
    """The one line of a call that a mistake ends."""
    with pytest.raises(UserError) as error:
        call(*words)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- numbers ------------------------------------------------------------------------------------------------


def numeric_flags(args_class):
    """(name, int or float) of all flags that are numbers or lists of numbers."""
    for name, kind in get_type_hints(args_class).items():
        parts = [part for part in get_args(kind) if part is not NoneType]
        kind = parts[0] if parts and get_origin(kind) is not list else kind
        kind = get_args(kind)[0] if get_origin(kind) is list else kind
        if kind in (int, float):
            yield name, kind


@pytest.mark.parametrize("script", SCRIPTS)
def test_numbers_outside_of_their_range_are_refused(script):
    shared = set() if script == "train_sft" else {name for name, _ in numeric_flags(CommonArgs)}
    flags = [flag for flag in numeric_flags(args_of(script)) if flag[0] not in shared]
    assert len(flags) > (2 if shared else 25)
    defaults = parse(*DATA, script=script)
    for name, kind in flags:
        within = declared(args_of(script), name)["within"]
        assert within, f"{name}: arg(..., within=...) says which numbers make sense"
        default = getattr(defaults, name)
        for number in default if isinstance(default, list) else [default]:
            assert number is None or is_within(number, within)
        for word in STRANGE:
            try:
                number = kind(word)
            except ValueError:
                number = math.nan
            words = ["--config", demo(script.removeprefix("train_")), f"--{name}={word}"]
            try:
                value = getattr(parse(*words, script=script), name)
            except UserError as error:
                assert (
                    f"--{name} " in str(error) or f"--{name}:" in str(error) or is_within(number, within)
                ), error
            else:
                assert is_within(number, within) and value in (number, [number]) and not math.isinf(number)


@pytest.mark.parametrize(
    ("within", "inside"),
    [
        ("[0, 1)", [0, 0.5]),
        ("-1 or [1, 1e12]", [-1, 1, 7]),
        ("(-inf, inf)", [-1, 0, 0.5, 1, 7, 1e308]),
        ("[0, inf)", [0, 0.5, 1, 7, 1e308]),
    ],
)
def test_intervals_are_those_of_mathematics(within, inside):
    numbers = [-1, 0, 0.5, 1, 7, 1e308, math.nan, math.inf, -math.inf]
    assert [number for number in numbers if is_within(number, within)] == inside


# --- flags --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--word=--x=1", "word", "--x=1"),
        ("--word ", "word", ""),
        ("--rate -1e-3", "rate", -1e-3),
        ("--on false", "on", False),
        ("--maybe", "maybe", True),
        ("--words c d --word a", "words", ["c", "d"]),
        ("--rates 1 -2.5E+1 -.5", "rates", [1.0, -25.0, -0.5]),
    ],
)
def test_a_flag_becomes_a_value_of_its_type(words, name, value):
    args = own(*words.split(" "))
    assert getattr(args, name) == value and type(getattr(args, name)) is type(value)
    fresh = vars(Args(dataset_name=["d.jsonl"]))
    assert {k: v for k, v in vars(args).items() if k != name} == {k: v for k, v in fresh.items() if k != name}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--count 1.5", "--count"),
        ("--on perhaps", "--on"),
        ("--kind three", "--kind"),
        ("--word", "--word"),
        ("--wor a", "--word?"),
        ("--word a b", "unknown flag b"),
        ("--learning-rate 1", "--learning_rate"),
        ("--config nowhere.yaml", "--config nowhere.yaml: [Errno 2]"),
    ],
)
def test_a_wrong_flag_is_named(words, named):
    assert named in refused(own, *words.split(" "))


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_flag_needs_is_a_flag(script):
    names = {f.name for f in dataclasses.fields(args_of(script))}
    needs = [
        need
        for name in names
        for need in (declared(args_of(script), name)["needs"] or "").split(", ")
        if need
    ]
    assert len(needs) > 5 and {need.removeprefix("no ").split("=")[0] for need in needs} <= names


@pytest.mark.parametrize(
    ("words", "script", "value"),
    [
        ("--scale_rewards False", "train_grpo", "none"),
        ("--scale_rewards false", "train_grpo", "none"),
        ("--optim adamw_torch_fused", "train_sft", "adamw"),
        ("--optim adamw_bnb_8bit", "train_sft", "adamw_8bit"),
        ("--lr_scheduler_type cosine_with_min_lr", "train_sft", "cosine"),
        ("--lr_scheduler_type warmup_stable_decay", "train_sft", "wsd"),
        ("--packing bfd", "train_sft", True),
        ("--gradient_checkpointing unsloth", "train_sft", True),
        ("--loss_type chunked_nll", "train_sft", "nll"),
    ],
)
def test_values_of_other_trainers_are_accepted(words, script, value):
    name, word = words.removeprefix("--").split()
    assert getattr(parse(f"--{name}", word, script=script), name) == value


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--eval_steps 0.1", "share"),
        ("--optim adafactor", "muon"),
        ("--lr_scheduler_type inverse_sqrt", "wsd"),
        ("--lr_scheduler_kwargs {}", "--min_lr_ratio"),
        ("--eos_token x", "chat template"),
        ("--eval_accumulation_steps 2", "without a setting"),
        ("--optim_target_modules x", "not offered"),
        ("--bf16", "single_gpu.yaml"),
        ("--template qwen3", "leave it out"),
    ],
)
def test_other_settings_of_other_trainers_are_told_what_to_do(words, named):
    assert named in refused(parse, *words.split())


def test_all_mistakes_are_told_at_once(monkeypatch, tmp_path):
    (tmp_path / "run.yaml").write_text("cutoff_len: 5\nmax_steps: 1.5\nseed: 1\n")
    monkeypatch.setenv("PLAINLOOP_LR", "1")
    with pytest.raises(UserError) as error:
        parse("--bf16", "True", "--seed", "-1", "--what", "--config", str(tmp_path / "run.yaml"))
    head, *rows = str(error.value).splitlines()
    assert "6 settings" in head and f"tools.translate {tmp_path}" in head
    wanted = ["--seed -1", "--bf16", "--what", "--max_steps 1.5", "--cutoff_len", "PLAINLOOP_LR"]
    assert len(rows) == 6 and all(name in row for name, row in zip(wanted, rows, strict=True))
    assert "--max_length" in rows[4] and "--learning_rate" in rows[5]


def test_arguments_are_found_where_annotations_are_made_late(monkeypatch):
    monkeypatch.setattr(Args, "__annotations__", {})  # as in Python 3.14, before somebody reads them
    assert declared(Args, "learning_rate")["within"] == "[0, inf)" and declared(Args, "word")["help"]


# --- YAML ---------------------------------------------------------------------------------------------------


def test_yaml_is_converted_as_flags_are_and_yields_to_them(tmp_path):
    config = tmp_path / "run.yaml"
    values = {
        "rate": "1e-4",
        "on": False,
        "word": "--x=1",
        "words": ["1", "b c"],
        "level": 2,
        "count": 7,
        "rates": None,
    }
    sources = ["a.jsonl", {"name": "b.jsonl", "columns": {"prompt": "question"}}]
    # a string in YAML 1.1
    text = yaml.safe_dump(values | {"dataset_name": sources}).replace("'1e-4'", "1e-4")
    config.write_text(text + "learning_rate: -0.0\n")
    args = parse_args(Args, "no.yaml", argv=["--count", "8", "--config", str(config)])
    assert (args.rate, args.on, args.word, args.words) == (1e-4, False, "--x=1", ["1", "b c"])
    assert (args.level, args.count, args.rates) == (2, 8, None)
    assert args.dataset_name[0] == "a.jsonl" and json.loads(args.dataset_name[1]) == sources[1]
    config.write_text("rates: [-1.0e-5]\ndataset_name:\n  - {path: d, split: 2024-01-01}\n")
    args = parse_args(Args, "no.yaml", argv=[f"--config={config}"])
    assert args.rates == [-1e-5] and args.dataset_name == ['{"path": "d", "split": "2024-01-01"}']


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("learning_rate: [1, 2]\n", "learning_rate"),
        ("seed: 1\n\tmax_steps: 2\n", "line 2: found character"),
        ("seed: true\n", "seed"),
        ("seed: 1\nmax_steps: 2\nseed: 2\n", "seed is there twice"),
        ("max_steps: 1.5\n", "max_steps"),
        ("learning_rte: 1\n", "learning_rate"),
        ("bf16: true\n", "bf16"),
        ("config: a.yaml\n", "config"),
        ("chat_template: off\n", "quotes"),
        ("- a\n", "name: value"),
        ("dataset_name: []\n", "run.yaml: argument --dataset_name"),
        ("beta: .nan\n", "--beta nan"),
        (f"seed: {'9' * 5000}\n", "digits"),
        ("seed: 1\nalert_webhook: https://h/T0K3N: [\n", "line 2"),
    ],
)
def test_yaml_that_is_wrong_names_file_and_key(tmp_path, text, named):
    (tmp_path / "run.yaml").write_text(text)
    said = refused(lambda *words: parse(*words, script="train_dpo"), "--config", str(tmp_path / "run.yaml"))
    assert "run.yaml" in said and named in said and "T0K3N" not in said


# --- the environment ----------------------------------------------------------------------------------------


def test_flags_are_above_yaml_above_the_environment_above_defaults(monkeypatch, tmp_path, capsys):
    config = tmp_path / "a.yaml"
    config.write_text("learning_rate: 2.0e-4\nseed: 2\n")
    for name, value in {"LEARNING_RATE": "1e-4", "SEED": "1", "WEIGHT_DECAY": "0.1"}.items():
        monkeypatch.setenv(f"PLAINLOOP_{name}", value)
    found = parse(*DATA, "--config", str(config), "--seed", "3")
    assert (found.seed, found.learning_rate, found.weight_decay, found.adam_beta1) == (3, 2e-4, 0.1, 0.9)
    names = "PLAINLOOP_LEARNING_RATE, PLAINLOOP_SEED, PLAINLOOP_WEIGHT_DECAY"
    assert capsys.readouterr().out == f"settings from the environment: {names}\n"
    assert parse(*DATA).learning_rate == 1e-4
    monkeypatch.setenv("PLAINLOOP_CONFIG", str(config))
    assert (parse(*DATA).learning_rate, parse(*DATA, "--learning_rate", "7").learning_rate) == (2e-4, 7)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("LEARNING_RATE", "", 2e-5),
        ("CHAT_TEMPLATE", "a b.jinja", "a b.jinja"),
        ("EVAL_TEMPERATURES", "0 1.5", [0.0, 1.5]),
        ("EVAL_DATASET_NAME", '{"path":"a.jsonl","weight":2} b', ['{"path":"a.jsonl","weight":2}', "b"]),
    ],
)
def test_variables_are_read_as_flags_are(monkeypatch, name, value, expected):
    monkeypatch.setenv(f"PLAINLOOP_{name}", value)
    assert getattr(parse(*DATA), name.lower()) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LEARNIN_RATE", "1"),
        ("ALERT_WEBHOK", "https://h/T0K3N"),
        ("WARMUP_STEPS", "-1"),
        ("CONFIG", "no.yaml"),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch, name, value):
    monkeypatch.setenv(f"PLAINLOOP_{name}", value)
    said = refused(parse, *DATA)
    assert (name in said or value in said) and "T0K3N" not in said


# --- the demo -----------------------------------------------------------------------------------------------


def test_the_demo_applies_without_model_and_dataset(monkeypatch, capsys):
    assert parse().learning_rate == 1e-3 and "embedded demo" in capsys.readouterr().err
    assert parse("--learning_rate", "5e-4").learning_rate == 5e-4 and parse(*DATA).learning_rate == 2e-5
    args = parse("--model_name_or_path", "mine")  # the rows of the demo, and not its settings
    assert args.learning_rate == 2e-5 and args.dataset_name == ["data/sft"]
    monkeypatch.setenv("PLAINLOOP_MAX_STEPS", "5")
    assert (parse().max_steps, parse().learning_rate) == (5, 1e-3)
    monkeypatch.setenv("PLAINLOOP_DATASET_NAME", "d.jsonl")
    assert parse().learning_rate == 2e-5


def test_a_script_may_end_itself_with_a_text(monkeypatch):
    def main(args):
        raise SystemExit("no such data")

    monkeypatch.setattr("sys.argv", ["train.py", *DATA])
    with pytest.raises(SystemExit, match="no such data"):
        launch(main, Args, "no demo")


def test_stages_build_on_the_finished_one_before(tmp_path, monkeypatch, capsys):
    for stage, model in DEFAULT_MODEL.items():
        assert f'default_model="{model}"' in (ROOT / f"train_{stage}.py").read_text()

    def choose_model(*named):
        words = [*DATA, *named]
        return parse_args(CommonArgs, "no.yaml", "outputs/sft", words).model_name_or_path

    monkeypatch.chdir(tmp_path)
    assert "neither outputs/sft nor data/base_model is here" in refused(choose_model)
    shutil.copytree(ROOT / "data" / "base_model", "data/base_model")
    assert choose_model("--model_name_or_path", "mine") == "mine"
    (tmp_path / "outputs" / "sft").mkdir(parents=True)
    assert choose_model() == "data/base_model"  # a run that has not finished is not taken
    (tmp_path / "outputs" / "sft" / "summary.json").write_text("{}")
    assert choose_model() == "outputs/sft"
    assert "\nmodel: outputs/sft (the finished run of the last stage)\n" in capsys.readouterr().out


def test_a_template_that_is_written_in_a_config_is_told_from_a_file():
    assert ".jinja" in refused(
        read_chat_template, "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
