"""The loss head at a large vocabulary: temporary memory and time of loss and gradients, ours beside full
logits and TRL.

    python benchmarks/head.py [--rounds 3] [--vocabulary 150000] [--tokens 4096] [--hidden 256]

Each measurement is a fresh process: hidden states (T, D) -> LM head -> mean cross-entropy -> gradients of the
hidden states and of the weight. Temporary memory is the peak of the resident memory above what is there
before, with room for both gradients made and touched already.
"""

import json
import statistics
import subprocess
import sys
from typing import Any

from compare import HERE, ROOT, TOLERANCE, WORK, ratios, save, shown, spread

SIDES = (
    "ours",
    "ours, recomputed (DPO, GRPO)",
    "TRL, chunked log-probabilities",
    "full logits",
    "torch linear_cross_entropy",
)

TRL_CHUNK = 32768  # as in its trainers


def sides(V: int, T: int, D: int) -> tuple[dict, Any, Any]:
    """Each side as a function to the loss, and the hidden states and the weight that it has gradients for."""
    from common.model.lm_head import log_probs, weighted_nll
    import torch
    import torch.nn.functional as F
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=D, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=T, tie_word_embeddings=False, eos_token_id=1,
    )  # fmt: skip
    lm = transformers.AutoModelForCausalLM.from_config(config)
    weight = lm.lm_head.weight
    hidden, tokens = torch.randn(T, D).requires_grad_(), torch.randint(V, (T,))

    weights = torch.full((T,), 1.0 / T)

    def ours() -> torch.Tensor:
        """As train_sft.py and train_pretrain.py have it: the weights of the tokens are known."""
        return weighted_nll(lm, hidden, tokens, weights)[0]

    def recomputed() -> torch.Tensor:
        """As train_dpo.py has it: log-probabilities, whose weights show in the backward pass only."""
        return -log_probs(lm, hidden, tokens)[0].mean()

    def trl() -> torch.Tensor:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction

        return -ChunkedLogProbFunction.apply(hidden, weight, None, tokens, 1.0, TRL_CHUNK, None, 1.0, ())[
            0
        ].mean()

    def full() -> torch.Tensor:
        return F.cross_entropy(hidden @ weight.T, tokens)

    def native() -> torch.Tensor:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=256)  # its own choice is slow on CPUs
        return F.linear_cross_entropy(hidden, weight, tokens, options=options)

    return dict(zip(SIDES, (ours, recomputed, trl, full, native), strict=True)), hidden, weight


def measure(side: str, V: int, T: int, D: int) -> dict:
    """In this process."""
    import ctypes
    import time

    sys.path.insert(0, str(ROOT))
    from clock import reset_peak, resident
    import torch

    # what is imported and started at the first call is no temporary memory
    sides(4096, 1024, 64)[0][side]().backward()
    functions, hidden, weight = sides(V, T, D)
    hidden.grad, weight.grad = torch.empty_like(hidden).fill_(0.0), torch.empty_like(weight).fill_(0.0)
    ctypes.CDLL(None).malloc_trim(0)  # what the heap has kept would hide new memory
    before = resident()
    reset_peak()
    wall, cpu = time.perf_counter(), time.process_time()
    loss = functions[side]()
    loss.backward()
    return {
        "loss": loss.item(),
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "temporary_mib": resident("VmHWM") - before,
        "grad_norm": weight.grad.norm().item(),
    }


def main() -> None:
    import argparse

    import compare

    if len(sys.argv) > 2 and sys.argv[1] == "--measure":
        side, V, T, D = sys.argv[2:]
        print("RESULT", json.dumps(measure(side, int(V), int(T), int(D))))
        return
    parser = argparse.ArgumentParser(add_help=False)
    for name, default in (("vocabulary", 150_000), ("tokens", 4096), ("hidden", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    size, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    args = compare.arguments(__doc__)
    WORK.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict]] = {side: [] for side in SIDES}
    for turn in range(args.rounds):
        for side in SIDES:
            words = [
                str(HERE / "head.py"),
                "--measure",
                side,
                *map(str, (size.vocabulary, size.tokens, size.hidden)),
            ]
            run = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
            if "RESULT" not in run.stdout:
                if turn == 0:
                    print(f"{side}: left out: {run.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                continue
            found[side].append(json.loads(run.stdout.split("RESULT")[1]))
            print(f"    round {turn + 1}: {side}: {found[side][-1]}", file=sys.stderr, flush=True)
    title = f"loss head, V = {size.vocabulary:,}, T = {size.tokens:,}, D = {size.hidden}"
    table = {"title": title, "rounds": args.rounds, "sides": {}}
    lines = [f"**{title}**, medians of {args.rounds} alternating rounds, loss and gradients", ""]
    lines += [
        "| side | temporary memory | ours needs | time | ours takes | by CPU time | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    mine = found["ours"]
    for side, rows in found.items():
        if not rows:
            continue
        entry = {key: spread([row[key] for row in rows]) for key in ("temporary_mib", "wall", "cpu", "loss")}
        if abs(entry["loss"]["median"] - mine[0]["loss"]) > TOLERANCE:
            raise SystemExit(f"{side}: loss {entry['loss']['median']}, ours {mine[0]['loss']}")
        cells = [
            side,
            f"{entry['temporary_mib']['median']:,.0f} MiB",
            "",
            f"{entry['wall']['median']:.1f} s",
            "",
            "",
        ]
        if side != "ours":
            memory = [row["temporary_mib"] for row in rows]
            entry["memory"] = statistics.median(memory) / statistics.median(
                row["temporary_mib"] for row in mine
            )
            entry["time"] = ratios([row["wall"] for row in mine], [row["wall"] for row in rows])
            entry["time_cpu"] = ratios([row["cpu"] for row in mine], [row["cpu"] for row in rows])
            cells[2], cells[4] = f"{entry['memory']:.1f}× less", shown(entry["time"])
            cells[5] = f"{entry['time_cpu']['median']:.2f}×"
        lines.append("| " + " | ".join([*cells, f"{entry['loss']['median']:.5f}"]) + " |")
        table["sides"][side] = entry
    save("head", [table | {"markdown": "\n".join(lines) + "\n"}])


if __name__ == "__main__":
    main()
