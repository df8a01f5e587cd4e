"""benchmarks/scale.py: bytes of a window by hand and as torch sends them, and its simulation on few chats."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.scale import KINDS, MODES, chats, over, rollout, traffic, traffic_table
from common.data.examples import pack
from common.data.order import Order, Shuffled

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "kind, gpus, micro_batches, gpu, machine",
    [
        ("ddp", 8, 1, 7.0, 0),  # 2 x 7/8 x 4 GB of gradients
        ("ddp", 8, 16, 7.0, 0),  # the last micro-batch alone synchronises
        ("ddp", 64, 1, 7.875, 7.875),  # 2 x 63/64 x 4
        ("fsdp2", 8, 1, 7.0, 0),  # 7/8 x (2 forward + 2 backward + 4 GB of gradients)
        ("fsdp2", 8, 4, 17.5, 0),  # 7/8 x (4 x 4 + 4)
        ("fsdp2 without reshard", 8, 1, 5.25, 0),  # 7/8 x (2 + 4)
        ("hsdp", 8, 1, 7.0, 0),  # one machine: as fsdp2
        ("hsdp", 64, 1, 7.875, 7.0),  # as in one machine, and 2 x 7/8 x the eighth of 4 GB that a GPU keeps
        ("hsdp", 64, 4, 18.375, 7.0),  # 17.5 + 0.875
        ("fsdp2", 1, 1, 0, 0),
        ("ddp", 1, 1, 0, 0),
    ],
)
def test_the_bytes_of_a_window_by_hand(kind, gpus, micro_batches, gpu, machine):
    """Of 1e9 parameters, in GB."""
    sent = traffic(1e9, gpus, kind, micro_batches)
    assert (sent["gpu"] / 1e9, sent["machine"] / 1e9) == (gpu, machine)


def test_the_page_has_the_table_that_the_function_gives():
    assert traffic_table() in (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="kind 'zero3': one of ddp"):
        traffic(1e9, 8, "zero3")


COUNT = """
import json, os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as inner

dist.init_process_group("gloo")
sent = 0.0

def count(owner, name, which, times):
    call = getattr(owner, name)
    def counted(*args, **kwargs):
        global sent
        named = {**dict(zip(which, args)), **kwargs}
        tensor, n = named[which[0]], dist.get_world_size(named["group"])
        sent += times * tensor.nbytes * (n - 1) / n
        return call(*args, **kwargs)
    setattr(owner, name, lambda *args, **kwargs: counted(*args, **kwargs))

# Called by keyword.
count(inner.DefaultAllGather, "__call__", ["output_tensor"], 1)
count(inner.DefaultReduceScatter, "__call__", ["input_tensor"], 1)
count(dist, "all_reduce", ["tensor"], 2)

def run(kind, micro_batches):
    global sent
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicas", "shards")) if kind == "hsdp" else None
    how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    for layer in model:
        fully_shard(layer, reshard_after_forward=kind != "fsdp2 without reshard", **how)
    fully_shard(model, **how)
    sent = 0.0
    for i in range(micro_batches):
        model.set_requires_gradient_sync(i == micro_batches - 1)
        model(torch.randn(4, 64, dtype=torch.bfloat16)).sum().backward()
    return sent / (4 * 64 * 64)

found = {f"{kind} {m}": run(kind, m) for kind in sys.argv[1].split(",") for m in (1, 4)}
if dist.get_rank() == 0:
    print("FOUND", json.dumps(found), flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_torch_sends_as_many_bytes(tmp_path, world):
    """What fully_shard hands to its collectives on CPU processes, machines of two: all of a window, counted."""
    inner = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    if not hasattr(inner, "DefaultAllGather"):
        pytest.skip("this torch calls its collectives elsewhere")
    (tmp_path / "count.py").write_text(COUNT)
    kinds = [kind for kind in KINDS[1:] if kind != "hsdp" or world > 2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    command += [str(tmp_path / "count.py"), ",".join(kinds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")] or [done.stderr[-2000:]]
    found = json.loads(line.removeprefix("FOUND"))
    assert found == {f"{kind} {m}": traffic(1, world, kind, m, machine=2)["gpu"] for kind in kinds for m in (1, 4)}


@pytest.mark.parametrize("mode", MODES)
def test_every_chat_once_and_no_process_with_much_more_than_the_others(tmp_path, mode):
    """The simulation on 3,000 chats: it asks the processes themselves for what they take of a window."""
    examples = chats(3000, tmp_path)
    data = pack(examples, 4096) if MODES[mode].get("packed") else examples
    train = Shuffled(data, Order(data.counts, seed=0))
    squares = examples.lengths.astype(float) ** 2
    if MODES[mode].get("packed"):
        squares = np.array([squares[pack].sum() for pack in data.members])
    for world in (2, 8):
        found = over(world, train, MODES[mode], squares)
        assert found["each_once"] and found["windows"] > 3
        assert found["tokens_max_over_mean"]["median"] < (3 if mode == "8 chats" else 1.15)
        assert found["cost_max_over_mean"]["worst"] >= 1
        assert found["tokens_max_over_mean"]["worst"] >= found["tokens_max_over_mean"]["median"] >= 1


def test_the_completions_of_a_rollout_grow_with_the_processes():
    few, more = rollout(1, each=2, tokens=100), rollout(4, each=2, tokens=100)
    assert more["completions"] == 4 * few["completions"] == 8 and more["MB"] == 4 * few["MB"]
