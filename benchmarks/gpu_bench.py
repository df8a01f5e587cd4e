"""What the sections of gpu.py share: the device, the sizes, and how something is measured."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import os
from pathlib import Path
import statistics
import sys
import time
import traceback
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from compare import ROOT

sys.path.insert(0, str(ROOT))

from common.args import CommonArgs  # noqa: E402
from common.memory import empty_caches, peak_flops  # noqa: E402
from common.model import make_optimizer  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

GIB = 2**30
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.04e12}  # bytes/s, data sheets
LLAMA = {"max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
QWEN = LLAMA | {"tie_word_embeddings": True}
FULL = {
    "pretrain": {  # name: config, rows of a micro-batch
        "124M": (transformers.LlamaConfig, LLAMA | {"vocab_size": 50304, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12, "tie_word_embeddings": True}, 32),
        "1.1B": (transformers.LlamaConfig, LLAMA | {"vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": True}, 8),
    },
    "chat": QWEN | {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "sequence": 2048, "longest": 2048, "rows": 8, "pairs": 8, "seconds": 2.0,
    "groups": (8, 32), "G": 8, "prompt": (100, 300), "new": 256,
    "heads": [(16384, 1024, 151936), (16384, 1024, 248320), (16384, 1024, 50257)],  # Qwen 3, Qwen 3.5, GPT-2 (odd)
    "attention": 16384, "long row": 16384, "pack": (8192, 2), "trl": (24, 16),  # steps, chats
}  # fmt: skip
SMALL = {
    "vocab_size": 600, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
TINY = {
    "pretrain": {"124M": (transformers.LlamaConfig, LLAMA | SMALL | {"tie_word_embeddings": True}, 2)},
    "chat": QWEN | SMALL | {"head_dim": 16},
    "sequence": 128, "longest": 128, "rows": 4, "pairs": 2, "seconds": 0.05,
    "groups": (2,), "G": 2, "prompt": (10, 20), "new": 8,
    "heads": [(512, 64, 2000), (512, 64, 3001)], "attention": 512, "long row": 512, "pack": (256, 2), "trl": (4, 4),
}  # fmt: skip
Row = dict[str, Any]


class TimeIsOver(BaseException):
    """Of a section. No Exception, which a compiler or a library would take for one of its own."""


class DeviceIsLost(BaseException):
    """After an illegal access every call fails: only another process can go on."""


class Bench:
    """The device, the sizes, and how something is measured."""

    def __init__(self, device: str, tiny: bool, rounds: int = 3, wheels: Path | None = None):
        """wheels: a folder with those of TRL."""
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.device, self.tiny, self.rounds, self.wheels = torch.device(device), tiny, rounds, wheels
        self.sizes: dict[str, Any] = TINY if tiny else FULL
        name = torch.cuda.get_device_name(self.device) if self.cuda else ""
        self.bandwidth = next((value for key, value in BANDWIDTH.items() if key in name), None)
        self.peak_flops = peak_flops(self.device)
        self.rows: list[Row] = []
        self.deadline = float("inf")  # of the section, by time.monotonic
        self.save: Callable[[], None] = lambda: None  # called after each side

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def check_device(self) -> None:
        """Raises DeviceIsLost."""
        try:
            self.wait()
        except Exception as error:
            raise DeviceIsLost(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}") from None

    def seconds(self, work: Callable[[], Any], warm_up: int = 2, cycle: int = 1) -> float:
        """Of a call: the median of a few blocks of calls, which together take about sizes["seconds"].

        cycle: calls that differ (batches of other lengths), and come again; a block holds them all, equally often.
        """
        for _ in range(warm_up):
            work()
        self.wait()
        began = time.perf_counter()
        for _ in range(cycle):
            work()
        self.wait()
        once = time.perf_counter() - began
        calls = cycle * max(1, int(self.sizes["seconds"] / self.rounds / once))
        found = []
        while len(found) < self.rounds and not (found and sum(found) * calls > 2 * self.sizes["seconds"]):
            began = time.perf_counter()
            for _ in range(calls):
                work()
            self.wait()
            found.append((time.perf_counter() - began) / calls)
        return statistics.median(found)

    @contextmanager
    def side(self, section: str, name: str) -> Iterator[Row]:
        """A row of the section's table; what fails is one line, and what it held is given back."""
        if time.monotonic() > self.deadline:
            raise TimeIsOver
        row: Row = {"section": section, "side": name}
        empty_caches(self.device)
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            yield row
        except Exception as error:  # whatever a kernel, a compiler or another version throws: the next side runs
            row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            print(f"    {name}: {row['failed']}", flush=True)
            if os.environ.get("TRACEBACK"):
                traceback.print_exc()
            self.rows.append(row)
            self.save()
            self.check_device()
            return
        else:
            if self.cuda:
                row.setdefault("peak GiB", round(torch.cuda.max_memory_allocated(self.device) / GIB, 2))
            print(
                f"    {name}: " + ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("section", "side")), flush=True
            )
        self.rows.append(row)
        self.save()

    def clear(self) -> None:
        """Between sections."""
        torch._dynamo.reset()
        empty_caches(self.device)

    def language_model(self, config: Any, dtype: torch.dtype = torch.float32) -> Any:
        """The same random weights at every call."""
        torch.manual_seed(0)
        with self.device:
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)

    def chat_model(self, dtype: torch.dtype = torch.float32) -> Any:
        return self.language_model(transformers.Qwen3Config(**self.sizes["chat"]), dtype)

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return make_optimizer(CommonArgs(learning_rate=1e-5), model)


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    """What follows the forward pass, on all sides."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
