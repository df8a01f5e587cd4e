"""Handing a model on: its card, and the way to the Hub, of which a stand-in runs on this machine."""

import json
import os
import shutil
import sys
import time

from common.command_line import parse_args
from common.errors import UserError
from common.extras.hub import check_repo, is_sealed, merged_card, public_settings, seal, stage, write_card
import huggingface_hub
import pytest
import transformers
import yaml

from tests.conftest import ROOT, demo, run_script
from tests.extras.hub_stand_in import Hub
from tools import push
import train_grpo
import train_sft

SMALL = "--max_steps 2 --per_device_train_batch_size 2 --eval_max_new_tokens 4 --num_samples 1 --max_eval_samples 4".split()
SMALL += ["--model_name_or_path", "data/base_model"]
DEMO = ["--config", "data/configs/sft.yaml", *SMALL]
NAME = "someone/model"
SECRET = "the quick brown secret"  # in the rows of the test


@pytest.fixture
def hub(monkeypatch):
    """The stand-in, as the Hub of this process."""
    made = Hub()
    for name, value in {"ENDPOINT": made.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_testtesttesttest")
    original = huggingface_hub.HfApi.__init__
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "__init__",
        lambda self, *given, **named: original(self, *given, **{"endpoint": made.url} | named),
    )
    huggingface_hub.close_session()  # it knows that the Hub is off
    yield made
    made.close()
    huggingface_hub.close_session()


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
    write_card(args_of(tmp_path, *words, **more), f"train_{more.get('stage', 'sft')}.py", best_step, {})
    return (tmp_path / "README.md").read_text()


# --- the card -------------------------------------------------------------------------------------------------------


def test_a_run_leaves_a_card(launch):
    output = launch("sft", *DEMO)
    card = (output / "README.md").read_text()
    kind = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["plainloop", "sft"]}
    assert head(card) == kind and is_sealed(output / "README.md")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    first, last = [line for line in lines if "eval_loss" in line]
    assert f"| loss | {first['eval_loss']:.4g} | {last['eval_loss']:.4g} |" in card
    assert "max_steps: 2\n" in card and f"transformers {transformers.__version__}" in card and str(output) not in card


def test_nothing_of_this_machine_is_sent(launch, tmp_path):
    """Paths, names of local files, models, functions and groups, texts of flags and data."""
    private = tmp_path / "acme_clients"
    private.mkdir()
    user, answer = {"role": "user"}, {"role": "assistant", "content": "It is."}
    chats = [{"messages": [user | {"content": f"{SECRET} {i}?"}, answer]} for i in range(24)]
    (private / "meetings.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (private / "judge.py").write_text("def acme_judge(completions, **_):\n    return [0.0] * len(completions)\n")
    base = shutil.copytree(ROOT / "data/base_model", private / "acme_base")
    words = [*SMALL[:-1], str(base), "--dataset_name", str(private / "meetings.jsonl"), "data/sft/train.jsonl"]
    words += ["--eval_fraction", "0.2", "--run_name", "annette-3, hf_abcdefghijkl and /srv/keys"]
    words += ["--eval_prompts", "data/prompts/chat_test.jsonl", "--eval_reward_funcs", f"{private}/judge.py:acme_judge"]
    output = launch("sft", *words, "--use_peft")
    (tmp_path / "staged").mkdir()
    assert stage(output, tmp_path / "staged")
    sent = {path.name: path.read_bytes() for path in (tmp_path / "staged").rglob("*")}
    everything = b"".join(content for name, content in sent.items() if name != "tokenizer.json")
    for word in ("acme_c", "meetings", "annette", "judge", "hf_abc", "/srv", SECRET, str(tmp_path), os.getcwd(), "/tmp/"):
        assert word.encode() not in everything, word
    assert not {name for name in sent if name.startswith(("optimizer", "metrics", "samples", "args", "inputs", "dataset"))}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= sent.keys()
    assert json.loads(sent["adapter_config.json"])["base_model_name_or_path"] == "acme_base"


def test_only_names_loaded_from_the_hub_are_told(cache, tmp_path):
    sources = [{"path": "gone/rows.jsonl"}, {"path": "HuggingFaceTB/smoltalk", "rows": 12345}]
    (tmp_path / "dataset.json").write_text(json.dumps({"sources": sources}))
    words = ["--model_name_or_path", "Qwen/Qwen3-0.6B", "--dataset_name", "gone/rows.jsonl", "HuggingFaceTB/smoltalk"]
    (tmp_path / "adapter_config.json").write_text("{}")
    card = card_of(tmp_path, *words, "--use_peft", "--learning_rate", "1e-4")
    assert head(card) == {
        "base_model": "Qwen/Qwen3-0.6B",
        "base_model_relation": "adapter",
        "datasets": ["HuggingFaceTB/smoltalk"],
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["plainloop", "sft", "lora"],
    }
    assert "gone" not in card and "12,345" in card and "learning_rate: 0.0001" in card


def test_settings_are_numbers_choices_and_hub_names(cache, tmp_path):
    words = ["--model_name_or_path", "Qwen/Qwen3-0.6B", "--dataset_name", "a/b", "--loss_type", "dr_grpo", "--beta", "0.5"]
    words += ["--reward_funcs", "/srv/mine.py:f", "regex:^A", "--run_name", "x" * 5000, "--use_peft"]
    found = public_settings(args_of(tmp_path, *words, module=train_grpo, stage="grpo"))
    assert found["model_name_or_path"] == "Qwen/Qwen3-0.6B" and found["loss_type"] == "dr_grpo" and found["beta"] == 0.5
    assert found["use_peft"] and not {"dataset_name", "reward_funcs", "run_name", "output_dir"} & found.keys()


def test_the_results_are_those_of_the_exported_model(tmp_path):
    """An evaluation and a suite are lines of their own."""
    lines = [{"step": 0, "eval_regression/all": 0.1}, {"step": 0, "eval_loss": 4.0, "eval_clients_loss": 1.0}]
    lines += [{"step": 2, "eval_loss": 3.0}, {"step": 4, "eval_regression/all": 0.3}, {"step": 4, "eval_loss": 3.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    card = card_of(tmp_path, "--model_name_or_path", "a/b", "--dataset_name", "c/d")
    assert "| step 0 | step 4, " in card and "| loss | 4 | 3.5 |" in card and "| regression/all | 0.1 | 0.3 |" in card
    assert "clients" not in card
    card = card_of(tmp_path, "--model_name_or_path", "a/b", "--dataset_name", "c/d", best_step=2)
    assert "| loss | 4 | 3 |" in card and "regression/all" not in card


def test_a_card_of_the_users_is_left_alone(tmp_path, capsys):
    words = ["--model_name_or_path", "a/b", "--dataset_name", "c/d"]
    (tmp_path / "README.md").write_text("mine")
    assert card_of(tmp_path, *words) == "mine" and str(tmp_path / "README.md") in capsys.readouterr().out
    (tmp_path / "README.md").unlink()
    first = card_of(tmp_path, *words)
    assert card_of(tmp_path, *words, "--seed", "1") != first, "a run's own is replaced"
    edited = first.replace("## Results", "## What came of it")
    (tmp_path / "README.md").write_text(edited)
    assert card_of(tmp_path, *words) == edited and not is_sealed(tmp_path / "nothing") and seal("a") != seal("b")


def test_the_card_of_a_merged_adapter(cache, tmp_path):
    known = {"base_model_name_or_path": "Qwen/Qwen3-0.6B", "r": 16, "lora_alpha": 32}
    (tmp_path / "adapter_config.json").write_text(json.dumps(known))
    for name, base in (("one", None), ("two", str(tmp_path))):
        (tmp_path / name).mkdir()
        merged_card(str(tmp_path), tmp_path / name, base, "bfloat16")
    card = (tmp_path / "one" / "README.md").read_text()
    assert head(card)["base_model"] == "Qwen/Qwen3-0.6B" and head(card)["base_model_relation"] == "finetune"
    assert "rank 16, alpha 32" in card and "bfloat16" in card and "AutoPeft" not in card
    assert str(tmp_path) not in (tmp_path / "two" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--use_peft"]])
def test_the_code_of_a_card_uses_the_model(words, launch, tmp_path):
    pytest.importorskip("peft")
    shutil.copytree(ROOT / "data" / "base_model", tmp_path / "base")
    words = [*SMALL, "--dataset_name", "data/sft", *words, "--model_name_or_path", str(tmp_path / "base")]
    output = launch("sft", *words, "--max_train_samples", "20")
    code = (output / "README.md").read_text().split("```python\n")[1].split("```")[0]
    done = run_script([sys.executable, "-c", code.replace('"..."', repr(str(output)))])
    assert done.returncode == 0 and "Hello" in done.stdout, done.stderr[-2000:]


# --- the Hub --------------------------------------------------------------------------------------------------------


def test_a_run_sends_its_model_and_card_only(hub, launch, tmp_path, capsys):
    output = launch("sft", *DEMO, "--push_to_hub", "--hub_model_id", NAME)
    sent = hub.repos[NAME]
    (tmp_path / "staged").mkdir()
    assert len(hub.commits) == 1 and stage(output, tmp_path / "staged")
    assert sent == {path.name: path.read_bytes() for path in (tmp_path / "staged").iterdir()}
    assert sent["model.safetensors"] == (output / "model.safetensors").read_bytes()
    assert sent["README.md"] == (output / "README.md").read_bytes()
    assert f"https://huggingface.co/{NAME}" in capsys.readouterr().out


@pytest.mark.parametrize("trouble", ["refuses", pytest.param("hangs", marks=pytest.mark.slow)])
def test_trouble_costs_a_line_that_repeats_it(trouble, hub, launch, capsys, monkeypatch):
    hub.fail = 403
    if trouble == "hangs":
        hub.slow = 2.0
        monkeypatch.setattr("common.extras.hub.TIMEOUT", 0.3)
    output = launch("sft", *DEMO, "--push_to_hub", "--hub_model_id", NAME)
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if "failed" in line)
    assert line.endswith(f"python -m tools.push {output} --hub_model_id {NAME}") and "hf_test" not in said
    assert (output / "summary.json").exists()
    words = line.split("tools.push ")[1].split()
    with pytest.raises(UserError, match=NAME):
        push.main(words)
    hub.fail, hub.slow = 0, 0.0
    hub.repos[NAME] = {"model-00001-of-00002.safetensors": b"of another form", "notes.md": b"mine"}
    hub.private[NAME] = False
    push.main(words)
    assert {"model.safetensors", "README.md", "notes.md"} <= hub.repos[NAME].keys(), "others' files stay"
    assert "model-00001-of-00002.safetensors" not in hub.repos[NAME], "from_pretrained might prefer it"


def test_what_cannot_be_sent_stops_before_training(hub, launch, tmp_path, monkeypatch):
    words = [*DEMO, "--push_to_hub"]
    with pytest.raises(UserError, match="--hub_model_id"):
        launch("sft", *words)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="HF_TOKEN"):
        launch("sft", *words, "--hub_model_id", NAME)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        launch("sft", *words, "--hub_model_id", NAME)
    assert not hub.calls and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["ö/模型", "a/b--c", "a/b.git", "a/b.", "a/b/c", "a", f"a/{'b' * 99}", "", None])
def test_names_that_the_hub_refuses(name, hub):
    with pytest.raises(UserError, match="--hub_model_id"):
        check_repo(name)
    check_repo("some-one/a_model.v1")


def test_a_signed_address_is_not_told(hub, monkeypatch):
    error = RuntimeError("Error while uploading")
    error.__cause__ = OSError("403 for url 'https://s3.example/model?X-Signature=abc&Key=def'\nfull")

    def fail(*given, **named):
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", fail)
    with pytest.raises(UserError) as told:
        push.main(["data/base_model", "--hub_model_id", NAME])
    assert "abc" not in str(told.value)


def test_a_folder_without_a_model_is_refused(hub, tmp_path):
    (tmp_path / "notes.txt").write_text("a")
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(UserError, match=str(folder)):
            push.main([str(folder), "--hub_model_id", NAME])
    assert not hub.calls


def test_code_goes_along_and_paths_do_not(tmp_path):
    base = shutil.copytree(ROOT / "data" / "base_model", tmp_path / "base")
    for name in ("modeling_mine.py", "train_sft.py"):
        (base / name).write_text("")
    (base / "classifier").mkdir()
    (base / "classifier" / "model.safetensors").write_text("")
    config = json.loads((base / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}, "_name_or_path": str(base)}
    (base / "config.json").write_text(json.dumps(config))
    for number, (name, sent) in enumerate(
        [("data/base_model", "base_model"), ("gone/acme/base", "base"), ("Qwen/Q", "Qwen/Q")]
    ):
        (base / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name, "r": 8}))
        staged = tmp_path / str(number)
        staged.mkdir()
        assert stage(base, staged) and (staged / "modeling_mine.py").exists() and not (staged / "train_sft.py").exists()
        assert (staged / "classifier" / "model.safetensors").exists()
        assert json.loads((staged / "config.json").read_text()) == config | {"_name_or_path": "base"}
        assert json.loads((staged / "adapter_config.json").read_text()) == {"base_model_name_or_path": sent, "r": 8}


@pytest.mark.slow
def test_as_a_user_runs_it(tmp_path):
    """The Hub by HF_ENDPOINT: two processes of which one sends; then the command that repeats it, also if nobody answers."""
    hub = Hub()
    env = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_testtesttest"}
    command = ["--config_file", "accelerate_configs/cpu_ddp.yaml", "train_sft.py", *SMALL, "--dataset_name", "data/sft"]
    command += ["--output_dir", str(tmp_path / "two"), "--push_to_hub", "--hub_model_id", NAME]
    done = run_script([sys.executable, "-m", "accelerate.commands.launch", *command], **env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(hub.commits) == 1 and done.stdout.count("sending ") == 1
    hub.repos.clear()
    again = [sys.executable, "-m", "tools.push", str(tmp_path / "two"), "--hub_model_id", NAME]
    done = run_script(again, **env)
    assert done.returncode == 0 and "model.safetensors" in hub.repos[NAME], done.stderr
    start = time.time()
    done = run_script(again, **env | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert done.returncode == 1 and "failed" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert time.time() - start < 120
    hub.close()
