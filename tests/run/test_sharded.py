"""Sharded checkpoints under FSDP2: the same guarantees as whole ones, on 2, 4 and 1 processes."""

import shutil
import subprocess
import sys

from common.files import find_damage
from common.run.folder import checkpoints, newest_intact
import pytest
from safetensors.torch import load_file
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import format_utils as dcp
from transformers import AutoModelForCausalLM

from tests.conftest import read_metrics
from tests.run.test_fsdp import sharded as sharded  # fixtures
from tests.run.test_fsdp import words as words

pytestmark = pytest.mark.slow

SHARDED = 'os.environ["FSDP_STATE_DICT_TYPE"] = "SHARDED_STATE_DICT"\n'
RESAVE = """
import copy, pathlib
from common.args import save_args
from common.run.checkpoint import save_checkpoint
from common.run.run import Run
def steps(self, *args, **kwargs):
    args = copy.copy(self.args)
    args.output_dir = os.environ["AGAIN"]
    pathlib.Path(args.output_dir).mkdir(exist_ok=True)
    save_args(self.args, pathlib.Path(args.output_dir, f"args.yaml{self.accelerator.process_index or ''}"))
    pathlib.Path(args.output_dir, "inputs.json").write_text("{}")
    assert save_checkpoint(args, self.accelerator, self.model, self.optimizer, self.tokenizer, 2, {}, None)
    self.accelerator.wait_for_everyone()
    os._exit(0)
Run.steps = steps
"""
DYING = """
import importlib, signal
import torch.distributed.checkpoint.filesystem as filesystem
rank, place, name, when = os.environ["DIE"].split()
if os.environ["RANK"] == rank:
    owner = filesystem.FileSystemWriter if place == "filesystem" else importlib.import_module(place)
    function = getattr(owner, name)
    def dying(*args, **kwargs):
        if place == "os" and not os.path.basename(args[0]).startswith(".checkpoint-"):
            return function(*args, **kwargs)
        if when == "after":
            function(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, dying)
"""
KILLS = [
    "1 filesystem write_data after",
    "0 filesystem finish before",
    "0 common.run.checkpoint write_manifest before",
]
KILLS += ["0 os rename before", "0 os rename after", "0 common.run.checkpoint prune before"]


@pytest.fixture
def run(sharded):
    """run(processes, stage, *arguments): `sharded`, with sharded checkpoints."""
    return lambda processes, *words, first=SHARDED, **how: sharded(
        *words, processes=processes, first=first, **how
    )


def rewound(whole, again, keep=2):
    """A copy of the folder of a run, as it was after the checkpoint of the step `keep`."""
    shutil.copytree(whole, again)
    for name in ("summary.json", "model.safetensors", "adapter_model.safetensors", "extra.safetensors"):
        (again / name).unlink(missing_ok=True)
    for folder in checkpoints(again):
        if folder.name != f"checkpoint-{keep}":
            shutil.rmtree(folder)
    return again


def assert_same_files(one, other):
    files = [path.name for path in one.glob("*.safetensors")]
    assert files
    for file in files:
        a, b = load_file(one / file), load_file(other / file)
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a), file


def tensors(folder):
    """All that the shards of a checkpoint hold, by name."""
    found = {}
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        state = {}
        reader, planner = FileSystemReader(folder / part), dcp._EmptyStateDictLoadPlanner()
        dcp._load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
        waiting = [(part, state)]
        while waiting:
            name, value = waiting.pop()
            if isinstance(value, dict):
                waiting += [(f"{name}/{key}", inner) for key, inner in value.items()]
            elif isinstance(value, torch.Tensor):
                found[name] = value
    return found


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_shards_resume_exactly_and_merge(stage, run, words, tmp_path):
    """The final model is that of a run with whole checkpoints; ppo has a critic in model.extra."""
    plain = run(2, stage, *words(stage), output="plain", first="")
    whole = run(2, stage, *words(stage), output="whole")
    assert read_metrics(plain) == read_metrics(whole)
    assert_same_files(plain, whole)
    saved = whole / "checkpoint-2"
    assert (
        not (saved / "model.safetensors").exists() and (plain / "checkpoint-2" / "model.safetensors").exists()
    )
    again = run(2, stage, *words(stage), output=rewound(whole, tmp_path / "again").name)
    assert read_metrics(whole) == read_metrics(again)
    assert_same_files(whole, again)
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "merge-weights"]
    subprocess.run(
        [*command, str(saved / "pytorch_model_fsdp_0"), str(saved)], check=True, capture_output=True
    )
    one, other = (
        AutoModelForCausalLM.from_pretrained(run / "checkpoint-2").state_dict() for run in (plain, whole)
    )
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_shards_of_2_on_4_on_1_on_2(optim, run, words, tmp_path):
    """What was saved by 2 processes is read and saved by 4, that by one, that by 2: the same weights and
    moments."""
    argv = [*words("sft"), "--optim", optim]
    saved = run(2, "sft", *argv, output="saved") / "checkpoint-2"
    first = tensors(saved)
    kinds = {"exp_avg", "exp_avg_sq", "step"} | ({"momentum_buffer"} if optim == "muon" else set())
    assert kinds <= {part for name in first for part in name.replace("/", ".").split(".")}
    for processes in (4, 1, 2):
        again = tmp_path / f"by{processes}"
        shutil.copytree(saved, tmp_path / "x" / saved.name)
        run(processes, "sft", *argv, output="x", first=SHARDED + RESAVE, AGAIN=str(again))
        shutil.rmtree(tmp_path / "x")
        saved = again / "checkpoint-2"
        assert find_damage(saved) is None
        now = tensors(saved)
        assert first.keys() == now.keys() and all(torch.equal(first[name], now[name]) for name in first)


def test_kills_during_sharded_saves_lose_nothing(run, words):
    argv = [*words("sft"), "--save_steps", "1"]
    whole, seen = run(2, "sft", *argv, output="whole"), []
    for kill in KILLS:
        out = run(2, "sft", *argv, output="killed", first=SHARDED + DYING, died=True, DIE=kill)
        seen.append(newest_intact(out))
    assert any(seen)
    again = run(2, "sft", *argv, output="killed")
    assert read_metrics(whole) == read_metrics(again)
    assert_same_files(whole, again)


def test_a_damaged_shard_is_passed_over(run, words, capsys):
    out = run(2, "sft", *words("sft"), "--save_steps", "1")
    before, newest = checkpoints(out)
    shard = next((newest / "pytorch_model_fsdp_0").glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert newest_intact(out) == before and "is passed over" in capsys.readouterr().out
