"""The sections of gpu.py that measure a part alone: the loss head, and the ways of attention."""

from typing import Any

from gpu_bench import GIB, LLAMA, SMALL, Bench, lognormal

from common.model.attention import flat_attention, plan_flat_row  # isort: skip
from common.model.lm_head import log_probs, weighted_nll
import numpy as np
import torch
import torch.nn.functional as F
import transformers


def head(bench: Bench) -> None:
    for N, D, V in bench.sizes["heads"]:
        _head(bench, N, D, V)


def _head(bench: Bench, N: int, D: int, V: int) -> None:
    options = SMALL | {
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "head_dim": D // 4,
    }
    inner = bench.language_model(transformers.LlamaConfig(**LLAMA | options), torch.bfloat16)
    weight = inner.get_output_embeddings().weight
    torch.manual_seed(1)
    hidden = torch.randn(N, D, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
    tokens, weights = (
        torch.randint(V, (N,), device=bench.device),
        torch.full((N,), 1 / N, device=bench.device),
    )
    sides = {
        "ours, pretrain and SFT": lambda: weighted_nll(inner, hidden, tokens, weights)[0],
        "ours, DPO and GRPO": lambda: -(weights * log_probs(inner, hidden, tokens)[0]).sum(),
        "full logits": lambda: F.cross_entropy((hidden @ weight.T).float(), tokens),
    }
    if hasattr(F, "linear_cross_entropy"):
        sides["torch linear_cross_entropy"] = lambda: F.linear_cross_entropy(hidden, weight, tokens)
    for name, loss_of in sides.items():
        with bench.side("loss head", f"V = {V:,}, N = {N:,}, D = {D:,}: {name}") as row:
            before = torch.cuda.memory_allocated(bench.device) if bench.cuda else 0

            def step(loss_of=loss_of) -> torch.Tensor:
                hidden.grad = weight.grad = None
                loss = loss_of()
                loss.backward()
                return loss.detach()

            row.update({"loss": round(step().item(), 4), "ms": round(1000 * bench.seconds(step), 2)})
            row["TFLOP/s"] = round(6 * N * D * V / row["ms"] / 1e9, 1)
            if bench.cuda:
                row["temporary GiB"] = round(
                    (torch.cuda.max_memory_allocated(bench.device) - before) / GIB, 2
                )
            if name == "ours, pretrain and SFT":
                bench.kernels(f"loss head at V = {V:,}", step)
            hidden.grad = weight.grad = None


def attention(bench: Bench) -> None:
    total, H, Hkv, Dh = bench.sizes["attention"], 16, 8, 128
    lengths = lognormal(10**4, 20, bench.sizes["longest"], 0)
    lengths = lengths[: max(1, int(np.searchsorted(np.cumsum(lengths), total)))]
    T = sum(lengths)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, h, T, Dh, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
        for h in (H, Hkv, Hkv)
    )
    plan = plan_flat_row(lengths, bench.device)
    ragged, plan.ragged = plan.ragged, None
    module = torch.nn.Module()

    def dense() -> torch.Tensor:
        of = torch.repeat_interleave(
            torch.arange(len(lengths), device=bench.device), torch.tensor(lengths, device=bench.device)
        )
        mask = (of[:, None] == of[None]) & (
            torch.arange(T, device=bench.device)[:, None] >= torch.arange(T, device=bench.device)
        )
        # as transformers does: no kernel shares them
        keys, values = (x.repeat_interleave(H // Hkv, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, keys, values, mask[None, None]).transpose(1, 2)

    def flat(way: Any) -> torch.Tensor:
        plan.ragged = way
        return flat_attention(module, q, k, v, None, flat_row=plan)[0]

    sides = {"buckets through SDPA": lambda: flat(None), "dense block mask through SDPA": dense}
    if ragged is not None:
        sides = {"varlen kernel": lambda: flat(ragged)} | sides
    else:
        print(
            f"    no varlen kernel: it needs PyTorch 2.10 and a CUDA GPU of capability 8.0, this is {bench.device}"
        )
    # forward 2 products of n²/2, backward 2.5 times that
    flops = 3.5 * sum(2 * n * n * H * Dh for n in lengths)
    first = None
    for name, run in sides.items():
        with bench.side("attention", f"{len(lengths)} sequences, {T:,} tokens: {name}") as row:

            def step(run=run) -> torch.Tensor:
                q.grad = k.grad = v.grad = None
                out = run()
                out.backward(torch.ones_like(out))
                return out.detach()

            out, gradient = step().float(), k.grad.float()
            first = first if first is not None else (out, gradient)
            row["ms"] = round(1000 * bench.seconds(step), 2)
            row["useful TFLOP/s"] = round(flops / row["ms"] / 1e9, 2)
            differences = [
                float((a - b).abs().max() / b.abs().max())
                for a, b in zip((out, gradient), first, strict=True)
            ]
            row["differs from the first by"] = f"{differences[0]:.0e}, keys' gradient {differences[1]:.0e}"
