"""Hints for runs on a GPU whose settings make them several times slower than they need to be."""

import os

from common.args import CommonArgs
from common.errors import say
from common.model.flat_model import FlatModel, routes_tokens

import torch
from accelerate import Accelerator


def advise(args: CommonArgs, accelerator: Accelerator, model: FlatModel) -> None:
    """Print each hint on a line."""
    if accelerator.device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(accelerator.device)
    experts = routes_tokens(model.lm)
    lines = slow_settings(capability, accelerator.mixed_precision, args.dtype, experts)
    lines += idle_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count())
    for line in lines:
        say(line)


def idle_gpus(processes: int, gpus: int) -> list[str]:
    """processes: those on this machine, one GPU each."""
    if processes >= gpus:
        return []
    return [
        f"GPUs: {processes} of {gpus} in use; all: accelerate launch --config_file accelerate_configs/multi_gpu.yaml "
        f"--num_processes {gpus}, with gradient_accumulation_steps divided by as much for the same window"
    ]


def slow_settings(capability: tuple[int, int], mixed_precision: str, dtype: str, experts: bool) -> list[str]:
    """capability: the GPU's compute capability, (8, 0) for Ampere. dtype: of the weights. experts: whether the model has
    some."""
    half = "bf16" if capability >= (8, 0) else "fp16"
    if mixed_precision == "no" and dtype == "float32":
        config = " or --config_file accelerate_configs/single_gpu.yaml" if half == "bf16" else ""
        return [
            f"precision: float32 on a GPU, several times slower than {half}, and without flash attention: accelerate launch "
            f"--mixed_precision {half}{config}"
        ]
    if mixed_precision == "bf16" and half == "fp16":
        return ["precision: this GPU has no units for bf16: accelerate launch --mixed_precision fp16"]
    if mixed_precision != "no" and dtype == "float32" and experts:
        return [
            "precision: transformers computes experts in float32 under autocast; with --dtype bfloat16 they are in bf16, "
            "at the price of small updates"
        ]
    return []
