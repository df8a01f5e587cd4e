"""Settings from the environment: where they stand among the others, and where --dry_run says that each comes from."""

import importlib

from common.command_line import OF_THE_TESTS, parse_args
from common.errors import UserError

import pytest

DEMO = "data/configs/sft.yaml"
DATA = ["--dataset_name", "d.jsonl"]


def parse(*words, script="train_sft", demo=DEMO):
    return parse_args(importlib.import_module(script).Args, demo, argv=[*words])


def test_a_flag_is_above_yaml_above_the_environment_above_the_default(monkeypatch, tmp_path):
    config = tmp_path / "a.yaml"
    config.write_text("learning_rate: 2.0e-4\nseed: 2\n")
    for name, value in {"LEARNING_RATE": "1e-4", "SEED": "1", "WEIGHT_DECAY": "0.1"}.items():
        monkeypatch.setenv(f"PLAINLOOP_{name}", value)
    found = parse(*DATA, "--config", str(config), "--seed", "3")
    assert (found.seed, found.learning_rate, found.weight_decay, found.adam_beta1) == (3, 2e-4, 0.1, 0.9)
    assert parse(*DATA).learning_rate == 1e-4
    monkeypatch.setenv("PLAINLOOP_CONFIG", str(config))
    assert (parse(*DATA).learning_rate, parse(*DATA, "--learning_rate", "7").learning_rate) == (2e-4, 7)
    other = tmp_path / "b.yaml"
    other.write_text("learning_rate: 5\n")
    assert parse(*DATA, f"--config={other}").learning_rate == 5


def test_the_demo_lies_beneath_the_environment(monkeypatch):
    monkeypatch.setenv("PLAINLOOP_MAX_STEPS", "5")
    found = parse()
    assert found.max_steps == 5 and found.learning_rate == 1e-3 and found.dataset_name == ["data/sft"]
    monkeypatch.setenv("PLAINLOOP_DATASET_NAME", "d.jsonl")
    assert parse().learning_rate == 2e-5  # a dataset is named: this is no demo
    monkeypatch.delenv("PLAINLOOP_DATASET_NAME")
    monkeypatch.setenv("PLAINLOOP_REWARD_FUNCS", "length:9 length:8")  # which the demo's reward_weights would not fit
    assert parse(script="train_grpo", demo="data/configs/grpo.yaml").reward_weights is None


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("USE_PEFT", "true", True),
        ("USE_PEFT", "0", False),
        ("SAVE_MINUTES", "-0", None),
        ("LEARNING_RATE", "", 2e-5),
        ("CHAT_TEMPLATE", "a b.jinja", "a b.jinja"),
        ("EVAL_TEMPERATURES", "0 1.5", [0.0, 1.5]),
        ("EVAL_TEMPERATURES", "[0, 1.5]", [0.0, 1.5]),
        ("DATASET_NAME", "a.jsonl 'b c.jsonl'", ["a.jsonl", "b c.jsonl"]),
        ("DATASET_NAME", '{"path": "a b.jsonl", "weight": 2}', ['{"path": "a b.jsonl", "weight": 2}']),
        ("DATASET_NAME", '["a b", {"path": "c"}]', ["a b", '{"path": "c"}']),
    ],
)
def test_values_are_read_as_those_of_flags(monkeypatch, name, value, expected):
    monkeypatch.setenv(f"PLAINLOOP_{name}", value)
    if expected is None:
        with pytest.raises(UserError, match="PLAINLOOP_SAVE_MINUTES: --save_minutes -0.0 is out of range"):
            parse(*DATA)
    else:
        assert getattr(parse(*([] if name == "DATASET_NAME" else DATA)), name.lower()) == expected


@pytest.mark.parametrize(
    "name, value, said",
    [
        (
            "LEARNIN_RATE",
            "1",
            "unknown variable PLAINLOOP_LEARNIN_RATE in the environment: did you mean PLAINLOOP_LEARNING_RATE?",
        ),
        ("XYZZY", "1", "unknown variable PLAINLOOP_XYZZY in the environment: it is no flag of this script"),
        ("Learning_Rate", "1", "did you mean PLAINLOOP_LEARNING_RATE"),
        ("ALERT_WEBHOK", "https://h/secret", "did you mean PLAINLOOP_ALERT_WEBHOOK"),
        ("LEARNING_RATE", "high", "PLAINLOOP_LEARNING_RATE: argument --learning_rate: invalid float value: 'high'"),
        ("WARMUP_STEPS", "-1", "PLAINLOOP_WARMUP_STEPS: --warmup_steps -1.0 is out of range, which is"),
        ("EVAL_TEMPERATURES", "'1", "PLAINLOOP_EVAL_TEMPERATURES: No closing quotation; expected values"),
        ("EVAL_TEMPERATURES", "[1", "PLAINLOOP_EVAL_TEMPERATURES: .*JSON list"),
        ("CONFIG", "no.yaml", "--config no.yaml: there is no such file"),
    ],
)
def test_a_mistake_in_a_variable_is_one_line(monkeypatch, name, value, said):
    monkeypatch.setenv(f"PLAINLOOP_{name}", value)
    with pytest.raises(UserError, match=said) as error:
        parse(*DATA)
    assert "\n" not in str(error.value) and "secret" not in str(error.value)


def test_what_the_tests_read_is_no_setting(monkeypatch):
    for name in OF_THE_TESTS:
        monkeypatch.setenv(name, "1")
    assert parse(*DATA).seed == 0


def test_a_dry_run_says_where_each_value_comes_from(monkeypatch, capsys, tmp_path):
    config = tmp_path / "a.yaml"
    config.write_text("seed: 2\nuse_peft: true\n")
    monkeypatch.setenv("PLAINLOOP_MAX_STEPS", "5")
    monkeypatch.setenv("PLAINLOOP_SEED", "1")
    monkeypatch.setenv("PLAINLOOP_ALERT_WEBHOOK", "https://hooks.slack.com/T0K3N")
    parse("--dry_run", "--config", str(config), "--no_use_peft", "--lora_r=8")
    lines = {
        line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines() if line[:4] == "    "
    }
    assert lines["max_steps"] == "5 PLAINLOOP_MAX_STEPS" and lines["seed"] == f"2 --config {config}"
    assert lines["lora_r"] == "8 command line" and "use_peft" not in lines and "weight_decay" not in lines
    assert lines["learning_rate"] == "0.001 the demo, data/configs/sft.yaml" and lines["dry_run"] == "True command line"
    assert lines["alert_webhook"] == "(secret) PLAINLOOP_ALERT_WEBHOOK"
    parse()
    assert "come from" not in capsys.readouterr().out


def test_a_secret_is_in_no_message_about_the_words(tmp_path):
    """A flag that is misspelled, a stray address, a line of YAML that cannot be read."""
    broken = tmp_path / "a.yaml"
    broken.write_text("seed: 1\nalert_webhook: https://h/T0K3N: [\n")
    for words in (["--alert_webhok=https://h/T0K3N"], ["--seed", "1", "https://h/T0K3N"], ["--config", str(broken)]):
        with pytest.raises(UserError) as error:
            parse(*DATA, *words)
        assert "T0K3N" not in str(error.value)
