"""The metric `mfu` of a run on a CUDA device: the share of the peak throughput that it reaches."""

import re

from accelerate import Accelerator
from common.collators import Windows
from common.model.experts import idle_parameters
from common.model.flat_model import FlatModel, base_lm, size_of_all_layers, sizes
from common.model.lm_head import weight_of
from common.sampling import RolloutSchedule
import numpy as np
import torch

# Dense bfloat16 operations per second (T4, V100: float16) from the data sheets, matched by words of the
# device name.
PEAK_FLOPS = {
    ("B200",): 2250e12,
    ("H200",): 989e12,
    ("H100", "PCIE"): 756e12,
    ("H100", "NVL"): 835e12,
    ("H100",): 989e12,
    ("A100",): 312e12,
    ("A10",): 125e12,
    ("L40S",): 362e12,
    ("L40",): 181e12,
    ("L4",): 121e12,
    ("T4",): 65e12,
    ("V100",): 125e12,
    ("4090",): 165e12,
    ("3090",): 71e12,
}


def mfu_per_token(model: FlatModel, T: float, accelerator: Accelerator) -> float | None:
    """What each token per second, over all processes, adds to `mfu`; None for an unknown GPU. T: as for
    flops_per_token."""
    peak = peak_flops(accelerator.device)
    return flops_per_token(model, T) / (peak * accelerator.num_processes) if peak else None


def typical_length(windows: Windows | RolloutSchedule) -> float:
    """Length of the sequence that a token is in, averaged over tokens: it determines the cost of attention
    per token. In GRPO, whose completions are still to be sampled, the greatest length."""
    if isinstance(windows, RolloutSchedule):
        return windows.longest
    files = windows.train.data.files
    sizes = np.concatenate([file.ends - file.starts for file in files]).astype(np.float64)
    sizes = np.minimum(sizes, windows.longest)
    return float((sizes**2).sum() / sizes.sum())


def peak_flops(device: torch.device) -> float | None:
    """Peak operations per second of the GPU, from the table, or None."""
    if device.type != "cuda":
        return None
    words = set(re.split(r"[\s-]+", torch.cuda.get_device_name(device).upper()))
    for name, peak in PEAK_FLOPS.items():
        if words.issuperset(name):
            return peak
    return None


def flops_per_token(model: FlatModel, T: float) -> float:
    """Floating-point operations to train on one token: `6 · N + 6 · L · H · Dh · T`.

    N: parameters in matrix products (all but the input embedding, including the LM head; of experts, those
    that a token uses); L layers, H heads of size Dh, T the length of a sequence. With causal attention a
    token attends to T/2 others on average.
    """
    config = model.config.get_text_config()
    lm = base_lm(model.lm)
    N = sum(sizes(model.parameters()))
    embedding = weight_of(lm.get_input_embeddings())
    if embedding is not weight_of(lm.get_output_embeddings()):
        N -= embedding.numel()
    N -= idle_parameters(lm)
    heads = size_of_all_layers(config, "num_attention_heads")
    hidden = size_of_all_layers(config, "hidden_size")
    # A state-space model has no heads.
    head_dim = size_of_all_layers(config, "head_dim") or hidden // max(heads, 1)
    layers = size_of_all_layers(config, "num_hidden_layers")
    return 6.0 * N + 6.0 * layers * (heads * head_dim) * T
