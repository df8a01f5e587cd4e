"""What the pages show is so: commands run, flags, files and links exist, quoted code is in the scripts."""

import concurrent.futures
import json
import os
from pathlib import Path
import re
import shlex
import shutil
import subprocess
import sys

from common.data import Row, as_chat, as_preference, as_prompt, as_text
import pytest
from safetensors.torch import load_file
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import (
    EXPERIMENTS,
    ROOT,
    assert_same,
    demo,
    free_port,
    losses,
    read_metrics,
    read_rows,
    run_script,
    teacher,
    write_rows,
)

STAGES = ("pretrain", "sft", "dpo", "grpo")
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(path.read_text() for path in PAGES)
TINY = "--max_steps 2 --max_train_samples 40 --max_eval_samples 4 --eval_max_new_tokens 4 --logging_steps 1 --save_steps 0".split()
SMALL = {
    "pretrain": [
        *TINY,
        *"--vocab_size 300 --hidden_size 32 --num_layers 1 --per_device_train_batch_size 2".split(),
    ],
    "sft": [*TINY, *"--per_device_train_batch_size 2 --model_name_or_path data/base_model".split()],
    "dpo": [*TINY, *"--per_device_train_batch_size 2 --model_name_or_path data/base_model".split()],
    "grpo": [*TINY, *"--per_device_train_batch_size 8 --model_name_or_path data/base_model".split()]
    + "--max_completion_length 8 --num_generations 4".split(),
}
TALK = "\n\nHuman: What is {0}+1?\n\nAssistant: It is {1}.\n\nHuman: Sure?\n\nAssistant: {2}"


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, kind: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    return [body for found, body in fences if found == kind]


def commands(text: str) -> list[str]:
    """The lines of the blocks of commands, each whole."""
    return [
        line
        for block in blocks(text, "bash")
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip()
    ]


# --- what the pages name ------------------------------------------------------------------------------------


def test_flags_and_links_of_the_pages_exist():
    """Flags of the scripts, in commands, too; what stands between backticks: test_names.py."""
    args = {f"train_{stage}": set(__import__(f"train_{stage}").Args.__dataclass_fields__) for stage in STAGES}
    text = re.sub(r"tools\.trial .*", "", TEXT.replace("\\\n", " "))  # whose options follow scripts
    for script, flags in re.findall(r"(train_\w+)\.py((?: +[^\n`|]*)?)", text):
        if script in args:
            assert set(re.findall(r" --(\w+)", flags)) <= args[script] | {"config", "help"}, (script, flags)
    for path in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), (path.name, target)


@pytest.mark.parametrize("stage", STAGES)
def test_quoted_code_is_in_the_script(stage):
    quoted = blocks(page(f"docs/loop_{stage}.md"), "python")
    assert len(quoted) >= 3
    for block in quoted:
        assert block in page(f"train_{stage}.py"), block


def test_the_chinese_front_page_has_the_same_commands_and_links():
    english, chinese = page("README.md"), page("README.zh-CN.md")
    assert all(blocks(english, kind) == blocks(chinese, kind) for kind in ("diff", ""))
    without_comments = [
        re.sub("(^|  +)#.*", "", "\n".join(blocks(text, "bash")), flags=re.M) for text in (english, chinese)
    ]
    assert without_comments[0] == without_comments[1] and "python train_sft.py" in without_comments[0]
    links = [set(re.findall(r"\]\(([^)]+)\)", text)) for text in (english, chinese)]
    assert links[0] ^ links[1] == {"README.md", "README.zh-CN.md"}
    for pattern in (r"`(--\w+|[\w./]+\.(?:py|yaml))`", r"\d+\.\d+"):  # flags and files, figures
        assert set(re.findall(pattern, english)) == set(re.findall(pattern, chinese))


def edited(diff: str, folder: Path) -> tuple[str, Path]:
    """An edit of a page, applied to a copy in the folder: (the script that it is for, the copy)."""
    script, copy = re.findall(r"^(?:---|\+\+\+) (\S+)", diff, re.M)
    patch = ROOT / "docs" / "edits" / f"{copy[6:-3]}.diff"
    shown, applied = (re.findall(r"^[-+](?![-+]{2}).*", text, re.M) for text in (diff, patch.read_text()))
    assert shown == applied  # the page leaves out what stays
    shutil.copyfile(ROOT / script, folder / copy)
    subprocess.run(["git", "apply", str(patch)], cwd=folder, check=True)
    assert (folder / copy).read_text() != page(script)
    return script, folder / copy


def edits() -> list[str]:
    return blocks(page("README.md"), "diff") + blocks(page("docs/loop_sft.md"), "diff")


def test_each_edit_of_the_pages_applies(tmp_path):
    assert len([edited(diff, tmp_path) for diff in edits()]) == 4


# --- metrics ------------------------------------------------------------------------------------------------


def explained() -> set[str]:
    """The names of docs/metrics.md, of which some stand for several: rewards/<function>/mean."""
    return set(re.findall(r"`([\w/<>]+)`", page("docs/metrics.md")))


@pytest.mark.slow
def test_every_metric_that_is_written_is_explained(launch):
    # of these runs, and no other word
    functions, sources = r"(exact_number|regex|polite|reward)", r"(train|validation|sft)"
    patterns = [
        re.escape(name).replace("<function>", functions).replace("<source>", sources) for name in explained()
    ]
    patterns = [pattern.replace("<T>", r"[\d.]+") for pattern in patterns]
    runs = {name: [] for name in STAGES} | {
        name: ["--model_name_or_path", "data/base_model"] for name in EXPERIMENTS
    }
    runs["grpo_several"] = "--beta 0.1 --num_iterations 2 --eval_temperatures 0 0.7".split()
    runs["pretrain_moe"] = "--num_experts 4 --hidden_size 64".split()
    runs["sft_two"] = (
        "--dataset_name data/sft/train.jsonl data/sft/validation.jsonl --eval_fraction 0.2".split()
    )
    runs["self_distill"] += ["--lmbda", "0.5"]
    runs["distill"] += [
        "--teacher_model_name_or_path",
        teacher(),
        *"--lmbda 0.5 --dataset_name data/sft".split(),
    ]
    for name, more in runs.items():
        stage = name if name in EXPERIMENTS else name.split("_")[0]
        words = ["--config", demo(stage), *SMALL.get(stage, TINY), *more]
        words += (
            ["--max_completion_length", "8"]
            if stage in ("ppo", "rft", "tools", "distill", "self_distill")
            else []
        )
        output = launch(stage, *words, output=name)
        keys = {key for row in read_rows(output / "metrics.jsonl") for key in row} - {"step"}
        assert len(keys) > 5
        for key in keys:
            plain = re.sub(r"_t[\d.]+$", "", key.removeprefix("eval_"))
            assert any(re.fullmatch(p, key) or re.fullmatch(p, plain) for p in patterns), (name, key)


# --- commands -----------------------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path, monkeypatch):
    """A folder in which the names that the pages' commands use are local."""
    for name in ("data", "accelerate_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    pairs = [
        {"chosen": TALK.format(i, i + 1, "Yes."), "rejected": TALK.format(i, i + 1, "No idea.")}
        for i in range(20)
    ]
    sums = [
        {"question": f"What is {i}+1?", "answer": f"{i}+1=<<{i}+1={i + 1}>>\n#### {i + 1}"} for i in range(20)
    ]
    files = {f"Anthropic/hh-rlhf/{split}.jsonl": pairs for split in ("train", "test")}
    files |= {f"openai/gsm8k/{split}.jsonl": sums for split in ("train", "test")}
    for name, rows in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_rows(tmp_path / name, rows)
    rows = [{"instruction": f"Add 1 to {i}", "input": "", "output": f"It is {i + 1}."} for i in range(20)]
    (tmp_path / "alpaca.json").write_text(json.dumps(rows))
    (tmp_path / "tinyshakespeare.txt").write_text(
        "\n\n".join(f"Speak {i}, and be still. " * 4 for i in range(90))
    )
    for name in ("gpt2", "Qwen/Qwen3-0.6B-Base", "outputs/sft", "outputs/alpaca", "outputs/smollm2"):
        shutil.copytree(ROOT / "data" / "base_model", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


ON_DATA = r"python train_(\w+)\.py ((?!--use_peft).*--dataset_name .*)"


@pytest.mark.parametrize("stage", STAGES)
def test_the_commands_on_data_of_ones_own_run(stage, launch, local):
    """But for sizes. (Those with a server: tests/scripts/test_rollout_server.py.)"""
    found = [
        match[2]
        for c in commands(TEXT)
        if (match := re.match(ON_DATA, c)) and match[1] == stage and "_server" not in c
    ]
    assert found
    small = "--max_steps 2 --per_device_train_batch_size 2 --eval_max_new_tokens 4 --num_samples 1 --logging_steps 1"
    small += {"pretrain": " --hidden_size 32 --num_layers 1 --num_heads 2 --max_length 64"}.get(stage, "")
    small += {"grpo": " --per_device_train_batch_size 8 --max_completion_length 8"}.get(stage, "")
    for number, words in enumerate(found):
        words = re.sub(r" --output_dir \S+", "", words)
        output = launch(stage, *shlex.split(words), *small.split(), output=str(number))
        assert {row["step"] for row in read_metrics(output) if "loss" in row} == {1, 2}
        assert (output / "model.safetensors").exists() and (output / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "docs/use.md", "docs/parallel.md", "docs/regression.md"])
def test_the_other_commands_run_as_they_stand(name, local):
    """But for fewer steps; not those on a Hub, a server or a cluster."""
    pytest.importorskip("peft")
    for path in [ROOT / "common", ROOT / "tools", *(ROOT / f"train_{stage}.py" for stage in STAGES)]:
        (local / path.name).symlink_to(path)
    if name == "docs/use.md":  # what its first command merges
        lora = [
            sys.executable,
            "train_sft.py",
            "--use_peft",
            *SMALL["sft"],
            "--dataset_name",
            "data/sft",
            "--output_dir",
        ]
        assert subprocess.run([*lora, "outputs/lora"], capture_output=True, timeout=200).returncode == 0
    done = 0
    for command in commands(page(name)):
        words = shlex.split(command, comments=True)
        if not words or words[0] not in ("python", "accelerate") or re.match(ON_DATA, command):
            continue
        if any(f"train_{stage}.py" in words for stage in STAGES):
            words += "--max_steps 2 --eval_steps 0 --save_steps 0 --max_train_samples 40".split()
            # the model that stands in has 512 positions
            words += ["--max_length", "256"] if "--max_length" in words else []
            # beside outputs/sft
            words += ["--output_dir", f"outputs/{done}"] if "--regression_suite" in words else []
        python = (
            [sys.executable]
            if words[0] == "python"
            else [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
        )
        ran = subprocess.run(
            [*python, *words[1:]], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0, (command, ran.stderr[-2000:])
        done += 1
    assert done >= 1


@pytest.mark.slow
def test_the_commands_for_assistants_run_as_they_stand(tmp_path):
    """One after the other, in a folder with everything; and the two runs that are to agree do."""
    assert len(page("AGENTS.md").splitlines()) <= 64
    for path in ROOT.iterdir():
        if path.name != "outputs" and not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    script = "set -e\n" + "".join(blocks(page("AGENTS.md"), "bash"))
    ran = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert ran.returncode == 0, (ran.stdout[-2000:], ran.stderr[-2000:])
    for other in ("split", "two"):
        assert_same(losses(tmp_path / "outputs" / "whole"), losses(tmp_path / "outputs" / other))


@pytest.mark.slow
def test_each_edit_of_the_pages_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for number, diff in enumerate(edits()):
        name, copy = edited(diff, tmp_path)
        stage = name.removeprefix("train_").removesuffix(".py")
        words = ["--config", demo(stage), *SMALL[stage], "--output_dir", str(tmp_path / f"out{number}")]
        done = run_script([sys.executable, str(copy), *words])
        assert done.returncode == 0, done.stderr[-2000:]


def test_the_reward_functions_of_the_page_score():
    functions: dict = {}
    exec(
        next(block for block in blocks(page("docs/rollouts.md"), "python") if "def brevity" in block),
        functions,
    )
    said = [
        [{"role": "assistant", "content": text}]
        for text in ("3+4=7. Answer: 7", "1+1=3. 3-1=2. Answer: 2", "")
    ]
    scores = {
        name: functions[name](completions=said, answer=["7", "3", "0"])
        for name in ("right", "steps", "brevity")
    }
    assert scores == {"right": [1.0, 0.0, 0.0], "steps": [1.0, 0.5, None], "brevity": [-0.016, -0.023, 0.0]}


def test_the_rows_of_the_data_page_are_read():
    rows = [json.loads(line) for line in blocks(page("docs/data.md"), "json")[0].splitlines()]
    readers = [as_text, as_chat, as_chat, as_chat, as_chat, as_preference, as_preference, as_prompt]
    read = [str(reader(Row(row))) for row, reader in zip(rows, readers, strict=True)]
    assert all("7" in text or "fox" in text for text in read) and all("8" in text for text in read[5:7])


def test_the_five_lines_of_transformers_answer(local, capsys):
    (lines,) = blocks(page("docs/use.md"), "python")
    assert len([line for line in lines.splitlines() if line]) <= 5
    exec(compile(lines, "use.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_the_notebook_runs_on_the_demo(tmp_path):
    """Its cells in one script, as a kernel would run them."""
    pytest.importorskip("peft")
    cells = json.loads(page("docs/quickstart.ipynb"))["cells"]
    assert all(not cell.get("outputs") for cell in cells)
    shown = "import sys, types\nsys.modules['IPython'] = types.ModuleType('IPython')\n"
    shown += "d = sys.modules['IPython.display'] = types.ModuleType('IPython.display')\nd.HTML = len\n"
    code = shown + "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "cells.py").write_text(code)
    environ = {"STEPS": "60", "OUTPUT": str(tmp_path / "out"), "PYTHONPATH": str(ROOT)}
    done = run_script([sys.executable, str(tmp_path / "cells.py")], timeout=600, **environ)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    first, last = map(float, re.search(r"held-out loss ([\d.]+) -> ([\d.]+)", done.stdout).groups())
    assert last < first / 2 and "model.safetensors" in done.stdout


@pytest.mark.slow
def test_the_chain_of_the_demo_runs(local):
    """SFT first, from the model that ships; then a pretraining of one's own, SFT again, DPO, GRPO."""
    shutil.rmtree("outputs")

    def run(stage, *words):
        command = [
            sys.executable,
            str(ROOT / f"train_{stage}.py"),
            *"--max_steps 2 --eval_steps 0".split(),
            *words,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        return (
            done.returncode,
            (re.search(r"^model: (\S+)", done.stdout, re.M) or [None, None])[1],
            done.stderr,
        )

    assert run("sft")[:2] == (0, "data/base_model")
    assert run("pretrain")[0] == 0
    code, _, said = run("sft")
    assert code == 1 and "outputs/pretrain" in said and "--overwrite_output_dir" in said
    assert run("sft", "--overwrite_output_dir")[:2] == (0, "outputs/pretrain")
    assert run("dpo")[:2] == run("grpo")[:2] == (0, "outputs/sft")


# --- several machines ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_for_two_machines_runs(tmp_path):
    """That of docs/parallel.md, here with one CPU process on each of two "machines", without a shared disk:
    only the first one has the checkpoint of the best adapter, which is merged. The best is not the last."""
    peft = pytest.importorskip("peft")
    config = page("accelerate_configs/multi_node.yaml").replace(
        "mixed_precision: bf16", "mixed_precision: 'no'"
    )
    (tmp_path / "config.yaml").write_text(config + "use_cpu: true\n")
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(tmp_path / "config.yaml"),
    ]
    command += f"--num_machines 2 --num_processes 2 --main_process_ip 127.0.0.1 --main_process_port {free_port()}".split()
    words = "--use_peft --lora_r 4 --merge_lora --max_steps 4 --eval_steps 2 --max_eval_samples 8 --learning_rate 1e-2"
    words = [
        "train_sft.py",
        *SMALL["sft"],
        "--dataset_name",
        "data/sft",
        *words.split(),
        "--save_best",
        "max:eval_loss",
    ]
    words += ["--dataset_cache_dir", str(tmp_path / "cache"), "--output_dir"]
    outputs = [tmp_path / "one", tmp_path / "other"]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        start = lambda rank: run_script([*command, "--machine_rank", str(rank), *words, str(outputs[rank])])  # noqa: E731
        assert [
            (run.returncode, run.stderr[-2000:]) for run in pool.map(start, range(2)) if run.returncode
        ] == []
    best = json.loads((outputs[0] / "summary.json").read_text())["best"]["step"]
    base = AutoModelForCausalLM.from_pretrained("data/base_model")
    known = (
        peft.PeftModel.from_pretrained(base, outputs[0] / f"checkpoint-{best}")
        .merge_and_unload()
        .state_dict()
    )
    exported = load_file(outputs[0] / "model.safetensors")
    assert best == 2 and all(torch.allclose(exported[name], known[name], atol=1e-6) for name in exported)


def test_the_slurm_job_hands_on_machines_ranks_and_addresses(tmp_path):
    """With stand-ins for SLURM's commands, which write down what they are called with."""
    fails = f"[ ! -e {tmp_path}/fails ] || {{ mkdir -p $(cat {tmp_path}/fails); false; }}"
    for name, body in {
        "scontrol": f'[ $1 = show ] && printf "node07\\nnode08\\n" || echo "$@" >> {tmp_path}/again',
        "srun": 'shift; for rank in 0 1; do SLURM_NODEID=$rank "$@"; done',
        "accelerate": f'echo "$@" >> {tmp_path}/calls; {fails}',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "5",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
    }
    env |= {"SLURM_JOB_NODELIST": "node[07-08]", "RESUBMIT": "1", "OUTPUT_DIR": str(tmp_path / "out")}
    command = [*"bash accelerate_configs/slurm.sh train_sft.py --system_prompt".split(), "two words"]
    assert subprocess.run(command, cwd=ROOT, env=env).returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    wanted = "--num_machines 2 --num_processes 8 --machine_rank {} --main_process_ip node07 --main_process_port 20005 train_sft"
    assert all(wanted.format(rank) in call and call.endswith("two words") for rank, call in enumerate(calls))
    assert len(calls) == 2 and not (tmp_path / "again").exists()
    for step, again in ((3, 1), (12, 2), (12, 2)):  # the last time it has not got on: not for ever
        (tmp_path / "fails").write_text(f"{tmp_path}/out/checkpoint-{step}")
        assert subprocess.run(command, cwd=ROOT, env=env).returncode != 0
        assert (tmp_path / "again").read_text().splitlines() == ["requeue 5"] * again
