"""The files of accelerate_configs/: what Accelerate's launcher makes of each, key by key, and launches of
them on CPU processes."""

import json
import platform
import sys
from types import SimpleNamespace

from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType, ParallelismConfig
from common.errors import UserError
from common.run.launch import refuse_launch
from common.run.sharded import check_shared_disk
import pytest
import yaml

from tests.conftest import ROOT, free_port, run_script

FOLDER = ROOT / "accelerate_configs"
PARTS = (
    "use_cpu",
    "compute_environment",
    "distributed_type",
    "fsdp_config",
    "deepspeed_config",
    "parallelism_config",
)
FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_key_of_a_config_is_one_that_the_launcher_reads(path):
    """Unknown keys are taken in silence."""
    parser, settings = launch_command_parser(), yaml.safe_load(path.read_text())
    args, _, _ = _validate_launch_command(parser.parse_args(["--config_file", str(path), "train_sft.py"]))
    known = {*PARTS, *vars(parser.parse_args(["train_sft.py"]))}
    for part in [settings, *settings.values()]:
        for key, value in part.items() if isinstance(part, dict) else []:
            assert key in known, key
            assert key in PARTS or getattr(args, key) == value, key
    assert args.use_cpu == ("cpu" in path.stem)


def started(**settings):
    """What `refuse_launch` looks at of an Accelerator."""
    plain = {"num_processes": 1, "distributed_type": DistributedType.NO, "mixed_precision": "no"}
    return SimpleNamespace(**(plain | settings))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"parallelism_config": ParallelismConfig(dp_shard_size=2, tp_size=2)}, "tp_size"),
        ({"distributed_type": DistributedType.FSDP, "is_fsdp2": False}, "fsdp_version: 2"),
        ({"mixed_precision": "fp17"}, "fp17"),
    ],
)
def test_what_runs_as_something_else_is_refused(settings, named):
    refuse_launch(started())
    with pytest.raises(UserError, match=named):
        refuse_launch(started(**settings))


def test_a_machine_without_the_folder_is_refused(tmp_path):
    accelerator = Accelerator(cpu=True)
    (tmp_path / ".lock").touch()
    check_shared_disk(accelerator, str(tmp_path))
    with pytest.raises(
        UserError, match=f"^--output_dir {tmp_path}/elsewhere is not there on {platform.node()}: all"
    ):
        check_shared_disk(accelerator, str(tmp_path / "elsewhere"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single_gpu", "multi_gpu", "cpu", "cpu_ddp"])
def test_a_config_launches_a_run_on_the_cpu(name, tmp_path):
    """As it stands, but for the CPU in place of the GPUs, and two of them in place of eight."""
    several = name in ("multi_gpu", "cpu_ddp")
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        f"accelerate_configs/{name}.yaml",
    ]
    command += ["--num_processes", "2", "--main_process_port", str(free_port())] if several else []
    words = "--max_steps 2 --max_train_samples 20 --num_samples 0 --eval_steps 0 --save_steps 0"
    command += [
        "train_sft.py",
        *words.split(),
        *"--dataset_name data/sft --model_name_or_path data/base_model".split(),
    ]
    done = run_script([*command, "--output_dir", str(tmp_path)], timeout=200, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr[-3000:]
    precision = "bf16" if "gpu" in name else "no"
    assert f"mixed precision {precision}" in done.stdout
    assert json.loads((tmp_path / "summary.json").read_text())["processes"] == (2 if several else 1)
