"""Starting a run: processes, seed, output folder. Launches that would silently do something else are
refused."""

from datetime import timedelta
import os
from pathlib import Path
import re
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs, set_seed
from common.args import CommonArgs
from common.errors import UserError, say
from common.memory import SHARDED
from common.model.optimizer import check_optimizer
from common.model.quantised import check_quantisation
from common.run.folder import open_folder, words_of
from common.run.parts.hub import check_repo
from common.run.sharded import check_shared_disk, set_up
import torch

# DistributedDataParallel owns torch's process group, whose destructor joins its threads while holding the
# GIL, which one of them may need to release its last tensor: a deadlock (seen with gloo). So prepared models
# stay in this list, and `launch` (common/command_line.py) ends the process without destroying anything.
NEVER_FREED: list[Any] = []
# http://name:password@host, http://token@host, http://host/?key=...
PASSWORD = re.compile(r"://[^/\s]*(@|/?\?)")
PRECISIONS = ("no", "bf16", "fp16", "fp8")
SHARING = ("tp_size", "cp_size", "sp_size")  # processes that share micro-batches; here each has its own


def start(args: CommonArgs, script: str) -> tuple[Accelerator, Path | None, dict[str, str]]:
    """The Accelerator of this run, the checkpoint to resume from (None: start from the beginning), and the
    inputs that are known at the start. Refuses misconfigured launches, and locks the output folder."""
    for name, word in words_of(args):
        if name != "alert_webhook" and PASSWORD.search(str(word)):
            raise UserError(f"--{name}: an address with a password, which the run would write to its files")
    if args.report_to not in (None, "none", *map(str, get_available_trackers())) and not args.dry_run:
        raise UserError(
            f"--report_to {args.report_to}: pip install it, if it is one of {', '.join(LOGGER_TYPE_TO_CLASS)}"
        )
    if args.push_to_hub:
        check_repo(args.hub_model_id)
    try:
        accelerator = Accelerator(
            # sync_with_dataloader=False: a window stays whole at the end of an epoch.
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=args.gradient_accumulation_steps, sync_with_dataloader=False
            ),
            # Otherwise each of two CPU processes would believe it is alone.
            cpu=not torch.accelerator.is_available(),
            log_with=None if args.dry_run or args.report_to == "none" else args.report_to,
            project_dir=args.output_dir,
            # One process may take long to prepare the data, while the others wait.
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=2))],
        )
    except (ValueError, RuntimeError, KeyError, ImportError) as error:
        # An environment variable or a config cannot be used.
        raise UserError(
            f"Accelerate does not start as it is configured ({type(error).__name__}: {error})"
        ) from None
    refuse_launch(accelerator)
    if args.load_in_4bit or args.load_in_8bit:
        check_quantisation(args, accelerator.distributed_type in SHARDED)
    check_optimizer(args, accelerator.distributed_type)
    if accelerator.distributed_type in SHARDED:
        set_up(accelerator, args)
    checkpoint = None
    inputs = {}
    if not args.dry_run:
        checkpoint, inputs = open_folder(args, accelerator, script)
        if accelerator.distributed_type in SHARDED:
            check_shared_disk(accelerator, args.output_dir)
    set_seed(args.seed)
    say(
        f"{accelerator.num_processes} process(es) on {accelerator.device.type}, "
        f"mixed precision {accelerator.mixed_precision}, output in {args.output_dir}"
    )
    return accelerator, checkpoint, inputs


def refuse_launch(accelerator: Accelerator) -> None:
    """Raise UserError for launches that Accelerate silently runs as something else."""
    env = os.environ
    kind = accelerator.distributed_type
    precision = accelerator.mixed_precision
    cpu = "accelerate launch --config_file accelerate_configs/cpu_ddp.yaml starts several processes on a CPU"
    started = int(env.get("WORLD_SIZE") or 1)
    seen = accelerator.num_processes
    if started != seen:
        raise UserError(f"{started} processes were started, and each sees {seen}: {cpu}")
    if "ACCELERATE_MIXED_PRECISION" in env and "MASTER_ADDR" in env and "WORLD_SIZE" not in env:
        raise UserError(f"accelerate launch was asked for several CPU processes and started one: {cpu}")
    sizes = getattr(accelerator, "parallelism_config", None)
    for name in SHARING:
        if getattr(sizes, name, 1) > 1:
            raise UserError(
                f"the accelerate config asks for {name}: only dp_replicate_size and dp_shard_size"
            )
    for name in ("FSDP", "DEEPSPEED"):
        value = env.get(f"ACCELERATE_USE_{name}", "").lower()
        if value not in ("", "false") and kind != name:
            raise UserError(
                f"ACCELERATE_USE_{name}={value} has no effect here: expected true or false, and several processes"
            )
    if precision == "fp16" and accelerator.device.type == "cpu":
        raise UserError("mixed precision fp16 on a CPU would silently be float32: choose bf16, or no")
    if precision not in PRECISIONS:
        raise UserError(f"mixed precision {precision}: expected {', '.join(PRECISIONS)}")
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise UserError("FSDP version 1 is not supported: set fsdp_version: 2 in the fsdp_config")
