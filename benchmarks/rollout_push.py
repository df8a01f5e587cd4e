"""What it costs to give servers the weights (--rollout_server): for models of several sizes, by a folder on
this disk.

    python benchmarks/rollout_push.py    # on the CPU, with the fake server of the tests

Each push is written, loaded, proved. The fake server loads as PyTorch does, and not as vLLM does: what it
takes is a lower bound. Medians of 5 pushes after one that does not count.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
from collections.abc import Callable
from pathlib import Path
import statistics
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accelerate import Accelerator
from common.args import CommonArgs
from common.model import create_model
from common.model.lora import add_lora
from common.sampling.vllm import RolloutServers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from tests.sampling.fake_vllm import FakeVLLM

SIZES = ((256, 4), (512, 6), (768, 8))  # hidden size, layers
PARTS = ("_write", "_load_all", "_score")


def timed(servers: RolloutServers, spent: dict[str, float]) -> None:
    """Note in `spent` how long the parts of a push take."""
    for name in PARTS:
        setattr(servers, name, watched(name, getattr(servers, name), spent))


def watched(name: str, function: Callable[..., Any], spent: dict[str, float]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        begun = time.perf_counter()
        result = function(*args)
        spent[name] = spent.get(name, 0.0) + time.perf_counter() - begun
        return result

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pushes", type=int, default=5)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    disable_progress_bar()
    print("| parameters | | folder, MB | written, s | loaded and probed, s | scored, s | in all, s |")
    print("|---|---|---|---|---|---|---|")
    for hidden, layers in SIZES:
        sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
        sizes |= {
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": hidden // 64,
            "vocab_size": 8192,
        }
        for lora in (False, True):
            ours, theirs = (LlamaConfig(**sizes, max_position_embeddings=512) for _ in range(2))
            model = create_model(ours, dtype="float32", seed=0)
            model.stop_ids = [0]
            parameters = sum(p.numel() for p in model.parameters())
            server = FakeVLLM(LlamaForCausalLM(theirs), max_model_len=512)
            if lora:
                model = add_lora(CommonArgs(lora_r=16), model)
            rows = []
            with server, tempfile.TemporaryDirectory() as folder:
                how = {"max_new_tokens": 64, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
                servers = RolloutServers([server.url], accelerator, model, folder, 512, **how)
                spent: dict[str, float] = {}
                timed(servers, spent)
                for step in range(args.pushes + 1):
                    spent.clear()
                    begun = time.perf_counter()
                    servers.sync(step)
                    rows.append([*(spent[name] for name in PARTS), time.perf_counter() - begun])
            medians = [statistics.median(column) for column in zip(*rows[1:], strict=True)]
            kind = "LoRA, merged" if lora else "all weights"
            print(f"| {parameters / 1e6:.0f} M | {kind} | {parameters * 4 / 1e6:.0f} |", end="")
            print("".join(f" {value:.2f} |" for value in medians), flush=True)


if __name__ == "__main__":
    main()
