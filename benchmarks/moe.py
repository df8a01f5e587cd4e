"""Mixtures of experts: how even the load of the experts is, with the load-balancing loss and without.

    python benchmarks/moe.py [--steps 300] [--experts 8 32]

A tiny new mixture (2 layers of 64, experts of 32, 2 for each token) learns the embedded demo's text, in
windows of two micro-batches. Writes a table: over the last fifth of the steps the loss, the load of the
busiest expert of a layer (1: even; at most experts / 2), and the share of experts that got no token of a
window.
"""

import argparse
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile

ROOT = Path(__file__).resolve().parents[1]
MODEL = "--hidden_size 64 --num_layers 2 --num_experts_per_tok 2 --moe_intermediate_size 32".split()
RUN = "--config data/configs/pretrain.yaml --eval_steps 0 --logging_steps 10 --lr_scheduler_type constant".split()
RUN += "--per_device_train_batch_size 4 --gradient_accumulation_steps 2".split()


def measure(steps: int, experts: int, coefficient: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *RUN,
            *MODEL,
            "--num_experts",
            str(experts),
            "--max_steps",
            str(steps),
            "--output_dir",
            folder + "/run",
        ]
        command = [sys.executable, "train_pretrain.py", *words, "--router_aux_loss_coef", coefficient]
        subprocess.run(
            command,
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ,
        )
        rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "loss" in row and row["step"] > 0.8 * steps]
    names = ("loss", "moe/aux_loss", "moe/max_load", "moe/unused_experts")
    return {name: sum(row[name] for row in last) / len(last) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--coefficients", nargs="+", default=["0", "0.001", "0.01", "0.1"])
    args = parser.parse_args()
    print("| experts | --router_aux_loss_coef | loss | moe/aux_loss | busiest expert / even | unused |")
    print("|---|---|---|---|---|---|")
    for experts in args.experts:
        for coefficient in args.coefficients:
            found = measure(args.steps, experts, coefficient)
            shown = " | ".join(f"{found[name]:.3f}" for name in ("loss", "moe/aux_loss", "moe/max_load"))
            print(f"| {experts} | {coefficient} | {shown} | {found['moe/unused_experts']:.1%} |", flush=True)


if __name__ == "__main__":
    main()
