"""The sections of gpu.py that train on given rows: pretrain, SFT, DPO, and one long row.

Each measures ours beside what stands for TRL, on the same random weights and tokens: TRL's own settings,
written out with transformers (right-padded batches, the prompt in both answers of a pair, the loss over full
logits). Ours are the calls that train_*.py make.
"""

from collections.abc import Callable
from contextlib import nullcontext
import time
from typing import Any

from gpu_bench import Bench, Row, chats, labels_of, optimizer_of, pad, padded_logps, pairs, update

from common.collators import flat_batch  # isort: skip
from common.data import Example, Sequence, whole
from common.losses import dpo_loss, segment_sum
from common.memory import empty_caches, is_oom
from common.model import FlatModel
from common.model.load import compile_layers, enable_gradient_checkpointing
from common.model.wrap import wrap
from common.run.parts.mfu import flops_per_token
import numpy as np
import torch

# --- pretrain -----------------------------------------------------------------------------------------------


def pretrain(bench: Bench) -> None:
    T = bench.sizes["sequence"]
    for dtype, compiled in (
        (torch.float32, False),
        (torch.float32, True),
        (torch.bfloat16, True),
        (torch.bfloat16, False),
    ):
        for name, (kind, options, most) in bench.sizes["pretrain"].items():
            weights = "bf16 weights" if dtype == torch.bfloat16 else "bf16 autocast"
            with bench.side("pretrain", f"{name}, {weights}, {'compiled' if compiled else 'eager'}") as row:
                rows = most
                while True:
                    try:
                        row.update(_pretrain_step(bench, kind(**options), dtype, compiled, rows, T))
                        break
                    except Exception as error:
                        if not is_oom(error) or rows == 1:
                            raise
                    rows //= 2  # here the exception is gone, and what it held
                    empty_caches(bench.device)


def _pretrain_step(bench: Bench, config: Any, dtype: torch.dtype, compiled: bool, rows: int, T: int) -> Row:
    model = wrap(bench.language_model(config, dtype)).train()
    flops = flops_per_token(model, T)
    if compiled:
        compile_layers(model)
    optimizer = optimizer_of(model)
    ids = np.random.default_rng(0).integers(2, config.vocab_size, (rows, T))

    def step() -> torch.Tensor:
        batch = flat_batch([[whole(row)] for row in ids], bench.device)
        with bench.autocast() if dtype == torch.float32 else nullcontext():
            loss = model(batch, nll_weights=batch["loss_mask"] / (rows * (T - 1))).nll
        return update(model, optimizer, loss)

    began = time.perf_counter()
    first = step().item()
    compiling = time.perf_counter() - began
    rate = rows * T / bench.seconds(step)
    if dtype == torch.float32:
        bench.kernels(f"pretrain, {config.hidden_size} wide, {'compiled' if compiled else 'eager'}", step)
    found = {
        "rows": rows,
        "tokens/s": round(rate),
        "TFLOP/s": round(rate * flops / 1e12, 2),
        "first loss": round(first, 4),
    }
    if bench.peak_flops:
        found["MFU"] = f"{rate * flops / bench.peak_flops:.1%}"
    return found | {"first step s": round(compiling, 1), "padded": model.padded}


# --- SFT ----------------------------------------------------------------------------------------------------


def sft_sides(bench: Bench) -> dict[str, tuple[int, bool, Callable]]:
    """side: chats of a micro-batch, compiled, and (model, chats) -> loss."""

    def flat(model: FlatModel, some: list[Sequence]) -> torch.Tensor:
        batch = flat_batch([[chat] for chat in some], bench.device)
        return model(batch, nll_weights=batch["loss_mask"] / batch["loss_mask"].sum()).nll

    def padded(lm: Any, some: list[Sequence]) -> torch.Tensor:
        ids, labels = (
            pad(bench, [c["input_ids"] for c in some], 0),
            pad(bench, [labels_of(c) for c in some], -100),
        )
        mask = pad(bench, [np.ones(len(c["input_ids"])) for c in some], 0)
        return lm(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss

    few = bench.sizes["rows"]
    return {
        "ours": (few, False, flat),
        "padded, HF loss (as TRL by default)": (few, False, padded),
        "ours, twice the chats": (2 * few, False, flat),
        "padded, twice the chats": (2 * few, False, padded),
        "ours, compiled": (few, True, flat),
    }


def sft(bench: Bench) -> None:
    first: dict[int, float] = {}
    for name, (count, compiled, loss_of) in sft_sides(bench).items():
        with bench.side("SFT", name) as row:
            found = _sft_step(bench, name, count, compiled, loss_of)
            ours = first.setdefault(count, found["first loss"])
            row.update(found | {"from ours' loss": f"{abs(found['first loss'] - ours):.1e}"})


def sft_8k(bench: Bench) -> None:
    """Rows that are one sequence each, all of it trained, as prime-rl publishes it for Qwen3-0.6B at 8k
    (26.0k tokens/s, H100)."""
    T, rows = bench.sizes["pack"]
    ids = np.random.default_rng(0).integers(2, bench.sizes["chat"]["vocab_size"], (rows, T))
    sides = {"ours": (False, False), "ours, compiled": (True, False), "ours, recomputed": (False, True)}
    for name, (compiled, recomputed) in sides.items():
        with bench.side("SFT at 8k", f"{rows} rows of {T}: {name}") as row:
            model = wrap(bench.chat_model()).train()
            if recomputed:
                enable_gradient_checkpointing(model)
            if compiled:
                compile_layers(model)
            flops, optimizer = flops_per_token(model, T), optimizer_of(model)

            def step(model=model, optimizer=optimizer) -> torch.Tensor:
                batch = flat_batch([[whole(row)] for row in ids], bench.device)
                with bench.autocast():
                    loss = model(batch, nll_weights=batch["loss_mask"] / (rows * (T - 1))).nll
                return update(model, optimizer, loss)

            row["first loss"] = round(step().item(), 4)
            speed = rows * T / bench.seconds(step, warm_up=1)
            row["tokens/s"] = round(speed)
            if bench.peak_flops:
                row["MFU"] = f"{speed * flops / bench.peak_flops:.1%}"


def _sft_step(bench: Bench, name: str, count: int, compiled: bool, loss_of: Callable) -> Row:
    batches = [chats(bench, count, seed) for seed in range(8)]
    lm = bench.chat_model().train()
    model = wrap(lm).train() if name.startswith("ours") else lm
    if compiled:
        compile_layers(model)
    optimizer, turn = optimizer_of(model), iter(range(10**9))

    def step() -> torch.Tensor:
        with bench.autocast():
            loss = loss_of(model, batches[next(turn) % len(batches)])
        return update(model, optimizer, loss)

    loss = step().item()
    took = bench.seconds(step, warm_up=len(batches) - 1, cycle=len(batches))
    if name.startswith("ours"):
        bench.kernels(f"SFT, {name}", step)
    lengths = [[len(chat["input_ids"]) for chat in some] for some in batches]
    useful = sum(map(sum, lengths))
    row = {
        "chats": count,
        "useful tokens/s": round(useful / len(batches) / took),
        "first loss": round(loss, 5),
    }
    if name.startswith("padded"):
        row["useful"] = f"{useful / sum(len(some) * max(some) for some in lengths):.0%}"
    return row


# --- DPO ----------------------------------------------------------------------------------------------------


def dpo_sides(bench: Bench) -> dict[str, tuple[int, Callable]]:
    """side: pairs of a micro-batch, and (model, pairs) -> sums of the log-probabilities of all answers, two
    to a pair."""

    def ours(model: FlatModel, some: list[Example]) -> torch.Tensor:
        batch = flat_batch(some, bench.device)
        return segment_sum(model(batch).logps, batch["cu_seqlens"])

    def padded(lm: Any, some: list[Example]) -> torch.Tensor:
        order = [pair[0] for pair in some] + [pair[1] for pair in some]  # chosen, then rejected, in one batch
        logps, trained = padded_logps(bench, lm, order)
        return (logps * trained).sum(-1).view(2, -1).T.flatten()

    few = bench.sizes["pairs"]
    peer = "padded, prompt twice, full logits (as TRL by default)"
    return {"ours": (few, ours), peer: (few, padded), "ours, 4 times the pairs": (4 * few, ours)}


def dpo(bench: Bench) -> None:
    for name, (count, sums_of) in dpo_sides(bench).items():
        with bench.side("DPO", name) as row:
            row.update(_dpo_step(bench, name, count, sums_of))


def _dpo_step(bench: Bench, name: str, count: int, sums_of: Callable) -> Row:
    batches = [pairs(bench, count, seed) for seed in range(8)]
    model, frozen = bench.chat_model(), bench.chat_model().requires_grad_(False)
    if name.startswith("ours"):
        model, frozen = wrap(model), wrap(frozen)
    optimizer, turn = optimizer_of(model.train()), iter(range(10**9))
    first: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        some = batches[next(turn) % len(batches)]
        with bench.autocast():
            sums = sums_of(model, some)
            with torch.no_grad():
                reference = sums_of(frozen, some)
        first[1:] = []
        first.append(sums.detach())
        ones = torch.ones(len(some), device=bench.device)
        of = (sums[::2], sums[1::2], reference[::2], reference[1::2], ones, ones)
        return update(model, optimizer, dpo_loss(*of, beta=0.1)[0].mean())

    loss = step().item()
    took = bench.seconds(step, warm_up=len(batches) - 1, cycle=len(batches))
    row = {"pairs": count, "pairs/s": round(count / took, 2), "first loss": round(loss, 4)}
    return row | {"first logp of a chosen answer": round(first[0][0].item(), 1)}


# --- what recomputing costs, and what it gives back ---------------------------------------------------------


def long_row(bench: Bench) -> None:
    T = bench.sizes["long row"]
    for name in ("activations kept", "recomputed"):
        with bench.side("long row", name) as row:
            model = wrap(bench.chat_model()).train()
            if name == "recomputed":
                enable_gradient_checkpointing(model)
            row.update(_long_row(bench, model, T))


def _long_row(bench: Bench, model: FlatModel, T: int) -> Row:
    ids = np.random.default_rng(0).integers(2, bench.sizes["chat"]["vocab_size"], T)

    def step() -> torch.Tensor:
        batch = flat_batch([[whole(ids)]], bench.device)
        with bench.autocast():
            loss = model(batch, nll_weights=batch["loss_mask"] / (T - 1)).nll
        loss.backward()
        model.zero_grad()
        return loss.detach()

    loss = step().item()
    return {"tokens": T, "tokens/s": round(T / bench.seconds(step, warm_up=1)), "first loss": round(loss, 4)}
