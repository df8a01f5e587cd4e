"""FSDP2 and DeepSpeed: their settings, and FSDP2's part of a checkpoint. Each process writes its shards;
any number of processes can load them.

The optimizer is always in shards. With `fsdp_state_dict_type: SHARDED_STATE_DICT` in the accelerate config so
are the weights: no process then gathers the model while it trains. Such a checkpoint becomes a model that
from_pretrained reads by `accelerate merge-weights checkpoint-500/pytorch_model_fsdp_0 checkpoint-500`.
"""

import copy
import dataclasses
from pathlib import Path
import platform
from typing import Any

from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from common.args import CommonArgs
from common.errors import UserError
from common.model.flat_model import FlatModel
from common.model.save import SHARDS
from common.processes import gather_lists, unsharded
import torch


def set_up(accelerator: Accelerator, args: CommonArgs) -> None:
    """Set what FSDP2 or DeepSpeed needs before a model exists."""
    if accelerator.is_fsdp2 and accelerator.mixed_precision != "no":
        # it would round loss weights, log-probabilities and gradient sums
        plugin = accelerator.state.fsdp_plugin
        plugin.mixed_precision_policy = dataclasses.replace(
            plugin.mixed_precision_policy,
            cast_forward_inputs=False,
            output_dtype=None,
            reduce_dtype=torch.float32,
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from transformers.integrations import unset_hf_deepspeed_config

        plugin = accelerator.state.deepspeed_plugin
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = args.per_device_train_batch_size
        # its engine's default is 1.0
        plugin.deepspeed_config["gradient_clipping"] = args.max_grad_norm or 1e6
        # With ZeRO-3, transformers would shard every model as it loads: also the reference, which no engine
        # gathers, and before `load_model` has checked it. So each process loads whole models, and `prepare`
        # shards the trained one.
        plugin.zero3_init_flag = False
        unset_hf_deepspeed_config()


def check_shared_disk(accelerator: Accelerator, output_dir: str) -> None:
    """Raise UserError on all processes if one does not see the folder that the main process has made."""
    if blind := gather_lists(accelerator, [] if Path(output_dir, ".lock").exists() else [platform.node()]):
        raise UserError(
            f"--output_dir {output_dir} is not there on {blind[0]}: all machines have to share its disk"
        )


def writes_shards(accelerator: Accelerator, model: FlatModel) -> bool:
    """Whether the weights go into shards. An adapter's never do: it is small."""
    from torch.distributed.fsdp import StateDictType

    sharded = accelerator.state.fsdp_plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT
    return sharded and not hasattr(model.lm, "peft_config")


def gather_extra(model: FlatModel) -> dict[str, torch.Tensor]:
    """The weights of `model.extra`, whole, by their names in the FlatModel. Called on every process."""
    weights = {}
    for name, w in model.extra.state_dict().items():
        weights[f"extra.{name}"] = unsharded(w)
    return weights


def save(accelerator: Accelerator, model: FlatModel, optimizer: Any, folder: Path) -> None:
    """Write the shards of the optimizer, and of the weights if they go there. Called on every process."""
    plugin = _sharding(accelerator)
    model.reshard()  # an evaluation leaves weights gathered
    if writes_shards(accelerator, model):
        save_fsdp_model(plugin, accelerator, model.lm, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)


def load(accelerator: Accelerator, model: FlatModel, optimizer: Any, checkpoint: Path) -> None:
    """Load what `save` has written. optimizer: None to load the weights alone. Called on every process."""
    plugin = _sharding(accelerator)
    if (checkpoint / SHARDS).is_dir():
        load_fsdp_model(plugin, accelerator, model.lm, checkpoint)
    if optimizer is not None:
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, checkpoint)


def _sharding(accelerator: Accelerator) -> Any:
    """Accelerate's settings of FSDP, for writing and reading shards."""
    plugin = copy.copy(accelerator.state.fsdp_plugin)
    plugin.state_dict_config = None  # that of the other kind
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    return plugin
