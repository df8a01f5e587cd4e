"""Between the host and a GPU, without the one waiting for the other."""

import numpy as np
import torch
from torch import Tensor


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on the device.

    From ordinary memory CUDA would copy with the host waiting until the device has done all that it was asked for before:
    hence pinned memory, which PyTorch keeps until the copy has been made.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Later:
    """A number on the device that is asked for later: by then it is on the host.

    Taking it from the device when it is wanted would wait for all that the device has been asked for in between.
    """

    def __init__(self, value: Tensor):
        """value: (); it may be changed afterwards."""
        self._value = value.to("cpu", non_blocking=value.is_cuda, copy=True)  # into pinned memory
        self._arrived = torch.cuda.Event() if value.is_cuda else None
        if self._arrived:
            self._arrived.record()

    def value(self) -> Tensor:
        """On the CPU."""
        if self._arrived:
            self._arrived.synchronize()
        return self._value
