"""What the pages say of the scripts is so: quoted code, metrics, errors, lengths, the Chinese front page, the notebook."""

import concurrent.futures
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap

from common.errors import UserError
from tests.conftest import EXPERIMENTS, ROOT, demo, run_script, teacher
from tests.scripts.test_equivalence import free_port
from tests.scripts.test_readme import local  # noqa: F401

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

STAGES = ("pretrain", "sft", "dpo", "grpo")
TINY = "--max_steps 2 --max_train_samples 40 --max_eval_samples 4 --eval_max_new_tokens 4 --logging_steps 1 --save_steps 0".split()
SMALL = {
    "pretrain": [*TINY, *"--vocab_size 300 --hidden_size 32 --num_layers 1 --per_device_train_batch_size 2".split()],
    "sft": [*TINY, "--per_device_train_batch_size", "2", "--model_name_or_path", "data/base_model"],
    "dpo": [*TINY, "--per_device_train_batch_size", "2", "--model_name_or_path", "data/base_model"],
    "grpo": [*TINY, "--model_name_or_path", "data/base_model", "--per_device_train_batch_size", "8"]
    + ["--max_completion_length", "8", "--num_generations", "4"],
}


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, kind: str) -> list[str]:
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)
    return [body for found, body in fences if found == kind]


# --- how the loop works -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_the_code_that_a_page_quotes_is_in_the_script(stage):
    script = page(f"train_{stage}.py")
    quoted = blocks(page(f"docs/loop_{stage}.md"), "python")
    assert len(quoted) >= 3
    for block in quoted:
        assert block in script, block
    formula = re.search(r"^    loss = .*(?:\n {10,}.*)*", page(f"docs/loop_{stage}.md"), re.M)[0]
    assert textwrap.dedent(formula).splitlines()[0].split("  ")[0] in script


def test_the_pages_of_the_stages_name_flags_and_metrics_that_exist():
    words = set(re.findall(r"`--(\w+)", "".join(page(f"docs/loop_{stage}.md") for stage in STAGES)))
    known = {name for stage in STAGES for name in __import__(f"train_{stage}").Args.__dataclass_fields__}
    assert words <= known, words - known


# --- metrics ------------------------------------------------------------------------------------------------------------


def explained() -> set[str]:
    """The names of docs/metrics.md, of which some stand for several: rewards/<function>/mean."""
    return set(re.findall(r"`([\w/<>]+)`", page("docs/metrics.md")))


@pytest.mark.slow
def test_every_metric_that_a_script_writes_is_explained(launch, tmp_path):
    runs = {"grpo_several": ["--beta", "0.1", "--num_iterations", "2", "--eval_temperatures", "0", "0.7"]}
    runs |= {"pretrain_moe": ["--num_experts", "4", "--hidden_size", "64"], "sft_two": []}
    functions, sources = r"(exact_number|regex|polite|reward)", r"(train|validation|sft)"  # of these runs, and no other word
    patterns = [re.escape(name).replace("<function>", functions).replace("<source>", sources) for name in explained()]
    patterns = [re.sub(r"<T>", r"[\\d.]+", pattern) for pattern in patterns]
    runs |= {name: ["--model_name_or_path", "data/base_model"] for name in EXPERIMENTS}
    runs["distill"] += ["--teacher_model_name_or_path", teacher(), "--lmbda", "0.5", "--dataset_name", "data/sft"]
    for name in (*STAGES, *runs):
        stage = name if name in EXPERIMENTS else name.split("_")[0]
        words = ["--config", demo(stage), *SMALL.get(stage, TINY), *runs.get(name, [])]
        if stage in ("ppo", "rft", "tools", "distill"):
            words += ["--max_completion_length", "8"]
        if name == "sft_two":
            words += ["--dataset_name", "data/sft/train.jsonl", "data/sft/validation.jsonl", "--eval_fraction", "0.2"]
        output = launch(stage, *words, output=name)
        keys = {key for line in (output / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}
        keys -= {"step"}
        assert len(keys) > 5
        for key in keys:
            plain = re.sub(r"_t[\d.]+$", "", key.removeprefix("eval_"))
            assert any(re.fullmatch(p, key) or re.fullmatch(p, plain) for p in patterns), (name, key)


def test_the_names_of_metrics_in_the_page_are_in_the_code():
    kinds = ("common/**/*.py", "train_*.py", "experiments/*.py")
    code = "".join(path.read_text() for kind in kinds for path in ROOT.glob(kind))
    for name in explained():
        plain = name.removeprefix("eval_")
        for part in re.split(r"<\w+>", plain):
            part = part.strip("/_").removesuffix("_t")
            assert part in code or part in ("exact_number", "regex"), name


# --- errors -------------------------------------------------------------------------------------------------------------


def test_the_errors_of_the_page_are_in_the_code():
    code = "".join(path.read_text() for folder in ("common", "tools") for path in (ROOT / folder).rglob("*.py"))
    code += "".join(page(f"train_{stage}.py") for stage in STAGES)
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # a text over several lines
    rows = [line.split("|")[1] for line in page("docs/errors.md").splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    for row in rows:
        for text in re.findall(r"`([^`]+)`", row):
            assert text in code, text


def test_a_mistake_is_found_in_the_page(launch, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"q": "a", "a": "b"}\n')
    with pytest.raises(UserError) as error:
        launch("sft", "--model_name_or_path", "data/base_model", "--dataset_name", str(tmp_path / "rows.jsonl"))
    texts = re.findall(r"^\| `([^`]+)`", page("docs/errors.md"), re.M)
    assert any(text in str(error.value) for text in texts), error.value


# --- the front page, in both languages ----------------------------------------------------------------------------------


def test_the_chinese_front_page_has_the_commands_and_links_of_the_english_one():
    english, chinese = page("README.md"), page("README.zh-CN.md")
    for kind in ("bash", "diff", ""):
        assert blocks(english, kind) == blocks(chinese, kind)
    links = [set(re.findall(r"\]\(([^)]+)\)", text)) for text in (english, chinese)]
    assert links[0] ^ links[1] == {"README.md", "README.zh-CN.md"}
    flags = [set(re.findall(r"`(--\w+|[\w./]+\.(?:py|yaml))`", text)) for text in (english, chinese)]
    assert flags[0] == flags[1]
    assert len(re.findall(r"[\u4e00-\u9fff]", chinese)) > 1000
    numbers = [sorted(set(re.findall(r"\d+\.\d+", text))) for text in (english, chinese)]
    assert numbers[0] == numbers[1]


def test_the_front_page_is_short():
    assert len(page("README.md").split()) <= 1300  # the code of the edits and commands is half of it


def test_each_edit_of_the_front_page_fits_its_script():
    for diff in blocks(page("README.md"), "diff"):
        name, *hunks = diff.removeprefix("--- ").split("@@ def")
        source = page(name.splitlines()[0])
        for hunk in hunks:
            lines = hunk.splitlines()[1:]
            old, new = ("".join(line[1:] + "\n" for line in lines if line[:1] == sign) for sign in "-+")
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        compile(source, name, "exec")


@pytest.mark.slow
def test_each_edit_of_the_front_page_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for number, diff in enumerate(blocks(page("README.md"), "diff")):
        name, *hunks = diff.removeprefix("--- ").split("@@ def")
        name, source = name.splitlines()[0], page(name.splitlines()[0])
        for hunk in hunks:
            lines = hunk.splitlines()[1:]
            old, new = ("".join(line[1:] + "\n" for line in lines if line[:1] == sign) for sign in "-+")
            source = source.replace(old, new)
        (tmp_path / f"train_mine{number}.py").write_text(source)
        stage = name.removeprefix("train_").removesuffix(".py")
        words = ["--config", demo(stage), *SMALL[stage], "--output_dir", str(tmp_path / f"out{number}")]
        done = run_script([sys.executable, str(tmp_path / f"train_mine{number}.py"), *words])
        assert done.returncode == 0, done.stderr[-2000:]


# --- using the model ----------------------------------------------------------------------------------------------------


def test_the_five_lines_of_transformers_answer(tmp_path, monkeypatch, capsys):
    (lines,) = blocks(page("docs/use.md"), "python")
    assert len([line for line in lines.splitlines() if line]) <= 5
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "sft").symlink_to(ROOT / "data" / "base_model")
    monkeypatch.chdir(tmp_path)
    exec(compile(lines, "use.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_a_missing_harness_is_one_line(monkeypatch):
    from tools import lm_eval

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "lm-eval\[hf\]"'):
        lm_eval.main(["data/base_model", "arc_easy"])


@pytest.mark.parametrize("words", ["--limit -1", "--num_fewshot -3", "--batch_size 0", "--output gone/x.json"])
def test_what_the_harness_would_take_in_silence_is_refused(words):
    from tools import lm_eval

    with pytest.raises(UserError, match="--limit above 0|no such folder"):
        lm_eval.main(["data/base_model", "arc_easy", *words.split()])


@pytest.mark.slow
def test_a_task_of_local_rows_is_evaluated(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"question": f"What is {a}+2?", "choices": [f" {a + 2}", f" {a + 5}"], "label": 0} for a in range(1, 9)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task": "plainloop_sums", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice"}
    task |= {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "sums.jsonl")}}, "doc_to_target": "label"}
    task |= {
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "sums.yaml").write_text(json.dumps(task))
    command = [sys.executable, "-m", "tools.lm_eval", "data/base_model", "plainloop_sums", "--include_path", str(tmp_path)]
    done = run_script([*command, "--output", str(tmp_path / "results.json")])
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "results.json").read_text())["results"]["plainloop_sums"]["acc,none"] == 1.0  # by hand
    assert re.search(r"plainloop_sums +acc +1\.0000", done.stdout)
    done = run_script([*command[:4], "no_such_task"])
    assert done.returncode == 1 and "no_such_task: no task" in done.stderr


# --- commands -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "docs/use.md", "docs/parallel.md"])
def test_the_commands_of_a_page_run_as_they_stand(name, local):  # noqa: F811
    """But for fewer steps. Those on data of one's own: test_readme.py; those on a Hub, a server, a cluster: not."""
    pytest.importorskip("peft")
    for path in [ROOT / "common", ROOT / "tools", *(ROOT / f"train_{stage}.py" for stage in STAGES)]:
        (local / path.name).symlink_to(path)
    if name == "docs/use.md":  # what its first command merges
        lora = [sys.executable, "train_sft.py", "--use_peft", *SMALL["sft"], "--dataset_name", "data/sft", "--output_dir"]
        assert subprocess.run([*lora, "outputs/lora"], capture_output=True, timeout=200).returncode == 0
    commands = [c for block in blocks(page(name), "bash") for c in block.replace("\\\n", " ").splitlines() if c.strip()]
    done = 0
    for command in commands:
        words = shlex.split(command, comments=True)
        if not words or words[0] == "pip" or re.match(r"accelerate launch train_\w+\.py .*--dataset_name", command):
            continue
        stage = next((stage for stage in STAGES if f"train_{stage}.py" in words), None)
        words = (
            [sys.executable, "-m", "accelerate.commands.accelerate_cli", *words[1:]] if words[0] == "accelerate" else words
        )
        words = [sys.executable, *words[1:]] if words[0] == "python" else words
        if stage:
            words += ["--max_steps", "2", "--eval_steps", "0", "--save_steps", "0", "--max_train_samples", "40"]
            words += ["--max_length", "256"] if "--max_length" in words else []  # the model that stands in has 512 positions
        ran = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, (command, ran.stderr[-2000:])
        done += 1
    assert done >= 1


@pytest.mark.slow
def test_the_benchmarks_that_the_pages_name_start():
    pages = "".join(
        path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md"))
    )
    scripts = sorted(set(re.findall(r"python (benchmarks/\w+\.py)", pages)))
    assert len(scripts) > 5
    for script in scripts:
        done = run_script([sys.executable, script, "--help"])
        assert done.returncode == 0, (script, done.stderr[-2000:])


@pytest.mark.slow
def test_the_other_peers_are_left_out_where_they_have_no_interpreter_and_losses_are_compared():
    """Without any: minimind's loop and a bare loop, whose first losses have to be ours, or the benchmark fails."""
    words = ["--quick", "--rounds", "1", "--only", "pretrain", "dpo"]
    done = run_script([sys.executable, "benchmarks/others.py", *words], timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("is left out: python -m venv") == 3
    rows = [line for line in done.stdout.splitlines() if line.startswith("| minimind's loop")]
    assert len(rows) == 2 and all("of ours |" in row for row in rows), done.stdout


# --- several machines ---------------------------------------------------------------------------------------------------


def two_machines(tmp_path, outputs, *words):
    """The command of docs/parallel.md with multi_node.yaml, here with one CPU process on each of two "machines"."""
    config = (ROOT / "accelerate_configs" / "multi_node.yaml").read_text()
    config = config.replace("mixed_precision: bf16", "mixed_precision: 'no'")
    (tmp_path / "config.yaml").write_text(config + "use_cpu: true\n")
    port = free_port()

    def launcher(rank):
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "config.yaml")]
        command += ["--num_machines", "2", "--num_processes", "2", "--machine_rank", str(rank)]
        command += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
        command += ["train_sft.py", *SMALL["sft"], "--dataset_name", "data/sft", *words]
        return [*command, "--output_dir", str(outputs[rank]), "--dataset_cache_dir", str(tmp_path / "cache")]

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(lambda rank: run_script(launcher(rank)), range(2)))


@pytest.mark.slow
def test_two_launchers_are_two_machines(tmp_path):
    first, second = two_machines(tmp_path, [tmp_path / "out"] * 2)
    assert first.returncode == second.returncode == 0, (first.stderr[-2000:], second.stderr[-2000:])
    assert "2 process(es) on cpu" in first.stdout and "process(es)" not in second.stdout
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["processes"] == 2


@pytest.mark.slow
def test_two_machines_that_share_no_disk(tmp_path):
    """A run trains and says it; the run that would go on from its checkpoint is refused, on both."""
    outputs = [tmp_path / "one", tmp_path / "other"]
    first, second = two_machines(tmp_path, outputs, "--save_steps", "1")
    assert first.returncode == second.returncode == 0, (first.stderr[-2000:], second.stderr[-2000:])
    assert "args.yaml is not there on" in first.stdout and (outputs[0] / "summary.json").exists()
    (outputs[0] / "summary.json").unlink()
    runs = two_machines(tmp_path, outputs, "--save_steps", "1")
    assert all(run.returncode for run in runs)
    assert all(
        "checkpoint-2 is not there on" in run.stderr and "Traceback" not in run.stderr.split("error:")[0] for run in runs
    )


@pytest.mark.slow
def test_the_best_adapter_is_merged_where_machines_share_no_disk(tmp_path):
    """Only the first machine has the checkpoint that it lies in. The best is not the last."""
    peft = pytest.importorskip("peft")
    words = [
        "--use_peft",
        "--lora_r",
        "4",
        "--merge_lora",
        "--max_steps",
        "4",
        "--eval_steps",
        "2",
        "--max_eval_samples",
        "8",
    ]
    words += ["--model_name_or_path", "data/base_model", "--learning_rate", "1e-2", "--save_best", "max:eval_loss"]
    outputs = [tmp_path / "one", tmp_path / "other"]
    first, second = two_machines(tmp_path, outputs, *words)
    assert first.returncode == second.returncode == 0, (first.stderr[-2000:], second.stderr[-2000:])
    assert not outputs[1].exists()
    best = json.loads((outputs[0] / "summary.json").read_text())["best"]["step"]
    base = AutoModelForCausalLM.from_pretrained("data/base_model")
    known = peft.PeftModel.from_pretrained(base, outputs[0] / f"checkpoint-{best}").merge_and_unload().state_dict()
    exported = load_file(outputs[0] / "model.safetensors")
    assert best == 2 and all(torch.allclose(exported[name], known[name], atol=1e-6) for name in exported)


def test_the_slurm_job_hands_on_machines_ranks_and_addresses(tmp_path):
    """With stand-ins for SLURM's commands, which write down what they are called with."""
    for name, body in {
        "scontrol": f'[ $1 = show ] && printf "node07\\nnode08\\n" || echo "$@" >> {tmp_path}/again',
        "srun": 'shift; for rank in 0 1; do SLURM_NODEID=$rank "$@"; done',
        "accelerate": f'echo "$@" >> {tmp_path}/calls; [ ! -e {tmp_path}/fails ] || {{ mkdir -p $(cat {tmp_path}/fails); false; }}',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "5", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    env |= {"SLURM_JOB_NODELIST": "node[07-08]", "RESUBMIT": "1", "OUTPUT_DIR": str(tmp_path / "out")}
    command = ["bash", "accelerate_configs/slurm.sh", "train_sft.py", "--system_prompt", "two words"]
    assert subprocess.run(command, cwd=ROOT, env=env).returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [re.search(r"--machine_rank (\d)", call)[1] for call in calls] == ["0", "1"]
    wanted = (
        "--num_machines 2 --num_processes 8 --machine_rank 0 --main_process_ip node07 --main_process_port 20005 train_sft.py"
    )
    assert wanted in calls[0] and calls[0].endswith("--system_prompt two words") and not (tmp_path / "again").exists()
    env["OUTPUT_DIR"] = str(tmp_path / "out")
    for step, again in ((3, 1), (12, 2), (12, 2)):  # the last time it has not got on: not for ever
        (tmp_path / "fails").write_text(f"{tmp_path}/out/checkpoint-{step}")
        assert subprocess.run(command, cwd=ROOT, env=env).returncode != 0
        assert (tmp_path / "again").read_text().splitlines() == ["requeue 5"] * again
    (tmp_path / "calls").unlink()
    (tmp_path / "fails").unlink()
    env["CONFIG"] = "accelerate_configs/hsdp.yaml"
    assert subprocess.run(command, cwd=ROOT, env=env).returncode == 0
    sizes = (
        "--num_processes 8 --parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size 4 --machine_rank 0"
    )
    assert sizes in (tmp_path / "calls").read_text().splitlines()[0]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_slurm_job_passes_shellcheck():
    done = subprocess.run(["shellcheck", "accelerate_configs/slurm.sh"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# --- the notebook -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_notebook_runs_on_the_demo(tmp_path, monkeypatch):
    """Its cells in one script, as a kernel would run them."""
    pytest.importorskip("peft")
    cells = json.loads(page("docs/quickstart.ipynb"))["cells"]
    assert all(not cell.get("outputs") for cell in cells)
    shown = "import sys, types\nsys.modules['IPython'] = types.ModuleType('IPython')\n"
    shown += "d = sys.modules['IPython.display'] = types.ModuleType('IPython.display')\nd.HTML = len\n"
    code = shown + "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "cells.py").write_text(code)
    done = run_script(
        [sys.executable, str(tmp_path / "cells.py")],
        timeout=600,
        STEPS="60",
        OUTPUT=str(tmp_path / "out"),
        PYTHONPATH=str(ROOT),
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    first, last = map(float, re.search(r"held-out loss ([\d.]+) -> ([\d.]+)", done.stdout).groups())
    assert last < first / 2 and "> Who are you?" in done.stdout and "model.safetensors" in done.stdout
