"""What the tests share: quiet threads, no Hub, a clean Accelerate, and a way to run a script's main in this
process."""

import contextlib
import functools
import gc
import importlib
import json
import os
from pathlib import Path
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.fsync = lambda descriptor: None  # no power fails here, and it takes a tenth of the time
ROOT = Path(__file__).resolve().parents[1]
os.chdir(ROOT)  # the scripts name data/... from the repository's root
sys.path.insert(0, str(ROOT))

from hypothesis import settings  # noqa: E402
import psutil  # noqa: E402
import pytest  # noqa: E402

settings.register_profile("any machine", deadline=None)  # how long an example takes is the machine's affair
settings.load_profile("any machine")

# Written anew at every run: they depend on the clock or on the machine, not on what was learned.
CLOCK = ("seconds", "cpu_seconds", "tokens_per_second", "memory_gib", "peak_memory_gib")


# What the scripts hand to `launch` at their end.
DEFAULT_MODEL = {"sft": "outputs/pretrain", "dpo": "outputs/sft", "grpo": "outputs/sft"}
# A few quick steps on the demo's data.
SFT = "--config data/configs/sft.yaml --model_name_or_path data/base_model --max_train_samples 20 --eval_steps 0".split()
SFT += "--per_device_train_batch_size 4 --logging_steps 1 --save_steps 3 --max_steps 8 --max_eval_samples 8".split()
SFT += "--eval_max_new_tokens 4".split()
GRPO = "--config data/configs/grpo.yaml --model_name_or_path data/base_model --max_train_samples 20 --eval_steps 0".split()
GRPO += "--per_device_train_batch_size 8 --num_generations 4 --max_completion_length 4 --save_steps 1".split()
TEMPORARY: list[tempfile.TemporaryDirectory] = []  # folders that go with the process
DIFFS = sorted(path.stem for path in (ROOT / "experiments").glob("*.diff"))  # experiments.apply writes these
FILES = {path.stem.removeprefix("train_") for path in (ROOT / "experiments").glob("train_*.py")} - {*DIFFS}
EXPERIMENTS = sorted([*DIFFS, *FILES])


@functools.cache
def applied_folder() -> Path:
    """A folder on Python's path with the experiments that are kept as diffs, one script each. A diff that
    does not apply has none (tests/scripts/test_experiments.py says why)."""
    from common.errors import UserError

    from experiments.apply import apply

    TEMPORARY.append(tempfile.TemporaryDirectory())
    folder = Path(TEMPORARY[-1].name)
    (folder / "common.py").symlink_to(ROOT / "experiments" / "common.py")  # for runs by the script's path
    for name in DIFFS:
        with contextlib.suppress(UserError):
            (folder / f"train_{name}.py").write_text(apply(name))
    sys.path.append(str(folder))
    return folder


def path_of(stage: str) -> Path:
    """The script."""
    if stage in DIFFS:
        return applied_folder() / f"train_{stage}.py"
    folder = ROOT / "experiments" if stage in EXPERIMENTS else ROOT
    return folder / f"train_{stage}.py"


def module_of(stage: str) -> str:
    if stage in DIFFS:
        applied_folder()  # where Python finds it
    return f"experiments.train_{stage}" if stage in FILES else f"train_{stage}"


def words_of(stage: str) -> list[str]:
    """What follows `python` or a launcher, to run a script from the repository's root."""
    return ["-m", module_of(stage)] if stage in FILES else [str(path_of(stage))]


def demo(stage: str) -> str:
    """The settings of a script's demo."""
    if stage in EXPERIMENTS:
        return re.search(r'demo="(.+?)"', path_of(stage).read_text())[1]
    return f"data/configs/{stage}.yaml"


@functools.cache
def teacher() -> str:
    """A folder with the model of data/base_model, its weights shaken: another one with the same tokens."""
    import common  # noqa: F401  before torch, as in the scripts
    from safetensors.torch import load_file, save_file
    import torch

    TEMPORARY.append(tempfile.TemporaryDirectory())
    folder = Path(TEMPORARY[-1].name, "teacher")
    shutil.copytree(ROOT / "data" / "base_model", folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    shaken = {
        name: value
        + 0.1 * value.float().std() * torch.randn(value.shape, generator=generator).to(value.dtype)
        for name, value in weights.items()
    }
    save_file(
        {name: value.to(weights[name].dtype) for name, value in shaken.items()}, folder / "model.safetensors"
    )
    return str(folder)


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory):
    """A folder of tokenised data that the tests share."""
    return tmp_path_factory.mktemp("token_cache")


@pytest.fixture
def launch(tmp_path, token_cache):
    """launch("sft", "--max_steps", "2", ...) runs train_sft.py's main here; returns the output folder."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from common.command_line import parse_args

    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }

    def launch_stage(stage: str, *argv: str, output: str = "out") -> Path:
        gc.unfreeze()  # what the run before has loaded is garbage here
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        for number, handler in handlers.items():  # of a run that an exception ended in its loop
            signal.signal(number, handler)
        script = importlib.import_module(module_of(stage))
        words = [
            "--output_dir",
            str(tmp_path / output),
            "--dataset_cache_dir",
            str(token_cache),
            *map(str, argv),
        ]
        script.main(parse_args(script.Args, demo(stage), DEFAULT_MODEL.get(stage), words))
        assert not gc.get_freeze_count()
        return tmp_path / output

    yield launch_stage
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run_script(command: list[str], timeout: float = 240, **environ: str) -> subprocess.CompletedProcess:
    """Run a command from the repository's root; one that hangs is aborted with the Python stacks of all its
    processes."""
    env = os.environ | {"PYTHONFAULTHANDLER": "1"} | environ
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=err, env=env, start_new_session=True)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for number in (signal.SIGABRT, signal.SIGKILL):  # the children first: they are the ones that hang
                for member in reversed(family):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        member.send_signal(number)
                time.sleep(5)
            process.wait()
        texts = [(file.seek(0), file.read())[1] for file in (out, err)]
    return subprocess.CompletedProcess(command, process.returncode, *texts)


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_metrics(output: Path) -> list[dict]:
    """The lines of metrics.jsonl without what depends on the clock."""
    rows = read_rows(output / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in CLOCK} for row in rows]


def events_of(output: Path, kind: str) -> list[dict]:
    """What events.jsonl says of a kind."""
    return [row for row in read_rows(output / "events.jsonl") if row["kind"] == kind]


def train_metrics(output: Path) -> list[dict]:
    return [row for row in read_metrics(output) if "loss" in row]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def torchrun(processes: int = 2) -> list[str]:
    """The command that starts a script on several processes, which follows."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    return [*command, "--master_port", str(free_port())]


def losses(output: Path) -> list[tuple[int, float, float]]:
    """(step, loss, norm of the gradient) of each logged step."""
    return [(row["step"], row["loss"], row["grad_norm"]) for row in train_metrics(output)]


def assert_same(one, other, tolerance=1e-5, norm_tolerance=None):
    assert [step for step, *_ in one] == [step for step, *_ in other]
    for (_, loss, norm), (_, loss2, norm2) in zip(one, other, strict=True):
        assert loss == pytest.approx(loss2, rel=tolerance, abs=1e-6)
        assert norm == pytest.approx(norm2, rel=norm_tolerance or tolerance * 3)
