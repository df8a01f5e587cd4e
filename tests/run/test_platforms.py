"""What Windows and Macs lack is done without. Their own file systems, signals and devices are not seen
here."""

import json
from pathlib import Path
import subprocess
import sys
import textwrap

import common.memory
from common.memory import finest_dtype
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import ROOT, demo, read_metrics, run_script, train_metrics

# The libraries are there before, for they have ways of their own.
LACKING = """
    import importlib, os, pkgutil, signal, sys
    import accelerate, datasets, torch, transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    for name in ("resource", "fcntl", "pwd", "grp", "termios"):
        sys.modules[name] = None
    for name in ("uname", "fork", "register_at_fork", "sched_getaffinity", "getuid", "geteuid", "mkfifo", "statvfs", "killpg"):
        delattr(os, name)
    for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGKILL", "SIGQUIT", "setitimer", "alarm"):
        delattr(signal, name)
"""


def without_unix(code: str, *words: str) -> subprocess.CompletedProcess:
    """Run the code in a Python that lacks what Windows has not."""
    return run_script(
        [sys.executable, "-c", textwrap.dedent(LACKING) + textwrap.dedent(code), *map(str, words)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "grpo"])
def test_a_run_and_its_second_half_without_what_only_unix_has(stage, launch, tmp_path):
    """The second process goes on from the checkpoint of the first; the numbers are those of a run with all of
    Unix."""
    code = f"""
        import train_{stage}
        from common.command_line import launch

        sys.argv = ["train_{stage}.py", *sys.argv[1:]]
        launch(train_{stage}.main, train_{stage}.Args, demo={demo(stage)!r}, default_model="data/base_model")
    """
    words = "--save_steps 2 --logging_steps 1 --eval_steps 0 --lr_scheduler_type constant".split()
    words += "--dataset_num_proc 1 --max_train_samples 40 --max_eval_samples 4 --max_steps".split()
    for last in ("2", "4"):
        done = without_unix(code, *words, last, "--output_dir", tmp_path / "out")
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    whole = launch(
        stage, "--config", demo(stage), "--model_name_or_path", "data/base_model", *words, "4", output="whole"
    )
    assert read_metrics(tmp_path / "out") == read_metrics(whole) and len(train_metrics(whole)) == 4


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_files_of_windows_are_read(ending, launch, tmp_path):
    """Byte order marks, carriage returns, letters beyond ASCII."""
    row = {"messages": [{"role": "user", "content": "Grüße"}, {"role": "assistant", "content": "你好"}]}
    text = ending.join([json.dumps(row, ensure_ascii=False)] * 12)
    (tmp_path / "daten ö.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    settings = [f"dataset_name: {tmp_path}/daten ö.jsonl", "max_steps: 1", "eval_steps: 0"]
    (tmp_path / "set.yaml").write_bytes(b"\xef\xbb\xbf" + ending.join(settings).encode())
    output = launch("sft", "--config", tmp_path / "set.yaml", "--model_name_or_path", "data/base_model")
    assert json.loads((output / "dataset.json").read_text(encoding="utf-8"))["sources"][0]["rows"] == 12


# --- MPS ----------------------------------------------------------------------------------------------------


class NoFloat64(TorchDispatchMode):
    """A tensor of float64 is an error, as on MPS. The tables of a script, and what becomes of a Python
    float are on the CPU always."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if float64_in(out) and not float64_in((args, kwargs)):
            frame = sys._getframe(1)  # up to the first one that is ours
            while (
                not frame.f_code.co_filename.startswith(str(ROOT))
                or "site-packages" in frame.f_code.co_filename
            ):
                frame = frame.f_back
            file, function = Path(frame.f_code.co_filename).name, frame.f_code.co_name
            on_host = (
                file == "rollout.py"
                or file.startswith("train_")
                or function in ("_over_processes", "reduce", "_content")
            )
            assert on_host, (func, file, function)
        return out


def float64_in(values) -> bool:
    leaves = torch.utils._pytree.tree_leaves(values)
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 for leaf in leaves)


@pytest.mark.parametrize("stage", [pytest.param("sft", marks=pytest.mark.slow), "grpo"])
def test_no_float64_reaches_a_device_that_has_none(stage, launch, monkeypatch):
    assert finest_dtype(torch.device("mps")) == torch.float32
    monkeypatch.setattr(common.memory, "WITHOUT_FLOAT64", ("cpu", "mps"))
    words = ["--config", ROOT / demo(stage), *"--max_steps 1 --logging_steps 1 --eval_steps 0".split()]
    with NoFloat64():
        output = launch(stage, *words, "--model_name_or_path", "data/base_model")
    assert len([row for row in read_metrics(output) if "grad_norm" in row]) == 1
