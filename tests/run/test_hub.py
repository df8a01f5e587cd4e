"""Handing a model on: its card, and the way to the Hub, of which a stand-in runs on this machine."""

import getpass
import json
import os
import shutil
import sys
import time
from pathlib import Path

import train_grpo
import train_sft
from common.command_line import parse_args
from common.errors import UserError
from common.run.card import make_card, public_names
from common.run.hub import Push, files_to_push, without_places
from common.run.output_dir import is_sealed, seal
from tests.conftest import ROOT, demo, run_script
from tests.run.hub_stand_in import Hub
from tools import push

import huggingface_hub
import pytest
import transformers
import yaml

SMALL = "--max_steps 2 --per_device_train_batch_size 2 --eval_max_new_tokens 4 --num_samples 1 --max_eval_samples 4".split()
SMALL += ["--model_name_or_path", "data/base_model"]
NAME = "someone/model"
SECRET = "the quick brown secret"  # in the rows of the test


@pytest.fixture
def hub(monkeypatch):
    """The stand-in, as the Hub of this process."""
    made = Hub()
    for name, value in {"ENDPOINT": made.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_testtesttesttest")
    monkeypatch.setattr("common.run.hub.TIMEOUT", 120)
    monkeypatch.setattr(huggingface_hub.HfApi, "__init__", _init(huggingface_hub.HfApi.__init__, made.url))
    huggingface_hub.close_session()  # it knows that the Hub is off
    yield made
    made.close()
    huggingface_hub.close_session()


def _init(original, url):
    return lambda self, *args, **kwargs: original(self, *args, **{"endpoint": url} | kwargs)


def rows(path: Path, count=24) -> str:
    """Chats in a file of this machine."""
    chats = [
        {"messages": [{"role": "user", "content": f"{SECRET} {i}?"}, {"role": "assistant", "content": f"It is {i}."}]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return str(path)


def head(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


# --- the card ---------------------------------------------------------------------------------------------------------


def test_a_run_leaves_a_card_with_what_it_was_and_what_came_of_it(launch):
    output = launch("sft", "--config", "data/configs/sft.yaml", *SMALL)
    card = (output / "README.md").read_text()
    assert head(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["plainloop", "sft"],
    }
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    first, last = [line for line in lines if "eval_loss" in line]
    assert f"| loss | {first['eval_loss']:.4g} | {last['eval_loss']:.4g} |" in card
    assert "381,600, of which 381,600 were trained" in card and "`data/sft` (ships with Plainloop)" in card
    assert "accelerate launch train_sft.py --model_name_or_path data/base_model" in card and "--max_steps 2" in card
    assert f"transformers {transformers.__version__}" in card and str(output) not in card


def test_nothing_of_this_machine_is_in_a_card_or_in_what_is_sent(launch, tmp_path, monkeypatch):
    """Paths, the names of local files and models, of people, words that look like secrets; samples and texts of the data."""
    monkeypatch.setattr(getpass, "getuser", lambda: "annette")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/annette"))
    private = tmp_path / "acme_clients"
    private.mkdir()
    data, base = rows(private / "meetings.jsonl"), shutil.copytree(ROOT / "data/base_model", private / "acme_base")
    words = [*SMALL[:-1], base, "--dataset_name", data, "data/sft/train.jsonl", "--eval_fraction", "0.2"]
    output = launch("sft", *words, "--run_name", "annette-3", "--max_length", "200")
    card = (output / "README.md").read_text()
    sent = {name: without_places(path) or path.read_bytes() for name, path in files_to_push(output).items()}
    everything = card.encode() + b"".join(sent.values())
    for word in ("acme", "meetings", "annette", SECRET, str(tmp_path), os.getcwd(), "/tmp/"):
        assert word.encode() not in everything, word
    assert "a local dataset" in card and "--dataset_name DATASET data/sft/train.jsonl" in card and "a local model" in card
    assert not {name for name in sent if name.startswith(("optimizer", "metrics", "samples", "args", "inputs", "dataset"))}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"} <= sent.keys()


def test_names_of_the_hub_are_told_and_a_file_that_is_gone_is_no_such_name(tmp_path):
    def args_of(*words, module=train_sft, stage="sft"):
        return parse_args(module.Args, demo(stage), None, [*words, "--output_dir", str(tmp_path)])

    args = args_of(
        "--model_name_or_path", "Qwen/Qwen3-0.6B", "--dataset_name", "gone/rows.jsonl", "/gone/x", "./gone",
        '{"path": "HuggingFaceTB/smoltalk", "weight": 0.5}', "--use_peft", "--learning_rate", "1e-4",
    )  # fmt: skip
    public = public_names(args)
    assert public == {"Qwen/Qwen3-0.6B", "HuggingFaceTB/smoltalk"}
    card = make_card(tmp_path, args, "train_sft.py", public)
    assert head(card)["base_model"] == "Qwen/Qwen3-0.6B" and head(card)["datasets"] == ["HuggingFaceTB/smoltalk"]
    assert head(card)["base_model_relation"] == "adapter" and head(card)["library_name"] == "peft"
    assert "--use_peft" in card and "gone" not in card and "--learning_rate 0.0001" in card
    hostile = "hf_abcdefghijkl then /srv/keys and https://hooks.example/T0/B1"
    args = args_of(
        "--model_name_or_path", "a/b", "--dataset_name", "c/d", "--system_prompt", hostile,
        "--reward_funcs", "/srv/mine.py:f", "regex:^A", module=train_grpo, stage="grpo",
    )  # fmt: skip
    card = make_card(tmp_path, args, "train_grpo.py", public_names(args))
    assert "--system_prompt SYSTEM_PROMPT --" in card.replace("\n", " --") and "hooks" not in card and "srv" not in card
    assert "--reward_funcs REWARD_FUNCS regex:^A" in card or "--reward_funcs REWARD_FUNCS 'regex:^A'" in card


def test_a_local_model_is_followed_to_where_it_came_from(tmp_path):
    """Adapters name their base only where they lie on it."""
    for folder, origin in (("sft", "Qwen/Qwen3-0.6B"), ("dpo", str(tmp_path / "sft"))):
        (tmp_path / folder).mkdir()
        settings = {"output_dir": f"outputs/{folder}", "model_name_or_path": origin}
        (tmp_path / folder / "args.yaml").write_text(yaml.safe_dump(settings))

    def card_of(*words):
        words = ["--model_name_or_path", str(tmp_path / "dpo"), "--dataset_name", "c/d", *words]
        args = parse_args(train_sft.Args, demo("sft"), None, [*words, "--output_dir", str(tmp_path)])
        return make_card(tmp_path, args, "train_sft.py", public_names(args))

    card = card_of()
    assert head(card)["base_model"] == "Qwen/Qwen3-0.6B" and head(card)["base_model_relation"] == "finetune"
    assert "after an earlier stage (sft), then an earlier stage (dpo)" in card and str(tmp_path) not in card
    assert "base_model" not in head(card_of("--use_peft"))


@pytest.mark.slow
def test_a_readme_of_the_users_stays_and_a_card_that_was_edited_too(launch, tmp_path, capsys):
    words = ["--config", "data/configs/sft.yaml", *SMALL]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("mine")
    output = launch("sft", *words)
    assert (output / "README.md").read_text() == "mine" and "it stays as it is" in capsys.readouterr().out
    (output / "README.md").unlink()
    launch("sft", *words, "--overwrite_output_dir")
    first = (output / "README.md").read_text()
    assert is_sealed(output / "README.md")
    launch("sft", *words, "--overwrite_output_dir", "--seed", "1")
    assert (output / "README.md").read_text() != first
    edited = (output / "README.md").read_text().replace("## Limits", "## What it cannot do")
    (output / "README.md").write_text(edited)
    launch("sft", *words, "--overwrite_output_dir")
    assert (output / "README.md").read_text() == edited
    assert not seal("") == seal("a") and not is_sealed(tmp_path / "nothing")


@pytest.mark.slow
def test_the_lines_of_a_card_use_the_model(launch, tmp_path):
    pytest.importorskip("peft")
    shutil.copytree(ROOT / "data" / "base_model", tmp_path / "base")
    for name, extra in (("full", []), ("adapter", ["--use_peft", "--model_name_or_path", str(tmp_path / "base")])):
        output = launch("sft", "--config", "data/configs/sft.yaml", *SMALL, *extra, output=name)
        code = (output / "README.md").read_text().split("```python\n")[1].split("```")[0]
        done = run_script([sys.executable, "-c", code.replace('"..."', repr(str(output)))])
        assert done.returncode == 0 and "Hello" in done.stdout, done.stderr[-2000:]
    assert not list(tmp_path.glob("adapter/checkpoint-*/README.md"))  # peft's would tell where the base lies


# --- the Hub ----------------------------------------------------------------------------------------------------------


def test_a_run_sends_its_model_and_card_and_nothing_else(hub, launch, capsys):
    flags = ["--push_to_hub", "--hub_model_id", NAME, "--hub_private_repo"]
    output = launch("sft", "--config", "data/configs/sft.yaml", *SMALL, *flags)
    sent = hub.repos[NAME]
    assert hub.private[NAME] and hub.commits == ["the final model"]
    assert sent.keys() == {*files_to_push(output), "README.md"}
    assert sent["model.safetensors"] == (output / "model.safetensors").read_bytes()
    assert sent["README.md"] == (output / "README.md").read_bytes()
    said = capsys.readouterr().out
    assert f"sending {output} to the Hub as {NAME}" in said and f"it is at https://huggingface.co/{NAME}" in said


@pytest.mark.parametrize("trouble", ["refuses", pytest.param("hangs", marks=pytest.mark.slow)])
def test_trouble_costs_a_line_whose_command_repeats_it(trouble, hub, launch, capsys, monkeypatch):
    hub.fail = 403
    if trouble == "hangs":
        hub.slow = 2.0
        monkeypatch.setattr("common.run.hub.TIMEOUT", 0.3)
    flags = ["--push_to_hub", "--hub_model_id", NAME]
    output = launch("sft", "--config", "data/configs/sft.yaml", *SMALL, *flags)
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if "failed" in line)
    assert line.endswith(f"what repeats it: python -m tools.push {output} --hub_model_id {NAME}") and "hf_test" not in said
    assert (output / "summary.json").exists()
    words = line.split("tools.push ")[1].split()
    with pytest.raises(UserError, match="was not sent to someone/model"):
        push.main(words)
    hub.fail, hub.slow = 0, 0.0
    hub.repos[NAME] = {"model-00001-of-00002.safetensors": b"of another form", "notes.md": b"mine"}
    hub.private[NAME] = False
    push.main(words)
    assert hub.repos[NAME].keys() == {*files_to_push(output), "README.md", "notes.md"}


@pytest.mark.slow
def test_every_save_is_sent_meanwhile_and_waits_for_nobody(hub, launch, monkeypatch):
    """The Hub answers nothing until the run has ended, and the run does not wait: the saves that come meanwhile are left out."""
    hub.gate.clear()
    finish = Push.finish

    def late(self):
        hub.gate.set()
        finish(self)

    monkeypatch.setattr(Push, "finish", late)
    words = ["--save_steps", "1", "--save_total_limit", "1", "--max_steps", "3", "--hub_strategy", "every_save"]
    output = launch("sft", "--config", "data/configs/sft.yaml", *SMALL, *words, "--push_to_hub", "--hub_model_id", NAME)
    assert hub.commits == ["step 1", "the final model"]
    cards = [body for body in hub.bodies if b"README.md" in body and b'"file"' in body]
    assert len(cards) == 2 and not list(output.glob(".push.tmp"))
    assert (output / "checkpoint-3").exists() and not (output / "checkpoint-1").exists()
    assert hub.repos[NAME]["model.safetensors"] == (output / "model.safetensors").read_bytes()


def test_what_cannot_be_sent_is_said_before_anything_is_trained(hub, launch, tmp_path, monkeypatch):
    words = ["--config", "data/configs/sft.yaml", *SMALL, "--push_to_hub"]
    for flags, said in (
        ([], "expected OWNER/NAME"),
        (["--hub_model_id", "model"], "expected OWNER/NAME"),
        (["--hub_model_id", NAME, "--push_to_hub", "false"], "--push_to_hub that it is wanted"),
    ):
        with pytest.raises(UserError, match=said):
            launch("sft", *words, *flags)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="a token that may write: hf auth login"):
        launch("sft", *words, "--hub_model_id", NAME)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="switched off by HF_HUB_OFFLINE"):
        launch("sft", *words, "--hub_model_id", NAME)
    assert not hub.calls and not (tmp_path / "out").exists()
    monkeypatch.undo()


def test_a_folder_without_a_model_is_not_sent(hub, tmp_path):
    (tmp_path / "notes.txt").write_text("a")
    with pytest.raises(UserError, match="holds no model"):
        push.main([str(tmp_path), "--hub_model_id", NAME])
    with pytest.raises(UserError, match="no such folder"):
        push.main([str(tmp_path / "gone"), "--hub_model_id", NAME])
    assert not hub.calls


def test_code_of_a_model_goes_with_it_and_paths_in_its_settings_do_not(tmp_path):
    base = shutil.copytree(ROOT / "data" / "base_model", tmp_path / "base")
    for name in ("modeling_mine.py", "train_sft.py"):
        (base / name).write_text("")
    config = json.loads((base / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}, "_name_or_path": str(base)}
    (base / "config.json").write_text(json.dumps(config))
    (base / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "data/base_model", "r": 8}))
    files = files_to_push(base)
    assert "modeling_mine.py" in files and "train_sft.py" not in files
    assert json.loads(without_places(files["config.json"])) == config | {"_name_or_path": "base"}
    assert json.loads(without_places(files["adapter_config.json"])) == {"base_model_name_or_path": "base_model", "r": 8}
    assert without_places(files["tokenizer_config.json"]) is None


@pytest.mark.slow
def test_as_a_user_runs_it(tmp_path):
    """Scripts with the Hub by HF_ENDPOINT: two processes of which one sends; then the command that repeats it, also where nobody answers."""
    hub = Hub()
    env = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_testtesttest"}
    command = ["accelerate", "launch", "-q", "--config_file", "accelerate_configs/cpu_ddp.yaml", "train_sft.py", *SMALL]
    command += ["--dataset_name", "data/sft", "--output_dir", str(tmp_path / "two"), "--push_to_hub", "--hub_model_id", NAME]
    done = run_script([sys.executable, "-m", "accelerate.commands.launch", *command[2:]], **env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert hub.commits == ["the final model"] and done.stdout.count("sending ") == 1
    hub.repos.clear()
    again = [sys.executable, "-m", "tools.push", str(tmp_path / "two"), "--hub_model_id", NAME]
    done = run_script(again, **env)
    assert done.returncode == 0 and "is there" in done.stdout, done.stderr
    assert "model.safetensors" in hub.repos[NAME]
    start = time.time()
    done = run_script(again, **env | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert done.returncode == 1 and done.stderr.count("\n") <= 8 and "was not sent" in done.stderr, done.stderr
    assert time.time() - start < 120
    hub.close()
