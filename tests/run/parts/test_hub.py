"""Handing a model on: its card, and the way to the Hub, of which a stand-in runs on this machine."""

import json
import os
from pathlib import Path
import shutil

from common.command_line import parse_args
from common.errors import UserError
from common.run.parts.hub import MARK, write_card
import huggingface_hub
from huggingface_hub.utils import filter_repo_objects
import pytest
import yaml

from tests.conftest import ROOT, demo, read_rows, write_rows
from tools import push
import train_grpo
import train_sft

SMALL = "--max_steps 2 --per_device_train_batch_size 2 --eval_max_new_tokens 4 --num_samples 1 --max_eval_samples 4".split()
SMALL += ["--model_name_or_path", "data/base_model"]
DEMO = ["--config", "data/configs/sft.yaml", *SMALL]
NAME = "someone/model"
SECRET = "the quick brown secret"  # in the rows of the test


class Hub:
    """What stands in for huggingface_hub.HfApi: repos are {name: {file: its content}}."""

    def __init__(self):
        self.repos, self.fails = {}, None

    def create_repo(self, repo_id, exist_ok):
        if self.fails:
            raise self.fails
        self.repos.setdefault(repo_id, {})

    def upload_folder(
        self, *, repo_id, folder_path, allow_patterns, ignore_patterns, delete_patterns, commit_message
    ):
        files, repo = [path for path in Path(folder_path).rglob("*") if path.is_file()], self.repos[repo_id]
        for name in list(filter_repo_objects(repo, allow_patterns=delete_patterns)):
            del repo[name]
        names = [str(path.relative_to(folder_path)) for path in files]
        for name in filter_repo_objects(
            names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            repo[name] = Path(folder_path, name).read_bytes()

    def upload_file(self, *, path_or_fileobj, path_in_repo, repo_id, commit_message):
        self.repos[repo_id][path_in_repo] = path_or_fileobj


@pytest.fixture
def hub(monkeypatch):
    made = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_testtesttesttest")
    return made


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The Hub's cache, with a model and a data set that were loaded from there."""
    for name in ("models--Qwen--Qwen3-0.6B", "datasets--HuggingFaceTB--smoltalk"):
        (tmp_path / "cache" / name).mkdir(parents=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


def head(card: str) -> dict:
    return yaml.safe_load(card.split("---")[1])


def args_of(tmp_path, *words, module=train_sft, stage="sft"):
    return parse_args(module.Args, demo(stage), None, [*words, "--output_dir", str(tmp_path)])


def card_of(tmp_path, *words, best_step=None, **more):
    """The card of a run in tmp_path with these flags, and with the facts that lie there."""
    write_card(args_of(tmp_path, *words, **more), more.get("stage", "sft"), best_step)
    return (tmp_path / "README.md").read_text()


# --- the card -----------------------------------------------------------------------------------------------


def test_a_run_leaves_a_card(launch):
    output = launch("sft", *DEMO)
    card = (output / "README.md").read_text()
    kind = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["plainloop", "sft"]}
    assert head(card) == kind and MARK in card
    first, last = [line for line in read_rows(output / "metrics.jsonl") if "eval_loss" in line]
    assert f"| loss | {first['eval_loss']:.4g} | {last['eval_loss']:.4g} |" in card
    assert str(output) not in card


def test_nothing_of_this_machine_is_sent(hub, launch, tmp_path, capsys):
    """Paths, names of local files, models, functions and groups, texts of flags and data."""
    private = tmp_path / "acme_clients"
    private.mkdir()
    user, answer = {"role": "user"}, {"role": "assistant", "content": "It is."}
    chats = [{"messages": [user | {"content": f"{SECRET} {i}?"}, answer]} for i in range(24)]
    write_rows(private / "meetings.jsonl", chats)
    (private / "judge.py").write_text(
        "def acme_judge(completions, **_):\n    return [0.0] * len(completions)\n"
    )
    base = shutil.copytree(ROOT / "data/base_model", private / "acme_base")
    words = [
        *SMALL[:-1],
        str(base),
        "--dataset_name",
        str(private / "meetings.jsonl"),
        "data/sft/train.jsonl",
    ]
    words += ["--eval_fraction", "0.2", "--run_name", "annette-3, hf_abcdefghijkl and /srv/keys"]
    words += [
        "--eval_prompts",
        "data/prompts/chat_test.jsonl",
        "--eval_reward_funcs",
        f"{private}/judge.py:acme_judge",
    ]
    words += [*"--use_peft --save_steps 1 --push_to_hub --hub_model_id".split(), NAME]
    launch("sft", *words)
    assert f"sending {tmp_path}/out to the Hub as {NAME}\nit is at https://huggingface.co/{NAME}\n" in (
        capsys.readouterr().out
    )
    sent = hub.repos[NAME]
    everything = b"".join(content for name, content in sent.items() if name != "tokenizer.json")
    for word in (
        "acme_c",
        "meetings",
        "annette",
        "judge",
        "hf_abc",
        "/srv",
        SECRET,
        str(tmp_path),
        os.getcwd(),
        "/tmp/",
    ):
        assert word.encode() not in everything, word
    known = {
        "adapter_model.safetensors",
        "adapter_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    }
    assert sent.keys() == known | {"chat_template.jinja", "generation_config.json"}
    assert json.loads(sent["adapter_config.json"])["base_model_name_or_path"] == "acme_base"


def test_only_names_loaded_from_the_hub_are_told(cache, tmp_path):
    sources = [{"path": "gone/rows.jsonl"}, {"path": "HuggingFaceTB/smoltalk"}]
    (tmp_path / "dataset.json").write_text(json.dumps({"sources": sources}))
    (tmp_path / "adapter_config.json").write_text("{}")
    words = (
        "--model_name_or_path Qwen/Qwen3-0.6B --dataset_name gone/rows.jsonl HuggingFaceTB/smoltalk".split()
    )
    words += "--reward_funcs /srv/mine.py:f regex:^A --use_peft".split()
    card = card_of(tmp_path, *words, "--run_name", "gone " * 999, module=train_grpo, stage="grpo")
    assert "[Qwen/Qwen3-0.6B](https://huggingface.co/Qwen/Qwen3-0.6B)" in card
    assert head(card) == {
        "base_model": "Qwen/Qwen3-0.6B",
        "datasets": ["HuggingFaceTB/smoltalk"],
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["plainloop", "grpo", "lora"],
    }
    assert not [
        word for word in ("gone", "mine", "regex", "reward_funcs", "run_name", "output_dir") if word in card
    ]


def test_the_results_are_those_of_the_exported_model(tmp_path):
    """An evaluation and a suite are lines of their own."""
    lines = [{"step": 0, "eval_regression/all": 0.1}, {"step": 0, "eval_loss": 4.0, "eval_clients_loss": 1.0}]
    lines += [
        {"step": 2, "eval_loss": 3.0},
        {"step": 4, "eval_regression/all": 0.3},
        {"step": 4, "eval_loss": 3.5},
    ]
    write_rows(tmp_path / "metrics.jsonl", lines)
    card = card_of(tmp_path, "--model_name_or_path", "a/b", "--dataset_name", "c/d")
    assert "| loss | 4 | 3.5 |" in card and "| regression/all | 0.1 | 0.3 |" in card
    assert "clients" not in card
    card = card_of(tmp_path, "--model_name_or_path", "a/b", "--dataset_name", "c/d", best_step=2)
    assert "| loss | 4 | 3 |" in card and "regression/all" not in card


def test_a_card_of_the_users_is_left_alone(tmp_path, capsys):
    words = "--model_name_or_path a/b --dataset_name c/d".split()
    (tmp_path / "README.md").write_text("mine")
    assert card_of(tmp_path, *words) == "mine"
    assert capsys.readouterr().out.startswith(f"{tmp_path}/README.md is your own: it stays")
    (tmp_path / "README.md").unlink()
    first = card_of(tmp_path, *words)
    assert card_of(tmp_path, *words, "--use_peft") != first, "a run's own is replaced"
    edited = first.replace(MARK, "")
    (tmp_path / "README.md").write_text(edited)
    assert card_of(tmp_path, *words) == edited


# --- the Hub ------------------------------------------------------------------------------------------------


def test_trouble_costs_a_line_that_repeats_it(hub, launch, capsys):
    """Others' files stay there, other weights do not."""
    hub.fails = RuntimeError("Error while uploading")
    hub.fails.__cause__ = OSError("403 for url\n'https://s3.example/model'")
    output = launch("sft", *DEMO, "--push_to_hub", "--hub_model_id", NAME)
    line = next(line for line in capsys.readouterr().out.splitlines() if "failed" in line)
    assert line.startswith(f"the upload to {NAME} failed (OSError: 403 for url")
    assert line.endswith(f"python -m tools.push {output} --hub_model_id {NAME}")
    assert (output / "summary.json").exists()
    words = line.split("tools.push ")[1].split()
    with pytest.raises(UserError, match=NAME):
        push.main(words)
    hub.fails = None
    hub.repos[NAME] = {"model-00001-of-00002.safetensors": b"of another form", "notes.md": b"mine"}
    push.main(words)
    assert capsys.readouterr().out == f"{output} is at https://huggingface.co/{NAME}\n"
    assert hub.repos[NAME]["model.safetensors"] == (output / "model.safetensors").read_bytes()
    assert {"README.md", "notes.md"} <= hub.repos[NAME].keys()
    assert "model-00001-of-00002.safetensors" not in hub.repos[NAME], "from_pretrained might prefer it"


def test_what_cannot_be_sent_stops_before_training(hub, launch, tmp_path, monkeypatch):
    words = [*DEMO, "--push_to_hub"]
    for name in ([], ["--hub_model_id", "a"]):
        with pytest.raises(UserError, match=f"--hub_model_id {name[-1] if name else None}: expected OWNER"):
            launch("sft", *words, *name)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="HF_TOKEN"):
        launch("sft", *words, "--hub_model_id", NAME)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        launch("sft", *words, "--hub_model_id", NAME)
    assert not hub.repos and not (tmp_path / "out").exists()


def test_code_goes_along_and_the_script_does_not(hub, tmp_path):
    base = shutil.copytree(ROOT / "data" / "base_model", tmp_path / "base")
    (base / "classifier").mkdir()
    for name in ("modeling_mine.py", "train_sft.py", "classifier/model.safetensors"):
        (base / name).write_text("")
    config = json.loads((base / "config.json").read_text()) | {
        "auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}
    }
    (base / "config.json").write_text(json.dumps(config))
    for name, sent in [("data/base_model", "base_model"), ("gone/acme/base", "base"), ("Qwen/Q", "Qwen/Q")]:
        (base / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name, "r": 8}))
        push.main([str(base), "--hub_model_id", NAME])
        assert {"modeling_mine.py", "classifier/model.safetensors", "model.safetensors"} <= hub.repos[
            NAME
        ].keys()
        assert "train_sft.py" not in hub.repos[NAME]
        assert json.loads(hub.repos[NAME]["adapter_config.json"]) == {"base_model_name_or_path": sent, "r": 8}
