"""What the sections of gpu.py share: the device, the sizes, how something is measured, and random rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import json
import math
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
from common.data import Example, Sequence, whole  # noqa: E402
from common.memory import empty_caches  # noqa: E402
from common.model import make_optimizer  # noqa: E402
from common.run.parts.mfu import peak_flops  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
import transformers  # noqa: E402

GIB, ROUNDS = 2**30, 3
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.04e12}  # bytes/s, data sheets
LLAMA = {"max_position_embeddings": 32768, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
QWEN = LLAMA | {"tie_word_embeddings": True}
FULL = {
    "pretrain": {  # name: config, rows of a micro-batch
        "124M": (transformers.LlamaConfig, LLAMA | {"vocab_size": 50304, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12, "tie_word_embeddings": True}, 32),
        "1.1B": (transformers.LlamaConfig, LLAMA | {"vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": True}, 8),
    },
    "chat": QWEN | {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "sequence": 2048, "longest": 2048, "rows": 8, "pairs": 8, "seconds": 2.0,
    "groups": (8, 32), "G": 8, "prompt": (100, 300), "new": 256,
    # Qwen 3, Qwen 3.5, GPT-2 (odd)
    "heads": [(16384, 1024, 151936), (16384, 1024, 248320), (16384, 1024, 50257)],
    "attention": 16384, "long row": 16384, "pack": (8192, 2), "trl": (24, 16),  # steps, chats
    "scripts": ("pretrain", "sft", "dpo", "grpo"), "steps": 40,
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
    "scripts": ("sft", "grpo"), "steps": 4,
}  # fmt: skip
Row = dict[str, Any]


class Bench:
    """The device, the sizes, and how something is measured."""

    def __init__(self, device: str, tiny: bool, file: Path):
        """file: a line of JSON for each row that is found."""
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.tiny, self.file, self.cuda = tiny, file, self.device.type == "cuda"
        self.sizes: dict[str, Any] = TINY if tiny else FULL
        self.name = torch.cuda.get_device_name(self.device) if self.cuda else "cpu"
        self.bandwidth = next((value for key, value in BANDWIDTH.items() if key in self.name), None)
        self.peak_flops = peak_flops(self.device)
        transformers.logging.set_verbosity_error()
        if tiny:
            torch.compiler.set_stance("force_eager")

    def facts(self) -> str:
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        return f"{self.name}, {versions}" + (f", CUDA {torch.version.cuda}" if self.cuda else "")

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def add(self, row: Row) -> None:
        print(
            "    "
            + ", ".join(f"{k} {v}" if k != "side" else f"{v}:" for k, v in row.items() if k != "section"),
            flush=True,
        )
        with self.file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")

    def seconds(self, work: Callable[[], Any], warm_up: int = 2, cycle: int = 1) -> float:
        """Of a call: the median of a few blocks of calls, which together take about sizes["seconds"].

        cycle: calls that differ (batches of other lengths), and come again; a block holds them all, equally
        often.
        """
        for _ in range(warm_up):
            work()
        self.wait()
        began = time.perf_counter()
        for _ in range(cycle):
            work()
        self.wait()
        once = time.perf_counter() - began
        calls = cycle * max(1, int(self.sizes["seconds"] / ROUNDS / once))
        found = []
        while len(found) < ROUNDS and not (found and sum(found) * calls > 2 * self.sizes["seconds"]):
            began = time.perf_counter()
            for _ in range(calls):
                work()
            self.wait()
            found.append((time.perf_counter() - began) / calls)
        return statistics.median(found)

    def kernels(self, title: str, work: Callable[[], Any], most: int = 10) -> None:
        """Rows of the longest kernels of one call, and of all together. Without a profiler the other figures
        stay."""
        section = f"longest kernels: {title}"
        activity, field = ProfilerActivity.CPU, "self_cpu_time_total"
        if self.cuda:
            activity, field = ProfilerActivity.CUDA, "self_device_time_total"
        try:
            with profile(activities=[activity]) as profiled:
                began = time.perf_counter()
                work()
                self.wait()
                wall = 1000 * (time.perf_counter() - began)
            spent = [
                (getattr(event, field) / 1000, event.count, event.key) for event in profiled.key_averages()
            ]
        except Exception as error:
            self.add({"section": section, "side": "all", "failed": shortly(error)})
            return
        whole = sum(ms for ms, *_ in spent)
        share = f"{whole / wall:.0%} of the wall time"
        self.add(
            {
                "section": section,
                "side": "all",
                "calls": sum(n for ms, n, _ in spent if ms),
                "ms": round(whole, 2),
                "share": share,
            }
        )
        for ms, calls, name in sorted(spent, reverse=True)[:most]:
            share = f"{ms / whole:.1%}" if whole else ""
            self.add(
                {"section": section, "side": name[:100], "calls": calls, "ms": round(ms, 2), "share": share}
            )

    @contextmanager
    def side(self, section: str, name: str) -> Iterator[Row]:
        """A row of the section's table; what fails is one line, and what it held is given back."""
        row: Row = {"section": section, "side": name}
        empty_caches(self.device)
        torch._dynamo.reset()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            retries = torch.cuda.memory_stats(self.device)["num_alloc_retries"]
        try:
            yield row
            if self.cuda:
                row.setdefault("peak GiB", round(torch.cuda.max_memory_allocated(self.device) / GIB, 2))
                row["reserved GiB"] = round(torch.cuda.max_memory_reserved(self.device) / GIB, 2)
                row["retries"] = torch.cuda.memory_stats(self.device)["num_alloc_retries"] - retries
        # whatever a kernel, a compiler or another version throws: the next side runs
        except Exception as error:
            row["failed"] = shortly(error)
            if os.environ.get("TRACEBACK"):
                traceback.print_exc()
        self.add(row)

    def language_model(self, config: Any, dtype: torch.dtype = torch.float32) -> Any:
        """The same random weights at every call."""
        torch.manual_seed(0)
        with self.device:
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)

    def chat_model(self, dtype: torch.dtype = torch.float32) -> Any:
        return self.language_model(transformers.Qwen3Config(**self.sizes["chat"]), dtype)

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16)


def shortly(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return make_optimizer(CommonArgs(learning_rate=1e-5), model)


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    """What follows the forward pass, on all sides."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# --- random rows, and what stands for the arithmetic of TRL: padded batches, log-probabilities of full logits


def lognormal(count: int, shortest: int, longest: int, seed: int) -> list[int]:
    """Lengths as chats have them, with a long tail: the median is an eighth of the longest."""
    lengths = np.random.default_rng(seed).lognormal(math.log(longest / 8), 0.8, count)
    return np.clip(lengths, shortest, longest).astype(int).tolist()


def chats(bench: Bench, count: int, seed: int = 0) -> list[Sequence]:
    """Of which the second half is trained."""
    draw, V = np.random.default_rng(seed), bench.sizes["chat"]["vocab_size"]
    found = [whole(draw.integers(2, V, n)) for n in lognormal(count, 20, bench.sizes["longest"], seed)]
    for chat in found:
        chat["loss_mask"][: len(chat["loss_mask"]) // 2] = 0
    return found


def pad(bench: Bench, rows: list[Any], filler: int) -> torch.Tensor:
    tensors = [torch.as_tensor(np.asarray(row), dtype=torch.long) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=filler).to(bench.device)


def labels_of(chat: Sequence) -> np.ndarray:
    labels = np.where(chat["loss_mask"] == 1, chat["input_ids"], -100)
    labels[0] = -100
    return labels


def pairs(bench: Bench, count: int, seed: int) -> list[Example]:
    draw, V = np.random.default_rng(seed), bench.sizes["chat"]["vocab_size"]
    longest = bench.sizes["longest"] // 2
    found = []
    for prompt, *answers in zip(
        *(lognormal(count, 10, longest, 3 * seed + i) for i in range(3)), strict=True
    ):
        start = draw.integers(2, V, prompt)
        ids = [np.concatenate([start, draw.integers(2, V, n)]) for n in answers]
        found.append(
            [{"input_ids": i, "loss_mask": (np.arange(len(i)) >= prompt).astype(np.uint8)} for i in ids]
        )
    return found


def selected(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(B, L, V), (B, L) -> (B, L): log-probabilities, row by row so that no second (B, L, V) is made."""
    rows = [row.log_softmax(-1).gather(-1, t[:, None])[:, 0] for row, t in zip(logits, tokens, strict=True)]
    return torch.stack(rows)


def padded_logps(bench: Bench, lm: Any, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L - 1) log-probabilities of the next tokens from full logits, and the mask of those that are
    trained."""
    ids, trained = (pad(bench, [s[name] for s in sequences], 0) for name in ("input_ids", "loss_mask"))
    mask = pad(bench, [np.ones(len(s["input_ids"])) for s in sequences], 0)
    logits = lm(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    return selected(logits, ids[:, 1:]).float(), trained[:, 1:].float()


def prompts_of(bench: Bench, groups: int) -> list[list[int]]:
    draw, G = np.random.default_rng(0), bench.sizes["G"]
    V = bench.sizes["chat"]["vocab_size"]
    return [
        row
        for n in draw.integers(*bench.sizes["prompt"], groups)
        for row in [draw.integers(2, V, n).tolist()] * G
    ]


def some_stops(bench: Bench) -> list[int]:
    """Stop tokens that end a completion of random weights after about half of the most tokens, on average."""
    V, new = bench.sizes["chat"]["vocab_size"], bench.sizes["new"]
    return list(range(2, 2 + max(1, 2 * V // new)))
