"""Handing a model on: its card, and the way to the Hub, of which a stand-in runs on this machine."""

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import train_grpo
import train_sft
from common.command_line import parse_args
from common.errors import UserError
from common.run.card import is_sealed, make_card, merged_card, seal
from common.run.hub import Push, check_repo, files_to_push, reason_of, without_places
from common.run.public import public_names
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
        files = {origin: "hash"} if folder == "dpo" else {}
        (tmp_path / folder / "inputs.json").write_text(json.dumps({"files": files}))

    def card_of(*words):
        words = ["--model_name_or_path", str(tmp_path / "dpo"), "--dataset_name", "c/d", *words]
        args = parse_args(train_sft.Args, demo("sft"), None, [*words, "--output_dir", str(tmp_path)])
        return make_card(tmp_path, args, "train_sft.py", public_names(args))

    card = card_of()
    assert head(card)["base_model"] == "Qwen/Qwen3-0.6B" and head(card)["base_model_relation"] == "finetune"
    assert "after an earlier stage (sft), then an earlier stage (dpo)" in card and str(tmp_path) not in card
    assert "base_model" not in head(card_of("--use_peft"))
    # A folder that lay here when the first stage began is none of the Hub's names, though it is gone now.
    (tmp_path / "sft" / "inputs.json").write_text(json.dumps({"files": {"Qwen/Qwen3-0.6B": "hash"}}))
    assert "base_model" not in head(card_of()) and "Qwen" not in card_of().split("## The command")[0]


def sft_args(tmp_path, *words):
    return parse_args(train_sft.Args, demo("sft"), None, [*words, "--output_dir", str(tmp_path)])


def test_a_card_has_all_that_was_measured_of_its_model(tmp_path):
    """An evaluation and a suite are lines of their own; what is of another step is not of this model."""
    lines = [
        {"step": 0, "eval_regression/all": 0.1},
        {"step": 0, "eval_loss": 4.0, "eval_loss_of_all": 1.0},
        {"step": 2, "eval_loss": 3.0},
        {"step": 4, "eval_regression/all": 0.3},
        {"step": 4, "eval_loss": 3.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = sft_args(tmp_path, "--model_name_or_path", "a/b", "--dataset_name", "c/d")
    card = make_card(tmp_path, args, "train_sft.py", set())
    assert "at step 0 and at step 4" in card and "| loss | 4 | 3.5 |" in card and "| regression/all | 0.1 | 0.3 |" in card
    card = make_card(tmp_path, args, "train_sft.py", set(), best_step=2)
    assert "| loss | 4 | 3 |" in card and "regression/all" not in card


def test_what_is_private_is_not_told_by_the_way(tmp_path, monkeypatch):
    """By a metric that is named after a file, as a file in a folder of the demo's, in words, by the environment."""
    monkeypatch.setenv("ACME_API_KEY", "hunter2hunter2")
    monkeypatch.setattr(getpass, "getuser", lambda: "annette")
    words = ["--model_name_or_path", "a/b", "--dataset_name", "data/sft/acme.jsonl", "/srv/meetings.jsonl", "data/sft"]
    words += ["--save_best", "min:eval_meetings_loss", "--eval_reward_funcs", "/srv/acme_judge", "exact_number"]
    words += ["--dataset_format", "Annette's own", "--dataset_train_split", "hunter2hunter2"]
    args = sft_args(tmp_path, *words, "--lora_target_modules", "sk-proj-abcdefgh")
    public = public_names(args)
    assert public == {"a/b", "data/sft", "exact_number"}
    sources = [{"source": "meetings", "path": "/srv/meetings.jsonl"}, {"source": "acme", "path": "data/sft/acme.jsonl"}]
    (tmp_path / "dataset.json").write_text(json.dumps({"sources": sources, "eval_sources": sources}))
    line = {"step": 1, "eval_loss": 2.0, "eval_meetings_loss": 2.0, "eval_acme_loss": 2.0, "eval_acme_judge_t0.7": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line))
    card = make_card(tmp_path, args, "train_sft.py", public)
    for word in ("acme", "meetings", "Annette", "hunter2", "sk-proj", "srv"):
        assert word not in card, word
    assert "| loss | 2 | 2 |" in card and "--save_best SAVE_BEST" in card
    monkeypatch.chdir(tmp_path)  # another project has a data/sft, too
    (tmp_path / "data" / "sft").mkdir(parents=True)
    assert not public_names(sft_args(tmp_path, "--model_name_or_path", "a/b", "--dataset_name", "data/sft")) - {"a/b"}


def test_a_run_without_its_card_is_not_complete(launch, tmp_path, monkeypatch):
    """A kill between the card and summary.json lets the next start write both."""
    import common.run.metrics

    replace = common.run.metrics.replace_text

    def killed(path, text):
        raise KeyboardInterrupt if path.name == "summary.json" else replace(path, text)

    monkeypatch.setattr(common.run.metrics, "replace_text", killed)
    with pytest.raises((KeyboardInterrupt, TypeError)):
        launch("sft", "--config", "data/configs/sft.yaml", *SMALL, "--eval_steps", "0", "--max_train_samples", "8")
    assert is_sealed(tmp_path / "out" / "README.md") and not (tmp_path / "out" / "summary.json").exists()


def test_the_card_of_a_merged_adapter(launch, tmp_path):
    """What it was merged from, and how; the rest as the adapter's own card has it, where no hand was at it."""
    args = sft_args(tmp_path, "--model_name_or_path", "Qwen/Qwen3-0.6B", "--dataset_name", "c/d", "--use_peft")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval_loss": 4.0}\n{"step": 3, "eval_loss": 3.5}\n')
    own = make_card(tmp_path, args, "train_sft.py", public_names(args))
    (tmp_path / "README.md").write_text(own)
    known = {"base_model_name_or_path": "Qwen/Qwen3-0.6B", "r": 16, "lora_alpha": 32, "use_rslora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(known))
    merged = tmp_path / "merged"
    merged.mkdir()
    card = merged_card(tmp_path, merged, None, "bfloat16")
    assert head(card) == head(own) | {"library_name": "transformers", "base_model_relation": "finetune"}
    assert "(https://huggingface.co/Qwen/Qwen3-0.6B), by a LoRA adapter (rank 16, alpha 32) that was merged into it" in card
    assert "W + alpha / √r · B A" in card and "kept in bfloat16" in card and "| loss | 4 | 3.5 |" in card
    assert "which is this model" not in card and "AutoPeft" not in card and "--use_peft" in card
    (merged / "README.md").write_text(card)
    assert is_sealed(merged / "README.md")
    after = sft_args(tmp_path, "--model_name_or_path", str(merged), "--dataset_name", "c/d")
    assert head(make_card(tmp_path, after, "train_sft.py", set()))["base_model"] == "Qwen/Qwen3-0.6B"
    (tmp_path / "README.md").write_text(own.replace("Qwen", "Acme"))
    card = merged_card(tmp_path, merged, str(tmp_path), "float32")
    assert "a local model, by a LoRA" in card and "Acme" not in card and "| loss" not in card and str(tmp_path) not in card


@pytest.mark.slow
def test_the_card_of_a_reward_model_uses_it_and_its_command_is_that_of_an_experiment(hub, launch):
    words = [*SMALL, "--dataset_name", "data/dpo", "--max_train_samples", "20", "--push_to_hub", "--hub_model_id", NAME]
    output = launch("reward", *words)
    card = (output / "README.md").read_text()
    assert head(card)["pipeline_tag"] == "text-classification" and "launch -m experiments.train_reward --model" in card
    code = card.split("```python\n")[1].split("```")[0]
    done = run_script([sys.executable, "-c", code.replace('"..."', repr(str(output)))])
    assert done.returncode == 0 and "tensor([[" in done.stdout, done.stderr[-2000:]
    assert hub.repos[NAME]["classifier/model.safetensors"] == (output / "classifier" / "model.safetensors").read_bytes()


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


@pytest.mark.parametrize("name", ["ö/模型", "a/b--c", "a/b.git", "a/b.", "a/b/c", "a", f"a/{'b' * 99}", "", None])
def test_a_name_that_the_hub_would_refuse_is_refused_here(name, hub):
    with pytest.raises(UserError, match="expected OWNER/NAME"):
        check_repo(name)
    check_repo("some-one/a_model.v1")


def test_what_was_to_be_private_is_not_sent_where_all_can_read_it(hub):
    hub.repos[NAME], hub.private[NAME] = {}, False
    with pytest.raises(UserError, match="there already, and public: change that on the Hub, or leave out"):
        push.main(["data/base_model", "--hub_model_id", NAME, "--hub_private_repo"])
    assert not hub.repos[NAME] and not hub.commits
    hub.private[NAME] = True
    push.main(["data/base_model", "--hub_model_id", NAME, "--hub_private_repo"])
    assert hub.commits


def test_the_reason_of_a_failure_is_told_and_a_signed_address_is_not():
    error = RuntimeError("Error while uploading")
    error.__cause__ = OSError("403 for url 'https://s3.example/model?X-Signature=abc&Key=def'\nfull")
    said = reason_of(error)
    assert said == "RuntimeError: Error while uploading OSError: 403 for url 'https://s3.example/model' full"


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
    (base / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "gone/acme/base"}))
    assert json.loads(without_places(files["adapter_config.json"])) == {"base_model_name_or_path": "base"}
    (base / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B"}))
    assert without_places(files["adapter_config.json"]) is None and without_places(files["tokenizer_config.json"]) is None


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
    hub.gate.clear()
    known = len(hub.calls)
    process = subprocess.Popen(again, cwd=ROOT, env=os.environ | env, stderr=subprocess.PIPE, text=True)
    while len(hub.calls) == known and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1].splitlines()[-1] == "stopped" and process.returncode == 130
    hub.gate.set()
    hub.close()
