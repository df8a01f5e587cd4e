"""A frozen base in 4 or 8 bits under LoRA adapters (QLoRA: Dettmers et al. 2023, arXiv 2305.14314), using
bitsandbytes.

--load_in_4bit: NF4 in blocks of 64 with quantised scales; --load_in_8bit: int8 rows with a scale each. Only
weights are rounded, in the matrices between the embedding and the head: for each use, forward and backward,
they are dequantised to the run's dtype (autocast's under autocast), so that a token's result does not depend
on the others of its row. bitsandbytes' own layers do not promise that: the 8-bit one rounds the activations,
too, depending on all tokens of a call, and on a CPU the 4-bit one keeps coarser scales once it was evaluated.
"""

import copy
from types import MethodType
from typing import Any

from common.args import CommonArgs
from common.errors import UserError
from common.memory import compute_dtype
import torch
from torch import Tensor, nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def check_quantisation(args: CommonArgs, sharded: bool) -> None:
    """Raise UserError for quantisation flags that conflict, and if bitsandbytes is missing."""
    flag = "--load_in_4bit" if args.load_in_4bit else "--load_in_8bit"
    if args.load_in_4bit and args.load_in_8bit:
        raise UserError("--load_in_4bit and --load_in_8bit: one of them")
    if not args.use_peft:
        raise UserError(f"{flag}: quantised weights cannot be trained, adapters on them can: with --use_peft")
    # on a CPU its magnitudes come from bitsandbytes' wrong dequantisation
    if args.load_in_4bit and args.use_dora:
        raise UserError("--load_in_4bit: not with --use_dora (--load_in_8bit goes with it)")
    if sharded:
        raise UserError(
            f"{flag}: quantised weights are not sharded (FSDP, DeepSpeed): DDP, as in multi_gpu.yaml"
        )


def loading_options(args: CommonArgs, device: torch.device | None) -> dict[str, Any]:
    """What from_pretrained needs to quantise a model, on this device."""
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_8bit=True)
    if args.load_in_4bit:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
    return {"quantization_config": config, "device_map": {"": str(device or "cpu")}}


def use_plain_arithmetic(args: CommonArgs, lm: nn.Module) -> None:
    """Make the quantised layers of a model compute as this module's docstring says. Raises UserError if the
    flags found none, and for a config that promises quantised weights to files of plain ones."""
    layers = _quantised_layers(lm)
    for name, module in layers.items():
        if type(module.weight) is nn.Parameter:
            raise UserError(
                f"config.json has a quantization_config, and {name} of the files is plain: take out that entry"
            )
    # whose kernels read the weights directly
    unfit = not layers or lm.config.model_type in ("mamba", "falcon_mamba")
    if unfit and (args.load_in_4bit or args.load_in_8bit):
        raise UserError(
            f"--load_in_4bit, --load_in_8bit: {type(lm).__name__} has no layers that can be quantised here"
        )
    for module in layers.values():
        module.forward = MethodType(_forward, module)


def dequantised(weight: Tensor) -> Tensor:
    """The dequantised weight (out, in)."""
    if hasattr(weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        # on a CPU, rows that are not a multiple of a block come out wrong (0.50.2)
        state = copy.copy(weight.quant_state)
        blocks, rest = divmod(state.shape.numel(), state.blocksize)
        state.shape = torch.Size((1, state.shape.numel()) if rest else (blocks, state.blocksize))
        return dequantize_4bit(weight.data, state).view(weight.quant_state.shape)
    return weight.data.float() * (weight.SCB[:, None] / 127)


def dequantised_layers(lm: nn.Module) -> dict[str, Tensor]:
    """The dequantised weights of the quantised layers, by name."""
    weights = {}
    for name, module in _quantised_layers(lm).items():
        weights[f"{name}.weight"] = dequantised(module.weight).cpu()
    return weights


def _quantised_layers(lm: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in lm.named_modules()
        if type(module).__name__ in ("Linear4bit", "Linear8bitLt")
    }


def _forward(self: nn.Module, x: Tensor) -> Tensor:
    x = x.to(compute_dtype(x))
    # its kernels read 4 bits if there are few tokens
    if hasattr(self.weight, "quant_state") and x.device.type == "cuda":
        import bitsandbytes

        out = bitsandbytes.matmul_4bit(x, self.weight, quant_state=self.weight.quant_state)
    else:
        out = checkpoint(_linear, x, self.weight, use_reentrant=False, preserve_rng_state=False)
    return out if self.bias is None else out + self.bias.to(out.dtype)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T for x (..., in), run again in the backward pass: only the quantised weight is kept for it."""
    return F.linear(x, dequantised(weight).to(x.dtype))
