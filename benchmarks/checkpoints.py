"""What a checkpoint costs two CPU processes under FSDP2, as a model folder and in shards: time, memory, bytes
on the disk.

    python benchmarks/checkpoints.py  # 203M parameters, three rounds, ten minutes on two busy cores, 8 GiB of memory; prints a table

Saving, alternately of both kinds; then from each kind, by new processes, what a run does that goes on: the
model, Accelerate's `prepare`, the optimizer. Then the final model. Memory is what a process has of its own
(RssAnon: without pages of files, which the system may take back), the most while it lasts, above what it had
before; looked at every 2 ms.
"""

import argparse
import json
import os
from pathlib import Path
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
ENVIRON = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}
ENVIRON |= {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "FSDP_RESHARD_AFTER_FORWARD": "true"}
ENVIRON |= {"FSDP_OFFLOAD_PARAMS": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false", "HF_HUB_OFFLINE": "1"}


def own_memory() -> float:
    """MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) / 1024


class Watched:
    """Seconds, and the most memory above that at the start, MiB, of what is done inside."""

    def __init__(self, accelerator: Any):
        from common.memory import empty_caches

        empty_caches(accelerator.device)  # what was freed before would be used again
        accelerator.wait_for_everyone()

    def __enter__(self) -> "Watched":
        self.before = self.most = own_memory()
        self.begin, self.ended = time.perf_counter(), threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def look(self) -> None:
        while not self.ended.wait(0.002):
            self.most = max(self.most, own_memory())

    def __exit__(self, *error: Any) -> None:
        self.seconds = time.perf_counter() - self.begin
        self.ended.set()
        self.thread.join()
        self.mib = self.most - self.before


def work(task: str, kind: str, folder: Path, hidden: int, layers: int, rounds: int) -> None:
    """One of the processes: `save` makes a model and saves it, `load` goes on from what was saved."""
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, gather_object
    from common.args import CommonArgs
    from common.model import create_model, llama_config, load_model, load_tokenizer, make_optimizer
    from common.run.checkpoint import export, resume, save_checkpoint
    import torch
    import torch.distributed.checkpoint
    from torch.distributed.fsdp import StateDictType

    PartialState(cpu=True)
    # Accelerate takes FSDP for GPUs only
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator, tokenizer = Accelerator(), load_tokenizer(CommonArgs(), "data/base_model")
    rows, kinds = [], {"folder": StateDictType.FULL_STATE_DICT, "shards": StateDictType.SHARDED_STATE_DICT}

    def note(what: str, watched: Watched, kind: str = kind) -> None:
        rows.append(
            {"what": what, "kind": kind, "seconds": watched.seconds, "mib": gather_object([watched.mib])}
        )

    if task == "save":
        sizes = {
            "num_kv_heads": None,
            "intermediate_size": None,
            "max_position_embeddings": 512,
            "initializer_range": 0.02,
        }
        config = llama_config(
            tokenizer, hidden_size=hidden, num_layers=layers, num_heads=16, tie_word_embeddings=False, **sizes
        )
        model = create_model(config, seed=0)
    else:
        checkpoint = folder / kind / "checkpoint-1"
        with Watched(accelerator) as watched:
            model = load_model(CommonArgs(), accelerator, tokenizer, checkpoint)
            model, optimizer = accelerator.prepare(model.train(), make_optimizer(CommonArgs(), model))
            resume(accelerator, checkpoint, optimizer, model)
        note("go on", watched)
    if task == "save":
        count = sum(p.numel() for p in model.parameters())
        model, optimizer = accelerator.prepare(model.train(), make_optimizer(CommonArgs(), model))
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        optimizer.zero_grad()
        rows.append({"what": "parameters", "kind": "", "count": count})
        for _ in range(rounds):
            for kind in ("folder", "shards"):
                args = CommonArgs(output_dir=str(folder / kind))
                accelerator.state.fsdp_plugin.state_dict_type = kinds[kind]
                with Watched(accelerator) as watched:
                    assert save_checkpoint(args, accelerator, model, optimizer, tokenizer, 1, {}, None)
                note("save", watched, kind)
        for kind in ("folder", "shards"):
            args = CommonArgs(output_dir=str(folder / kind))
            accelerator.state.fsdp_plugin.state_dict_type = kinds[kind]
            with Watched(accelerator) as watched:
                export(args, accelerator, model, tokenizer)
            note("final model", watched, kind)
    if accelerator.is_main_process:
        with open(folder / "rows.jsonl", "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    accelerator.wait_for_everyone()
    sys.stdout.flush()
    os._exit(0)


def start(*words: object) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(port),
        __file__,
    ]
    subprocess.run([*command, *map(str, words)], check=True, env=os.environ | ENVIRON, cwd=ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden_size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)  # one of the processes
    args = parser.parse_args()
    sizes = ("--hidden_size", args.hidden_size, "--layers", args.layers, "--rounds", args.rounds)
    if args.work:
        work(args.work[0], args.work[1], Path(args.work[2]), args.hidden_size, args.layers, args.rounds)
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-"))
    try:
        start("--work", "save", "-", folder, *sizes)
        on_disk = {
            kind: sum(f.stat().st_size for f in (folder / kind / "checkpoint-1").rglob("*") if f.is_file())
            for kind in ("folder", "shards")
        }
        for _ in range(args.rounds):
            for kind in on_disk:
                start("--work", "load", kind, folder, *sizes)
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    finally:
        shutil.rmtree(folder)
    count = rows.pop(0)["count"]
    print(
        f"{count / 1e6:.0f}M parameters: {4 * count / 2**20:.0f} MiB of weights, {12 * count / 2**20:.0f} with the moments"
    )
    print("| | kind | seconds, each round | MiB above before, main process, the other |\n|---|---|---|---|")
    for what in ("save", "go on", "final model"):
        for kind, size in on_disk.items():
            mine = [row for row in rows if (row["what"], row["kind"]) == (what, kind)]
            seconds = ", ".join(f"{row['seconds']:.1f}" for row in mine)
            mib = ", ".join(f"{max(row['mib'][i] for row in mine):,.0f}" for i in range(2))
            said = f" ({size / 2**20:,.0f} MiB)" if what == "save" else ""
            print(f"| {what}{said} | {kind} | {seconds} | {mib} |")


if __name__ == "__main__":
    main()
