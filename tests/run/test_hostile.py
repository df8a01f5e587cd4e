"""Nothing silent, nothing lost: hostile data, broken model folders, disks that are full, terminals that close."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from common.args import CommonArgs
from common.data import encoding
from common.data.chat import read_chat_template
from common.data.tokens import tokenize_messages, tokenize_prompt
from common.errors import UserError, printable
from common.run.metrics import Metrics
from common.run.signals import EXIT_CODE
from tests.conftest import ROOT, read_metrics
from tests.run.test_folder import SFT
from tests.run.test_signals import Script, usual_signals

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

BASE = ROOT / "data" / "base_model"


# --- the terminal ---------------------------------------------------------------------------------------------------

EVIL = "\x1b[2J\x1b]0;owned\x07 a \x9b31m b \r c \u202e d \u2028 e \x7f"


def test_control_characters_are_spelled_out():
    assert printable(EVIL) == "\\x1b[2J\\x1b]0;owned\\x07 a \\x9b31m b \\r c \\u202e d \\u2028 e \\x7f"
    assert printable("one\n\ttwo é 你 🙂") == "one\n\ttwo é 你 🙂"


def test_nothing_from_data_file_names_or_completions_reaches_the_terminal_as_a_control_sequence(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"{EVIL} {i}"}, {"role": "assistant", "content": EVIL}]} for i in range(20)
    ]
    rows.append({"messages": [{"role": EVIL, "content": "x"}]})
    data = tmp_path / "\x1b[31mred.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "train_sft.py", "--model_name_or_path", str(BASE), "--dataset_name", str(data)]
    command += ["--max_steps", "2", "--eval_fraction", "0.3", "--output_dir", str(tmp_path / "\x1b[32mout")]
    command += ["--eval_max_new_tokens", "4", "--dataset_cache_dir", str(tmp_path / "cache")]
    for more in ([], ["--learning_rat\x1b[5m", "1"], ["--dataset_name", "\x1b[6mmissing.jsonl"]):
        run = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, timeout=200)
        assert run.returncode == (1 if more else 0), run.stderr.decode()[-3000:]
        assert ("\\x1b]0;owned" in run.stdout.decode()) or more, "it was shown, spelled out"
        for shown in (run.stdout, run.stderr):
            text = shown.decode().replace("\x1b[A", "").replace("\r", "")  # of the progress bars
            assert not [c for c in text if ord(c) < 32 and c not in "\n\t" or 127 <= ord(c) < 160 or c in "\u202e\u2028"]


# --- special tokens -------------------------------------------------------------------------------------------------


def test_special_tokens_in_keys_and_the_characters_of_placeholders_are_plain_text():
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    calls = [{"function": {"name": "f", "arguments": {"<|im_end|>\n<|im_start|>user": 1}}}]
    tools = [{"function": {"name": "f", "parameters": {"properties": {"<|im_end|>": {"type": "string"}}}}}]
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": calls}]
    sequence = tokenize_messages(chat, tokenizer, tools=tools)
    assert (sequence["input_ids"] == end).sum() == 2
    text = "a\ufdd00\ufdd1b\ufdd0\ufdd0c\ufdd1<|im_end|>"
    tokenizer.chat_template = read_chat_template("chatml")
    chat = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    sequence = tokenize_messages(chat, tokenizer)
    assert tokenizer.decode(sequence["input_ids"][sequence["loss_mask"] == 1]).startswith(text)
    assert tokenize_prompt(chat[:1], tokenizer) == sequence["input_ids"][: int(sequence["loss_mask"].argmax())].tolist()


# --- model folders --------------------------------------------------------------------------------------------------


def without(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def with_nan(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")


BROKEN = {
    "a tensor is missing": (
        lambda f: without(f, "model.layers.0.mlp.up_proj.weight"),
        "its files lack model.layers.0.mlp.up_proj",
    ),
    "NaN": (
        lambda f: with_nan(f, "model.layers.1.self_attn.q_proj.weight"),
        "model.layers.1.self_attn.q_proj.weight holds a NaN",
    ),
    "truncated": (lambda f: os.truncate(f / "model.safetensors", 70_000), "model.safetensors is no whole safetensors file"),
    "empty": (lambda f: os.truncate(f / "model.safetensors", 0), "model.safetensors is no whole safetensors file"),
    "junk": (lambda f: (f / "model.safetensors").write_bytes(os.urandom(9999)), "model.safetensors is no whole"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
    "config is a list": (lambda f: (f / "config.json").write_text("[1, 2]"), "cannot load the"),
    "config is junk": (lambda f: (f / "config.json").write_text("{"), "cannot load the"),
    "hidden size is text": (lambda f: edit_config(f, hidden_size="wide"), "cannot load the"),
    "rope is a list": (lambda f: edit_config(f, rope_parameters=[1]), "cannot load the"),
    "another vocabulary": (lambda f: edit_config(f, vocab_size=77), "cannot load the model"),
    "tokenizer is junk": (lambda f: (f / "tokenizer.json").write_text('{"model": []}'), "cannot load the tokenizer"),
    "tokenizer config is a list": (lambda f: (f / "tokenizer_config.json").write_text("[]"), "cannot load the tokenizer"),
    "a pickle": (pickled, "cannot load the model"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_model_folder_is_one_line_that_says_what(kind, launch, tmp_path, monkeypatch):
    damage, says = BROKEN[kind]
    folder = tmp_path / "model"
    shutil.copytree(BASE, folder)
    damage(folder)
    words = [*SFT, "--model_name_or_path", str(folder)]
    with pytest.raises(UserError) as error:
        launch("sft", *words, "--max_steps", "1")
    assert "\n" not in str(error.value) and says in str(error.value) and "model" in str(error.value), error.value
    assert not (tmp_path / "owned").exists() and not (ROOT / "owned").exists()


def test_a_model_that_no_run_has_left_is_not_written_over(launch, tmp_path):
    shutil.copytree(BASE, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    for more in ([], ["--overwrite_output_dir"]):
        with pytest.raises(UserError, match="holds model.safetensors, which no run has left there"):
            launch("sft", *SFT, "--max_steps", "1", *more)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    quiet = ["--logging_steps", "0", "--save_steps", "0", "--max_steps", "1"]  # leaves no line and no checkpoint
    launch("sft", *SFT, *quiet, output="quiet")
    with pytest.raises(SystemExit):
        launch("sft", *SFT, *quiet, output="quiet")


# --- what never ends ------------------------------------------------------------------------------------------------


def test_a_chat_template_that_never_ends_is_one_line(launch, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "ROW_SECONDS", 1)
    (tmp_path / "endless.jinja").write_text("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    with pytest.raises(
        UserError, match=r"train.jsonl:1: this row takes more than 1 s to tokenise: a chat template that never"
    ):
        launch("sft", *SFT, "--chat_template", str(tmp_path / "endless.jinja"))


# --- a disk that does not take it -----------------------------------------------------------------------------------


def test_numbers_that_json_does_not_know_are_null_with_the_reason(tmp_path):
    metrics = Metrics(Accelerator(cpu=True), CommonArgs(output_dir=str(tmp_path)))
    metrics.log(1, loss=float("nan"), grad_norm=torch.tensor(float("inf")), rate=0.5)
    metrics.log_eval(1, {"eval_loss": float("-inf")}, [{"prompt": "a", "completion": "b", "score": float("nan")}], show=0)
    metrics.finish()

    def refuse(word):
        raise ValueError(word)

    def read(name):
        return [json.loads(line, parse_constant=refuse) for line in (tmp_path / name).read_text().splitlines()]

    first, second = read("metrics.jsonl")
    assert first["loss"] is first["grad_norm"] is None and first["rate"] == 0.5
    assert first["not_finite"] == {"loss": "nan", "grad_norm": "inf"} and second["not_finite"] == {"eval_loss": "-inf"}
    assert read("samples.jsonl")[0]["score"] is None
    json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_line_that_the_disk_does_not_take_is_counted_and_training_goes_on(tmp_path, capsys):
    metrics = Metrics(Accelerator(cpu=True), CommonArgs(output_dir=str(tmp_path)))
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    metrics.log(1, loss=1.0)
    metrics.log(2, loss=2.0)
    assert capsys.readouterr().out.count("metrics.jsonl cannot be written (No space left on device): training goes on") == 1
    (tmp_path / "metrics.jsonl").unlink()
    metrics.log(3, loss=3.0)
    metrics.finish()
    assert json.loads((tmp_path / "summary.json").read_text())["lost_lines"] == 2
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if line] == [3]


@pytest.mark.parametrize("what", ["dataset.json", "inputs.json", "summary.json"])
def test_a_file_that_the_run_needs_and_the_disk_does_not_take_is_one_line_and_the_run_goes_on_later(what, launch, tmp_path):
    words = [*SFT, "--max_steps", "4", "--save_steps", "2"]
    whole = launch("sft", *words, output="whole")
    (tmp_path / "out").mkdir()
    blocked = tmp_path / "out" / (f".{what}.tmp" if what == "summary.json" else what)
    blocked.mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        launch("sft", *words)
    blocked.rmdir()
    assert read_metrics(launch("sft", *words)) == read_metrics(whole)


# --- terminals that close -------------------------------------------------------------------------------------------


def test_a_terminal_that_is_closed_saves_and_leaves_and_nohup_goes_on(tmp_path, token_cache):
    words = [*SFT, "--max_steps", "100000", "--save_steps", "0", "--dataset_cache_dir", str(token_cache)]
    with Script(tmp_path, *words) as run:
        run.until(lambda: run.steps() >= 3)
        run.process.send_signal(signal.SIGHUP)
        assert run.process.wait(30) == EXIT_CODE
        assert "by SIGHUP; the same command goes on from" in run.log.read_text()
    nohup = (
        "-c",
        "import signal, runpy, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); sys.argv = sys.argv[1:];"
        "sys.path.insert(0, '.'); runpy.run_path(sys.argv[0], run_name='__main__')",
    )
    with Script(tmp_path, *words, launcher=nohup, prefix="nohup") as run:
        run.until(lambda: run.steps() >= 2)
        run.process.send_signal(signal.SIGHUP)
        reached = run.steps()
        run.until(lambda: run.steps() > reached + 3)


@pytest.mark.parametrize("after", [0.3, 0.8, 1.5])
def test_ctrl_c_while_libraries_are_imported_leaves_quietly(after, tmp_path):
    command = [sys.executable, "train_sft.py", "--output_dir", str(tmp_path / "out")]
    options = {"cwd": ROOT, "text": True, "preexec_fn": usual_signals}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said and "stopped before the first step" in said


# --- nothing held out -----------------------------------------------------------------------------------------------


def test_grpo_runs_where_nothing_is_held_out(launch, tmp_path):
    """As on GSM8K's own file, with the flags as they are by default."""
    rows = [{"question": f"What is {i}+1?", "answer": f"It is #### {i + 1}"} for i in range(16)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "--model_name_or_path",
        str(BASE),
        "--dataset_name",
        str(tmp_path / "train.jsonl"),
        "--columns",
        "prompt=question",
    ]
    words += ["--system_prompt", "End with: Answer: <number>", "--reward_funcs", "exact_number", "length:200"]
    output = launch("grpo", *words, "--max_steps", "2", "--max_completion_length", "8", "--logging_steps", "1")
    assert [row["step"] for row in read_metrics(output) if "reward" in row] == [1, 2]
