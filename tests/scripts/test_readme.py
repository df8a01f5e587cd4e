"""The commands of the pages run as they stand, with small local copies of what they name; what an error advises works."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

from common.errors import UserError
from tests.conftest import ROOT, read_metrics
from tests.scripts.test_bad_input import write
from tests.scripts.test_lora import without_chatml

import pytest
import yaml

PAGES = "\n".join(path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
SMALL = "--max_steps 2 --per_device_train_batch_size 2 --eval_max_new_tokens 4 --num_samples 1 --logging_steps 1".split()
STAGE = {
    "pretrain": "--hidden_size 32 --num_layers 1 --num_heads 2 --max_length 64".split(),
    "sft": [],
    "dpo": [],
    "grpo": "--per_device_train_batch_size 8 --max_completion_length 8".split(),
}
TALK = "\n\nHuman: What is {0}+1?\n\nAssistant: It is {1}.\n\nHuman: Sure?\n\nAssistant: {2}"


def documented():
    """Every `accelerate launch train_X.py` of the pages' blocks that names data of one's own: (stage, flags)."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", PAGES, re.S):
        for command in block.replace("\\\n", " ").splitlines():
            if match := re.match(r"accelerate launch train_(\w+)\.py (.*--dataset_name .*)", command):
                if "--rollout_server" not in command:  # tests/scripts/test_rollout_server.py has one
                    found.append((match[1], shlex.split(match[2])))
    return found


@pytest.fixture
def local(tmp_path, monkeypatch):
    """A folder in which the names that the pages' commands use are local."""
    for name in ("data", "accelerate_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "tinyshakespeare.txt").write_text("\n\n".join(f"Speak {i}, and be still. " * 4 for i in range(90)))
    write(tmp_path / "alpaca.json", [])
    rows = [{"instruction": f"Add 1 to {i}", "input": "", "output": f"It is {i + 1}."} for i in range(20)]
    (tmp_path / "alpaca.json").write_text(json.dumps(rows))
    for name in ("Anthropic/hh-rlhf", "openai/gsm8k", "Qwen", "outputs"):
        (tmp_path / name).mkdir(parents=True)
    pairs = [{"chosen": TALK.format(i, i + 1, "Yes."), "rejected": TALK.format(i, i + 1, "No idea.")} for i in range(20)]
    for split in ("train", "test"):
        write(tmp_path / "Anthropic" / "hh-rlhf" / f"{split}.jsonl", pairs)
        sums = [{"question": f"What is {i}+1?", "answer": f"{i}+1=<<{i}+1={i + 1}>>\n#### {i + 1}"} for i in range(20)]
        write(tmp_path / "openai" / "gsm8k" / f"{split}.jsonl", sums)
    for name in ("gpt2", "Qwen/Qwen3-0.6B-Base", "outputs/sft"):
        shutil.copytree(ROOT / "data" / "base_model", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_are_found():
    assert [stage for stage, _ in documented()] == ["pretrain", "sft", "dpo", "grpo"]


@pytest.mark.parametrize("number", range(4))
def test_a_documented_command_runs(number, launch, local):
    stage, words = documented()[number]
    output = launch(stage, *words, *SMALL, *STAGE[stage])
    rows = read_metrics(output)
    assert {row["step"] for row in rows if "loss" in row} == {1, 2}
    assert (output / "model.safetensors").exists() and (output / "summary.json").exists()


def test_every_file_and_flag_that_the_readme_names_exists():
    flags = {name for stage in STAGE for name in yaml.safe_load((ROOT / f"data/configs/{stage}.yaml").read_text())}
    for stage in STAGE:
        module = __import__(f"train_{stage}")
        flags |= set(module.Args.__dataclass_fields__)
    others = {"config", "config_file", "help", "index", "mixed_precision", "only", "quick", "device", "rounds", "chats"}
    others |= {"text_mb", "corpus_mb", "seeds", "tiny", "url", "experts", "coefficients", "prompt"}
    others |= {
        "num_machines",
        "num_processes",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "cpu",
    }  # of accelerate
    others |= {"include_path", "limit", "apply_chat_template", "tokens", "output", "lmbda"}  # of tools and benchmarks
    others |= {"enable", "lora", "max", "outfile", "outtype", "modelfile", "time"}  # of vLLM, llama.cpp, Ollama, SLURM
    others |= {"api", "enforce", "generation", "gpu", "host", "kv", "logprobs", "model", "no", "port", "tensor", "weight"}
    others |= {"baseline", "save", "strict", "alpha", "max_new_tokens"}
    for name in re.findall(r"--([a-z]\w+)", PAGES):
        assert name in flags | others, name
    for path in re.findall(r"`((?:tests|benchmarks|accelerate_configs|data|common)/[\w/.]+\.\w+)`", PAGES):
        assert (ROOT / path).exists(), path
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)


@pytest.mark.slow
def test_the_chain_of_lora_and_the_lines_that_use_its_result_run_as_written(local, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    page = (ROOT / "docs" / "models.md").read_text()
    (commands,) = (block for block in re.findall(r"```bash\n(.*?)```", page, re.S) if "tools.merge_lora" in block)
    shutil.rmtree("outputs")
    for command in commands.strip().splitlines():
        words = shlex.split(command)
        words = [sys.executable, *(str(ROOT / word) if word.endswith(".py") else word for word in words[1:])]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (command, done.stderr[-2000:])
        assert "Warning" not in done.stderr, done.stderr
    assert done.stdout.strip()
    card = open("outputs/merged/README.md").read()
    assert "after an earlier stage, by a LoRA adapter (rank 16, alpha 32)" in card and "- Method: preference" in card
    shutil.copytree("outputs/merged", "outputs/sft")
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, (block, done.stderr[-2000:])


def test_with_data_named_nothing_in_outputs_changes_what_is_trained(launch, local):
    """The model of the stage before is the default; the data is what the command says."""
    words = ["--dataset_name", "alpaca.json", "--model_name_or_path", "gpt2", *SMALL]
    first = read_metrics(launch("sft", *words, output="first"))
    (local / "outputs" / "pretrain").mkdir()
    (local / "outputs" / "pretrain" / "summary.json").write_text("{}")
    assert read_metrics(launch("sft", *words, output="second")) == first


@pytest.mark.slow
def test_the_chain_of_the_demo_runs_as_written(local, monkeypatch):
    """SFT first, from the model that ships; then a pretraining of one's own, SFT again, DPO, GRPO."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shutil.rmtree("outputs")

    def run(stage, *words):
        command = [sys.executable, str(ROOT / f"train_{stage}.py"), "--max_steps", "2", "--eval_steps", "0", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=200)

    first = run("sft")
    assert first.returncode == 0 and "model: data/base_model (it ships here" in first.stdout, first.stderr[-2000:]
    assert run("pretrain").returncode == 0
    again = run("sft")
    assert again.returncode == 1 and "data/base_model -> outputs/pretrain" in again.stderr
    assert "--overwrite_output_dir starts over" in again.stderr
    again = run("sft", "--overwrite_output_dir")
    assert again.returncode == 0 and "model: outputs/pretrain (the finished run of the last stage)" in again.stdout
    for stage in ("dpo", "grpo"):
        after = run(stage)
        assert after.returncode == 0 and "model: outputs/sft (the finished run" in after.stdout, after.stderr[-2000:]


# --- advice ---------------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {}}}]


def advised(error) -> list[str]:
    """The flags that a message proposes, with their values."""
    return shlex.split(re.search(r"(--columns \S+?)\)?(?: |$|\))", str(error))[1].rstrip(")"))


@pytest.mark.parametrize("every", [1, 2], ids=["all rows", "every second row"])
def test_rows_with_tools_can_be_trained_without_them(every, launch, tmp_path, capsys):
    chat = {"messages": [{"role": "user", "content": "look"}, {"role": "assistant", "content": "There."}]}
    rows = [chat | ({"tools": TOOLS} if i % every == 0 else {}) for i in range(8)]
    words = ["--model_name_or_path", "data/base_model", "--dataset_name", write(tmp_path / "tools.jsonl", rows), *SMALL]
    with pytest.raises(UserError, match="leaves out the tools") as error:
        launch("sft", *words)
    flags = advised(error.value)
    assert flags == ["--columns", "unused=tools"]
    launch("sft", *words, *flags)


def test_a_pair_with_tools_can_be_trained_without_them(launch, tmp_path):
    prompt = [{"role": "user", "content": "look"}]
    sides = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    rows = [{"prompt": prompt, **sides, "tools": TOOLS} for _ in range(8)]
    words = ["--model_name_or_path", "data/base_model", "--dataset_name", write(tmp_path / "tools.jsonl", rows), *SMALL]
    with pytest.raises(UserError, match="a pair with tools") as error:
        launch("dpo", *words)
    launch("dpo", *words, *advised(error.value))


PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
REFUSED = {
    "rewrites earlier turns": "{{ messages | length }}" + PLAIN,
    "leaves out a user message": PLAIN.replace("messages %}", "messages if m.role != 'user' %}"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_template_that_is_refused_can_be_replaced_as_the_message_says(kind, launch, tmp_path):
    (tmp_path / "mine.jinja").write_text(REFUSED[kind])
    chat = [{"role": role, "content": f"{role} {i}"} for i in range(2) for role in ("user", "assistant")]
    words = ["--model_name_or_path", "data/base_model", *SMALL]
    words += ["--dataset_name", write(tmp_path / "chats.jsonl", [{"messages": chat}] * 8)]
    with pytest.raises(UserError, match=kind) as error:
        launch("sft", *words, "--chat_template", str(tmp_path / "mine.jinja"))
    assert "--chat_template chatml" in str(error.value)
    launch("sft", *words, "--chat_template", "chatml")


def test_a_folder_with_a_run_says_how_to_start_over(launch, capsys):
    words = ["--config", "data/configs/sft.yaml", "--model_name_or_path", "data/base_model", *SMALL, "--save_steps", "1"]
    launch("sft", *words)
    for other in (["--seed", "1"], ["--max_steps", "3", "--max_train_samples", "9"]):
        with pytest.raises(UserError, match="--overwrite_output_dir starts over, or choose another --output_dir"):
            launch("sft", *words, *other)
    with pytest.raises(SystemExit):
        launch("sft", *words)
    assert "holds this very run, complete: --overwrite_output_dir starts over" in capsys.readouterr().out
    launch("sft", *words, "--seed", "1", "--overwrite_output_dir")
    assert os.listdir(os.fspath(launch("sft", *words, "--seed", "2", output="another")))


def chats(*turns, count=8):
    """Rows of one chat: ("user", words), ("assistant", words), ..."""
    return [{"messages": [{"role": role, "content": content} for role, content in turns]}] * count


TALKS = chats(("user", "a"), ("assistant", "one"), ("user", "b"), ("assistant", "two"))
SHOUTS = PLAIN.replace("m.content", "(m.content if loop.last or m.role == 'user' else m.content | upper)")
SOME_END = PLAIN.replace("m.content + '<|im_end|>\\n'", "m.content + ('<|im_end|>\\n' if loop.index < 4 else '\\n')")
PAIRS = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 8
ADVICE = {
    # stage, rows, template, flags that are refused, what is said, what is proposed
    "changed answers": ("sft", TALKS, SHOUTS, "", "--train_on last_turn", "--train_on last_turn"),
    "changed answers, template": ("sft", TALKS, SHOUTS, "", "--chat_template chatml", "--chat_template chatml"),
    "no end": ("sft", TALKS, PLAIN.replace("<|im_end|>", ""), "", "pass --chat_template chatml, plain", "--chat_template plain"),
    "some ends": ("sft", TALKS, SOME_END, "", "no special token (try --chat_template chatml)", "--chat_template chatml"),
    "assistant first": (
        "sft", chats(("assistant", "Hello!"), ("user", "a"), ("assistant", "b")), PLAIN, "", "(--chat_template chatml allows that)",
        "--chat_template chatml",
    ),
    "columns": ("sft", [{"q": "a", "a": "b"}] * 8, None, "", "--columns new=old", "--columns instruction=q output=a"),
    "stream without end": ("sft", TALKS, None, "--dataset_streaming --max_steps -1", "--max_steps", "--max_steps 1"),
    "stream, precomputed": (
        "dpo", PAIRS, None, "--dataset_streaming --precompute_ref_log_probs", "without --dataset_streaming",
        "--dataset_streaming false",
    ),
    "stopping early": ("sft", TALKS, None, "--early_stopping_patience 2", "say with --save_best", "--save_best eval_loss"),
    "which is better": ("sft", TALKS, None, "--save_best eval_entropy", "Write min:eval_entropy", "--save_best min:eval_entropy"),
    "turn dropping": (
        "sft", TALKS, None, "--turn_dropping 0.5 --train_on last_turn", "--train_on all_turns", "--train_on all_turns"
    ),
    "smoothing": (
        "dpo", PAIRS, None, "--loss_type ipo --label_smoothing 0.1", "--loss_type sigmoid, sigmoid_norm, robust, exo_pair, simpo", "--loss_type robust"
    ),
    "nothing held out": ("sft", TALKS, None, "--eval_fraction 1e-9", "a larger share is needed", "--eval_fraction 0.5"),
    "LoRA on nothing": (
        "pretrain", [{"text": "one two three " * 30}] * 8, None, "--use_peft --max_length 64", "name it with --model_name_or_path",
        "--model_name_or_path data/base_model",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "stream without end" else name for name in ADVICE]
)
def test_what_an_error_advises_works(name, launch, tmp_path):
    stage, rows, template, flags, said, proposed = ADVICE[name]
    if name == "nothing held out":
        rows = [row for i in range(8) for row in chats(("user", f"a {i}"), ("assistant", "b"), count=1)]
    data = write(tmp_path / "rows.jsonl", rows)
    words = ["--dataset_name", data, *SMALL, "--output_dir", str(tmp_path / "out"), "--eval_steps", "1"]
    words += ["--eval_dataset_name", data] if "--eval_fraction" not in flags else []
    words += [] if stage == "pretrain" else ["--model_name_or_path", "data/base_model"]
    if template:
        (tmp_path / "mine.jinja").write_text(template)
        words += ["--chat_template", str(tmp_path / "mine.jinja")]
    words += flags.split()
    with pytest.raises(UserError) as error:
        launch(stage, *words)
    assert said in str(error.value), error.value
    assert (launch(stage, *words, *proposed.split()) / "model.safetensors").exists() or "--use_peft" in flags


@pytest.mark.parametrize("proposed", ["chatml", "plain"])
def test_a_tokenizer_without_a_template_can_be_given_one(proposed, launch, tmp_path):
    shutil.copytree(ROOT / "data" / "base_model", tmp_path / "bare")
    (tmp_path / "bare" / "chat_template.jinja").unlink()
    words = ["--dataset_name", write(tmp_path / "rows.jsonl", TALKS), "--model_name_or_path", str(tmp_path / "bare"), *SMALL]
    with pytest.raises(UserError, match="has no chat template: pass --chat_template chatml, plain, or a .jinja file"):
        launch("sft", *words)
    launch("sft", *words, "--chat_template", proposed)


def test_where_to_go_on_from_is_told_rightly(launch, tmp_path):
    """A complete run goes on with a larger --max_steps; a checkpoint of other settings is a model to start from."""
    words = ["--config", "data/configs/sft.yaml", "--model_name_or_path", "data/base_model", *SMALL, "--save_steps", "1"]
    first = launch("sft", *words, output="first")
    with pytest.raises(UserError, match="a larger --max_steps goes on with it"):
        launch("sft", *words, "--learning_rate", "1e-5", output="first")
    launch("sft", *words, "--learning_rate", "1e-5", "--max_steps", "3", output="first")
    other = [*words, "--seed", "1"]
    with pytest.raises(UserError, match="to start from its weights, use --model_name_or_path"):
        launch("sft", *other, "--resume_from_checkpoint", str(first / "checkpoint-2"), output="other")
    launch("sft", *other, "--model_name_or_path", str(first / "checkpoint-2"), output="other")


@pytest.mark.slow
def test_an_adapter_gets_new_tokens_as_the_message_says(launch, tmp_path):
    pytest.importorskip("peft")
    from common.model.merge import merge_adapter

    base = without_chatml(tmp_path / "base")
    words = ["--config", "data/configs/sft.yaml", *SMALL, "--use_peft", "--model_name_or_path"]
    adapter = launch("sft", *words, base, output="adapter")
    words.insert(0, "--chat_template=chatml")
    with pytest.raises(UserError, match="knows nothing of 2 tokens that the tokenizer was given: merge it"):
        launch("sft", *words, adapter, output="next")
    merge_adapter(str(adapter), str(tmp_path / "merged"))
    launch("sft", *words, tmp_path / "merged", output="next")
