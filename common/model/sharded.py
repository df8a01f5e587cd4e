"""The weights of a model that FSDP2 or ZeRO-3 shards, gathered: to be written, and to sample."""

from collections.abc import Iterator
import contextlib

from torch import nn


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Context in which each process holds all weights that FSDP2 or DeepSpeed's ZeRO-3 shards, and may call
    the language model on its own.

    All processes enter it together, and each needs memory for the whole model. Changes to the weights are
    lost.
    """
    from torch.distributed.fsdp import FSDPModule

    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    zero = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    for part in parts:
        part.unshard()
    # Their hooks would reshard each block after its call, and would plan prefetching in the next backward
    # pass from these calls, whose number differs between processes.
    hooked = list(model.modules()) if zero else parts
    removed = []
    for module in hooked:
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            removed.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        with _zero_gathered(zero):
            yield
    finally:
        for hooks, before in removed:
            hooks.update(before)
        for part in parts:
            part.reshard()


def _zero_gathered(parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager:
    if not parameters:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)
