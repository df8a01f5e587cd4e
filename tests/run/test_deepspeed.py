"""DeepSpeed's ZeRO-2 and ZeRO-3 over two processes give what one process gives: losses, samples, checkpoints,
exports.

Needs deepspeed, whose CPU part is compiled at its first run; CONTRIBUTING.md has the command. Accelerate
takes DeepSpeed for GPUs only: the launcher below starts it on gloo. There every weight is sharded, however
small (but where a test wants it otherwise), and the LM head runs in chunks.
"""

import importlib.util

import pytest

from tests.conftest import read_metrics, run_script, torchrun
from tests.run.test_fsdp import STAGES, assert_goes_on, assert_same_run
from tests.run.test_fsdp import words as words  # a fixture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]

LAUNCHER = """
import importlib, os, sys
sys.path.insert(0, os.getcwd())
from common.command_line import launch
import common.model.fused_head, common.run.launch, deepspeed, tests.conftest, yaml
from accelerate.state import PartialState
stage, zero, precision = sys.argv[1:4]
config = yaml.safe_load(open(f"accelerate_configs/deepspeed_zero{max(2, int(zero))}.yaml"))["deepspeed_config"]
config["zero_stage"] = zero
os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_MIXED_PRECISION": precision}
for name in config:
    prefix = "ACCELERATE_" if name == "gradient_clipping" else "ACCELERATE_DEEPSPEED_"
    os.environ[prefix + name.upper()] = str(config[name]).lower()
PartialState(cpu=True)
deepspeed.init_distributed("gloo")
Accelerator = common.run.launch.Accelerator
def accelerator(cpu, **words):
    made = Accelerator(**words)
    threshold = int(os.environ.get("THRESHOLD", "0"))
    made.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    return made
common.run.launch.Accelerator = accelerator
common.model.fused_head.HEAD_CHUNK_ELEMENTS["cpu"] = common.model.fused_head.HEAD_CHUNK_ROWS["cpu"] = 1
script = importlib.import_module(tests.conftest.module_of(stage))
sys.argv[1:] = sys.argv[4:]
exec(os.environ.get("FIRST", ""))
launch(script.main, script.Args, tests.conftest.demo(stage))
"""
# another rate at every step
SCHEDULE = "--lr_scheduler_type linear --warmup_steps 2 --learning_rate 1e-4".split()


@pytest.fixture
def sharded(tmp_path, token_cache):
    """sharded(stage, zero, *arguments): two conversations and two micro-batches on each of two processes."""

    def launch(stage, zero, *argv, output="sharded", mixed_precision="no", **environ):
        launcher = tmp_path / "launcher.py"
        launcher.write_text(LAUNCHER)
        command = torchrun()
        command += [
            str(launcher),
            stage,
            str(zero),
            mixed_precision,
            *argv,
            "--output_dir",
            str(tmp_path / output),
        ]
        command += "--per_device_train_batch_size 2 --gradient_accumulation_steps 2".split()
        run = run_script(
            [*command, "--dataset_cache_dir", str(token_cache)], timeout=400, **environ
        )  # the first one compiles
        assert run.returncode == 0, run.stderr[-6000:]
        return tmp_path / output

    return launch


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "ema"])  # which it has no average of
def test_losses_samples_checkpoint_and_export_are_those_of_one_process(stage, zero, launch, sharded, words):
    one = launch(stage, *words(stage), *SCHEDULE, "--per_device_train_batch_size", "8", output="one")
    two = sharded(stage, zero, *words(stage), *SCHEDULE)
    assert_same_run(one, two)
    rates = [[row["learning_rate"] for row in read_metrics(run) if "loss" in row] for run in (one, two)]
    assert rates[0] == rates[1] and len(set(rates[0])) > 1


@pytest.mark.parametrize("zero", [2, 3])
def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(zero, sharded, words):
    assert_goes_on(sharded, "sft", zero, *words("sft"), *SCHEDULE)
