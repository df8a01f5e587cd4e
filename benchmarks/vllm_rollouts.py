"""Rollouts from the own sampler and from a vLLM server, on the same model: `python
benchmarks/vllm_rollouts.py MODEL URL`.

The server is started first, on the same folder (CONTRIBUTING.md has the commands for a CPU). Rollouts of both
take turns, with the same prompts and the same number of tokens (no stop tokens); each time is the median, and
the ratio that of the pairs. Then pushes: all weights are moved a little, the server gets them and proves it.
Where the server is on this machine, the CPU time of its processes is counted, and that of this one with it:
on a machine that others use, too, only that says something. Adds a line to vllm_rollouts.json.
"""

import argparse
from collections.abc import Callable
from functools import partial
import json
import os
from pathlib import Path
import statistics
import sys
import tempfile
import time
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accelerate import Accelerator
from common.model.wrap import wrap
from common.sampling import sample
from common.sampling.vllm import RolloutServers, ask
import psutil
import torch
from transformers import AutoModelForCausalLM

RESULTS = Path(__file__).with_name("vllm_rollouts.json")


def processes_at(url: str) -> list[psutil.Process]:
    """The processes of the server there, if it is on this machine."""
    port = urlsplit(url).port
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return [(process := psutil.Process(connection.pid)), *process.children(recursive=True)]
    return []


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return time.process_time() + sum(sum(process.cpu_times()[:2]) for process in processes)


def seconds(do: Callable[[], object]) -> float:
    begun = time.perf_counter()
    do()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder that the server was started with")
    parser.add_argument("server", help="http://host:port")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--prompt_length", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of a completion")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of the own sampler")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    model = wrap(AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32))
    accelerator = Accelerator()
    model = accelerator.prepare(model)
    model.stop_ids = []
    how = {"max_new_tokens": args.tokens, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    random = torch.Generator().manual_seed(0)
    vocabulary = model.lm.config.vocab_size
    prompts = [
        torch.randint(3, vocabulary, (args.prompt_length,), generator=random).tolist()
        for _ in range(args.prompts)
    ]
    prompts = [prompt for prompt in prompts for _ in range(args.generations)]
    times: dict[str, list[float]] = {"own": [], "vllm": [], "push": [], "write": []}
    cpu: dict[str, list[float]] = {"own": [], "vllm": []}
    engine = processes_at(args.server)
    with tempfile.TemporaryDirectory() as folder:
        longest = args.prompt_length + args.tokens
        servers = RolloutServers([args.server], accelerator, model, folder, longest, **how)
        write = servers._write
        servers._write = lambda path: times["write"].append(seconds(lambda: write(path)))
        servers.sync(0)
        difference = 0.0
        for repeat in range(args.repeats + 1):
            keys = [(repeat, 0, i) for i in range(len(prompts))]
            for name, draw in (("own", partial(sample, model, **how)), ("vllm", servers.sample)):
                before = cpu_seconds(engine)
                took = seconds(lambda draw=draw, keys=keys: draw(prompts, keys))
                if repeat:  # the first one warms up
                    times[name].append(took)
                    cpu[name].append(cpu_seconds(engine) - before)
        times["write"].clear()
        for step in range(1, args.repeats + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 1e-3 * parameter.std() * torch.randn_like(parameter)
            times["push"].append(seconds(lambda step=step: servers.sync(step)))
        for answer, ours in servers.probes.values():
            difference = max(abs(one - other) for one, other in zip(answer.logps, ours.tolist(), strict=True))

    tokens = len(prompts) * args.tokens
    middle = {name: statistics.median(values) for name, values in times.items()}
    ratios = sorted(own / server for own, server in zip(times["own"], times["vllm"], strict=True))
    result = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "completions": len(prompts),
        "tokens": args.tokens,
        "own_tokens_per_second": round(tokens / middle["own"]),
        "vllm_tokens_per_second": round(tokens / middle["vllm"]),
        "vllm_over_own": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "own_cpu_seconds": round(statistics.median(cpu["own"]), 3),
        "vllm_cpu_seconds": round(statistics.median(cpu["vllm"]), 3) if engine else None,
        "push_seconds": round(middle["push"], 3),
        "of_these_writing": round(middle["write"], 3),
        "probe_difference": difference,
        "cores": os.cpu_count(),
        "threads": args.threads,
        "load_average": round(os.getloadavg()[0], 1),
        "device": str(accelerator.device),
        "torch": torch.__version__,
        "vllm": ask(args.server, "/version")["version"],
    }
    print(json.dumps(result, indent=1))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    RESULTS.write_text(json.dumps([*results, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
