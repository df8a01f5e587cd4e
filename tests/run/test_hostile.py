"""Nothing silent, nothing lost: hostile data, broken model folders, disks that are full, terminals that close."""

import json
import os
import pty
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from common.args import CommonArgs
from common.data import encoding
from common.data.chat import read_chat_template
from common.data.sources import load_rows
from common.data.tokens import tokenize_messages, tokenize_prompt
from common.errors import UserError, _Lasting, printable, say
from common.run.metrics import Metrics
from common.run.retry import Retry
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


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_config(folder: Path, **changes) -> None:
    edit(folder / "config.json", **changes)


def adapter(folder: Path, base: str | None) -> None:
    for file in folder.iterdir():
        file.unlink()
    settings = {"peft_type": "LORA", "base_model_name_or_path": base, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({"x": torch.zeros(1)}, folder / "adapter_model.safetensors")


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
    "another size": (lambda f: edit_config(f, vocab_size=77), "embed_tokens.weight is (512, 96) in its files and (77, 96)"),
    "dropout above 1": (lambda f: edit_config(f, attention_dropout=2.0), "attention_dropout 2.0 of its config.json is no"),
    "dropout below 0": (lambda f: edit_config(f, attention_dropout=-1), "attention_dropout -1 of its config.json is no"),
    "stop token": (lambda f: (f / "generation_config.json").write_text('{"eos_token_id": "x"}'), "eos_token_id 'x' is not"),
    "no unknown token": (
        lambda f: edit(f / "tokenizer_config.json", tokenizer_class="BertTokenizer"),
        "cannot load the tokenizer",
    ),
    "no angle": (lambda f: edit_config(f, rope_parameters={"rope_theta": 0, "rope_type": "default"}), "look at rope_theta"),
    "NaN in config": (lambda f: edit_config(f, rms_norm_eps=float("nan")), "a few tokens give NaN: look at *_eps"),
    "heads are text": (lambda f: edit_config(f, num_attention_heads="four"), "cannot load the config"),
    "config is empty": (lambda f: (f / "config.json").write_text(""), "config.json is not valid JSON"),
    "no base": (lambda f: adapter(f, "/no/such"), "adapter_config.json names the base /no/such, which is not there"),
    "its own base": (lambda f: adapter(f, str(f)), "adapter_config.json names no other model as its base"),
    "null as base": (lambda f: adapter(f, None), "adapter_config.json names no other model as its base"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_model_folder_is_one_line_that_says_what(kind, launch, tmp_path, capfd):
    damage, says = BROKEN[kind]
    folder = tmp_path / "model"
    shutil.copytree(BASE, folder)
    damage(folder)
    words = [*SFT, "--model_name_or_path", str(folder)]
    with pytest.raises(UserError) as error:
        launch("sft", *words, "--max_steps", "1")
    assert "\n" not in str(error.value) and says in str(error.value) and "model" in str(error.value), error.value
    assert not (tmp_path / "owned").exists() and not (ROOT / "owned").exists()
    assert "LOAD REPORT" not in capfd.readouterr().err  # of transformers, in twenty lines


def test_a_name_of_a_tensor_reaches_the_terminal_spelled_out(launch, tmp_path, capfd):
    shutil.copytree(BASE, tmp_path / "model")
    tensors = load_file(BASE / "model.safetensors") | {f"model.{EVIL}": torch.zeros(2)}
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    launch("sft", *SFT, "--model_name_or_path", str(tmp_path / "model"), "--dry_run")
    said = capfd.readouterr()
    assert "has no place for model.\\x1b[2J" in said.out and "\x1b[2J" not in said.out + said.err


THEIRS = ["tokenizer.json", "chat_template.jinja", "args.yaml", "dataset.json", "inputs.json", "samples.jsonl", "curves.png"]


@pytest.mark.parametrize(
    "name", [*THEIRS, "completions.jsonl", "metrics.jsonl", "config.json", "train_sft.py", "vocab.json"]
)
def test_a_file_that_no_run_has_left_is_not_written_over(name, launch, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    for more in ([], ["--overwrite_output_dir"]) if name != "metrics.jsonl" else ([],):
        with pytest.raises(UserError, match=f"holds {name}, which no run has left there|whose args.yaml cannot be read"):
            launch("sft", *SFT, "--max_steps", "1", *more)
    assert (tmp_path / "out" / name).read_text() == "mine"


@pytest.mark.slow
def test_a_readme_of_the_users_stays(launch, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("mine")
    output = launch("sft", *SFT, "--max_steps", "1", "--use_peft")
    assert (output / "README.md").read_text() == "mine" and (output / "adapter_config.json").exists()


def test_the_folder_of_the_data_is_no_output_folder(launch, tmp_path):
    data = tmp_path / "out"
    data.mkdir()
    shutil.copy(ROOT / "data/sft/train.jsonl", data / "samples.jsonl")
    source = json.dumps({"path": str(data)})
    for words in (
        ["--dataset_name", str(data)],
        ["--dataset_name", str(data / "samples.jsonl")],
        ["--dataset_name", source],
    ):
        with pytest.raises(UserError, match=f"--output_dir {data} holds the data of --dataset_name"):
            launch("sft", *SFT, *words, "--overwrite_output_dir")
    with pytest.raises(UserError, match="holds the data of --eval_prompts"):
        launch("sft", *SFT, "--eval_prompts", str(data / "samples.jsonl"))
    assert os.listdir(data) == ["samples.jsonl"]
    with pytest.raises(UserError, match="--output_dir is empty"):
        launch("sft", *SFT, "--output_dir", "")


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


def test_a_disk_that_is_full_for_a_while_leaves_whole_lines(tmp_path, capsys):
    metrics = Metrics(Accelerator(cpu=True), CommonArgs(output_dir=str(tmp_path)))
    file, limits = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in range(1, 8):
        if step == 3:  # room for half a line
            resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 40, limits[1]))
        if step == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        metrics.log(step, loss=1.0)
    metrics.finish()
    assert [json.loads(line)["step"] for line in file.read_text().split("\n")[:-1]] == [1, 2, 5, 6, 7]
    assert json.loads((tmp_path / "summary.json").read_text())["lost_lines"] == 2
    assert capsys.readouterr().out.count("cannot be written") == 1 and (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("how", ["a line is damaged", "no such backend", "no place"])
def test_a_picture_is_not_worth_a_run(how, tmp_path, monkeypatch, capsys):
    metrics = Metrics(Accelerator(cpu=True), CommonArgs(output_dir=str(tmp_path)))
    metrics.log(1, loss=1.0)
    if how == "a line is damaged":
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo\n\n{"step": 2, "loss": 1.0}\n')
    elif how == "no place":
        (tmp_path / "curves.png").mkdir()
    else:
        monkeypatch.setattr("common.run.metrics.draw_curves", lambda _: {}["nosuch"])
    metrics.finish()
    assert (tmp_path / "summary.json").exists()
    assert ("curves.png was not drawn" in capsys.readouterr().err) == (how != "a line is damaged")


TALK = "import sys, common; from common.errors import keep_talking, say; keep_talking()\n"
TALK += "for i in range(3000): say(f'line {i} {chr(233)} {chr(20320)}'); print('err', i, file=sys.stderr, flush=True)\n"
TALK += "open(sys.argv[1], 'w').write('done')\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
@pytest.mark.parametrize("how", ["| head -1", "2>&1 | head -1", ">/dev/full", "2>/dev/full", ">&- 2>&-", ">/dev/full 2>&1"])
def test_a_log_that_cannot_be_written_does_not_end_a_run(how, tmp_path):
    command = f'set -o pipefail; {sys.executable} -c "$TALK" {tmp_path}/done {how}'
    env = os.environ | {"TALK": TALK, "LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    run = subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and (tmp_path / "done").read_text() == "done", run.stderr[-2000:]
    assert "Exception ignored" not in run.stderr and (how != "2>/dev/full" or "line 2 \\xe9 \\u4f60" in run.stdout)


def test_a_log_says_where_lines_are_missing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open(tmp_path / "log", "w") as file:
        log = _Lasting(file)
        for i in range(6):
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]) if 2 <= i < 4 else limits)
            log.write(f"line {i}\n")
            log.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = (tmp_path / "log").read_text()
    assert said.startswith("line 0\nline 1\n") and said.endswith("line 4\nline 5\n")
    assert said.count("[lines are missing here: File too large]") == 1


def test_who_speaks(monkeypatch, capsys):
    for world, rank, speaks in (("", "1", True), (None, "abc", True), ("2", "0", True), ("2", "1", False)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world) if world is not None else monkeypatch.delenv("WORLD_SIZE", raising=False)
        say("a line")
        assert (capsys.readouterr().out == "a line\n") == speaks


@pytest.mark.parametrize(
    "kind, value", [("FSDP", "1"), ("DEEPSPEED", "yes"), ("MEGATRON_LM", "true"), ("DEEPSPEED", "True")]
)
def test_what_accelerate_would_ignore_is_one_line(kind, value, launch, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"ACCELERATE_USE_{kind}={value}|asks for DeepSpeed: pip install deepspeed"):
        launch("sft", *SFT)


# --- a folder that vanishes -----------------------------------------------------------------------------------------


def before_step(monkeypatch, step, act) -> None:
    seed_dropout = Retry._seed_dropout

    def act_and_seed(self, at):
        if at == step:
            act()
        seed_dropout(self, at)

    monkeypatch.setattr(Retry, "_seed_dropout", act_and_seed)


def test_a_folder_that_is_deleted_is_made_anew_at_the_next_save(launch, tmp_path, monkeypatch, capsys):
    words = [*SFT, "--save_steps", "4"]
    whole = launch("sft", *words, "--max_steps", "8", output="whole")
    with monkeypatch.context() as patch:
        before_step(patch, 2, lambda: shutil.rmtree(tmp_path / "out"))
        output = launch("sft", *words, "--max_steps", "6")
    said = capsys.readouterr().out
    assert "the folder was deleted): training goes on" in said and "was deleted: it is made anew" in said
    assert [row["step"] for row in read_metrics(output)] == [5, 6]
    assert json.loads((output / "summary.json").read_text())["lost_lines"] == 2
    launch("sft", *words, "--max_steps", "8")  # it is known whose it is
    assert read_metrics(output)[-2:] == read_metrics(whole)[-2:]


def test_a_folder_that_another_run_has_meanwhile_is_left_to_it(launch, tmp_path, monkeypatch):
    code = "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.lockf(f, fcntl.LOCK_EX); f.write('process 7')"
    code += "; f.flush(); print(flush=True); sys.stdin.read()"
    other = []

    def take() -> None:
        shutil.rmtree(tmp_path / "out")
        (tmp_path / "out").mkdir()
        command = [sys.executable, "-c", code, str(tmp_path / "out" / ".lock")]
        other.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        other[0].stdout.readline()

    before_step(monkeypatch, 2, take)
    with pytest.raises(UserError, match="is in use by process 7"):
        launch("sft", *SFT, "--save_steps", "4")
    assert os.listdir(tmp_path / "out") == [".lock"]
    other[0].communicate()


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
@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("heeded", [True, False], ids=["SIGHUP", "nohup"])
def test_a_terminal_that_is_gone_takes_no_run_with_it(heeded, tmp_path, token_cache):
    """What is printed after that has nowhere to go (EIO)."""
    output = tmp_path / "out"
    words = [*SFT, "--max_steps", "60", "--dataset_cache_dir", str(token_cache), "--output_dir", str(output)]
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL if heeded else signal.SIG_IGN)
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "train_sft.py", *words])
    deadline = time.monotonic() + 100
    while not (output / "metrics.jsonl").exists() or len(read_metrics(output)) < 5:
        assert time.monotonic() < deadline
        if select.select([terminal], [], [], 0.1)[0]:
            os.read(terminal, 65536)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == (EXIT_CODE if heeded else 0)
    assert (output / "summary.json").exists() != heeded and list(output.glob("checkpoint-*"))


@pytest.mark.parametrize("after", [0.3, 0.8, 1.5])
def test_ctrl_c_while_libraries_are_imported_leaves_quietly(after, tmp_path):
    begun = "import common, runpy; print('begun', flush=True); runpy.run_path('train_sft.py', run_name='__main__')"
    command = [sys.executable, "-c", begun, "--output_dir", str(tmp_path / "out")]
    options = {"cwd": ROOT, "text": True, "preexec_fn": usual_signals}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    assert process.stdout.readline() == "begun\n"
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


# --- templates and rows ---------------------------------------------------------------------------------------------


def test_a_template_that_is_none_is_one_line(tmp_path):
    (tmp_path / "latin.jinja").write_bytes("{{ 'é' }}".encode("latin-1"))
    for name, says in (
        (str(tmp_path / "latin.jinja"), "latin.jinja: not UTF-8"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}" * 9, "that is a template itself; write it to a .jinja file"),
        ("x" * 300 + ".jinja", "File name too long"),
        (str(tmp_path), "shipped templates: chatml, plain"),
    ):
        with pytest.raises(UserError, match=says):
            read_chat_template(name)


def test_a_key_twice_in_a_row_is_refused(tmp_path):
    for name, text in (("a.jsonl", '{"x": 1}\n{"x": 1, "y": {"z": 1, "z": 2}}\n'), ("a.json", '[{"y": 1, "y": 2}]')):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=r"not valid JSON: the key '[yz]' stands there twice"):
            load_rows(str(tmp_path / name))


def test_a_pipe_is_no_file_and_a_folder_has_no_revision_and_no_configurations(launch, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match="is a pipe or a device, which cannot be read twice"):
        launch("sft", *SFT, "--dataset_name", str(tmp_path / "pipe.jsonl"))
    with pytest.raises(UserError, match="--model_revision v2: data/base_model is a folder, not a Hub model"):
        launch("sft", *SFT, "--model_revision", "v2")
    launch("sft", *SFT, "--dataset_config", "de", "--dry_run")
    assert "--dataset_config de does nothing for data/sft" in capsys.readouterr().out


def test_too_long_sequences_name_the_flags_that_limit_them(launch, tmp_path):
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "yz" * 600}]
    (tmp_path / "long.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    words = [
        *SFT,
        "--dataset_name",
        str(tmp_path / "long.jsonl"),
        "--max_length",
        "600",
        "--per_device_train_batch_size",
        "1",
    ]
    with pytest.raises(UserError, match="the model has 512 positions: lower --max_length$"):
        launch("sft", *words)
    launch("sft", *words, "--max_length", "512", "--max_steps", "1")  # as it says
