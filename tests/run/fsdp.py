"""A launcher of FSDP2 on CPU processes, which Accelerate takes for GPUs only."""

LAUNCHER = """
import importlib, os, sys
sys.path.insert(0, os.getcwd())
from common.command_line import launch
import common.model.fused_head, tests.conftest, yaml
from accelerate.state import PartialState
from accelerate.utils import DistributedType
config = yaml.safe_load(open(f"accelerate_configs/{os.environ.get('CONFIG', 'fsdp2')}.yaml"))
sizes = config.get("parallelism_config", {}) and {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}
assert sizes.keys() == config.get("parallelism_config", {}).keys()
os.environ |= {name.upper(): str(value) for name, value in (config["fsdp_config"] | sizes).items()}
os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = str(bool(sizes)).lower()
os.environ |= {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": sys.argv[2]}
os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(sys.argv[1] == "dpo")  # either way; with it Accelerate unties weights
PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
common.model.fused_head.HEAD_CHUNK_ELEMENTS["cpu"], common.model.fused_head.HEAD_CHUNK_ROWS["cpu"] = 1, 64
stage = sys.argv[1]
script = importlib.import_module(tests.conftest.module_of(stage))
sys.argv[1:] = sys.argv[3:]
exec(os.environ.get("FIRST", ""))
launch(script.main, script.Args, f"data/configs/{stage}.yaml")
"""
